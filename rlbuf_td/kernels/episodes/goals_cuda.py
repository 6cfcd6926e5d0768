"""GPU twin of :func:`rlbuf_td.kernels.episodes.goals.choose_goals`: one program a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.dispatch import launching_on
from rlbuf_td.kernels.episodes.cuda import OPTIONS, steps_to_cut, stretch

#: Places of the numbers behind the four thresholds.
LIVE, ONLY_FINISHED = tl.constexpr(4), tl.constexpr(5)


@triton.jit
def _choose(cut, over, cells, uniform, numbers, steps, lanes, rows, mask, STRETCH: tl.constexpr):
    at = tl.program_id(0)
    cell, pick = tl.load(cells + at), tl.load(uniform + at)
    t, lane = cell // lanes, cell % lanes
    future, final = tl.load(numbers), tl.load(numbers + 1)
    episode, random = tl.load(numbers + 2), tl.load(numbers + 3)
    row, chosen = cell, pick < random
    if (pick >= episode) & (pick < random):
        live = tl.load(numbers + LIVE)
        row = tl.minimum((pick - episode) / (random - episode) * live, live - 1).to(tl.int64)
    if pick < episode:
        ahead = steps_to_cut(cut, steps, lanes, t, lane, steps, 1, STRETCH)
        offset = ahead
        if pick < future:
            offset = tl.minimum((pick / future * (ahead + 1)).to(tl.int64), ahead)
        if pick >= final:
            back = steps_to_cut(cut, steps, lanes, t, lane, steps, -1, STRETCH)
            within = (pick - final) / (episode - final) * (back + ahead + 1)
            offset = tl.minimum(within.to(tl.int64), back + ahead) - back
        is_over = tl.load(over + (t + ahead) % steps * lanes + lane) != 0
        chosen = is_over | (tl.load(numbers + ONLY_FINISHED) == 0)
        row = tl.where(chosen, (t + offset + steps) % steps * lanes + lane, cell)
    tl.store(rows + at, row)
    tl.store(mask + at, chosen)


def choose_goals(boundaries: Any, cells: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Do as :func:`rlbuf_td.kernels.episodes.goals.choose_goals`; the law is among the numbers."""
    (steps, lanes), cells = boundaries.cut.shape, cells.contiguous()
    numbers = boundaries.numbers
    rows = torch.empty_like(cells)
    mask = torch.empty(cells.shape, dtype=torch.bool, device=cells.device)
    if cells.numel():
        with launching_on(cells):
            given = boundaries.cut, boundaries.over, cells, uniform, numbers.tensor, steps, lanes, rows, mask
            _choose[(cells.numel(),)](*given, STRETCH=stretch(steps), **OPTIONS)
    return rows, mask
