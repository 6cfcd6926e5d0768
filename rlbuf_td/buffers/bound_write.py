"""Bound writes: the compiled form of ``add`` and ``extend``.

One compiled call checks a write, copies the data to the rows of the ring, advances all counters, and tells the
listeners that have a compiled form: the priorities of new rows, and the bitmap of trajectories. The methods of other
listeners are called afterwards. Both forms have the same result. :meth:`BoundWrite.write` returns None if the buffer
has changed, or if the data is not a TensorDict of plain tensors that fit the rows. The buffer then calls its writer,
which raises an error if the data is wrong.
"""

from __future__ import annotations

from ctypes import addressof
from struct import Struct
from threading import Lock
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.buffers.parts import Parts
from rlbuf_td.diagnostics.episode_stats import Record
from rlbuf_td.kernels.batch import RING, parallel_loops
from rlbuf_td.kernels.dispatch import compiled_form, machine_code, record_of
from rlbuf_td.kernels.host_memory import HostTensors, has_memory
from rlbuf_td.kernels.threads import LARGE
from rlbuf_td.samplers.bound import unreadable
from rlbuf_td.samplers.common import StatefulSampler
from rlbuf_td.samplers.prioritized import BoundEntry
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import SchemaError, torchrl_parts
from rlbuf_td.storages.entries import Entries
from rlbuf_td.storages.interrupts import held_back
from rlbuf_td.storages.lane_heads import APART, as_lanes
from rlbuf_td.storages.listeners import Listeners
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

_MOST_SIZES = 8  # batch sizes whose checks are kept


class WrittenBuffer(Protocol):
    """What bound writes need of a :class:`~rlbuf_td.ReplayBuffer`."""

    bound_write: Any
    episode_stats: Any
    priority_key: Any
    dim_extend: int


class BoundWrite:
    """Writes rows in host memory with one compiled call."""

    entries: Entries | None = None  # the deduplicated observations

    @classmethod
    def of(cls, buffer: WrittenBuffer, parts: Parts) -> BoundWrite | str:
        """Return bound writes to a buffer with allocated rows, or, in one line, why there are none."""
        storage: Any = parts.storage
        counters = [compiled_form(part, "bind_write") for part in (parts.writer, storage)]
        reason = unreadable(storage)
        if reason or None in counters:
            return reason or f"{type(parts.writer if counters[0] is None else storage).__name__} has no compiled write"
        if parts.writer.counts_generations:
            return "the writer counts generations"
        rows = storage.rows
        if rows.dedup is not None and rows.is_mapped:
            return "deduplicated rows are in a file, whose space is reserved before each write"
        if parts.prioritized is not None and rows.view().get(buffer.priority_key, None) is not None:
            return f"the rows hold the TD errors {buffer.priority_key!r}"
        if buffer.dim_extend > len(storage.lanes):
            return f"dim_extend={buffer.dim_extend} is no dim of the rows"
        if any(leaf.dtype.is_complex for leaf in storage.layout.leaves):  # complex tensors may be conjugate views
            return "rows hold complex numbers"
        return cls(buffer, parts, {name: number for each in counters if each for name, number in each().items()})

    def __init__(self, buffer: WrittenBuffer, parts: Parts, fields: dict[str, int]) -> None:
        from rlbuf_td.kernels.batch import cpu as kernels
        from rlbuf_td.kernels.batch import entries_cpu, lanes_cpu

        self.buffer = ref(buffer)  # which owns this object
        self.storage, self.writer, self.sampler = parts.storage, parts.writer, parts.sampler
        self.time_dim, self.priority_key, self.transforms = buffer.dim_extend, buffer.priority_key, parts.transforms
        self.rows, self.place = self.storage.rows, self.storage.rows.flat.data_ptr()
        self.counters = parts.writer.numbers.values  # replaced when the buffer is shared
        bind_entry = None if parts.prioritized is None else compiled_form(parts.prioritized, "bind_entry")
        self.entry: BoundEntry | None = None if bind_entry is None else bind_entry()
        self.listeners = torchrl_parts.listeners_of(self.storage)
        self.listening, self.boundaries = self.listeners.changes, self._find_boundaries()
        self.others = Listeners(each for each in self.listeners if self._is_told_later(each, buffer))
        self.has_others = len(self.others) > 0
        nothing = StatefulSampler.add, Sampler.add, Sampler.extend
        self.notes_writes = {how: has_own(parts.sampler, how, *nothing) for how in ("add", "extend")}
        self.stats = buffer.episode_stats
        bind_record = None if self.stats is None else compiled_form(self.stats, "bind_record")
        self.record: Record | None = None if bind_record is None else bind_record(self.rows.layout)
        self.expected: dict[torch.Size, HostTensors] = {}  # recognizes the leaves, by batch size
        self.sources = np.empty(len(self.rows.extents), np.int64)
        self.set_sources = Struct(f"{len(self.sources)}q").pack_into
        fields |= self._rows_and_listeners()
        self.ring = record_of(RING, **fields)
        self.times, self.heads = self.storage.clock.times, self.storage.heads.memory
        loop, self.lanes_loop = kernels.write_ring, lanes_cpu.write_lanes
        self.shared = self.storage.shared_rows
        if self.entry is not None and self.shared is None:
            loop, self.lanes_loop = self.entry.loops.write, self.entry.loops.append
        self.lock = Lock() if self.entry is None else self.entry.lock
        self.address, self.kernel = self.ring.ctypes.data, machine_code(loop)
        if isinstance(self.rows, DedupRows):
            self.entries, self.write_entries = self.rows.entries, machine_code(entries_cpu.write_entries)
            self.head = np.zeros((2, self.rows.lanes.numel()), np.int64)
            self.entries_at = self.entries.address, self.head.ctypes.data
        if self.shared is not None:
            self._bind_shared()
        self.append_rows: Any = None  # the machine code of `lanes_loop`, from the first write to single lanes on
        self.cells = torch.empty(0, dtype=torch.int64, device="cpu")  # scratch of this machine code

    def _find_boundaries(self) -> Any:
        """Return the first trajectory index that compiled code can update, and what it needs for this; or None."""
        for each in self.listeners:
            marks = each.marks() if isinstance(each, TrajectoryIndex) else None
            if marks is not None:
                return each, *marks, marks[0].bitmap
        return None

    def _is_told_later(self, listener: Any, buffer: WrittenBuffer) -> bool:
        if listener is buffer:
            return self.entry is None and has_own(self.sampler, "mark_update", Sampler.mark_update)
        return self.boundaries is None or listener is not self.boundaries[0]

    def _rows_and_listeners(self) -> dict[str, Any]:
        rows, lanes = self.rows, self.rows.lanes.numel()
        found: dict[str, Any] = {
            "rows": rows.flat.data_ptr(),
            "row_bytes": rows.flat.stride(0) * rows.flat.element_size(),
        }
        found |= {"steps": rows.steps, "lanes": lanes if rows.lanes else 0, "leaves": len(rows.extents)}
        found |= {"extents": rows.extents.ctypes.data, "sources": self.sources.ctypes.data}
        if self.entry is not None:
            found |= self.entry.fields
        if self.boundaries is not None:
            _, _, marks, seen, _ = self.boundaries
            found |= {"boundaries": marks.ctypes.data, "seen": addressof(seen)}
        if self.storage.shared_rows is not None:
            found |= self.storage.shared_rows.journal.addresses
        return found

    def holds(self) -> bool:
        """Whether the buffer is unchanged, and its rows are in their old place."""
        buffer = self.buffer()
        return (
            buffer is not None
            and buffer.bound_write is self  # under the lock: another thread may have replaced a part
            and self.storage.rows is self.rows
            and self.rows.flat.data_ptr() == self.place
            and self.storage.shared_rows is self.shared  # sharing replaces the storage's counters
            and self.listeners.changes == self.listening
            and buffer.priority_key == self.priority_key
            and buffer.episode_stats is self.stats
            and not self.writer.counts_generations
            and self.writer.numbers.values is self.counters
            and self.storage.clock.times is self.times
            and self.storage.heads.memory is self.heads
            and (self.entry is None or self.entry.holds())
            and (self.boundaries is None or self.boundaries[1].bitmap is self.boundaries[-1])
        )

    def write(self, data: Any, single: bool, transformed: bool = False, counts: bool = False) -> int | Tensor | None:
        """Write one time step (``single``) or several; return their index, or None if the stages cannot be used.

        ``counts``: whether the write is counted in the buffer's statistics, too.
        """
        if type(data) is not TensorDict or (torchrl_parts.modules_of(self.transforms) and not transformed):
            return None
        lanes, dim = self.rows.lanes, self.time_dim
        lead = lanes if single else data.batch_size[: 1 + len(lanes)]
        count = 1 if single else lead[dim] if len(lead) > dim else 0
        if not count or lead.numel() != count * lanes.numel():
            return None
        if counts and not self._can_count(data.ndim - len(lead)):
            return None
        if self.storage.numbers.values[APART]:
            return self._append_steps(data, count, single, transformed)
        index = None
        if lanes or not single:
            shape = (count * lanes.numel(), 2) if lanes else (count,)
            index = torch.empty(shape, dtype=torch.int64, device="cpu")
        where = 0 if index is None else index.data_ptr()
        with self.storage.lock:
            leaves = self._collect(data, lead) if self.holds() else None  # kept alive for the kernel
            if leaves is None:
                return None
            if self.entry is not None and self.entry.value is not None:
                self.entry.value[0] = self.entry.sampler.priorities.entry
            if counts or self.has_others or self.notes_writes["add" if single else "extend"]:
                return self._write_and_tell(count, where, index, single, counts)
            with self.lock:
                cursor = (self._copy if self.shared is None else self._write_shared)(count, where)
        return None if cursor < 0 else cursor if index is None else index

    def _copy(self, count: int, index: int) -> int:
        """Write the rows at :attr:`sources`, and, unless they are shared, their priorities; return the step, or -1."""
        lanes_first = self.time_dim == 1
        if self.entries is None:
            return self.kernel(self.address, count, lanes_first, index)
        head, keeps = self.storage.heads.serials(self.storage, self.head), self.rows.keeps_replaced
        with held_back:  # an interrupt between the two calls would leave rows with the observations of other rows
            cursor = self.kernel(self.address, count, lanes_first, index)
            if cursor >= 0:
                self.entries.begin(head)
                self.write_entries(self.address, cursor, count, lanes_first, *self.entries_at, keeps)
                self.entries.end()
        return cursor

    def _can_count(self, inner_dims: int) -> bool:
        return self.record is not None and not inner_dims and not self.storage.numbers.values[APART]

    def _append_steps(self, data: TensorDict, count: int, single: bool, transformed: bool) -> Tensor | None:
        """Write whole time steps to lanes that stand apart."""
        try:
            rows = data if single else (data.transpose(self.time_dim, 0) if self.time_dim else data).flatten(0, 1)
        except RuntimeError:  # sparse and nested tensors
            return None
        return self.append(torch.arange(self.rows.lanes.numel(), device="cpu").repeat(count), rows, transformed)

    def append(self, lanes: Any, data: Any, transformed: bool = False) -> Tensor | None:
        """Write rows to single lanes; return their index, ``[n, 2]``, or None if the stages cannot be used."""
        is_plain = type(data) is TensorDict and (transformed or not torchrl_parts.modules_of(self.transforms))
        if not is_plain or self.heads is None or isinstance(self.rows, DedupRows) or data.ndim < 1 or not len(data):
            return None
        lead = data.batch_size[:1]
        lane_ids = self._lane_ids(lanes, data)
        if lane_ids is None:
            return None
        index = torch.empty((*lead, 2), dtype=torch.int64, device="cpu")
        with self.storage.lock:
            leaves = self._collect(data, lead) if self.holds() else None  # kept alive for the kernel
            if leaves is None:
                return None
            if self.entry is not None and self.entry.value is not None:
                self.entry.value[0] = self.entry.sampler.priorities.entry
            if len(self.cells) < len(index):
                self.cells = torch.empty(len(index), dtype=torch.int64, device="cpu")
            tells = self._append_and_tell if self.has_others or self.notes_writes["extend"] else self._append
            return index if tells(lane_ids, index) else None

    def _lane_ids(self, lanes: Any, data: TensorDict) -> Tensor | None:
        """Return one lane per row, ``[n]`` int64; None if they are wrong, so that the writer raises the error.

        Compiled code checks their range.
        """
        if type(lanes) is int:
            return torch.full(data.batch_size[:1], lanes, device="cpu")
        is_like = type(lanes) is Tensor and lanes.dtype is torch.int64 and lanes.shape == data.batch_size[:1]
        if is_like and lanes.is_cpu and lanes.is_contiguous() and has_memory(lanes):
            return lanes.clone()  # nobody can change them after their range has been checked
        try:
            return torch.from_numpy(as_lanes(self.storage, lanes, data))
        except (TypeError, ValueError, IndexError):
            return None

    def _bind_shared(self) -> None:
        from rlbuf_td.kernels.batch import journal_cpu

        self.lane_count = self.rows.lanes.numel()
        self.save_ring = machine_code(journal_cpu.save_ring)
        self.save_lanes = machine_code(journal_cpu.save_lanes)
        if self.entry is not None:
            self.enter = machine_code(self.entry.loops.enter)
            self.enter_lanes = machine_code(self.entry.loops.enter_lanes)

    @held_back
    def _write_shared(self, count: int, index: int) -> int:
        """Write rows in steps between which a process may be killed: the next process undoes or completes the write."""
        self.shared.journal.fit(count * self.lane_count)
        if not self.save_ring(self.address, count):
            return -1
        self.shared.journal.saved()
        cursor = self._copy(count, index)
        self.shared.journal.written()
        self.enter_rows(cursor, count)
        return cursor

    def enter_rows(self, cursor: int, count: int) -> None:
        """Set the priorities of the rows that :meth:`_write_shared` has written."""
        if self.entry is not None:
            self.enter(self.address, cursor, count)
            self.entry.sampler.priorities.keep_steps(cursor, count, self.storage)

    @held_back
    def _append_shared(self, lane_ids: Tensor, index: Tensor) -> bool:
        self.shared.journal.fit(len(index))
        if not self.save_lanes(self.address, len(index), lane_ids.data_ptr()):
            return False
        self.shared.journal.saved()
        self.append_rows(self.address, len(index), lane_ids.data_ptr(), self.cells.data_ptr(), index.data_ptr())
        self.shared.journal.written()
        self.enter_rows_of_lanes(len(index))
        return True

    def enter_rows_of_lanes(self, count: int) -> None:
        """Set the priorities of the rows that :meth:`_append_shared` has written."""
        if self.entry is not None:
            self.enter_lanes(self.address, count, self.cells.data_ptr())
            self.entry.sampler.priorities.keep(self.cells[:count], self.storage)

    def _append(self, lane_ids: Tensor, index: Tensor) -> bool:
        self.append_rows = self.append_rows or machine_code(self.lanes_loop)
        if self.shared is not None:
            with self.lock:
                return self._append_shared(lane_ids, index)
        lane_ids_at, cells_at, index_at = lane_ids.data_ptr(), self.cells.data_ptr(), index.data_ptr()
        with self.lock:
            return self.append_rows(self.address, len(index), lane_ids_at, cells_at, index_at)

    @held_back
    def _append_and_tell(self, lane_ids: Tensor, index: Tensor) -> bool:
        if not self._append(lane_ids, index):
            return False
        self.writer.announce_rows(self.cells[: len(index)].clone(), index, self.others)
        if self.notes_writes["extend"]:
            self.sampler.extend(index)
        return True

    @held_back
    def _write_and_tell(
        self, count: int, where: int, index: Tensor | None, single: bool, counts: bool
    ) -> int | Tensor | None:
        """Write rows, count them, and call the methods of listeners that have no compiled form."""
        steps, kept = self.rows.steps, min(count, self.rows.steps)
        with self.lock:  # not while listeners are told: they may look up ranks, which needs this lock
            cursor = (self._copy if self.shared is None else self._write_shared)(count, where)
        if cursor < 0:
            return None
        found = cursor if index is None else index
        if counts and self.record is not None:
            lanes = self.rows.lanes.numel()
            strides = (1, count) if self.time_dim == 1 and not single else (lanes, 1)
            self.record(self.sources, (count, lanes), strides)  # before others, which may write: new `sources`
        if self.has_others:
            self.writer.announce((cursor + count - kept) % steps, kept, steps, found, self.others)
        how = "add" if single else "extend"
        if self.notes_writes[how]:
            getattr(self.sampler, how)(found)
        return found

    def _collect(self, data: TensorDict, lead: torch.Size) -> list[Tensor] | None:
        """Store the addresses of the data's tensors for the kernel; return the tensors, or None if they do not fit."""
        expected = self.expected.get(lead) or self._expect(lead)
        try:
            leaves, unknown = self.rows.layout.find(data)
            if unknown:
                return None
            places = expected.addresses(leaves)
            if places is None:
                leaves = [*map(_contiguous, leaves)]
                places = expected.addresses(leaves)
        except (SchemaError, RuntimeError):  # sparse, nested and MKL-DNN tensors have no strides
            return None
        if places is None:
            return None
        self.set_sources(self.sources.data, 0, *places)
        return leaves

    def _expect(self, lead: torch.Size) -> HostTensors:
        """Store the dtypes and shapes that data with batch size ``lead`` must have."""
        if len(self.expected) == _MOST_SIZES:
            self.expected.clear()
        found = HostTensors([(leaf.dtype, lead + leaf.shape) for leaf in self.rows.layout.leaves])
        self.expected[lead] = found
        if lead.numel() * int(self.ring["row_bytes"][0]) >= LARGE:
            self.ring["loops"] = parallel_loops().ctypes.data
        return found


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if type(leaf) is Tensor and leaf.is_cpu and has_memory(leaf) else leaf


def has_own(sampler: Sampler, method: str, *empty: Any) -> bool:
    """Whether a sampler, or a sampler that it wraps, has a method other than the ``empty`` ones, which do nothing."""
    passed_on = getattr(SamplerWrapper, method), *empty
    while isinstance(sampler, SamplerWrapper) and getattr(type(sampler), method) in passed_on:
        sampler = sampler.sampler
    return getattr(type(sampler), method) not in empty
