"""The loops of :mod:`rlbuf_td.kernels.rows` on the CPU. A column is an address and a stride in bytes."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlbuf_td.kernels.rows.memory_cpu import copy_bytes, load_bool, load_float32, load_float64, load_int64

_kernel = njit(cache=True, nogil=True, error_model="numpy")


@_kernel
def copy_rows(target, target_stride, source, source_stride, width, count, rows, mask):
    """Copy ``width`` bytes of some rows; see :func:`rlbuf_td.kernels.rows.copy_rows_`."""
    for i in range(count):
        if load_bool(mask + i):
            copy_bytes(target + i * target_stride, source + load_int64(rows + 8 * i) * source_stride, width)


@_kernel
def put_values(target, target_stride, values, values_stride, double, count, mask):
    """Copy some values unless one is NaN; see :func:`rlbuf_td.kernels.rows.put_values_`."""
    for i in range(count):
        if load_bool(mask + i):
            at = values + i * values_stride
            if np.isnan(load_float64(at)) if double else np.isnan(load_float32(at)):
                return i
    width = 8 if double else 4
    for i in range(count):
        if load_bool(mask + i):
            copy_bytes(target + i * target_stride, values + i * values_stride, width)
    return -1
