"""Bound writes: the compiled form of ``add`` and ``extend``.

One compiled call checks a write, copies the data to the rows of the ring, advances all counters, and tells the
listeners that have a compiled form: the priorities of new rows, and the numbers of episodes. The methods of other
listeners are called afterwards. Both forms have the same result. :meth:`BoundWrite.write` returns None if the buffer
has changed, or if the data is not a TensorDict of plain tensors that fit the rows. The buffer then calls its writer,
which raises an error if the data is wrong.
"""

from __future__ import annotations

from struct import Struct
from threading import Lock
from typing import Any, NamedTuple, Protocol
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
from rlbuf_td.storages.listeners import Listeners
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.writes import as_lanes

_MOST_SIZES = 8  # batch sizes whose checks are kept
_IN_CELLS, _REFUSED = -1, -2  # what :func:`rlbuf_td.kernels.batch.cpu.write` returns instead of a slot


class _Write(NamedTuple):
    """The arguments of a compiled write."""

    number: int  # of rows for single lanes, or of time steps
    lane_ids: int
    lanes_first: bool
    index_at: int
    rows: int  # their number


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
        if storage.episodes is not None and not storage.episodes.address:
            return "episodes are noted with torch"
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
        from rlbuf_td.kernels.batch import entries_cpu

        self.buffer = ref(buffer)  # which owns this object
        self.storage, self.writer, self.sampler = parts.storage, parts.writer, parts.sampler
        self.time_dim, self.priority_key, self.transforms = buffer.dim_extend, buffer.priority_key, parts.transforms
        self.rows, self.place = self.storage.rows, self.storage.rows.flat.data_ptr()
        self.counters = parts.writer.numbers.values  # replaced when the buffer is shared
        bind_entry = None if parts.prioritized is None else compiled_form(parts.prioritized, "bind_entry")
        self.entry: BoundEntry | None = None if bind_entry is None else bind_entry()
        self.listeners = torchrl_parts.listeners_of(self.storage)
        self.listening, self.episodes = self.listeners.changes, self.storage.episodes
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
        self.shared = self.storage.shared_rows
        loop = kernels.write if self.entry is None or self.shared is not None else self.entry.loops.write
        self.lock = Lock() if self.entry is None else self.entry.lock
        self.address, self.kernel = self.ring.ctypes.data, machine_code(loop)
        if isinstance(self.rows, DedupRows):
            self.entries, self.write_entries = self.rows.entries, machine_code(entries_cpu.write_entries)
            self.head = np.zeros((2, self.rows.lanes.numel()), np.int64)
            self.entries_at = self.entries.address, self.head.ctypes.data
        if self.shared is not None:
            self._bind_shared()
        self.cells = torch.empty(0, dtype=torch.int64, device="cpu")  # where the kernel writes rows of single lanes

    def _is_told_later(self, listener: Any, buffer: WrittenBuffer) -> bool:
        if listener is buffer:
            return self.entry is None and has_own(self.sampler, "mark_update", Sampler.mark_update)
        return True

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
        if self.episodes is not None:
            found["episodes"] = self.episodes.locate_rows()
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
            and (self.entry is None or self.entry.holds())
            and self.storage.episodes is self.episodes
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
        rows, index = count * max(lanes.numel(), 1), None
        if lanes or not single:
            index = torch.empty((rows, 2) if lanes else (count,), dtype=torch.int64, device="cpu")
        where = 0 if index is None else index.data_ptr()
        with self.storage.lock:
            leaves = self._collect(data, lead) if self.holds() else None  # kept alive for the kernel
            if leaves is None:
                return None
            return self._write(_Write(count, 0, dim == 1, where, rows), index, single, counts)

    def _can_count(self, inner_dims: int) -> bool:
        return self.record is not None and not inner_dims and self.storage.ring.together

    def append(self, lanes: Any, data: Any, transformed: bool = False) -> Tensor | None:
        """Write rows to single lanes; return their index, ``[n, 2]``, or None if the stages cannot be used."""
        is_plain = type(data) is TensorDict and (transformed or not torchrl_parts.modules_of(self.transforms))
        if not is_plain or not self.rows.lanes or data.ndim < 1 or not len(data):
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
            call = _Write(len(index), lane_ids.data_ptr(), False, index.data_ptr(), len(index))
            return self._write(call, index, False, False)

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

    def _write(self, call: _Write, index: Tensor | None, single: bool, counts: bool) -> int | Tensor | None:
        if self.entry is not None and self.entry.value is not None:
            self.entry.value[0] = self.entry.sampler.priorities.entry
        if call.lane_ids or not self.storage.ring.together:
            if self.entries is not None:  # single lanes of deduplicated rows are written with torch
                return None
            if len(self.cells) < call.rows:
                self.cells = torch.empty(call.rows, dtype=torch.int64, device="cpu")
        if not (counts or self.has_others or self.notes_writes["add" if single else "extend"]):
            with self.lock:
                cursor = self._copy(call) if self.shared is None else self._write_shared(call)
            return None if cursor == _REFUSED else cursor if index is None else index
        return self._write_and_tell(call, index, single, counts)

    def _copy(self, call: _Write) -> int:
        """Write the rows at :attr:`sources`, and their priorities; return what the kernel returns."""
        cells = self.cells.data_ptr()
        if self.entries is None:
            return self.kernel(self.address, *call[:3], cells, call.index_at)
        self.head[:], keeps = self.storage.ring.head[:2], self.rows.keeps_replaced
        with held_back:  # an interrupt between the two calls would leave rows with the observations of other rows
            cursor = self.kernel(self.address, *call[:3], cells, call.index_at)
            if cursor != _REFUSED:
                self.entries.begin(self.head)
                self.write_entries(self.address, cursor, call.number, call.lanes_first, *self.entries_at, keeps)
                self.entries.end()
        return cursor

    @held_back
    def _write_and_tell(self, call: _Write, index: Tensor | None, single: bool, counts: bool) -> int | Tensor | None:
        """Write rows, count them, and call the methods of listeners that have no compiled form."""
        with self.lock:  # not while listeners are told: they may look up ranks, which needs this lock
            cursor = self._copy(call) if self.shared is None else self._write_shared(call)
        if cursor == _REFUSED:
            return None
        found = cursor if index is None else index
        if counts and self.record is not None:
            lanes = self.rows.lanes.numel()
            strides = (1, call.number) if call.lanes_first and not single else (lanes, 1)
            self.record(self.sources, (call.number, lanes), strides)  # before others, which may write: new `sources`
        if self.has_others and cursor == _IN_CELLS:
            self.writer.announce_rows(self.cells[: self._cell_count(call)].clone(), index, self.others)
        elif self.has_others:
            steps, kept = self.rows.steps, min(call.number, self.rows.steps)
            self.writer.announce((cursor + call.number - kept) % steps, kept, steps, found, self.others)
        how = "add" if single else "extend"
        if self.notes_writes[how]:
            getattr(self.sampler, how)(found)
        return found

    def _cell_count(self, call: _Write) -> int:
        """Return the number of rows that the kernel has written to single lanes, or to lanes that stand apart."""
        return call.rows if call.lane_ids else min(call.number, self.rows.steps) * self.rows.lanes.numel()

    def _bind_shared(self) -> None:
        from rlbuf_td.kernels.batch import journal_cpu

        self.save = machine_code(journal_cpu.save)
        if self.entry is not None:
            self.enter = machine_code(self.entry.loops.enter)

    @held_back
    def _write_shared(self, call: _Write) -> int:
        """Write rows in steps between which a process may be killed: the next process undoes or completes the write."""
        self.shared.journal.fit(call.rows)
        if not self.save(self.address, call.number, call.lane_ids):
            return _REFUSED
        self.shared.journal.saved()
        cursor = self._copy(call)
        self.shared.journal.written()
        self.enter_rows(call, cursor)
        return cursor

    def enter_rows(self, call: _Write, cursor: int) -> None:
        """Set the priorities of the rows that :meth:`_write_shared` has written."""
        if self.entry is None:
            return
        priorities, count = self.entry.sampler.priorities, call.number
        if cursor == _IN_CELLS:
            count = self._cell_count(call)
            self.enter(self.address, count, cursor, self.cells.data_ptr())
            priorities.keep(self.cells[:count], self.storage)
        else:
            self.enter(self.address, count, cursor, self.cells.data_ptr())
            priorities.keep_steps(cursor, count, self.storage)

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
