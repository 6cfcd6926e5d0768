"""The specification of an update and a draw by rank, in torch ops: on any device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbuf_td.kernels.rank_order import as_float32
from rlbuf_td.kernels.rank_order.law import RankLaw, mass, ranks_of_mass
from rlbuf_td.kernels.strata import masses


def write(magnitude: Tensor, index: Tensor, td_error: Tensor, rows: int | Tensor) -> tuple[Tensor, Tensor]:
    """Give rows the magnitudes of errors, as :meth:`~rlbuf_td.kernels.rank_order.RankOrder.update_` says.

    Returns:
        The largest magnitude given, -1 if none, and how many errors were left out; 0-dim.
    """
    named = (index >= 0) & (index < rows)
    valid = named & td_error.isfinite()
    given = as_float32(td_error).abs()
    # Every mention of a row is given the value of its last one, and every skipped mention repeats the last valid
    # row: the order of the scatter cannot matter, and no shape depends on data.
    ordered, order = torch.where(valid, index, -1).sort(stable=True)
    target = torch.where(ordered < 0, ordered[-1], ordered)
    last = order[torch.searchsorted(ordered, target, right=True) - 1]
    row = target.clamp(min=0)
    magnitude[row] = torch.where(target < 0, magnitude[row], given[last])
    return torch.where(valid, given, -1.0).max().to(torch.float64), (named & ~valid).sum()


def draw_ranks(
    law: RankLaw, rows: Tensor, uniform: Tensor, *, stratified: bool, beta: float | Tensor, norm: str | None
) -> tuple[Tensor, Tensor]:
    """Return the ranks that :meth:`~rlbuf_td.kernels.rank_order.RankOrder.draw` draws, and their float32 weights.

    ``rows`` is how many rows have a magnitude, 0-dim.
    """
    total = mass(law, rows)
    ranks = ranks_of_mass(law, masses(uniform, total, stratified), rows)
    power = law.alpha * beta
    # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has the largest weight.
    log_scale = beta * torch.log(total / rows)
    if norm is not None:
        log_scale = -power * torch.log((rows if norm == "buffer" else ranks.max()).to(torch.float64))
    weight = torch.exp(power * torch.log(ranks.to(torch.float64)) + log_scale)
    return ranks, weight.to(torch.float32)
