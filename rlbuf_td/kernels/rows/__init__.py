"""Asks the operating system for the pages of a memory-mapped file that a batch needs,
before the batch is read.

Without a request, reading a page that is not in memory waits for the disk and also
loads about thirty neighbouring pages. Requests in file order load only the needed
pages, in parallel. Before a request, at most 31 rows of the batch are checked; if these
rows are in memory, nothing is requested. Pages are only requested on Linux with 4 KiB
pages.
"""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, loop
from rlbuf_td.kernels.host_memory import address_of, advise

if TYPE_CHECKING:
    from rlbuf_td.kernels.rows.triton import RowWords

IS_KNOWN = sys.platform == "linux" and mmap.PAGESIZE == 4096
_FEWEST = 2  # rows


def ask_for_rows(rows: Tensor, cells: Tensor) -> Tensor | None:
    """Request the memory pages of ``rows[cells]``; return the sorted ``cells``, or None
    if nothing was requested."""
    if (
        not IS_KNOWN
        or len(cells) < _FEWEST
        or not len(rows)
        or backend_of(rows) != "numba"
    ):
        return None
    cells = cells.contiguous()
    base = rows.data_ptr()
    stride = rows.stride(0) * rows.element_size()
    if not loop("rows.cpu", "is_absent")(base, stride, address_of(cells), len(cells)):
        return None
    cells, _ = cells.sort()
    _ask(base + stride * _inside(cells, len(rows)), stride)
    return cells


def row_words(
    extents: np.ndarray, rows: Tensor, sources: list[int] | None = None
) -> RowWords | None:
    """Return what copies rows on a GPU; None elsewhere.

    ``sources``: where each leaf comes from, see :mod:`rlbuf_td.kernels.rows.words`.
    """
    if backend_of(rows) != "triton":
        return None
    from rlbuf_td.kernels.rows.triton import RowWords

    return RowWords(extents, rows.device, sources)


def ask_for_entries(names: Tensor, entries: Tensor, cells: Tensor) -> None:
    """Request the memory pages of the entries whose ``names``, ``[N, n]`` int32, the
    sorted rows ``cells`` hold."""
    known = np.unique(names[torch.from_numpy(_inside(cells, len(names)))]).astype(
        np.int64
    )
    _ask(
        entries.data_ptr() + entries.shape[1] * (known[known > 0] - 1), entries.shape[1]
    )


def _inside(cells: Tensor, live: int) -> np.ndarray:
    return cells[(cells >= 0) & (cells < live)].numpy()


def _ask(first: np.ndarray, width: int) -> None:
    """Request the pages of the ``width`` bytes that begin at each address in ``first``;
    these addresses must ascend."""
    if not len(first):
        return
    last = -(-(first + width) // mmap.PAGESIZE) * mmap.PAGESIZE
    first = first // mmap.PAGESIZE * mmap.PAGESIZE
    gaps = np.flatnonzero(first[1:] > last[:-1])
    for begin, end in zip(
        first[[0, *(gaps + 1)]].tolist(), last[[*gaps, -1]].tolist(), strict=True
    ):
        advise(begin, end, mmap.MADV_WILLNEED)


def refuse_rows(rows: Tensor, live: int) -> NoReturn:
    """Raise an IndexError that names an element of ``rows`` outside ``[0, live)``."""
    low, high = int(rows.min()), int(rows.max())
    raise IndexError(
        f"row {high if high >= live else low} was drawn, but only rows 0 to {live - 1} have been written"
    )
