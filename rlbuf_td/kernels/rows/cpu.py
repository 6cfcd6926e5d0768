"""The CPU loops of :mod:`rlbuf_td.kernels.rows`; they take the memory address of each tensor."""

from typing import NamedTuple

import numpy as np
from numba import carray, types

from rlbuf_td.kernels.compiled import copy_few, inlined, kernel, load, pointer

_PAGE = 4096
_SAMPLED = 16  # about this number of rows of a batch are checked


class Column(NamedTuple):
    """A column of numbers: the address of the first one, and the bytes from each one to the next."""

    address: int
    step: int


class Sampled(NamedTuple):
    """The rows of a batch, and when they were sampled: addresses of ``batch`` int64 each."""

    rows: int
    stamp: int
    batch: int


@kernel
def put_values(target, values, width, count, mask):
    for i in range(count):
        at = values.address + i * values.step
        if load(mask + i, np.bool_) and np.isnan(load(at, np.float64) if width == 8 else load(at, np.float32)):
            return i
    for i in range(count):
        if load(mask + i, np.bool_):
            copy_few(target.address + i * target.step, values.address + i * values.step, width)
    return -1


@kernel
def put_rows(target, column, width, rows, mask, count):
    for i in range(count):
        if load(mask + i, np.bool_):
            copy_few(target + i * width, column.address + load(rows + 8 * i, np.int64) * column.step, width)


@kernel
def _difference(a, b):
    return np.int64(np.uint64(a) - np.uint64(b))  # wraps around; the overflow of signed numbers would be undefined


@inlined
def _sampled(sampled):
    rows, stamp = pointer(sampled.rows), pointer(sampled.stamp)
    return carray(rows, sampled.batch, np.int64), carray(stamp, sampled.batch, np.int64)


@kernel
def skip_ring(kept, sampled, clock, last, steps, lanes):  # see rows.skip_ring for the arguments
    """Count the rows rewritten since sampling; unless ``kept`` is 0, copy ``index`` there, with -1 for these rows."""
    given, stamps = _sampled(sampled)
    left = carray(pointer(kept), len(given) if kept else 0, np.int64)
    count = 0
    for j in range(len(given)):
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


@kernel
def skip_newer(kept, sampled, clock, written, cells):
    """Count the rows whose write time at address ``written`` (``[cells]``) is newer than the stamp; see above."""
    given, stamps = _sampled(sampled)
    left, count = carray(pointer(kept), len(given), np.int64), 0
    for j in range(len(given)):
        row = given[j]
        if 0 <= row < cells:
            since = _difference(clock, stamps[j])
            if since < 0 or _difference(load(written + 8 * row, np.int64), stamps[j]) > 0:
                row = -1
                count += 1
        left[j] = row
    return count


_mincore = types.ExternalFunction("mincore", types.int64(types.int64, types.int64, types.int64))


@kernel
def is_absent(base, stride, cells, count):
    """Whether one of about ``_SAMPLED`` rows in ``cells`` is not in memory and must be read from the disk."""
    found = np.zeros(1, np.uint8)
    step = max(1, count // _SAMPLED)
    for i in range(0, count, step):
        page = (base + load(cells + 8 * i, np.int64) * stride) // _PAGE * _PAGE
        found[0] = 1
        _mincore(page, np.int64(_PAGE), np.int64(found.ctypes.data))
        if load(np.int64(found.ctypes.data), np.uint8) & 1 == 0:
            return True
    return False
