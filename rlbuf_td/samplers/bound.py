"""Bound batches: the compiled form of the stages *draw*, *revise* and *gather*, for one batch size of one buffer.

The innermost sampler draws rows, each wrapper revises the list of rows that the batch reads, and one pass gathers them.
Each part owns its stages: the torch form, which works on every device and specifies the result, is its ``draw`` or
``draw_batch``; the compiled form is what its method ``bind_draw`` or ``bind_revision`` returns. ``bind_revision`` takes
the :class:`Reading` of the wrapper inside it, or one of plain rows, and returns a reading in its place. :func:`bind`
combines the compiled stages with memory that is allocated once. From the same state of the random generator, both
forms give the same batches. A subclass keeps the compiled form unless it overrides a method that this form implements.

A bound batch that cannot be used, for example after the storage got new memory, returns None; the caller then takes the
torch form, and binds again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.kernels.batch import BatchMemory, batch_record
from rlbuf_td.kernels.dispatch import backend_of, compiled_form, machine_code
from rlbuf_td.kernels.host_memory import Entry, HostTensors, in_dispatch_mode
from rlbuf_td.kernels.rows.read_ahead import ask_for_rows
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import one_a_row
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.rows import PlainRows, Rows
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.torchrl_parts import generator_of
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

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
    refuses_once: ClassVar[bool] = False  # whether a draw after one that compiled code refuses may succeed
    takes_fresh_rows: ClassVar[bool] = False  # whether the compiled function can replace the first rows by fresh rows
    queue: Callable[[], bool] | None = None  # whether fresh rows, which replace the first ones, can be taken
    table = 0  # address of an array with the addresses of the priorities
    #: Returns the rows among which a draw without replacement chooses; None: all.
    anchors: Callable[[PackedStorage], Tensor] | None = None
    windows: np.ndarray | None = None  # a ``WINDOWS`` record, if the drawn rows are expanded to windows
    kept: Any = None  # kept alive because the compiled function reads its memory

    def __init__(self, storage: PackedStorage, sampler: Any, size: int, reads: bool) -> None:
        self.storage, self.sampler, self.size = storage, sampler, size
        self.rows, self.generator = storage.all_rows(), generator_of(sampler)
        self.place = self.rows.flat.data_ptr()  # the rows' address in compiled code
        self.shared_rows = storage.shared_rows  # sharing replaces the storage's counters
        self.flat = self._flat = torch.zeros(size, dtype=torch.int64, device="cpu")
        self.uniform = self._uniform = torch.zeros(size, dtype=torch.float64, device="cpu")
        self.ring, self.generations = storage.ring, cast("Tensor | None", None)
        scratch = {"flat": self.flat.data_ptr(), "uniform": self.uniform.data_ptr(), "table": self.table}
        scratch["serials"] = self.ring.head.ctypes.data
        shape = {"steps": self.rows.steps, "lanes": lanes_of(self.rows), "reads": int(reads)}
        self.record = batch_record(size, self.rows.flat, self.rows.extents, **scratch, **shape)
        self.address = self.record.ctypes.data
        self.kernel = self.compiled()

    def compiled(self) -> Callable[..., Any]:
        """Return the machine code that this draw calls."""
        from rlbuf_td.kernels.batch import cpu

        return machine_code(cpu.gather_flat)

    def limit(self, count: int) -> None:
        """Draw ``count`` rows from now on, at most as many as at first."""
        if count != self.size:
            self.size, self.flat, self.uniform = count, self._flat[:count], self._uniform[:count]
            self.record["count"] = count

    def holds(self) -> bool:
        """Whether storage and sampler are unchanged, and the rows are in their old place."""
        rows = self.rows
        is_in_place = self.storage.rows is rows and rows.flat.data_ptr() == self.place
        is_in_place &= self.storage.shared_rows is self.shared_rows and (self.queue is None or self.queue())
        generations = None if self.ring.in_order else self.ring.generations
        if generations is not self.generations:
            self.record["generations"] = 0 if generations is None else generations.data_ptr()
            self.generations = generations
        return is_in_place and generator_of(self.sampler) is self.generator and not in_dispatch_mode()

    @abstractmethod
    def __call__(self, written: int, targets: int) -> bool:
        """Draw from the first ``written`` rows; return False if the compiled function refuses.

        ``targets`` is the address of an array with the addresses of a batch's tensors: the leaves, the index and the
        reports. A draw that does not gather writes the rows to :attr:`flat`, and only the reports to ``targets``.
        """

    def expand_to(self, windows: np.ndarray) -> None:
        """Update priorities from TD errors of windows, which the :data:`WINDOWS` record describes."""
        self.windows, self.windows_bytes = windows, windows.view(np.uint8).data
        self.record["windows"] = windows.ctypes.data

    def update(self, index: Any, td_error: Any, stamp: Any, masks: Masks | None = None) -> int | None:
        """Update priorities; return how many rows were replaced since the draw, or None if compiled code refuses.

        The arguments are entries of a batch, None for an entry that is missing; ``masks`` are those of windows.
        """
        return None


class Masks(NamedTuple):
    """Which TD errors of a batch of windows count for the priorities of the drawn rows."""

    mask: Any  # the entries of the batch
    burn_in_mask: Any
    eta: float  # the weight of the largest TD error of a window; that of the mean is ``1 - eta``


class Blank(NamedTuple):
    """A batch of uninitialised tensors."""

    targets: int  # address of an array with the addresses of the tensors
    leaves: list[Tensor]
    batch: TensorDict
    report: dict[str, Tensor]
    blanks: Blanks  # that have allocated it


class Blanks:
    """Allocates batches of ``size`` rows, several at a time.

    Args:
        layout: the layout of the rows.
        named: further entries of a batch.
        size: rows per batch.
        adds_report: whether the batch has the further entries; otherwise only :attr:`Blank.report` has them.
    """

    def __init__(self, layout: RowLayout, named: Sequence[Named], size: int, adds_report: bool = True) -> None:
        self.layout, self.names, self.adds_report = layout, [name for name, _ in named], adds_report
        leaves = [(leaf.dtype, leaf.shape) for leaf in layout.leaves]
        entries = [*leaves, *(entry for _, entry in named)]
        self.memory = BatchMemory(entries, size)
        self.expected = HostTensors([(dtype, torch.Size([size, *shape])) for dtype, shape in entries])
        self.batch_size, self.ready = torch.Size([size]), cast("list[Blank]", [])

    def take(self) -> Blank:
        if not self.ready:
            with torch.inference_mode(False):  # a batch may outlive inference mode
                self.ready = [self._blank(targets) for targets in self.memory.slots]
        return self.ready.pop()

    @torch.compiler.disable(reason="a function of torch that its compiler does not know allocates the tensors")
    def _blank(self, targets: int) -> Blank:
        tensors, count = self.memory.allocate(targets), len(self.layout.leaves)
        report = dict(zip(self.names, tensors[count:], strict=True))
        batch = self.layout.wrap(tensors, self.batch_size, CPU, report if self.adds_report else {})
        return Blank(targets, tensors[:count], batch, report, self)

    def locate(self, blank: Blank) -> None:
        """Store the addresses of a batch's tensors again: a function of the user may have moved or freed them."""
        found = self.expected.addresses([*blank.leaves, *blank.report.values()])
        if found is None:
            raise RuntimeError("reward_fn or terminated_fn has resized or freed tensors of its batch: pass it a copy")
        self.memory.set_targets(blank.targets, found)


class Reading:
    """Gathers the rows that a draw has listed; wrappers that change the list or entries have subclasses."""

    adds_report: bool = True  # whether a batch has the report before it is read; otherwise the reading adds it
    is_fused: ClassVar[bool] = True  # whether the kernel of another reading can read rows as this one does
    picks_any_row = False  # whether this reading chooses among all rows below ``written``, which must have no holes
    window = 1  # the rows of a batch per drawn row
    entries: Sequence[Named] = ()  # entries that the rows lack

    def __init__(self, rows: Rows) -> None:
        from rlbuf_td.kernels.batch import cpu, entries_cpu

        self.rows, self.extents, self.kernel = rows, rows.extents, machine_code(cpu.gather_flat)
        self.observations = rows.entries.address if isinstance(rows, DedupRows) else 0  # those that are stored once
        if self.observations:
            self.entry_kernel = machine_code(entries_cpu.read_entries)

    def bind(self, draw: BoundDraw, size: int) -> None:
        """Describe batches of ``size`` rows to compiled code."""
        self.draw, rows = draw, self.rows
        self.flat = draw.flat if draw.size == size else torch.zeros(size, dtype=torch.int64, device="cpu")
        given = {"flat": self.flat.data_ptr(), "uniform": draw.uniform.data_ptr()}
        given |= {"anchors": draw.flat.data_ptr(), "drawn": draw.size, "serials": draw.ring.head.ctypes.data}
        given["windows"] = 0 if draw.windows is None else draw.windows.ctypes.data
        shape = {"steps": rows.steps, "lanes": lanes_of(rows), "reads": 1}
        self.record = batch_record(size, rows.flat, self.extents, **given, **shape)
        self.address = self.record.ctypes.data

    def __call__(self, episodes: int, blank: Blank, written: int) -> None:
        if self.rows.is_mapped:
            ask_for_rows(self.rows.flat, self.flat)
        self.kernel(self.address, blank.targets)
        self.read_entries(blank)

    def read_entries(self, blank: Blank) -> None:
        if self.observations:
            self.entry_kernel(self.address, blank.targets, self.observations)

    def steps(self, blank: Blank) -> int:
        """Return the address of a ``STEPS`` record if this reading joins transitions, otherwise 0."""
        return 0

    def masks(self, entries: Mapping[str, Any]) -> Masks | None:
        """Return the masks of a batch of windows, None for other batches; ``entries`` are those of the batch."""
        return None


class _EntryReading(Reading):
    """Reads deduplicated observations; the draw has gathered the rest of the rows."""

    def bind(self, draw: BoundDraw, size: int) -> None:
        self.address = draw.address

    def __call__(self, episodes: int, blank: Blank, written: int) -> None:
        self.read_entries(blank)


class BoundBatch:
    """Makes batches from bound stages."""

    newest = -1  # the newest time step at the last draw
    is_busy = False  # whether a batch is being made: a reward_fn that uses the buffer must not use the same memory

    def __init__(self, draw: BoundDraw, reading: Reading | None, trajectories: Any) -> None:
        self.draw, self.reading, self.trajectories = draw, reading, trajectories
        self.storage, size = draw.storage, draw.size * (1 if reading is None else reading.window)
        named: list[Named] = [("index", (torch.int64, torch.Size([2] if lanes_of(draw.rows) else [])))]
        named += [(name, (dtype, SCALAR)) for name, dtype in draw.reports]
        if reading is not None:
            named += reading.entries
            reading.bind(draw, size)
        self.blanks = Blanks(draw.rows.layout, named, size, reading is None or reading.adds_report)
        self.batch_size = self.blanks.batch_size

    def sample(self) -> Blank | None:  # the caller holds the storage's lock
        """Return a batch, or None if the bound stages cannot be used."""
        written, self.newest = self.storage.ring.extent()
        if not written or self.is_busy or not self.draw.holds():
            return None
        if self.reading is not None and self.reading.picks_any_row and self.storage.ring.holes:
            return None
        episodes = 0 if self.trajectories is None else self.storage.episodes_now().address
        blank = self.blanks.take()
        self.is_busy = True
        try:
            if not self.draw(written, blank.targets):
                return None
            if self.reading is not None:
                self.reading(episodes, blank, written)
        finally:
            self.is_busy = False
        return blank

    def remains(self) -> bool:
        """Whether the bound stages, after :meth:`sample` has returned None, may be used again."""
        return (self.is_busy or self.draw.refuses_once) and self.draw.holds()

    def update(self, batch: TensorDictBase, priority_key: NestedKey) -> int | None:
        """Update priorities; return how many rows were replaced since the draw, or None if compiled code refuses."""
        is_usual = type(batch) is TensorDict and type(priority_key) is str and batch.batch_size == self.batch_size
        if not is_usual or self.is_busy:
            return None
        entries = entries_of(batch)
        masks = None if self.reading is None else self.reading.masks(entries)
        index = entries.get("index" if masks is None else "anchor_index")
        td_error: Any = entries.get(priority_key)
        if index is not None and type(td_error) is Tensor and td_error.ndim > 1 and td_error.numel() > len(batch):
            td_error = one_a_row(td_error, 1, self.draw.sampler.reduction)
        return self.draw.update(index, td_error, entries.get(SAMPLED_AT), masks)


def lanes_of(rows: Rows) -> int:
    """Return the number of lanes of rows ``[T, E]``; 0 for rows ``[T]``."""
    return rows.cells // rows.steps if rows.lanes else 0


def unreadable(storage: Any) -> str:
    """Say in one line why compiled code cannot read the rows of a storage as host memory; "" if it can."""
    if not isinstance(storage, PackedStorage):
        return f"the storage is a {type(storage).__name__}"
    rows = storage.rows
    if rows is None or storage.is_reserved:
        return "no rows have been written yet"
    if backend_of(rows.flat) != "numba":
        return "numba's compiler is off" if rows.flat.is_cpu else f"the rows are on {rows.flat.device}"
    if storage.ndim > 2:
        return f"the rows have ndim={storage.ndim}, above 2"
    return "" if isinstance(rows, PlainRows | DedupRows) else f"the rows are {type(rows).__name__}"


def bind(storage: Any, sampler: Sampler, size: int) -> BoundBatch | str:
    """Return bound stages for batches of ``size`` rows, or, in one line, why there are none."""
    reason = unreadable(storage)
    if reason:
        return reason
    if compiled_form(storage, "bind_read") is None:
        return f"{type(storage).__name__} has no compiled read"
    if dims := storage.rows.layout.root.batch_size:
        return f"a row has batch dims of its own, {[*dims]}"
    if storage.rows.is_mapped and storage.rows.dedup is not None:
        return "deduplicated rows are in a file"
    if getattr(generator_of(sampler), "device", CPU).type != "cpu":
        return "the generator is on another device than the CPU"
    with torch.inference_mode(False):  # the memory outlives a call in inference mode
        return _bind(storage, sampler, size)


def _bind(storage: PackedStorage, sampler: Any, size: int) -> BoundBatch | str:
    rows, trajectories, revisions = storage.all_rows(), None, []
    while (revise := compiled_form(sampler, "bind_revision")) is not None:
        trajectories = TrajectoryIndex.of(storage, done_key=sampler.done_key, traj_key=sampler.traj_key)
        if not trajectories.episodes().address:
            return "episodes are looked up with torch"
        revisions.append(revise)
        sampler = sampler.sampler
    draws = compiled_form(sampler, "bind_draw")
    if draws is None:
        return f"{type(sampler).__name__} has no compiled draw"
    reading = Reading(rows)
    for revise in reversed(revisions):
        revised = revise(storage, size, reading)
        if isinstance(revised, str):
            return revised
        reading = revised
    is_read_by_draw = not revisions and not rows.is_mapped
    draw = draws(storage, size // reading.window, reads=is_read_by_draw)
    if isinstance(draw, str):
        return draw
    if is_read_by_draw:
        return BoundBatch(draw, _EntryReading(rows) if rows.dedup is not None else None, None)
    return BoundBatch(draw, reading, trajectories)
