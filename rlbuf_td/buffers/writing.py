"""Methods of :class:`~rlbuf_td.ReplayBuffer` that write."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data.replay_buffers import Sampler, TensorDictReplayBuffer

from rlbuf_td.buffers.bound_write import BoundWrite, bind_write
from rlbuf_td.buffers.flow import inserting
from rlbuf_td.buffers.parts import Parts
from rlbuf_td.buffers.reserved import with_trajectory_ids
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.samplers.common import refuse_errors, refuse_taken
from rlbuf_td.samplers.n_step import joins_steps
from rlbuf_td.storages import SchemaError, torchrl_parts
from rlbuf_td.storages.indexing import coordinates, first_of_row, flat_rows, inner_dims, one_a_row, refuse_range
from rlbuf_td.storages.interrupts import held_back
from rlbuf_td.storages.schema import kind, reshaped, show_key
from rlbuf_td.storages.trajectory_index import TrajectoryIndex, as_tuple
from rlbuf_td.storages.write_clock import SAMPLED_AT, skip_stale
from rlbuf_td.storages.writes import edit_entries, is_key, wrapping


def add(rb: Any, data: TensorDictBase) -> int | torch.Tensor:
    """Write one transition, or with ``ndim > 1`` one time step of all environments; return its index.

    Raises:
        SchemaError: the data does not match the rows; nothing has changed.
        ValueError: a TD error in the data is NaN or infinite, or flow control can never admit the write.
        RuntimeError: the buffer has been shut down; nothing has changed.
    """
    return _write_in_turn(rb, data, "add", True)


def extend(rb: Any, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
    """Write ``[n]`` transitions in order (with ``ndim=2``: ``[E, T]``, as collectors return them); return their index.

    Args:
        tensordicts: the transitions.
        update_priority: whether TD errors in the data set the priorities, default ``True``.

    Raises:
        SchemaError: the data does not match the rows; nothing has changed.
        ValueError: there are no transitions, or a TD error is NaN or infinite; nothing has changed.
        RuntimeError: the buffer has been shut down; nothing has changed.

    Warns:
        UserWarning: (on the first write) a row holds several steps, because the data has more batch dims than ``ndim``.
    """
    return _write_in_turn(rb, tensordicts, "extend", update_priority is not False)


def refuse_shut_down(rb: Any) -> None:
    if rb.is_shut_down:
        raise RuntimeError(
            "the buffer has been shut down: rows can be read and dumped, but no longer written or edited"
        )


def _write_in_turn(rb: Any, data: TensorDictBase, how: str, update_priority: bool) -> Any:
    """Write the data as soon as flow control, if any, admits the write."""
    if rb.flow is None and rb.episode_stats is None:
        return _write(rb, data, how, update_priority)
    refuse_shut_down(rb)
    write = _write if rb.episode_stats is None else _write_and_count
    if rb.flow is None:
        return write(rb, data, how, update_priority)
    rows = _transitions(data, how).batch_size[: rb.storage.ndim - (how == "add")].numel()
    with inserting(rb, rows):
        return write(rb, data, how, update_priority)


def write_back(rb: Any, batch: TensorDictBase, keys: Any, *, sampled_at: int | None = None) -> int:
    """Write entries of a sampled batch (recurrent states, for example) to its rows; return the number of rows written.

    Rows that have been replaced since they were sampled are skipped, and so is the padding of sequences. If a row is in
    the batch several times, the last entry is stored. Age and priorities of the rows do not change. Any thread may call
    this method.

    Args:
        batch: a batch of this buffer, ``[B]`` or ``[B, ...]``, with its ``"index"``.
        keys: the keys of the entries, or one key. Rows and batch must have these keys with equal dtypes and shapes.
        sampled_at: the value of ``rb.storage.clock.now`` before the batch was sampled. Batches of prioritized
            samplers do not need this argument, because they have an entry ``"sampled_at"``.

    Raises:
        SchemaError: a key is missing in the rows or in the batch, or its dtypes or shapes differ; nothing has changed.
        KeyError: the batch has no index, or its sampling time is unknown; nothing has changed.
        ValueError: a key is in ``"next"``, and an :class:`NStepSampler` has joined several steps; nothing has changed.
        TypeError: the storage is not a :class:`PackedStorage`.
        RuntimeError: the buffer has been shut down.

    Cost: O(B * bytes of the entries), or O(B * row_bytes) with deduplicated entries; on CUDA, also a synchronisation.

    Example:
        >>> from rlbuf_td import ReplayBuffer
        >>> rb = ReplayBuffer(batch_size=2)
        >>> _ = rb.extend(TensorDict({"x": torch.zeros(1), "state": torch.zeros(1)}, [1]))
        >>> now = rb.storage.clock.now
        >>> batch = rb.sample()
        >>> batch["state"] += 1
        >>> rb.write_back(batch, ["state"], sampled_at=now), rb.storage["state"]
        (2, tensor([1.]))
    """
    return write_back_checked(rb, batch, *check_write_back(rb, batch, keys, sampled_at))


def check_write_back(
    rb: Any, batch: TensorDictBase, keys: Any, sampled_at: int | None
) -> tuple[torch.Tensor, torch.Tensor, dict[tuple[str, ...], torch.Tensor]]:
    """Raise the errors of :func:`write_back`; return the index, the sampling times and the entries, by row."""
    refuse_shut_down(rb)
    parts = rb.parts or rb.initialize()
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
    names = [as_tuple(key) for key in _listed(keys)]
    if parts.wrapper is not None and any(key[0] == "next" for key in names) and joins_steps(parts.wrapper):
        raise ValueError("cannot write back 'next' entries of n-step transitions: they belong to later rows")
    return index, stamp, {key: _entry_by_row(storage, batch, key, inner) for key in names}


def write_back_checked(
    rb: Any,
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
        age_key = getattr(getattr(parts.sampler, "innermost", parts.sampler), "age_key", None)
        watched: set[Any] = set() if age_key is None else {as_tuple(age_key)}
        for each in torchrl_parts.listeners_of(storage):
            if isinstance(each, TrajectoryIndex):
                watched |= {*each.end_keys(), each.traj_key}
        if watched & values.keys():
            torchrl_parts.count_change(storage)  # data derived from these entries is then computed again
    return len(flat)


def _listed(keys: Any) -> list[Any]:
    if is_key(keys):
        return [keys]
    if isinstance(keys, Iterable) and (found := [*keys]) and all(map(is_key, found)):
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


def _write_and_count(rb: Any, data: TensorDictBase, how: str, update_priority: bool) -> Any:
    """Write the data, and record the untransformed data in the episode statistics."""
    dims = rb.storage.ndim - (how == "add")
    if not isinstance(data, TensorDictBase) or data.ndim < dims:
        return _write(rb, data, how, update_priority)
    time_dim = -1 if data.ndim > dims else None if how == "add" else rb.dim_extend
    steps = rb.episode_stats.read(data, time_dim=time_dim)  # refuses malformed data before the write
    with rb.locked(), held_back:
        index = _write(rb, data, how, update_priority)
        rb.episode_stats.record(steps)
    return index


def _write(rb: Any, data: TensorDictBase, how: str, update_priority: bool) -> Any:
    bound = rb.bound_write
    index = bound.write(data, how == "add") if isinstance(bound, BoundWrite) else None
    if index is not None:
        return index
    refuse_shut_down(rb)
    parts = rb.parts or rb.initialize()
    data = _transitions(data, how)
    if parts.writes_generally:
        general = {} if how == "add" else {"update_priority": update_priority}
        return getattr(TensorDictReplayBuffer, how)(rb, data, **general)
    if len(parts.transforms):
        with _set_dispatch_td_nn_modules(True):
            data = rb.transform.inv(data)
        if data is None:  # a transform may hold back data
            return torch.zeros((0, parts.storage.ndim), dtype=torch.long, device="cpu")
        index = bound.write(data, how == "add", transformed=True) if isinstance(bound, BoundWrite) else None
        if index is not None:
            return index
    return _write_rows(rb, parts, data, how, update_priority)


def _write_rows(rb: Any, parts: Parts, data: TensorDictBase, how: str, update_priority: bool) -> Any:
    if rb.has_environment:
        data = with_trajectory_ids(rb, data, parts.storage.ndim - (how == "add"))
    rows, td_error = data, None
    if how == "extend" and (dim := rb.dim_extend) > 0:
        if data.ndim <= dim:
            raise SchemaError(
                f"extend takes batch size [E, T] (lanes, time) with ndim={parts.storage.ndim}, got {[*data.shape]}"
            )
        rows = reshaped(data, lambda data: data.transpose(dim, 0))
    if parts.is_packed and parts.storage.rows is None:
        _warn_of_long_rows(parts, rows, parts.storage.ndim - (how == "add"))
    if update_priority and parts.prioritized is not None:
        td_error = rows.get(rb.priority_key, None)
        if td_error is not None:
            dims = parts.storage.ndim - (how == "add")
            td_error = one_a_row(td_error, dims, parts.prioritized.reduction, rows.ndim - dims)
            if backend_of(td_error) == "numba":
                refuse_errors(td_error)
    with parts.storage.lock if parts.is_packed else rb.locked(), held_back:
        parts = rb.parts  # under the lock: another thread may have replaced the sampler
        if not parts.is_packed:  # a PackedStorage refuses such data at its first write
            refuse_taken(parts.sampler, dict(rows.items()), parts.report_keys)
        try:
            index = getattr(parts.writer, how)(rows)
        except SchemaError as error:
            if how == "extend" or data.ndim != parts.storage.ndim:
                raise
            raise SchemaError(f"{error.args[0]}. If these are several transitions, use extend") from None
        getattr(parts.sampler, how)(index)
        if td_error is not None and parts.prioritized is not None:
            parts.prioritized.update_priority(index, td_error, storage=parts.storage)
        if not isinstance(rb.bound_write, BoundWrite) or not rb.bound_write.holds():
            rb.bound_write = None if rb.is_shut_down else bind_write(rb, parts)
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


def _transitions(data: Any, how: str) -> TensorDictBase:
    """Check ``data``, and remove the entries that a prioritized sampler adds to batches."""
    if type(data) is not TensorDict and not isinstance(data, TensorDictBase):
        refuse_other_data(how, data)
    if how == "extend" and not data.ndim:
        raise ValueError("extend takes several transitions, [n], got a single one: use add")
    keys = data.keys()  # only one of these two keys may be an entry of the user
    return data.exclude("priority_weight", SAMPLED_AT) if SAMPLED_AT in keys and "priority_weight" in keys else data


def mark_update(rb: Any, index: Any) -> None:
    """Tell the sampler that the rows at ``index`` were written; writers call this method."""
    with rb.locked():
        TensorDictReplayBuffer.mark_update(rb, index)


def mark_range(rb: Any, start: int, count: int) -> None:
    """Tell the sampler that the rows ``start`` to ``start + count - 1`` were written; writers call this method.

    Raises:
        IndexError: a row has not been written; nothing has changed.
    """
    parts = rb.parts or rb.initialize()
    refuse_range(start, count, parts.storage)
    if not count:
        return
    if parts.prioritized is not None:
        parts.prioritized.priorities.enter_range(start, count, parts.storage)
    elif type(parts.sampler).mark_update is not Sampler.mark_update:
        index = coordinates(torch.arange(start, start + count, device=parts.storage.device), parts.storage)
        mark_update(rb, torch.stack(index, -1) if isinstance(index, tuple) else index)


def empty(rb: Any, empty_write_count: bool = True) -> None:
    """Remove all rows and priorities, and keep the schema; flow control starts again.

    Other buffers over the same storage then have no rows and priorities either, and write from the first row on.

    Args:
        empty_write_count: also set :attr:`write_count` to 0, default ``True``.
    """
    with rb.fully_locked(), held_back:
        TensorDictReplayBuffer.empty(rb, empty_write_count)
        for other in torchrl_parts.listeners_of(rb.storage):
            if isinstance(other, TensorDictReplayBuffer) and other is not rb:
                torchrl_parts.empty_part(other.sampler)
                torchrl_parts.restart_writer(other.writer)
        if rb.flow is not None:
            rb.flow.restart(0)
