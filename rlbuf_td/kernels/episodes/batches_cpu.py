"""CPU loops for hindsight goals and n-step sums; ``of`` is a :class:`~rlbuf_td.kernels.episodes.cpu.Numbers`."""

from typing import NamedTuple

import numpy as np

from rlbuf_td.kernels.compiled import inlined, kernel, load, store
from rlbuf_td.kernels.episodes.cpu import has_ended, split, steps_ahead, steps_back

_SOON = 16  # how many rows ahead the bits and rewards of a row are prefetched


class Rewards(NamedTuple):
    """A column of rewards of all rows, one number per row."""

    address: int
    row_bytes: int  # from one row to the next
    is_double: bool  # float64, else float32


@inlined
def steps_to_goal(share, ahead, log_gamma):
    """Map ``share`` in ``[0, 1)`` to ``k`` in ``0 .. ahead``, with probability proportional to ``exp(k log_gamma)``."""
    if log_gamma < 0:
        return min(np.int64(np.log1p(share * np.expm1((ahead + 1) * log_gamma)) / log_gamma), ahead)
    return min(np.int64(share * (ahead + 1)), ahead)


@inlined
def choose(of, law, live, cell, pick):
    """Return the row that provides the new goal of row ``cell``, or -1 if it keeps its goal; ``pick`` is random.

    ``law`` is a :class:`rlbuf_td.kernels.episodes.goals.Law`. Of the strategy "random", return the number of the row.
    """
    future, final, episode, random = law.thresholds
    if pick >= episode:
        return min(np.int64((pick - episode) / (random - episode) * live), live - 1) if pick < random else np.int64(-1)
    steps, lanes = of.steps, of.lanes
    t, lane = split(cell, lanes)
    if law.only_finished and not has_ended(of, lane, t):
        return np.int64(-1)
    ahead = steps_ahead(of, lane, t)
    if pick < future:
        t += steps_to_goal(pick / future, ahead, law.log_gamma)
    elif pick < final:
        t += ahead
    else:
        back = steps_back(of, lane, t)
        t += min(np.int64((pick - final) / (episode - final) * (back + ahead + 1)), back + ahead) - back
    return (t - steps if t >= steps else t + steps if t < 0 else t) * lanes + lane


@inlined
def _reward_at(rewards, cell):
    address = rewards.address + cell * rewards.row_bytes
    return load(address, np.float64) if rewards.is_double else np.float64(load(address, np.float32))


@inlined
def following(of, cell):
    """Return the row one time step after row ``cell``, in the ring of its lane."""
    cell, cells = cell + of.lanes, of.steps * of.lanes
    return cell if cell < cells else cell - cells


@inlined
def walk(of, cell, n):
    """Count the rows from ``cell`` to the end of its trajectory, at most ``n``; return the count and the last row."""
    t, lane = split(cell, of.lanes)
    count = min(steps_ahead(of, lane, t) + 1, n)
    t += count - 1
    return count, (t if t < of.steps else t - of.steps) * of.lanes + lane


@inlined
def put_sum(target, rewards, of, cell, count, gamma):
    """Write the discounted sum of ``count`` rewards, from row ``cell`` on, to address ``target``."""
    total, discount = _reward_at(rewards, cell), 1.0
    for _ in range(1, count):
        cell = following(of, cell)
        discount *= gamma
        total += discount * _reward_at(rewards, cell)
    _put(target, total, rewards.is_double)


@inlined
def put_sum_of_rows(target, rewards, count, gamma):
    """Write the discounted sum of the first ``count`` rewards to address ``target``."""
    total, discount = 0.0 + _reward_at(rewards, 0), 1.0  # as with torch's ``cumsum``, -0.0 becomes 0.0
    for row in range(1, count):
        discount *= gamma
        total += discount * _reward_at(rewards, row)
    _put(target, total, rewards.is_double)


@inlined
def _put(target, total, is_double):
    if is_double:
        store(target, total, np.float64)
    else:
        store(target, np.float32(total), np.float32)


@kernel
def reduce_windows(td_error, mask, burn_in_mask, is_double: bool, count, window, eta: float, out):
    """Implement :func:`rlbuf_td.kernels.episodes.windows.reduced`."""
    for i in range(count):
        largest, total, learned = 0.0, 0.0, 0
        for at in range(i * window, (i + 1) * window):
            if load(mask + at, np.uint8) and not load(burn_in_mask + at, np.uint8):
                value = load(td_error + 8 * at, np.float64) if is_double else load(td_error + 4 * at, np.float32)
                largest = max(largest, abs(np.float64(value)))
                total += abs(np.float64(value))
                learned += 1
        # If a TD error is NaN or infinite, so is the total, and also 0 times the total: the update refuses the batch.
        error = eta * largest + (1.0 - eta) * (total / max(learned, 1))
        if is_double:
            store(out + 8 * i, error, np.float64)
        else:
            store(out + 4 * i, np.float32(error), np.float32)
