"""The order as a sort of all magnitudes: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbuf_td.kernels.device_scalars import is_capturing
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.rank_order import LARGEST, as_float32
from rlbuf_td.kernels.rank_order import reference as _rank_torch
from rlbuf_td.kernels.rank_order.device import DeviceOrder
from rlbuf_td.kernels.rank_order.law import RankLaw


class SortedOrder(DeviceOrder):
    """Sort when asked, if something has changed since: O(N log N), on the device.

    Has the methods of :class:`~rlbuf_td.kernels.rank_order.RankOrder`, on any device.

    Args:
        magnitude: ``[capacity]`` float32, -1 for rows without; owned by the order from now on.
        stale_updates: sort again only when there have been more updates than this; 0 is exact.
    """

    def __init__(self, magnitude: Tensor, stale_updates: int = 0) -> None:
        super().__init__(magnitude)
        self._stale_updates = stale_updates
        self._behind = -1  # updates since the last sort; -1 before the first
        self._by_rank = self._count = magnitude.new_empty(0, dtype=torch.int64)
        self._by_row: Tensor | None = None

    def assign_(self, magnitude: Tensor) -> None:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.assign_`."""
        self._replace(magnitude)
        self.forget_order()

    def forget_order(self) -> None:
        """Sort again at the next question: a captured graph has changed magnitudes."""
        self._behind = -1

    def update_(self, index: Tensor, td_error: Tensor, rows: int, counts: bool = True) -> float | Tensor | None:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.update_`. O(B log B)."""
        largest: float | Tensor
        if backend_of(index) == "numba":
            if bool(((index < -1) | (index >= rows) | ~td_error.isfinite()).any()):
                return None
            largest = _rank_torch.write(self._magnitude, index, td_error, rows)[0]
        else:
            largest = self._write(index, td_error, rows, counts)
        self._behind += self._behind >= 0
        return largest

    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.fill_`. O(count)."""
        value = as_float32(magnitude) if isinstance(magnitude, Tensor) else min(magnitude, LARGEST)
        self._magnitude[start : start + count] = value
        self._behind = -1  # a row that is new must be known at once

    def _refresh(self) -> None:
        if 0 <= self._behind <= self._stale_updates:
            return
        # Stable, so that ties are by row; rows without a magnitude, -1, come last.
        self._by_rank = self._magnitude.sort(descending=True, stable=True).indices
        self._by_row = None
        self._count = (self._magnitude >= 0).sum()
        self._behind = 0

    def draw(
        self, law: RankLaw, uniform: Tensor, *, stratified: bool, beta: float, norm: str | None
    ) -> tuple[Tensor, Tensor] | None:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.draw`. O(B) after the sort."""
        self._refresh()
        if backend_of(uniform) == "numba" and not self._count:
            return None
        if is_capturing():
            law, beta = self.on_device.law(law, beta)
        ranks, weight = _rank_torch.draw_ranks(law, self._count, uniform, stratified=stratified, beta=beta, norm=norm)
        return self._by_rank[ranks - 1], weight

    def ranks_of(self, index: Tensor) -> Tensor:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.ranks_of`. O(B) after the sort."""
        self._refresh()
        if self._by_row is None:
            self._by_row = torch.empty_like(self._by_rank)
            self._by_row[self._by_rank] = torch.arange(1, len(self._by_rank) + 1, device=self._by_rank.device)
        return torch.where(self._magnitude[index] >= 0, self._by_row[index], 0)

    def count(self) -> Tensor:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.count`."""
        self._refresh()
        return self._count
