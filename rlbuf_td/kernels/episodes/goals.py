"""Hindsight experience replay: chooses the rows whose achieved goals become the desired goals of a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.episodes import BitBoundaries, Boundaries, FlagBoundaries

#: The strategies, in the order of their thresholds.
STRATEGIES = ("future", "final", "episode", "random")
_LOG_GAMMA = 7  # index of log_gamma in ``FlagBoundaries.numbers``, after the discount factor of n-step returns


class Law(NamedTuple):
    """The distribution of hindsight goals: a random number selects the strategy with the first threshold above it."""

    thresholds: tuple[float, ...]  # ascending, one per strategy; above the last one, a row keeps its goal
    only_finished: bool  # relabel no rows of unfinished trajectories, except by ``random``
    log_gamma: float  # ``future`` takes the row k steps ahead with probability proportional to exp(k log_gamma)


def put_law(boundaries: FlagBoundaries, law: Law, live: int) -> None:
    """Copy the distribution and the number of written rows, ``live``, to the device memory that CUDA graphs read."""
    for place, value in enumerate((*law.thresholds, live, float(law.only_finished))):
        boundaries.numbers.set_(place, value)
    boundaries.numbers.set_(_LOG_GAMMA, law.log_gamma)


def choose_goals(boundaries: Boundaries, cells: Tensor, uniform: Tensor, law: Law, live: int) -> tuple[Tensor, Tensor]:
    """Return for each of the rows ``cells`` the row that provides its new goal, and a mask of the rows that get one.

    A row that keeps its goal is returned itself. ``live`` is the number of written rows.
    """
    if isinstance(boundaries, BitBoundaries):
        rows, mask = np.empty(len(cells), np.int64), np.empty(len(cells), np.bool_)
        given = boundaries.bitmap, *law, live, cells.numpy(), uniform.numpy()
        from rlbuf_td.kernels.episodes import batches_cpu

        batches_cpu.choose_goals(*given, rows, mask)
        return torch.from_numpy(rows), torch.from_numpy(mask)
    steps, lanes = boundaries.cut.shape
    back, ahead, over = boundaries.reach(cells)
    edges, live, only_finished, log_gamma = _law_of(boundaries, law, live)
    strategy = torch.searchsorted(edges[1:-1], uniform, right=True)
    where = (uniform - edges[strategy]) / (edges[strategy + 1] - edges[strategy])
    soon = torch.where(log_gamma < 0, log_gamma, -1.0)
    share = torch.log1p(where * torch.expm1((ahead + 1) * soon)) / soon
    within = torch.where(log_gamma < 0, share, where * (ahead + 1)).long().clamp(max=ahead)
    around = (where * (back + ahead + 1)).long().clamp(max=back + ahead) - back
    offset = torch.where(strategy == 0, within, torch.where(strategy == 1, ahead, around))
    rows = (cells + offset * lanes) % (steps * lanes)
    rows = torch.where(strategy == 3, (where * live).clamp(max=live - 1).long(), rows)
    mask = strategy < len(STRATEGIES)
    mask &= over | (strategy == 3) | ~only_finished
    return torch.where(mask, rows, cells), mask


def _law_of(boundaries: FlagBoundaries, law: Law, live: int) -> tuple[Tensor, int | Tensor, Tensor, Tensor]:
    """Return ``[0, *thresholds, 1]``, the number of written rows, ``only_finished`` and ``log_gamma``."""
    if torch.compiler.is_compiling():
        device = boundaries.cut.device
        edges = torch.tensor([0.0, *law.thresholds, 1.0], dtype=torch.float64, device=device)
        log_gamma = torch.full((), law.log_gamma, dtype=torch.float64, device=device)
        return edges, live, torch.full((), law.only_finished, device=device), log_gamma
    put_law(boundaries, law, live)
    numbers = boundaries.numbers.tensor
    edges = torch.cat((numbers.new_zeros(1), numbers[: len(law.thresholds)], numbers.new_ones(1)))
    return edges, numbers[4], numbers[5] != 0, numbers[_LOG_GAMMA]
