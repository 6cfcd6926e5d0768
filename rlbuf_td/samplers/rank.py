"""Rank-based prioritized replay."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlbuf_td.kernels import rank_order
from rlbuf_td.kernels.device_scalars import outside_inference_mode
from rlbuf_td.samplers.common import EMPTY, uniform_numbers
from rlbuf_td.samplers.prioritized import ALPHA, BETA, Prioritized, Reduction, WeightNorm
from rlbuf_td.storages.indexing import flat_rows

_NO_ROWS = "no row has a priority: extend the buffer with this sampler in place, or give rows a TD error"


@final
class RankSampler(Prioritized):
    r"""Draw rows by the rank of their TD error: outliers change the order only, never the law.

    .. math:: P(i) = r_i^{-\alpha} / \sum_{r=1}^N r^{-\alpha}, \quad w_i = (N P(i))^{-\beta} / \max_j w_j

    where :math:`r_i` is 1 for the row with the largest ``|td_error|``; equal ones are ranked by row, the smaller first.
    Ranks are exact at every draw.

    Args:
        alpha: how far ranks count, at least 0; 0 is uniform.
        max_capacity, beta, stratified, weight_norm, reduction: as for :class:`ProportionalSampler`.
        stale_updates: on devices other than the CPU, where the order comes from a sort, sort again only after more
            updates than this; 0 is exact. New rows are ranked at once. On the CPU the order is always exact.

    New rows enter with the highest magnitude seen so far, 1.0 before any. TD errors are raw: the sampler takes the
    magnitude, as float32.

    Raises: as :class:`ProportionalSampler`; a draw needs a row with a priority.

    Cost: O(B log N) to draw, O(B (128 + log N)) to update and, once in N / 3 updated rows at most, O(N); O(1) to change
    alpha. 15 to 27 bytes per row, about 22 after random updates. On other devices a sort of all rows after each change,
    O(B) to draw, 20 bytes per row.

    Source: Schaul, Quan, Antonoglou, Silver: Prioritized Experience Replay, ICLR 2016, section 3.3. There the array is
    sorted only now and then, and a segment's law is that of whole ranks; here both are exact. TorchRL has none such.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(4), sampler=RankSampler(4, alpha=1.0), batch_size=25)
        >>> index = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
        >>> rb.update_priority(index, torch.tensor([0.1, -1e30, 0.3, 0.2]))
        >>> rb.sampler.rank(index)
        tensor([4, 1, 2, 3])
        >>> rb.sampler.probability(index)
        tensor([0.1200, 0.4800, 0.2400, 0.1600], dtype=torch.float64)
        >>> rb.sample()["x"].bincount()
        tensor([ 3, 12,  6,  4])
    """

    table: rank_order.RankOrder
    law: rank_order.RankLaw
    """The probabilities of ranks, of the alpha in use."""
    _blank: ClassVar = {"magnitude": -1.0}

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.7,
        beta: float = 0.5,
        *,
        stratified: bool = True,
        weight_norm: WeightNorm = "buffer",
        reduction: Reduction = "max",
        stale_updates: int = 0,
    ) -> None:
        if stale_updates < 0:
            raise ValueError(f"stale_updates must be at least 0, got {stale_updates}")
        self._stale_updates = int(stale_updates)
        super().__init__(max_capacity, alpha, beta, stratified=stratified, weight_norm=weight_norm, reduction=reduction)
        self.law = rank_order.rank_law(self.alpha, self.device)

    def draw(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """See :class:`~rlbuf_td.samplers.common.RowSampler`."""
        if not len(storage):
            raise RuntimeError(EMPTY)
        settings = self.settings.values  # the hot path: with few calls
        if settings[ALPHA] != self.law.alpha:
            self._weigh()
        uniform, beta = uniform_numbers(batch_size, self._rng, self.device), settings[BETA]
        drawn = self.table.draw(self.law, uniform, stratified=self.stratified, beta=beta, norm=self.weight_norm)
        if drawn is None:
            raise RuntimeError(_NO_ROWS)
        return drawn[0], {"priority_weight": drawn[1]}

    order = property(attrgetter("table"), doc="The rows in the order of their magnitudes.")

    def rank(self, index: Any, *, storage: Any | None = None) -> torch.Tensor:
        """Return the ranks of rows, ``[B]`` int64: 1 for the largest ``|td_error|``, 0 for a row without one.

        The arguments are those of :meth:`priority`. Raises an IndexError (on the CPU) if a row is out of range.
        """
        return self.table.ranks_of(flat_rows(index, storage, self.device))

    def cumulative(self, n: int) -> torch.Tensor:
        """Return the cumulative weights ``1, 1 + 2^-alpha, ...`` of ranks ``1 .. n``, ``[n]`` float64. O(n).

        Example:
            >>> RankSampler(7, alpha=0.5).cumulative(7)
            tensor([1.0000, 1.7071, 2.2845, 2.7845, 3.2317, 3.6399, 4.0179], dtype=torch.float64)
        """
        return rank_order.cumulative(self.alpha, n)

    def segments(self, k: int) -> torch.Tensor:
        """Return the first and the last rank of each of the ``k`` segments of equal mass, ``[k, 2]`` int64. O(k).

        A rank on the boundary of two segments is drawn from both, from each in proportion to its share. Raises a
        ValueError if ``k`` is less than 1, a RuntimeError if no row has a priority.

        Example:
            >>> sampler = RankSampler(7, alpha=0.5)
            >>> sampler.mark_update(torch.arange(7))
            >>> sampler.segments(3)
            tensor([[1, 2],
                    [2, 4],
                    [4, 7]])
        """
        if k < 1:
            raise ValueError(f"a batch has at least 1 segment, got k={k}")
        rows = self.table.count()
        if not rows:
            raise RuntimeError(_NO_ROWS)
        edges = torch.arange(k + 1, dtype=torch.float64, device=self.device) * (rank_order.mass(self.law, rows) / k)
        first = rank_order.ranks_of_mass(self.law, edges[:-1], rows)
        last = rank_order.ranks_of_mass(self.law, edges[1:].nextafter(edges.new_zeros(())), rows)
        return torch.stack([first, last], 1)

    @classmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the bytes that the priorities of ``capacity`` rows take, without the scratch memory of a sort on CUDA.

        Example:
            >>> RankSampler.nbytes_for(1_000_000)
            26495880
        """
        return rank_order.order_bytes(capacity, torch.device(device))

    def probability(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """See :class:`~rlbuf_td.samplers.prioritized.Prioritized`."""
        self._weigh()
        ranks = self.table.ranks_of(self._rows(index, storage))
        weight = ranks.clamp(min=1).to(torch.float64).pow(-self.law.alpha)
        return torch.where(ranks > 0, weight / rank_order.mass(self.law, self.table.count().clamp(min=1)), 0.0)

    def _make(self, capacity: int, device: torch.device | str) -> rank_order.RankOrder:
        with outside_inference_mode():
            magnitude = torch.full((capacity,), -1.0, dtype=torch.float32, device=device)
            return rank_order.make_order(magnitude, self._stale_updates)

    def _update(self, flat: Tensor, td_error: Tensor, rows: int, counts: bool) -> float | Tensor:
        return self.table.update_(flat, td_error, rows, counts)

    def _fill(self, start: int, count: int, magnitude: float | Tensor) -> None:
        self.table.fill_(start, count, magnitude)

    def _weigh(self, anew: bool = False) -> None:
        if self.settings.values[ALPHA] != self.law.alpha:
            self.law = rank_order.rank_law(self.alpha, self.device)
        if anew:
            self.table.assign_(self.table.magnitude.clone())

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        self.table.assign_(tensors["magnitude"])
        self.law = rank_order.rank_law(self.alpha, self.device)

    def prepare_graph(self, storage: Storage, batch_size: int) -> Any:
        """See :class:`~rlbuf_td.samplers.common.GraphCapturable`."""
        settings = super().prepare_graph(storage, batch_size)
        largest = self.table.prepare_capture(self.law, self.beta, len(storage))
        if largest is not None:
            self._see(largest)
        return settings, self.table

    def forget_order(self) -> None:
        """See :class:`~rlbuf_td.samplers.common.GraphCapturable`: sort again at the next draw."""
        self.table.forget_order()
