"""A block of rows: what can be read from it and written to it. Memory only: it counts nothing and knows no TorchRL."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.rows import few_of, gather_rows, new_rows
from rlbuf_td.kernels.rows.read_ahead import ask_for_rows
from rlbuf_td.storages.layout import RowLayout


class Rows:
    """``[T, *lanes]`` rows of bytes, and the layout that reads them.

    Args:
        layout: what a row holds.
        matrix: ``[T, *lanes, row_bytes]`` in bytes, contiguous, of any dtype.

    Attributes:
        is_mapped: whether they lie in a file, whose pages are asked for before rows are read.
    """

    def __init__(self, layout: RowLayout, matrix: torch.Tensor) -> None:
        self.layout = layout
        self.is_mapped = False
        self.matrix = matrix.view(layout.carrier)
        self.flat = self.matrix.view(-1, self.matrix.shape[-1])
        self.shape = self.matrix.shape[:-1]
        self.steps = self.shape[0]
        self.lanes = self.shape[1:]
        self.cells = prod(self.shape)
        # Batches of fewer rows need no more than torch's gather; asking at each of them would take 0.5 us.
        self._few = few_of(self.flat)
        self._begin = 0  # addresses, from the first longer write on
        self._end: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, padding included."""
        return self.matrix.numel() * self.matrix.element_size()

    def sources(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that reading goes to."""
        return (self.matrix,)

    def first(self, steps: int) -> Rows:
        """Return the first time steps, as a view."""
        rows = Rows(self.layout, self.matrix.narrow(0, 0, steps))
        rows.is_mapped = self.is_mapped
        if backend_of(self.flat) != "numba":
            rows.flat = self.flat  # so that captured graphs read rows that are written later
        return rows

    def read_ahead(self, flat: torch.Tensor) -> None:
        """Ask for the pages of rows that are about to be read, if they lie in a file and not in memory."""
        if self.is_mapped:
            ask_for_rows(self.flat, flat)

    def view(self) -> TensorDict:
        """Return all rows as a TensorDict of strided views."""
        return self.layout.unpack(self.matrix)

    # -- reading, as fresh memory

    def at_cells(self, flat: torch.Tensor) -> TensorDict:
        """Return the rows at flat positions (``t * E + e``): ``[B]`` int64, not negative."""
        if self.is_mapped:
            self.read_ahead(flat)
        if flat.numel() < self._few:
            return self.layout.unpack(self.flat.index_select(0, flat))
        return self.layout.unpack(gather_rows(self.flat, flat))

    def pack_(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rows at flat positions into ``[B, row_bytes]``, in bytes, of the layout's carrier dtype."""
        self.read_ahead(flat)
        torch.index_select(self.flat, 0, flat, out=out)

    def blank(self, count: int) -> TensorDict:
        """Return memory for ``count`` rows, not initialised."""
        return self.layout.unpack(new_rows(self.flat, count))

    def batches_at_cells(self, flat: torch.Tensor, size: int) -> list[TensorDict]:
        """Return :meth:`at_cells` of each ``size`` of ``flat``, as parts of one block of memory."""
        self.read_ahead(flat)
        return self.layout.unpack_batches(gather_rows(self.flat, flat), size)

    def at_steps(self, index: torch.Tensor) -> TensorDict:
        """Return the time steps at ``index``, int64 of any shape; negative ones count from the end.

        Raises:
            IndexError: one is out of range (on the CPU).
        """
        if self.is_mapped:
            ask_for_rows(self.matrix, index.reshape(-1) % max(1, self.steps))
        return self.layout.unpack(_gather(self.matrix, index))

    def at_coordinates(self, index: tuple[torch.Tensor, ...]) -> TensorDict:
        """Return the rows at coordinates, one int64 tensor a dim; negative ones count from the end.

        Raises:
            IndexError: one is out of range (on the CPU).
        """
        flat: torch.Tensor | int = 0
        for size, coordinate in zip(self.shape, index, strict=True):
            flat = flat * size + (coordinate % size if coordinate.is_cuda else _wrapped(coordinate, size))
        if self.is_mapped:
            self.read_ahead(torch.as_tensor(flat).reshape(-1))
        return self.layout.unpack(_gather(self.flat, flat))

    def chunks(self, first: int, count: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield time steps in order, as how many and their leaves, in parts that fit into memory."""
        yield count, self.layout.columns(self.matrix.narrow(0, first, count))

    # -- writing leaves that fit

    def copy_(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Write ``count`` time steps from ``start`` on, wrapping at the end; leaves may be views of these rows."""
        head = min(count, self.steps - start)
        if self._holds_any(leaves if count > 1 else leaves[:1]):  # of one row, torch itself refuses the rest
            leaves = [leaf.clone() for leaf in leaves]  # else a row could be read after it was overwritten
        if head == count:
            torch._foreach_copy_(self.layout.columns(self.matrix.narrow(0, start, count)), leaves)
        else:
            self.copy_(start, head, [leaf[:head] for leaf in leaves])
            self.copy_(0, count - head, [leaf[head:] for leaf in leaves])

    def _holds_any(self, leaves: list[torch.Tensor]) -> bool:
        """Return whether any of some tensors is a view of these rows; costs 0.1 us each."""
        if self._end is None:
            self._begin = self.matrix.data_ptr()
            self._end = self._begin + self.matrix.numel() * self.matrix.element_size()
        begin, end = self._begin, self._end
        for address in map(torch.Tensor.data_ptr, leaves):  # noqa: SIM110 (any() takes twice as long)
            if begin <= address < end:
                return True
        return False

    def scatter_(self, steps: np.ndarray, leaves: list[torch.Tensor]) -> None:
        """Write the time steps named; of one that is named twice, the last row stays."""
        unique, last = np.unique(steps[::-1], return_index=True)
        if len(unique) < len(steps):
            keep = torch.from_numpy(len(steps) - 1 - last)
            steps, leaves = unique, [leaf[keep.to(leaf.device)] for leaf in leaves]
        block = self.matrix.new_zeros((len(steps), *self.matrix.shape[1:]))
        torch._foreach_copy_(self.layout.columns(block), leaves)
        self.matrix.index_copy_(0, torch.from_numpy(steps).to(block.device), block)

    def cells_at(self, steps: np.ndarray) -> torch.Tensor:
        """Return the flat positions of all rows of these time steps, ``[n * lanes]``."""
        lanes = self.cells // self.steps
        first = torch.from_numpy(steps).to(self.matrix.device)[:, None] * lanes
        return (first + torch.arange(lanes, device=first.device)).flatten()

    def cells_of(self, region: Any) -> torch.Tensor:
        """Return the flat positions of a region, given by a mask or by one index a dim, in the region's shape.

        Raises:
            IndexError: it is out of range.
        """
        cells: torch.Tensor | int = 0
        for dim, size in enumerate(self.shape):
            coordinate = torch.arange(size, device=self.matrix.device).view(size, *[1] * (len(self.shape) - 1 - dim))
            cells = cells * size + coordinate.expand(self.shape)[region]
        return torch.as_tensor(cells)

    def replace_(self, cells: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Write at flat positions of any shape; of one that is named twice, the last row stays."""
        flat = [leaf.flatten(0, cells.ndim - 1) if cells.ndim else leaf[None] for leaf in leaves]
        Rows(self.layout, self.flat).scatter_(cells.reshape(-1).cpu().numpy(), flat)


def _wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``index`` (on the CPU) with negative positions counted from the end.

    Raises:
        IndexError: a position is out of range.
    """
    if not index.numel():
        return index
    low, high = int(index.min()), int(index.max())
    if low < -size or high >= size:
        raise IndexError(f"index {high if high >= size else low} is out of range: {size} have been written")
    return torch.where(index < 0, index + size, index) if low < 0 else index


def _gather(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``matrix[index]`` as fresh memory, by the quickest way of the device."""
    if matrix.is_cuda:
        return matrix[index]
    flat = index.reshape(-1)
    try:
        block = gather_rows(matrix, flat) if matrix.ndim == 2 else matrix.index_select(0, flat)
    except (IndexError, RuntimeError):  # the latter when no row has been written
        block = matrix.index_select(0, _wrapped(flat, matrix.shape[0]))
    return block if index.ndim == 1 else block.view(*index.shape, *matrix.shape[1:])
