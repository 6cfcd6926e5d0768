"""Drawing from the chunked order: uniform numbers to ranks, ranks to rows, ranks to importance weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlbuf_td.kernels.rank_order.chunks import ROWS
from rlbuf_td.kernels.rank_order.find_cpu import rows_at
from rlbuf_td.kernels.rank_order.jit import bare, compiled
from rlbuf_td.kernels.rank_order.law import HEAD
from rlbuf_td.kernels.strata.cpu import masses

BUFFER, BATCH = 0, 1


@bare
def mass_of_all(rows: int, law: np.ndarray, alpha: float, shift: float) -> float:
    """``H_N``: see :func:`rlbuf_td.kernels.rank_order.law.mass`."""
    if rows <= HEAD:
        return law[rows - 1]
    x = rows + 0.5
    bend = 1.0 - alpha
    y = math.log(x)
    if bend != 0.0:
        y = math.expm1(bend * y) / bend
    return shift + y + alpha / 24.0 * x ** (-alpha - 1.0)


@bare
def rank_of_mass(mass: float, rows: int, law: np.ndarray, alpha: float, shift: float) -> Any:
    """See :func:`rlbuf_td.kernels.rank_order.law.ranks_of_mass`."""
    if mass >= law[HEAD - 1]:
        y = mass - shift
        bend = 1.0 - alpha
        if bend != 0.0:
            y = math.log1p(max(bend * y, -1.0 + 2.0**-53)) / bend
        x = min(math.exp(min(y, 36.0)), 2.0**52)
        return min(max(np.int64(x - alpha / (24.0 * x) + 0.5), HEAD + 1), rows)
    below = 0
    step = HEAD // 2
    while step > 0:
        below += step * (law[np.uint64(below + step - 1)] <= mass)
        step >>= 1
    return min(below + 1, rows)


@compiled
def draw(
    head: np.ndarray,
    top_tree: np.ndarray,
    top_group: np.ndarray,
    before: np.ndarray,
    child: np.ndarray,
    keys: np.ndarray,
    uniform: np.ndarray,
    law: np.ndarray,
    alpha: float,
    shift: float,
    beta: float,
    step: int,
    norm: int,
    index: np.ndarray,
    weight: np.ndarray,
) -> bool:
    """Draw rows and their importance weights; return whether there are rows to draw from.

    ``step``: see :func:`rlbuf_td.kernels.strata.step_of`.
    """
    rows = head[ROWS]
    if rows == 0:
        return False
    batch = len(uniform)
    ranks, mass = np.empty(batch, np.int64), np.empty(batch)
    total = mass_of_all(rows, law, alpha, shift)
    masses(uniform, total, step, mass)
    last = 1
    for j in range(batch):
        ranks[j] = rank_of_mass(mass[j], rows, law, alpha, shift)
        last = max(last, ranks[j])
    rows_at(head, top_tree, top_group, before, child, keys, ranks, index)
    # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has the largest weight.
    power = alpha * beta
    log_scale = -power * math.log(rows if norm == BUFFER else last)
    if norm != BUFFER and norm != BATCH:
        log_scale = beta * math.log(total / rows)
    for j in range(batch):
        weight[j] = math.exp(power * math.log(ranks[j]) + log_scale)
    return True
