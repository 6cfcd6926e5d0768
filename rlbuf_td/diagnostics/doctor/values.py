"""Findings about the values of entries, and the bounds of spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrl.data import Composite, Unbounded

from rlbuf_td.diagnostics.doctor.record import Key, Record, Scan
from rlbuf_td.diagnostics.doctor.report import Finding
from rlbuf_td.envs.specs import OBSERVATION, entries, is_space
from rlbuf_td.storages.schema import show_key

Interval = tuple[Tensor, Tensor]


def suspects_of(record: Record, bounds: Mapping[Key, Interval]) -> dict[tuple[str, Key], Callable[[Tensor], Tensor]]:
    """Return for each code and key, the function that tells which values are wrong."""
    suspects: dict[tuple[str, Key], Callable[[Tensor], Tensor]] = {}
    for key, value in record.kinds.items():
        root = key[1:] if key[0] == "next" else key
        is_input = key[-1] in ("reward", "action") or root in record.observed or "observation" in key
        if is_input and (value.is_floating_point() or value.is_complex()):
            suspects["not-finite", key] = lambda values: ~values.isfinite()
        if root in bounds and value.numel() == bounds[root][0].numel():
            low, high = (bound.reshape(value.shape[1:]).to(value.device) for bound in bounds[root])
            suspects["out-of-bounds", key] = partial(_is_outside, low, high)
    return suspects


def _is_outside(low: Tensor, high: Tensor, values: Tensor) -> Tensor:
    return ((values < low) | (values > high)) & values.isfinite()


def value_findings(record: Record, scan: Scan) -> Iterator[Finding]:
    for (code, key), where in scan.wrong.items():
        if bool(where.any()):
            yield record.finding(code, where, record.rows, key)
    if doubles := [key for key, value in record.kinds.items() if value.dtype is torch.float64]:
        one = doubles[0] if len(doubles) == 1 else None
        yield record.finding("float64", None, record.rows, one, keys=", ".join(map(show_key, doubles)))


def bounds_of(source: Any) -> dict[Key, Interval]:
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


def _intervals(space: Any, path: Key) -> Iterator[tuple[Key, Interval]]:
    parts = entries(dict(space.items()) if isinstance(space, Composite) else getattr(space, "spaces", None))
    box = getattr(space, "space", space)  # TorchRL's specs hold the limits in an attribute
    count = getattr(box, "nvec", getattr(box, "n", None))
    if parts is not None:
        for name, part in parts.items():
            yield from _intervals(part, (*path, name))
    elif hasattr(box, "low") and not isinstance(space, Unbounded):
        yield path, (torch.as_tensor(box.low, device="cpu"), torch.as_tensor(box.high, device="cpu"))
    elif count is not None and not getattr(space.dtype, "is_floating_point", False):
        low, count = (torch.as_tensor(x, device="cpu") for x in (getattr(space, "start", 0), count))
        # A discrete value is at most count - 1; a one-hot or binary space holds flags, at most 1.
        are_flags = space.shape and not hasattr(box, "nvec") and (count.ndim or space.shape[-1] == int(count))
        yield path, (low.expand(space.shape), (low + (1 if are_flags else count - 1)).expand(space.shape))
