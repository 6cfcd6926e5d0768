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
from typing import Any, NamedTuple, Protocol, cast
from weakref import ref

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.buffers.parts import Parts
from rlbuf_td.buffers.plan import why_not_compiled
from rlbuf_td.diagnostics.episode_stats import Record
from rlbuf_td.kernels.batch import RING
from rlbuf_td.kernels.dispatch import compiled_form, machine_code, record_of
from rlbuf_td.kernels.host_memory import HostTensors, has_memory
from rlbuf_td.samplers.common import StatefulSampler
from rlbuf_td.samplers.prioritized import BoundEntry
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import SchemaError, torchrl_parts
from rlbuf_td.storages.entries import Entries
from rlbuf_td.storages.listeners import Listeners
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.writes import Beginning, as_lanes

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
        reason = why_not_compiled(storage)
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
        keeps_priorities = self.entry is not None and self.entry.sampler.priorities.file is not None
        #: Whether Python goes on with a write, because listeners have no compiled form.
        self.goes_on = self.has_others or any(self.notes_writes.values()) or self.record is not None or keeps_priorities
        self.ring = record_of(RING, **fields, goes_on=int(self.goes_on))
        self.shared = self.storage.shared_rows
        self.lock = Lock() if self.entry is None else self.entry.lock
        self.address = self.ring.ctypes.data
        if isinstance(self.rows, DedupRows):
            self.entries, self.write_entries = self.rows.entries, machine_code(entries_cpu.write_entries)
            self.head = np.zeros((2, self.rows.lanes.numel()), np.int64)
            self.entries_at = self.entries.address, self.head.ctypes.data
            self.kernel, self.publish = machine_code(kernels.store_rows), machine_code(kernels.publish)
            self.enter = None if self.entry is None else machine_code(self.entry.loops.enter)
        else:
            self.kernel = machine_code(kernels.write if self.entry is None else self.entry.loops.write)
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
            if isinstance(lanes, Beginning):
                self.storage.begin_episode(lanes)
            call = _Write(len(index), lane_ids.data_ptr(), False, index.data_ptr(), len(index))
            return cast("Tensor | None", self._write(call, index, False, False))

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
        if self.entries is None and not self.goes_on:
            with self.lock:
                cursor = self.kernel(self.address, *call[:3], self.cells.data_ptr(), call.index_at)
            return None if cursor == _REFUSED else cursor if index is None else index
        ring = self.storage.ring
        try:
            with self.lock:  # not while listeners are told: they may look up ranks, which needs this lock
                cursor = self._store(call)
            if cursor == _REFUSED:
                return None
            found = cursor if index is None else index
            self._go_on(call, cursor, found, single, counts)
            ring.finish()
        except BaseException:
            if ring.dirty:
                self.storage.recover()
            raise
        return found

    def _store(self, call: _Write) -> int:
        """Write the rows at :attr:`sources`, and their priorities; return what the kernel returns."""
        cells = self.cells.data_ptr()
        if self.entries is None:
            return self.kernel(self.address, *call[:3], cells, call.index_at)
        self.head[:] = self.storage.ring.head[:2]
        cursor = self.kernel(self.address, *call[:3], cells, call.index_at)
        if cursor != _REFUSED:
            self.entries.begin(self.head)
            self.write_entries(self.address, cursor, call.number, call.lanes_first, *self.entries_at)
            self.entries.end()
            self.publish(self.address)
            if self.enter is not None:
                self.enter(self.address, call.number, cursor, cells)
        return cursor

    def _go_on(self, call: _Write, cursor: int, index: Any, single: bool, counts: bool) -> None:
        """Count a write in statistics, keep its priorities, and call the methods of other listeners."""
        if counts and self.record is not None:
            lanes = self.rows.lanes.numel()
            strides = (1, call.number) if call.lanes_first and not single else (lanes, 1)
            self.record(self.sources, (call.number, lanes), strides)  # before others, which may write: new `sources`
        if self.entry is not None and cursor == _IN_CELLS:
            self.entry.sampler.priorities.keep(self.cells[: self._cell_count(call)], self.storage)
        elif self.entry is not None:
            self.entry.sampler.priorities.keep_steps(cursor, call.number, self.storage)
        if self.has_others and cursor == _IN_CELLS:
            self.writer.announce_rows(index, self.others)
        elif self.has_others:
            steps, kept = self.rows.steps, min(call.number, self.rows.steps)
            self.writer.announce((cursor + call.number - kept) % steps, kept, steps, index, self.others)
        how = "add" if single else "extend"
        if self.notes_writes[how]:
            getattr(self.sampler, how)(index)

    def _cell_count(self, call: _Write) -> int:
        """Return the number of rows that the kernel has written to single lanes, or to lanes that stand apart."""
        return call.rows if call.lane_ids else min(call.number, self.rows.steps) * self.rows.lanes.numel()

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
        return found


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if type(leaf) is Tensor and leaf.is_cpu and has_memory(leaf) else leaf


def has_own(sampler: Sampler, method: str, *empty: Any) -> bool:
    """Whether a sampler, or a sampler that it wraps, has a method other than the ``empty`` ones, which do nothing."""
    passed_on = getattr(SamplerWrapper, method), *empty
    while isinstance(sampler, SamplerWrapper) and getattr(type(sampler), method) in passed_on:
        sampler = sampler.sampler
    return getattr(type(sampler), method) not in empty
