"""The loop of :mod:`rlbuf_td.kernels.n_step` on the CPU: rows of bytes by address."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlbuf_td.kernels._boundaries_numba import is_cut, split
from rlbuf_td.kernels._memory_numba import (
    copy_bytes,
    load_float32,
    load_float64,
    load_int64,
    prefetch,
    store_float32,
    store_float64,
    store_int64,
)

_kernel = njit(cache=True, nogil=True, error_model="numpy")


@_kernel
def n_step(
    bits, starts, steps, reward, features, double, row_bytes, offsets, widths,
    source, batch, count, rows, taken, n, gamma,
):  # fmt: skip
    """Make n-step transitions of ``batch``; see :func:`rlbuf_td.kernels.n_step.n_step_`.

    First it is found how far each row goes, and what lies there begins to come; then sums and copies are made.
    """
    lanes = len(bits)
    for i in range(count):
        cell = load_int64(rows + 8 * i)
        t, lane = split(cell, lanes)
        k = 1
        while k < n and not is_cut(bits, lane, t):
            t = t + 1 if t + 1 < steps else 0
            k += 1
            at = source + (t * lanes + lane) * row_bytes
            prefetch(at + reward)
        if k > 1:
            for part in range(len(offsets)):
                prefetch(at + offsets[part])
        store_int64(taken + 8 * i, k)
    width = 8 if double else 4
    for i in range(count):
        k = load_int64(taken + 8 * i)
        if k == 1:
            continue
        cell = load_int64(rows + 8 * i)
        for feature in range(features):
            to, total, discount, here = batch + i * row_bytes + reward + feature * width, 0.0, 1.0, cell
            for _ in range(k):
                at = source + here * row_bytes + reward + feature * width
                total += discount * (load_float64(at) if double else np.float64(load_float32(at)))
                discount *= gamma
                here = here + lanes if here + lanes < steps * lanes else here + lanes - steps * lanes
            if double:
                store_float64(to, total)
            else:
                store_float32(to, np.float32(total))
        last = cell + (k - 1) * lanes
        last = last - steps * lanes if last >= steps * lanes else last
        for part in range(len(offsets)):
            copy_bytes(batch + i * row_bytes + offsets[part], source + last * row_bytes + offsets[part], widths[part])
