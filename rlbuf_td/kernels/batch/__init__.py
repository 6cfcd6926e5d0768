"""Samples or writes a whole batch on the CPU in one compiled call."""

# Several Python calls would be slow, because each learner step evicts Python's code
# from the processor's caches.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from rlbuf_td.kernels.batch.memory import LeafMemory
from rlbuf_td.kernels.batch.ring import (
    BATCH,
    STEPS,
    UPDATE,
    WINDOWS,
    WRITE_RECORD,
    Updates,
)
from rlbuf_td.kernels.dispatch import loop, record_of
from rlbuf_td.kernels.host_memory import address_of
from rlbuf_td.kernels.rows import refuse_rows
from rlbuf_td.kernels.threads import all_parts

__all__ = [
    "STEPS",
    "UPDATE",
    "WINDOWS",
    "WRITE_RECORD",
    "LeafMemory",
    "Updates",
    "batch_record",
    "gather_leaves",
]


def batch_record(
    count: int, matrix: Tensor, extents: np.ndarray, **fields: int
) -> np.ndarray:
    """Return a :data:`~rlbuf_td.kernels.batch.ring.BATCH` record, which describes the
    stored rows to kernels.

    Args:
        count: rows per batch.
        matrix: the stored rows, ``[N, width]``, contiguous, on the CPU.
        extents: ``[leaves, 2]`` int64: offset and size of each leaf in a row, in bytes.
            For n-step transitions, ``[leaves, 4]``: also the kind, for example
            ``REWARD``, and the element size. The caller must keep this array alive.
        **fields: further fields of the record, for example ``lanes``; a missing field
            is 0.
    """
    return record_of(
        BATCH,
        rows=address_of(matrix),
        row_bytes=matrix.stride(0) * matrix.element_size(),
        leaves=len(extents),
        extents=extents.ctypes.data,
        count=count,
        **fields,
    )


def gather_leaves(
    matrix: Tensor, index: Tensor, extents: np.ndarray, out: Sequence[Tensor]
) -> None:
    """Copy the rows of ``matrix`` with the indices ``index`` to the tensors ``out``,
    one tensor for each leaf.

    ``index`` is int64 of any shape, and each tensor of ``out`` is
    ``[*index.shape, ...]``. ``extents``, ``[leaves, 2]`` int64, holds the offset and
    the size of each leaf in a row, in bytes. All tensors must be contiguous and on the
    CPU. If an index is out of range, an IndexError is raised, and the tensors hold
    undefined numbers.
    """
    targets = np.fromiter(map(Tensor.data_ptr, out), np.int64, len(out))
    live = len(matrix)
    count = index.numel()
    record = batch_record(count, matrix, extents)
    # copies the rows with the numbers `first` to `last - 1`
    gather_part = partial(
        loop("batch.cpu", "gather_rows"),
        record.ctypes.data,
        address_of(index),
        targets.ctypes.data,
        live,
    )
    nbytes = count * matrix.stride(0) * matrix.element_size()
    if not all_parts(gather_part, 0, count, nbytes):
        refuse_rows(index, live)
