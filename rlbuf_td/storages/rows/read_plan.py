"""Fast reads of plain rows on the CPU: one compiled call copies a batch to tensors that were allocated ahead."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlbuf_td.kernels.batch import LeafMemory, gather_leaves_within
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.storages.layout import RowLayout

Blank: TypeAlias = tuple[TensorDict, np.ndarray]  # a batch of uninitialised tensors, and the addresses of its leaves


class ReadPlan:
    """Copies rows of ``matrix``, ``[N, width]``, to batches; allocates batches of the previous batch size ahead."""

    def __init__(self, layout: RowLayout, matrix: Tensor) -> None:
        self._layout, self._matrix = layout, matrix
        # One attribute, because several threads may read: a thread must not combine two threads' values.
        self._ready: tuple[int, LeafMemory, list[Blank]] = (-1, LeafMemory([]), [])  # rows per batch, ...

    def read(self, cells: Tensor, live: int) -> TensorDict | None:
        """Return the rows at the flat indices ``cells``, int64, or None if the slower general method must read them.

        The result is None if the batch size differs from the previous call, if an index is not in ``[0, live)``, if
        ``cells`` is not a contiguous 1-D tensor, or if ``cells`` or the rows are not on the CPU.
        """
        is_on_cpu = cells.is_cpu and backend_of(self._matrix) == "numba"
        if cells.ndim != 1 or not is_on_cpu or not cells.is_contiguous():
            return None
        count, memory, blanks = self._ready
        if cells.shape[0] != count:
            entries = [(leaf.dtype, cells.shape + leaf.shape) for leaf in self._layout.leaves]
            self._ready = cells.shape[0], LeafMemory(entries), []
            return None
        try:
            blank = blanks.pop()
        except IndexError:
            with torch.inference_mode(False):  # a batch may outlive inference mode
                made = [self._blank(memory.allocate(), cells) for _ in range(memory.ahead)]
            blank = made.pop()
            blanks.extend(made)
        batch, targets = blank
        found = gather_leaves_within(self._matrix, cells, self._layout.extents, targets, live)
        return batch if found else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ready": (-1, LeafMemory([]), [])}  # addresses are of this object's batches

    def _blank(self, leaves: list[Tensor], cells: Tensor) -> Blank:
        targets = np.fromiter(map(Tensor.data_ptr, leaves), np.int64, len(leaves))
        return self._layout.wrap(leaves, cells.shape, cells.device, {}), targets
