"""Wrong values of entries, and the bounds of spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torchrl.data import Composite

from rlbuf_td.envs.specs import OBSERVATION, entries, is_space

Key: TypeAlias = tuple[str, ...]
Interval: TypeAlias = tuple[Tensor, Tensor]
Suspects: TypeAlias = dict[tuple[str, Key], Callable[[Tensor], Tensor]]


def suspects_of(kinds: Mapping[Key, Tensor], observed: Sequence[Key], bounds: Mapping[Key, Interval]) -> Suspects:
    """Return for each code and key, the function that tells which values are wrong, of rows like ``kinds``."""
    suspects: Suspects = {}
    for key, value in kinds.items():
        root = key[1:] if key[0] == "next" else key
        is_input = key[-1] in ("reward", "action") or root in observed or "observation" in key
        if is_input and (value.is_floating_point() or value.is_complex()):
            suspects["not-finite", key] = lambda values: ~values.isfinite()
        if root in bounds and value.numel() == bounds[root][0].numel():
            low, high = (bound.reshape(value.shape[1:]).to(value.device) for bound in bounds[root])
            suspects["out-of-bounds", key] = partial(_is_outside, low, high)
    return suspects


def _is_outside(low: Tensor, high: Tensor, values: Tensor) -> Tensor:
    return ((values < low) | (values > high)) & values.isfinite()


def bounds_of(source: object) -> dict[Key, Interval]:
    """Return the bounds of each key that has bounds; ``source`` is a space, spec or environment."""
    for name in ("observation_spec_unbatched", "single_observation_space", "observation_space"):
        if hasattr(type(source), name) or name in getattr(source, "__dict__", {}):
            source = getattr(source, name)
            break
    if not is_space(source):
        accepted = "a Gymnasium space, a TorchRL spec of observations, or an environment of either"
        raise TypeError(f"space must be {accepted}, got {type(source).__name__}")
    has_keys = isinstance(source, Composite) or isinstance(getattr(source, "spaces", None), Mapping)
    return dict(_intervals(source, () if has_keys else (OBSERVATION,)))


def _intervals(space: object, path: Key) -> Iterator[tuple[Key, Interval]]:
    parts = entries(dict(space.items()) if isinstance(space, Composite) else getattr(space, "spaces", None))
    box = getattr(space, "space", space)  # TorchRL's specs hold the limits in an attribute
    if parts is not None:
        for name, part in parts.items():
            yield from _intervals(part, (*path, name))
    elif hasattr(box, "low") and hasattr(box, "high"):
        yield path, (torch.as_tensor(box.low, device="cpu"), torch.as_tensor(box.high, device="cpu"))
