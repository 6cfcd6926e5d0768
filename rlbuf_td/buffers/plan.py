"""The short path: ``sample`` and ``update_tensordict_priority`` in one compiled call each.

A plan is made once storage, sampler, schema and batch size are fixed: it holds the addresses and the kernel that a call
needs. Each call first checks, in a few comparisons, that nothing has changed since. It gives the same batches and
priorities as the general path from the same generator state. Where something has changed, or an argument is unusual, it
gives nothing: the buffer takes the general path, and makes another plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeGuard, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from rlbuf_td.kernels.batch import Gather, loops
from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.rank_order import ChunkedOrder
from rlbuf_td.kernels.strata import NORMS, step_of
from rlbuf_td.kernels.sum_tree import REFUSED
from rlbuf_td.samplers import ProportionalSampler, RankSampler, UniformSampler
from rlbuf_td.samplers.prioritized import ALPHA, BETA, LARGEST, WEIGHED
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.rows import PlainRows
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.write_clock import BY_ROW, LAST, NOW, SAMPLED_AT

_CPU = torch.device("cpu")


class Plan(ABC):
    """Samples plain rows on the CPU. A subclass knows the law by which rows are drawn.

    Args:
        storage: its rows are ``[T]`` or ``[T, E]``.
        sampler: draws the rows.
        size: B, rows per batch.
        gathers: whether a batch holds the leaves of the rows, beside the index and the report.
    """

    reports: tuple[tuple[str, torch.dtype], ...] = ()  # what the sampler adds to a batch beside the index

    def __init__(self, storage: PackedStorage, sampler: Any, size: int, gathers: bool = True) -> None:
        self.storage, self.sampler, self.size = storage, sampler, size
        self.rows, self.generator, self.length = storage.all_rows(), sampler._rng, storage.counters[0]
        self.lanes = self.rows.cells // self.rows.steps if storage.ndim > 1 else 0
        index = (torch.int64, torch.Size([storage.ndim] if self.lanes else []))
        more = [index, *((dtype, torch.Size([])) for _, dtype in self.reports)]
        leaves = [(leaf.dtype, leaf.shape) for leaf in self.rows.layout.leaves if gathers]
        self.gather = Gather(self.rows.flat, self.rows.layout.extents[: len(leaves)], leaves + more, size)
        self.names = ("index", *(name for name, _ in self.reports))
        self.batch_size = torch.Size([size])
        self.flat = torch.empty(size, dtype=torch.int64, device="cpu")  # scratch memory, under the buffer's lock

    def holds(self) -> bool:
        """Whether the parts are as they were when the plan was made."""
        return self.storage.rows is self.rows and self.sampler._rng is self.generator

    def sample(self) -> tuple[TensorDict, dict[str, Tensor]] | None:
        """Return a batch and the sampler's report, as fresh memory, every leaf a tensor of its own.

        ``None`` if the general path must be taken. The caller holds the buffer's locks.
        """
        written = self.length.value
        if not written or not self.holds():
            return None
        tensors = self.gather.allocate()
        if not self.draw(written, tensors):
            return None
        report = dict(zip(self.names, tensors[-len(self.names) :], strict=True))
        return self.rows.layout.wrap(tensors, self.batch_size, _CPU, report), report

    @abstractmethod
    def draw(self, written: int, tensors: list[Tensor]) -> bool:
        """Fill the tensors of a batch; return whether there is a row to draw."""

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        """Take the TD errors of a batch; return how many rows are stale, ``None``: take the general path."""
        return None


class UniformPlan(Plan):
    """Draws every row with equal probability; repeats are allowed."""

    def holds(self) -> bool:
        """See :meth:`Plan.holds`; ``unique`` may be set at any time."""
        return super().holds() and not self.sampler.unique

    def draw(self, written: int, tensors: list[Tensor]) -> bool:
        gather, flat = self.gather, self.flat if self.lanes else tensors[-1]
        flat.random_(0, written, generator=self.generator)
        fixed = gather.rows, gather.row_bytes, self.lanes, gather.leaves, gather.targets
        loops().sample_uniform(*fixed, flat.data_ptr(), self.size)
        return True


class PrioritizedPlan(Plan, ABC):
    """Takes TD errors back; a subclass knows where priorities are kept."""

    reports = (("priority_weight", torch.float32), (SAMPLED_AT, torch.int64))

    def __init__(self, storage: PackedStorage, sampler: Any, size: int, gathers: bool = True) -> None:
        super().__init__(storage, sampler, size, gathers)
        self.settings, self.clock = sampler.settings.values, storage.clock.values
        self.uniform = torch.empty(size, dtype=torch.float64, device="cpu")

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        """See :meth:`Plan.update`. The usual case is a sampled batch with one float32 error per row."""
        if type(batch) is not TensorDict or type(priority_key) is not str:
            return None
        entries, size = entries_of(batch), self.size
        index, error, stamp = entries.get("index"), entries.get(priority_key), entries.get(SAMPLED_AT)
        if not (
            batch.batch_size == self.batch_size
            and _fits(index, torch.int64, size * (2 if self.lanes else 1))
            and _fits(error, torch.float32, size)
            and _fits(stamp, torch.int64, size)
            and not self.clock[BY_ROW]
            and self.holds()
        ):
            return None
        largest, stale = self.assign(index, error, stamp, self.length.value)
        if largest == REFUSED:
            return None
        if largest > self.settings[LARGEST]:
            self.settings[LARGEST] = largest
        return stale

    @abstractmethod
    def assign(self, index: Tensor, error: Tensor, stamp: Tensor, written: int) -> tuple[float, int]:
        """Set the priorities of rows that still hold what was sampled; return the largest magnitude and the stale rows.

        ``REFUSED`` instead of a magnitude: a row is out of range or an error not finite, and nothing has changed.
        """


class ProportionalPlan(PrioritizedPlan):
    """Draws rows in proportion to their weights in a sum tree."""

    def __init__(self, storage: PackedStorage, sampler: ProportionalSampler, size: int, gathers: bool = True) -> None:
        super().__init__(storage, sampler, size, gathers)
        self.step, self.tree = step_of(size, True), sampler.table.addresses
        self.fixed = self.tree, self.gather.rows, self.gather.row_bytes, self.lanes, self.gather.leaves
        self.scratch = self.flat.data_ptr(), self.uniform.data_ptr(), size

    def holds(self) -> bool:
        """See :meth:`Plan.holds`; loading and sharing replace the tree's memory, and alpha its weights."""
        return (
            self.storage.rows is self.rows
            and self.sampler._rng is self.generator
            and self.sampler.table.addresses is self.tree
            and self.settings[ALPHA] == self.settings[WEIGHED]
        )

    def draw(self, written: int, tensors: list[Tensor]) -> bool:
        sampler = self.sampler
        self.uniform.uniform_(generator=self.generator)
        step = self.step if sampler.stratified else 0
        law = step, written, self.settings[BETA], NORMS[sampler.weight_norm], self.clock[NOW]
        return loops().sample_proportional(*self.fixed, self.gather.targets, *self.scratch, *law)

    def assign(self, index: Tensor, error: Tensor, stamp: Tensor, written: int) -> tuple[float, int]:
        where = index.data_ptr(), error.data_ptr(), stamp.data_ptr(), self.flat.data_ptr(), self.size
        law = written, self.settings[WEIGHED], self.sampler.eps, self.clock[NOW], self.clock[LAST]
        return loops().update_proportional(self.tree, *where, *law, self.rows.steps, self.lanes)


class RankPlan(PrioritizedPlan):
    """Draws rows by rank."""

    def __init__(self, storage: PackedStorage, sampler: RankSampler, size: int, gathers: bool = True) -> None:
        super().__init__(storage, sampler, size, gathers)
        order, self.law = cast(ChunkedOrder, sampler.table), sampler.law
        self.step, self.order, self.lock = step_of(size, True), order.addresses, order.lock
        numbers = self.law.head.numpy(), self.law.alpha, self.law.shift
        self.fixed = self.order, self.gather.rows, self.gather.row_bytes, self.lanes, self.gather.leaves, *numbers
        self.scratch = self.flat.data_ptr(), self.uniform.data_ptr(), size

    def holds(self) -> bool:
        """See :meth:`Plan.holds`; loading and sharing replace the order's memory, and alpha the law."""
        return (
            self.storage.rows is self.rows
            and self.sampler._rng is self.generator
            and self.sampler.table.addresses is self.order
            and self.settings[ALPHA] == self.law.alpha
        )

    def draw(self, written: int, tensors: list[Tensor]) -> bool:
        sampler = self.sampler
        self.uniform.uniform_(generator=self.generator)
        step = self.step if sampler.stratified else 0
        with self.lock:
            law = step, written, self.settings[BETA], NORMS[sampler.weight_norm], self.clock[NOW]
            return loops().sample_rank(*self.fixed, self.gather.targets, *self.scratch, *law)

    def assign(self, index: Tensor, error: Tensor, stamp: Tensor, written: int) -> tuple[float, int]:
        where = index.data_ptr(), error.data_ptr(), stamp.data_ptr(), self.flat.data_ptr(), self.size
        with self.lock:
            law = written, self.clock[NOW], self.clock[LAST], self.rows.steps, self.lanes
            return loops().update_rank(self.order, *where, *law)


def _fits(entry: Any, dtype: torch.dtype, numel: int) -> TypeGuard[Tensor]:
    """Whether a kernel can read an entry of a batch by its address."""
    return (
        type(entry) is torch.Tensor
        and entry.dtype is dtype
        and entry.is_cpu
        and entry.numel() == numel
        and entry.is_contiguous()
    )


PLANS: dict[type, type[Plan]] = {
    UniformSampler: UniformPlan,
    ProportionalSampler: ProportionalPlan,
    RankSampler: RankPlan,
}


def is_plain(storage: Any) -> bool:
    """Whether kernels can read and write the rows of a storage by their address."""
    return (
        type(storage) is PackedStorage
        and type(storage.rows) is PlainRows
        and backend_of(storage.rows.flat) == "numba"
        and not storage.rows.is_mapped
        and storage.ndim <= 2
        and not storage.is_reserved
        and storage.shared_rows is None
    )


def can_plan(storage: Any, sampler: Any) -> bool:
    """Whether there is a plan that draws by ``sampler``, which wraps none, from ``storage``."""
    return (
        type(sampler) in PLANS
        and is_plain(storage)
        and (sampler._rng is None or sampler._rng.device.type == "cpu")
        and not getattr(sampler, "unique", False)
    )
