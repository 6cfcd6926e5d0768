"""The order as a selection of the ranks that are drawn: a form that the bench times beside sorting and merging.

Nothing is kept in order. A draw finds the rows of its ranks by a radix selection of them all at once, exactly, and by
row among equal magnitudes: digits of all keys are counted, most significant first, and a count tells in which bin of
the next digit a rank lies. Launches should weigh more than bytes, for a million magnitudes are 4 MB and stay in the
cache; so digits are wide, and there are three. Counted, not timed, an update and a draw of 256 of 1e6 rows take

========  ============  ==================================================================================
order     launches      bytes moved
========  ============  ==================================================================================
selected  1 + 6         about 20 MB: 12 to read magnitudes thrice, 8 to clear and read counts; with as many
                        as 1e6 scattered additions, and look-ups, of 4 bytes. Ties add some 30 MB
merged    5 + 1         16 MB: every key is read and written once
sorted    1 + about 11  some 100 MB: four passes of a radix sort move magnitudes with their rows
========  ============  ==================================================================================

(update + draw). An update of more than 1,024 rows takes a launch more. Where nothing has changed since, a draw from the
other orders is one launch; a selection begins anew.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import path_of
from rlbuf_td.kernels.rank_order.device import DeviceOrder
from rlbuf_td.kernels.rank_order.law import RankLaw
from rlbuf_td.kernels.rank_order.sorted import SortedOrder

#: Bins of the first digit.
BINS = 2048
#: Draws of more ranks than this sort. Counts take 97 KiB a rank at 1e6 rows, which are cleared and read as far as they
#: are needed: 25 MB for 256 ranks, 100 MB for these, 6 GB for 65,536, of which no digit leaves much out either.
MOST = 1024


class SelectedOrder(DeviceOrder):
    """Magnitudes, and nothing that is ordered: a draw selects the rows of its ranks.

    Has the methods of :class:`~rlbuf_td.kernels.rank_order.RankOrder`, on a device; ranks are asked of a sort. Draws
    wait for nothing, and can be captured. Off the GPU's path it sorts.

    Invariant (:meth:`check_valid`): the counts of the first digit are zero between draws.

    Args:
        magnitude: ``[capacity]`` float32, -1 for rows without; owned by the order from now on.

    Cost: an update or a fill of ``B`` rows is O(B); a draw reads all magnitudes thrice, O(N + B), whatever they are:
    ties take longer, but no more launches. 8 bytes a row, and the counts of a draw (:data:`MOST`).
    """

    def __init__(self, magnitude: Tensor) -> None:
        super().__init__(magnitude)
        self._sorted = SortedOrder(magnitude)
        self._first = torch.zeros(BINS, dtype=torch.int32, device=magnitude.device)
        self._is_clear = True

    def assign_(self, magnitude: Tensor) -> None:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.assign_`. O(N)."""
        self._replace(magnitude)
        self._sorted.forget_order()

    def update_(self, index: Tensor, td_error: Tensor, rows: int, counts: bool = True) -> Tensor:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.update_`. O(B)."""
        self._sorted.forget_order()
        return self._write(index, td_error, rows, counts)

    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.fill_`. O(count)."""
        self._sorted.fill_(start, count, magnitude)

    def draw(
        self, law: RankLaw, uniform: Tensor, *, stratified: bool, beta: float, norm: str | None
    ) -> tuple[Tensor, Tensor] | None:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.draw`. O(N + B), O(N log N) above :data:`MOST`."""
        if path_of(uniform) != "triton" or not 0 < len(uniform) <= MOST:
            return self._sorted.draw(law, uniform, stratified=stratified, beta=beta, norm=norm)
        self.on_device.take(law, beta)
        if not self._is_clear:  # the host was interrupted between the launches of a draw
            self._first.zero_()
        self._is_clear = False
        drawn = selecting().draw(self.on_device, self._magnitude, self._first, uniform, stratified, norm)
        self._is_clear = True
        return drawn

    def ranks_of(self, index: Tensor) -> Tensor:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.ranks_of`. O(N log N)."""
        return self._sorted.ranks_of(index)

    def count(self) -> Tensor:
        """See :meth:`~rlbuf_td.kernels.rank_order.RankOrder.count`. O(N)."""
        return (self._magnitude >= 0).sum()

    def check_valid(self) -> None:
        """Raise an AssertionError unless every internal invariant holds; for tests."""
        if not self._is_clear or bool(self._first.any()):
            raise AssertionError("the first counts have not been cleared")


@cache
def selecting() -> ModuleType:
    """Return the kernels that select, imported (and compiled, or read from disk) on first use."""
    from rlbuf_td.cli.bench import _select_triton

    return _select_triton
