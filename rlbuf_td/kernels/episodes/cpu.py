"""Writing the bitmap of cuts on the CPU: the loops of :class:`rlbuf_td.kernels.episodes.BitBoundaries`.

All take the bitmap as ``bits, starts``: in ``bits[e]`` lie the cuts of lane ``e``, level ``k`` from word ``starts[k]``
on, and from ``starts[-1]`` on which steps are over. Bit ``t`` of the first level is step ``t``; bit ``w`` of the next
one says whether any bit of word ``w`` below is set.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_kernel = njit(cache=True, nogil=True, error_model="numpy")
_ONE, _SIX, _63 = np.uint64(1), np.uint64(6), np.uint64(63)


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


@_kernel
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
