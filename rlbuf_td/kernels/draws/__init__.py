"""Draws rows without priorities: recent rows more often than old ones, and rows without
replacement."""

from __future__ import annotations

from math import expm1

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, loop
from rlbuf_td.kernels.host_memory import address_of

# a uniform number has 53 binary digits; the last ones, which hardly affect the age,
# choose the lane
DIGITS = 2.0**53


def recent_rows_(
    out: Tensor,
    uniform: Tensor,
    newest: int,
    span: int,
    steps: int,
    lanes: int,
    log_decay: float,
) -> None:
    """Draw rows to ``out``; the probability of an age of ``k`` time steps is proportional to
    ``exp(k * log_decay)``. O(B).

    Args:
        out: the row indices, ``[B]`` int64.
        uniform: random numbers in ``[0, 1)``, ``[B]`` float64, contiguous.
        newest: position of the time step that was written last.
        span: number of possible ages, ``0 .. span - 1``; at least 1.
        steps: number of stored time steps.
        lanes: number of lanes (rows per time step); all lanes are equally likely.
        log_decay: logarithm of the decay per time step, at most 0; with 0 all ages are
            equally likely.
    """
    if backend_of(uniform) == "numba":
        numbers = len(uniform), lanes, newest, span, steps, float(log_decay)
        loop("draws.cpu", "recent_rows")(address_of(uniform), address_of(out), *numbers)
        return
    age = (
        torch.log1p(uniform * expm1(span * log_decay)) / log_decay
        if log_decay < 0
        else uniform * span
    )
    lane = (uniform * DIGITS).long() % lanes
    step = (newest - age.long().clamp(max=span - 1)) % steps
    torch.add(step * lanes, lane, out=out)


def append_distinct_(out: Tensor, kept: int, values: Tensor) -> int:
    """Write the values that ``out[:kept]`` lacks behind these, each once and in order,
    until ``out`` is full.

    ``out`` and ``values`` are int64, not negative, contiguous and on the CPU, and must
    not overlap. Return the number of values in ``out``. Cost:
    O(``len(out) + len(values)``).

    Example:
        >>> out = torch.zeros(4, dtype=torch.int64)
        >>> append_distinct_(out, 0, torch.tensor([3, 1, 3, 2, 1])), out
        (3, tensor([3, 1, 2, 0]))
    """
    append = loop("draws.cpu", "append_distinct")
    return append(address_of(out), len(out), kept, address_of(values), len(values))


def distinct_rows(uniform: Tensor, rows: int | Tensor) -> Tensor:
    """Return ``B`` different row indices below ``rows``; all sequences of ``B``
    different indices are equally likely.

    The function computes the first ``B`` steps of a Fisher-Yates shuffle of the
    indices: step ``k`` swaps the index at place ``k`` with the index at a random place
    in ``k .. rows - 1``.

    ``uniform``, ``[B]`` float64 in ``[0, 1)``, holds one random number per step.
    ``rows`` is an int or a 0-dim float64 tensor, and at least ``B``.

    Cost: O(B log B), independent of ``rows``, without host synchronisation.
    Source: Knuth, The Art of Computer Programming, volume 2, section 3.4.2, algorithm
    P.
    """
    batch = uniform.shape[0]
    step = torch.arange(batch, device=uniform.device)
    position = step + (uniform * (rows - step)).long()
    ordered, order = position.sort(stable=True)
    # For each step, the last earlier step that took the row at the same place (-1:
    # none): it moved another row there.
    before = torch.full_like(order, -1)
    before[order[1:]] = torch.where(ordered[1:] == ordered[:-1], order[:-1], -1)
    # Step k moves the row at place k: row k, or the row that an earlier step has moved
    # there. Such chains lead to ever earlier steps, and end at a place from which no
    # earlier step took a row.
    last = (torch.searchsorted(ordered, step, right=True) - 1).clamp(min=0)
    away = torch.where(ordered[last] == step, order[last], step)
    # pointer doubling: follows all chains in parallel
    for _ in range((batch - 1).bit_length()):
        away = away[away]
    return torch.where(before < 0, position, away[before.clamp(min=0)])
