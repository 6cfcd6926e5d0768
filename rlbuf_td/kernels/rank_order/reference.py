"""The reference implementation of the rank order, in torch operations without host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbuf_td.kernels.inference_mode import outside_inference_mode
from rlbuf_td.kernels.magnitudes import write_magnitudes
from rlbuf_td.kernels.rank_order.law import RankLaw, mass, ranks_of_mass
from rlbuf_td.kernels.strata import masses

#: Larger TD errors count as this value.
LARGEST = torch.finfo(torch.float32).max


def as_float32(td_error: Tensor) -> Tensor:
    if td_error.dtype is torch.float32:
        return td_error
    return torch.where(td_error.isfinite(), td_error.clamp(-LARGEST, LARGEST), td_error).to(torch.float32)


class SortedOrder:
    """Rows sorted by magnitude ``|td_error|``. After a change of magnitudes, a look-up sorts all rows, in O(N log N).

    The arguments of :meth:`update_` and :meth:`draw` are as in :mod:`rlbuf_td.kernels.sum_tree`.

    Args:
        magnitude: ``[capacity]`` float32, -1 for rows without a magnitude; this object changes the tensor in place.
        stale_updates: how many updates a look-up may ignore instead of sorting again; with 0, ranks are always exact.
    """

    def __init__(self, magnitude: Tensor, stale_updates: int = 0) -> None:
        self.magnitude = magnitude
        self._stale_updates = stale_updates
        self._behind = -1  # updates since the last sort; -1: sort at the next look-up
        self._by_rank = self._count = magnitude.new_empty(0, dtype=torch.int64)
        self._by_row: Tensor | None = None
        with outside_inference_mode():
            self.refused = torch.zeros((), dtype=torch.int64, device=magnitude.device)  # skipped TD errors, see update_

    def share_memory_(self) -> None:
        """Raise ValueError, because each process would cache a sorted order of its own."""
        raise ValueError("an order on a device cannot be shared by several processes")

    def assign_(self, magnitude: Tensor) -> None:
        self.magnitude.copy_(magnitude)
        self._behind = -1

    def update_(self, index: Tensor, td_error: Tensor, rows: int) -> Tensor:
        _, largest, refused = write_magnitudes(self.magnitude, index, as_float32(td_error).abs(), rows)
        self._behind += self._behind >= 0
        self.refused.add_(refused)
        return largest.to(torch.float64)

    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        value = as_float32(magnitude) if isinstance(magnitude, Tensor) else min(magnitude, LARGEST)
        self.magnitude[start : start + count] = value
        self._behind = -1  # new rows enter the order immediately

    def _refresh(self) -> None:
        if 0 <= self._behind <= self._stale_updates:
            return
        # Stable, so that ties are ordered by row; rows without a magnitude, -1, come last.
        self._by_rank = self.magnitude.sort(descending=True, stable=True).indices
        self._by_row = None
        self._count = (self.magnitude >= 0).sum()
        self._behind = 0

    def draw(
        self,
        law: RankLaw,
        uniform: Tensor,
        *,
        stratified: bool,
        beta: float,
        norm: str | None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        self._refresh()
        rows, total = self._count, mass(law, self._count)
        ranks = ranks_of_mass(law, masses(uniform, total, stratified), rows)
        # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has the largest weight.
        power, log_scale = law.alpha * beta, beta * torch.log(total / rows)
        if norm is not None:
            log_scale = -power * torch.log((rows if norm == "buffer" else ranks.max()).to(torch.float64))
        weight = torch.exp(power * torch.log(ranks.to(torch.float64)) + log_scale)
        return self._by_rank[ranks - 1], weight.to(torch.float32)

    def ranks_of(self, index: Tensor) -> Tensor:
        """Return the ranks of rows, int64; 0 for a row without a magnitude."""
        self._refresh()
        if self._by_row is None:
            self._by_row = torch.empty_like(self._by_rank)
            self._by_row[self._by_rank] = torch.arange(1, len(self._by_rank) + 1, device=self._by_rank.device)
        return torch.where(self.magnitude[index] >= 0, self._by_row[index], 0)

    def count(self) -> Tensor:
        self._refresh()
        return self._count
