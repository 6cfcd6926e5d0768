"""Whole batches in one compiled call on the CPU: draw rows, weigh them, stamp them and gather their leaves.

Between two learner steps the processor's caches hold what the learner needs, so that each Python call costs more
than in a loop by itself. These calls do what :mod:`rlbuf_td.kernels.sum_tree` and :mod:`rlbuf_td.kernels.rows` do
one after the other, with the same results: those two are their reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from struct import Struct
from types import ModuleType
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.batch.ring import RING
from rlbuf_td.kernels.huge_pages import advise_huge_pages
from rlbuf_td.kernels.rows import refuse_rows

__all__ = ["RING", "Gather", "gather_leaves", "loops"]
_Entry: TypeAlias = tuple[torch.dtype, torch.Size]


class Gather:
    """Gathers rows of bytes into one contiguous tensor per leaf.

    Views of one block would take less time where leaves are many (60 of 8 bytes: 130 instead of 220 us between learner
    steps; 10 or fewer: about the same). But views share a version counter, so that changing one leaf in place spoils
    what autograd has saved of the others, and each view keeps the whole batch alive.

    Args:
        matrix: ``[N, row_bytes]``, contiguous, on the CPU.
        leaves: ``[leaves, 2]`` int64: where each leaf begins in a row, and its bytes.
        entries: dtype and shape of each leaf, and of what a batch holds beside them: the index, the sampler's report.
        count: B, rows per batch.
    """

    __slots__ = ("_examples", "_set_targets", "leaves", "row_bytes", "rows", "targets")

    def __init__(self, matrix: Tensor, leaves: np.ndarray, entries: Sequence[_Entry], count: int) -> None:
        advise_huge_pages(matrix)  # rows to come, and in time those that are there: reads take 10 to 20% less
        self.rows = matrix.data_ptr()
        self.row_bytes = matrix.stride(0) * matrix.element_size()
        self.leaves = leaves
        # ``empty_like`` takes two thirds of the time of ``empty``; the examples have one element of memory each.
        self._examples = [
            example_of(torch.Size([count, *shape]), dtype, torch.device("cpu")) for dtype, shape in entries
        ]
        self.targets = np.empty(len(self._examples), np.int64)
        self._set_targets = Struct(f"{len(self._examples)}q").pack_into

    def allocate(self) -> list[Tensor]:
        """Return fresh tensors for a batch, not initialised; the next kernel fills them."""
        tensors = list(map(torch.empty_like, self._examples))
        self._set_targets(self.targets.data, 0, *map(Tensor.data_ptr, tensors))
        return tensors


def example_of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that takes no memory to speak of, for ``empty_like`` to make contiguous ones of its shape."""
    few = shape.numel() < 2  # ``empty_like`` would keep the strides of an expanded tensor
    return torch.empty(shape if few else (), dtype=dtype, device=device).expand(shape)


def gather_leaves(matrix: Tensor, index: Tensor, extents: np.ndarray, out: Sequence[Tensor]) -> None:
    """Copy each leaf of the rows at ``index`` to a tensor of its own.

    Args:
        matrix: ``[N, row_bytes]``, contiguous, on the CPU.
        index: int64 of any shape, contiguous, on the CPU.
        extents: ``[leaves, 2]`` int64: where each leaf begins in a row, and its bytes.
        out: for each leaf ``[*index.shape, ...]``, contiguous, on the CPU.

    Raises:
        IndexError: an index is out of range; ``out`` is as it was.
    """
    targets = np.fromiter(map(Tensor.data_ptr, out), np.int64, len(out))
    row_bytes, live = matrix.stride(0) * matrix.element_size(), len(matrix)
    given = index.data_ptr(), index.numel(), extents, targets
    if not loops().gather_within(matrix.data_ptr(), row_bytes, live, *given):
        refuse_rows(index, live)


@cache
def loops() -> ModuleType:
    from rlbuf_td.kernels.batch import cpu

    return cpu


@cache
def wrapped_loops() -> ModuleType:
    """Return the compiled kernels of the wrappers; see :func:`loops`."""
    from rlbuf_td.kernels.batch import wrapped_cpu

    return wrapped_cpu
