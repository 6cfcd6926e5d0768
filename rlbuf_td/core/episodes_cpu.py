"""The loops of :mod:`rlbuf_td.core.episodes`; arguments without a type are addresses or counts."""

import numpy as np
from numba import carray

from rlbuf_td.core.records import BACK, BREAK, FOLLOWING, LEFT, NAME, STEPS, Lanes
from rlbuf_td.kernels.compiled import inlined, kernel, pointer, prefetch, store
from rlbuf_td.kernels.serials import TAIL, WRITTEN

_SOON = 16  # how many look-ups ahead the numbers of a row are prefetched
_MOST = 1 << 30  # steps are counted so far: more than the slots of any lane


@inlined
def _arrays(at, head):
    head = carray(pointer(head), (5, at.lanes), np.int64)
    return head, carray(pointer(at.numbers), (at.lanes, at.steps, 2), np.int32)


@inlined
def _close(head, numbers, lane, written):
    """Write ``left`` of the live rows of a lane's newest episode, whose last row has the serial ``written - 1``."""
    steps, last = numbers.shape[1], written - 1
    if last < head[TAIL, lane]:
        return
    slot = last % steps
    count = min(np.int64(numbers[lane, slot, BACK] & STEPS), last - head[TAIL, lane]) + 1
    for k in range(1, count + 1):
        numbers[lane, slot, LEFT] = k
        slot = slot - 1 if slot else steps - 1


@kernel
def write(at: Lanes, count, lane_ids, ended, names):
    head, _ = _arrays(at, at.head)
    draft, numbers = _arrays(at, at.draft)
    draft[:] = head
    lanes, ends = carray(pointer(lane_ids), count, np.int64), carray(pointer(ended), count, np.bool_)
    name = carray(pointer(names), count, np.int64)
    for i in range(count):
        lane = lanes[i]
        back, serial = draft[FOLLOWING, lane], draft[WRITTEN, lane]
        slot = serial % at.steps
        if back < 0 or (back > 0 and name[i] != draft[NAME, lane]):
            _close(draft, numbers, lane, serial)
            back = min(back, 0)
        numbers[lane, slot, BACK] = BREAK if back < 0 else back
        numbers[lane, slot, LEFT] = 0
        draft[NAME, lane] = name[i]
        draft[WRITTEN, lane] = serial + 1
        if serial + 1 - draft[TAIL, lane] > at.steps:  # more rows than slots: the first ones of this write are gone
            draft[TAIL, lane] = serial + 1 - at.steps
        if ends[i]:
            _close(draft, numbers, lane, serial + 1)
            draft[FOLLOWING, lane] = 0
        else:
            draft[FOLLOWING, lane] = min(max(back, 0) + 1, _MOST)


@kernel
def end(at: Lanes, count, lane_ids):
    head, _ = _arrays(at, at.head)
    lanes = carray(pointer(lane_ids), count, np.int64)
    for i in range(count):
        head[FOLLOWING, lanes[i]] = -1


@kernel
def build(at: Lanes, ended, names):
    head, numbers = _arrays(at, at.head)
    ends, name = (
        carray(pointer(ended), (at.steps, at.lanes), np.bool_),
        carray(pointer(names), (at.steps, at.lanes), np.int64),
    )
    for lane in range(at.lanes):
        tail, written, follows = head[TAIL, lane], head[WRITTEN, lane], head[FOLLOWING, lane]
        if tail == written:
            continue
        before = tail % at.steps
        back = np.int64(numbers[lane, before, BACK] & STEPS)  # of the oldest row: what was before it is not stored
        numbers[lane, before, LEFT] = 0
        for serial in range(tail + 1, written):
            slot = serial % at.steps
            is_break = numbers[lane, slot, BACK] < 0
            if is_break or ends[before, lane] or name[slot, lane] != name[before, lane]:
                _close(head, numbers, lane, serial)
                back = np.int64(0)
            else:
                back = min(back + 1, _MOST)
            numbers[lane, slot, BACK] = BREAK if is_break else back
            numbers[lane, slot, LEFT] = 0
            before = slot
        head[NAME, lane] = name[before, lane]
        if ends[before, lane]:
            _close(head, numbers, lane, written)
        head[FOLLOWING, lane] = -1 if follows < 0 else 0 if ends[before, lane] else back + 1


@kernel
def reach(at: Lanes, count, cells, back, ahead, ended, whole):
    head, numbers = _arrays(at, at.head)
    cell = carray(pointer(cells), count, np.int64)
    for i in range(min(_SOON, count)):
        prefetch(at.numbers + 8 * (cell[i] % at.lanes * at.steps + cell[i] // at.lanes))
    for i in range(count):
        if i + _SOON < count:
            soon = cell[i + _SOON]
            prefetch(at.numbers + 8 * (soon % at.lanes * at.steps + soon // at.lanes))
        slot, lane = cell[i] // at.lanes, cell[i] % at.lanes
        newest = head[WRITTEN, lane] - 1
        ago = newest - slot
        ago %= at.steps
        stored = newest - ago - head[TAIL, lane]  # live rows before this one in its lane
        steps, left = np.int64(numbers[lane, slot, BACK] & STEPS), np.int64(numbers[lane, slot, LEFT])
        store(back + 8 * i, min(steps, stored), np.int64)
        store(ahead + 8 * i, left - 1 if left else ago, np.int64)
        store(ended + i, left > 0, np.bool_)
        store(whole + i, steps <= stored, np.bool_)


@kernel
def whole(at: Lanes, only_finished: bool, first, length):
    head, numbers = _arrays(at, at.head)
    found = 0
    for lane in range(at.lanes):
        serial, written = head[TAIL, lane], head[WRITTEN, lane]
        while serial < written:
            slot = serial % at.steps
            left = np.int64(numbers[lane, slot, LEFT])
            rows = left if left else written - serial
            if not numbers[lane, slot, BACK] & STEPS and (left or not only_finished):
                store(first + 8 * found, slot * at.lanes + lane, np.int64)
                store(length + 8 * found, rows, np.int64)
                found += 1
            serial += rows
    return found
