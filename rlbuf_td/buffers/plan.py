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
from rlbuf_td.samplers.common import reported_by, rows_drawn
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.reading import WEIGHT, BatchSlots, Reading
from rlbuf_td.samplers.wrapper import SamplerWrapper, draw_from, reading_of
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import Info, coordinates, merge_, refuse_unwritten
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.tensordict_fast import set_entries_

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import Sampler

# a batch, and the sampler's report, which it contains
Drawn: TypeAlias = tuple[Any, Info]
_MOST_SIZES = 8  # numbers of drawn rows for which a plan keeps memory


class Plan(ABC):
    """Makes batches of one storage with one sampler; ``reason``: why compiled code does
    not, "" if it does."""

    is_busy = False  # a reward_fn that samples the buffer must not use the same memory
    # whether `sample` returns its batches as they are, while there are no transforms
    is_final = False
    transforms: Collection[Any] = ()  # the buffer's own

    def __init__(self, storage: PackedStorage, sampler: Any, reason: str) -> None:
        self.storage, self.sampler, self.reason = storage, sampler, reason
        self.rows, self.ring, self.mode = storage.rows, storage.ring, in_dispatch_mode()
        self.serials = self.ring.address
        self.wrapper = sampler if isinstance(sampler, SamplerWrapper) else None
        self.innermost = sampler if self.wrapper is None else self.wrapper.innermost
        self.is_stamped, self.report_keys = (
            isinstance(self.innermost, Prioritized),
            reported_by(sampler),
        )

    def holds(self) -> bool:
        """Whether the plan is not in use, and rows and serials are those with which it
        was made.

        Rows do not move: users get aliases of their memory.
        """
        ring = self.ring
        return (
            not self.is_busy
            and self.storage.rows is self.rows
            and self.storage._ring is ring
            and ring.address == self.serials
            and in_dispatch_mode() == self.mode
        )

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
        is_launched = self.wrapper is None and is_on_gpu(storage)
        self.draw_stamped = (
            compiled_form(sampler, "draw_stamped") if is_launched else None
        )
        self.keeps_rows = not _draws_itself(self.innermost)

    def sample(self, size: int) -> Drawn:
        """See :class:`Plan`."""
        storage, ring, sampler = self.storage, self.ring, self.sampler
        if self.wrapper is not None:
            written = ring.written.copy()
            flat, info, batch = self.wrapper.draw_batch(storage, size)
            info |= {
                name: batch.get(name) for name in self.report_keys & {*batch.keys()}
            }
            # a reward_fn may have written to the buffer since the rows were read
            if self.is_stamped:
                info[SAMPLED_AT] = ring.serial(flat, written)
        else:
            if self.draw_stamped is None:
                flat, info = draw_from(sampler, storage, size)
            else:
                flat, info = self.draw_stamped(storage, size)
            batch = storage.gather(flat)
            if self.is_stamped and SAMPLED_AT not in info:
                info[SAMPLED_AT] = ring.serial(flat)
        if self.keeps_rows:
            flat = flat.clone()  # a user's sampler may keep its tensor
        info["index"] = coordinates(flat, storage)  # pyrefly: ignore [unsupported-operation]
        merge_(batch, info)
        return batch, info


class _Memory(NamedTuple):
    """The memory for batches of one number of drawn rows."""

    reading: Reading
    slots: BatchSlots
    # for the drawn rows, ``[B]``; None: they are the index of a batch
    rows: Tensor | None
    scratch: Tensor  # for random numbers, ``[B]`` float64
    kernel: Any  # gathers the rows; None: the reading does more


class CompiledPlan(Plan):
    """Lets a reading gather the drawn rows; with lanes, the index in the report is
    ``[B, 2]``, as in the batch.

    A sampler can have a method ``draw_into(storage, live, flat, report, scratch)``, the
    form of ``draw`` for memory on the CPU: it writes the rows to ``flat``, ``[B]``,
    and, if it is prioritized, their weights to the tensor in ``report``; ``live`` is
    :meth:`Ring.numbered`. New tensors would take a fourth of the time of a batch,
    because a learner's step evicts torch's code from the caches.
    """

    def __init__(
        self, storage: PackedStorage, sampler: Sampler, reading: Reading, count: int
    ) -> None:
        super().__init__(storage, sampler, "")
        wrapper = self.wrapper
        self.draw_into = (
            compiled_form(sampler, "draw_into") if wrapper is None else wrapper.fill()
        )
        self.draws = (
            partial(draw_from, sampler) if wrapper is None else wrapper.draw_rows
        )
        #: Whether a batch has its report from the start: nothing is added, and no
        # function of the user sees it before.
        self.is_complete = self.draw_into is not None and (
            wrapper is None or not wrapper.takes_goals
        )
        #: Whether a batch is returned as soon as rows have been drawn to its memory,
        # and gathered.
        self.is_direct = wrapper is None and self.is_complete
        self.count, self.memories = count, {count: self._memory_of(reading, count)}

    def sample(self, size: int) -> Drawn:
        """See :class:`Plan`."""
        live, report = self.ring.numbered(), {}
        if self.draw_into is None:
            drawn, report = rows_drawn(self.sampler, self.draws(self.storage, size))
            # a user's sampler may give every other element of a tensor
            drawn = drawn.cpu().contiguous()
            address_of(drawn)  # raises an error if the rows have no memory
            count = drawn.shape[0]
            memory = self.memories.get(count) or self._make(count)
            slot = memory.slots.take()
            flat = slot.report["index"] if memory.rows is None else memory.rows
            flat.copy_(drawn)  # a user's sampler may keep its tensor, and fill it again
        else:
            memory = self.memories[self.count]
            slot = memory.slots.take()
            flat = slot.report["index"] if memory.rows is None else memory.rows
            self.draw_into(
                self.storage,
                live,
                flat,
                memory.reading.drawn or slot.report,
                memory.scratch,
            )
        cells = live[0]
        if not live[1]:  # some cells are holes
            self.storage.refuse_holes(flat)
            cells = self.ring.longest * self.ring.lanes
        if self.is_direct:
            # the kernel alone, where the reading would only call it
            kernel, address = memory.kernel, memory.reading.address
            is_filled = (
                memory.reading(memory.slots, slot, flat, flat, cells)
                if kernel is None
                else kernel(
                    address, flat.data_ptr(), slot.targets, cells, 0, self.count
                )
            )
            if not is_filled:
                refuse_unwritten(flat, self.storage)
            return slot.batch, slot.report
        self.is_busy = True
        try:
            if not memory.reading(memory.slots, slot, flat, flat, cells):
                refuse_unwritten(flat, self.storage)
        finally:
            self.is_busy = False
        if report:
            window = memory.reading.window
            report = {
                name: value.repeat_interleave(window, 0)
                for name, value in report.items()
            } | slot.report
            merge_(slot.batch, report)
        else:
            report = slot.report
            if not self.is_complete:
                set_entries_(slot.batch, report)
        if self.wrapper is not None and not self.wrapper.has_checked_order:
            self.wrapper.warn_if_interleaved(self.storage)
        return slot.batch, report

    def _make(self, count: int) -> _Memory:
        """Make the memory for another number of rows, which a user's sampler, or the
        end of an epoch, gives."""
        if len(self.memories) == _MOST_SIZES:
            self.memories.clear()
        # the memory outlives a call in inference mode
        with torch.inference_mode(False):
            reading = cast(
                "Reading",
                reading_of(self.sampler, self.storage, count, self.is_stamped),
            )
            self.memories[count] = found = self._memory_of(reading, count)
        return found

    def _memory_of(self, reading: Reading, count: int) -> _Memory:
        is_weighted = (
            self.is_stamped and self.draw_into is not None and not reading.drawn
        )
        named = [*reading.named(), *[WEIGHT] * is_weighted]
        slots = BatchSlots(reading.rows.layout, named, reading.size, self.is_complete)
        rows = (
            torch.zeros(count, dtype=torch.int64, device="cpu")
            if reading.lanes or reading.window > 1
            else None
        )
        scratch = torch.zeros(count, dtype=torch.float64, device="cpu")
        return _Memory(reading, slots, rows, scratch, reading.single_call(count))


def plan_of(
    storage: PackedStorage, sampler: Sampler, size: int
) -> CompiledPlan | TorchPlan:
    """Return the plan of a storage and a sampler, with memory for batches of ``size``
    rows."""
    if is_on_gpu(storage):
        return TorchPlan(storage, sampler, why_not_launched(sampler, storage, "works"))
    reason = why_not_compiled(storage) or _why_not_gathered(storage)
    if reason:
        return TorchPlan(storage, sampler, reason)
    count = (
        size if not isinstance(sampler, SamplerWrapper) else sampler.drawn_rows_of(size)
    )
    with torch.inference_mode(False):
        is_stamped = isinstance(getattr(sampler, "innermost", sampler), Prioritized)
        reading = reading_of(sampler, storage, count, is_stamped)
        if isinstance(reading, str):
            return TorchPlan(storage, sampler, reading)
        return CompiledPlan(storage, sampler, reading, count)


def _draws_itself(sampler: Sampler) -> bool:
    """Whether the sampler's ``draw`` is a method of this package, not of a user."""
    draw = getattr(sampler, "draw", None)
    return (
        getattr(draw, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
    )


def is_on_gpu(storage: PackedStorage) -> bool:
    """Whether kernels on a GPU read the rows of a storage."""
    return storage.rows is not None and storage.rows.is_launched


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
    if not len(storage):  # a sampler says so; a reading would look up episodes first
        return "there are no rows"
    if compiled_form(storage, "bind_read") is None:
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
