"""The base class of prioritized samplers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from ctypes import addressof
from operator import attrgetter
from struct import Struct
from threading import Lock
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage

from rlbuf_td.kernels.batch import WINDOWS
from rlbuf_td.kernels.dispatch import compiled_form_of
from rlbuf_td.kernels.host_memory import HostTensors, address_of, alias_of
from rlbuf_td.kernels.strata import NORMS, DrawLaw, step_of
from rlbuf_td.kernels.sum_tree import REFUSED
from rlbuf_td.samplers.bound import BoundDraw, Masks
from rlbuf_td.samplers.common import EMPTY, setting, uniform_numbers
from rlbuf_td.samplers.priorities import ALPHA, BETA, LARGEST, WEIGHED, Law, Priorities
from rlbuf_td.samplers.row_sampler import RowSampler
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import exponent, one_of, state_of, whole
from rlbuf_td.storages.indexing import flat_rows, row_count
from rlbuf_td.storages.listeners import Recovers
from rlbuf_td.storages.memory_budget import Purpose, require_room
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.shared.memory import SharedNumbers

WeightNorm = Literal["buffer", "batch"] | None
Reduction = Literal["max", "min", "mean", "median"]
_MASKS = Struct("2q2d")  # the last four fields of a ``WINDOWS`` record


def _exponent(name: str, place: int, doc: str) -> Any:
    def assign(self: Prioritized, value: float) -> None:
        self.settings[place] = exponent(name, value)

    return property(lambda self: self.settings[place], assign, doc=doc)


class Prioritized(RowSampler, PrioritizedSampler, Recovers):
    """Abstract base of the prioritized samplers; subclasses choose how TD errors determine probabilities."""

    report_keys = frozenset({"priority_weight", SAMPLED_AT})
    stratified: bool = setting(one_of(True, False))
    weight_norm: WeightNorm = setting(one_of("buffer", "batch", None))
    reduction: Reduction = setting(one_of("max", "min", "mean", "median"))
    alpha = _exponent("alpha", ALPHA, "Exponent of the priorities; 0 draws uniformly. May be set at any time.")
    beta = _exponent("beta", BETA, "Exponent of the importance weights; 1 corrects fully for the law's probabilities.")
    default_priority = property(attrgetter("priorities.entry"), doc="The magnitude of a new row's TD error.")
    device = property(attrgetter("priorities.device"), doc="The device of the priorities and the rows.")
    _max_capacity = property(attrgetter("priorities.capacity"))
    _shown: ClassVar[tuple[str, ...]] = ("alpha", "beta", "stratified", "weight_norm", "_max_capacity")
    state_keys: ClassVar = ("alpha", "beta", "stratified", "weight_norm", "reduction")

    def __init__(
        self,
        max_capacity: int,
        law: Callable[[SharedNumbers], Law],
        alpha: float,
        beta: float,
        stratified: bool,
        weight_norm: WeightNorm,
        reduction: Reduction,
        device: torch.device | str | None = None,
        within_buffer: bool = False,
    ) -> None:
        capacity, alpha = whole(1)("max_capacity", max_capacity), exponent("alpha", alpha)
        self.stratified, self.weight_norm, self.reduction = stratified, weight_norm, reduction
        remedy = "Use a smaller max_capacity, or UniformSampler, which has no priorities."
        purpose = Purpose(f"Priorities of {capacity:,} rows take", remedy)
        require_room(self.nbytes_for(capacity), torch.device("cpu"), purpose)
        self.settings = SharedNumbers("d", [alpha, exponent("beta", beta), -1.0, alpha])
        self.law = law(self.settings)
        self.priorities = Priorities(self.law, capacity, device, within_buffer)

    @classmethod
    @abstractmethod
    def nbytes_for(cls, capacity: int, device: torch.device | str = "cpu") -> int:
        """Return the size of the priorities of ``capacity`` rows in bytes."""

    def draw(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """See :class:`~rlbuf_td.samplers.row_sampler.RowSampler`."""
        rows, law = row_count(storage), self.law
        if not rows:
            raise RuntimeError(EMPTY)
        self.priorities.serves.claim(storage)
        law.weigh()
        uniform = uniform_numbers(batch_size, self._rng, self.priorities.device)
        flat, weight = law.draw(uniform, rows, self.stratified, self.weight_norm)
        return flat, {"priority_weight": weight}

    def weigh_batch_(self, flat: Tensor, weight: Tensor) -> None:
        """Give rows that come from several draws the weights, ``[B]``, that one draw of these rows would give them."""
        if self.weight_norm == "batch":
            likeliest = self.law.probability(flat).argmax()
            weight.fill_(1.0)
            self.law.weigh_beside_(flat, flat[likeliest, None], weight)
            weight.div_(weight.max())

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Set the priorities of rows from TD errors; an exception leaves all priorities unchanged.

        Args:
            index: ``[B]`` flat rows, a tuple of ``ndim`` tensors, ``[B, ndim]``, or an int. The index -1 is skipped.
            priority: TD errors of any sign, ``[B]`` or one for all rows; the sampler applies eps and alpha.
            storage: the storage of the rows. If given, rows that are not yet written are out of range. May be omitted
                if ``index`` holds flat rows.

        Raises:
            ValueError: the shapes differ, or a TD error is NaN or infinite (on CUDA, such TD errors are skipped, and
                ``rb.health()`` counts them).
            IndexError: a row is out of range (on CUDA, such rows are skipped).
            TypeError: the index does not hold integers.
        """
        self.priorities.assign(index, priority, None if storage is None else len(storage), storage, counts=True)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Set the magnitude of the newly written rows at ``index`` to :attr:`default_priority`."""
        self.priorities.enter(index, storage)

    def recover(self, storage: Any, new: Tensor) -> None:
        """See :class:`~rlbuf_td.storages.listeners.Recovers`."""
        self.priorities.recover(storage, new)

    def priority(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """Return the stored ``|td_error|`` of each row, ``[B]`` float64; -1 for a row without a priority."""
        return self.law.table.magnitude[self.priorities.rows(index, storage)].to(torch.float64)

    def probability(self, index: Any, *, storage: Storage | None = None) -> Tensor:
        """Return each row's probability, ``[B]`` float64. Raises IndexError (on the CPU) if a row is out of range."""
        self.law.weigh()
        return self.law.probability(self.priorities.rows(index, storage))

    def least_probability(self) -> float | Tensor:
        """Return the smallest positive probability of all rows, float64; infinite if no row can be drawn."""
        self.law.weigh()
        return self.law.least_probability()

    @property
    def bytes_to_share(self) -> int:
        """The bytes that :meth:`share_memory_` will move to shared memory."""
        return 0 if self.priorities.is_shared else self.nbytes_for(self.priorities.capacity)

    def share_memory_(self) -> None:
        """Move the priorities to shared memory, which processes started later can use."""
        self.priorities.share_memory_()

    @compiled_form_of("mark_update")
    def bind_entry(self) -> BoundEntry | None:
        """Return how compiled writes set the priorities of new rows; None: they call :meth:`mark_update`'s function."""
        return None

    def _empty(self) -> None:
        self.priorities.clear()

    def snapshot(self) -> dict[str, Any]:
        """See :class:`~rlbuf_td.samplers.common.StatefulSampler`."""
        self.law.weigh()
        seen = {"max_capacity": self.priorities.capacity, "largest": float(self.priorities.largest)}
        return (
            self._settings()
            | seen
            | {"priorities": {name: alias_of(each) for name, each in self.priorities.tensors().items()}}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`. Raises ValueError, and changes nothing, if the state is invalid."""
        with state_of(self):
            settings = {name: state_dict.get(name, value) for name, value in self._settings().items()}
            largest, capacity = float(state_dict["largest"]), int(state_dict["max_capacity"])
            with self._set(settings):
                self.priorities.load(self.alpha, self.beta, largest, state_dict["priorities"], capacity)


class PrioritizedDraw(BoundDraw):
    """Abstract base of the bound draws by priority, which also update priorities."""

    reports = (("priority_weight", torch.float32), (SAMPLED_AT, torch.int64))

    def __init__(self, storage: PackedStorage, sampler: Prioritized, size: int, reads: bool) -> None:
        self.settings = sampler.settings.values
        self.law: Any = sampler.law
        self.kept = self.law.table  # a load in another thread may replace it during a call
        self.priorities, self.step, self.lock = self.law.table.addresses, step_of(size, True), Lock()
        self.magnitude = self.law.table.magnitude.data_ptr()
        self.table = self.priorities.ctypes.data
        self.owner: Any = sampler  # the caller may replace ``sampler`` by its wrapper
        self.inputs = HostTensors([])  # recognizes tensors like those of the last update
        self.updates: Callable[..., Any] | None = None  # the machine code that updates, from the first update on
        super().__init__(storage, sampler, size, reads)
        self.eps = self.record["eps"] = getattr(self.law, "eps", 0.0)
        self.record["weighed_alpha"] = addressof(self.settings) + 8 * WEIGHED
        self.record["largest"] = addressof(self.settings) + 8 * LARGEST

    def holds(self) -> bool:
        """Whether storage, priorities and law are unchanged: a load or sharing replaces their memory."""
        owner, law = self.owner, self.law
        is_in_place = law.table.magnitude.data_ptr() == self.magnitude and owner.settings.values is self.settings
        is_same_law = self.settings[ALPHA] == self.weighed_alpha() and getattr(law, "eps", 0.0) == self.eps
        return super().holds() and is_in_place and is_same_law

    def limit(self, count: int) -> None:
        """See :class:`~rlbuf_td.samplers.bound.BoundDraw`."""
        super().limit(count)
        self.step = step_of(count, True)

    @abstractmethod
    def weighed_alpha(self) -> float:
        """Return the alpha for which the law has computed its probabilities."""

    def __call__(self, written: int, targets: int) -> bool:
        sampler = self.owner
        if sampler.weight_norm is None and self.ring.holes:
            return False  # the weights depend on the number of rows without holes
        self.uniform.uniform_(generator=self.generator)
        with self.lock:
            return self.kernel(self.address, targets, self.draw_law(), written)

    def draw_law(self) -> DrawLaw:
        step, norm = self.step if self.owner.stratified else 0, NORMS[self.owner.weight_norm]
        return DrawLaw(step, self.settings[BETA], norm)

    def update(self, index: Any, td_error: Any, stamp: Any, masks: Masks | None = None) -> int | None:
        """See :class:`~rlbuf_td.samplers.bound.BoundDraw`; the TD errors may have further dims of size 1."""
        given = (index, td_error) if stamp is None else (index, td_error, stamp)
        given = given if masks is None else (*given, masks.mask, masks.burn_in_mask)
        where = self.inputs.addresses(given) or self._addresses(given, masks)
        if where is None or self.ring.holes or not self.holds():
            return None
        if masks is not None:
            *where, mask, burn_in_mask = where
        elif self.law.min_priority:
            td_error = self.law.floored(td_error)
            where[1] = address_of(td_error)
        index_at, td_error_at, stamp_at = where if stamp is not None else (*where, 0)
        with self.lock:
            if masks is not None:
                numbers = mask, burn_in_mask, masks.eta, self.law.min_priority
                _MASKS.pack_into(self.windows_bytes, WINDOWS.itemsize - _MASKS.size, *numbers)
            self.updates = self.updates or self.compiled_update()
            written = len(self.storage)
            largest, stale = self.updates(self.address, index_at, td_error_at, stamp_at, written)
        if largest == REFUSED:  # a row is out of range or an error is not finite; nothing has changed
            return None
        if self.owner.priorities.file is not None:
            self.owner.priorities.keep(flat_rows(index, self.storage, self.flat.device))
        return stale

    def _addresses(self, given: tuple[Any, ...], masks: Masks | None) -> list[int] | None:
        windows, count = self.windows, self.size
        if (windows is None) != (masks is None):
            return None
        if windows is not None:
            count *= int(windows["length"][0] + windows["burn_in"][0])
        td_error, rows = given[1], torch.Size([count])
        shape = rows
        if type(td_error) is Tensor and not td_error.is_nested and td_error.numel() == count:
            shape = td_error.shape
        index = torch.Size([count, 2]) if self.record["lanes"][0] else rows
        entries = [(torch.int64, index), (torch.float32, shape), (torch.int64, rows)]
        flags = [(torch.bool, rows)] * (0 if masks is None else 2)
        self.inputs = HostTensors([*entries[: len(given) - len(flags)], *flags])
        return self.inputs.addresses(given)

    @abstractmethod
    def compiled_update(self) -> Callable[..., Any]:
        """Return the machine code that updates priorities."""


class EntryLoops(NamedTuple):
    """The compiled functions that write rows with their priorities, and that only set the priorities of new rows."""

    write: Any
    enter: Any


class BoundEntry:
    """How a compiled write sets the priorities of new rows.

    Args:
        sampler: the sampler, whose law computes weights for the current alpha.
        loops: the compiled functions of this sampler.
        lock: held during the call.
        **fields: further fields of a :data:`rlbuf_td.kernels.batch.RING` record.
    """

    def __init__(self, sampler: Prioritized, loops: EntryLoops, lock: Any, **fields: int) -> None:
        self.sampler, self.loops, self.lock, law = sampler, loops, lock, sampler.law
        self.table, self.settings, self.eps = law.table, sampler.settings.values, getattr(law, "eps", 0.0)
        self.magnitude = law.table.magnitude.data_ptr()
        settings = addressof(self.settings)
        #: The magnitude of new rows, if it is not the largest so far.
        self.value = np.zeros(1, np.float64) if self.takes_value() else None
        largest = settings + 8 * LARGEST if self.value is None else self.value.ctypes.data
        self.fields: dict[str, Any] = fields | {"priorities": law.table.addresses.ctypes.data, "largest": largest}
        self.fields |= {"weighed_alpha": settings + 8 * WEIGHED, "eps": self.eps}

    def holds(self) -> bool:
        """Whether the priorities are in their old place, and new rows get the same ``eps``."""
        sampler, law = self.sampler, self.sampler.law
        is_in_place = law.table.magnitude.data_ptr() == self.magnitude and sampler.settings.values is self.settings
        return is_in_place and getattr(law, "eps", 0.0) == self.eps and self.takes_value() == (self.value is not None)

    def takes_value(self) -> bool:
        """Whether the magnitude of new rows is computed before each write."""
        return self.sampler.priorities.within_buffer or self.sampler.law.first > 1.0
