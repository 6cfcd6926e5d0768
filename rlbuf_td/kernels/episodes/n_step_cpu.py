"""The loop of :mod:`rlbuf_td.kernels.episodes.n_step` on the CPU: rows of bytes by address."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlbuf_td.kernels.episodes.reach_cpu import expect, inlined, is_cut, split
from rlbuf_td.kernels.rows.memory_cpu import (
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
_SOON = 16  # rows whose bits are asked for before it is asked for these rows
_AHEAD = 9  # rows whose memory is asked for before it is needed: fewer leave it waiting, more are forgotten


@inlined
def _expect(source, lanes, row_bytes, reward, taken, kept, end, cell, last, k, reads):
    """Start loading what an n-step transition of ``cell`` reads: few lines, for memory is what it waits for."""
    at = source + cell * row_bytes
    if k == 1:
        if reads:
            prefetch_row(at, row_bytes)
        return
    if reads:
        for part in range(kept, end, 16):
            prefetch_row(at + load_int64(part), load_int64(part + 8))
    for _ in range(k):
        prefetch(at + reward)
        at += lanes * row_bytes
    at = source + last * row_bytes
    for part in range(taken, kept, 16):
        prefetch_row(at + load_int64(part), load_int64(part + 8))


@inlined
def _copy_parts(to, since, first, end):
    """Copy the byte ranges that the numbers from ``first`` to ``end`` name."""
    for part in range(first, end, 16):
        offset = load_int64(part)
        copy_bytes(to + offset, since + offset, load_int64(part + 8))


@inlined
def _reward_at(address, double):
    return load_float64(address) if double else np.float64(load_float32(address))


@inlined
def _walk(bitmap, cell, n):
    """Return how many steps, at most n, a trajectory goes on from ``cell``, itself included, and the last row."""
    steps, lanes = bitmap[4], bitmap[5]
    t, lane = split(cell, lanes)
    k = 1
    while k < n and not is_cut(bitmap, lane, t):
        t = t + 1 if t + 1 < steps else 0
        k += 1
    return k, t * lanes + lane


@_kernel
def n_step(
    bitmap, reward, features, double, row_bytes, ranges, taken_parts, parts,
    source, batch, count, rows, taken, n, gamma, live,
):  # fmt: skip
    """Make n-step transitions of ``batch``; see :func:`rlbuf_td.kernels.episodes.n_step.n_step_`.

    Return whether all rows were among the ``live`` ones, which is asked only if there are any.
    """
    steps, lanes, width, reads = bitmap[4], bitmap[5], 8 if double else 4, live > 0
    kept, end = ranges + 16 * taken_parts, ranges + 16 * parts
    lasts = np.empty(count, np.int64)
    for begun in range(count + _AHEAD):
        if begun + _SOON < count:
            expect(bitmap, load_int64(rows + 8 * (begun + _SOON)))
        if begun < count:
            cell = load_int64(rows + 8 * begun)
            if reads and (cell < 0 or cell >= live):
                return False
            k, lasts[begun] = _walk(bitmap, cell, n)
            store_int64(taken + 8 * begun, k)
            _expect(source, lanes, row_bytes, reward, ranges, kept, end, cell, lasts[begun], k, reads)
        i = begun - _AHEAD
        if i < 0:
            continue
        cell, k, to = load_int64(rows + 8 * i), load_int64(taken + 8 * i), batch + i * row_bytes
        if k == 1:
            if reads:
                copy_bytes(to, source + cell * row_bytes, row_bytes)
            continue
        if reads:
            _copy_parts(to, source + cell * row_bytes, kept, end)
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
        _copy_parts(to, source + lasts[i] * row_bytes, ranges, kept)
    return True
