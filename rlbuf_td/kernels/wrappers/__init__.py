"""What wrappers do to batches, in torch operations: hindsight goals, n-step returns,
windows, and TD errors of windows.

The results equal those of the loops, bit for bit.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, loop
from rlbuf_td.kernels.episodes import Spans
from rlbuf_td.kernels.host_memory import address_of, addresses_of, to_device
from rlbuf_td.kernels.wrappers.records import (
    Expanded,
    GoalDistribution,
    WindowShape,
)

#: The strategies, in the order of their thresholds.
STRATEGIES = ("future", "final", "episode", "random")


def choose_goals(
    spans: Spans, uniform: Tensor, distribution: GoalDistribution
) -> tuple[Tensor, Tensor]:
    """Return how many steps after each row the one that provides its new goal is, and a
    mask of the rows that get one.

    The steps are 0 for rows that keep their goal, or get that of a ``random`` row.
    """
    back, ahead, ended = spans
    strategy = torch.full_like(back, len(STRATEGIES))
    where = torch.zeros_like(uniform)
    for number, (begin, end) in reversed(
        [*enumerate(pairwise((0.0, *distribution.thresholds)))]
    ):
        if begin < end:
            inside = uniform < end
            strategy = torch.where(inside, number, strategy)
            where = torch.where(inside, (uniform - begin) / (end - begin), where)
    soon = where * (ahead + 1)
    if distribution.log_gamma < 0:
        soon = (
            torch.log1p(where * torch.expm1((ahead + 1) * distribution.log_gamma))
            / distribution.log_gamma
        )
    around = (where * (back + ahead + 1)).long().clamp(max=back + ahead) - back
    steps = torch.where(
        strategy == 0,
        soon.long().clamp(max=ahead),
        torch.where(strategy == 1, ahead, around),
    )
    mask = strategy < len(STRATEGIES)
    if distribution.only_finished:
        mask &= ended | (strategy == 3)
    return torch.where(mask & (strategy < 3), steps, 0), mask


def n_step_sums(reward: Tensor, ahead: Tensor, gamma: float) -> Tensor:
    """Return discounted sums of ``reward``, ``[B, n, ...]``, along the steps.

    Sum ``i`` has at most ``1 + ahead[i]`` rewards.
    """
    steps = reward.shape[1]
    # Multiplied and added in the same order as in the compiled loop (``cpu.put_sum``):
    # the results are equal.
    powers = to_device(np.cumprod([1.0, *[gamma] * (steps - 1)]), reward.device)
    beyond = torch.arange(steps, device=reward.device) > ahead[:, None]
    as_rewards = 1, steps, *[1] * (reward.ndim - 2)
    terms = reward.to(torch.float64) * powers.view(as_rewards)
    terms = terms.masked_fill(beyond.view(*beyond.shape, *as_rewards[2:]), 0.0)
    return terms.cumsum(1)[:, -1].to(reward.dtype)


def expand(
    anchors: Tensor,
    reach: tuple[Tensor, Tensor],
    steps: int,
    lanes: int,
    shape: WindowShape,
) -> Expanded:
    """Return the rows of the window around each anchor.

    Places outside the trajectory repeat its first or last row. The flags of first rows
    know nothing of episodes.

    Args:
        anchors: cells, ``[B]`` int64.
        reach: how many rows that a window may have precede and follow each anchor,
            ``[B]`` int64 each.
        steps: slots of a lane.
        lanes: number of lanes.
        shape: the rows around each anchor.
    """
    back, ahead = (rows[:, None] for rows in reach)
    # time steps from the anchor, ``[B, L]``; `wanted` may leave the trajectory
    wanted = torch.arange(-shape.burn_in, shape.length, device=anchors.device)
    if shape.shifts:
        wanted = wanted - (shape.length - 1 - ahead).clamp(min=0).minimum(back)
    offset = wanted.minimum(ahead).maximum(-back)
    flat = (anchors[:, None] + offset * lanes) % (steps * lanes)

    mask = offset == wanted
    first = mask.clone()
    first[:, 1:] &= ~mask[:, :-1]
    first[:, 0].fill_(True)
    last = mask.clone()
    last[:, :-1] &= ~mask[:, 1:]
    is_burn_in = torch.arange(shape.window, device=anchors.device) < shape.burn_in
    return Expanded(
        flat=flat.flatten(),
        anchors=anchors[:, None].expand_as(flat).flatten(),
        mask=mask.flatten(),
        burn_in_mask=is_burn_in.expand_as(mask).flatten(),
        first=first.flatten(),
        last=last.flatten(),
    )


class Windows(NamedTuple):
    """Which TD errors of the windows in a batch set the priorities of the windows'
    anchors."""

    # ``[B * L]`` or ``[B, L]`` bool, as the next one: a row counts if it is True
    mask: Tensor
    burn_in_mask: Tensor  # and this one False
    length: int  # L
    eta: float  # the weight of the largest magnitude

    def reduced(self, anchors: Tensor, td_error: Tensor) -> tuple[Tensor, Tensor]:
        """Return the anchor of each window, and ``eta * max + (1 - eta) * mean`` of its
        magnitudes in their dtype.

        ``anchors`` has that of each row of a batch. A window without rows that count
        has the magnitude 0.
        """
        for tensor in (anchors, td_error, self.mask, self.burn_in_mask):
            if backend_of(tensor) == "numba":
                address_of(tensor)  # refuses a tensor without memory
        anchors = anchors.reshape(-1, *anchors.shape[self.mask.ndim :])[
            :: self.length
        ].contiguous()
        learned = (self.mask & ~self.burn_in_mask).reshape(-1, self.length)
        magnitude = torch.where(learned, td_error.reshape(-1, self.length).abs(), 0)
        largest = magnitude.amax(1)
        if self.eta == 1.0:
            return anchors, largest
        # added in the order of the loop: the results are equal
        total = magnitude.to(torch.float64).cumsum(1)[:, -1]
        mixed = self.eta * largest.to(torch.float64) + (1 - self.eta) * (
            total / learned.sum(1).clamp(min=1)
        )
        return anchors, mixed.to(
            td_error.dtype
        ) if td_error.is_floating_point() else mixed


def put_values_(target: Tensor, values: Tensor, mask: Tensor) -> int:
    """Copy ``values[i]`` to ``target[i]`` where ``mask[i]`` is True; return the first
    such ``i`` with a NaN, or -1.

    On the CPU, a NaN prevents the whole copy; on a GPU, NaN is copied, too. ``mask``
    must be contiguous.
    """
    dtype = target.dtype
    rows = target.shape[0]
    is_on_host = backend_of(target) == "numba"
    is_number = target.numel() == rows and target.is_contiguous()
    if is_on_host and is_number and dtype in (torch.float32, torch.float64):
        # the memory of a lazily negated tensor has the opposite sign
        values = values.resolve_neg().contiguous()
        addresses = addresses_of([target, values, mask])
        return loop("wrappers.cpu", "put_values")(*addresses, rows, dtype.itemsize)
    where = mask.view(-1, *[1] * (target.ndim - 1))
    if is_on_host and target.is_floating_point():
        bad = (where & values.isnan()).nonzero()
        if len(bad):
            return int(bad[0, 0])
    target.copy_(torch.where(where, values, target))
    return -1
