"""Bounds of observations: of Gymnasium spaces, TorchRL specs, and environments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torchrl.data import Composite, TensorSpec, Unbounded

from rlbuf_td.diagnostics.doctor.record import Key
from rlbuf_td.envs.specs import OBSERVATION, entries

Interval = tuple[torch.Tensor, torch.Tensor]


def bounds_of(source: Any) -> dict[Key, Interval]:
    """Return the lowest and the highest value of each key of an observation, as far as it has bounds.

    Args:
        source: a Gymnasium space or environment, or a TorchRL spec of observations or environment.

    Raises:
        TypeError: it is nothing of the kind.

    Example:
        >>> from torchrl.data import Bounded, Composite, Unbounded
        >>> bounds_of(Composite(speed=Bounded(-1.0, 2.0, (1,)), place=Unbounded(3)))
        {('speed',): (tensor([-1.]), tensor([2.]))}
    """
    for name in ("observation_spec_unbatched", "single_observation_space", "observation_space"):
        if hasattr(type(source), name) or name in getattr(source, "__dict__", {}):
            source = getattr(source, name)
            break
    gymnasium = sys.modules.get("gymnasium")
    if isinstance(source, TensorSpec):
        named = source if isinstance(source, Composite) else Composite({OBSERVATION: source})
        return dict(_of_spec(named, ()))
    if gymnasium is not None and isinstance(source, gymnasium.Space):
        is_dict = isinstance(source, gymnasium.spaces.Dict)
        return dict(_of_space(source, () if is_dict else (OBSERVATION,)))
    raise TypeError(
        "space must be a Gymnasium space, a TorchRL spec of observations, or an environment of either, "
        f"got {type(source).__name__}"
    )


def _of_spec(spec: Any, path: Key) -> Iterator[tuple[Key, Interval]]:
    for name, part in spec.items():
        key = (*path, name)
        if isinstance(part, Composite):
            yield from _of_spec(part, key)
        elif part is None or isinstance(part, Unbounded):
            continue
        elif hasattr(part.space, "low"):
            yield key, (part.space.low.cpu(), part.space.high.cpu())
        elif isinstance(getattr(part.space, "n", None), int) and not part.dtype.is_floating_point:
            # An index below n; or one of n flags.
            high = 1 if part.shape and part.shape[-1] == part.space.n else part.space.n - 1
            yield key, _interval(0, high, part.shape)


def _of_space(space: Any, path: Key) -> Iterator[tuple[Key, Interval]]:
    spaces = sys.modules["gymnasium"].spaces
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for name, part in (entries(space.spaces) or {}).items():
            yield from _of_space(part, (*path, name))
    elif isinstance(space, spaces.Box):
        yield path, (torch.as_tensor(space.low), torch.as_tensor(space.high))
    elif isinstance(space, spaces.Discrete):
        yield path, _interval(int(space.start), int(space.start + space.n) - 1, ())
    elif isinstance(space, spaces.MultiDiscrete):
        start, n = torch.as_tensor(space.start), torch.as_tensor(space.nvec)
        yield path, (start, start + n - 1)
    elif isinstance(space, spaces.MultiBinary):
        yield path, _interval(0, 1, space.shape)


def _interval(low: int, high: int, shape: Any) -> Interval:
    return torch.full(shape, low), torch.full(shape, high)
