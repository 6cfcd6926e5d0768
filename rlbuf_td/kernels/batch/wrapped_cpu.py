"""Batches of the wrappers on the CPU: gather drawn rows and revise them in one compiled call.

See :mod:`rlbuf_td.kernels.batch.cpu` for the arguments that all share. ``index`` is the address of the drawn rows:
flat, or with ``lanes`` coordinates. ``bitmap`` is that of :class:`rlbuf_td.kernels.episodes.BitBoundaries`. The
reference is what the wrappers do on other devices.
"""

from __future__ import annotations

import numpy as np

from rlbuf_td.kernels.batch.cpu import gather
from rlbuf_td.kernels.compiled import (
    copy_few,
    inlined,
    kernel,
    load_float64,
    load_int64,
    prefetch,
    prefetch_row,
    store_bool,
    store_float32,
    store_float64,
    store_int64,
)
from rlbuf_td.kernels.episodes.batches_cpu import choose, sum_rewards, walk
from rlbuf_td.kernels.episodes.cpu import expect, split, steps_ahead, steps_back

_SOON, _AHEAD = 16, 9  # rows whose bits, and whose memory, are asked for before they are needed
ROOT, NEXT, REWARD = 0, 1, 2  # kinds of leaves of an n-step transition


@inlined
def _row(index, lanes, i):
    return load_int64(index + 16 * i) * lanes + load_int64(index + 16 * i + 8) if lanes else load_int64(index + 8 * i)


@kernel
def n_step(bitmap, rows, row_bytes, lanes, leaves, targets, index, count, n, gamma):
    """Gather n-step transitions; the last target takes how many steps each spans.

    ``leaves`` has a third column, their kinds, and a fourth: how many numbers of which width a reward has.
    """
    across, cells, last = bitmap[5], bitmap[4] * bitmap[5], leaves.shape[0]
    ends = np.empty(count, np.int64)
    for begun in range(count + _AHEAD):
        if begun + _SOON < count:
            expect(bitmap, _row(index, lanes, begun + _SOON))
        if begun < count:
            cell = _row(index, lanes, begun)
            k, ends[begun] = walk(bitmap, cell, n)
            store_int64(targets[last] + 8 * begun, k)
            for _ in range(k):
                prefetch_row(rows + cell * row_bytes, row_bytes)
                cell = cell + across if cell + across < cells else cell + across - cells
        i = begun - _AHEAD
        if i < 0:
            continue
        cell, k = _row(index, lanes, i), load_int64(targets[last] + 8 * i)
        for leaf in range(last):
            offset, width, kind, size = leaves[leaf, 0], leaves[leaf, 1], leaves[leaf, 2], leaves[leaf, 3]
            target = targets[leaf] + i * width
            if kind != REWARD:
                copy_few(target, rows + (cell if kind == ROOT else ends[i]) * row_bytes + offset, width)
                continue
            for part in range(0, width, size):
                total = sum_rewards(rows + offset + part, row_bytes, cell, across, cells, k, gamma, size == 8)
                if size == 8:
                    store_float64(target + part, total)
                else:
                    store_float32(target + part, np.float32(total))


@kernel
def hindsight(
    bitmap, rows, row_bytes, lanes, leaves, targets, index, count,
    thresholds, only_finished, live, uniform, outcome, goals,
):  # fmt: skip
    """Gather rows and give some the outcomes of others as goals; the last target takes which.

    ``outcome`` and ``goals`` are the positions of leaves: of the outcome, and of the one or two goals.
    """
    cells, chosen = np.empty(count, np.int64), np.empty(count, np.int64)
    offset, width = leaves[outcome, 0], leaves[outcome, 1]
    for i in range(count):
        cells[i] = _row(index, lanes, i)
        expect(bitmap, cells[i])
    for i in range(count):
        chosen[i] = choose(bitmap, thresholds, only_finished, live, cells[i], load_float64(uniform + 8 * i))
        store_bool(targets[leaves.shape[0]] + i, chosen[i] >= 0)
        if chosen[i] >= 0:
            prefetch(rows + chosen[i] * row_bytes + offset)
    gather(rows, row_bytes, cells, leaves, targets)
    for i in range(count):
        if chosen[i] >= 0:
            for goal in range(goals.shape[0]):
                copy_few(targets[goals[goal]] + i * width, rows + chosen[i] * row_bytes + offset, width)


@kernel
def windows(bitmap, rows, row_bytes, lanes, leaves, targets, index, count, length, burn_in, shifts, reports, flags):
    """Gather the windows of anchors, mark where they begin and end, and repeat what is reported of the anchors.

    The targets behind the leaves: the index, what is reported, the mask, the mask of burn-in, and the anchors. A window
    has ``burn_in`` rows before the anchor and ``length`` rows from it on; with ``shifts`` it begins earlier where the
    trajectory ends too soon. ``reports`` are ``[reports, 2]``, address and bytes per row; ``flags`` are positions of
    the leaves ``is_init``, truncated and done, -1 where there is none.
    """
    window, across = burn_in + length, bitmap[5]
    last, entry = leaves.shape[0], 16 if lanes else 8
    mask = last + 1 + reports.shape[0]
    cells, bounds = np.empty(count * window, np.int64), np.empty((count, 2), np.int64)
    for i in range(min(_SOON, count)):
        expect(bitmap, _row(index, lanes, i))
    for i in range(count):
        if i + _SOON < count:
            expect(bitmap, _row(index, lanes, i + _SOON))
        cell = _row(index, lanes, i)
        t, lane = split(cell, across)
        back, ahead = steps_back(bitmap, lane, t), steps_ahead(bitmap, lane, t)
        shift = min(max(0, length - 1 - ahead), back) if shifts else 0
        first, past = burn_in - min(back - shift, burn_in), burn_in + min(ahead + shift, length - 1)
        bounds[i, 0], bounds[i, 1] = first, past
        for j in range(window):
            step = (t - shift - burn_in + min(max(j, first), past)) % bitmap[4]
            at = i * window + j
            cells[at] = step * across + lane
            store_bool(targets[mask] + at, first <= j <= past)
            store_bool(targets[mask + 1] + at, j < burn_in)
            copy_few(targets[mask + 2] + at * entry, index + i * entry, entry)
            if lanes:
                store_int64(targets[last] + 16 * at, step)
                store_int64(targets[last] + 16 * at + 8, lane)
            else:
                store_int64(targets[last] + 8 * at, cells[at])
            for report in range(reports.shape[0]):
                width = reports[report, 1]
                copy_few(targets[last + 1 + report] + at * width, reports[report, 0] + i * width, width)
    gather(rows, row_bytes, cells, leaves, targets)
    for flag in range(3):
        if flags[flag] >= 0:
            target, width = targets[flags[flag]], leaves[flags[flag], 1]
            for i in range(count):
                for place in (0, bounds[i, 0]) if flag == 0 else (bounds[i, 1], bounds[i, 1]):
                    for feature in range(width):
                        store_bool(target + (i * window + place) * width + feature, True)
