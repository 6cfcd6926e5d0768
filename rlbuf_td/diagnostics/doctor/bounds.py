"""The bounds that a space sets to observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchrl.data import Composite

from rlbuf_td.envs.specs import OBSERVATION, entries, is_space

Key: TypeAlias = tuple[str, ...]
# the attributes of environments that hold the space of one environment's observation
_SPACES = (
    "observation_spec_unbatched",
    "single_observation_space",
    "observation_space",
)


class Interval(NamedTuple):
    """The least and the greatest values of a Box."""

    low: Tensor
    high: Tensor

    def like(self, values: Tensor) -> Interval:
        """Return the bounds in the shape of ``[n, ...]`` values, on their device."""
        shape = values.shape[1:]
        low, high = (bound.reshape(shape).to(values.device) for bound in self)
        return Interval(low, high)

    def is_outside(self, values: Tensor) -> Tensor:
        """Return which values lie outside; NaN and infinity are another fault."""
        return ((values < self.low) | (values > self.high)) & values.isfinite()


def bounds_of(source: Any) -> dict[Key, Interval]:
    """Return the bounds of each key that has bounds; ``source`` is a space, spec,
    environment or its name."""
    if isinstance(source, str):
        return _bounds_of_name(source)
    for name in _SPACES:
        # `hasattr` of a SerialEnv that has not started would start it
        if hasattr(type(source), name) or name in getattr(source, "__dict__", {}):
            source = getattr(source, name)
            break
    if not is_space(source):
        raise TypeError(
            "space must be a Gymnasium space, a TorchRL spec of observations, an "
            f"environment, or a name of Gymnasium's, got {type(source).__name__}"
        )
    has_keys = isinstance(_parts_of(source), Mapping)
    return dict(_intervals(source, () if has_keys else (OBSERVATION,)))


def _bounds_of_name(name: str) -> dict[Key, Interval]:
    """Return the bounds of the Gymnasium environment with this name; ValueError if
    there is none."""
    import gymnasium

    try:
        with closing(gymnasium.make(name)) as env:
            return bounds_of(env)
    except gymnasium.error.Error as error:
        raise ValueError(str(error)) from error


def _parts_of(space: Any) -> Any:
    """Return the spaces in a Dict, Tuple or Composite; None for other spaces."""
    if isinstance(space, Composite):
        return dict(space.items())
    return getattr(space, "spaces", None)


def _intervals(space: Any, path: Key) -> Iterator[tuple[Key, Interval]]:
    """Yield the key and the bounds of each bounded part of a space or spec."""
    parts = entries(_parts_of(space))
    if parts is not None:
        for name, part in parts.items():
            yield from _intervals(part, (*path, name))
        return
    # TorchRL's specs hold the limits in an attribute
    box = getattr(space, "space", space)
    if hasattr(box, "low") and hasattr(box, "high"):
        low, high = (torch.as_tensor(x, device="cpu") for x in (box.low, box.high))
        yield path, Interval(low, high)
