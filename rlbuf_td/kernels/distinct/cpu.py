"""The CPU loop of :func:`rlbuf_td.kernels.distinct.append_distinct_`."""

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import kernel, pointer

_ONE, _WORD = np.uint64(1), np.uint64(64)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio: close rows get distant places


@kernel
def append_distinct(out, kept, values):
    # A hash set with open addressing. It has at least twice as many places as ``out``, so a free one is always found.
    bits = _ONE
    while (_ONE << bits) < np.uint64(2 * len(out)):
        bits += _ONE
    places, last = np.full(np.int64(_ONE << bits), -1, np.int64), (_ONE << bits) - _ONE
    count = 0
    for i in range(kept + len(values)):
        if count == len(out):
            break
        value = out[i] if i < kept else values[i - kept]
        place = (np.uint64(value) * _SPREAD) >> (_WORD - bits)
        while places[place] >= 0 and places[place] != value:
            place = (place + _ONE) & last
        if places[place] < 0:
            places[place] = out[count] = value
            count += 1
    return count


@kernel
def append_at(out, size, kept, values, count):
    """Call :func:`append_distinct` for arrays at addresses."""
    return append_distinct(carray(pointer(out), size, np.int64), kept, carray(pointer(values), count, np.int64))
