"""Hands out the *fresh* rows of a storage, the oldest first: rows that :func:`take` has not yet given to a batch.

``queue`` is the address of ``[3 + lanes]`` int64: the numbers ``FRESH`` to ``LANES`` of
:mod:`rlbuf_td.kernels.recency`, then the serial of the next row of each lane to hand out. ``serials`` is the address of
the ring's numbers, see :mod:`rlbuf_td.kernels.serials`.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import kernel, pointer, store
from rlbuf_td.kernels.recency import FRESH, LANES, STEPS
from rlbuf_td.kernels.serials import TAIL, WRITTEN
from rlbuf_td.kernels.serials_cpu import head_at


@kernel
def take(queue, serials, most, out):
    """Move at most ``most`` fresh rows to address ``out``; return their number.

    The lane with the most fresh rows comes first, then the lane with the smaller number.
    """
    numbers = carray(pointer(queue), 3, np.int64)
    steps, lanes = numbers[STEPS], numbers[LANES]
    following, head = carray(pointer(queue + 24), lanes, np.int64), head_at(serials, lanes)
    waiting = np.int64(0)
    for lane in range(lanes):
        following[lane] = max(following[lane], head[TAIL, lane])  # rows that are gone are no longer fresh
        waiting = max(waiting, head[WRITTEN, lane] - following[lane])
    taken, most = 0, min(most, numbers[FRESH])
    while taken < most and waiting > 0:
        for lane in range(lanes):
            if taken < most and head[WRITTEN, lane] - following[lane] == waiting:
                store(out + 8 * taken, following[lane] % steps * lanes + lane, np.int64)
                following[lane] += 1
                taken += 1
        waiting -= 1
    return taken
