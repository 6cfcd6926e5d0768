"""The loops of :mod:`rlbuf_td.kernels.rows` on the CPU: copies, stale rows, and pages of mapped files, by address."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from rlbuf_td.kernels.compiled import copy_few, inlined, kernel, load, pointer

_PAGE, _WILL_NEED = 4096, 3
_SAMPLED = 16


# -- copies: a column is an address and a stride in bytes


@kernel
def put_values(target, target_stride, values, values_stride, width, count, mask):
    for i in range(count):
        at = values + i * values_stride * width
        if load(mask + i, np.bool_) and np.isnan(load(at, np.float64) if width == 8 else load(at, np.float32)):
            return i
    for i in range(count):
        if load(mask + i, np.bool_):
            copy_few(target + i * target_stride * width, values + i * values_stride * width, width)
    return -1


# -- stale rows


@kernel
def _difference(a: int, b: int) -> int:
    """Subtract as int64 wraps: of signed numbers the compiler assumes that they do not."""
    return np.int64(np.uint64(a) - np.uint64(b))


@kernel
def skip_ring(kept: int, index: int, stamp: int, rows: int, clock: int, last: int, steps: int, lanes: int) -> int:
    """Write the rows that are left to ``kept`` (0: nowhere); return how many are skipped. Tensors are addresses."""
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


# -- pages of mapped files


def _of_libc(name: str) -> Any:
    def call(typing_context: Any, first: Any, second: Any, third: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(64)
            kind = ir.FunctionType(word, [word, word, word])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, arguments)

        return types.int64(types.int64, types.int64, types.int64), generate

    return intrinsic(call)


_madvise, _mincore = _of_libc("madvise"), _of_libc("mincore")


@kernel
def is_absent(base, stride, cells, count):
    """Return whether one of some rows of a batch is not in memory."""
    found = np.zeros(1, np.uint8)
    step = max(1, count // _SAMPLED)
    for i in range(0, count, step):
        page = (base + load(cells + 8 * i, np.int64) * stride) // _PAGE * _PAGE
        found[0] = 1
        _mincore(page, np.int64(_PAGE), np.int64(found.ctypes.data))
        if load(np.int64(found.ctypes.data), np.uint8) & 1 == 0:
            return True
    return False


@inlined
def _ask(first, last, until):
    """Ask for the pages from ``first`` to ``last``, but those before ``until``; return where the next ones begin."""
    first = max(first // _PAGE * _PAGE, until)
    last = -(-last // _PAGE) * _PAGE
    if last > first:
        _madvise(first, last - first, np.int64(_WILL_NEED))
    return max(last, until)


@kernel
def ask_for_rows(base, stride, live, cells, count):
    until, first, last = np.int64(0), np.int64(0), np.int64(0)
    for i in range(count):
        cell = load(cells + 8 * i, np.int64)
        if cell < 0 or cell >= live:
            continue
        at = base + cell * stride
        if at // _PAGE > -(-last // _PAGE):  # what lies together is asked for at once
            until = _ask(first, last, until)
            first = at
        last = at + stride
    _ask(first, last, until)


@kernel
def ask_for_entries(base, width, ids, names, row_bytes, live, cells, count):
    """Ask for the entries that rows name; ``ids`` is where the first row's names begin."""
    until = np.int64(0)
    for i in range(count):
        cell, before = load(cells + 8 * i, np.int64), np.int64(-1)
        for j in range(names if 0 <= cell < live else 0):
            name = np.int64(load(ids + cell * row_bytes + 4 * j, np.int32))
            if name == before or name == 0:
                continue
            at = base + (name - 1) * width
            if j == 0 or at < until - _PAGE or at + width > until:
                last = at + width * (2 if width < _PAGE else 1)  # the next one mostly lies behind it
                until = _ask(at, last, np.int64(0))
            before = name
