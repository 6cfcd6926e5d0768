"""The loops over the numbers of :mod:`rlbuf_td.kernels.episodes`, for rows in host
memory.

The argument ``address`` is that of an ``EPISODES`` record.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import inlined, kernel, load, pointer, prefetch, store
from rlbuf_td.kernels.episodes import BREAK, EPISODES, ID, MOST, STEPS

_ROWS_TO_END = 4  # bytes from `back` to `rows_to_end`
_SOON = 16  # how many look-ups ahead the numbers of a row are prefetched


class Numbers(NamedTuple):
    """What a look-up reads."""

    numbers: int  # address of ``back`` and ``rows_to_end`` of each row
    tail: int  # address of the first serial of each lane
    written: int  # address of the next serial of each lane
    steps: int  # slots of a lane
    lanes: int


@inlined
def record_at(address):
    return carray(pointer(address), 1, EPISODES)[0]


@inlined
def numbers_at(address):
    record = record_at(address)
    return Numbers(
        record.numbers, record.tail, record.written, record.steps, record.lanes
    )


@inlined
def _at(numbers, lane, slot):
    return numbers.numbers + 8 * (lane * numbers.steps + slot)


@inlined
def split(cell, lanes):
    if lanes == 1:
        return cell, np.int64(0)
    t = np.int64(np.uint64(cell) // np.uint64(lanes))
    return t, cell - t * lanes


@inlined
def expect(numbers, cell):
    """Prefetch the numbers of a row."""
    slot, lane = split(cell, numbers.lanes)
    prefetch(_at(numbers, lane, slot))


@inlined
def rows_after(numbers, lane, slot):
    """Return how many rows of its lane are stored after the row in a slot."""
    newest = load(numbers.written + 8 * lane, np.int64) - 1
    after = np.int64(np.uint64(newest) % np.uint64(numbers.steps)) - slot
    return after if after >= 0 else after + numbers.steps


@inlined
def rows_before(numbers, lane, slot):
    """Return how many rows of its lane are stored before the row in a slot."""
    stored = load(numbers.written + 8 * lane, np.int64) - load(
        numbers.tail + 8 * lane, np.int64
    )
    return stored - 1 - rows_after(numbers, lane, slot)


@inlined
def cell_of(numbers, number):
    """Return the cell of a live row, see :meth:`rlbuf_td.storages.ring.Ring.cell_of`:
    numbers go lane after lane."""
    lane = np.int64(0)
    tail = load(numbers.tail, np.int64)
    count = load(numbers.written, np.int64) - tail
    while number >= count and lane + 1 < numbers.lanes:
        number -= count
        lane += 1
        tail = load(numbers.tail + 8 * lane, np.int64)
        count = load(numbers.written + 8 * lane, np.int64) - tail
    return (tail + number) % numbers.steps * numbers.lanes + lane


@inlined
def steps_ahead(numbers, lane, slot):
    """Return the number of steps from a row to the last stored step of its episode."""
    rows_to_end = np.int64(load(_at(numbers, lane, slot) + _ROWS_TO_END, np.int32))
    return rows_to_end - 1 if rows_to_end else rows_after(numbers, lane, slot)


@inlined
def steps_since(numbers, lane, slot):
    """Return the number of steps from the first step of the episode, stored or not, to
    a row."""
    return np.int64(load(_at(numbers, lane, slot), np.int32)) & STEPS


@inlined
def steps_back(numbers, lane, slot):
    """Return the number of steps from the first stored step of the episode to a row."""
    back = steps_since(numbers, lane, slot)
    return min(back, rows_before(numbers, lane, slot)) if back else back


@inlined
def has_ended(numbers, lane, slot):
    """Whether the episode of a row has ended."""
    return load(_at(numbers, lane, slot) + _ROWS_TO_END, np.int32) != 0


@kernel
def reach(address, cells, count, back, ahead, ended):
    """Implement :func:`rlbuf_td.kernels.episodes.spans`; all arguments are addresses,
    but the count of the cells."""
    numbers = numbers_at(address)
    cell = carray(pointer(cells), count, np.int64)
    for i in range(min(_SOON, count)):
        expect(numbers, cell[i])
    for i in range(count):
        if i + _SOON < count:
            expect(numbers, cell[i + _SOON])
        slot, lane = split(cell[i], numbers.lanes)
        store(back + 8 * i, steps_back(numbers, lane, slot), np.int64)
        store(ahead + 8 * i, steps_ahead(numbers, lane, slot), np.int64)
        store(ended + i, has_ended(numbers, lane, slot), np.bool_)


@kernel
def whole(address, only_finished: bool, first, length):
    """Implement :func:`rlbuf_td.kernels.episodes.whole`; return the number of episodes.
    O(E + K)."""
    numbers = numbers_at(address)
    count = 0
    for lane in range(numbers.lanes):
        serial = load(numbers.tail + 8 * lane, np.int64)
        written = load(numbers.written + 8 * lane, np.int64)
        while serial < written:
            slot = serial % numbers.steps
            rows = steps_ahead(numbers, lane, slot) + 1
            if not steps_since(numbers, lane, slot) and (
                has_ended(numbers, lane, slot) or not only_finished
            ):
                store(first + 8 * count, slot * numbers.lanes + lane, np.int64)
                store(length + 8 * count, rows, np.int64)
                count += 1
            serial += rows
    return count


@inlined
def _ends(record, row):
    """Whether a flag of the row at an address is set."""
    for flag in range(record.flag_count):
        offset = load(record.flags + 16 * flag, np.int64)
        size = load(record.flags + 16 * flag + 8, np.int64)
        for byte in range(offset, offset + size):
            if load(row + byte, np.uint8):
                return True
    return False


@inlined
def _id_of(record, row):
    """Return the trajectory id of the row at address ``row``; 0 if rows have none."""
    id_address = row + record.id_offset
    if record.id_size == 8:
        return load(id_address, np.int64)
    if record.id_size == 4:
        return np.int64(load(id_address, np.int32))
    if record.id_size == 2:
        return np.int64(load(id_address, np.int16))
    return np.int64(load(id_address, np.int8)) if record.id_size else np.int64(0)


@inlined
def _row(record, lane, slot):
    return record.rows + (slot * record.lanes + lane) * record.row_bytes


@inlined
def _put(address, back, rows_to_end):
    store(address, np.int32(back), np.int32)
    store(address + _ROWS_TO_END, np.int32(rows_to_end), np.int32)


@kernel
def _close(record, lane, oldest, written):
    """Write ``rows_to_end`` of the stored rows, from the serial ``oldest`` on, of the
    episode that ends before ``written``."""
    last = written - 1
    if last < oldest:
        return
    slot = last % record.steps
    lane_at = record.numbers + 8 * lane * record.steps
    count = min(np.int64(load(lane_at + 8 * slot, np.int32)) & STEPS, last - oldest) + 1
    for k in range(1, count + 1):
        store(lane_at + 8 * slot + _ROWS_TO_END, np.int32(k), np.int32)
        slot = slot - 1 if slot else record.steps - 1


@kernel
def note(record, lane, first, count, skips):
    """Write the numbers of ``count`` new rows of a lane, whose bytes are stored, from
    the serial ``first`` on.

    The rows are not published yet; those that they replace are given up. ``skips``:
    whether the rows just before ``first`` have never been stored.
    """
    follows = record.following + 8 * lane
    back = load(follows, np.int64)
    id_before = load(follows + 8 * record.lanes * ID, np.int64)
    slot = first % record.steps
    oldest = load(record.tail + 8 * lane, np.int64)
    if skips:
        back = MOST
        id_before = _id_of(record, _row(record, lane, slot))
        oldest = first
    for serial in range(first, first + count):
        row = _row(record, lane, slot)
        traj_id = _id_of(record, row)
        if back < 0 or (back > 0 and traj_id != id_before):
            _close(record, lane, oldest, serial)
            back = min(back, np.int64(0))
        _put(
            record.numbers + 8 * (lane * record.steps + slot),
            BREAK if back < 0 else back,
            0,
        )
        id_before = traj_id
        back = min(max(back, np.int64(0)) + 1, MOST)
        if _ends(record, row):
            _close(record, lane, oldest, serial + 1)
            back = np.int64(0)
        slot = slot + 1 if slot + 1 < record.steps else np.int64(0)
    after = record.following_after + 8 * lane
    store(after, back, np.int64)
    store(after + 8 * record.lanes * ID, id_before, np.int64)


@kernel
def note_rows(address, serials):
    """Note the new rows of a write; ``serials`` is the address of those that
    :func:`rlbuf_td.kernels.episodes.lanes_of_write` describes."""
    record = record_at(address)
    _, written, noted = carray(pointer(serials), (3, record.lanes), np.int64)
    for lane in range(record.lanes):
        first = max(noted[lane], written[lane] - record.steps)
        if first < written[lane]:
            note(record, lane, first, written[lane] - first, first > noted[lane])


@kernel
def build(address):
    """Implement :func:`rlbuf_td.kernels.episodes.note_` for all stored rows."""
    record = record_at(address)
    for lane in range(record.lanes):
        follows = record.following + 8 * lane
        tail = load(record.tail + 8 * lane, np.int64)
        written = load(record.written + 8 * lane, np.int64)
        if tail == written:
            continue
        lane_at = record.numbers + 8 * lane * record.steps
        slot = tail % record.steps
        back = 0
        id_before = 0
        ended = False
        for serial in range(tail, written):
            row_numbers = lane_at + 8 * slot
            row = _row(record, lane, slot)
            old = np.int64(load(row_numbers, np.int32))
            traj_id = _id_of(record, row)
            if serial == tail:
                back = min(old & STEPS, MOST)
            elif old < 0 or ended or traj_id != id_before:
                _close(record, lane, tail, serial)
                back = np.int64(0)
            else:
                back = min(back + 1, MOST)
            _put(row_numbers, BREAK if old < 0 else back, 0)
            id_before = traj_id
            ended = _ends(record, row)
            slot = slot + 1 if slot + 1 < record.steps else np.int64(0)
        if ended:
            _close(record, lane, tail, written)
        store(follows + 8 * record.lanes * ID, id_before, np.int64)
        if load(follows, np.int64) >= 0:
            store(follows, np.int64(0) if ended else min(back + 1, MOST), np.int64)
