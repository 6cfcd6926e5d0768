"""Whole batches in one compiled call on the CPU: draw rows, compute their weights and stamps, gather their leaves.

A learner step evicts Python's code from the processor's caches, so each Python call costs more in a training loop
than in a tight loop. These calls combine other kernels, such as :mod:`rlbuf_td.kernels.sum_tree` and
:mod:`rlbuf_td.kernels.rows`, and give the same results as these.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.batch.memory import Entry, LeafMemory
from rlbuf_td.kernels.batch.ring import BATCH, RING
from rlbuf_td.kernels.dispatch import loops
from rlbuf_td.kernels.huge_pages import advise_huge_pages
from rlbuf_td.kernels.rows import refuse_rows

__all__ = ["RING", "Gather", "LeafMemory", "gather_leaves"]
_AHEAD, _MOST = 8, 1 << 19  # batches that one allocation serves, and its largest size in bytes


class Gather:
    """Gathers rows of bytes into one contiguous tensor per leaf.

    Views of one block would be faster for many leaves (60 leaves of 8 bytes: 130 instead of 220 us between learner
    steps; 10 leaves or fewer: about the same). But views share a version counter: changing one leaf in place would
    invalidate what autograd has saved of the others. Each view would also keep the whole batch alive.

    Memory is allocated for several batches at a time, up to ``_MOST`` bytes. In a training loop this takes a third of
    the time of an allocation per batch, because the allocator's code stays in the processor's caches.

    Args:
        matrix: the stored rows, ``[N, row_bytes]``, contiguous, on the CPU.
        extents: ``[leaves, 2]`` int64: offset of each leaf in a row, and its bytes. Some kernels use more columns.
        entries: dtype and shape per row of each leaf, then of the other tensors: the index and the sampler's report.
        count: rows per batch.
        record: fields of ``BATCH`` that only some kernels need.
    """

    __slots__ = ("_kept", "_memory", "_set_targets", "_targets", "address", "addresses", "record", "slots")

    def __init__(
        self, matrix: Tensor, extents: np.ndarray, entries: Sequence[Entry], count: int, **record: int
    ) -> None:
        advise_huge_pages(matrix)  # at once for unwritten rows, later for the others: reads are 10 to 20 % faster
        record |= {
            "rows": matrix.data_ptr(),
            "row_bytes": matrix.stride(0) * matrix.element_size(),
            "leaves": len(extents),
            "extents": extents.ctypes.data,
            "count": count,
        }
        fields = np.array([tuple(record.get(name, 0) for name in BATCH.names or ())], BATCH)
        self.address = fields.ctypes.data
        self._memory = LeafMemory([(dtype, torch.Size([count, *shape])) for dtype, shape in entries])
        nbytes = sum(dtype.itemsize * prod(shape) for dtype, shape in entries) * count
        targets = np.empty((max(1, min(_AHEAD, _MOST // max(1, nbytes))), len(entries)), np.int64)
        #: For each batch of one allocation: the address of the memory that holds the addresses of its tensors.
        self.slots = [targets.ctypes.data + place * targets.strides[0] for place in range(len(targets))]
        self._targets, self._kept = targets.data, extents
        self.record, self.addresses = fields, targets
        self._set_targets = Struct(f"{len(entries)}q").pack_into

    def allocate(self, slot: int) -> list[Tensor]:
        """Return uninitialised tensors for a batch. A kernel that is given the address ``slot`` fills them."""
        tensors = self._memory.allocate()
        self._set_targets(self._targets, slot - self.slots[0], *map(Tensor.data_ptr, tensors))
        return tensors


def gather_leaves(matrix: Tensor, index: Tensor, extents: np.ndarray, out: Sequence[Tensor]) -> None:
    """Copy each leaf of the rows at ``index``, int64 of any shape, to its tensor in ``out``, ``[*index.shape, ...]``.

    All tensors are contiguous, on the CPU. Raises IndexError, without changing ``out``, if an index is out of range.
    """
    targets = np.fromiter(map(Tensor.data_ptr, out), np.int64, len(out))
    row_bytes, live = matrix.stride(0) * matrix.element_size(), len(matrix)
    given = index.data_ptr(), index.numel(), extents, targets
    if not loops("batch.cpu").gather_within(matrix.data_ptr(), row_bytes, live, *given):
        refuse_rows(index, live)
