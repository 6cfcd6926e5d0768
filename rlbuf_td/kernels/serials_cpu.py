"""Compiled functions over the numbers of a ring, see
:mod:`rlbuf_td.kernels.serials`."""

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import barrier, inlined, pointer
from rlbuf_td.kernels.serials import (
    AFTER,
    BEFORE,
    DIRTY,
    NEXT_PUBLICATION,
    NEXT_ROWS_WRITTEN,
    PUBLICATION,
    ROWS_WRITTEN,
    TAIL,
    WRITING,
    WRITTEN,
    block_size,
)

_block_size = inlined(block_size)


@inlined
def head_at(address, lanes):
    """Return the numbers of a ring, ``[2, lanes]``."""
    return carray(pointer(address), (2, lanes), np.int64)


@inlined
def block_at(address, lanes):
    """Return all numbers of a ring."""
    return carray(pointer(address), _block_size(lanes), np.int64)


@inlined
def longest_of(head, steps):
    """Return the number of time steps up to the last slot in which any lane has a
    row."""
    longest = np.int64(0)
    for e in range(head.shape[1]):
        longest = max(
            longest,
            min(head[TAIL, e] % steps + head[WRITTEN, e] - head[TAIL, e], steps),
        )
    return longest


@inlined
def begin_write(block, lanes, steps, new_rows):
    """Implement ``Ring.begin`` for ``new_rows[e]`` new rows of each lane ``e``."""
    after = AFTER * lanes
    # numba compiles a copy of a slice for two seconds, for its error messages
    for i in range(after):
        block[after + i] = block[i]
    for e in range(lanes):
        tail, written = TAIL * lanes + e, WRITTEN * lanes + e
        block[BEFORE * lanes + e] = block[written]
        block[after + written] += new_rows[e]
        block[after + tail] = max(block[tail], block[after + written] - steps)
    block[NEXT_ROWS_WRITTEN] = block[ROWS_WRITTEN] + new_rows.sum()
    block[NEXT_PUBLICATION] = block[PUBLICATION] + 1
    barrier()
    block[DIRTY] = WRITING
    barrier()
    for e in range(lanes):
        tail, written = TAIL * lanes + e, WRITTEN * lanes + e
        block[tail] = min(block[after + tail], block[written])
    barrier()


@inlined
def serial_of(head, steps, slot, lane):
    """Return the serial that follows from a cell, below ``tail`` if its row is not
    live."""
    newest = head[WRITTEN, lane] - 1
    ago = newest % steps - slot
    return newest - (ago + steps if ago < 0 else ago)


@inlined
def stamp_of(batch, head, cell):
    """Return the serial of the row in a cell; ``batch`` is a ``BATCH`` record."""
    lanes = head.shape[1]
    if lanes == 1:
        return serial_of(head, batch.steps, cell, np.int64(0))
    return serial_of(head, batch.steps, cell // lanes, cell % lanes)


@inlined
def is_stale(batch, head, cell, stamp, written):
    """Whether the row that had a stamp is gone; not for stamps of other rows in cells
    above ``written``."""
    if stamp == stamp_of(batch, head, cell):
        return stamp < head[TAIL, cell % head.shape[1]]
    return cell < written or stamp % batch.steps == cell // head.shape[1]
