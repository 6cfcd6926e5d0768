"""The base class of prioritized samplers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage

from rlbuf_td.kernels.host_memory import alias_of
from rlbuf_td.kernels.serials import Serials
from rlbuf_td.kernels.strata import (
    LEAST_RATIO,
    stratification_of,
)
from rlbuf_td.samplers.common import EMPTY, fill_uniform_, setting, uniform_numbers
from rlbuf_td.samplers.priorities import ALPHA, BETA, Priorities, PriorityRule, Update
from rlbuf_td.samplers.row_sampler import RowSampler
from rlbuf_td.samplers.weight_watch import WeightWatch
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import State, exponent, one_of, state_of, whole
from rlbuf_td.storages.indexing import flat_rows, row_count
from rlbuf_td.storages.listeners import Recovers
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.memory_budget import require_room
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.ring import SAMPLED_AT, LiveRows

WeightNorm = Literal["buffer", "batch"] | None
Reduction = Literal["max", "min", "mean", "median"]


def _exponent(name: str, position: int, doc: str) -> Any:
    def assign(self: Prioritized, value: float) -> None:
        self.settings[position] = exponent(name, value)

    return property(lambda self: self.settings[position], assign, doc=doc)


class Prioritized(RowSampler, PrioritizedSampler, Recovers):
    """Abstract base of the prioritized samplers; subclasses choose how TD errors
    determine probabilities."""

    report_keys = frozenset({"priority_weight", SAMPLED_AT})
    stratified: bool = setting(one_of(True, False))
    weight_norm: WeightNorm = setting(one_of("buffer", "batch", None))
    reduction: Reduction = setting(one_of("max", "min", "mean", "median"))
    alpha = _exponent(
        "alpha",
        ALPHA,
        "Exponent of the priorities; 0 draws uniformly. May be set at any time.",
    )
    beta = _exponent(
        "beta",
        BETA,
        "Exponent of the importance weights; 1 corrects fully for the rule's probabilities.",
    )
    default_priority = property(
        attrgetter("priorities.initial"), doc="The magnitude of a new row's TD error."
    )
    device = property(
        attrgetter("priorities.device"),
        doc="The device of the priorities and the rows.",
    )
    _max_capacity = property(attrgetter("priorities.capacity"))  # pyrefly: ignore [bad-override]
    _shown: ClassVar[tuple[str, ...]] = (
        "alpha",
        "beta",
        "stratified",
        "weight_norm",
        "_max_capacity",
    )
    state_keys: ClassVar = ("alpha", "beta", "stratified", "weight_norm", "reduction")

    def __init__(
        self,
        max_capacity: int,
        rule: Callable[[SharedNumbers], PriorityRule],
        alpha: float,
        beta: float,
        stratified: bool,
        weight_norm: WeightNorm,
        reduction: Reduction,
        device: torch.device | str | None = None,
    ) -> None:
        capacity = whole(1)("max_capacity", max_capacity)
        alpha = exponent("alpha", alpha)
        self.stratified = stratified
        self.weight_norm = weight_norm
        self.reduction = reduction
        remedy = (
            "Use a smaller max_capacity, or UniformSampler, which has no priorities."
        )
        what = f"Priorities of {capacity:,} rows take"
        require_room(self.nbytes_for(capacity), torch.device("cpu"), what, remedy, None)
        self.settings = SharedNumbers("d", [alpha, exponent("beta", beta), -1.0, alpha])
        self.rule = rule(self.settings)
        self.priorities = Priorities(self.rule, capacity, device)
        self.weight_watch = WeightWatch()

    @classmethod
    @abstractmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the size of the priorities of ``capacity`` rows in bytes."""

    def launches(self, storage: PackedStorage) -> bool:
        """Whether kernels draw rows and update priorities on a GPU."""
        return self.priorities.is_launched

    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See :class:`~rlbuf_td.samplers.row_sampler.RowSampler`."""
        flat, weight, _ = self._drawn(storage, batch_size, serials=None)
        return flat, {"priority_weight": weight}

    def draw_stamped(
        self, storage: PackedStorage, batch_size: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See :class:`~rlbuf_td.buffers.plan.TorchPlan`."""
        serials = storage.ring.for_kernels()
        flat, weight, stamp = self._drawn(storage, batch_size, serials)
        report = {"priority_weight": weight}
        return flat, report if stamp is None else report | {SAMPLED_AT: stamp}

    def _drawn(
        self, storage: Storage, batch_size: int, serials: Serials | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return drawn rows, importance weights, and the serials of the rows if they
        are known."""
        rows = row_count(storage)
        rule = self.rule
        if not rows:
            raise RuntimeError(EMPTY)
        self.priorities.serves.claim(storage)
        rule.refresh_weights()
        law = stratification_of(
            batch_size, self.stratified, self.beta, self.weight_norm
        )
        if rule.is_launched:
            flat, weight, stamp = rule.launch_draw(
                batch_size, rows, law, generator=self._rng, serials=serials
            )
        else:
            device = rule.table.magnitude.device
            uniform = uniform_numbers(batch_size, self._rng, device)
            flat, weight = rule.draw(uniform, rows, law)
            stamp = None
        if self.weight_norm == "buffer":
            self.weight_watch.see(weight)
        return flat, weight, stamp

    def draw_into(
        self,
        storage: PackedStorage,
        live: LiveRows,
        flat: Tensor,
        report: dict[str, Tensor],
        scratch: Tensor,
    ) -> None:
        """See :class:`~rlbuf_td.buffers.plan.CompiledPlan`."""
        if not live.rows:
            raise RuntimeError(EMPTY)
        if self.priorities.serves._storage() is not storage:
            self.priorities.serves.claim(storage)
        if self._rng is None:
            scratch.uniform_()
        else:
            fill_uniform_(scratch, self._rng)
        weight = report["priority_weight"]
        beta = self.settings.values[BETA]
        norm = self.weight_norm
        law = stratification_of(flat.numel(), self.stratified, beta, norm)
        self.rule.draw_into(scratch, live.rows, law, flat, weight)
        if norm == "buffer":
            self.weight_watch.see(weight)

    def weigh_batch_(self, flat: Tensor, weight: Tensor) -> None:
        """Give rows that come from several draws the weights, ``[B]``, that one draw of
        these rows would give them."""
        if self.weight_norm == "batch":
            probability = self.rule.probability(flat).clamp(min=LEAST_RATIO)
            weight.copy_((probability / probability.min()).pow(-self.beta))

    def update_priority(
        self, index: object, priority: object, *, storage: Storage | None = None
    ) -> None:
        """Set the priorities of rows from TD errors; an exception leaves all priorities
        unchanged.

        Args:
            index: ``[B]`` flat rows, a tuple of ``ndim`` tensors, ``[B, ndim]``, or an
                int. The index -1 is skipped.
            priority: TD errors of any sign, ``[B]`` or one for all rows; the sampler
                applies eps and alpha.
            storage: the storage of the rows. If given, rows that are not yet written
                are out of range. May be omitted if ``index`` holds flat rows.

        Raises:
            ValueError: the shapes differ, or a TD error is NaN or infinite (on CUDA and
                without numba, such TD errors are skipped, and ``rb.health()`` counts
                them).
            IndexError: a row is out of range (on CUDA and without numba, such rows are
                skipped).
            TypeError: the index does not hold integers.
        """
        self.priorities.assign(Update(index, priority), storage)

    def update_sampled(self, update: Update, storage: PackedStorage) -> int | Tensor:
        """Update priorities as :meth:`update_priority` does, except those of rows that
        are gone; return their number."""
        if type(self).update_priority is Prioritized.update_priority:
            return self.priorities.assign(update, storage)
        index, td_error, stamp, *_ = update.reduced()
        stale: int | Tensor = 0
        if stamp is not None:
            flat = flat_rows(index, storage, storage.device)
            index, stale = storage.ring.skip_stale(flat, stamp)
        self.update_priority(index, td_error, storage=storage)
        return stale

    def mark_update(self, index: object, *, storage: Storage | None = None) -> None:
        """Set the magnitude of the newly written rows at ``index`` to
        :attr:`default_priority`."""
        self.priorities.enter(index, storage)

    def mark_run(
        self, index: object, storage: PackedStorage, first: int, count: int
    ) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Listener`."""
        self.priorities.enter_run(index, storage, first, count)

    def recover(self, storage: PackedStorage, new: Tensor) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Recovers`."""
        self.priorities.recover(storage, new)

    def priority(self, index: object, *, storage: Storage | None = None) -> Tensor:
        """Return the stored ``|td_error|`` of each row, ``[B]`` float64; -1 for a row
        without a priority."""
        return self.rule.table.magnitude[self.priorities.rows(index, storage)].to(
            torch.float64
        )

    def probability(self, index: object, *, storage: Storage | None = None) -> Tensor:
        """Return each row's probability, ``[B]`` float64. Raises IndexError (on the
        CPU) if a row is out of range."""
        self.rule.refresh_weights()
        return self.rule.probability(self.priorities.rows(index, storage))

    def least_probability(self) -> float | Tensor:
        """Return the smallest positive probability of all rows, float64; infinite if no
        row can be drawn."""
        self.rule.refresh_weights()
        return self.rule.least_probability()

    @property
    def bytes_to_share(self) -> int:
        """The bytes that :meth:`share_memory_` will move to shared memory."""
        return (
            0
            if self.priorities.is_shared
            else self.nbytes_for(self.priorities.capacity)
        )

    def share_memory_(self) -> None:
        """Move the priorities to shared memory, which processes started later can
        use."""
        self.priorities.share_memory_()

    def entry_loop(self) -> Any:
        """Return the function in ``write_cpu`` that sets the priorities of new rows;
        None: there is none."""
        return None

    def _empty(self) -> None:
        self.priorities.clear()

    def snapshot(self) -> State:
        """See :class:`~rlbuf_td.samplers.common.StatefulSampler`."""
        capacity = self.priorities.capacity
        largest = float(self.priorities.largest)
        magnitude = alias_of(self.rule.table.magnitude[:capacity])
        return self._settings() | {
            "max_capacity": capacity,
            "largest": largest,
            "magnitude": magnitude,
        }

    @defer_sigint
    def load_state_dict(self, state_dict: State) -> None:
        """Restore a :meth:`state_dict`. Raises ValueError, and changes nothing, if the
        state is invalid."""
        with state_of(self):
            settings = {
                name: state_dict.get(name, value)
                for name, value in self._settings().items()
            }
            largest = float(state_dict["largest"])
            capacity = int(state_dict["max_capacity"])
            with self._set(settings):
                self.priorities.load(
                    self.alpha, self.beta, largest, state_dict["magnitude"], capacity
                )
