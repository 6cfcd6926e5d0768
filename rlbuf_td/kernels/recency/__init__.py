"""Rows by recency: ages by a truncated geometric law, or uniform, found from a row's place in the ring."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, loops

__all__ = ["recent_rows"]
Number: TypeAlias = float | Tensor
_DIGITS = 2.0**53  # binary digits of a uniform number; the last ones, which no age depends on, choose the lane


def recent_rows(
    uniform: Tensor,
    newest: int | Tensor,
    span: int | Tensor,
    steps: int | Tensor,
    lanes: int,
    log_decay: float | Tensor,
) -> Tensor:
    """Draw rows whose age is ``k`` time steps with probability proportional to ``exp(k log_decay)``. O(B).

    Args:
        uniform: ``[B]`` float64 in ``[0, 1)``.
        newest: the time step written last.
        span: ages are ``0 .. span - 1``; at least 1.
        steps: how many are stored; the ring of them.
        lanes: E; all of them are equally likely.
        log_decay: not positive; 0 is uniform.

    Numbers may be 0-dim float64 tensors, for graphs that see them change.

    Returns:
        ``[B]`` int64 flat rows.
    """
    if backend_of(uniform) == "numba":
        rows = torch.empty(uniform.shape, dtype=torch.int64, device="cpu")
        given = uniform.data_ptr(), rows.data_ptr(), len(uniform)
        loops("recency.cpu").recent_rows(*given, newest, span, steps, lanes, log_decay)
        return rows
    decay = torch.as_tensor(log_decay, dtype=torch.float64, device=uniform.device)
    negative = torch.where(decay < 0, decay, -1.0)
    age = torch.log1p(uniform * torch.expm1(span * negative)) / negative
    age = torch.where(decay < 0, age, uniform * span)
    age = torch.minimum(age.floor(), torch.as_tensor(span - 1, dtype=torch.float64, device=uniform.device))
    lane = (uniform * _DIGITS).long() % lanes
    return ((newest - age) % steps).long() * lanes + lane
