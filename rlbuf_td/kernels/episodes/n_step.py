"""n-step returns: discounted sums of rewards along trajectories."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbuf_td.kernels.episodes import Stored


def windows(episodes: Stored, rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the indices of each row and the next ``n - 1`` rows, ``[B, n]``, and the number of steps after each row.

    After the end of the trajectory, its last row is repeated. The number counts only steps of the trajectory.
    """
    ahead = episodes.spans(rows).ahead
    offset = torch.arange(n, device=rows.device).minimum(ahead[:, None])
    return (rows[:, None] + offset * episodes.lanes) % (episodes.steps * episodes.lanes), ahead


def n_step_sums(reward: Tensor, end: Tensor, ahead: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return discounted sums of ``reward``, ``[B, n, ...]``, along the steps, and the number of rewards in each sum.

    Sum ``i`` ends with the first step where ``end[i]``, ``[n]``, is True, and has at most ``1 + ahead[i]`` rewards.
    """
    ended_before = end.cumsum(1) - end.long() > 0
    steps = torch.arange(reward.shape[1], device=reward.device)
    counts = (steps <= ahead[:, None]) & ~ended_before
    # Multiplied and added in the same order as in the compiled loop (``batches_cpu.put_sum``): the results are equal.
    powers = torch.where(steps == 0, 1.0, gamma * torch.ones_like(steps, dtype=torch.float64)).cumprod(0)
    wide = counts.view(*counts.shape, *[1] * (reward.ndim - counts.ndim))
    discount = torch.where(wide, powers.view(-1, *[1] * (reward.ndim - 2)), 0.0)
    terms = torch.where(wide, reward.to(torch.float64), 0.0) * discount
    return terms.cumsum(1)[:, -1].to(reward.dtype), counts.sum(1)


def sums_ahead(episodes: Stored, rows: Tensor, reward: Tensor, n: int, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's discounted sum of up to ``n`` rewards, their number, and the row of the last reward.

    A sum ends with the row's trajectory. ``reward`` holds the rewards of all stored rows.
    """
    window, ahead = windows(episodes, rows, n)
    end = torch.zeros_like(window, dtype=torch.bool)
    total, taken = n_step_sums(reward[window], end, ahead, gamma)
    return total, taken, window.gather(1, taken[:, None] - 1)[:, 0]
