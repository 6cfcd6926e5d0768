"""Checks of the data that users write: transitions, lanes, and entries that are written
back."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase

from rlbuf_td.buffers.parts import Parts
from rlbuf_td.storages import PackedStorage, SchemaError
from rlbuf_td.storages.keys import as_tuple, is_key
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.schema import kind, reshaped, show_key
from rlbuf_td.storages.writes import wrapping


def with_lanes(
    lane_key: NestedKey, data: TensorDictBase
) -> tuple[TensorDictBase, torch.Tensor]:
    """Return data as rows ``[n]``, with the lane of each row; each lane stays in time
    order."""
    lanes = data.get(lane_key, None)
    if lanes is None:
        raise KeyError(
            f"the data has no lanes {lane_key!r}, which the buffer's lane_key names"
        )
    if lanes.numel() != data.numel():
        raise ValueError(
            f"the lanes {lane_key!r} have shape {[*lanes.shape]} for rows {[*data.shape]}: one per row"
        )
    return reshaped(data, lambda rows: rows.reshape(-1)), lanes.reshape(-1)


def refuse_other_lanes(
    lane_key: NestedKey, data: TensorDictBase, lanes: object
) -> None:
    """Raise a ValueError if the data names other lanes at ``lane_key`` than
    ``lanes``."""
    named = data.get(lane_key, None)
    passed = (
        lanes.detach().cpu().numpy()
        if isinstance(lanes, torch.Tensor)
        else np.asarray(lanes)
    )
    if (
        named is None
        or passed.dtype.kind not in "iu"
        or passed.size not in (1, named.numel())
    ):
        return  # what is wrong with `lanes` is said elsewhere
    named = named.detach().cpu().numpy().reshape(-1)
    if (named != passed.reshape(-1)).any():
        row = int((named != passed.reshape(-1)).argmax())
        said = passed.reshape(-1)[row if passed.size > 1 else 0]
        raise ValueError(
            f"row {row} is of lane {named[row]} by {lane_key!r}, which the buffer's lane_key names, and of lane "
            f"{said} by lanes= or rb.lane: leave out lanes="
        )


def refuse_other_stamps(stamps: object, shape: torch.Size) -> None:
    if not isinstance(stamps, torch.Tensor) or stamps.shape != shape:
        shown = [*stamps.shape] if isinstance(stamps, torch.Tensor) else stamps
        raise ValueError(
            f"sampled_at= takes the stamps of the batch's rows, {[*shape]}, got {shown}"
        )


def listed(keys: Any) -> list[tuple[str, ...]]:
    """Return one key, or a sequence of keys, as a list of tuples of names; ValueError
    if there is none."""
    with suppress(TypeError, ValueError):
        paths = [*map(as_tuple, [keys] if is_key(keys) else keys)]
        if paths:
            return paths
    raise ValueError(
        f"keys must be a key or a sequence of keys, such as ['state', ('next', 'state')], got {keys!r}"
    )


def entry_by_row(
    storage: PackedStorage, batch: TensorDictBase, key: tuple[str, ...], inner: int
) -> torch.Tensor:
    """Return an entry of a batch, ``[B, ...]``, on the storage's device; raise a
    SchemaError if it does not fit."""
    layout = storage.layout
    value = batch.get(key, None)
    leaf = None if layout is None else layout.leaf(key)
    if leaf is None or not isinstance(value, torch.Tensor):
        raise SchemaError(
            f"cannot write back {show_key(key)}: the {'rows have' if leaf is None else 'batch has'} none"
        )
    rows = batch.ndim - inner
    value = value.detach().flatten(0, rows - 1) if rows else value.detach()[None]
    if (value.dtype, value.shape[1:]) != (leaf.dtype, leaf.shape):
        kinds = [kind(value.dtype, value.shape[1:]), kind(leaf.dtype, leaf.shape)]
        raise SchemaError(
            "cannot write back {}: it is {} per row, the rows have {}".format(
                show_key(key), *kinds
            )
        )
    return value.to(storage.device)


def warn_of_long_rows(parts: Parts, rows: TensorDictBase, lead_dims: int) -> None:
    """Warn before the first write if its batch dims make each row hold several steps of
    an environment."""
    # queues hold unrolls
    is_meant = "next" not in rows.keys() or getattr(parts.sampler, "draws_once", False)
    is_refused = parts.storage.keys.are_used
    if rows.ndim <= lead_dims or is_meant or is_refused:
        return
    ndim = parts.storage.ndim
    shape = [*rows.shape]
    remedy = (
        f"make the storage with ndim={ndim + 1}, or flatten the data"
        if lead_dims == ndim
        else "use extend"
    )
    warnings.warn(
        f"with ndim={ndim}, data of batch size {shape} makes rows of {shape[lead_dims:]} steps each, and a sampled row "
        f"holds all its steps. For rows of one step, {remedy}. If these rows are meant, first call "
        "rb.storage.reserve(one_row)",
        stacklevel=6,
    )


def refuse_columns(*columns: object, buffer: str = "rb") -> NoReturn:
    """Raise a TypeError for a step that is given as positional arguments; ``buffer``
    names what has ``add_step``."""
    raise TypeError(
        f"add takes one TensorDict, got {len(columns)} arguments: add_step takes the columns of a step by name, "
        f"{buffer}.add_step(observation=..., action=..., reward=..., next_observation=..., terminated=..., "
        "truncated=...)"
    )


def refuse_other_data(how: str, data: object) -> NoReturn:
    """Raise a TypeError for data that is no TensorDict, with the way to wrap it."""
    remedy = wrapping(data, "[n]" if how == "extend" else "[]")
    raise TypeError(f"{how} takes a TensorDict, got {type(data).__name__}: {remedy}")


def without_report(data: TensorDictBase) -> TensorDictBase:
    """Remove the entries that a prioritized sampler adds to batches, if ``data`` is
    such a batch."""
    keys = data.keys()  # only one of these two keys may be an entry of the user
    is_sampled = SAMPLED_AT in keys and "priority_weight" in keys
    return data.exclude("index", "priority_weight", SAMPLED_AT) if is_sampled else data
