"""Draws recent rows more often than old ones: ages follow a truncated geometric distribution."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import expm1

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, machine_code
from rlbuf_td.kernels.host_memory import address_of

__all__ = ["FRESH", "LANES", "STEPS", "recent_rows"]
#: Places in the memory of :mod:`rlbuf_td.kernels.recency.fresh_cpu`: the largest number of fresh rows in a batch, and
#: the shape of the rows.
FRESH, STEPS, LANES = range(3)
_DIGITS = 2.0**53  # a uniform number has 53 binary digits; the last ones, which hardly affect the age, choose the lane


def recent_rows(
    uniform: Tensor, newest: int, span: int, steps: int, lanes: int, log_decay: float, out: Tensor | None = None
) -> Tensor:
    """Draw rows; the probability of an age of ``k`` time steps is proportional to ``exp(k * log_decay)``. O(B).

    Args:
        uniform: random numbers in ``[0, 1)``, ``[B]`` float64, contiguous.
        newest: position of the time step that was written last.
        span: number of possible ages, ``0 .. span - 1``; at least 1.
        steps: number of stored time steps.
        lanes: number of lanes (rows per time step); all lanes are equally likely.
        out: on the CPU, the memory of the result; None: new memory.
        log_decay: logarithm of the decay per time step, at most 0; with 0 all ages are equally likely.

    Returns:
        row indices, ``[B]`` int64.
    """
    if backend_of(uniform) == "numba":
        rows = torch.empty(uniform.shape, dtype=torch.int64, device="cpu") if out is None else out
        given = len(uniform), lanes, newest, span, steps, float(log_decay)
        _recent_rows()(address_of(uniform), address_of(rows), *given)
        return rows
    age = torch.log1p(uniform * expm1(span * log_decay)) / log_decay if log_decay < 0 else uniform * span
    lane = (uniform * _DIGITS).long() % lanes
    return (newest - age.long().clamp(max=span - 1)) % steps * lanes + lane


@cache
def _recent_rows() -> Callable[..., None]:
    from rlbuf_td.kernels.recency import cpu

    return machine_code(cpu.recent_rows)
