"""Rank-based prioritized replay."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor

from rlbuf_td.kernels import rank_order
from rlbuf_td.kernels.dispatch import loop
from rlbuf_td.kernels.host_memory import outside_inference_mode
from rlbuf_td.kernels.strata import Stratification
from rlbuf_td.samplers.priorities import ALPHA, PriorityRule
from rlbuf_td.samplers.prioritized import Prioritized, Reduction, WeightNorm
from rlbuf_td.storages.numbers import SharedNumbers

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import Storage

_NO_ROWS = "no row has a priority: extend the buffer with this sampler in place, or set TD errors of rows"


class RankRule(PriorityRule):
    """Gives each row the weight ``rank ** -alpha``."""

    table: rank_order.RankOrder

    def __init__(self, settings: SharedNumbers) -> None:
        super().__init__(settings)
        self.ranks = rank_order.rank_distribution(settings[ALPHA], "cpu")

    def make(self, capacity: int, device: torch.device | str) -> rank_order.RankOrder:
        with outside_inference_mode():
            magnitude = torch.full(
                (capacity,), -1.0, dtype=torch.float32, device=device
            )
            return rank_order.make_order(magnitude)

    def draw_with_torch(
        self, uniform: Tensor, rows: int, law: Stratification
    ) -> tuple[Tensor, Tensor]:
        table = cast("rank_order.SortedOrder", self.table)
        return table.draw(self.ranks, uniform, law)

    def draw_into(
        self,
        uniform: Tensor,
        rows: int,
        law: Stratification,
        flat: Tensor,
        weight: Tensor,
    ) -> None:
        if self.settings.values[ALPHA] != self.ranks.alpha:
            self.refresh_weights()
        table = cast("rank_order.ChunkedOrder", self.table)
        with table.lock:
            has_rows = loop("rank_order.cpu", "draw")(
                table.address,
                self.ranks.compiled,
                uniform.data_ptr(),
                flat.data_ptr(),
                weight.data_ptr(),
                uniform.numel(),
                law,
            )
        if not has_rows:
            raise RuntimeError(_NO_ROWS)

    def probability(self, flat: Tensor) -> Tensor:
        ranks = self.table.ranks_of(flat)
        weight = ranks.clamp(min=1).to(torch.float64).pow(-self.ranks.alpha)
        return torch.where(
            ranks > 0,
            weight / rank_order.mass(self.ranks, self.table.count().clamp(min=1)),
            0.0,
        )

    def least_probability(self) -> Tensor:
        rows = self.table.count()
        last = rows.clamp(min=1)
        least = last.to(torch.float64).pow(-self.ranks.alpha) / rank_order.mass(
            self.ranks, last
        )
        return torch.where(rows > 0, least, torch.inf)

    def update_(self, flat: Tensor, td_error: Tensor, rows: int) -> float | Tensor:
        return self.table.update_(flat, td_error, rows)

    def update_loop(self) -> Callable[..., Any]:
        return loop("batch.cpu", "update_rank")

    def refresh_weights(self, anew: bool = False) -> None:
        if self.settings.values[ALPHA] != self.ranks.alpha:
            self.ranks = rank_order.rank_distribution(
                self.settings[ALPHA], self.table.magnitude.device
            )
        if anew:
            self.table.assign_(self.table.magnitude.clone())

    def check(self) -> None:
        self.table.check()

    def restore_(self, magnitude: Tensor) -> None:
        self.table.assign_(magnitude)
        self.ranks = rank_order.rank_distribution(
            self.settings[ALPHA], self.table.magnitude.device
        )


@final
class RankSampler(Prioritized):
    r"""Draws rows with probabilities that depend only on the rank of their TD error,
    not on its size.

    .. math:: P(i) = r_i^{-\alpha} / \sum_{r=1}^N r^{-\alpha}, \quad w_i = (N P(i))^{-\beta} / \max_j w_j

    The rank :math:`r_i` is 1 for the row with the largest ``|td_error|``. Ties are
    ranked by row index.

    Args:
        alpha: exponent of the ranks, at least 0; 0 draws uniformly.
        max_capacity, beta, stratified, weight_norm, reduction: as for
            :class:`ProportionalSampler`.

    TD errors may have either sign: the sampler stores ``|td_error|`` as float32. A new
    row gets the largest ``|td_error|`` seen so far, or 1.0 before the first TD error.

    Raises, warns: as :class:`ProportionalSampler`. Rows with a TD error of 0 can be
    drawn, too.

    Cost: O(B log N + N / 96) to draw; O(B (128 + log N)) to update, plus O(N) at most
    once per N / 6 updated rows; O(1) to change alpha; 15 to 20 bytes per row. On a GPU:
    O(B) to draw and 20 bytes per row; the first draw after a write or an update of
    priorities also sorts all rows.
    Source: Schaul, Quan, Antonoglou, Silver: Prioritized Experience Replay, ICLR 2016,
    section 3.3. In the paper, rows are sorted only from time to time, and segments are
    rounded to whole ranks. TorchRL has no such sampler.

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

    rule: RankRule

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.7,
        beta: float = 0.5,
        *,
        stratified: bool = True,
        weight_norm: WeightNorm = "buffer",
        reduction: Reduction = "max",
    ) -> None:
        super().__init__(
            max_capacity, RankRule, alpha, beta, stratified, weight_norm, reduction
        )

    def entry_loop(self) -> Any:
        """See :class:`~rlbuf_td.samplers.prioritized.Prioritized`."""
        from rlbuf_td.kernels.batch import write_cpu

        return write_cpu.enter_rank

    order = property(
        attrgetter("rule.table"), doc="The rows in the order of their magnitudes."
    )

    def rank(self, index: object, *, storage: Storage | None = None) -> Tensor:
        """Return the rank of each row, ``[B]`` int64: 1 for the largest ``|td_error|``,
        0 without a priority."""
        return self.rule.table.ranks_of(self.priorities.rows(index, storage))

    def cumulative(self, n: int) -> Tensor:
        """Return the cumulative sums of ``rank ** -alpha`` for the ranks 1 to ``n``,
        ``[n]`` float64. O(n).

        Example:
            >>> RankSampler(7, alpha=0.5).cumulative(7)
            tensor([1.0000, 1.7071, 2.2845, 2.7845, 3.2317, 3.6399, 4.0179],
            dtype=torch.float64)
        """
        return rank_order.cumulative(self.alpha, n)

    def segments(self, k: int) -> Tensor:
        """Return the first and the last rank of each of ``k`` segments of equal
        probability, ``[k, 2]`` int64. O(k).

        A rank on the boundary of two segments belongs to both segments. Raises
        RuntimeError if no row has a priority.

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
        self.rule.refresh_weights()
        rows = self.rule.table.count()
        ranks = self.rule.ranks
        if not rows:
            raise RuntimeError(_NO_ROWS)
        edges = torch.arange(k + 1, dtype=torch.float64, device=self.device) * (
            rank_order.mass(ranks, rows) / k
        )
        first = rank_order.ranks_of_mass(ranks, edges[:-1], rows)
        last = rank_order.ranks_of_mass(
            ranks, edges[1:].nextafter(edges.new_zeros(())), rows
        )
        return torch.stack([first, last], 1)

    @classmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the size of the priorities of ``capacity`` rows in bytes. On CUDA,
        sorting needs additional memory.

        Example:
            >>> RankSampler.nbytes_for(1_000_000)
            20401432
        """
        return rank_order.order_bytes(capacity, torch.device(device))
