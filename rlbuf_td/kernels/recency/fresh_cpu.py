"""The queue of *fresh* rows of a storage: rows that :func:`take` has not yet given to a batch.

Rows are numbered in the order of writing. The queue is a list of half-open intervals of these numbers, the newest last.
The argument ``queue`` is the address of a ``QUEUE`` record. Fields of the record:

- ``began`` is 0 in a new queue. While it is 0, an interval (a, b) stands for the newest ``a`` rows except the newest
  ``b``. The first call of :func:`look` converts the intervals to row numbers, and sets ``began`` to 1.
- ``count`` is the number that the next written row will have.
- ``fresh`` limits the number of fresh rows in a batch.

The argument ``live`` is the number of written rows, ``newest`` the position of the newest time step, and ``now`` the
number of time steps written so far.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import kernel, pointer, store
from rlbuf_td.kernels.recency import QUEUE


@kernel
def look(queue, live, newest, now):
    """Add to the queue the rows written since the last call."""
    state = carray(pointer(queue), 1, QUEUE)[0]
    if state.began and now == state.clock:
        return
    intervals = carray(pointer(state.intervals), (state.capacity, 2), np.int64)
    if not state.began:
        for i in range(state.length):
            place = (state.head + i) % state.capacity
            intervals[place, 0], intervals[place, 1] = live - intervals[place, 0], live - intervals[place, 1]
        state.began, state.count = 1, live
    else:
        # Edits of rows advance the clock, too; only the newest time step tells how far the ring has moved.
        ticks = now - state.clock
        written = min((newest - state.newest) % state.steps, ticks) if ticks < state.steps else state.steps
        begin = state.count + max(written * state.lanes - live, 0)
        state.count += written * state.lanes
        last = (state.head + state.length - 1) % state.capacity
        if state.length and intervals[last, 1] == begin:
            intervals[last, 1] = state.count
        elif begin < state.count:
            while state.length and intervals[state.head, 1] <= state.count - live:  # overwritten
                state.head = (state.head + 1) % state.capacity
                state.length -= 1
            last = (state.head + state.length) % state.capacity
            intervals[last, 0], intervals[last, 1] = begin, state.count
            state.length += 1
    state.clock, state.newest = now, newest if live else -1


@kernel
def take(queue, live, newest, now, most, out):
    """Move at most ``most`` fresh rows, the newest first, from the queue to address ``out``; return their number."""
    look(queue, live, newest, now)
    state = carray(pointer(queue), 1, QUEUE)[0]
    intervals = carray(pointer(state.intervals), (state.capacity, 2), np.int64)
    most, taken, oldest = min(most, state.fresh), 0, state.count - live
    # The newest row has the number `count - 1`, and lies in the last lane of the newest time step.
    shift = (state.newest + 1) * state.lanes - state.count
    while state.length and taken < most:
        last = (state.head + state.length - 1) % state.capacity
        begin, end = max(intervals[last, 0], oldest), intervals[last, 1]
        first = max(begin, end - most + taken)
        for number in range(end - 1, first - 1, -1):
            store(out + 8 * taken, (number + shift) % live, np.int64)
            taken += 1
        if first > begin:
            intervals[last, 0], intervals[last, 1] = begin, first
        else:
            state.length -= 1
    return taken
