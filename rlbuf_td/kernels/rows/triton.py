"""Rows on a GPU: all leaves of a batch are read, or written, in one launch.

A row is copied word by word, see :mod:`rlbuf_td.kernels.rows.words`.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.launches import blocks_of, launch
from rlbuf_td.kernels.rows.words import LAST_ROW, ROW, WIDE, words_of

_ROWS, _WORDS = 8, 128  # per program
_ROOM = 16  # the room of a leaf in a batch is a multiple of so many rows
_LAST_ROW = tl.constexpr(LAST_ROW)
_CHANGING = ["live", "row_bytes", "count", "padded", "wide", "words"]


@triton.jit
def _copy(in_row, in_leaf, is_wanted, IS_READ: tl.constexpr, KIND: tl.constexpr):
    in_row = in_row.to(tl.pointer_type(KIND))
    in_leaf = in_leaf.to(tl.pointer_type(KIND))
    if IS_READ:
        tl.store(in_leaf, tl.load(in_row, mask=is_wanted), mask=is_wanted)
    else:
        tl.store(in_row, tl.load(in_leaf, mask=is_wanted), mask=is_wanted)


@triton.jit(do_not_specialize=_CHANGING, debug=True)
def _move(
    rows,
    cells,
    last,
    table,
    leaves,
    live: tl.int64,
    row_bytes: tl.int64,
    count: tl.int64,
    padded: tl.int64,
    wide: tl.int32,
    words: tl.int32,
    IS_READ: tl.constexpr,
    IS_JOINED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    # offsets are int64: rows may take more than 2**31 bytes
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = i < count
    cell = tl.load(cells + i, mask=is_row, other=0)
    tl.device_assert((cell >= 0) & (cell < live), "a row is out of range")
    block, wide_blocks = tl.program_id(1), tl.cdiv(wide, WORDS)
    is_wide = block < wide_blocks
    first = tl.where(is_wide, block * WORDS, wide + (block - wide_blocks) * WORDS)
    word = first + tl.arange(0, WORDS)
    is_word = word < tl.where(is_wide, wide, words)
    offset = tl.load(table + word, mask=is_word, other=0)
    inside = tl.load(table + words + word, mask=is_word, other=0)
    size = tl.load(table + 2 * words + word, mask=is_word, other=0)
    if IS_READ:
        before = tl.load(table + 4 * words + word, mask=is_word, other=0)
        start = leaves.to(tl.int64) + before * padded
    else:
        leaf = tl.load(table + 3 * words + word, mask=is_word, other=0)
        start = tl.load(leaves + leaf, mask=is_word, other=0)
    cell = cell[:, None]
    if IS_JOINED:
        source = tl.load(table + 5 * words + word, mask=is_word, other=0)
        end = tl.load(last + i, mask=is_row, other=0)
        tl.device_assert((end >= 0) & (end < live), "a row is out of range")
        cell = tl.where(source[None, :] == _LAST_ROW, end[:, None], cell)
    in_row = rows.to(tl.int64) + cell * row_bytes + offset[None, :]
    in_leaf = (start + inside)[None, :] + i[:, None] * size[None, :]
    is_wanted = is_row[:, None] & is_word[None, :]
    if is_wide:
        _copy(in_row, in_leaf, is_wanted, IS_READ, tl.int32)
    else:
        _copy(in_row, in_leaf, is_wanted, IS_READ, tl.uint8)


class RowWords:
    """Copies rows of one layout on one device.

    Args:
        extents: offset and size of each leaf in a row, in bytes, ``[leaves, 2]``.
        device: the device of the rows.
        sources: where each leaf comes from, see :func:`words_of`; None: its row.
    """

    def __init__(
        self,
        extents: np.ndarray,
        device: torch.device,
        sources: list[int] | None = None,
    ) -> None:
        table, self.wide = words_of(extents, sources or [ROW] * len(extents))
        self.table = torch.from_numpy(table).to(device)
        self.nbytes = int(extents[:, 1].sum())
        #: Whether each leaf must begin at a multiple of :data:`WIDE` bytes.
        self.is_wide = [not any(x % WIDE for x in leaf) for leaf in extents.tolist()]

    def allocate(self, count: int) -> Tensor:
        """Return memory for a batch of ``count`` rows, leaf after leaf, ``[bytes]``
        uint8.

        Each leaf has room for ``count`` rows, rounded up to a multiple of 16, so that
        all leaves are aligned.
        """
        size = self.nbytes * blocks_of(count, _ROOM) * _ROOM
        return torch.empty(size, dtype=torch.uint8, device=self.table.device)

    def read(self, rows: Tensor, cells: Tensor) -> Tensor:
        """Copy rows to new memory, and return it, see :meth:`allocate`.

        ``rows`` is ``[N, width]``, ``cells`` ``[B]`` int64.
        """
        block = self.allocate(len(cells))
        self._launch(rows, cells, block, is_read=True)
        return block

    def join(self, rows: Tensor, cells: Tensor, last: Tensor, block: Tensor) -> None:
        """Copy rows to ``block``; leaves whose source is :data:`LAST_ROW` are those of
        the rows ``last``, ``[B]`` int64."""
        self._launch(rows, cells, block, last, is_read=True)

    def write(self, rows: Tensor, cells: Tensor, addresses: Tensor) -> None:
        """Copy the leaves at ``addresses``, ``[leaves]`` int64, to the rows ``cells``,
        ``[B]`` without repetitions."""
        self._launch(rows, cells, addresses, is_read=False)

    def _launch(
        self,
        rows: Tensor,
        cells: Tensor,
        leaves: Tensor,
        last: Tensor | None = None,
        *,
        is_read: bool,
    ) -> None:
        live, words = rows.shape[0], self.table.shape[1]
        row_bytes = rows.stride(0) * rows.element_size()
        count = cells.shape[0]
        padded = blocks_of(count, _ROOM) * _ROOM
        parts = blocks_of(self.wide, _WORDS) + blocks_of(words - self.wide, _WORDS)
        if not (count and parts):
            return
        sizes = live, row_bytes, count, padded, self.wide, words
        sources = cells, cells if last is None else last, self.table, leaves
        constants = {"IS_READ": is_read, "ROWS": _ROWS, "WORDS": _WORDS}
        constants["IS_JOINED"] = last is not None
        grid = blocks_of(count, _ROWS), parts
        launch(_move, grid, rows, *sources, *sizes, **constants)
