"""Findings about the values of columns, and about draws and priorities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torchrl.data import Composite, Unbounded
from torchrl.data.replay_buffers import Sampler, Storage

from rlbuf_td.diagnostics.doctor.record import NAMED, Key, Record
from rlbuf_td.diagnostics.doctor.report import Finding
from rlbuf_td.diagnostics.health import ReplayCount, unwrapped
from rlbuf_td.envs.specs import OBSERVATION, entries, is_space
from rlbuf_td.samplers.common import reported_by, stored_names
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.storages.indexing import attached
from rlbuf_td.storages.schema import show_key

Interval = tuple[torch.Tensor, torch.Tensor]
_MANY = 1_000  # in fewer rows a column may be constant by chance
_SIDE = 8  # pixels along the smallest side of an image
_SAMPLED = 256  # time steps that decide whether a column is one-hot or an image
_DRAWS, _ROWS = 2.0, 100  # fewer draws per row, or fewer rows, are not significant


def value_findings(record: Record, bounds: Mapping[Key, Interval]) -> Iterator[Finding]:
    columns, obs = record.columns, record.observed
    floats = [key for key, x in columns.items() if x.dtype.is_floating_point or x.dtype.is_complex]
    sizes, named = {key: x.shape[2:].numel() for key, x in columns.items()}, ("reward", "action")
    checks = [("not-finite", key) for key in floats if key[-1] in named or _root(key) in obs or "observation" in key]
    boxed = [key for key in columns if _root(key) in bounds and sizes[key] == bounds[_root(key)][0].numel()]
    checks += [("out-of-bounds", key) for key in boxed]
    vectors = [key for key in floats if sizes[key] and columns[key].ndim < 4 and (key[-1] == "action" or key in obs)]
    varies = {key: torch.zeros(1, dtype=torch.bool, device="cpu") for key in vectors}
    flagged = {check: torch.zeros_like(record.cut) for check in checks}
    for block in record.blocks():
        for (code, key), where in flagged.items():
            values = columns[key][block]
            wrong = ~values.isfinite()
            if code == "out-of-bounds":
                low, high = (bound.reshape(values.shape[2:]).to(values.device) for bound in bounds[_root(key)])
                wrong = ((values < low) | (values > high)) & ~wrong
            where[block] = wrong.flatten(2).any(2)
        for key, varying in varies.items():
            if not varying.all():
                values = columns[key][block].flatten(2)
                varies[key] = varying | (values != columns[key][:1, :1].flatten(2)).flatten(0, 1).any(0).cpu()
    for (code, key), where in flagged.items():
        if bool(where.any()):
            yield record.finding(code, where, record.rows, key)
    for key, varying in varies.items():
        if record.rows >= _MANY and not varying.all() and not _is_one_hot(record, key):
            still = (~varying).nonzero()[:, 0].tolist()
            names = ", ".join(map(str, still[:NAMED])) + (f" ... ({len(still)})" if len(still) > NAMED else "")
            which = "all of it" if len(still) == len(varying) else f"column{'s' * (len(still) > 1)} {names}"
            value = columns[key][0, 0].flatten()[still[0]].item()
            yield record.finding("constant", None, record.rows, key, value=value, columns=which)
    if doubles := [key for key, column in columns.items() if column.dtype is torch.float64]:
        one = doubles[0] if len(doubles) == 1 else None
        yield record.finding("float64", None, record.rows, one, keys=", ".join(map(show_key, doubles)))
    for key, column in columns.items():
        if _is_image(record, key):
            dtype = str(column.dtype).removeprefix("torch.")
            yield record.finding("float-image", None, record.rows, key, dtype=dtype, size=column.dtype.itemsize)


def _root(key: Key) -> Key:
    return key[1:] if key[0] == "next" else key


def _is_one_hot(record: Record, key: Key) -> bool:
    """Whether a column holds only zeros and ones."""
    sample = record.columns[key][:: max(1, record.steps // _SAMPLED)]
    return bool(((sample == 0) | (sample == 1)).all())


def _is_image(record: Record, key: Key) -> bool:
    """Whether a column seems to hold images as floats: values in [0, 1] or whole numbers from 0 to 255."""
    column = record.columns[key]
    sides = [size for size in column.shape[2:] if size >= _SIDE]
    if not column.dtype.is_floating_point or column.ndim < 5 or len(sides) < 2:
        return False
    sample = column[:: max(1, record.steps // _SAMPLED)][:, :8].float()
    low, high = sample.amin(), sample.amax()
    whole = bool((sample == sample.round()).all())
    return bool(low >= 0) and (bool(high <= 1) or (whole and bool(high <= 255)))


def usage_findings(record: Record, source: Any, storage: Storage, sampler: Sampler | None) -> Iterator[Finding]:
    for name in sorted(stored_names(storage).keys() & (frozenset() if sampler is None else reported_by(sampler))):
        yield record.finding("entry-replaced", None, record.rows, (name,), sampler=type(sampler).__name__)
    replays, drawn = attached(storage, ReplayCount), None
    if replays is not None:
        counts = record.by_row(replays.counts()).cpu()
        drawn, mean = counts > 0, float(counts.double().mean())
        if record.rows >= _ROWS and mean >= _DRAWS and 2 * int(drawn.sum()) < record.rows:
            yield record.finding("never-sampled", ~drawn, record.rows, mean=mean)
    elif sampler is not None:
        record.skipped.append("rows that are never drawn: this buffer does not count draws")
    sampler = None if sampler is None else unwrapped(sampler)
    if isinstance(sampler, Prioritized):
        yield from _stale(record, source, sampler, drawn)


def _stale(record: Record, source: Any, sampler: Prioritized, drawn: torch.Tensor | None) -> Iterator[Finding]:
    rows = torch.arange(prod(record.shape), device=sampler.device)
    magnitude = sampler.priority(record.by_row(rows).flatten()).cpu()
    # TD errors are rarely equal to the last bit; rows that entered together have equal priorities.
    _, inverse, counts = magnitude.unique(return_inverse=True, return_counts=True)
    untouched = (counts > 1)[inverse].view(record.steps, record.lanes)
    if drawn is None:
        # Without counts, it is only known whether batches were drawn and no priority was ever updated.
        if getattr(source, "last_draw", None) is None or float(sampler.priorities.largest) >= 0:
            return
        drawn = torch.ones_like(untouched)
    stale, known = untouched & drawn, int(drawn.sum())
    if known >= _ROWS and 2 * int(stale.sum()) > known:
        yield record.finding("stale-priorities", stale, known)


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
