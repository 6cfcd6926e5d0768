"""Hindsight experience replay: chooses the rows whose achieved goals become the desired goals of a batch."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlbuf_td.kernels.episodes import Stored

#: The strategies, in the order of their thresholds.
STRATEGIES = ("future", "final", "episode", "random")


class Law(NamedTuple):
    """The distribution of hindsight goals: a random number selects the strategy with the first threshold above it."""

    thresholds: tuple[float, ...]  # ascending, one per strategy; above the last one, a row keeps its goal
    only_finished: bool  # relabel no rows of unfinished trajectories, except by ``random``
    log_gamma: float  # ``future`` takes the row k steps ahead with probability proportional to exp(k log_gamma)


def choose_goals(episodes: Stored, cells: Tensor, uniform: Tensor, law: Law, live: int) -> tuple[Tensor, Tensor]:
    """Return for each of the rows ``cells`` the row that provides its new goal, and a mask of the rows that get one.

    A row that keeps its goal is returned itself. ``live`` is the number of written rows.
    """
    steps, lanes = episodes.steps, episodes.lanes
    back, ahead, ended, _ = episodes.spans(cells)
    strategy, where = torch.full_like(cells, len(STRATEGIES)), torch.zeros_like(uniform)
    for number, (begin, end) in reversed([*enumerate(pairwise((0.0, *law.thresholds)))]):
        if begin < end:
            inside = uniform < end
            strategy = torch.where(inside, number, strategy)
            where = torch.where(inside, (uniform - begin) / (end - begin), where)
    soon = where * (ahead + 1)
    if law.log_gamma < 0:
        soon = torch.log1p(where * torch.expm1((ahead + 1) * law.log_gamma)) / law.log_gamma
    around = (where * (back + ahead + 1)).long().clamp(max=back + ahead) - back
    offset = torch.where(strategy == 0, soon.long().clamp(max=ahead), torch.where(strategy == 1, ahead, around))
    rows = (cells + offset * lanes) % (steps * lanes)
    rows = torch.where(strategy == 3, (where * live).clamp(max=live - 1).long(), rows)
    mask = strategy < len(STRATEGIES)
    if law.only_finished:
        mask &= ended | (strategy == 3)
    return torch.where(mask, rows, cells), mask
