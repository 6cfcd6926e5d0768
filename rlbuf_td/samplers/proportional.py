"""Proportional prioritized experience replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import nan
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.dispatch import loop
from rlbuf_td.kernels.serials import Serials
from rlbuf_td.kernels.strata import Stratification
from rlbuf_td.kernels.sum_tree.blocks import BlockUpdate, Run, WeightLaw
from rlbuf_td.samplers.common import NO_PRIORITY
from rlbuf_td.samplers.priorities import ALPHA, WEIGHED, PriorityRule
from rlbuf_td.samplers.prioritized import Prioritized, Reduction, WeightNorm
from rlbuf_td.storages.checks import State, exponent, state_of
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.numbers import SharedNumbers


class ProportionalRule(PriorityRule):
    """Gives each row the weight ``(max(|td_error|, min_priority) + eps) ** alpha``,
    stored in a sum tree.

    The setting ``WEIGHED`` is the alpha of the stored weights, or NaN if they are not
    those of the magnitudes.
    """

    table: sum_tree.SumTree
    weighs_rows = True

    def __init__(
        self, settings: SharedNumbers, eps: float, min_priority: float
    ) -> None:
        super().__init__(settings)
        self.configure(eps, min_priority)

    def configure(self, eps: float, min_priority: float) -> None:
        eps, min_priority = exponent("eps", eps), exponent("min_priority", min_priority)
        self.eps, self.min_priority = eps, min(min_priority, sum_tree.LARGEST_MAGNITUDE)

    def make(self, capacity: int, device: torch.device | str) -> sum_tree.SumTree:
        return sum_tree.SumTree.empty(capacity, device)

    def draw_with_torch(
        self, uniform: Tensor, rows: int, law: Stratification
    ) -> tuple[Tensor, Tensor]:
        return sum_tree.draw(self.table, uniform, rows, law)

    def launch_draw(
        self,
        batch: int,
        rows: int,
        law: Stratification,
        *,
        generator: torch.Generator | None,
        serials: Serials | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        from rlbuf_td.kernels.sum_tree import triton

        return triton.draw(self.table, batch, generator, law, rows, serials)

    def draw_into(
        self,
        uniform: Tensor,
        rows: int,
        law: Stratification,
        flat: Tensor,
        weight: Tensor,
    ) -> None:
        settings = self.settings.values
        if settings[ALPHA] != settings[WEIGHED]:
            self.refresh_weights()
        has_rows = loop("sum_tree.cpu", "draw")(
            self.table.address,
            uniform.data_ptr(),
            flat.data_ptr(),
            weight.data_ptr(),
            uniform.numel(),
            law,
            rows,
        )
        if not has_rows:
            raise RuntimeError(NO_PRIORITY)

    def probability(self, flat: Tensor) -> Tensor:
        return self.table.weight[flat].to(torch.float64) / self.table.total

    def least_probability(self) -> float | Tensor:
        if not self.table.has_nodes:
            return self.table.smallest / self.table.total
        # a mixture asks in each batch: numbers cost half as much as tensors
        total = float(self.table.total)
        return float(self.table.smallest) / total if total else float("inf")

    def update_(self, flat: Tensor, td_error: Tensor, rows: int) -> float | Tensor:
        return sum_tree.update_(
            self.table, flat, td_error, rows, self.settings[WEIGHED], self.eps
        )

    @property
    def is_launched(self) -> bool:
        return self.table.is_launched

    def launch_update_(
        self, update: BlockUpdate, largest: Tensor, counts: bool
    ) -> Tensor | None:
        from rlbuf_td.kernels.sum_tree import triton

        law = self._weight_law()
        return triton.update_(self.table, update, largest, law, counts=counts)

    def launch_enter_(self, run: Run, largest: Tensor) -> None:
        from rlbuf_td.kernels.sum_tree import triton

        triton.enter_(self.table, run, largest, self._weight_law())

    def _weight_law(self) -> WeightLaw:
        return WeightLaw(
            self.settings[WEIGHED], self.eps, self.min_priority, self.first
        )

    def update_loop(self) -> Callable[..., Any]:
        return loop("batch.cpu", "update_proportional")

    def refresh_weights(self, anew: bool = False) -> None:
        settings = self.settings.values
        if anew or settings[ALPHA] != settings[WEIGHED]:
            alpha = settings[ALPHA]
            # until the work is done: after an interrupt, the next use does it again
            settings[WEIGHED] = nan
            sum_tree.reweigh_(self.table, alpha, self.eps)
            settings[WEIGHED] = alpha

    def check(self) -> None:
        self.refresh_weights()
        self.table.check(self.settings[ALPHA], self.eps)

    def restore_(self, magnitude: Tensor) -> None:
        self.settings[WEIGHED] = nan  # the next use of weights recomputes them
        self.table.magnitude[: len(magnitude)] = magnitude


class ProportionalSampler(Prioritized):
    r"""Draws rows with probabilities proportional to a power of the magnitude of their
    TD error.

    .. math::
        P(i) = p_i^\alpha / \sum_j p_j^\alpha, \quad p_i = |\delta_i| + \epsilon, \quad
        w_i = (N P(i))^{-\beta} / \max_j w_j

    Args:
        max_capacity: the number of rows that can have a priority, at least 1. A buffer
            increases it to the storage's ``max_size`` if that is larger.
        alpha: exponent of the priorities, at least 0; 0 draws uniformly.
        beta: exponent of the importance weights, at least 0; 1 fully corrects the bias
            of the draws.
        eps: added to every magnitude, so that a row with a TD error of 0 can be drawn;
            the default is TorchRL's.
        dtype: float32 or float64, accepted for compatibility and ignored: magnitudes
            and weights are always float32, and their sums float64.
        stratified: whether to draw one row from each of ``B`` segments of equal
            probability. Stratified draws have a lower variance than independent draws.
            Consecutive rows of a batch come from distant segments. A slice of a batch,
            such as a minibatch, therefore also covers the whole distribution.
        weight_norm: the divisor of the importance weights: the largest weight in the
            ``"buffer"`` (as in TorchRL), the largest weight in the ``"batch"``, or
            ``None`` for no division. With ``"buffer"``, one row with a tiny TD error
            makes all other weights small, about 0.05, and with them losses and
            gradients; ``"batch"`` avoids this.
        reduction: how to combine several TD errors of a row: ``"max"``, ``"min"``,
            ``"mean"`` or ``"median"``.
        device: the device of the rows, on which priorities are always stored.
        max_priority_within_buffer: must be ``False``: new rows get the largest
            magnitude ever seen.
        min_priority: the smallest ``|td_error|`` of any row, at least 0. Smaller
            magnitudes count as ``min_priority``.

    ``alpha`` and ``beta`` may be set at any time, also by TorchRL's
    ``ParameterScheduler``. The sign of a TD error does not matter. A new row gets the
    largest ``|td_error|`` seen so far, or 1.0 before the first TD error.

    For *loss-adjusted prioritized replay* (LAP), use
    ``alpha=0.4, beta=0.0, eps=0.0, min_priority=1.0`` with a Huber loss. The expected
    gradient of LAP equals that of the PAL loss with uniform draws.

    Raises:
        NotImplementedError: ``max_priority_within_buffer`` is ``True``.
        ValueError: an argument is out of range, another buffer uses the sampler, or the
            rows are not on ``device``. Updates on the CPU also raise a ValueError if a
            TD error is NaN or infinite, and then change no priority.
        RuntimeError: (when sampling) the buffer is empty, or (on the CPU) no row has a
            positive priority.
        MemoryError: the priorities do not fit into memory.

    Warns:
        RuntimeWarning: (once, when sampling with ``weight_norm="buffer"``) the mean
            weight of every 100th of a thousand batches was below 0.1.

    Cost: O(B log N) to draw and to update; O(N) to change alpha; 10 bytes per row. On a
    GPU: O(N) to draw, which scans all weights, O(B log B) to update, and 8 bytes per
    row.
    Source: Schaul, Quan, Antonoglou, Silver: Prioritized Experience Replay, ICLR 2016,
    section 3.3; for
    ``min_priority``: Fujimoto, Meger, Precup: An Equivalence between Loss Functions and
    Non-Uniform Sampling in Experience Replay, NeurIPS 2020.
    In contrast to TorchRL's ``PrioritizedSampler``, TD errors may be negative, sums are
    always float64, rows may have weight 0 and are then never drawn, draws are
    stratified by default, and ``torch.manual_seed`` determines the draws.

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

    rule: ProportionalRule
    _shown: ClassVar[tuple[str, ...]] = (*Prioritized._shown, "min_priority")

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float64,
        reduction: Reduction = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
        *,
        stratified: bool = True,
        weight_norm: WeightNorm = "buffer",
        min_priority: float = 0.0,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"dtype must be torch.float32 or torch.float64, got {dtype}"
            )
        if max_priority_within_buffer:
            reason = "new rows get the largest magnitude ever seen, because each write would search all rows"
            raise NotImplementedError(
                f"max_priority_within_buffer=True is not supported: {reason}"
            )
        rule = partial(ProportionalRule, eps=eps, min_priority=min_priority)
        super().__init__(
            max_capacity, rule, alpha, beta, stratified, weight_norm, reduction, device
        )

    eps = property(attrgetter("rule.eps"), doc="The number added to every magnitude.")
    min_priority = property(
        attrgetter("rule.min_priority"), doc="The lower bound of magnitudes."
    )
    tree = property(attrgetter("rule.table"), doc="The sum tree of the weights.")

    @classmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the size of the priorities of ``capacity`` rows in bytes.

        Example:
            >>> ProportionalSampler.nbytes_for(1_000_000)
            9715264
        """
        return sum_tree.tree_bytes(capacity, torch.device(device))

    def entry_loop(self) -> Any:
        """See :class:`~rlbuf_td.samplers.prioritized.Prioritized`."""
        from rlbuf_td.kernels.batch import write_cpu

        return (
            write_cpu.enter_proportional
            if type(self.rule) is ProportionalRule
            else None
        )

    def snapshot(self) -> State:
        """See :class:`~rlbuf_td.samplers.common.StatefulSampler`."""
        return super().snapshot() | {"eps": self.eps, "min_priority": self.min_priority}

    def load_state_dict(self, state_dict: State) -> None:
        """Restore a result of :meth:`state_dict`, or the state of TorchRL's
        ``PrioritizedSampler``."""
        if "_sum_tree" in state_dict:
            state_dict = self._from_torchrl(state_dict)
        with state_of(self):
            eps = exponent("eps", state_dict["eps"])
            min_priority = exponent(
                "min_priority", state_dict.get("min_priority", self.min_priority)
            )
        with defer_sigint:
            super().load_state_dict(state_dict)
            self.rule.configure(eps, min_priority)
            self.rule.refresh_weights()

    def _from_torchrl(self, state: State) -> State:
        """Return the state of TorchRL's ``PrioritizedSampler`` as one of this
        sampler."""
        saved, largest = read_torchrl_priorities(state)
        capacity = max(len(saved), self.priorities.capacity)
        magnitude = torch.full((capacity,), -1.0, dtype=torch.float32, device="cpu")
        magnitude[: len(saved)] = saved
        settings = {name: float(state[f"_{name}"]) for name in ("alpha", "beta", "eps")}
        return settings | {
            "largest": largest,
            "max_capacity": capacity,
            "magnitude": magnitude,
        }


def read_torchrl_priorities(state: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Read the state of TorchRL's ``PrioritizedSampler``.

    Returns:
        The magnitudes of the TD errors of N rows (``[N]`` float64, -1: no priority),
        and the largest magnitude so far, -1 if there is none.
    """
    tree = state["_sum_tree"]
    alpha = float(state["_alpha"])
    eps = float(state["_eps"])
    weight = torch.as_tensor(
        tree[torch.arange(len(tree), device="cpu")], dtype=torch.float64, device="cpu"
    )
    seen = state["_max_priority"][0]
    largest = -1.0 if seen is None else float(seen)
    magnitude = (
        weight ** (1 / alpha) - eps if alpha else torch.full_like(weight, abs(largest))
    )
    return torch.where(
        weight > 0, magnitude.clamp(0.0, sum_tree.LARGEST_MAGNITUDE), -1.0
    ), largest
