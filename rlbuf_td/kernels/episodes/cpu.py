"""Look-ups and writes in the bitmap of :class:`rlbuf_td.kernels.episodes.BitBoundaries`.

Step ``t`` of a lane is a *boundary* if its trajectory does not continue at step ``t + 1``. The 64-bit words ``bits[e]``
describe lane ``e`` in several levels, and level ``k`` begins at word ``starts[k]``. In level 0, bit ``t`` is set if
step ``t`` is a boundary. In each higher level, bit ``w`` is set if word ``w`` of the level below is not 0.

The last stored step of an unfinished trajectory is also a boundary. The words from ``starts[-1]`` on mark only the
steps with which a trajectory has ended.

The argument ``bitmap`` is a :class:`~rlbuf_td.kernels.episodes.Bitmap`, ``marks`` an array with the record
:data:`~rlbuf_td.kernels.episodes.MARKS`.
"""

import numpy as np
from numba import carray
from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros  # of a nonzero word

from rlbuf_td.kernels.compiled import inlined, kernel, load, pointer, prefetch, same_bytes, store

_ALL, _ONE, _SIX, _63 = np.uint64(2**64 - 1), np.uint64(1), np.uint64(6), np.uint64(63)


@inlined
def _start(bitmap, level):
    return np.uint64(load(bitmap.starts + 8 * level, np.int64))


@inlined
def _word(bitmap, lane, position):
    return load(bitmap.bits + 8 * (lane * bitmap.words + np.int64(position)), np.uint64)


@inlined
def _bit(bitmap, lane, start, t):
    return (_word(bitmap, lane, start + (np.uint64(t) >> _SIX)) >> (np.uint64(t) & _63)) & _ONE != 0


@inlined
def expect(bitmap, cell):
    """Prefetch the word that contains the boundary bit of a row."""
    t, lane = split(cell, bitmap.lanes)
    prefetch(bitmap.bits + 8 * (lane * bitmap.words + (t >> 6)))


@kernel
def _descend(bitmap, lane, level, position, first):
    """Return the first boundary (the last if not ``first``) among the steps that bit ``position`` of a level covers."""
    while level > 0:
        level -= 1
        word = _word(bitmap, lane, _start(bitmap, level) + position)
        bit = trailing_zeros(word) if first else _63 - leading_zeros(word)
        position = (position << _SIX) + bit
    return np.int64(position)


@kernel
def _next(bitmap, lane, t):
    """Return the first trajectory boundary at step ``t`` or later, -1 if there is none."""
    position = np.uint64(t)
    for level in range(bitmap.levels):
        at = _start(bitmap, level) + (position >> _SIX)
        if at >= _start(bitmap, level + 1):
            return np.int64(-1)
        word = _word(bitmap, lane, at) & (_ALL << (position & _63))
        if word != 0:
            position = ((position >> _SIX) << _SIX) + trailing_zeros(word)
            return _descend(bitmap, lane, level, position, True)
        position = (position >> _SIX) + _ONE
    return np.int64(-1)


@kernel
def _previous(bitmap, lane, t):
    """Return the last trajectory boundary at step ``t`` or earlier, -1 if there is none."""
    if t < 0:
        return np.int64(-1)
    position = np.uint64(t)
    for level in range(bitmap.levels):
        word = _word(bitmap, lane, _start(bitmap, level) + (position >> _SIX)) & (_ALL >> (_63 - (position & _63)))
        if word != 0:
            position = ((position >> _SIX) << _SIX) + (_63 - leading_zeros(word))
            return _descend(bitmap, lane, level, position, False)
        position >>= _SIX
        if position == 0:
            return np.int64(-1)
        position -= _ONE
    return np.int64(-1)


@kernel
def _next_around(bitmap, lane, t):
    """Return the first boundary from step ``t`` on, or else the lane's first boundary plus the lane's length."""
    following = _next(bitmap, lane, t)
    return following if following >= 0 else _next(bitmap, lane, np.int64(0)) + bitmap.steps


@inlined
def steps_ahead(bitmap, lane, t):
    """Return the number of steps from step ``t`` of a lane to the last stored step of its trajectory."""
    position, bit = np.uint64(t) >> _SIX, np.uint64(t) & _63
    window = _word(bitmap, lane, position) >> bit  # the next 64 steps, which hold a cut more often than one word
    if position + _ONE < _start(bitmap, 1):
        window |= (_word(bitmap, lane, position + _ONE) << _ONE) << (_63 - bit)
    return np.int64(trailing_zeros(window)) if window != 0 else _next_around(bitmap, lane, t) - t


@kernel
def steps_back(bitmap, lane, t):
    """Return the number of steps from the first stored step of the trajectory to step ``t`` of a lane."""
    before, steps = _previous(bitmap, lane, t - 1), bitmap.steps
    return t - before - 1 if before >= 0 else t + steps - _previous(bitmap, lane, steps - 1) - 1


@inlined
def is_cut(bitmap, lane, t):
    return _bit(bitmap, lane, np.uint64(0), t)


@inlined
def is_over(bitmap, lane, t):
    return _bit(bitmap, lane, _start(bitmap, bitmap.levels), t - bitmap.steps if t >= bitmap.steps else t)


@inlined
def split(cell, lanes):
    if lanes == 1:
        return cell, np.int64(0)
    t = np.int64(np.uint64(cell) // np.uint64(lanes))
    return t, cell - t * lanes


@kernel
def reach(bitmap, cells, within):
    """Implement :meth:`BitBoundaries.reach`."""
    count = len(cells)
    back, ahead, over = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.bool_)
    for i in range(count):
        t, lane = split(cells[i], bitmap.lanes)
        back[i] = min(steps_back(bitmap, lane, t), within)
        ahead[i] = min(steps_ahead(bitmap, lane, t), within)
        over[i] = is_over(bitmap, lane, t + ahead[i])
    return back, ahead, over


@kernel
def whole(bitmap, oldest, live, begun, only_finished):
    """Implement :meth:`BitBoundaries.whole`."""
    count, steps, lanes = 0, bitmap.steps, bitmap.lanes
    first, length = np.empty(live.sum(), np.int64), np.empty(live.sum(), np.int64)
    for lane in range(lanes):
        t, left, is_whole = oldest[lane], live[lane], begun[lane]
        while left > 0:
            rows = min(steps_ahead(bitmap, lane, t) + 1, left)
            if is_whole and (not only_finished or is_over(bitmap, lane, t + rows - 1)):
                first[count], length[count] = t * lanes + lane, rows
                count += 1
            t, left, is_whole = t + rows, left - rows, True
            t = t - steps if t >= steps else t
    return first[:count].copy(), length[:count].copy()


@inlined
def _put(bits, lane, first, t, value):
    """Set or clear bit ``t`` of the level that begins at word ``first``; return the old and the new word."""
    word, bit = first + (t >> _SIX), _ONE << (t & _63)
    old = bits[lane, word]
    new = old | bit if value else old & ~bit
    bits[lane, word] = new
    return old, new


@kernel
def _put_cut(bits, lane, starts, t, value):
    """Set or clear the boundary bit of step ``t``, and update the levels above."""
    t = np.uint64(t)
    for level in range(len(starts) - 1):
        old, new = _put(bits, lane, np.uint64(starts[level]), t, value)
        if (old if value else new) != 0:  # the level above already has this value
            return
        t >>= _SIX


@inlined
def _is_renamed(marks, lane, t, following):
    """Whether two steps of a lane have different trajectory ids."""
    name = marks.name + lane * marks.name_lane
    return not same_bytes(name + t * marks.name_step, name + following * marks.name_step, marks.name_size)


@inlined
def _write_lane(marks, bits, starts, lane, start, stop):
    """Record a write of the steps ``start`` to ``stop - 1`` of one lane."""
    head = marks.head + 8 * lane
    before = start - 1 if start > 0 else marks.steps - 1
    follows, last, over = load(head, np.int64) == before, np.uint64(before), np.uint64(starts[-1])
    ended = (bits[lane, over + (last >> _SIX)] >> (last & _63)) & _ONE != 0
    if follows and not ended and _is_renamed(marks, lane, before, start):
        ended = True
        _put(bits, lane, over, last, True)
    _put_cut(bits, lane, starts, before, ended or not follows)
    oldest = np.uint64(stop - 1)  # the last step that this write replaces: the oldest step then follows it
    store(marks.begun + lane, (bits[lane, oldest >> _SIX] >> (oldest & _63)) & _ONE != 0, np.bool_)
    for t in range(start, stop):
        ended = load(marks.end + t * marks.end_step + lane * marks.end_lane, np.bool_)
        if not ended and t + 1 < stop:
            ended = _is_renamed(marks, lane, t, t + 1)
        _put(bits, lane, over, np.uint64(t), ended)
        _put_cut(bits, lane, starts, t, ended or t + 1 == stop)
    store(head, stop - 1, np.int64)


@kernel
def write(marks, start, count):
    """Implement :meth:`BitBoundaries.write`; ``marks`` is the result of :meth:`BitBoundaries.marks`."""
    bits, starts = _words(marks[0])
    for lane in range(marks[0].lanes):
        _write_lane(marks[0], bits, starts, lane, start, start + count)


@kernel
def write_rows(marks, rows):
    """Implement :meth:`BitBoundaries.write_rows`."""
    bits, starts = _words(marks[0])
    for i in range(len(rows)):
        t, lane = split(rows[i], marks[0].lanes)
        _write_lane(marks[0], bits, starts, lane, t, t + 1)


@inlined
def _words(marks):
    bits = carray(pointer(marks.bits), (marks.lanes, marks.words), np.uint64)
    return bits, carray(pointer(marks.starts), marks.levels + 1, np.int64)
