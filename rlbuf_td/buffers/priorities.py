"""Methods of :class:`~rlbuf_td.ReplayBuffer` that update priorities from TD errors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.buffers.parts import Parts
from rlbuf_td.storages.indexing import by_row
from rlbuf_td.storages.notebooks import PRIORITIES
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.write_clock import SAMPLED_AT, skip_stale


def update_priority(rb: Any, index: Any, priority: Any) -> None:
    """Set the priorities of rows from the magnitudes of TD errors, even if the rows were replaced after sampling.

    Args:
        index: positions of rows, or the index that :meth:`extend` or :meth:`sample` returns.
        priority: one TD error per row, in the order of ``index``, or one TD error for all rows.

    Raises:
        ValueError: the number of TD errors is wrong, or a TD error is NaN or infinite; all priorities are unchanged.
        IndexError: a row is out of range; all priorities are unchanged.

        On CUDA, rows that are out of range, or have a NaN or infinite TD error, are skipped instead.
    """
    parts = rb.parts or rb.initialize()
    if parts.prioritized is None:
        return TensorDictReplayBuffer.update_priority(rb, index, priority)
    if rb.prefetcher is not None:
        rb.prefetcher.flush()
    by_coordinates = parts.storage.ndim > 1
    if isinstance(index, torch.Tensor) and index.ndim > 1 + by_coordinates:
        index = index.flatten(0, -2) if by_coordinates else index.flatten()
    with rb.locked():
        parts.prioritized.update_priority(index, priority, storage=parts.storage)


def update_tensordict_priority(rb: Any, data: TensorDictBase) -> None:
    """Set the priorities of the rows of a batch from its TD errors; without a prioritized sampler, do nothing.

    Rows that have been replaced since the batch was sampled keep their priorities, and :meth:`health` counts them. If a
    batch has no entry ``"sampled_at"``, the priorities of all its rows are set.

    Args:
        data: a batch of this buffer, ``[B]`` or ``[B, ...]``, with its ``"index"`` and with TD errors at
            ``priority_key``. If a row has several TD errors, the sampler's ``reduction`` combines their magnitudes.

    Raises:
        KeyError: the batch has no TD errors, or no index.
        ValueError: a TD error is NaN or infinite; all priorities are unchanged. On CUDA, the row is skipped instead.
    """
    parts = rb.parts or rb.initialize()
    if parts.prioritized is None or parts.has_units:
        return TensorDictReplayBuffer.update_tensordict_priority(rb, data)
    bound = rb.bound.get(data.numel())
    if bound is not None and not isinstance(bound, str) and not rb.copies_batches:
        with parts.storage.lock:
            stale = bound.update(data, rb.priority_key) if rb.bound.get(data.numel()) is bound else None
        if stale is not None:
            rb.stale_updates.add(stale)
            return None
    entries = entries_of(data)
    index, td_error = errors_of(parts, data, rb.priority_key)
    update = index, td_error, entries.get(SAMPLED_AT), data.ndim
    if not rb.copies_batches or not rb.prefetcher.return_errors(*update):
        write_priorities(rb, *update)


def write_priorities(
    rb: Any, index: torch.Tensor, td_error: torch.Tensor, sampled_at: torch.Tensor | None, dims: int
) -> None:
    """Update the priorities of a batch's rows, except rows that were replaced since the batch was sampled."""
    stale: int | torch.Tensor = 0
    with rb.parts.storage.lock if rb.parts.is_packed else rb.locked():
        parts = rb.parts
        if parts.prioritized is None:  # the sampler was replaced since the TD errors were queued
            return
        if sampled_at is not None and parts.is_packed:
            index, stale = skip_stale(index, sampled_at, dims, parts.storage)
        parts.prioritized.update_priority(index, td_error, storage=parts.storage)
        rb.stale_updates.add(stale)


def refuse_missing(key: NestedKey) -> NoReturn:
    """Raise a KeyError for a batch without TD errors, or without the index of its rows."""
    remedy = "set the TD errors of the sampled rows"
    if key == "index":
        remedy = (
            "it was sampled with include_info=False, or a transform has removed it. Sample with include_info=True, or "
            "with return_info=True, and call update_priority(info['index'], td_error)"
        )
    raise KeyError(f"the batch has no {key!r}: {remedy}{PRIORITIES}")


def errors_of(parts: Parts, data: TensorDictBase, key: NestedKey) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of the rows whose priorities a batch updates, and one TD error for each row."""
    entries, sampler = entries_of(data), parts.prioritized
    td_error = entries.get(key) if type(key) is str else data.get(key, None)
    index = entries.get("index")
    if td_error is None or index is None or sampler is None:
        refuse_missing(key if td_error is None else "index")
    td_error, index = by_row(td_error, index, data.ndim, parts.storage, sampler.reduction)
    return (index, td_error) if parts.wrapper is None else parts.wrapper.anchored(data, index, td_error)
