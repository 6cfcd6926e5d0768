"""Sums of rewards on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.launches import blocks_of, launch
from rlbuf_td.kernels.serials import Serials
from rlbuf_td.kernels.wrappers.rewards import Rewards, Sums

_ROWS = 128  # per program
_CHANGING = ["count", "row_bytes", "offset", "elements", "tail", "written", "steps"]
_CHANGING += ["lanes", "n", "gamma"]


@triton.jit(do_not_specialize=_CHANGING)
def _sum(
    rows,
    cells,
    numbers,
    ends,
    taken,
    totals,
    count: tl.int64,
    row_bytes: tl.int64,
    offset: tl.int64,
    elements: tl.int64,
    tail: tl.int64,
    written: tl.int64,
    steps: tl.int64,
    lanes: tl.int64,
    n: tl.int32,
    gamma: tl.float64,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = i < count
    cell = tl.load(cells + i, mask=is_row, other=0)
    slot, lane = cell // lanes, cell % lanes
    # `left` of the row, see ``kernels/episodes``
    left = tl.load(numbers + 2 * (lane * steps + slot) + 1, mask=is_row, other=0)
    age = (written - 1 - slot) % steps
    age = tl.where(age < 0, age + steps, age)
    last = tl.minimum(tl.where(left > 0, left.to(tl.int64) - 1, age), n - 1)
    element = tl.program_id(1)
    total, power = tl.zeros((ROWS,), tl.float64), tl.zeros((), tl.float64) + 1.0
    for step in range(0, n):
        is_taken = is_row & (step <= last)
        row = (cell + step * lanes) % (steps * lanes)
        address = rows.to(tl.int64) + row * row_bytes + offset + element * SIZE
        address = address.to(totals.dtype)
        reward = tl.load(address, mask=is_taken, other=0.0).to(tl.float64)
        total += reward * power
        power *= gamma
    tl.store(totals + i * elements + element, total, mask=is_row)
    is_first = is_row & (element == 0)
    tl.store(ends + i, (cell + last * lanes) % (steps * lanes), mask=is_first)
    tl.store(taken + i, last + 1, mask=is_first)


def sum_steps(
    rewards: Rewards,
    cells: Tensor,
    numbers: Tensor,
    serials: Serials,
    n: int,
    gamma: float,
) -> Sums:
    """See ``wrappers.launch_sums``."""
    rows, offset, dtype, shape = rewards
    count, elements = len(cells), shape.numel()
    ends, taken = torch.empty_like(cells), torch.empty_like(cells)
    totals = torch.empty((count, *shape), dtype=dtype, device=cells.device)
    row_bytes = rows.stride(0) * rows.element_size()
    if count and elements:
        launch(
            _sum,
            (blocks_of(count, _ROWS), elements),
            rows,
            *(cells, numbers, ends, taken, totals),
            *(count, row_bytes, offset, elements, *serials, n, gamma),
            SIZE=dtype.itemsize,
            ROWS=_ROWS,
        )
    return Sums(totals, ends, taken)
