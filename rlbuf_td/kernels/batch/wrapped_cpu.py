"""Compiled functions that build the batches of n-step, hindsight and sequence samplers on the CPU.

Args:
    bitmap: boundaries of the stored trajectories, :attr:`rlbuf_td.kernels.episodes.BitBoundaries.bitmap`.
    address: address of a record with the dtype :data:`rlbuf_td.kernels.batch.ring.BATCH`.
    slot: address of an array with the addresses of the output tensors. The leaves come first.
    drawn: address of an array with the addresses of the wrapped sampler's outputs. The drawn row indices come first.
    count: number of drawn rows.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.cpu import batch_at, gather_batch
from rlbuf_td.kernels.compiled import copy_few, inlined, kernel, load, pointer, prefetch, prefetch_row, store
from rlbuf_td.kernels.episodes.batches_cpu import choose, put_sum, walk
from rlbuf_td.kernels.episodes.cpu import expect, split, steps_ahead, steps_back

_SOON, _AHEAD = 16, 9  # how many rows ahead the bits of a row, and its data, are prefetched
ROOT, NEXT, REWARD = 0, 1, 2  # kinds of leaves in an n-step transition


@inlined
def _row(index, lanes, i):
    return (
        load(index + 16 * i, np.int64) * lanes + load(index + 16 * i + 8, np.int64)
        if lanes
        else load(index + 8 * i, np.int64)
    )


@kernel
def n_step(bitmap, address, slot, drawn, count, n, gamma):
    """Gather ``n``-step transitions, and write the number of steps of each transition to the last output tensor."""
    batch, index = batch_at(address), load(drawn, np.int64)
    rows, row_bytes, lanes, last = batch.rows, batch.row_bytes, batch.lanes, batch.leaves
    leaves = carray(pointer(batch.extents), (last, 4), np.int64)
    targets = carray(pointer(slot), last + 1, np.int64)
    across, cells = bitmap[5], bitmap[4] * bitmap[5]
    ends = np.empty(count, np.int64)
    for begun in range(count + _AHEAD):
        if begun + _SOON < count:
            expect(bitmap, _row(index, lanes, begun + _SOON))
        if begun < count:
            cell = _row(index, lanes, begun)
            k, ends[begun] = walk(bitmap, cell, n)
            store(targets[last] + 8 * begun, k, np.int64)
            for _ in range(k):
                prefetch_row(rows + cell * row_bytes, row_bytes)
                cell = cell + across if cell + across < cells else cell + across - cells
        i = begun - _AHEAD
        if i < 0:
            continue
        cell, k = _row(index, lanes, i), load(targets[last] + 8 * i, np.int64)
        for leaf in range(last):
            offset, width, kind, size = leaves[leaf, 0], leaves[leaf, 1], leaves[leaf, 2], leaves[leaf, 3]
            target = targets[leaf] + i * width
            if kind != REWARD:
                copy_few(target, rows + (cell if kind == ROOT else ends[i]) * row_bytes + offset, width)
                continue
            for part in range(0, width, size):
                rewards = rows + offset + part
                put_sum(target + part, rewards, row_bytes, cell, across, cells, k, gamma, size == 8)


@kernel
def hindsight(bitmap, address, slot, drawn, count, thresholds, only_finished, log_gamma, live, outcome, goals):
    """Gather rows, replace the desired goals of some rows, and write a mask of these rows to the last output tensor.

    Achieved goals from leaf number ``outcome`` replace the desired goals in the leaves with the numbers ``goals``.
    """
    batch, index = batch_at(address), load(drawn, np.int64)
    rows, row_bytes, targets = batch.rows, batch.row_bytes, carray(pointer(slot), batch.leaves + 1, np.int64)
    cells, chosen = np.empty(count, np.int64), np.empty(count, np.int64)
    offset, width = load(batch.extents + 16 * outcome, np.int64), load(batch.extents + 16 * outcome + 8, np.int64)
    for i in range(count):
        cells[i] = _row(index, batch.lanes, i)
        expect(bitmap, cells[i])
    for i in range(count):
        pick = load(batch.uniform + 8 * i, np.float64)
        chosen[i] = choose(bitmap, thresholds, only_finished, log_gamma, live, cells[i], pick)
        store(targets[batch.leaves] + i, chosen[i] >= 0, np.bool_)
        if chosen[i] >= 0:
            prefetch(rows + chosen[i] * row_bytes + offset)
    gather_batch(batch, cells, slot)
    for i in range(count):
        if chosen[i] >= 0:
            for goal in range(goals.shape[0]):
                copy_few(targets[goals[goal]] + i * width, rows + chosen[i] * row_bytes + offset, width)


@kernel
def windows(bitmap, address, slot, drawn, count, length, burn_in, shifts, reports, flags):
    """Gather each drawn row (the anchor), the ``burn_in`` rows before it, and the ``length - 1`` rows after it.

    Places outside the trajectory repeat its first or last row. With ``shifts``, a window that runs past the end of the
    trajectory begins earlier. ``reports`` holds the bytes per row of each of the wrapped sampler's outputs, except the
    index. ``flags`` holds the leaf numbers of ``is_init``, truncated and done, -1 for a missing leaf.
    """
    batch, index = batch_at(address), load(drawn, np.int64)
    window, across, lanes, last = burn_in + length, bitmap[5], batch.lanes, batch.leaves
    entry, mask = 16 if lanes else 8, last + 1 + reports.shape[0]
    targets = carray(pointer(slot), mask + 3, np.int64)  # leaves, index, reports, valid mask, burn-in mask, anchors
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
            store(targets[mask] + at, first <= j <= past, np.bool_)
            store(targets[mask + 1] + at, j < burn_in, np.bool_)
            copy_few(targets[mask + 2] + at * entry, index + i * entry, entry)
            if lanes:
                store(targets[last] + 16 * at, step, np.int64)
                store(targets[last] + 16 * at + 8, lane, np.int64)
            else:
                store(targets[last] + 8 * at, cells[at], np.int64)
            for report in range(reports.shape[0]):
                width, source = reports[report], load(drawn + 8 + 8 * report, np.int64)
                copy_few(targets[last + 1 + report] + at * width, source + i * width, width)
    gather_batch(batch, cells, slot)
    for flag in range(3):
        if flags[flag] >= 0:
            target, width = targets[flags[flag]], load(batch.extents + 16 * flags[flag] + 8, np.int64)
            for i in range(count):
                for place in (0, bounds[i, 0]) if flag == 0 else (bounds[i, 1], bounds[i, 1]):
                    for feature in range(width):
                        store(target + (i * window + place) * width + feature, True, np.bool_)
