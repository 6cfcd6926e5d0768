"""The loop of :mod:`rlbuf_td.kernels.n_step` on the CPU: rows of bytes by address."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlbuf_td.kernels._boundaries_numba import inlined, is_cut, split
from rlbuf_td.kernels._memory_numba import (
    copy_bytes,
    load_float32,
    load_float64,
    load_int64,
    prefetch,
    prefetch_row,
    store_float32,
    store_float64,
    store_int64,
)

_kernel = njit(cache=True, nogil=True, error_model="numpy")
_AHEAD = 12  # rows whose memory is asked for before it is needed: fewer leave it waiting, more are forgotten


@inlined
def _expect(source, lanes, row_bytes, reward, offsets, widths, cell, n, reads):
    """Start loading what an n-step transition of ``cell`` reads, if its trajectory goes on so far."""
    at = source + cell * row_bytes
    if reads:
        prefetch_row(at, row_bytes)
    for _ in range(1, n):
        at += lanes * row_bytes
        prefetch(at + reward)
    if len(offsets):
        prefetch_row(at + offsets[0], offsets[-1] + widths[-1] - offsets[0])


@inlined
def _reward_at(address, double):
    return load_float64(address) if double else np.float64(load_float32(address))


@inlined
def _walk(bits, steps, cell, n):
    """Return how many steps, at most n, a trajectory goes on from ``cell``, itself included, and the last row."""
    lanes = len(bits)
    t, lane = split(cell, lanes)
    k = 1
    while k < n and not is_cut(bits, lane, t):
        t = t + 1 if t + 1 < steps else 0
        k += 1
    return k, t * lanes + lane


@_kernel
def n_step(
    bits, starts, steps, reward, features, double, row_bytes, offsets, widths,
    source, batch, count, rows, taken, n, gamma, live,
):  # fmt: skip
    """Make n-step transitions of ``batch``; see :func:`rlbuf_td.kernels.n_step.n_step_`.

    Return whether all rows were among the ``live`` ones, which is asked only if there are any.
    """
    lanes, width, reads = len(bits), 8 if double else 4, live > 0
    for begun in range(count + _AHEAD):
        if begun < count:
            _expect(source, lanes, row_bytes, reward, offsets, widths, load_int64(rows + 8 * begun), n, reads)
        i = begun - _AHEAD
        if i < 0:
            continue
        cell, to = load_int64(rows + 8 * i), batch + i * row_bytes
        if reads:
            if cell < 0 or cell >= live:
                return False
            copy_bytes(to, source + cell * row_bytes, row_bytes)
        k, last = _walk(bits, steps, cell, n)
        store_int64(taken + 8 * i, k)
        if k == 1:
            continue
        for feature in range(features):
            at, here = reward + feature * width, cell
            total = _reward_at(source + here * row_bytes + at, double)
            discount = 1.0
            for _ in range(1, k):
                here = here + lanes if here + lanes < steps * lanes else here + lanes - steps * lanes
                discount *= gamma
                total += discount * _reward_at(source + here * row_bytes + at, double)
            if double:
                store_float64(to + at, total)
            else:
                store_float32(to + at, np.float32(total))
        for part in range(len(offsets)):
            copy_bytes(to + offsets[part], source + last * row_bytes + offsets[part], widths[part])
    return True
