"""The plan of a batch: which code draws rows, gathers them and revises them, chosen
once for a buffer and a batch size.

- :class:`CompiledPlan`, for rows in host memory: the sampler's ``draw`` lists rows, and
  a :class:`~rlbuf_td.samplers.reading.Reading` gathers them.
- :class:`TorchPlan`, where compiled code cannot do this: the methods of sampler and
  storage, which specify the results. From the same state of the random generator, both
  plans give the same batches.
- :class:`GeneralPlan`, for what only TorchRL's interface knows: samplers that have a
  ``sample`` and no ``draw``, a ``sample_unit``, and a ``collate_fn``.

A plan is used as long as it holds: while rows and serials are those with which it was
made. The caller holds the storage's lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, compiled_form
from rlbuf_td.kernels.host_memory import address_of, in_dispatch_mode
from rlbuf_td.samplers.common import reported_by
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.reading import WEIGHT, BatchSlot, BatchSlots, Reading, Uncompiled
from rlbuf_td.samplers.row_sampler import draw_from
from rlbuf_td.samplers.wrapper import SamplerWrapper, reading_of
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import Info, coordinates, merge_
from rlbuf_td.storages.ring import SAMPLED_AT, LiveRows
from rlbuf_td.storages.tensordict_fast import set_entries_

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import Sampler

# a batch, and the sampler's report, which it contains
Drawn: TypeAlias = tuple[Any, Info]
_MOST_SIZES = 8  # numbers of drawn rows for which a plan keeps memory
_IN_USE = -1  # no epoch of a storage


class Plan(ABC):
    """Makes batches of one storage with one sampler; ``reason``: why compiled code does
    not, "" if it does."""

    # whether `sample` returns its batches as they are, while there are no transforms
    is_final = False
    is_exact = False  # whether no batch has fewer rows than it should have
    transforms: Collection[Any] = ()  # the buffer's own

    def __init__(self, storage: PackedStorage, sampler: Any, reason: str) -> None:
        self.storage, self.sampler, self.reason = storage, sampler, reason
        self.ring = storage.ring
        # the plan holds while these numbers are the same
        self.epoch = storage.epoch
        self.mode = in_dispatch_mode()
        self.wrapper = sampler if isinstance(sampler, SamplerWrapper) else None
        innermost = sampler if self.wrapper is None else self.wrapper.innermost
        self.is_stamped = isinstance(innermost, Prioritized)

    @abstractmethod
    def sample(self, size: int) -> Drawn:
        """Return a batch of ``size`` rows, or fewer if the sampler draws fewer."""


class GeneralPlan(Plan):
    """Draws as TorchRL's buffers do, with ``sampler.sample``, ``unit.expand`` and
    ``collate``.

    If ``merges`` is set, a batch that is a TensorDict contains the report, which may
    replace stored entries.
    """

    def __init__(
        self,
        storage: PackedStorage,
        sampler: Sampler,
        unit: Any,
        collate: Any,
        merges: bool,
    ) -> None:
        super().__init__(storage, sampler, "TorchRL's code draws")
        self.unit, self.collate, self.merges = unit, collate, merges
        # a unit adds rows that were not drawn
        self.is_stamped = self.is_stamped and unit is None

    def sample(self, size: int) -> Drawn:
        """See :class:`Plan`; the batch is what ``collate`` returns."""
        index, info = self.sampler.sample(self.storage, size)
        if self.unit is not None:
            index, info = self.unit.expand(index, info, self.storage)
        report = {**info, "index": index}
        if self.is_stamped:
            report[SAMPLED_AT] = self.storage.stamps(index)
        batch = self.collate(self.storage.get(index))
        # of TorchRL's next release: names the dims of windows
        if hasattr(self.sampler, "_set_sample_names"):
            batch = self.sampler._set_sample_names(batch)
        if self.merges and isinstance(batch, TensorDictBase):
            merge_(batch, report)
        return batch, report


class TorchPlan(Plan):
    """Draws, gathers and revises with the methods of sampler and storage, which launch
    kernels for rows on a GPU.

    There, a sampler can have a method ``draw_stamped``, a form of ``draw`` whose report
    also has the stamps of the rows, if they are known.
    """

    def __init__(self, storage: PackedStorage, sampler: Sampler, reason: str) -> None:
        super().__init__(storage, sampler, reason)
        is_launched = self.wrapper is None and storage.is_launched
        self.draw_stamped = (
            compiled_form(sampler, "draw_stamped", "draw") if is_launched else None
        )
        self.keeps_rows = not _draws_itself(getattr(sampler, "innermost", sampler))

    def sample(self, size: int) -> Drawn:
        """See :class:`Plan`."""
        storage, sampler = self.storage, self.sampler
        written = self.ring.written.copy()
        if self.wrapper is not None:
            flat, info, batch = self.wrapper.draw_batch(storage, size)
            reported = reported_by(sampler) & {*batch.keys()}
            info |= {name: batch.get(name) for name in reported}
        else:
            if self.draw_stamped is None:
                flat, info = draw_from(sampler, storage, size)
            else:
                flat, info = self.draw_stamped(storage, size)
            batch = storage.gather(flat)
        if self.is_stamped and SAMPLED_AT not in info:
            # a reward_fn may have written to the buffer since the rows were read
            info[SAMPLED_AT] = self.ring.serial(flat, written)
        if self.keeps_rows:
            flat = flat.clone()  # a user's sampler may keep its tensor
        info["index"] = coordinates(flat, storage)  # pyrefly: ignore [unsupported-operation]
        merge_(batch, info)
        return batch, info


class _Memory(NamedTuple):
    """The memory for batches of one number of drawn rows."""

    reading: Reading  # gathers the rows
    slots: BatchSlots  # empty batches
    scratch: Tensor  # for random numbers, ``[B]`` float64
    kernel: Any  # gathers the rows; None: the reading does more


class CompiledPlan(Plan):
    """Lets a reading gather the drawn rows; with lanes, the index in the report is
    ``[B, 2]``, as in the batch.

    A sampler can have a method ``draw_into(storage, live, flat, report, scratch)``, the
    form of ``draw`` for memory on the CPU: it writes the rows to ``flat``, ``[B]``,
    and, if it is prioritized, their weights to the tensor in ``report``; ``live``
    tells which rows are live. New tensors would take a fourth of the time of a batch,
    because a learner's step evicts torch's code from the caches.
    """

    def __init__(self, storage: PackedStorage, sampler: Sampler, size: int) -> None:
        super().__init__(storage, sampler, "")
        wrapper = self.wrapper
        if wrapper is None:
            self.count = size
            self.draws = partial(draw_from, sampler)
            self.draw_into = compiled_form(sampler, "draw_into", "draw")
        else:
            self.count = wrapper.drawn_rows_of(size)
            self.draws = wrapper.draw_rows
            self.draw_into = wrapper.find_draw_into()
        self.is_exact = self.draw_into is not None
        #: Whether a batch has its report from the start: nothing is added, and no
        # function of the user sees it before.
        self.is_complete = self.draw_into is not None and (
            wrapper is None or not wrapper.takes_goals
        )
        self.checks_order = wrapper is not None
        self.memories: dict[int, _Memory] = {}
        self._make(self.count)

    def sample(self, size: int) -> Drawn:
        """See :class:`Plan`."""
        live = self.ring.numbered()
        if self.draw_into is None:
            return self._sample_listed(size, live)
        memory = self.memories[self.count]
        ready = memory.slots.ready
        # `take` does the same: a call of it would take as long as the rest of this line
        slot = ready.pop() if ready else memory.slots.take()
        flat = slot.flat
        self.draw_into(self.storage, live, flat, slot.weights, memory.scratch)
        if flat.data_ptr() != slot.flat_at:  # by the method of a user
            raise RuntimeError(
                f"{type(self.sampler).__name__}.draw_into has moved or freed the memory of the rows: fill it in place"
            )
        cells = live.rows if live.are_cells else self._cells_with(flat)
        if memory.kernel is not None:
            # the kernel alone, where the reading would only call it
            is_filled = memory.kernel(
                memory.reading.address,
                slot.flat_at,
                slot.targets,
                cells,
                0,  # the first row to gather
                self.count,  # the row to end before
            )
        elif self.is_complete:
            is_filled = memory.reading(memory.slots, slot, flat, flat, cells)
        else:
            is_filled = self._fill(memory, slot, flat, cells)
        if not is_filled:
            self.storage.refuse_unwritten(flat)
        if self.checks_order:
            self._check_order()
        return slot.batch, slot.report

    def _sample_listed(self, size: int, live: LiveRows) -> Drawn:
        """Make a batch of rows that the sampler returns in tensors of its own."""
        drawn, report = self.draws(self.storage, size)
        # a user's sampler may give every other element of a tensor
        drawn = drawn.cpu().contiguous()
        address_of(drawn)  # raises an error if the rows have no memory
        count = drawn.shape[0]
        memory = self.memories.get(count) or self._make(count)
        slot = memory.slots.take()
        flat = slot.flat
        flat.copy_(drawn)  # a user's sampler may keep its tensor, and fill it again
        cells = live.rows if live.are_cells else self._cells_with(flat)
        if not self._fill(memory, slot, flat, cells):
            self.storage.refuse_unwritten(flat)
        if self.checks_order:
            self._check_order()
        if not report:
            return slot.batch, slot.report
        window = memory.reading.window
        expanded = {
            name: value.repeat_interleave(window, 0) for name, value in report.items()
        }
        report = expanded | slot.report
        merge_(slot.batch, report)
        return slot.batch, report

    def _cells_with(self, flat: Tensor) -> int:
        """Return the number of cells, some of which are holes; raise an error if one of
        the rows ``flat`` is a hole."""
        self.storage.refuse_holes(flat)
        return self.ring.longest * self.ring.lanes

    def _fill(self, memory: _Memory, slot: BatchSlot, flat: Tensor, cells: int) -> bool:
        """Fill a batch that functions of the user see before it has its report; return
        False if a row is none of the ``cells``."""
        # a function that samples the buffer must not use the same memory
        epoch, self.epoch = self.epoch, _IN_USE
        try:
            is_filled = memory.reading(memory.slots, slot, flat, flat, cells)
        finally:
            self.epoch = epoch
        set_entries_(slot.batch, slot.report)
        return is_filled

    def _check_order(self) -> None:
        """Warn, once enough rows tell, if the trajectories of rows are interleaved."""
        wrapper = cast("SamplerWrapper", self.wrapper)
        if not wrapper.has_checked_order:
            wrapper.warn_if_interleaved(self.storage)
        self.checks_order = not wrapper.has_checked_order

    def _make(self, count: int) -> _Memory:
        """Make the memory for a number of drawn rows; a user's sampler, or the end of
        an epoch, gives other numbers than the usual one."""
        if len(self.memories) == _MOST_SIZES:
            self.memories.clear()
        # the memory outlives a call in inference mode
        with torch.inference_mode(False):
            reading = reading_of(self.sampler, self.storage, count, self.is_stamped)
            is_weighted = (
                self.is_stamped
                and self.draw_into is not None
                and reading.anchor_weights is None
            )
            named = reading.named()
            if is_weighted:
                named.append(WEIGHT)
            drawn = None
            # draw straight into the batch, unless a row is drawn for several of its
            # rows
            if reading.lanes or reading.window > 1:
                drawn = torch.zeros(count, dtype=torch.int64, device="cpu")
            slots = BatchSlots(
                reading.rows.layout,
                named,
                reading.size,
                is_complete=self.is_complete,
                drawn=drawn,
                weights=reading.anchor_weights,
            )
            scratch = torch.zeros(count, dtype=torch.float64, device="cpu")
        kernel = reading.single_call(count) if self.wrapper is None else None
        memory = _Memory(reading, slots, scratch, kernel)
        self.memories[count] = memory
        return memory


def plan_of(
    storage: PackedStorage, sampler: Sampler, size: int
) -> CompiledPlan | TorchPlan:
    """Return the plan of a storage and a sampler, with memory for batches of ``size``
    rows."""
    reason = why_not_compiled(storage) or _why_not_gathered(storage)
    if not reason:
        try:
            return CompiledPlan(storage, sampler, size)
        except Uncompiled as cannot:
            reason = str(cannot)
    elif storage.is_launched:
        reason = why_not_launched(sampler, storage, "works")
    return TorchPlan(storage, sampler, reason)


def _draws_itself(sampler: Sampler) -> bool:
    """Whether the sampler's ``draw`` is a method of this package, not of a user."""
    draw = getattr(sampler, "draw", None)
    return (
        getattr(draw, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
    )


def why_not_launched(sampler: object, storage: PackedStorage, what: str) -> str:
    """Say in one line why there are no kernels on a GPU for the work of a sampler; ""
    if there are."""
    launches = getattr(sampler, "launches", None)
    if launches is not None and launches(storage):
        return ""
    return f"a {type(sampler).__name__} {what} with torch on {storage.device}"


def _why_not_gathered(storage: PackedStorage) -> str:
    """Say in one line why the rows of a storage in host memory have no compiled
    reading; "" if they have one."""
    # a sampler says so; a reading would look up episodes first
    if not storage.ring.numbered().rows:
        return "there are no rows"
    for name in ("gather", "get", "written_rows", "all_rows"):
        method = getattr(storage, name)
        if getattr(method, "__func__", None) is getattr(PackedStorage, name):
            continue
        return f"{type(storage).__name__} has no compiled read"
    dims = storage.all_rows().layout.root.batch_size
    if dims:
        return f"a row has batch dims of its own, {[*dims]}"
    return "a dispatch mode is active" if in_dispatch_mode() else ""


def why_not_compiled(storage: PackedStorage) -> str:
    """Say in one line why compiled code cannot read the rows of a storage as host
    memory; "" if it can."""
    rows = storage.rows
    if rows is None or storage.is_reserved:
        return "no rows have been written yet"
    if backend_of(rows.flat) != "numba":
        return (
            "numba's compiler is off"
            if rows.flat.is_cpu
            else f"the rows are on {rows.flat.device}"
        )
    return f"the rows have ndim={storage.ndim}, above 2" if storage.ndim > 2 else ""
