"""Reading a batch's rows from a mapped file: all pages are asked for before the first is waited for.

Touching a page that is not in memory waits for the disk, and brings some thirty neighbours along, which a random row
does not need. Asked for in the order of the file, exactly the pages of a batch come, side by side.

A batch that is in memory costs a look at sixteen of its rows, some 6 us. Linux only: elsewhere nothing is asked for.
"""

from __future__ import annotations

import mmap
import sys

from torch import Tensor

from rlbuf_td.kernels.dispatch import loops
from rlbuf_td.kernels.rows.pool import Table

IS_KNOWN = sys.platform == "linux" and mmap.PAGESIZE == 4096
_FEWEST = 2  # rows


def ask_for_rows(rows: Tensor, cells: Tensor) -> Tensor | None:
    """Ask for the rows at ``cells``, ``[B]`` int64; if so, return the order in which they are read best."""
    if not IS_KNOWN or len(cells) < _FEWEST or not len(rows):
        return None
    cells = cells.contiguous()
    base, stride = rows.data_ptr(), rows.stride(0) * rows.element_size()
    if not loops("rows.cpu").is_absent(base, stride, cells.data_ptr(), len(cells)):
        return None
    cells, order = cells.sort()
    loops("rows.cpu").ask_for_rows(base, stride, len(rows), cells.data_ptr(), len(cells))
    return order


def ask_for_entries(table: Table, cells: Tensor) -> None:
    """Ask for all that rows name, in their order, ``[B]`` int64."""
    rows = table.rows
    base, stride = rows.data_ptr(), rows.stride(0)
    for group, entries in zip(table.groups, table.entries, strict=True):
        where = base + group.ids, group.names, stride, len(rows), cells.data_ptr(), len(cells)
        loops("rows.cpu").ask_for_entries(entries.data_ptr(), group.nbytes, *where)
