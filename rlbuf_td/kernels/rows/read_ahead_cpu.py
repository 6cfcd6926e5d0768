"""The loops of :mod:`rlbuf_td.kernels.rows.read_ahead`: asking the system for pages of a mapped file, by address."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rlbuf_td.kernels.rows.memory_cpu import load_int32, load_int64, load_uint8

_kernel = njit(cache=True, nogil=True, error_model="numpy")
_PAGE, _WILL_NEED = 4096, 3
_SAMPLED = 16


def _of_libc(name: str) -> Any:
    """Return a function of three integers that the C library has."""

    def call(typing_context: Any, first: Any, second: Any, third: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(64)
            kind = ir.FunctionType(word, [word, word, word])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, arguments)

        return types.int64(types.int64, types.int64, types.int64), generate

    return intrinsic(call)


_madvise, _mincore = _of_libc("madvise"), _of_libc("mincore")


@_kernel
def is_absent(base, stride, cells, count):
    """Return whether one of some rows of a batch is not in memory."""
    found = np.zeros(1, np.uint8)
    step = max(1, count // _SAMPLED)
    for i in range(0, count, step):
        page = (base + load_int64(cells + 8 * i) * stride) // _PAGE * _PAGE
        found[0] = 1
        _mincore(page, np.int64(_PAGE), np.int64(found.ctypes.data))
        if load_uint8(np.int64(found.ctypes.data)) & 1 == 0:
            return True
    return False


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _ask(first, last, until):
    """Ask for the pages from ``first`` to ``last``, but those before ``until``; return where the next ones begin."""
    first = max(first // _PAGE * _PAGE, until)
    last = -(-last // _PAGE) * _PAGE
    if last > first:
        _madvise(first, last - first, np.int64(_WILL_NEED))
    return max(last, until)


@_kernel
def ask_for_rows(base, stride, live, cells, count):
    """Ask for rows, which are named in order."""
    until, first, last = np.int64(0), np.int64(0), np.int64(0)
    for i in range(count):
        cell = load_int64(cells + 8 * i)
        if cell < 0 or cell >= live:
            continue
        at = base + cell * stride
        if at // _PAGE > -(-last // _PAGE):  # what lies together is asked for at once
            until = _ask(first, last, until)
            first = at
        last = at + stride
    _ask(first, last, until)


@_kernel
def ask_for_entries(base, width, ids, names, row_bytes, live, cells, count):
    """Ask for the entries that rows name; ``ids`` is where the first row's names begin."""
    until = np.int64(0)
    for i in range(count):
        cell, before = load_int64(cells + 8 * i), np.int64(-1)
        for j in range(names if 0 <= cell < live else 0):
            name = np.int64(load_int32(ids + cell * row_bytes + 4 * j))
            if name == before or name == 0:
                continue
            at = base + (name - 1) * width
            if j == 0 or at < until - _PAGE or at + width > until:
                last = at + width * (2 if width < _PAGE else 1)  # the next one mostly lies behind it
                until = _ask(at, last, np.int64(0))
            before = name
