"""Hands out the *fresh* rows of a storage, the oldest first: rows that :func:`take` has not yet given to a batch.

The rows of each lane are numbered in the order of writing, and handed out in this order: one number per lane is the
whole queue. ``queue`` is the address of ``[4 + 3 * lanes]`` int64: the numbers ``CLOCK`` to ``LANES`` of
:mod:`rlbuf_td.kernels.recency`, then for each lane the newest step, the number of rows written, and the number of the
next row to hand out. ``counters`` is a :class:`~rlbuf_td.kernels.recency.Counters`.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import kernel, load, pointer, store
from rlbuf_td.kernels.recency import CLOCK, FRESH, LANES, STEPS

_LENGTH, _NEWEST, _APART = 0, 16, 24  # places of numbers of a storage, in bytes; see ``storages.lane_heads``
_NOW, _LAST, _BY_ROW = 0, 8, 16  # places of numbers of a clock; see ``storages.write_clock``


@kernel
def take(queue, counters, most, out):
    """Move at most ``most`` fresh rows to address ``out``; return their number.

    The lane with the most fresh rows comes first, then the lane with the smaller number. Writes that lanes took alone
    must have been noted by ``FreshQueue.note_writes``.
    """
    head = carray(pointer(queue), 4, np.int64)
    steps, lanes = head[STEPS], head[LANES]
    lists = carray(pointer(queue + 32), (3, lanes), np.int64)
    newest, written, following = lists[0], lists[1], lists[2]
    now, length = load(counters.clock + _NOW, np.int64), load(counters.numbers + _LENGTH, np.int64)
    is_plain = not load(counters.numbers + _APART, np.int64) and not load(counters.clock + _BY_ROW, np.int64)
    if now != head[CLOCK] and is_plain:
        live, step = length // lanes, load(counters.clock + _LAST, np.int64)
        if step < 0:
            step = load(counters.numbers + _NEWEST, np.int64)
        step = step if step >= 0 else live - 1
        ticks = now - head[CLOCK]  # edits of rows count, too; only the newest step tells how far the ring has moved
        for lane in range(lanes):
            written[lane] += min((step - newest[lane]) % steps, ticks) if 0 <= ticks < steps else steps
            following[lane] = max(following[lane], written[lane] - live)
            newest[lane] = step
        head[CLOCK] = now
    taken, most = 0, min(most, head[FRESH])
    waiting = (written - following).max()
    while taken < most and waiting > 0:
        for lane in range(lanes):
            if taken < most and written[lane] - following[lane] == waiting:
                store(out + 8 * taken, (newest[lane] + 1 - waiting) % steps * lanes + lane, np.int64)
                following[lane] += 1
                taken += 1
        waiting -= 1
    return taken
