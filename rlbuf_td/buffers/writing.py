"""Writes to a :class:`~rlbuf_td.ReplayBuffer`: checks, transforms, flow control, priorities and statistics."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.buffers.bound_write import BoundWrite, bind_write
from rlbuf_td.buffers.flow import inserting
from rlbuf_td.buffers.parts import Parts, with_trajectory_ids
from rlbuf_td.diagnostics.episode_stats import EpisodeStats
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.samplers.common import refuse_errors, refuse_taken
from rlbuf_td.samplers.n_step import joins_steps
from rlbuf_td.storages import PackedStorage, SchemaError, torchrl_parts
from rlbuf_td.storages.indexing import first_of_row, flat_rows, inner_dims, one_a_row
from rlbuf_td.storages.interrupts import held_back
from rlbuf_td.storages.keys import as_tuple, is_key
from rlbuf_td.storages.row_class import opened
from rlbuf_td.storages.schema import kind, refuse_index, reshaped, show_key, walk
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from rlbuf_td.storages.write_clock import SAMPLED_AT, skip_stale
from rlbuf_td.storages.writes import edit_entries, stacked, wrapping

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer


def write_in_turn(rb: ReplayBuffer, data: TensorDictBase, how: str, update_priority: bool, lanes: Any = None) -> Any:
    """Write the data as soon as flow control, if any, admits the write; to single ``lanes`` if they are given."""
    if type(data) is not TensorDict and not isinstance(data, TensorDictBase):
        return _write_opened(rb, data, how, update_priority, lanes)
    if rb.lane_key is not None:
        if lanes is None:
            data, lanes = _with_lanes(rb.lane_key, data)
            how = "extend"
        else:
            _refuse_other_lanes(rb.lane_key, data, lanes)
    if rb.flow is None and rb.episode_stats is None:
        return _write(rb, data, how, update_priority, lanes)
    rb._refuse_shut_down()
    write = _write if rb.episode_stats is None else partial(_write_and_count, rb.episode_stats)
    if rb.flow is None:
        return write(rb, data, how, update_priority, lanes)
    lead = _lead_dims(rb, how, lanes)
    rows = _transitions(data, how, lead).batch_size[:lead].numel()
    with inserting(rb, rb.flow, rows):
        return write(rb, data, how, update_priority, lanes)


def _with_lanes(lane_key: NestedKey, data: TensorDictBase) -> tuple[TensorDictBase, torch.Tensor]:
    """Return data as rows ``[n]``, with the lane of each row; each lane stays in time order."""
    lanes = data.get(lane_key, None)
    if lanes is None:
        raise KeyError(f"the data has no lanes {lane_key!r}, which the buffer's lane_key names")
    if lanes.numel() != data.numel():
        raise ValueError(f"the lanes {lane_key!r} have shape {[*lanes.shape]} for rows {[*data.shape]}: one per row")
    return reshaped(data, lambda rows: rows.reshape(-1)), lanes.reshape(-1)


def _refuse_other_lanes(lane_key: NestedKey, data: TensorDictBase, lanes: Any) -> None:
    """Raise a ValueError if the data names other lanes at ``lane_key`` than ``lanes``."""
    own = data.get(lane_key, None)
    given = lanes.detach().cpu().numpy() if isinstance(lanes, torch.Tensor) else np.asarray(lanes)
    if own is None or given.dtype.kind not in "iu" or given.size not in (1, own.numel()):
        return  # what is wrong with `lanes` is said elsewhere
    own = own.detach().cpu().numpy().reshape(-1)
    if (own != given.reshape(-1)).any():
        at = int((own != given.reshape(-1)).argmax())
        said = given.reshape(-1)[at if given.size > 1 else 0]
        raise ValueError(
            f"row {at} is of lane {own[at]} by {lane_key!r}, which the buffer's lane_key names, and of lane {said} by "
            "lanes= or rb.lane: leave out lanes="
        )


def _lead_dims(rb: ReplayBuffer, how: str, lanes: Any) -> int:
    """Return the number of batch dims of the data that index rows."""
    return 1 if lanes is not None else rb.storage.ndim - (how == "add")


def _write_opened(rb: ReplayBuffer, data: Any, how: str, update_priority: bool, lanes: Any) -> Any:
    """Write tensorclasses, tensors, or a list of steps as TensorDicts."""
    storage = (rb.parts or rb._initialize()).storage
    if not isinstance(storage, PackedStorage):
        refuse_other_data(how, data)
    if how == "extend" and isinstance(data, list):
        if not data:
            raise ValueError("extend needs at least one transition, got none")
        data = stacked(data, rb.dim_extend if lanes is None else 0)
    found, row_class = opened(data, _lead_dims(rb, how, lanes))
    if not isinstance(found, TensorDictBase):
        refuse_other_data(how, data)
    before = storage.row_class
    if row_class is not None or not isinstance(data, TensorDictBase):
        storage.take_class(row_class)
    try:
        return write_in_turn(rb, found, how, update_priority, lanes)
    except Exception:
        if not len(storage):
            storage.take_class(before)
        raise


def check_write_back(
    rb: ReplayBuffer, batch: TensorDictBase, keys: Any, sampled_at: int | None
) -> tuple[torch.Tensor, torch.Tensor, dict[tuple[str, ...], torch.Tensor]]:
    """Raise the errors of ``rb.write_back``; return the index, the sampling times and the entries, by row."""
    rb._refuse_shut_down()
    parts = rb.parts or rb._initialize()
    if not parts.is_packed:
        raise TypeError(f"write_back needs the clock of a PackedStorage, got a {type(rb.storage).__name__}")
    storage, dims = parts.storage, batch.ndim
    inner = inner_dims(storage, dims)
    index, stamp = batch.get("index", None), batch.get(SAMPLED_AT, None)
    if sampled_at is not None:
        stamp = torch.full(batch.batch_size, sampled_at, device=storage.device)
    if index is None or stamp is None:
        reason = (
            "its rows are not known, sample it with include_info=True"
            if index is None
            else "rows may have been replaced since it was sampled"
        )
        remedy = "" if index is None else ": read rb.storage.clock.now before, and pass it as sampled_at="
        raise KeyError(f"the batch has no {'index' if index is None else SAMPLED_AT!r}: {reason}{remedy}")
    names = _listed(keys)
    if parts.wrapper is not None and any(key[0] == "next" for key in names) and joins_steps(parts.wrapper):
        raise ValueError("cannot write back 'next' entries of n-step transitions: they belong to later rows")
    return index, stamp, {key: _entry_by_row(storage, batch, key, inner) for key in names}


def write_back_checked(
    rb: ReplayBuffer,
    batch: TensorDictBase,
    index: torch.Tensor,
    stamp: torch.Tensor,
    values: dict[tuple[str, ...], torch.Tensor],
) -> int:
    """Write the result of :func:`check_write_back`; return the number of rows written."""
    parts, storage, dims = rb.parts, rb.storage, batch.ndim
    inner = inner_dims(storage, dims)
    with storage.lock:
        flat = flat_rows(first_of_row(index, dims, inner), storage, storage.device)
        flat = skip_stale(flat, stamp, dims, storage)[0]
        kept = flat >= 0
        if "mask" in parts.report_keys and "mask" in batch.keys():
            kept &= first_of_row(batch["mask"], dims, inner).to(kept.device)
        flat = flat[kept]
        edit_entries(storage, flat, {key: value[kept] for key, value in values.items()})
        watched: set[Any] = set()
        for each in torchrl_parts.listeners_of(storage):
            if isinstance(each, TrajectoryIndex):
                watched |= {*each.end_keys(), each.traj_key}
        if watched & values.keys():
            torchrl_parts.count_change(storage)  # data derived from these entries is then computed again
    return len(flat)


def _listed(keys: Any) -> list[tuple[str, ...]]:
    with suppress(TypeError, ValueError):
        if found := [*map(as_tuple, [keys] if is_key(keys) else keys)]:
            return found
    raise ValueError(f"keys must be a key or a sequence of keys, such as ['state', ('next', 'state')], got {keys!r}")


def _entry_by_row(storage: Any, batch: TensorDictBase, key: tuple[str, ...], inner: int) -> torch.Tensor:
    """Return an entry of a batch, ``[B, ...]``, on the storage's device; raise a SchemaError if it does not fit."""
    layout, value = storage.layout, batch.get(key, None)
    leaf = None if layout is None or key not in layout.places else layout.leaves[layout.places[key]]
    if leaf is None or not isinstance(value, torch.Tensor):
        raise SchemaError(f"cannot write back {show_key(key)}: the {'rows have' if leaf is None else 'batch has'} none")
    rows = batch.ndim - inner
    value = value.detach().flatten(0, rows - 1) if rows else value.detach()[None]
    if (value.dtype, value.shape[1:]) != (leaf.dtype, leaf.shape):
        kinds = [kind(value.dtype, value.shape[1:]), kind(leaf.dtype, leaf.shape)]
        raise SchemaError("cannot write back {}: it is {} per row, the rows have {}".format(show_key(key), *kinds))
    return value.to(storage.device)


def _write_and_count(
    stats: EpisodeStats, rb: ReplayBuffer, data: TensorDictBase, how: str, update_priority: bool, lanes: Any
) -> Any:
    """Write the data, and record the untransformed data in the episode statistics."""
    if lanes is None and isinstance(rb.bound_write, BoundWrite):
        index = rb.bound_write.write(data, how == "add", counts=True)
        if index is not None:
            return index
    dims = _lead_dims(rb, how, lanes)
    if data.ndim < dims:
        return _write(rb, data, how, update_priority, lanes)
    time_dim = -1 if data.ndim > dims else None if how == "add" else rb.dim_extend if lanes is None else 0
    steps = stats.read(data, time_dim=time_dim)  # refuses malformed data before the write
    with rb._locked(), held_back:
        index = _write(rb, data, how, update_priority, lanes)
        stats.record(steps, None if lanes is None else index[:, 1])
    return index


def _write(rb: ReplayBuffer, data: TensorDictBase, how: str, update_priority: bool, lanes: Any) -> Any:
    bound = rb.bound_write
    index = _write_bound(bound, data, how, lanes) if isinstance(bound, BoundWrite) else None
    if index is not None:
        return index
    rb._refuse_shut_down()
    parts = rb.parts or rb._initialize()
    data = _transitions(data, how, _lead_dims(rb, how, lanes))
    if lanes is not None:
        if fault := fault_of_lanes(parts):
            raise TypeError(f"lanes= {fault}")
    elif parts.writes_generally:
        general = {} if how == "add" else {"update_priority": update_priority}
        return getattr(TensorDictReplayBuffer, how)(rb, data, **general)
    if len(parts.transforms):
        with _set_dispatch_td_nn_modules(True):
            data = rb.transform.inv(data)
        if data is None:  # a transform may hold back data
            return torch.zeros((0, parts.storage.ndim), dtype=torch.long, device="cpu")
        if isinstance(bound, BoundWrite):
            index = _write_bound(bound, data, how, lanes, transformed=True)
        if index is not None:
            return index
    return _write_rows(rb, parts, data, how, update_priority, lanes)


def _write_bound(bound: BoundWrite, data: TensorDictBase, how: str, lanes: Any, transformed: bool = False) -> Any:
    if lanes is None:
        return bound.write(data, how == "add", transformed)
    return bound.append(lanes, data, transformed)


def fault_of_lanes(parts: Parts) -> str:
    """Say why a buffer of these parts cannot write single lanes; "" if it can."""
    writer = parts.writer
    if not isinstance(parts.storage, PackedStorage) or parts.storage.ndim != 2:
        kind = f"{type(parts.storage).__name__} with ndim={parts.storage.ndim}"
        return f"needs a PackedStorage(max_size, ndim=2), this buffer has a {kind}"
    if not getattr(writer, "appends", False):
        return f"needs a RingWriter, this buffer has a {type(writer).__name__}"
    if writer.counts_generations:
        return "cannot be combined with track_generations, which counts whole time steps"
    return ""


@torch.compiler.disable(reason="writes change numbers that no graph knows, and bind compiled loops")
def _write_rows(
    rb: ReplayBuffer, parts: Parts, data: TensorDictBase, how: str, update_priority: bool, lanes: Any
) -> Any:
    lead = _lead_dims(rb, how, lanes)
    if rb._has_environment:
        data = with_trajectory_ids(rb, data, lead)
    rows, td_error = data, None
    if "index" in data.keys():
        refuse_index()
    if how == "extend" and lanes is None and (dim := rb.dim_extend) > 0:
        if data.ndim <= dim:
            raise SchemaError(
                f"extend takes batch size [E, T] (lanes, time) with ndim={parts.storage.ndim}, got {[*data.shape]}"
            )
        rows = reshaped(data, lambda data: data.transpose(dim, 0))
    if parts.is_packed and parts.storage.rows is None:
        _warn_of_long_rows(parts, rows, lead)
    if update_priority and parts.prioritized is not None:
        td_error = rows.get(rb.priority_key, None)
        if td_error is not None:
            td_error = one_a_row(td_error, lead, parts.prioritized.reduction, rows.ndim - lead)
            if backend_of(td_error) == "numba":
                refuse_errors(td_error)
    with parts.storage.lock if parts.is_packed else rb._locked(), held_back:
        parts = rb.parts  # under the lock: another thread may have replaced the sampler
        if not parts.is_packed:  # a PackedStorage refuses such data at its first write
            refuse_taken(parts.sampler, dict(rows.items()), parts.report_keys)
        try:
            write = getattr(parts.writer, how) if lanes is None else partial(parts.writer.append, lanes)
            index = write(rows)
        except SchemaError as error:
            if how == "extend" or data.ndim != parts.storage.ndim:
                raise
            raise SchemaError(f"{error.args[0]}. If these are several transitions, use extend") from None
        getattr(parts.sampler, how)(index)
        if td_error is not None and parts.prioritized is not None:
            parts.prioritized.update_priority(index, td_error, storage=parts.storage)
        if not isinstance(rb.bound_write, BoundWrite) or not rb.bound_write.holds():
            rb.bound_write = None if rb._service_shutdown else bind_write(rb, parts)
    return index


def _warn_of_long_rows(parts: Parts, rows: TensorDictBase, lead_dims: int) -> None:
    """Warn before the first write if its batch dims make each row hold several steps of an environment."""
    is_meant = "next" not in rows.keys() or getattr(parts.sampler, "draws_once", False)  # queues hold unrolls
    is_refused = any(isinstance(each, TrajectoryIndex) for each in torchrl_parts.listeners_of(parts.storage))
    if rows.ndim <= lead_dims or is_meant or is_refused:
        return
    ndim, shape = parts.storage.ndim, [*rows.shape]
    remedy = f"make the storage with ndim={ndim + 1}, or flatten the data" if lead_dims == ndim else "use extend"
    warnings.warn(
        f"with ndim={ndim}, data of batch size {shape} makes rows of {shape[lead_dims:]} steps each, and a sampled row "
        f"holds all its steps. For rows of one step, {remedy}. If these rows are meant, first call "
        "rb.storage.reserve(one_row)",
        stacklevel=6,
    )


def refuse_other_data(how: str, data: Any) -> NoReturn:
    remedy = wrapping(data, "[n]" if how == "extend" else "[]")
    raise TypeError(f"{how} takes a TensorDict, got {type(data).__name__}: {remedy}")


def _transitions(data: TensorDictBase, how: str, lead: int) -> TensorDictBase:
    """Check ``data``, and remove the entries that a prioritized sampler adds to batches."""
    if how == "extend" and not data.ndim:
        size = "[n]" if lead == 1 else "[E, T]"
        raise ValueError(f"extend takes several transitions, {size}, got {_without_batch_size(data, lead)}")
    keys = data.keys()  # only one of these two keys may be an entry of the user
    is_sampled = SAMPLED_AT in keys and "priority_weight" in keys
    return data.exclude("index", "priority_weight", SAMPLED_AT) if is_sampled else data


def _without_batch_size(data: TensorDictBase, lead: int) -> str:
    """Say what a TensorDict of batch size ``[]`` is, and what to do."""
    shapes = {(*value.shape[:lead],) for _, value in walk(data) if isinstance(value, torch.Tensor)}
    (common,) = shapes if len(shapes) == 1 else ((),)
    if len(common) < lead:
        return "a single one: use add"
    size = [*common]
    remedy = f"pass TensorDict(data, {size}), or, if it is a single one, use add"
    return f"a TensorDict without batch size, whose entries all have the leading dims {size}: {remedy}"
