"""The bitmap of cuts on the CPU: the loops of :class:`rlbuf_td.kernels.boundaries.BitBoundaries`.

All take the bitmap as ``bits, starts``: in ``bits[e]`` lie the cuts of lane ``e``, level ``k`` from word ``starts[k]``
on, and from ``starts[-1]`` on which steps are over. Bit ``t`` of the first level is step ``t``; bit ``w`` of the next
one says whether any bit of word ``w`` below is set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_kernel = njit(cache=True, nogil=True, error_model="numpy")
#: For what is called once a row: an array handed to a function is seven numbers on the stack.
inlined = njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
_ALL, _ONE, _SIX, _63 = np.uint64(2**64 - 1), np.uint64(1), np.uint64(6), np.uint64(63)


def _counter(instruction: str) -> Any:
    def count(typing_context: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, instruction)(arguments[0], ir.Constant(ir.IntType(1), 1))

        return types.uint64(types.uint64), generate

    return intrinsic(count)


_trailing_zeros, _leading_zeros = _counter("cttz"), _counter("ctlz")  # of a word that is not 0


@_kernel
def _set(bits, lane, starts, t):
    """Set bit ``t``, and those above it."""
    t = np.uint64(t)
    for level in range(len(starts) - 1):
        word = np.uint64(starts[level]) + (t >> _SIX)
        old = bits[lane, word]
        bits[lane, word] = old | (_ONE << (t & _63))
        if old != 0:
            return
        t >>= _SIX


@_kernel
def _clear(bits, lane, starts, t):
    """Clear bit ``t``, and those above it that have nothing set below any more."""
    t = np.uint64(t)
    for level in range(len(starts) - 1):
        word = np.uint64(starts[level]) + (t >> _SIX)
        new = bits[lane, word] & ~(_ONE << (t & _63))
        bits[lane, word] = new
        if new != 0:
            return
        t >>= _SIX


@inlined
def _is_over(bits, lane, starts, t):
    """Return whether a trajectory ended with step ``t``."""
    t = np.uint64(t)
    return (bits[lane, np.uint64(starts[-1]) + (t >> _SIX)] >> (t & _63)) & _ONE != 0


@_kernel
def _put_over(bits, lane, starts, t, value):
    """Set whether a trajectory ended with step ``t``."""
    t = np.uint64(t)
    word, bit = np.uint64(starts[-1]) + (t >> _SIX), _ONE << (t & _63)
    bits[lane, word] = bits[lane, word] | bit if value else bits[lane, word] & ~bit


@_kernel
def _assign(bits, lane, starts, t, value):
    if value:
        _set(bits, lane, starts, t)
    else:
        _clear(bits, lane, starts, t)


@_kernel
def write(bits, starts, head, end, name, named, start, count):
    """Take in ``count`` steps from ``start`` on; see :meth:`FlagBoundaries.write`."""
    steps, lanes = end.shape
    stop = start + count
    before = start - 1 if start > 0 else steps - 1
    follows = head[0] == before
    for lane in range(lanes):
        if follows:
            ended = _is_over(bits, lane, starts, before)
            if named and not ended and name[before, lane] != name[start, lane]:
                ended = True
                _put_over(bits, lane, starts, before, True)
            _assign(bits, lane, starts, before, ended)
        else:
            _set(bits, lane, starts, before)
        for t in range(start, stop):
            ended = end[t, lane]
            if named and t + 1 < stop:
                ended = ended or name[t, lane] != name[t + 1, lane]
            _put_over(bits, lane, starts, t, ended)
            _assign(bits, lane, starts, t, ended or t + 1 == stop)
    head[0] = stop - 1


@_kernel
def _descend(bits, lane, starts, level, position, first):
    """Follow the first (or last) set bit of each level down to the rows."""
    while level > 0:
        level -= 1
        word = bits[lane, np.uint64(starts[level]) + position]
        bit = _trailing_zeros(word) if first else _63 - _leading_zeros(word)
        position = (position << _SIX) + bit
    return np.int64(position)


@_kernel
def _next_above(bits, lane, starts, position):
    """Return the first cut in word ``position`` or a later one, by the summaries; -1 if there is none."""
    for level in range(1, len(starts) - 1):
        at = np.uint64(starts[level]) + (position >> _SIX)
        if at >= np.uint64(starts[level + 1]):
            return np.int64(-1)
        word = bits[lane, at] & (_ALL << (position & _63))
        if word != 0:
            position = ((position >> _SIX) << _SIX) + _trailing_zeros(word)
            return _descend(bits, lane, starts, level, position, True)
        position = (position >> _SIX) + _ONE
    return np.int64(-1)


@inlined
def _next(bits, lane, starts, t):
    """Return the first cut at ``t`` or later, -1 if there is none."""
    position = np.uint64(t)
    word = bits[lane, position >> _SIX] & (_ALL << (position & _63))
    if word != 0:
        return np.int64(((position >> _SIX) << _SIX) + _trailing_zeros(word))
    return _next_above(bits, lane, starts, (position >> _SIX) + _ONE)


@_kernel
def _previous_above(bits, lane, starts, position):
    """Return the last cut in word ``position`` or an earlier one, by the summaries; -1 if there is none."""
    for level in range(1, len(starts) - 1):
        word = bits[lane, np.uint64(starts[level]) + (position >> _SIX)] & (_ALL >> (_63 - (position & _63)))
        if word != 0:
            position = ((position >> _SIX) << _SIX) + (_63 - _leading_zeros(word))
            return _descend(bits, lane, starts, level, position, False)
        position >>= _SIX
        if position == 0:
            return np.int64(-1)
        position -= _ONE
    return np.int64(-1)


@inlined
def _previous(bits, lane, starts, t):
    """Return the last cut at ``t`` or earlier, -1 if there is none."""
    if t < 0:
        return np.int64(-1)
    position = np.uint64(t)
    word = bits[lane, position >> _SIX] & (_ALL >> (_63 - (position & _63)))
    position >>= _SIX
    if word != 0:
        return np.int64((position << _SIX) + (_63 - _leading_zeros(word)))
    return np.int64(-1) if position == 0 else _previous_above(bits, lane, starts, position - _ONE)


@inlined
def split(cell, lanes):
    """Return time step and lane of a flat row."""
    if lanes == 1:
        return cell, 0
    t = np.int64(np.uint64(cell) // np.uint64(lanes))
    return t, cell - t * lanes


@inlined
def steps_ahead(bits, starts, steps, lane, t):
    """Return how many steps after step ``t`` of a lane its trajectory ends."""
    last = _next(bits, lane, starts, t)
    return last - t if last >= 0 else _next(bits, lane, starts, 0) + steps - t


@inlined
def steps_back(bits, starts, steps, lane, t):
    """Return how many steps before step ``t`` of a lane its trajectory begins."""
    before = _previous(bits, lane, starts, t - 1)
    return t - before - 1 if before >= 0 else t + steps - _previous(bits, lane, starts, steps - 1) - 1


@inlined
def is_cut(bits, lane, t):
    """Return whether the step after step ``t`` of a lane does not follow it."""
    t = np.uint64(t)
    return (bits[lane, t >> _SIX] >> (t & _63)) & _ONE != 0


@inlined
def is_over(bits, starts, steps, lane, t):
    """Return whether a trajectory ended with step ``t``, which may lie beyond the end of the ring."""
    return _is_over(bits, lane, starts, t - steps if t >= steps else t)


@_kernel
def reach(bits, starts, steps, cells, back, ahead, ended):
    """Write how far the trajectories of rows reach; see :meth:`FlagBoundaries.reach`."""
    lanes = len(bits)
    for i in range(len(cells)):
        t, lane = split(cells[i], lanes)
        back[i] = steps_back(bits, starts, steps, lane, t)
        ahead[i] = steps_ahead(bits, starts, steps, lane, t)
        ended[i] = is_over(bits, starts, steps, lane, t + ahead[i])
