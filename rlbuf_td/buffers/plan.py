"""The plan of a batch: which code draws rows, gathers them and revises them, chosen once for a storage and a sampler.

:func:`plan_of` returns one of two plans, which give the same batches from the same state of the random generator:

- :class:`CompiledPlan`, for rows in host memory: the sampler's ``draw`` lists rows, and a
  :class:`~rlbuf_td.samplers.reading.Reading` gathers them.
- :class:`TorchPlan`, for all others: the methods of sampler and storage, which specify the results.

A plan is used as long as it holds: while rows and serials are where they were when it was made. The caller holds the
storage's lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, compiled_form
from rlbuf_td.kernels.host_memory import address_of, in_dispatch_mode
from rlbuf_td.samplers.common import refuse_disorder, refuse_taken, reported_by, rows_drawn
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.reading import SCALAR, BatchSlot, BatchSlots, Named, Reading
from rlbuf_td.samplers.wrapper import SamplerWrapper, draw_from
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import coordinates, merge_, refuse_unwritten
from rlbuf_td.storages.ring import SAMPLED_AT

Drawn: TypeAlias = tuple[Any, dict[Any, Any]]  # a batch, and the sampler's report, which it contains
_MOST_SIZES = 8  # numbers of drawn rows for which a plan keeps memory


class Plan(ABC):
    """Makes batches of one storage with one sampler."""

    is_busy = False  # a reward_fn that samples the buffer must not use the same memory

    def __init__(self, storage: PackedStorage, sampler: Any) -> None:
        self.storage, self.sampler = storage, sampler
        self.rows, self.ring, self.mode = storage.rows, storage.ring, in_dispatch_mode()
        self.place = self.rows.flat.data_ptr() if self.rows is not None and self.rows.flat.is_cpu else 0
        self.serials, self.is_in_order = self.ring.address, self.ring.in_order
        self.wrapper = sampler if isinstance(sampler, SamplerWrapper) else None
        innermost = sampler if self.wrapper is None else self.wrapper.innermost
        self.is_stamped, self.report_keys = isinstance(innermost, Prioritized), reported_by(sampler)

    def holds(self) -> bool:
        """Whether the plan is not in use, and rows and serials are where they were when it was made."""
        rows, ring = self.rows, self.ring
        return (
            not self.is_busy
            and self.storage.rows is rows
            and (not self.place or rows.flat.data_ptr() == self.place)  # type: ignore[union-attr]
            and self.storage.ring is ring
            and ring.address == self.serials
            and ring.in_order is self.is_in_order
            and in_dispatch_mode() == self.mode
        )

    @abstractmethod
    def sample(self, size: int) -> Drawn:
        """Return a batch of ``size`` rows, or fewer if the sampler draws fewer."""

    def refuse_unknown(self, info: dict[Any, Any]) -> None:
        """Raise a SchemaError if a user's sampler adds an entry under a name that the rows have."""
        if not info.keys() <= self.report_keys:
            refuse_taken(self.sampler, self.storage.layout.names, info.keys() - self.report_keys)  # type: ignore[union-attr]


class TorchPlan(Plan):
    """Draws, gathers and revises with the methods of sampler and storage; ``reason``: why it is not compiled."""

    def __init__(self, storage: PackedStorage, sampler: Any, reason: str) -> None:
        super().__init__(storage, sampler)
        self.reason = reason

    def sample(self, size: int) -> Drawn:
        """See :class:`Plan`."""
        storage, sampler = self.storage, self.sampler
        if self.wrapper is not None:
            flat, info, batch = self.wrapper.draw_batch(storage, size)
        else:
            refuse_disorder(sampler, storage)
            flat, info = draw_from(sampler, storage, size)
            batch = storage.gather(flat)
        self.refuse_unknown(info)
        if self.is_stamped:
            info[SAMPLED_AT] = storage.ring.stamp(flat)
        info["index"] = coordinates(flat.clone(), storage)  # a user's sampler may keep its tensor
        merge_(batch, info)
        return batch, info


class _Sized(NamedTuple):
    """The memory for one number of drawn rows."""

    reading: Reading
    slots: BatchSlots
    flat: Tensor | None  # for the drawn rows; None: they are the index of a batch
    drawn: dict[str, Tensor]  # for the other entries that the sampler fills; empty: they are those of the batch
    scratch: Tensor  # for random numbers, ``[B]`` float64


class CompiledPlan(Plan):
    """Lets a reading gather the drawn rows; with lanes, the index in the report is ``[B, 2]``, as in the batch.

    A sampler can have a method ``draw_into(storage, flat, report, scratch)``, the form of ``draw`` for memory on the
    CPU: it writes the rows to ``flat``, ``[B]``, and its :attr:`drawn_entries` to the tensors in ``report``. New
    tensors would take a fourth of the time of a batch, because a learner's step evicts torch's code from the caches.
    """

    reason = ""

    def __init__(self, storage: PackedStorage, sampler: Any, reading: Reading, count: int) -> None:
        super().__init__(storage, sampler)
        innermost = sampler if self.wrapper is None else self.wrapper.innermost
        self.fill = compiled_form(sampler, "draw_into") if self.wrapper is None else self.wrapper.fill()
        self.filled = [] if self.fill is None else innermost.drawn_entries
        self.count, self.sized = count, {count: self._sized(reading, count)}
        #: Whether no wrapper changes rows or entries, and this package draws: no more rows than wanted, known entries.
        self.is_plain = type(reading) is Reading and _draws_itself(innermost)
        self.draws = (
            getattr(sampler, "draw", partial(draw_from, sampler)) if self.wrapper is None else self.wrapper.drawn
        )

    def _sized(self, reading: Reading, count: int) -> _Sized:
        named: list[Named] = [(name, (dtype, SCALAR)) for name, dtype in self.filled]
        slots = BatchSlots(reading.rows.layout, [*reading.named(), *named], reading.size)
        flat = torch.zeros(count, dtype=torch.int64, device="cpu") if reading.lanes or reading.window > 1 else None
        names = self.filled if reading.window > 1 else []
        drawn = {name: torch.zeros(count, dtype=dtype, device="cpu") for name, dtype in names}
        return _Sized(reading, slots, flat, drawn, torch.zeros(count, dtype=torch.float64, device="cpu"))

    def draw(self, size: int) -> tuple[Tensor, dict[Any, Any]]:
        """Draw the rows of a batch; return flat rows, ``[B]``, and the entries that the sampler adds."""
        if not self.is_in_order:
            refuse_disorder(self.sampler, self.storage)
        drawn = self.draws(self.storage, size)
        flat, info = rows_drawn(self.sampler, drawn)
        if info and self.wrapper is None:
            self.refuse_unknown(info)
        flat = flat.cpu().contiguous()  # a user's sampler may give every other element of a tensor
        address_of(flat)  # raises an error if the rows have no memory
        return flat, info

    def sample(self, size: int) -> Drawn:
        """See :class:`Plan`."""
        fill = self.fill
        drawn, report = (None, {}) if fill else self.draw(size)
        count = self.count if drawn is None else drawn.shape[0]
        sized = self.sized.get(count) or self._make(count)
        slot = sized.slots.take()
        flat = slot.report["index"] if sized.flat is None else sized.flat
        if drawn is not None:
            flat.copy_(drawn)  # a user's sampler may keep its tensor, and fill it again
        elif fill is not None:
            if not self.is_in_order:
                refuse_disorder(self.sampler, self.storage)
            fill(self.storage, flat, sized.drawn or slot.report, sized.scratch)
        self.read(sized.reading, sized.slots, slot, flat)
        for name, value in sized.drawn.items():
            slot.report[name].view(len(value), -1).copy_(value[:, None])
        if report:
            window = sized.reading.window
            report = {name: value.repeat_interleave(window, 0) for name, value in report.items()}
        report |= slot.report
        merge_(slot.batch, report)
        if self.wrapper is not None and not self.wrapper.has_checked_order:
            self.wrapper.warn_if_interleaved(self.storage)
        return slot.batch, report

    def read(self, reading: Reading, slots: BatchSlots, slot: BatchSlot, flat: Tensor) -> None:
        """Fill a batch; raise an IndexError if a row that was drawn has not been written."""
        live = self.ring.cells_without_holes()
        if live < 0:
            live = self.ring.longest * self.ring.lanes
            self.storage.refuse_holes(flat)
        self.is_busy = True
        try:
            if not reading(slots, slot, flat, flat, live):
                refuse_unwritten(flat, self.storage)
        finally:
            self.is_busy = False

    def _make(self, count: int) -> _Sized:
        if len(self.sized) == _MOST_SIZES:
            self.sized.clear()
        with torch.inference_mode(False):  # the memory outlives a call in inference mode
            found = self._sized(cast("Reading", _reading_of(self.storage, self.sampler, count)), count)
        self.sized[count] = found
        return found


def plan_of(storage: PackedStorage, sampler: Any, size: int) -> CompiledPlan | TorchPlan:
    """Return the plan of a storage and a sampler, with memory for batches of ``size`` rows."""
    reason = unreadable(storage) or _unusable(storage)
    if reason:
        return TorchPlan(storage, sampler, reason)
    count = size if not isinstance(sampler, SamplerWrapper) else sampler.drawn_rows_of(size)
    with torch.inference_mode(False):
        reading = _reading_of(storage, sampler, count)
        if isinstance(reading, str):
            return TorchPlan(storage, sampler, reading)
        return CompiledPlan(storage, sampler, reading, count)


def _draws_itself(sampler: Any) -> bool:
    """Whether the sampler's ``draw`` is a method of this package, not of a user."""
    draw = getattr(sampler, "draw", None)
    return getattr(draw, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


def _reading_of(storage: PackedStorage, sampler: Any, count: int) -> Reading | str:
    """Return the compiled reading of ``count`` drawn rows, or, in one line, why there is none."""
    innermost = getattr(sampler, "innermost", sampler)
    is_stamped = isinstance(innermost, Prioritized)
    if not isinstance(sampler, SamplerWrapper):
        return Reading(storage, count, is_stamped)
    return sampler.reading_of(storage, count, is_stamped)


def _unusable(storage: PackedStorage) -> str:
    if not len(storage):  # a sampler says so; a reading would look up episodes first
        return "there are no rows"
    if compiled_form(storage, "bind_read") is None:
        return f"{type(storage).__name__} has no compiled read"
    dims = storage.all_rows().layout.root.batch_size
    if dims:
        return f"a row has batch dims of its own, {[*dims]}"
    return "a dispatch mode is active" if in_dispatch_mode() else ""


def unreadable(storage: Any) -> str:
    """Say in one line why compiled code cannot read the rows of a storage as host memory; "" if it can."""
    if not isinstance(storage, PackedStorage):
        return f"the storage is a {type(storage).__name__}"
    rows = storage.rows
    if rows is None or storage.is_reserved:
        return "no rows have been written yet"
    if backend_of(rows.flat) != "numba":
        return "numba's compiler is off" if rows.flat.is_cpu else f"the rows are on {rows.flat.device}"
    return f"the rows have ndim={storage.ndim}, above 2" if storage.ndim > 2 else ""
