"""Fast writes: ``add`` and ``extend`` as one compiled call each.

A write on the general path (see :mod:`rlbuf_td.buffers`) makes a plan for later writes. Writes with and without a plan
have the same result. :meth:`WritePlan.write` returns None if the buffer has changed, or if the data is not a TensorDict
of plain tensors that fit the rows. The buffer then takes the general path, which raises an error if the data is wrong.
"""

from __future__ import annotations

from ctypes import addressof
from os import getpid
from struct import Struct
from threading import Lock
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlbuf_td.buffers.parts import Parts
from rlbuf_td.buffers.plan import is_plain
from rlbuf_td.envs.trajectory_numbers import TrajectoryNumbers
from rlbuf_td.kernels.batch import RING, parallel_loops
from rlbuf_td.kernels.dispatch import machine_code
from rlbuf_td.kernels.episodes import BitBoundaries
from rlbuf_td.kernels.host_memory import HostTensors, has_memory
from rlbuf_td.kernels.rank_order import ChunkedOrder
from rlbuf_td.kernels.threads import LARGE
from rlbuf_td.samplers import MinibatchSampler, ProportionalSampler, RankSampler, RecencySampler, UniformSampler
from rlbuf_td.samplers.priorities import ALPHA, LARGEST, WEIGHED
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import SchemaError, torchrl_parts
from rlbuf_td.storages.interrupts import held_back
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from rlbuf_td.writers import RingWriter

_MOST_SIZES = 8  # batch sizes whose checks are kept
_Numbers: TypeAlias = tuple[BitBoundaries, np.ndarray, Any]


class WritePlan:
    """Writes rows in host memory with one compiled call."""

    def __init__(self, buffer: Any, parts: Parts, sampler: Any, boundaries: _Numbers | None) -> None:
        from rlbuf_td.kernels.batch import cpu as kernels
        from rlbuf_td.kernels.batch import dedup_cpu

        self.buffer, self.storage, self.sampler = buffer, parts.storage, sampler
        self.time_dim, self.priority_key = buffer.dim_extend, buffer.priority_key
        self.epochs = sampler if type(sampler) is MinibatchSampler else None
        self.transforms, self.writer, self.eps = parts.transforms, parts.writer, getattr(sampler, "eps", 0.0)
        self.rows, self.listeners = self.storage.rows, torchrl_parts.listeners_of(self.storage)
        self.counters = parts.writer.numbers.values  # replaced when the buffer is shared
        self.listening = len(self.listeners)
        self.lanes = self.rows.lanes.numel()
        self.extents = self.rows.extents
        self.sources = np.empty(len(self.extents), np.int64)
        self.set_sources = Struct(f"{len(self.extents)}q").pack_into
        self.priorities = sampler.law.table.addresses if parts.prioritized is not None else None
        self.lock = cast(ChunkedOrder, sampler.law.table).lock if type(sampler) is RankSampler else Lock()
        self.expected: dict[torch.Size, HostTensors] = {}  # recognizes the leaves, by batch size
        self.boundaries = boundaries
        self.bitmap = boundaries[0].bitmap if boundaries is not None else None
        self.place = self.rows.flat.data_ptr()  # the kernels' address of the rows
        self.kept = None if parts.prioritized is None else sampler.law.table  # a load may replace it during a call
        self.magnitude = 0 if self.kept is None else self.kept.magnitude.data_ptr()
        self.ring = np.zeros(1, RING)
        for name, number in self._numbers(parts).items():
            self.ring[name] = number
        loop = kernels.write_ring
        if self.priorities is not None:
            loop = kernels.write_ring_rank if type(sampler) is RankSampler else kernels.write_ring_proportional
        self.address, self.kernel = self.ring.ctypes.data, machine_code(loop, 0, 0, True, 0)
        if type(self.rows) is DedupRows:
            self.write_rows, self.kernel, self.pools = self.kernel, self.write_deduplicated, self.rows.table.addresses
            self.write_entries = machine_code(dedup_cpu.write_entries, 0, 0, 0, True, 0, 0, (0, 0))

    def _numbers(self, parts: Parts) -> dict[str, float]:
        rows, storage = self.rows, self.storage
        numbers: dict[str, Any] = {}
        for names, shared in (
            (("cursor", "write_count"), parts.writer.numbers),
            (("length", "revision", "last_cursor"), storage.numbers),
            (("clock", "clock_last", "clock_by_row"), storage.clock.numbers),
        ):
            numbers |= {name: addressof(shared.values) + 8 * at for at, name in enumerate(names)}
        numbers |= {"rows": rows.flat.data_ptr(), "row_bytes": rows.flat.stride(0) * rows.flat.element_size()}
        numbers |= {"steps": rows.steps, "lanes": self.lanes if rows.lanes else 0, "leaves": len(self.extents)}
        numbers |= {"extents": self.extents.ctypes.data, "sources": self.sources.ctypes.data}
        if self.priorities is not None:
            settings = addressof(self.sampler.settings.values)
            alpha = 0 if type(self.sampler) is RankSampler else settings + 8 * ALPHA
            numbers |= {"priorities": self.priorities.ctypes.data, "eps": self.eps, "alpha": alpha}
            numbers |= {"largest": settings + 8 * LARGEST, "weighed_alpha": settings + 8 * WEIGHED}
        if self.boundaries is not None:
            numbers |= {"boundaries": self.boundaries[1].ctypes.data, "seen": addressof(self.boundaries[2])}
        return numbers

    def holds(self) -> bool:
        """Whether the buffer is unchanged since the plan was made."""
        return (
            self.buffer.write_plan is self  # under the lock: another thread may have replaced a part
            and self.buffer.episode_stats is None
            and self.storage.rows is self.rows
            and self.rows.flat.data_ptr() == self.place
            and (not self.rows.is_mapped or self.storage.process == getpid())  # a fork must not write the file
            and len(self.listeners) == self.listening
            and self.buffer.priority_key == self.priority_key
            and not self.writer.counts_generations
            and self.writer.numbers.values is self.counters
            and (self.kept is None or self.sampler.law.table.magnitude.data_ptr() == self.magnitude)
            and getattr(self.sampler, "eps", 0.0) == self.eps
            and (self.boundaries is None or self.boundaries[0].bitmap is self.bitmap)
        )

    def write(self, data: TensorDict, single: bool, transformed: bool = False) -> int | Tensor | None:
        """Write one time step (``single``) or several; return their index, or None if the plan cannot be used."""
        if type(data) is not TensorDict or (torchrl_parts.modules_of(self.transforms) and not transformed):
            return None
        lanes, dim = self.rows.lanes, self.time_dim
        lead = lanes if single else data.batch_size[: 1 + len(lanes)]
        count = 1 if single else lead[dim] if len(lead) > dim else 0
        if not count or lead.numel() != count * self.lanes:
            return None
        index = None
        if lanes or not single:
            shape = (count * self.lanes, 2) if lanes else (count,)
            index = torch.empty(shape, dtype=torch.int64, device="cpu")
        where = 0 if index is None else index.data_ptr()
        with self.storage.lock, self.lock:
            leaves = self.collect(data, lead) if self.holds() else None  # kept alive for the kernel
            cursor = -1 if leaves is None else self.kernel(self.address, count, dim == 1, where)
            if self.epochs is not None and cursor >= 0:
                self.epochs.restart()
        return None if cursor < 0 else cursor if index is None else index

    def write_deduplicated(self, address: int, count: int, lanes_first: bool, index: int) -> int:
        with held_back:  # an interrupt between the two calls would leave rows with the observations of other rows
            cursor = self.write_rows(address, count, lanes_first, index)
            if cursor >= 0:
                self.write_entries(address, cursor, count, lanes_first, *self.pools)
        return cursor

    def collect(self, data: TensorDict, lead: torch.Size) -> list[Tensor] | None:
        """Store the addresses of the data's tensors for the kernel; return the tensors, or None if they do not fit."""
        expected = self.expected.get(lead) or self.expect(lead)
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

    def expect(self, lead: torch.Size) -> HostTensors:
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


def make_write_plan(buffer: Any, parts: Parts) -> WritePlan | None:
    """Return a plan for writes to a buffer with allocated rows, or None if the buffer does not support plans."""
    storage, sampler = parts.storage, parts.sampler
    if type(parts.writer) is not RingWriter or parts.writer.counts_generations or not is_plain(storage):
        return None
    if type(storage.rows) is DedupRows and storage.rows.is_mapped:  # space on the disk is reserved before each write
        return None
    while isinstance(sampler, SamplerWrapper) and type(sampler).add is SamplerWrapper.add:
        sampler = sampler.sampler
    attached = [each for each in torchrl_parts.listeners_of(storage) if each is not buffer]
    listeners = [each for each in attached if type(each) is not TrajectoryNumbers]  # TrajectoryNumbers ignore writes
    if (
        type(sampler) not in (MinibatchSampler, UniformSampler, RecencySampler, ProportionalSampler, RankSampler)
        or getattr(sampler, "max_priority_within_buffer", False)
        or getattr(sampler, "min_priority", 0.0) > 1.0  # the kernel gives the first rows the magnitude 1
        or (parts.prioritized is not None and storage.rows.view().get(buffer.priority_key, None) is not None)
        or buffer.episode_stats is not None
        or buffer.flow is not None
        or buffer.dim_extend > len(storage.lanes)
        or any(leaf.dtype.is_complex for leaf in storage.layout.leaves)  # complex tensors may be conjugate views
        or [type(each) for each in listeners] not in ([], [TrajectoryIndex])
    ):
        return None
    boundaries = listeners[0].numbers() if listeners else None
    return None if listeners and boundaries is None else WritePlan(buffer, parts, sampler, boundaries)
