"""The queue of *fresh* rows of a storage: rows that :func:`take` has not yet given to a batch.

The rows of each lane are numbered in the order of writing. The queue holds, for each lane, half-open intervals of these
numbers, the newest last, in a ring. The argument ``queue`` is the address of a ``QUEUE`` record, ``counters`` a
:class:`~rlbuf_td.kernels.recency.Counters`.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import inlined, kernel, load, pointer, store
from rlbuf_td.kernels.recency import HEAD, LENGTH, NEWEST, NUMBER, QUEUE

_LENGTH, _NEWEST, _APART = 0, 16, 24  # places of numbers of a storage, in bytes; see ``storages.lane_heads``
_NOW, _LAST, _BY_ROW = 0, 8, 16  # places of numbers of a clock; see ``storages.write_clock``


@inlined
def _arrays(state):
    """Return the places and the intervals of all lanes."""
    places = carray(pointer(state.places), (4, state.lanes), np.int64)
    return places, carray(pointer(state.intervals), (state.lanes, state.capacity, 2), np.int64)


@inlined
def _head(state, counters, lane):
    """Return the newest step of a lane (-1: none), and its number of rows; see ``storages.lane_heads.LaneHeads``."""
    if load(counters.numbers + _APART, np.int64):
        heads = carray(pointer(state.heads), (2, state.lanes), np.int64)
        return heads[0, lane], heads[1, lane]
    live, newest = load(counters.numbers + _LENGTH, np.int64) // state.lanes, load(counters.clock + _LAST, np.int64)
    if newest < 0:
        newest = load(counters.numbers + _NEWEST, np.int64)
    return (newest if newest >= 0 else live - 1) if live else np.int64(-1), live


@inlined
def _by_row(state, counters):
    return state.times != 0 and load(counters.clock + _BY_ROW, np.int64) != 0


@inlined
def _time(state, cell, since):
    """Return by how much the write time of a row exceeds ``since``; the times may have wrapped around."""
    return np.int64(np.uint64(load(state.times + 8 * cell, np.int64)) - np.uint64(since))


@inlined
def _written(state, counters, lane, before, newest, live):
    """Return how many rows a lane has got since the last call of :func:`note_writes`, at most its number of steps."""
    # Edits of rows advance the clock, too; only the newest step tells how far the ring has moved.
    ticks, steps = load(counters.clock + _NOW, np.int64) - state.clock, state.steps
    moved = (newest - before) % steps
    if 0 <= ticks < steps:
        return min(moved, ticks)
    if _by_row(state, counters):  # the lane has wrapped if also the steps after its newest one have been written
        for k in range(1, steps - moved + 1):
            cell = (newest + k) % steps * state.lanes + lane
            if live < steps or _time(state, cell, state.clock) <= 0:
                return moved
    return steps


@inlined
def _add(state, places, intervals, lane, written, live):
    """Add the newest rows of a lane to the queue; remove rows that were overwritten."""
    ring, head, length = intervals[lane], places[HEAD, lane], places[LENGTH, lane]
    begin, end = places[NUMBER, lane] + max(written - live, 0), places[NUMBER, lane] + written
    while length and ring[head, 1] <= end - live:
        head, length = (head + 1) % state.capacity, length - 1
    last = (head + length - 1) % state.capacity
    if length and ring[last, 1] == begin:
        ring[last, 1] = end
    elif begin < end:
        last = (head + length) % state.capacity
        ring[last, 0], ring[last, 1] = begin, end
        length += 1
    places[NUMBER, lane], places[HEAD, lane], places[LENGTH, lane] = end, head, length


@kernel
def note_writes(queue, counters):
    """Add to the queue the rows written since the last call."""
    state = carray(pointer(queue), 1, QUEUE)[0]
    places, intervals = _arrays(state)
    now = load(counters.clock + _NOW, np.int64)
    if now == state.clock:
        return
    for lane in range(state.lanes):
        newest, live = _head(state, counters, lane)
        written = _written(state, counters, lane, places[NEWEST, lane], newest, live)
        _add(state, places, intervals, lane, written, live)
        places[NEWEST, lane] = newest
    state.clock = now


@inlined
def _next(state, places, intervals, counters, lane):
    """Return the flat index of the newest fresh row of a lane (-1: none), and a key that is larger for newer rows."""
    newest, live = _head(state, counters, lane)
    last = (places[HEAD, lane] + places[LENGTH, lane] - 1) % state.capacity
    if not places[LENGTH, lane] or intervals[lane, last, 1] <= places[NUMBER, lane] - live:
        return np.int64(-1), np.int64(0)
    ago = places[NUMBER, lane] - intervals[lane, last, 1]
    cell = (newest - ago) % state.steps * state.lanes + lane
    return cell, _time(state, cell, load(counters.clock + _NOW, np.int64)) if _by_row(state, counters) else -ago


@inlined
def _remove(state, places, intervals, lane):
    """Remove the newest fresh row of a lane from the queue."""
    last = (places[HEAD, lane] + places[LENGTH, lane] - 1) % state.capacity
    intervals[lane, last, 1] -= 1
    if intervals[lane, last, 0] == intervals[lane, last, 1]:
        places[LENGTH, lane] -= 1


@inlined
def _sink(heap, size, keys, at):
    """Restore the order of a heap of lanes below position ``at``: no lane has an older row than those below it."""
    child = 2 * at + 1
    while child < size:
        if child + 1 < size and (keys[heap[child + 1]], heap[child + 1]) > (keys[heap[child]], heap[child]):
            child += 1
        if (keys[heap[at]], heap[at]) > (keys[heap[child]], heap[child]):
            return
        heap[at], heap[child] = heap[child], heap[at]
        at, child = child, 2 * child + 1


@kernel
def take(queue, counters, most, out):
    """Move at most ``most`` fresh rows, the newest first, from the queue to address ``out``; return their number.

    Of the rows of one time step, those of later lanes are the newer ones.
    """
    note_writes(queue, counters)
    state = carray(pointer(queue), 1, QUEUE)[0]
    places, intervals = _arrays(state)
    heap, cells = np.empty(state.lanes, np.int64), np.empty(state.lanes, np.int64)
    keys, size, taken = np.empty(state.lanes, np.int64), 0, 0
    for lane in range(state.lanes):
        cells[lane], keys[lane] = _next(state, places, intervals, counters, lane)
        if cells[lane] >= 0:
            heap[size] = lane
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        _sink(heap, size, keys, at)
    while size and taken < min(most, state.fresh):
        lane = heap[0]
        store(out + 8 * taken, cells[lane], np.int64)
        taken += 1
        _remove(state, places, intervals, lane)
        cells[lane], keys[lane] = _next(state, places, intervals, counters, lane)
        if cells[lane] < 0:
            size -= 1
            heap[0] = heap[size]
        _sink(heap, size, keys, 0)
    return taken
