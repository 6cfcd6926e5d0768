"""GPU twin of :mod:`rlbuf_td.kernels.episodes.n_step`: a thread a row walks its trajectory and adds up rewards."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.dispatch import launching_on
from rlbuf_td.kernels.episodes.cuda import OPTIONS

_SIZE = 64
GAMMA = 6  # as in n_step


@triton.jit(do_not_specialize=["count", "n"])
def _walk(cut, rows, reward, stride, gamma, count, n, features, steps, lanes, total, taken, last, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    feature = tl.program_id(1)
    inside = at < count
    cell = tl.load(rows + at, mask=inside, other=0)
    goes_on = inside
    sum_ = tl.zeros([SIZE], tl.float64)
    discount = tl.zeros([SIZE], tl.float64) + 1.0
    steps_taken = tl.zeros([SIZE], tl.int64)
    final = cell
    for _ in range(n):
        value = tl.load(reward + cell * stride + feature, mask=goes_on, other=0.0).to(tl.float64)
        sum_ += tl.where(goes_on, discount * value, 0.0)
        discount *= tl.load(gamma)
        steps_taken += goes_on.to(tl.int64)
        final = tl.where(goes_on, cell, final)
        goes_on = goes_on & (tl.load(cut + cell, mask=goes_on, other=1) == 0)
        cell = (cell + lanes) % (steps * lanes)
    tl.store(total + at.to(tl.int64) * features + feature, sum_.to(total.dtype.element_ty), mask=inside)
    if feature == 0:
        tl.store(taken + at, steps_taken, mask=inside)
        tl.store(last + at, final, mask=inside)


def sums_ahead(boundaries: Any, rows: Tensor, reward: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Do as :func:`rlbuf_td.kernels.episodes.n_step.sums_ahead`."""
    rows, count, (steps, lanes) = rows.contiguous(), rows.shape[0], boundaries.cut.shape
    features = reward.shape[1:].numel()
    total = torch.empty((count, *reward.shape[1:]), dtype=reward.dtype, device=rows.device)
    taken, last = torch.empty_like(rows), torch.empty_like(rows)
    numbers = boundaries.numbers
    if count:
        with launching_on(rows):
            given = boundaries.cut, rows, reward, reward.stride(0), numbers[GAMMA], count, n, features, steps, lanes
            _walk[(triton.cdiv(count, _SIZE), features)](*given, total, taken, last, SIZE=_SIZE, **OPTIONS)
    return total, taken, last
