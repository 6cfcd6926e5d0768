"""Fast sampling and priority updates: one compiled call each.

A plan stores the memory addresses that a compiled kernel needs to draw batches of one size from one buffer. From the
same state of the random generator, a plan and the general path (see :mod:`rlbuf_td.buffers`) give the same batches.
They also set the same priorities. A plan that cannot be used, for example after the storage got new memory, returns
None. The buffer then takes the general path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from rlbuf_td.kernels.batch import Gather
from rlbuf_td.kernels.dispatch import backend_of, machine_code
from rlbuf_td.kernels.host_memory import HostTensors, address_of, in_dispatch_mode
from rlbuf_td.kernels.rank_order import ChunkedOrder
from rlbuf_td.kernels.strata import NORMS, step_of
from rlbuf_td.kernels.sum_tree import REFUSED
from rlbuf_td.samplers import MinibatchSampler, ProportionalSampler, RankSampler, RecencySampler, UniformSampler
from rlbuf_td.samplers.priorities import ALPHA, BETA, LARGEST, WEIGHED
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.rows import PlainRows
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.torchrl_parts import generator_of
from rlbuf_td.storages.write_clock import BY_ROW, LAST, NOW, SAMPLED_AT

_CPU = torch.device("cpu")


class Blank(NamedTuple):
    """A batch of uninitialised tensors, which a kernel fills."""

    slot: int  # address of an array with the addresses of the tensors
    tensors: list[Tensor]
    batch: TensorDict
    report: dict[str, Tensor]


class Planned(ABC):
    """Abstract base of all plans."""

    gather: Gather
    newest = -1  # the newest time step at the last draw
    _blanks: list[Any]

    def blank(self) -> Any:
        if not self._blanks:
            with torch.inference_mode(False):  # a batch may outlive inference mode
                self._blanks = self.make_blanks()
        return self._blanks.pop()

    @abstractmethod
    def make_blanks(self) -> list[Any]:
        """Allocate uninitialised batches."""

    @abstractmethod
    def sample(self) -> Blank | None:  # the caller holds the storage's lock
        """Return a batch, or None if the plan cannot be used."""

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        """Update priorities; return how many rows were replaced since the draw, or None if the plan cannot be used."""
        return None


class Plan(Planned):
    """Abstract base of the plans that draw rows, and read their entries unless ``gathers`` is False."""

    reports: tuple[tuple[str, torch.dtype], ...] = ()  # the sampler's report: the name and dtype of each entry
    table = 0  # address of an array with the addresses of the priorities
    kept: Any = None  # what is kept alive because the kernel reads its memory
    read_entries: Callable[..., Any] | None = None  # the machine code that reads deduplicated observations
    pools: tuple[Any, ...] = ()  # further arguments of ``read_entries``

    def __init__(self, storage: PackedStorage, sampler: Any, size: int, gathers: bool = True) -> None:
        self.storage, self.sampler, self.size = storage, sampler, size
        self.rows, self.generator = storage.all_rows(), generator_of(sampler)
        self.lanes = self.rows.cells // self.rows.steps if storage.ndim > 1 else 0
        index = (torch.int64, torch.Size([storage.ndim] if self.lanes else []))
        more = [index, *((dtype, torch.Size([])) for _, dtype in self.reports)]
        leaves = [(leaf.dtype, leaf.shape) for leaf in self.rows.layout.leaves if gathers]
        self.flat = torch.zeros(size, dtype=torch.int64, device="cpu")  # scratch memory, used with the lock held
        self.uniform = torch.zeros(size, dtype=torch.float64, device="cpu")
        scratch = {"flat": self.flat.data_ptr(), "uniform": self.uniform.data_ptr()}
        shape = {"steps": self.rows.steps, "lanes": self.lanes, "table": self.table}
        extents = self.rows.extents[: len(leaves)]
        self.place = self.rows.flat.data_ptr()  # the kernels' address of the rows
        self.gather = Gather(self.rows.flat, extents, leaves + more, size, **scratch, **shape)
        self.names = ("index", *(name for name, _ in self.reports))
        self.batch_size, self.index_shape = torch.Size([size]), torch.Size([size, *index[1]])
        self.gathers, self._blanks = gathers, []
        self.kernel = self.draw_loop()
        if type(self.rows) is DedupRows:
            self.read_entries, self.pools = _read_entries_loop(), self.rows.table.addresses

    def holds(self) -> bool:
        """Whether storage and sampler are unchanged since the plan was made, and the rows are in their old place."""
        rows = self.rows
        is_in_place = self.storage.rows is rows and rows.flat.data_ptr() == self.place
        return is_in_place and generator_of(self.sampler) is self.generator and not in_dispatch_mode()

    def make_blanks(self) -> list[Blank]:
        blanks, batch = [], cast(TensorDict, None)
        for slot in self.gather.slots:
            tensors = self.gather.allocate(slot)
            report = dict(zip(self.names, tensors[-len(self.names) :], strict=True))
            if self.gathers:
                batch = self.rows.layout.wrap(tensors, self.batch_size, _CPU, report)
            blanks.append(Blank(slot, tensors, batch, report))
        return blanks

    def sample(self) -> Blank | None:
        written, _, self.newest = self.storage.numbers.values[:3]
        if not written or not self.holds():
            return None
        blank = self._blanks.pop() if self._blanks else self.blank()
        if not self.draw(written, blank.slot):
            return None
        if self.read_entries is not None:
            self.read_entries(self.gather.address, blank.slot, *self.pools)
        return blank

    def draw_loop(self) -> Callable[..., Any]:
        """Return the machine code that fills a batch."""
        from rlbuf_td.kernels.batch import cpu

        return machine_code(cpu.gather_flat, 0, 0)

    @abstractmethod
    def draw(self, written: int, slot: int) -> bool:
        """Draw from the first ``written`` rows, and fill the batch at ``slot``; return False if the kernel refuses."""


class UniformPlan(Plan):
    """Draws every row with equal probability, with replacement."""

    def holds(self) -> bool:
        return super().holds() and not self.sampler.unique

    def draw(self, written: int, slot: int) -> bool:
        self.flat.random_(0, written, generator=self.generator)
        self.kernel(self.gather.address, slot)
        return True

    def draw_part(self, written: int, flat: Tensor) -> None:
        """Fill ``flat``, ``[n]`` int64, with the positions of drawn rows."""
        flat.random_(0, written, generator=self.generator)


class RecencyPlan(Plan):
    """Draws newer rows more often."""

    def draw_loop(self) -> Callable[..., Any]:
        from rlbuf_td.kernels.batch import cpu

        return machine_code(cpu.sample_recent, 0, 0, 0, 0, 0, 0.0)

    def draw(self, written: int, slot: int) -> bool:
        sampler, steps = self.sampler, written // (self.lanes or 1)
        self.uniform.uniform_(generator=self.generator)
        newest, span = self.storage.numbers.values[2], sampler.span(steps)
        self.kernel(self.gather.address, slot, newest, span, steps, sampler.log_decay)
        return True

    def draw_part(self, written: int, flat: Tensor) -> None:
        flat.copy_(self.sampler.draw(self.storage, flat.shape[0])[0])


class MinibatchPlan(Plan):
    """Draws the next rows of an epoch; cannot be used for a short last batch."""

    def __init__(self, storage: PackedStorage, sampler: MinibatchSampler, size: int, gathers: bool = True) -> None:
        super().__init__(storage, sampler, size, gathers)
        self.drawn = self.gather.record["flat"]  # the address at which the kernel reads the epoch's order

    def draw(self, written: int, slot: int) -> bool:
        if written - self.sampler.position < self.size:
            return False
        # Kept until the next draw: the sampler drops the order with the last batch, before the batch is gathered.
        self.kept, start, _ = self.sampler.advance(self.storage, written, self.size)
        self.drawn[0] = address_of(self.kept) + start * self.kept.itemsize
        self.kernel(self.gather.address, slot)
        return True


class PrioritizedPlan(Plan, ABC):
    """Abstract base of the plans that draw by priority."""

    reports = (("priority_weight", torch.float32), (SAMPLED_AT, torch.int64))
    fixed: tuple[float, ...] = ()  # further arguments of the kernel that draws
    assigns: Callable[..., Any] | None = None  # the machine code that updates priorities, from the first update on
    inputs = HostTensors([])  # recognizes tensors like those of the last update

    def __init__(self, storage: PackedStorage, sampler: Any, size: int, gathers: bool = True) -> None:
        self.settings, self.clock = sampler.settings.values, storage.clock.numbers.values
        self.law: Any = sampler.law
        self.kept = self.law.table  # a load in another thread may replace it during a call
        self.priorities, self.step, self.lock = self.law.table.addresses, step_of(size, True), Lock()
        self.magnitude = self.law.table.magnitude.data_ptr()  # changes when a load or sharing replaces the priorities
        self.table = self.priorities.ctypes.data
        super().__init__(storage, sampler, size, gathers)

    def draw(self, written: int, slot: int) -> bool:
        sampler = self.sampler
        self.uniform.uniform_(generator=self.generator)
        law = self.step if sampler.stratified else 0, written, self.settings[BETA], NORMS[sampler.weight_norm]
        with self.lock:
            return self.kernel(self.gather.address, slot, *self.fixed, *law, self.clock[NOW])

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        if type(batch) is not TensorDict or type(priority_key) is not str or batch.batch_size != self.batch_size:
            return None
        entries = entries_of(batch)
        given: list[Any] = [entries.get("index"), entries.get(priority_key), entries.get(SAMPLED_AT)]
        stamps = 0 if given[2] is None else 1
        where = self.inputs.addresses(given[: 2 + stamps]) or self.addresses(given[: 2 + stamps])
        if where is None or self.clock[BY_ROW] or not self.holds():
            return None
        if self.law.min_priority:
            given[1] = self.law.floored(given[1])
            where[1] = address_of(given[1])
        if not stamps:
            where.append(0)
        with self.lock:
            now = self.storage.numbers.values[0], self.clock[NOW], self.clock[LAST]
            self.assigns = self.assigns or self.update_loop()
            largest, stale = self.assigns(self.gather.address, *where, *now, *self.scale())
        if largest == REFUSED:  # a row is out of range or an error is not finite; nothing has changed
            return None
        if largest > self.settings[LARGEST]:
            self.settings[LARGEST] = largest
        return stale

    def addresses(self, given: list[Any]) -> list[int] | None:
        """Return the addresses of an update's index, TD errors and perhaps stamps; None if they do not fit.

        The TD errors may have further dims of size 1.
        """
        error, shape = given[1], self.batch_size
        if type(error) is Tensor and not error.is_nested and error.numel() == self.size:
            shape = error.shape
        entries = (torch.int64, self.index_shape), (torch.float32, shape), (torch.int64, self.batch_size)
        self.inputs = HostTensors(entries[: len(given)])
        return self.inputs.addresses(given)

    @abstractmethod
    def update_loop(self) -> Callable[..., Any]:
        """Return the machine code that updates priorities."""

    def scale(self) -> tuple[float, ...]:
        return ()  # further arguments of ``assigns``


class ProportionalPlan(PrioritizedPlan):
    """Draws rows in proportion to their weights in a sum tree."""

    def draw_loop(self) -> Callable[..., Any]:
        from rlbuf_td.kernels.batch import cpu

        return machine_code(cpu.sample_proportional, 0, 0, 0, 0, 0.0, 0, 0)

    def update_loop(self) -> Callable[..., Any]:
        from rlbuf_td.kernels.batch import cpu

        return machine_code(cpu.update_proportional, *[0] * 7, 0.0, 0.0)

    def holds(self) -> bool:
        return (  # a load or sharing replaces the memory of the sum tree, and a new alpha changes its weights
            super().holds()
            and self.law.table.magnitude.data_ptr() == self.magnitude
            and self.settings[ALPHA] == self.settings[WEIGHED]
        )

    def scale(self) -> tuple[float, ...]:
        return self.settings[WEIGHED], self.law.eps


class RankPlan(PrioritizedPlan):
    """Draws rows by the rank of their priorities."""

    def __init__(self, storage: PackedStorage, sampler: RankSampler, size: int, gathers: bool = True) -> None:
        super().__init__(storage, sampler, size, gathers)
        self.ranks, self.lock = sampler.law.ranks, cast(ChunkedOrder, sampler.law.table).lock
        self.fixed = self.ranks.head.data_ptr(), self.ranks.alpha, self.ranks.shift

    def draw_loop(self) -> Callable[..., Any]:
        from rlbuf_td.kernels.batch import cpu

        return machine_code(cpu.sample_rank, 0, 0, 0, 0.0, 0.0, 0, 0, 0.0, 0, 0)

    def update_loop(self) -> Callable[..., Any]:
        from rlbuf_td.kernels.batch import cpu

        return machine_code(cpu.update_rank, *[0] * 7)

    def holds(self) -> bool:
        return (  # a load or sharing replaces the memory of the order, and a new alpha changes the probabilities
            super().holds()
            and self.law.table.magnitude.data_ptr() == self.magnitude
            and self.settings[ALPHA] == self.ranks.alpha
        )


def _read_entries_loop() -> Callable[..., Any]:
    from rlbuf_td.kernels.batch import dedup_cpu

    return machine_code(dedup_cpu.read_entries, 0, 0, 0, 0, (0, 0))


PLANS: dict[type, type[Plan]] = {
    MinibatchSampler: MinibatchPlan,
    UniformSampler: UniformPlan,
    RecencySampler: RecencyPlan,
    ProportionalSampler: ProportionalPlan,
    RankSampler: RankPlan,
}


def is_plain(storage: Any) -> bool:
    """Whether kernels can access the rows of a storage as plain host memory."""
    return (
        type(storage) is PackedStorage
        and isinstance(storage.rows, PlainRows | DedupRows)
        and (isinstance(storage.rows, PlainRows) or storage.rows.table.is_compiled)
        and backend_of(storage.rows.flat) == "numba"
        and storage.ndim <= 2
        and not storage.is_reserved
        and storage.shared_rows is None
    )


def can_plan(storage: Any, sampler: Any) -> bool:
    """Whether a plan can be made for this storage and sampler."""
    return (
        type(sampler) in PLANS
        and is_plain(storage)
        and not storage.rows.is_mapped
        and getattr(generator_of(sampler), "device", _CPU).type == "cpu"
        and not getattr(sampler, "unique", False)
        and getattr(sampler, "age_key", None) is None
    )
