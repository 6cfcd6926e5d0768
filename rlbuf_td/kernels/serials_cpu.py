"""Compiled functions over the numbers of a ring, see :mod:`rlbuf_td.kernels.serials`."""

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import inlined, load, pointer
from rlbuf_td.kernels.serials import TAIL, WRITTEN


@inlined
def head_at(address, lanes):
    """Return the numbers of a ring, ``[3, lanes]``."""
    return carray(pointer(address), (3, lanes), np.int64)


@inlined
def serial_of(head, steps, slot, lane):
    """Return the serial that follows from a cell, below ``tail`` if its row is not live."""
    newest = head[WRITTEN, lane] - 1
    ago = newest % steps - slot
    return newest - (ago + steps if ago < 0 else ago)


@inlined
def stamp_of(batch, head, cell):
    """Return the serial of the row in a cell; ``batch`` is a ``BATCH`` record."""
    if batch.generations:
        return load(batch.generations + 8 * cell, np.int64)
    lanes = head.shape[1]
    if lanes == 1:
        return serial_of(head, batch.steps, cell, np.int64(0))
    return serial_of(head, batch.steps, cell // lanes, cell % lanes)


@inlined
def is_stale(batch, head, cell, stamp, written):
    """Whether the row that had a stamp is gone; not for stamps of other rows in cells above ``written``."""
    if stamp == stamp_of(batch, head, cell):
        return not batch.generations and stamp < head[TAIL, cell % head.shape[1]]
    return cell < written or stamp % batch.steps == cell // head.shape[1]
