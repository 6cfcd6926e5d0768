"""Proportional prioritized replay."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.samplers.common import EMPTY, exponent, uniform_numbers
from rlbuf_td.samplers.prioritized import ALPHA, BETA, WEIGHED, Prioritized, Reduction, WeightNorm


class ProportionalSampler(Prioritized):
    r"""Draw rows in proportion to the power ``alpha`` of their TD error.

    .. math::
        P(i) = p_i^\alpha / \sum_j p_j^\alpha, \quad p_i = |\delta_i| + \epsilon, \quad
        w_i = (N P(i))^{-\beta} / \max_j w_j

    Args:
        max_capacity: number of rows, at least the storage's ``max_size``.
        alpha: how far priorities count, at least 0; 0 is uniform.
        beta: how far importance weights correct for it, at least 0; 1 is fully. Both may be set at any time, by
            TorchRL's ``ParameterScheduler`` too.
        eps: added to every magnitude, so that a row with a TD error of 0 is drawn again.
        stratified: draw one row from each of ``B`` segments of equal mass (lower variance, the same expected counts),
            rather than independently. Any part of the batch has rows from all segments.
        weight_norm: divide the weights by the ``"buffer"``'s largest (as in TorchRL), the ``"batch"``'s, or by nothing
            (``None``).
        reduction: how TorchRL's buffers turn several TD errors of a row into one.
        max_priority_within_buffer: new rows enter with the highest magnitude now stored, rather than the highest ever
            seen. Finding it is O(N) whenever the highest row has lost its place.

    New rows enter with the highest magnitude seen so far, 1.0 before any. TD errors are raw: the sampler takes the
    magnitude.

    Raises:
        ValueError: an argument is out of range; (when sampling) the storage holds more than ``max_capacity`` rows;
            (with priorities) an error is NaN or infinite: nothing has changed.
        RuntimeError: (when sampling) the buffer is empty, or no row has a positive priority.
        MemoryError: the priorities can never fit into memory.

    Cost: O(B log N) to draw and to update; 20 bytes a row. Changing alpha is O(N).

    Source: Schaul, Quan, Antonoglou, Silver: Prioritized Experience Replay, ICLR 2016, section 3.3. Unlike TorchRL's
    ``PrioritizedSampler``: negative TD errors count by magnitude, sums are float64 and recomputed (they do not drift),
    ``torch.manual_seed`` reaches it, draws are stratified unless told otherwise, and no row of weight 0 is returned.

    Example:
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> sampler = ProportionalSampler(4, alpha=1.0, eps=0.0)
        >>> rb = ReplayBuffer(storage=PackedStorage(4), sampler=sampler, batch_size=8)
        >>> index = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
        >>> rb.update_priority(index, torch.tensor([0.0, -1.0, 0.0, 3.0]))
        >>> sampler.probability(index)
        tensor([0.0000, 0.2500, 0.0000, 0.7500], dtype=torch.float64)
        >>> rb.sample()["x"].sort().values  # a quarter, and three quarters
        tensor([1, 1, 3, 3, 3, 3, 3, 3])
    """

    table: sum_tree.SumTree
    _blank: ClassVar = {"magnitude": -1.0, "weight": 0.0}

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        *,
        stratified: bool = True,
        weight_norm: WeightNorm = "buffer",
        reduction: Reduction = "max",
        max_priority_within_buffer: bool = False,
    ) -> None:
        self._eps = exponent("eps", eps)
        self._within_buffer = max_priority_within_buffer
        self._largest_row = 0
        super().__init__(max_capacity, alpha, beta, stratified=stratified, weight_norm=weight_norm, reduction=reduction)

    def draw(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """See :class:`~rlbuf_td.samplers.common.RowSampler`."""
        rows = len(storage)
        if rows == 0:
            raise RuntimeError(EMPTY)
        settings = self.settings.values
        if settings[ALPHA] != settings[WEIGHED]:
            self._weigh()
        uniform = uniform_numbers(batch_size, self._rng, self.device)
        drawn = sum_tree.draw(self.table, uniform, self.stratified, rows, settings[BETA], self.weight_norm)
        if drawn is None:
            raise RuntimeError("no row has a positive priority: give one a TD error that is not 0, or use eps > 0")
        return drawn[0], {"priority_weight": drawn[1]}

    eps = property(attrgetter("_eps"), doc="What is added to every magnitude.")
    max_priority_within_buffer = property(
        attrgetter("_within_buffer"), doc="Whether new rows enter with the highest magnitude now stored."
    )
    tree = property(attrgetter("table"), doc="The table, which functions of :mod:`rlbuf_td.kernels.sum_tree` take.")

    @property
    def default_priority(self) -> Any:
        """The magnitude that a new row enters with."""
        if self._within_buffer:
            self._find_largest()
        return super().default_priority

    def _find_largest(self) -> None:
        """Search the rows for the largest magnitude, unless the row found last time still has it."""
        magnitude = self.table.magnitude
        if backend_of(magnitude) != "numba":
            self._largest_on_device = magnitude.max()
        elif float(magnitude[self._largest_row]) != self.largest_magnitude:
            self._largest_row = int(magnitude.argmax())
            self._see(float(magnitude[self._largest_row]))

    @classmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the bytes that the priorities of ``capacity`` rows take.

        Example:
            >>> ProportionalSampler.nbytes_for(1_000_000)
            19429312
        """
        return sum(tensor.nbytes for tensor in sum_tree.SumTree.empty(capacity, "meta").tensors().values())

    def probability(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """See :class:`~rlbuf_td.samplers.prioritized.Prioritized`."""
        self._weigh()
        return self.table.weight[self._rows(index, storage)] / self.table.total

    def _make(self, capacity: int, device: torch.device | str) -> sum_tree.SumTree:
        return sum_tree.SumTree.empty(capacity, device)

    def _update(self, flat: Tensor, td_error: Tensor, rows: int, counts: bool) -> float | Tensor:
        return sum_tree.update_(self.table, flat, td_error, rows, self.settings[WEIGHED], self._eps, counts)

    def _fill(self, start: int, count: int, magnitude: float | Tensor) -> None:
        sum_tree.fill_(self.table, start, count, magnitude, self.settings[WEIGHED], self._eps)

    def _weigh(self, anew: bool = False) -> None:
        settings = self.settings.values
        if anew or settings[ALPHA] != settings[WEIGHED]:
            settings[WEIGHED] = settings[ALPHA]  # first: if the process dies after it, the repair uses the new alpha
            sum_tree.reweigh_(self.table, settings[WEIGHED], self._eps)

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        self._largest_row = 0
        self.table.clear_()
        self.table.magnitude.copy_(tensors["magnitude"])
        self.table.weight.copy_(tensors["weight"])
        sum_tree.rebuild_(self.table)

    def prepare_graph(self, storage: Storage, batch_size: int) -> Any:
        """See :class:`~rlbuf_td.samplers.common.GraphCapturable`."""
        settings, tree = super().prepare_graph(storage, batch_size), self.table
        largest = sum_tree.prepare_capture(tree, self.alpha, self._eps, self.beta, len(storage))
        if largest is not None:
            self._see(largest)
        return settings, largest is not None and tree.device_state

    def snapshot(self) -> dict[str, Any]:
        """See :class:`~rlbuf_td.samplers.common.RowSampler`."""
        return super().snapshot() | {"eps": self._eps, "max_priority_within_buffer": self._within_buffer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`~rlbuf_td.samplers.prioritized.Prioritized`."""
        eps = exponent("eps", state_dict["eps"])
        super().load_state_dict(state_dict)
        self._eps = eps
        self._within_buffer = state_dict.get("max_priority_within_buffer", self._within_buffer)
