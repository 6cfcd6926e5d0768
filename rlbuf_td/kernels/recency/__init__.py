"""Draws recent rows more often than old ones: ages follow a truncated geometric distribution."""

from __future__ import annotations

from math import expm1
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.host_memory import address_of

__all__ = ["QUEUE", "Ages", "Counters", "recent_rows"]
_FIELDS = "clock", "fresh", "steps", "lanes", "places", "intervals", "capacity", "times", "heads"
NEWEST, NUMBER, HEAD, LENGTH = range(4)  # rows of ``QUEUE.places``
#: The state of :mod:`rlbuf_td.kernels.recency.fresh_cpu`: the ``clock`` when writes were noted, the largest number of
#: ``fresh`` rows in a batch, the shape of the rows, and addresses. ``places`` points to ``[4, lanes]`` int64 (for each
#: lane the newest step at that time, the number of the next row, and the head and the length of its ring of
#: intervals), ``intervals`` to these rings, ``[lanes, capacity, 2]`` int64, ``times`` to the write time of each row (0:
#: none), and ``heads`` to the newest step and the number of rows of each lane, ``[2, lanes]`` int64.
QUEUE = np.dtype([(name, np.int64) for name in _FIELDS])
_DIGITS = 2.0**53  # a uniform number has 53 binary digits; the last ones, which hardly affect the age, choose the lane


class Ages(NamedTuple):
    """The distribution of ages; see :func:`recent_rows`."""

    newest: int
    span: int
    steps: int
    log_decay: float


class Counters(NamedTuple):
    """The addresses of the counters of a storage and of its clock."""

    numbers: int
    clock: int


def recent_rows(uniform: Tensor, newest: int, span: int, steps: int, lanes: int, log_decay: float) -> Tensor:
    """Draw rows; the probability of an age of ``k`` time steps is proportional to ``exp(k * log_decay)``. O(B).

    Args:
        uniform: random numbers in ``[0, 1)``, ``[B]`` float64, contiguous.
        newest: position of the time step that was written last.
        span: number of possible ages, ``0 .. span - 1``; at least 1.
        steps: number of stored time steps.
        lanes: number of lanes (rows per time step); all lanes are equally likely.
        log_decay: logarithm of the decay per time step, at most 0; with 0 all ages are equally likely.

    Returns:
        row indices, ``[B]`` int64.
    """
    if backend_of(uniform) == "numba":
        rows, ages = torch.empty(uniform.shape, dtype=torch.int64, device="cpu"), Ages(newest, span, steps, log_decay)
        from rlbuf_td.kernels.recency import cpu

        cpu.recent_rows(address_of(uniform), address_of(rows), len(uniform), lanes, ages)
        return rows
    age = torch.log1p(uniform * expm1(span * log_decay)) / log_decay if log_decay < 0 else uniform * span
    lane = (uniform * _DIGITS).long() % lanes
    return (newest - age.long().clamp(max=span - 1)) % steps * lanes + lane
