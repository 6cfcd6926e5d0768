"""Bound batches: the compiled form of the stages *draw*, *revise* and *gather*, for one batch size of one buffer.

The innermost sampler draws rows, each wrapper revises the list of rows that the batch reads, and one pass gathers them.
Each part owns its stages: the torch form, which works on every device and specifies the result, is its ``draw`` or
``draw_batch``; the compiled form is what its method ``bind_draw`` or ``bind_revision`` returns. :func:`bind` combines
the compiled stages with memory that is allocated once. From the same state of the random generator, both forms give the
same batches. A subclass keeps the compiled form unless it overrides a method that this form implements.

A bound batch that cannot be used, for example after the storage got new memory, returns None; the caller then takes the
torch form, and binds again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.kernels.batch import BatchMemory, batch_record
from rlbuf_td.kernels.dispatch import backend_of, compiled_form, machine_code
from rlbuf_td.kernels.episodes import BitBoundaries
from rlbuf_td.kernels.host_memory import Entry, in_dispatch_mode
from rlbuf_td.kernels.rows.read_ahead import ask_for_rows
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.rows import PlainRows, Rows
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.torchrl_parts import generator_of
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from rlbuf_td.storages.write_clock import SAMPLED_AT

CPU = torch.device("cpu")
SCALAR = torch.Size([])
Named: TypeAlias = tuple[str, Entry]  # an entry of a batch besides the leaves, with its dtype and its shape per row


class BoundDraw(ABC):
    """Draws the rows of a batch: flat indices, in memory that is used with the storage's lock held.

    Args:
        storage: the storage, whose rows have been allocated.
        sampler: the sampler, or the wrapper of the sampler.
        size: the number of rows to draw.
        reads: whether the compiled function that draws also gathers the rows.
    """

    reports: ClassVar[tuple[tuple[str, torch.dtype], ...]] = ()  # the sampler's report, one number per row
    takes_fresh_rows: ClassVar[bool] = False  # whether the compiled function can replace the first rows by fresh rows
    table = 0  # address of an array with the addresses of the priorities
    kept: Any = None  # kept alive because the compiled function reads its memory

    def __init__(self, storage: PackedStorage, sampler: Any, size: int, reads: bool) -> None:
        self.storage, self.sampler, self.size = storage, sampler, size
        self.rows, self.generator = storage.all_rows(), generator_of(sampler)
        self.place = self.rows.flat.data_ptr()  # the rows' address in compiled code
        self.shared_rows = storage.shared_rows  # sharing replaces the storage's counters
        self.flat = self._flat = torch.zeros(size, dtype=torch.int64, device="cpu")
        self.uniform = self._uniform = torch.zeros(size, dtype=torch.float64, device="cpu")
        lanes = lanes_of(self.rows)
        scratch = {"flat": self.flat.data_ptr(), "uniform": self.uniform.data_ptr(), "table": self.table}
        shape = {"steps": self.rows.steps, "lanes": lanes, "pairs": int(reads and lanes > 0)}
        self.record = batch_record(size, self.rows.flat, self.rows.extents, **scratch, **shape)
        if not reads:
            self.record["leaves"] = 0
        self.address = self.record.ctypes.data
        self.kernel = self.compiled()

    def compiled(self) -> Callable[..., Any]:
        """Return the machine code that this draw calls."""
        from rlbuf_td.kernels.batch import cpu

        return machine_code(cpu.gather_flat, 0, 0)

    def limit(self, count: int) -> None:
        """Draw ``count`` rows from now on, at most as many as at first."""
        if count != self.size:
            self.size, self.flat, self.uniform = count, self._flat[:count], self._uniform[:count]
            self.record["count"] = count

    def holds(self) -> bool:
        """Whether storage and sampler are unchanged, and the rows are in their old place."""
        rows = self.rows
        is_in_place = self.storage.rows is rows and rows.flat.data_ptr() == self.place
        is_in_place &= self.storage.shared_rows is self.shared_rows
        return is_in_place and generator_of(self.sampler) is self.generator and not in_dispatch_mode()

    @abstractmethod
    def __call__(self, written: int, targets: int) -> bool:
        """Draw from the first ``written`` rows; return False if the compiled function refuses.

        ``targets`` is the address of an array with the addresses of the outputs: the leaves, if the draw gathers, the
        index (otherwise :attr:`flat`), and the reports.
        """

    def update(self, index: Tensor, td_error: Tensor, stamp: Tensor | None) -> int | None:
        """Update priorities; return how many rows were replaced since the draw, or None if compiled code refuses."""
        return None


class Blank(NamedTuple):
    """A batch of uninitialised tensors."""

    targets: int  # address of an array with the addresses of the tensors
    drawn: int  # address of such an array for the outputs of the draw
    leaves: list[Tensor]
    batch: TensorDict
    report: dict[str, Tensor]


class Reading:
    """Gathers the rows that a draw or an expansion has listed; wrappers that change entries have subclasses."""

    nests: ClassVar[bool] = True  # whether the rows may come from an expansion
    entries: Sequence[Named] = ()  # entries that the rows lack
    reads_entries: ClassVar[bool] = False  # whether :meth:`gather` also reads deduplicated observations
    adds_report: ClassVar[bool] = True  # whether a batch has the report before it is read

    def __init__(self, rows: Rows) -> None:
        self.rows, self.extents = rows, rows.extents

    def gather(self, bitmap: Any, batch: BoundBatch, blank: Blank, written: int) -> None:
        if self.rows.is_mapped:
            ask_for_rows(self.rows.flat, batch.flat)
        batch.gather_flat(batch.address, blank.targets)


class BoundBatch:
    """Makes batches from bound stages."""

    newest = -1  # the newest time step at the last draw

    def __init__(self, draw: BoundDraw, expansion: Any, reading: Reading | None, trajectories: Any) -> None:
        from rlbuf_td.kernels.batch import cpu

        self.draw, self.expansion, self.reading, self.trajectories = draw, expansion, reading, trajectories
        self.storage, rows = draw.storage, draw.rows
        self.size = draw.size * (1 if expansion is None else expansion.window)
        index: Named = "index", (torch.int64, torch.Size([2] if lanes_of(rows) else []))
        named = [index, *((name, (dtype, SCALAR)) for name, dtype in draw.reports)]
        for stage in (reading, expansion):
            named += [] if stage is None else stage.entries
        self.names = [name for name, _ in named]
        leaves = [(leaf.dtype, leaf.shape) for leaf in rows.layout.leaves]
        self.memory = BatchMemory([*leaves, *(entry for _, entry in named)], self.size)
        self.batch_size, self.blanks = torch.Size([self.size]), cast("list[Blank]", [])
        self.flat, self.address = draw.flat, draw.address
        if reading is not None:
            self.gather_flat = machine_code(cpu.gather_flat, 0, 0)
            self.flat = draw.flat if expansion is None else torch.zeros(self.size, dtype=torch.int64, device="cpu")
            given = {"flat": self.flat.data_ptr(), "uniform": draw.uniform.data_ptr(), "steps": rows.steps}
            shape = {"lanes": lanes_of(rows), "pairs": int(lanes_of(rows) > 0)}
            self.record = batch_record(self.size, rows.flat, reading.extents, **given, **shape)
            self.address = self.record.ctypes.data
            self.drawn = np.empty((len(self.memory.slots), 1 + len(draw.reports)), np.int64)
        self.read_entries: Callable[..., Any] | None = None  # the machine code that reads deduplicated observations
        if isinstance(rows, DedupRows) and not (reading is not None and reading.reads_entries):
            from rlbuf_td.kernels.batch import dedup_cpu

            self.read_entries = machine_code(dedup_cpu.read_entries, 0, 0, *rows.table.addresses)
            self.pools = rows.table.addresses

    def allocate(self) -> Blank:
        with torch.inference_mode(False):  # a batch may outlive inference mode
            self.blanks = [self._blank(*slot) for slot in enumerate(self.memory.slots)]
        return self.blanks.pop()

    def _blank(self, place: int, targets: int) -> Blank:
        tensors, layout = self.memory.allocate(targets), self.draw.rows.layout
        leaves = tensors[: len(layout.leaves)]
        report = dict(zip(self.names, tensors[len(leaves) :], strict=True))
        drawn = targets
        if self.reading is not None:
            outputs = [report[name] for name, _ in self.draw.reports]
            if self.expansion is not None:
                outputs = self.expansion.outputs
            self.drawn[place] = [tensor.data_ptr() for tensor in (self.draw.flat, *outputs)]
            drawn = self.drawn.ctypes.data + place * self.drawn.strides[0]
        adds = self.reading is None or self.reading.adds_report
        batch = layout.wrap(leaves, self.batch_size, CPU, report if adds else {})
        return Blank(targets, drawn, leaves, batch, report)

    def sample(self) -> Blank | None:  # the caller holds the storage's lock
        """Return a batch, or None if the bound stages cannot be used."""
        written, revision, self.newest = self.storage.numbers.values[:3]
        if not written or not self.draw.holds():
            return None
        bitmap = None if self.trajectories is None else self.trajectories.boundaries(revision).bitmap
        blank = self.blanks.pop() if self.blanks else self.allocate()
        if not self.draw(written, blank.drawn):
            return None
        if self.reading is not None:
            if self.expansion is not None:
                self.expansion.expand(bitmap, self, blank)
            self.reading.gather(bitmap, self, blank, written)
        if self.read_entries is not None:
            self.read_entries(self.address, blank.targets, *self.pools)
        if self.expansion is not None:
            self.expansion.mark(blank)
        return blank

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        """Update priorities; return how many rows were replaced since the draw, or None if compiled code refuses."""
        if type(batch) is not TensorDict or type(priority_key) is not str or batch.batch_size != self.batch_size:
            return None
        entries = entries_of(batch)
        index, td_error, stamp = entries.get("index"), entries.get(priority_key), entries.get(SAMPLED_AT)
        if self.expansion is not None and td_error is not None and index is not None and stamp is not None:
            index, td_error, stamp = self.expansion.by_window(batch, index, td_error, stamp)
        return self.draw.update(index, td_error, stamp)


def lanes_of(rows: Rows) -> int:
    """Return the number of lanes of rows ``[T, E]``; 0 for rows ``[T]``."""
    return rows.cells // rows.steps if rows.lanes else 0


def unreadable(storage: Any) -> str:
    """Say in one line why compiled code cannot read the rows of a storage as host memory; "" if it can."""
    rows = getattr(storage, "rows", None)
    if not isinstance(storage, PackedStorage):
        return f"the storage is a {type(storage).__name__}"
    if rows is None or storage.is_reserved:
        return "no rows have been written yet"
    if backend_of(rows.flat) != "numba":
        return f"the rows are on {rows.flat.device}"
    if storage.ndim > 2:
        return f"the rows have ndim={storage.ndim}, above 2"
    is_compiled = isinstance(rows, PlainRows) or (isinstance(rows, DedupRows) and rows.table.is_compiled)
    return "" if is_compiled else f"the rows are {type(rows).__name__}"


def bind(storage: Any, sampler: Sampler, size: int) -> BoundBatch | str:
    """Return bound stages for batches of ``size`` rows, or, in one line, why there are none."""
    reason = unreadable(storage)
    if reason:
        return reason
    if compiled_form(storage, "bind_read") is None:
        return f"{type(storage).__name__} has no compiled read"
    if storage.rows.is_mapped and storage.rows.dedup is not None:
        return "deduplicated rows are in a file"
    if getattr(generator_of(sampler), "device", CPU).type != "cpu":
        return "the generator is on another device than the CPU"
    part, expansion, readings, trajectories = sampler, None, [], None
    with torch.inference_mode(False):  # the memory outlives a call in inference mode
        while (revise := compiled_form(part, "bind_revision")) is not None:
            found = TrajectoryIndex.of(storage, done_key=part.done_key, traj_key=part.traj_key)
            trajectories = found if trajectories is None else trajectories
            if found is not trajectories or not isinstance(found.boundaries(), BitBoundaries):
                return "wrappers with different done_key or traj_key" if found is not trajectories else "no bitmap"
            revision = revise(storage, size)
            if isinstance(revision, str):
                return revision
            if isinstance(revision, Reading):
                readings.append(revision)
            else:
                expansion = revision
            part = part.sampler
        draws = compiled_form(part, "bind_draw")
        if draws is None:
            return f"{type(part).__name__} has no compiled draw"
        if len(readings) > 1 or (expansion is not None and not all(each.nests for each in readings)):
            return "the reward function is called for each step of n-step returns and sequences"
        if not readings and (expansion is not None or storage.rows.is_mapped):
            readings = [Reading(storage.rows)]
        draw = draws(storage, size if expansion is None else size // expansion.window, reads=not readings)
        if isinstance(draw, str):
            return draw
        if expansion is not None:
            expansion.keep_outputs(draw)
        return BoundBatch(draw, expansion, readings[0] if readings else None, trajectories)
