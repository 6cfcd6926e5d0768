"""How transitions get into a buffer: methods of :class:`~rlbuf_td.ReplayBuffer`."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torchrl.data.replay_buffers import Sampler, TensorDictReplayBuffer

from rlbuf_td.buffers.write_plan import make_write_plan
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.samplers.common import refuse_errors
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.indexing import coordinates, one_a_row
from rlbuf_td.storages.interrupts import held_back
from rlbuf_td.storages.schema import reshaped
from rlbuf_td.storages.write_clock import SAMPLED_AT


def add(rb: Any, data: TensorDictBase) -> int | torch.Tensor:
    """Write one transition (with ``ndim > 1``: one time step of all lanes); return its index.

    Raises:
        SchemaError: the data does not match the rows; nothing has changed.
        ValueError: a TD error in the data is NaN or infinite, or flow control could never let the write pass.
        RuntimeError: the buffer was shut down while the write waited.
    """
    plan = rb._write_plan
    index = None if plan is None else plan.write(data, True)
    return _write_in_turn(rb, data, "add", True) if index is None else index


def extend(rb: Any, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
    """Write ``[n]`` transitions in order (with ``ndim=2``: ``[E, T]``, as collectors give them); return their index.

    Args:
        tensordicts: the transitions.
        update_priority: ``False`` ignores TD errors in the data.

    Raises:
        SchemaError: the data does not match the rows; nothing has changed.
        ValueError: there is nothing to write, or a TD error is NaN or infinite; nothing has changed.
    """
    plan = rb._write_plan
    index = None if plan is None else plan.write(tensordicts, False)
    return _write_in_turn(rb, tensordicts, "extend", update_priority is not False) if index is None else index


def _write_in_turn(rb: Any, data: TensorDictBase, how: str, update_priority: bool) -> Any:
    """Write on the general path, once flow control lets the write pass."""
    write = _write if rb.episode_stats is None else _write_and_count
    if rb.flow is None:
        return write(rb, data, how, update_priority)
    rows = _transitions(data, how).batch_size[: rb.storage.ndim - (how == "add")].numel()
    with rb.flow.inserting(rows, rb._replay_lock):
        return write(rb, data, how, update_priority)


def _write_and_count(rb: Any, data: TensorDictBase, how: str, update_priority: bool) -> Any:
    """Write, and pass the data to the episode statistics, before any transform."""
    dims = rb.storage.ndim - (how == "add")
    if not isinstance(data, TensorDictBase) or data.ndim < dims:
        return _write(rb, data, how, update_priority)
    time_dim = -1 if data.ndim > dims else None if how == "add" else rb.dim_extend
    steps = rb.episode_stats.read(data, time_dim=time_dim)  # refuses malformed data before anything is written
    with rb._locked(), held_back:
        index = _write(rb, data, how, update_priority)
        rb.episode_stats.record(steps)
    return index


def _write(rb: Any, data: TensorDictBase, how: str, update_priority: bool) -> Any:
    parts = rb._parts or rb._initialize()
    data = _transitions(data, how)
    if parts.writes_generally:
        general = {} if how == "add" else {"update_priority": update_priority}
        return getattr(TensorDictReplayBuffer, how)(rb, data, **general)
    if len(parts.transforms):
        with _set_dispatch_td_nn_modules(True):
            data = rb.transform.inv(data)
        if data is None:  # a transform may keep data back
            return torch.zeros((0, parts.storage.ndim), dtype=torch.long, device="cpu")
    rows, td_error = data, None
    if how == "extend" and (dim := rb.dim_extend) > 0:
        if data.ndim <= dim:
            raise SchemaError(
                f"extend takes batch size [E, T] (lanes, time) with ndim={parts.storage.ndim}, got {[*data.shape]}"
            )
        rows = reshaped(data, lambda data: data.transpose(dim, 0))
    if update_priority and parts.prioritized is not None:
        td_error = rows.get(rb.priority_key, None)
        if td_error is not None:
            td_error = one_a_row(td_error, parts.storage.ndim - (how == "add"), parts.prioritized.reduction)
            if backend_of(td_error) == "numba":
                refuse_errors(td_error)
    with parts.storage.lock if parts.is_packed else rb._locked(), held_back:
        parts = rb._parts  # under the lock: another thread may have replaced the sampler
        try:
            index = getattr(parts.writer, how)(rows)
        except SchemaError as error:
            if how == "extend" or data.ndim != parts.storage.ndim:
                raise
            raise SchemaError(f"{error} If these are several transitions, use extend.") from None
        getattr(parts.sampler, how)(index)
        if td_error is not None and parts.prioritized is not None:
            parts.prioritized.update_priority(index, td_error, storage=parts.storage)
        if rb._write_plan is None or not rb._write_plan.holds():
            rb._write_plan = make_write_plan(rb, parts)
    return index


def _transitions(data: Any, how: str) -> TensorDictBase:
    """Return the transitions that were given, without what a prioritized sampler reported of a sampled batch."""
    if type(data) is not TensorDict and not isinstance(data, TensorDictBase):
        raise TypeError(f"{how} takes a TensorDict, got {type(data).__name__}")
    if how == "extend" and not data.ndim:
        raise ValueError("extend takes several transitions, [n], got a single one: use add")
    keys = data.keys()  # a key of the user's may have one of these names
    return data.exclude("priority_weight", SAMPLED_AT) if SAMPLED_AT in keys and "priority_weight" in keys else data


def mark_update(rb: Any, index: Any) -> None:
    """Tell the sampler that rows have been written; writers call it."""
    with rb._locked():
        TensorDictReplayBuffer.mark_update(rb, index)


def mark_range(rb: Any, start: int, count: int) -> None:
    """Tell the sampler that ``count`` flat rows from ``start`` on have been written; writers call it."""
    parts = rb._parts or rb._initialize()
    if parts.prioritized is not None:
        parts.prioritized.priorities.enter_range(start, count, parts.storage)
    elif type(parts.sampler).mark_update is not Sampler.mark_update:
        index = coordinates(torch.arange(start, start + count, device=parts.storage.device), parts.storage)
        mark_update(rb, torch.stack(index, -1) if isinstance(index, tuple) else index)


def empty(rb: Any, empty_write_count: bool = True) -> None:
    """Forget all rows and priorities; keep the schema.

    Args:
        empty_write_count: reset :attr:`write_count`, too.
    """
    with rb._emptied_of_prefetched(), held_back:
        TensorDictReplayBuffer.empty(rb, empty_write_count)
