"""The loops of :mod:`rlbuf_td.kernels.episodes.goals` on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlbuf_td.kernels.episodes.reach_cpu import expect, inlined, is_over, split, steps_ahead, steps_back
from rlbuf_td.kernels.rows.memory_cpu import (
    copy_bytes,
    load_float64,
    load_int32,
    load_int64,
    prefetch,
    prefetch_row,
    store_bool,
    store_int32,
)

_kernel = njit(cache=True, nogil=True, error_model="numpy")
_SOON = 16  # rows whose bits begin to come before their goals are chosen
_AHEAD = 24  # goals that begin to come before the first one is copied
_SMALL = 64  # bytes that a loop copies in less time than a call to ``memcpy`` takes


@inlined
def _choose(bitmap, thresholds, only_finished, live, cell, pick):
    """Return the row that gives ``cell`` its goal, -1 for none."""
    future, final, episode, random = thresholds[0], thresholds[1], thresholds[2], thresholds[3]
    if pick >= episode:
        return min(np.int64((pick - episode) / (random - episode) * live), live - 1) if pick < random else np.int64(-1)
    steps, lanes = bitmap[4], bitmap[5]
    t, lane = split(cell, lanes)
    ahead = steps_ahead(bitmap, lane, t)
    if only_finished and not is_over(bitmap, lane, t + ahead):
        return np.int64(-1)
    if pick < future:
        t += min(np.int64(pick / future * (ahead + 1)), ahead)
    elif pick < final:
        t += ahead
    else:
        back = steps_back(bitmap, lane, t)
        t += min(np.int64((pick - final) / (episode - final) * (back + ahead + 1)), back + ahead) - back
    return (t - steps if t >= steps else t + steps if t < 0 else t) * lanes + lane


@_kernel
def choose_goals(bitmap, thresholds, only_finished, live, cells, uniform, rows, mask):
    """Write the rows chosen for ``cells``, and whether each is relabelled."""
    for i in range(len(cells)):
        row = _choose(bitmap, thresholds, only_finished, live, cells[i], uniform[i])
        mask[i] = row >= 0
        rows[i] = row if row >= 0 else cells[i]


@_kernel
def relabel(
    bitmap, thresholds, only_finished, live,
    outcomes, stride, width, first, first_stride, second, second_stride, base, block, count, cells, uniform, mask,
):  # fmt: skip
    """Choose goals and copy them to one or two columns; columns, rows and numbers are given by their addresses.

    If there is a ``base``, from where all rows of ``stride`` bytes lie, the rows are copied to ``block`` first. Return
    whether these were among the ``live`` ones.
    """
    rows = np.empty(count, np.int64)
    in_words = width <= _SMALL and width % 4 == 0
    for begun in range(count + _AHEAD):
        if begun + _SOON < count:
            expect(bitmap, load_int64(cells + 8 * (begun + _SOON)))
        if begun < count:
            cell, pick = load_int64(cells + 8 * begun), load_float64(uniform + 8 * begun)
            if cell < 0 or cell >= live:
                return False
            row = _choose(bitmap, thresholds, only_finished, live, cell, pick)
            rows[begun] = row
            store_bool(mask + begun, row >= 0)
            if base:
                prefetch_row(base + cell * stride, stride)
            if row >= 0:
                prefetch(outcomes + row * stride)
        i = begun - _AHEAD
        if i >= 0 and base:
            cell = load_int64(cells + 8 * i)
            copy_bytes(block + i * stride, base + cell * stride, stride)
        if i >= 0 and rows[i] >= 0:
            outcome = outcomes + rows[i] * stride
            if in_words:
                for offset in range(0, width, 4):
                    value = load_int32(outcome + offset)
                    store_int32(first + i * first_stride + offset, value)
                    store_int32(second + i * second_stride + offset, value)
            else:
                copy_bytes(first + i * first_stride, outcome, width)
                copy_bytes(second + i * second_stride, outcome, width)
    return True
