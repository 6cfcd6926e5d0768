"""Uniform draws on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlbuf_td.kernels.launches import blocks_of, launch, philox_start

_DRAWS = 256  # rows per program
_CHANGING = ["seed", "first", "count", "rows"]


@triton.jit
def uniform_number(seed, counter):
    """Return float64 numbers in ``[0, 1)`` with 53 random binary digits."""
    high, low, _, _ = tl.randint4x(seed, counter)
    high = high.to(tl.uint32, bitcast=True).to(tl.int64)
    low = low.to(tl.uint32, bitcast=True).to(tl.int64)
    return ((high << 21) | (low >> 11)).to(tl.float64) * (2.0**-53)


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


def uniform_rows(
    count: int, rows: int, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Draw ``count`` numbers below ``rows``, ``[count]`` int64, in one launch."""
    out = torch.empty(count, dtype=torch.int64, device=device)
    seed, first = philox_start(generator, out.device, count)
    grid = (blocks_of(count, _DRAWS),)
    if count:
        launch(_draw, grid, out, seed, first, count, rows, DRAWS=_DRAWS)
    return out
