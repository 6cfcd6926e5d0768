"""The bitmap of cuts on the CPU: the loops of :class:`rlbuf_td.kernels.boundaries.BitBoundaries`.

All take the bitmap as ``cut, over, head, starts``: bits of lane ``e`` in ``cut[e]``, level ``k`` from word
``starts[k]`` on. Bit ``t`` of the first level is step ``t``; bit ``w`` of the next one says whether any bit of word
``w`` below is set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_kernel = njit(cache=True, nogil=True, error_model="numpy")
_ALL, _ONE, _SIX, _63 = np.uint64(2**64 - 1), np.uint64(1), np.uint64(6), np.uint64(63)


def _counter(instruction: str) -> Any:
    def count(typing_context: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, instruction)(arguments[0], ir.Constant(ir.IntType(1), 1))

        return types.uint64(types.uint64), generate

    return intrinsic(count)


_trailing_zeros, _leading_zeros = _counter("cttz"), _counter("ctlz")  # of a word that is not 0


@_kernel
def _set(cut, lane, starts, t):
    """Set bit ``t``, and those above it."""
    t = np.uint64(t)
    for level in range(len(starts) - 1):
        word = np.uint64(starts[level]) + (t >> _SIX)
        old = cut[lane, word]
        cut[lane, word] = old | (_ONE << (t & _63))
        if old != 0:
            return
        t >>= _SIX


@_kernel
def _clear(cut, lane, starts, t):
    """Clear bit ``t``, and those above it that have nothing set below any more."""
    t = np.uint64(t)
    for level in range(len(starts) - 1):
        word = np.uint64(starts[level]) + (t >> _SIX)
        new = cut[lane, word] & ~(_ONE << (t & _63))
        cut[lane, word] = new
        if new != 0:
            return
        t >>= _SIX


@_kernel
def _bit(words, lane, t):
    t = np.uint64(t)
    return (words[lane, t >> _SIX] >> (t & _63)) & _ONE != 0


@_kernel
def _put(words, lane, t, value):
    t = np.uint64(t)
    bit = _ONE << (t & _63)
    if value:
        words[lane, t >> _SIX] |= bit
    else:
        words[lane, t >> _SIX] &= ~bit


@_kernel
def _assign(cut, lane, starts, t, value):
    if value:
        _set(cut, lane, starts, t)
    else:
        _clear(cut, lane, starts, t)


@_kernel
def write(cut, over, head, starts, end, name, named, start, count):
    """Take in ``count`` steps from ``start`` on; see :meth:`FlagBoundaries.write`."""
    steps, lanes = end.shape
    stop = start + count
    before = start - 1 if start > 0 else steps - 1
    follows = head[0] == before
    for lane in range(lanes):
        if follows:
            ended = _bit(over, lane, before)
            if named and not ended and name[before, lane] != name[start, lane]:
                ended = True
                _put(over, lane, before, True)
            _assign(cut, lane, starts, before, ended)
        else:
            _set(cut, lane, starts, before)
        for t in range(start, stop):
            ended = end[t, lane]
            if named and t + 1 < stop:
                ended = ended or name[t, lane] != name[t + 1, lane]
            _put(over, lane, t, ended)
            _assign(cut, lane, starts, t, ended or t + 1 == stop)
    head[0] = stop - 1


@_kernel
def _descend(cut, lane, starts, level, position, first):
    """Follow the first (or last) set bit of each level down to the rows."""
    while level > 0:
        level -= 1
        word = cut[lane, np.uint64(starts[level]) + position]
        bit = _trailing_zeros(word) if first else _63 - _leading_zeros(word)
        position = (position << _SIX) + bit
    return np.int64(position)


@_kernel
def _next(cut, lane, starts, t):
    """Return the first cut at ``t`` or later, -1 if there is none."""
    position = np.uint64(t)
    for level in range(len(starts) - 1):
        at = np.uint64(starts[level]) + (position >> _SIX)
        if at >= np.uint64(starts[level + 1]):
            return np.int64(-1)
        word = cut[lane, at] & (_ALL << (position & _63))
        if word != 0:
            position = ((position >> _SIX) << _SIX) + _trailing_zeros(word)
            return _descend(cut, lane, starts, level, position, True)
        position = (position >> _SIX) + _ONE
    return np.int64(-1)


@_kernel
def _previous(cut, lane, starts, t):
    """Return the last cut at ``t`` or earlier, -1 if there is none."""
    if t < 0:
        return np.int64(-1)
    position = np.uint64(t)
    for level in range(len(starts) - 1):
        word = cut[lane, np.uint64(starts[level]) + (position >> _SIX)] & (_ALL >> (_63 - (position & _63)))
        if word != 0:
            position = ((position >> _SIX) << _SIX) + (_63 - _leading_zeros(word))
            return _descend(cut, lane, starts, level, position, False)
        position >>= _SIX
        if position == 0:
            return np.int64(-1)
        position -= _ONE
    return np.int64(-1)


@_kernel
def span(cut, starts, steps, lane, t):
    """Return how many steps a trajectory reaches back and ahead from step ``t`` of a lane."""
    last = _next(cut, lane, starts, t)
    if last < 0:
        last = _next(cut, lane, starts, 0)
    before = _previous(cut, lane, starts, t - 1)
    if before < 0:
        before = _previous(cut, lane, starts, steps - 1)
    back, ahead = t - before - 1, last - t
    return back + steps if back < 0 else back, ahead + steps if ahead < 0 else ahead


@_kernel
def reach(cut, over, head, starts, steps, cells, back, ahead, ended):
    """Write how far the trajectories of rows reach; see :meth:`FlagBoundaries.reach`."""
    lanes = len(cut)
    for i in range(len(cells)):
        t, lane = cells[i] // lanes, cells[i] % lanes
        back[i], ahead[i] = span(cut, starts, steps, lane, t)
        last = t + ahead[i]
        ended[i] = _bit(over, lane, last - steps if last >= steps else last)
