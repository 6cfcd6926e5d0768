"""Uniform draws on a GPU, and the stamps of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.launches import blocks_of, launch, philox_start
from rlbuf_td.kernels.serials import Serials

_DRAWS = 256  # rows per program
_CHANGING = ["seed", "first", "count", "rows", "written", "steps", "lanes"]


@triton.jit
def uniform_number(seed, counter):
    """Return float64 numbers in ``[0, 1)`` with 53 random binary digits."""
    low_counter, high_counter = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = low_counter * 0
    high, low, _, _ = tl.philox(seed, low_counter, high_counter, zero, zero)
    digits = (high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)
    return digits.to(tl.float64) * (2.0**-53)


@triton.jit(do_not_specialize=_CHANGING)
def _draw(
    out,
    seed: tl.int64,
    first: tl.int64,
    count: tl.int64,
    rows: tl.int64,
    DRAWS: tl.constexpr,
):
    draw = tl.program_id(0) * DRAWS + tl.arange(0, DRAWS)
    number = (uniform_number(seed, first + draw.to(tl.int64)) * rows).to(tl.int64)
    tl.store(out + draw, tl.minimum(number, rows - 1), mask=draw < count)


def uniform_rows_(out: Tensor, rows: int, generator: torch.Generator | None) -> None:
    """Fill ``out``, int64, with random numbers below ``rows`` in one launch."""
    count = out.shape[0]
    seed, first = philox_start(generator, out.device, count)
    grid = (blocks_of(count, _DRAWS),)
    if count:
        launch(_draw, grid, out, seed, first, count, rows, DRAWS=_DRAWS)


@triton.jit
def serial_of(cell, written, steps, lanes):
    """Return the serial of the newest row that can lie in each cell."""
    newest = written - 1
    age = (newest - cell // lanes) % steps
    return newest - tl.where(age < 0, age + steps, age)


@triton.jit(do_not_specialize=_CHANGING)
def _stamp(
    stamp,
    cells,
    count: tl.int64,
    written: tl.int64,
    steps: tl.int64,
    lanes: tl.int64,
    DRAWS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    cell = tl.load(cells + i, mask=i < count, other=0)
    tl.store(stamp + i, serial_of(cell, written, steps, lanes), mask=i < count)


def stamps_of(cells: Tensor, serials: Serials) -> Tensor:
    """Return the serial of the newest row that can lie in each cell, int64, in one
    launch."""
    cells = cells.contiguous()
    stamp, count = torch.empty_like(cells), cells.numel()
    _, *newest = serials
    if count:
        launch(
            _stamp,
            (blocks_of(count, _DRAWS),),
            stamp,
            cells,
            count,
            *newest,
            DRAWS=_DRAWS,
        )
    return stamp
