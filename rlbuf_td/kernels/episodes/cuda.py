"""Triton kernel for look-ups in :class:`rlbuf_td.kernels.episodes.FlagBoundaries`.

Each program looks up one row. In both directions, the program reads ``STRETCH`` elements of ``cut`` at a time, until
one of them is True or ``within`` steps have been searched.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.dispatch import launching_on

STRETCH = 256
OPTIONS = {"enable_fp_fusion": True, "num_warps": 2}


@triton.jit
def steps_to_cut(cut, steps, lanes, t, lane, most, DIRECTION: tl.constexpr, STRETCH: tl.constexpr):
    """Count the steps from ``t`` to the last (DIRECTION 1) or first (-1) step of its trajectory, up to ``most``."""
    offset = tl.arange(0, STRETCH)
    found = tl.zeros([], tl.int64) + most  # which is at most ``steps``
    begun = tl.zeros([], tl.int64)
    while (found == most) & (begun < most):
        away = begun + offset
        if DIRECTION > 0:
            step = t + away
            step = tl.where(step >= steps, step - steps, step)
        else:
            step = t - 1 - away
            step = tl.where(step < 0, step + steps, step)
        flag = tl.load(cut + step * lanes + lane, mask=away < most, other=0)
        found = tl.min(tl.where(flag != 0, away, most), 0)
        begun += STRETCH
    return found


@triton.jit
def _reach(cut, over, cells, steps, lanes, most, back, ahead, is_over, STRETCH: tl.constexpr):
    at = tl.program_id(0)
    cell = tl.load(cells + at)
    t, lane = cell // lanes, cell % lanes
    further = steps_to_cut(cut, steps, lanes, t, lane, most, 1, STRETCH)
    tl.store(ahead + at, further)
    tl.store(back + at, steps_to_cut(cut, steps, lanes, t, lane, most, -1, STRETCH))
    tl.store(is_over + at, tl.load(over + (t + further) % steps * lanes + lane))


def reach(boundaries: Any, cells: Tensor, within: int | None) -> tuple[Tensor, Tensor, Tensor]:
    (steps, lanes), cells = boundaries.cut.shape, cells.contiguous()
    back, ahead = torch.empty_like(cells), torch.empty_like(cells)
    over = torch.empty(cells.shape, dtype=torch.bool, device=cells.device)
    if cells.numel():
        with launching_on(cells):
            most = steps if within is None else min(steps, within)
            given = boundaries.cut, boundaries.over, cells, steps, lanes, most, back, ahead, over
            stretch = min(STRETCH, triton.next_power_of_2(max(1, most)))
            _reach[(cells.numel(),)](*given, STRETCH=stretch, **OPTIONS)
    return back, ahead, over
