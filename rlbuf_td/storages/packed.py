"""A storage in which a transition is one row of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from rlbuf_td.storages.allocated import as_tensordict
from rlbuf_td.storages.dedup.options import DedupOptions
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.pinned import refuse_offload
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.schema import SchemaError, refuse_unfit
from rlbuf_td.storages.state import SavedStorage
from rlbuf_td.storages.write_clock import WriteClock
from rlbuf_td.storages.write_index import as_index, as_steps, is_index, is_key, is_mask, refuse_steps


class PackedStorage(SavedStorage):
    """A TensorDict storage with one row of bytes a transition: a batch is one gather, whatever the number of keys.

    The first write fixes the schema (keys, dtypes, shapes, nesting); the rows are allocated then, and memory is taken
    from the system as rows are written. A sampled batch is fresh memory: changing it never changes the storage. As in
    TorchRL, an ``int`` or a ``slice`` gives a view instead.

    Args:
        max_size: capacity in transitions. With ``ndim > 1`` it is rounded up to whole time steps of all lanes.
        device: where the rows live: ``"cpu"``, a CUDA device, or ``"auto"`` (that of the first write).
        ndim: number of leading dims that count as transitions: 1 for ``[T]``, 2 for ``[T, E]`` (time, lanes).
        scratch_dir: a folder for a memory-mapped file of the rows (CPU only). The file is kept; one that is there
            already is never overwritten.
        shared: put the rows into shared memory (CPU only); a :class:`ReplayBuffer` over them is then shared from the
            start, see :meth:`ReplayBuffer.share`.
        offload: keep the rows of a CUDA device in page-locked RAM, which it reads and writes itself over the bus: there
            may be more of them than it has memory. All else stays on the device: batches, priorities, trajectories.
            The RAM is taken at once. (Linux; not with ``share_next`` or ``frames``.)
        share_next: store an observation once that is a row's next one and the following row's own. Compared are the
            bytes, in the same lane; no flag is asked. Where they differ, at the end of a trajectory, say, both are
            stored. ``True``: all keys at the root that are below ``"next"``, too; a list of such keys; ``"auto"``:
            those that repeat in half of the first write's rows or more, unless they are too small to be worth it (if
            that is one time step, all keys of 16 bytes or more, each by itself, which takes 8 bytes a row and key).
            Keys of less than 8 bytes, flags and rewards are never shared. ``False`` is the default: a column, a slice
            or an int then gives views of every key, of a shared one it gives a copy. (``set_``, ``set_at_`` and
            ``update_`` of TorchRL's own buffers write to it, in vain; those of :class:`ReplayBuffer` do not.)
        frames: stacks of frames by key, ``{"pixels": 4}``, or with the dim of the key along which they lie, 0 if not
            given, ``{"pixels": (4, -1)}``: the newest frame of a stack is last. A row stores its newest frame where its
            stack is that of the row before, moved on by one (which is compared), else the whole stack; of the stack
            below ``"next"`` likewise.

    A copy, pickled or deep, has rows of its own in RAM or shared memory, never in the file of its original. Sent to a
    spawned process, the storage keeps its rows: both processes read and write the same ones.

    Raises:
        ValueError: an argument is out of range, or two of them exclude each other.
        SchemaError: (on writing) the data does not match the rows; nothing has been written.
        MemoryError: (on the first write) the rows can never fit: the machine has less memory, or their place less room.
            With ``offload``: less RAM is free, or the driver does not lock so much.
        OSError: (on the first write) the disk of ``scratch_dir`` has less room.

    Warns:
        MemoryWarning: (on the first write) less RAM is free than the rows will take once all are written.

    Cost: a gather of ``B`` rows is O(B * row_bytes), one kernel on CUDA; a write touches only its rows. With
    ``offload``, what is read or written of rows crosses the bus, and nothing else. Rows that share observations take as
    much longer to read and write as ``tests/benchmarks/memory.py`` says on your machine.

    Differs from TorchRL's ``LazyTensorStorage``: a missing key is an error rather than uninitialised memory, an unknown
    key is an error rather than dropped, and only TensorDicts of tensors are taken.

    Example:
        >>> from tensordict import TensorDict
        >>> storage = PackedStorage(1000)
        >>> storage.set(range(2), TensorDict({"observation": torch.ones(2, 3), "done": torch.zeros(2, 1).bool()}, [2]))
        >>> storage.get(torch.tensor([1, 1]))["observation"].sum()
        tensor(6.)
        >>> storage["observation"].shape, storage.row_bytes
        (torch.Size([2, 3]), 16)

        Observations once:

        >>> storage, seen = PackedStorage(1000, share_next=True), torch.rand(1001, 17)
        >>> rows = TensorDict({"observation": seen[:-1], "next": {"observation": seen[1:]}}, [1000])
        >>> storage.set(range(1000), rows)
        >>> storage.row_bytes, storage.nbytes / 1000
        (136, 76.068)
        >>> bool((storage[:] == rows).all())
        True
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        scratch_dir: str | Path | None = None,
        shared: bool = False,
        offload: bool = False,
        share_next: bool | str | Sequence[NestedKey] = False,
        frames: Mapping[NestedKey, Any] | None = None,
    ) -> None:
        if max_size < 1 or max_size != int(max_size):
            raise ValueError(f"max_size must be a whole number, at least 1, got {max_size}")
        if ndim < 1:
            raise ValueError(f"ndim must be at least 1, got {ndim}")
        asked = DedupOptions.of(share_next, frames)
        if offload:
            refuse_offload(device, scratch_dir=scratch_dir, shared=shared, sharing=bool(asked))
        if scratch_dir is not None and shared:
            raise ValueError("a memory-mapped file is shared already: pass scratch_dir or shared, not both")
        if (scratch_dir is not None or shared) and torch.device("cpu" if device == "auto" else device).type != "cpu":
            raise ValueError(f"scratch_dir and shared need device='cpu', got device={str(device)!r}")
        super().__init__(max_size, device=device, ndim=ndim)
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self.shared, self.offload = shared, offload
        self.dedup_options = asked
        self.rows = None
        self._live = None
        self.is_reserved = False
        self.clock = WriteClock()
        self.lock = RLock()
        self.shared_rows = None
        self._make_counters()
        if self.dedup_options and shared:
            self.share_memory_()

    # -- reading

    def get(self, index: Any) -> Any:
        """Return the transitions at ``index``, or one column of all of them.

        Args:
            index: a key, which gives that column as a strided view ``[T, *lanes, ...]`` of the rows; an ``int`` or a
                ``slice`` along time, which give views too; or, for fresh memory, a tensor, list, ``range`` or array of
                integers of any shape, a boolean mask, or a tuple of one index a dim.

        Raises:
            RuntimeError: nothing has been written yet.
            IndexError: an index is out of range of the rows that have been written.
            KeyError: no such key.
        """
        rows = self.written_rows()
        if is_key(index):
            return self.column(index)
        if isinstance(index, list | range | np.ndarray):
            index = as_index(index)
        if is_mask(index) and index.shape == rows.shape:
            index = index.nonzero(as_tuple=True)
        if is_index(index):
            return rows.at_steps(index.to(self.device, torch.int64))
        if isinstance(index, tuple) and len(index) == self.ndim and all(map(is_index, index)):
            return rows.at_coordinates(tuple(part.to(self.device, torch.int64) for part in index))
        return rows.at_region(index)

    def column(self, key: NestedKey) -> Any:
        """Return one key of all rows written, ``[T, *lanes, ...]``: a strided view; fresh memory if rows share it.

        Raises:
            KeyError: no such key.
        """
        rows = self.written_rows()
        return rows.column((key,) if isinstance(key, str) else tuple(key))

    def gather(self, flat: torch.Tensor) -> TensorDict:
        """Return the transitions at flat positions (``t * E + e``): ``[B]`` int64 on this device, not negative."""
        return self.written_rows().at_cells(flat)

    def read_ahead(self, flat: torch.Tensor) -> None:
        """Ask the disk for transitions that a kernel is about to read, if they lie in a file and not in memory."""
        self.written_rows().read_ahead(flat)

    def blank(self, count: int) -> TensorDict:
        """Return memory for ``count`` transitions, packed as the rows are, for a kernel to fill."""
        return self.all_rows().blank(count)

    def gather_batches(self, flat: torch.Tensor, size: int) -> list[TensorDict]:
        """Return what :meth:`gather` would for each ``size`` of ``flat``, with one gather for all.

        The batches are parts of one block of fresh memory, which lives as long as any of them.
        """
        return self.written_rows().batches_at_cells(flat, size)

    def skip_rewritten(self, flat: torch.Tensor, stamp: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Return flat rows with -1 for each that was rewritten since its stamp; see :class:`WriteClock`."""
        return self.clock.skip_rewritten(flat, stamp, self.all_rows().shape)

    # -- writing

    def write(self, start: int, data: TensorDictBase, *, single: bool = False) -> None:
        """Write consecutive time steps from ``start`` on, wrapping at the capacity: the way in of :class:`RingWriter`.

        An ``"index"`` in ``data`` is not stored.

        Args:
            start: the first time step, ``0 <= start < T``, not beyond the steps written so far.
            data: ``[n, *lanes]`` transitions, ``1 <= n <= T``.
            single: ``data`` is one time step, ``[*lanes]``.

        Raises:
            SchemaError: ``data`` does not match the rows; nothing has been written.
        """
        data = as_tensordict(data)
        if self.rows is None or self.is_reserved:
            data = data.exclude("index")
        rows, leaves, count = self._admit(data, single)
        self.about_to_write(rows, start, count)
        rows.copy_(start, count, leaves)
        self.clock.advance(start, count, rows.shape, rows.matrix.device)
        self._advance(rows, min(start + count, rows.steps), (start + count - 1) % rows.steps)

    def write_packed(self, start: int, block: torch.Tensor) -> None:
        """Write one time step whose rows are packed as those of this storage are: one copy, and nothing is checked.

        Args:
            start: as for :meth:`write`.
            block: ``[*lanes, row_bytes]`` in bytes, of the layout's carrier dtype.
        """
        rows = self.rows
        if rows is not None and rows.dedup is not None:
            raise RuntimeError("packed rows cannot be written to a storage whose rows share observations: use write")
        if rows is None or self.is_reserved:
            raise RuntimeError("packed rows cannot be written before the first write has fixed the layout")
        self.about_to_write(rows, start, 1)
        rows.matrix.select(0, start).copy_(block)
        self.clock.advance(start, 1, rows.shape, rows.matrix.device)
        self._advance(rows, start + 1, start)

    def set(self, cursor: Any, data: TensorDictBase | Sequence[TensorDictBase], *, set_cursor: bool = True) -> None:
        """Write transitions at ``cursor``.

        Args:
            cursor: an ``int``, ``slice``, integer tensor, array, list or ``range`` along time; or, to replace
                transitions, a boolean mask or a tuple of one index a dim. Of a repeated position the last row stays.
            data: as many transitions; a list of TensorDicts is stacked.
            set_cursor: whether the write may append. It must not leave out a row before those that it appends.

        Raises:
            SchemaError: ``data`` does not match the rows; nothing has been written.
            IndexError: a position is out of range; nothing has been written.
            TypeError: ``data`` is not a TensorDict.
        """
        data = as_tensordict(data)
        with self.lock:  # the buffer's writes hold it already; rows that share entries must be written one at a time
            if isinstance(cursor, tuple) or is_mask(cursor):
                self._replace(cursor, data)
            else:
                self._set_steps(cursor, data, set_cursor)

    def edit(self, change: Callable[[TensorDictBase], Any], region: Any = None) -> None:
        """Let ``change`` set entries of rows that are there, in place. They stay the transitions that they were.

        Args:
            change: is given a TensorDict of the rows, and sets entries of it in place.
            region: an index of a tensor ``[T, *lanes]``, which gives the shape of what ``change`` gets; default: all.

        Raises:
            IndexError: the region is out of range; nothing has been written.

        Cost: a copy of the rows named, there and back; none if all rows are and none of them shares what it holds.
        """
        with self.lock:
            rows = self.written_rows()
            in_place = region is None and rows.dedup is None
            cells = rows.cells_of(slice(None) if region is None else region)
            flat = cells.reshape(-1)
            if not in_place:
                data = rows.at_cells(flat).reshape(cells.shape)
                change(data)
                leaves = rows.layout.collect(data, cells.shape)
            self._announce(flat)
            if in_place:
                change(rows.view())
            else:
                rows.replace_(cells, leaves)
            self._bump_mutation_revision()

    def _replace(self, cursor: Any, data: TensorDictBase) -> None:
        """Write at a mask or at coordinates of rows that are there."""
        rows = self.written_rows()
        cells = rows.cells_of(cursor)
        leaves = rows.layout.collect(data, cells.shape)
        self._announce(cells.reshape(-1))
        rows.replace_(cells, leaves)
        self.clock.note(cells.reshape(-1), 1, self.all_rows().shape)
        self._bump_mutation_revision()

    def _set_steps(self, cursor: Any, data: TensorDictBase, set_cursor: bool) -> None:
        single = isinstance(cursor, int | np.integer) or (isinstance(cursor, torch.Tensor) and not cursor.ndim)
        total = self._max_size_along_dim0(**{"single_data" if single else "batched_data": data})
        live = 0 if self.rows is None else self.written_rows().steps
        steps = as_steps(cursor, total if set_cursor else live)
        refuse_steps(steps, total, live, set_cursor)
        if not single and data.batch_size[:1] != steps.shape:
            raise SchemaError(f"data of batch size {tuple(data.batch_size)} cannot fill {len(steps)} positions")
        rows, leaves, count = self._admit(data, single)
        if self.shared_rows is not None:
            self._announce(rows.cells_at(steps))
        if single or (np.diff(steps) == 1).all():
            rows.copy_(int(steps[0]), count, leaves)
        else:
            rows.scatter_(steps, leaves)
        self._tell_clock(rows, steps)
        if set_cursor:
            self._advance(rows, int(steps.max()) + 1, int(steps[-1]))
        else:
            self._bump_mutation_revision()

    def _tell_clock(self, rows: Rows, steps: np.ndarray) -> None:
        device = rows.matrix.device
        if len(steps) <= rows.steps and (np.diff(steps) % rows.steps == 1).all():
            return self.clock.advance(int(steps[0]), len(steps), rows.shape, device)
        self.clock.note(rows.cells_at(steps), len(steps), rows.shape)

    def _announce(self, cells: torch.Tensor) -> None:
        if self.shared_rows is not None:
            self.shared_rows.journal.begin_at(cells)

    def _admit(self, data: TensorDictBase, single: bool) -> tuple[Rows, list[torch.Tensor], int]:
        """Return the rows, the leaves of transitions that fit them, and the number of time steps.

        The first time, the rows are made to fit.
        """
        if self.rows is None or self.is_reserved:
            self._fix_rows(data, self.ndim - single)
        rows = self.all_rows()
        if single:
            return rows, rows.layout.collect(data, rows.lanes), 1
        lead = data.batch_size[:1] + rows.lanes
        return rows, rows.layout.collect(data, lead), lead[0]

    def _fix_rows(self, data: TensorDictBase, lead_dims: int) -> None:
        """Allocate rows for the first write, and for all that follow; reserved ones that do not do are given back."""
        if data.batch_dims < lead_dims:
            raise SchemaError(
                f"a storage with ndim={self.ndim} takes TensorDicts with {lead_dims} or more batch dims here "
                f"(time, lanes), got batch size {tuple(data.batch_size)}"
            )
        lanes = data.batch_size[1 + lead_dims - self.ndim : lead_dims]
        reserved, layout = self.rows, RowLayout(data, lead_dims)
        dedup = self.dedup_of(layout, data if lead_dims == self.ndim else None)
        if reserved is not None:
            lead = data.batch_size[: lead_dims + 1 - self.ndim] + reserved.lanes
            refuse_unfit(data, reserved.layout.leaves, lead, more=True)
            if layout != reserved.layout or dedup != self.dedup:
                self.release()
                reserved = None
        if reserved is None:
            self._allocate(layout, lanes, data.device, dedup)
        self.is_reserved = False

    def _advance(self, rows: Rows, steps: int, last: int) -> None:
        """Count ``steps`` time steps as written, the newest of this write being ``last``."""
        cells = steps * prod(rows.lanes)
        if cells > self._len_value.value:
            self._len_value.value = cells
        self._last_cursor = last
        self._last_cursor_index_value.value = last
        self._bump_mutation_revision()

    def __repr__(self) -> str:
        if self.rows is None:
            return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, device={self.device}, empty)"
        place = "shared memory" if self.shared else "mapped file" if self.scratch_dir else self.rows.place()
        lines = (
            f"    {leaf.name}: {str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
            + " (shared)" * (leaf.key in self.rows.deduplicated)
            for leaf in self.rows.layout.leaves
        )
        if self.saved_bytes:
            place += f", {sum(self.saved_bytes.values()) / 2**20:,.1f} MiB saved by sharing"
        return "\n".join(
            (
                f"{type(self).__name__}({len(self):,} of {self.max_size:,} rows, shape {tuple(self.rows.shape)}, "
                f"{self.row_bytes} bytes a row, {self.nbytes / 2**20:,.1f} MiB, {place}",
                *lines,
                ")",
            )
        )
