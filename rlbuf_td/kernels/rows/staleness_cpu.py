"""The CPU's twins of :mod:`rlbuf_td.kernels.rows.staleness`.

Each takes the address where to put the rows that are left (0: nowhere), those of ``index`` and ``stamp``, and their
length, and returns how many rows it skips.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from rlbuf_td.kernels.addresses import pointer

_kernel = njit(cache=True, nogil=True, error_model="numpy")


@_kernel
def _difference(a: int, b: int) -> int:
    """Subtract as int64 wraps: of signed numbers the compiler assumes that they do not."""
    return np.int64(np.uint64(a) - np.uint64(b))


@_kernel
def skip_ring(kept: int, index: int, stamp: int, rows: int, clock: int, last: int, steps: int, lanes: int) -> int:
    """See :func:`rlbuf_td.kernels.rows.staleness.skip_ring`."""
    given, stamps = carray(pointer(index), rows, np.int64), carray(pointer(stamp), rows, np.int64)
    left = carray(pointer(kept), rows if kept else 0, np.int64)
    count = 0
    for j in range(rows):
        row = given[j]
        since = _difference(clock, stamps[j])
        if since != 0 and row >= 0:
            age = last - (row // lanes if lanes > 1 else row)
            if age < 0:
                age += steps
            if since < 0 or age < since:
                row = -1
                count += 1
        if kept:
            left[j] = row
    return count


@_kernel
def skip_recent(kept: int, index: int, rows: int, since: int, last: int, steps: int, lanes: int) -> int:
    """See :func:`rlbuf_td.kernels.rows.staleness.skip_recent`."""
    given, left = carray(pointer(index), rows, np.int64), carray(pointer(kept), rows if kept else 0, np.int64)
    count = 0
    for j in range(rows):
        row = given[j]
        age = last - (row // lanes if lanes > 1 else row)
        if age < 0:
            age += steps
        if row >= 0 and age < since:
            row = -1
            count += 1
        if kept:
            left[j] = row
    return count


@_kernel
def skip_newer(kept: int, index: int, stamp: int, rows: int, clock: int, written: int, total: int) -> int:
    """See :func:`rlbuf_td.kernels.rows.staleness.skip_newer`; ``written`` is an address of ``total`` int64."""
    given, stamps = carray(pointer(index), rows, np.int64), carray(pointer(stamp), rows, np.int64)
    times = carray(pointer(written), total, np.int64)
    left = carray(pointer(kept), rows if kept else 0, np.int64)
    count = 0
    for j in range(rows):
        row = given[j]
        if 0 <= row < total and (_difference(times[row], stamps[j]) > 0 or _difference(clock, stamps[j]) < 0):
            row = -1
            count += 1
        if kept:
            left[j] = row
    return count
