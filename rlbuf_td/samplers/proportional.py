"""Proportional prioritized replay."""

from __future__ import annotations

from typing import Any

import torch

from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.sum_tree.device import ALPHA, BETA, DRAWN, EPS, NAMED
from rlbuf_td.samplers.checks import exponent
from rlbuf_td.samplers.prioritized import _WEIGHED, Prioritized, Reduction, WeightNorm


class ProportionalSampler(Prioritized):
    r"""Draw rows in proportion to the power ``alpha`` of their TD error.

    .. math:: P(i) = p_i^\alpha / \sum_j p_j^\alpha, \quad p_i = |\delta_i| + \epsilon, \quad
              w_i = (N P(i))^{-\beta} / \max_j w_j

    Args:
        max_capacity: number of rows, at least the storage's ``max_size``.
        alpha: how far priorities count, at least 0; 0 is uniform.
        beta: how far importance weights correct for it, at least 0; 1 is fully. Both may be set at any time, by
            TorchRL's ``ParameterScheduler`` too.
        eps: added to every magnitude, so that a row with a TD error of 0 is drawn again.
        stratified: draw one row from each of ``B`` segments of equal mass (lower variance, the same expected counts),
            rather than independently. The segments are spread over the batch: any part of it has rows from everywhere.
        weight_norm: divide the weights by the ``"buffer"``'s largest (as in TorchRL), the ``"batch"``'s, or by nothing
            (``None``).
        reduction: how TorchRL's buffers turn several TD errors of a row into one.
        max_priority_within_buffer: new rows enter with the highest magnitude now stored, rather than the highest ever
            seen. Finding it is O(N) whenever the highest row has lost its place.

    Rows that have just been written enter with the highest magnitude seen so far, 1.0 before any. TD errors are given
    raw: the sampler takes the magnitude. NaN and infinite ones are refused, and nothing changes.

    Raises:
        ValueError: an argument is out of range; (when sampling) the storage holds more than ``max_capacity`` rows;
            (with priorities) an error is NaN or infinite.
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
        if not 0.0 <= eps < float("inf"):
            raise ValueError(f"eps must be a finite number, at least 0, got {eps}")
        self._eps = float(eps)
        self._max_priority_within_buffer = max_priority_within_buffer
        self._largest_row = 0
        super().__init__(max_capacity, alpha, beta, stratified=stratified, weight_norm=weight_norm, reduction=reduction)

    @property
    def eps(self) -> float:
        """What is added to every magnitude."""
        return self._eps

    @property
    def tree(self) -> sum_tree.SumTree:
        """The priorities, for steps that are compiled as one graph: :func:`rlbuf_td.kernels.sum_tree.draw` and
        :func:`~rlbuf_td.kernels.sum_tree.update_` can be traced, a sampler with its locks and checks cannot.
        """
        return self._tree

    @property
    def default_priority(self) -> Any:
        """The magnitude that a new row enters with."""
        if self._max_priority_within_buffer:
            self._find_largest()
        return super().default_priority

    def _find_largest(self) -> None:
        """Search the rows for the largest magnitude, unless the row found last time still has it."""
        magnitude = self._tree.magnitude
        if backend_of(magnitude) != "numba":
            self._largest = magnitude.max()
        elif float(magnitude[self._largest_row]) != self._largest:
            self._largest_row = int(magnitude.argmax())
            self._largest = float(magnitude[self._largest_row])

    @classmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the bytes that the priorities of so many rows take.

        Example:
            >>> ProportionalSampler.nbytes_for(1_000_000)
            19429312
        """
        claims = 4 * sum_tree.padded(capacity) if torch.device(device).type == "cuda" else 0
        return claims + sum(tensor.nbytes for tensor in sum_tree.SumTree.empty(capacity, "meta").tensors().values())

    def _allocate(self, capacity: int) -> None:
        self._tree = sum_tree.SumTree.empty(capacity, self._device)

    def _clear(self) -> None:
        sum_tree.clear_(self._tree)

    def _share(self) -> None:
        self._tree = sum_tree.SumTree(**{name: x.clone().share_memory_() for name, x in self._tree.tensors().items()})

    def _rebuild(self) -> None:
        sum_tree.reweigh_(self._tree, self._weighed_alpha, self._eps)

    @property
    def _weighed_alpha(self) -> float:
        return self._numbers[_WEIGHED]

    def _assign(
        self, flat: torch.Tensor, td_error: torch.Tensor, rows: int, counts: bool = True
    ) -> float | torch.Tensor:
        return sum_tree.update_(self._tree, flat, td_error, rows, self._weighed_alpha, self._eps, counts)

    def _put_numbers(self, rows: int) -> torch.Tensor | None:
        if backend_of(self._tree.weight) == "numba":
            return None
        law = self._weighed_alpha, self._eps, self.beta, rows, rows
        self._tree.on_device.take((ALPHA, EPS, BETA, DRAWN, NAMED), law)
        return self._tree.on_device.largest

    def replay_key(self) -> Any:
        """Return what captured draws go on with as it was: settings, and memory that a loaded state replaces."""
        return super().replay_key(), self._tree.on_device

    def _refused(self) -> torch.Tensor | int:
        return self._tree.refused

    def _fill(self, start: int, count: int, magnitude: float | torch.Tensor) -> None:
        sum_tree.fill_(self._tree, start, count, magnitude, self._weighed_alpha, self._eps)

    def _pick(self, rows: int, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        picked = sum_tree.draw(self._tree, uniform, self.stratified, rows, self.beta, self.weight_norm)
        if picked is None:
            raise RuntimeError("no row has a positive priority: give one a TD error that is not 0, or use eps > 0")
        return picked

    def _magnitude(self, flat: torch.Tensor) -> torch.Tensor:
        return self._tree.magnitude[flat]

    def _probability(self, flat: torch.Tensor) -> torch.Tensor:
        return self._tree.weight[flat] / self._tree.total

    def _alpha_changed(self, alpha: float) -> None:
        self._numbers[_WEIGHED] = alpha  # first: who dies after it leaves weights that are made anew by this alpha
        self._rebuild()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {"magnitude": self._tree.magnitude, "weight": self._tree.weight}

    def _blank(self, capacity: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        shape = (sum_tree.padded(capacity),)
        return {
            "magnitude": torch.full(shape, -1.0, dtype=torch.float64, device=device),
            "weight": torch.zeros(shape, dtype=torch.float64, device=device),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return :meth:`state_dict` with the tensors themselves rather than copies."""
        own = {"eps": self._eps, "max_priority_within_buffer": self._max_priority_within_buffer}
        return super().snapshot() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: the state is of a sampler of a smaller capacity, or of no such sampler; this one stays as it
                was.
        """
        eps = exponent("eps", state_dict["eps"])
        super().load_state_dict(state_dict)
        self._eps, self._numbers[_WEIGHED] = eps, self.alpha
        within = state_dict.get("max_priority_within_buffer", self._max_priority_within_buffer)
        self._max_priority_within_buffer, self._largest_row = within, 0

    def _restore(self, tensors: dict[str, torch.Tensor]) -> None:
        if not self._is_shared:
            self._tree = sum_tree.SumTree.over(**tensors)
            return
        for name, mine in self._tensors().items():
            mine.copy_(tensors[name])
        sum_tree.rebuild_(self._tree)
