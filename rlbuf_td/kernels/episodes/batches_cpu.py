"""CPU loops for hindsight goals and n-step sums; ``bitmap`` is described in :mod:`rlbuf_td.kernels.episodes.cpu`."""

import numpy as np

from rlbuf_td.kernels.compiled import inlined, kernel, load, prefetch, store
from rlbuf_td.kernels.episodes.cpu import expect, is_cut, is_over, split, steps_ahead, steps_back

_SOON = 16  # how many rows ahead the bits and rewards of a row are prefetched


@inlined
def steps_to_goal(share, ahead, log_gamma):
    """Map ``share`` in ``[0, 1)`` to ``k`` in ``0 .. ahead``, with probability proportional to ``exp(k log_gamma)``."""
    if log_gamma < 0:
        return min(np.int64(np.log1p(share * np.expm1((ahead + 1) * log_gamma)) / log_gamma), ahead)
    return min(np.int64(share * (ahead + 1)), ahead)


@inlined
def choose(bitmap, thresholds, only_finished, log_gamma, live, cell, pick):
    """Return the row that provides the new goal of row ``cell``, or -1 if it keeps its goal; ``pick`` is random."""
    future, final, episode, random = thresholds[0], thresholds[1], thresholds[2], thresholds[3]
    if pick >= episode:
        return min(np.int64((pick - episode) / (random - episode) * live), live - 1) if pick < random else np.int64(-1)
    steps, lanes = bitmap[4], bitmap[5]
    t, lane = split(cell, lanes)
    ahead = steps_ahead(bitmap, lane, t)
    if only_finished and not is_over(bitmap, lane, t + ahead):
        return np.int64(-1)
    if pick < future:
        t += steps_to_goal(pick / future, ahead, log_gamma)
    elif pick < final:
        t += ahead
    else:
        back = steps_back(bitmap, lane, t)
        t += min(np.int64((pick - final) / (episode - final) * (back + ahead + 1)), back + ahead) - back
    return (t - steps if t >= steps else t + steps if t < 0 else t) * lanes + lane


@kernel
def choose_goals(bitmap, thresholds, only_finished, log_gamma, live, cells, uniform, rows, mask):
    for i in range(len(cells)):
        row = choose(bitmap, thresholds, only_finished, log_gamma, live, cells[i], uniform[i])
        mask[i] = row >= 0
        rows[i] = row if row >= 0 else cells[i]


@inlined
def _reward_at(address, double):
    return load(address, np.float64) if double else np.float64(load(address, np.float32))


@inlined
def walk(bitmap, cell, n):
    """Count the rows from ``cell`` to the end of its trajectory, at most ``n``; return the count and the last row."""
    steps, lanes = bitmap[4], bitmap[5]
    t, lane = split(cell, lanes)
    k = 1
    while k < n and not is_cut(bitmap, lane, t):
        t = t + 1 if t + 1 < steps else 0
        k += 1
    return k, t * lanes + lane


@inlined
def put_sum(target, rewards, row_bytes, cell, lanes, cells, k, gamma, double):
    """Write the discounted sum of ``k`` rewards, from row ``cell`` on, to address ``target``."""
    total, discount = _reward_at(rewards + cell * row_bytes, double), 1.0
    for _ in range(1, k):
        cell = cell + lanes if cell + lanes < cells else cell + lanes - cells
        discount *= gamma
        total += discount * _reward_at(rewards + cell * row_bytes, double)
    if double:
        store(target, total, np.float64)
    else:
        store(target, np.float32(total), np.float32)


@kernel
def sums_ahead(bitmap, reward, row_bytes, features, double, count, rows, n, gamma, total, taken, last):
    """Implement :func:`rlbuf_td.kernels.episodes.n_step.sums_ahead`; tensors are passed by address."""
    lanes, cells, width = bitmap[5], bitmap[4] * bitmap[5], 8 if double else 4
    for i in range(count):
        if i + _SOON < count:
            cell = load(rows + 8 * (i + _SOON), np.int64)
            expect(bitmap, cell)
            for _ in range(n):
                prefetch(reward + cell * row_bytes)
                cell = cell + lanes if cell + lanes < cells else cell + lanes - cells
        cell = load(rows + 8 * i, np.int64)
        k, end = walk(bitmap, cell, n)
        store(taken + 8 * i, k, np.int64)
        store(last + 8 * i, end, np.int64)
        for feature in range(features):
            target, rewards = total + (i * features + feature) * width, reward + feature * width
            put_sum(target, rewards, row_bytes, cell, lanes, cells, k, gamma, double)
