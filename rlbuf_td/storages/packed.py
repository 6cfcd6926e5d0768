"""A storage in which a transition is one row of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data.replay_buffers import LazyTensorStorage

from rlbuf_td.indices import coordinates
from rlbuf_td.sharing.journal import WRITTEN, Journal
from rlbuf_td.sharing.rows import SharedRows
from rlbuf_td.staleness import WriteClock
from rlbuf_td.storages.cursors import as_index, as_steps, is_index, is_key, is_mask, refuse_steps
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.memory import ROWS_FILE, allocate_bytes, map_bytes
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.schema import SchemaError, refuse_unfit

_COUNTERS = ("_len_value", "_mutation_revision_value", "_last_cursor_index_value")
_MADE_ANEW = frozenset(
    (*_COUNTERS, "_rows", "journal", "_live", "_storage", "_total_shape_value", "_sharing", "lock")
)  # by a copy


class PackedStorage(LazyTensorStorage):
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

    A copy, pickled or deep, has rows of its own in RAM or shared memory, never in the file of its original. Sent to a
    spawned process, the storage keeps its rows: both processes read and write the same ones.

    Raises:
        ValueError: an argument is out of range, or two of them exclude each other.
        SchemaError: (on writing) the data does not match the rows; nothing has been written.
        MemoryError: (on the first write) the rows can never fit: the machine has less memory, or their place less room.
        OSError: (on the first write) the disk of ``scratch_dir`` has less room.

    Warns:
        MemoryWarning: (on the first write) less RAM is free than the rows will take once all are written.

    Cost: a gather of ``B`` rows is O(B * row_bytes), one kernel on CUDA; a write touches only its rows.

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
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        scratch_dir: str | Path | None = None,
        shared: bool = False,
    ) -> None:
        if max_size < 1 or max_size != int(max_size):
            raise ValueError(f"max_size must be a whole number, at least 1, got {max_size}")
        if ndim < 1:
            raise ValueError(f"ndim must be at least 1, got {ndim}")
        if scratch_dir is not None and shared:
            raise ValueError("a memory-mapped file is shared already: pass scratch_dir or shared, not both")
        if (scratch_dir is not None or shared) and torch.device("cpu" if device == "auto" else device).type != "cpu":
            raise ValueError(f"scratch_dir and shared need device='cpu', got device={str(device)!r}")
        super().__init__(max_size, device=device, ndim=ndim)
        self.device: torch.device | str
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self.shared = shared
        self._rows: Rows | None = None  # from the first write on
        self._live: Rows | None = None  # those that have been written, as of the last look
        self._is_reserved = False
        self.clock = WriteClock()
        self.lock: Any = RLock()  # what every buffer over this storage takes
        self._sharing: SharedRows | None = None
        self.journal: Any = None  # keeps what a dump in ``scratch_dir`` needs of rows that are about to change
        self._make_counters()

    # -- counters: 64 bits, in memory that a forked or spawned process shares; the buffer's locks order the writes

    def _make_counters(self, length: int = 0, revision: int = 0, last_cursor: int = -1) -> None:
        self._len_value = RawValue("q", length)
        self._mutation_revision_value = RawValue("q", revision)
        self._last_cursor_index_value = RawValue("q", last_cursor)

    @property
    def _len(self) -> int:
        return self._len_value.value

    @_len.setter
    def _len(self, value: int) -> None:
        if "_len_value" in self.__dict__:  # not yet, while TorchRL's constructor runs
            self._len_value.value = value

    def __len__(self) -> int:
        return self._len_value.value

    def _bump_mutation_revision(self) -> None:
        self._mutation_revision_value.value += 1

    # -- memory

    @property
    def layout(self) -> RowLayout | None:
        """What a row holds; ``None`` before the first write."""
        return None if self._rows is None else self._rows.layout

    @property
    def row_bytes(self) -> int:
        """Bytes a row takes, padding included; 0 before the first write."""
        return 0 if self._rows is None else self._rows.layout.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows; 0 before the first write."""
        return 0 if self._rows is None else self._rows.nbytes

    def _init(self, data: TensorDictBase) -> None:
        """Allocate for time steps like ``data`` (which has no time dim); TorchRL's checkpointers call it."""
        self._allocate(RowLayout(data, self.ndim - 1), data.batch_size[: self.ndim - 1], data.device)

    @property
    def lanes(self) -> torch.Size:
        """The dims after time; empty before there are rows."""
        return torch.Size([]) if self._rows is None else self._rows.lanes

    @property
    def is_reserved(self) -> bool:
        """Whether the rows are those of a schema, to which the first write may add keys."""
        return self._is_reserved

    def reserve(self, schema: TensorDictBase) -> None:
        """Allocate, before the first write, for transitions that hold at least the keys of a schema.

        The first write may bring more keys, such as a policy's outputs or a collector's; it then fixes the rows. No
        memory is touched until it does.

        Args:
            schema: a time step, ``[*lanes]``: an example, or what :func:`~rlbuf_td.spaces.schema_of` gives.

        Raises:
            RuntimeError: the rows are there already.
            SchemaError: the schema has too few batch dims, no lanes, or an entry that cannot be packed.
        """
        if self._rows is not None:
            raise RuntimeError("the rows of this storage are there already: reserve them before the first write")
        if schema.batch_dims < self.ndim - 1:
            raise SchemaError(
                f"a storage with ndim={self.ndim} takes a schema of {self.ndim - 1} or more batch dims (lanes), "
                f"got batch size {tuple(schema.batch_size)}"
            )
        device = None if schema.device is None or schema.device.type == "meta" else schema.device
        self._allocate(RowLayout(schema, self.ndim - 1), schema.batch_size[: self.ndim - 1], device)
        self._is_reserved = True

    def _allocate(self, layout: RowLayout, lanes: torch.Size, device: torch.device | None) -> Rows:
        return self._adopt(self._make_rows(layout, lanes, device))

    def _make_rows(self, layout: RowLayout, lanes: torch.Size, device: torch.device | None) -> Rows:
        """Return rows of this capacity, which the storage does not use before :meth:`_adopt`."""
        if self.device != "auto":
            device = self.device
        elif device is None:
            device = torch.device("cpu")
        steps = self._steps(lanes)
        nbytes = steps * prod(lanes) * layout.row_bytes
        with torch.inference_mode(False):  # else rows first written in inference mode could not be written outside it
            if self._sharing is not None and self.scratch_dir is None:
                memory = self._sharing.memory(nbytes)
            else:
                memory = allocate_bytes(
                    nbytes,
                    device,
                    scratch_dir=self.scratch_dir,
                    shared=self.shared,
                    quiet=self._is_reserved,
                    what=f"{steps * prod(lanes):,} rows of {layout.row_bytes:,} bytes take",
                    remedy=_remedy(layout, self.scratch_dir),
                )
            return Rows(layout, memory.view(steps, *lanes, layout.row_bytes))

    def _adopt(self, rows: Rows) -> Rows:
        """Make ``rows`` the rows of this storage, and TorchRL's ``_storage`` a TensorDict of views of them."""
        self._rows, self._live = rows, None
        self.device = rows.matrix.device
        self._storage = rows.view()
        self.max_size = rows.cells
        self.__dict__["_total_shape_value"] = rows.shape
        self.initialized = True
        if self._sharing is not None:
            self._describe(self._sharing, rows)
        return rows

    def map_rows(self, layout: RowLayout, lanes: torch.Size) -> Rows:
        """Return the rows in the file that lies in ``scratch_dir`` already, which :meth:`_adopt` takes into use."""
        if self.scratch_dir is None:
            raise ValueError("a PackedStorage without scratch_dir has no file")
        steps = self._steps(lanes)
        memory = map_bytes(self.scratch_dir, steps * prod(lanes) * layout.row_bytes)
        return Rows(layout, memory.view(steps, *lanes, layout.row_bytes))

    def keep_for_dump(self, start: int, count: int) -> None:
        """Let a dump in ``scratch_dir`` keep time steps from ``start`` on, wrapping, before they are overwritten."""
        if self.journal is not None and self._rows is not None:
            self.journal.keep(start, count, self._rows.steps)

    def _steps(self, lanes: torch.Size) -> int:
        """Return the capacity in time steps of these lanes."""
        if not prod(lanes):
            raise SchemaError(f"cannot store transitions of no lanes: the batch dims after time are {tuple(lanes)}")
        return -(-self.max_size // prod(lanes))

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        """Return the capacity in time steps; before the first write, that for lanes like those of the data."""
        if self._rows is not None:
            return self._rows.steps
        if self.ndim == 1:
            return self.max_size
        single = single_data is not None
        data = _as_tensordict(single_data if single else batched_data)
        return self._steps(data.batch_size[1 - single : self.ndim - single])

    def _all_rows(self) -> Rows:
        if self._rows is None:
            raise RuntimeError("cannot read from a PackedStorage before the first write: its rows have no keys yet")
        return self._rows

    def _written(self) -> Rows:
        """Return the rows that have been written."""
        cells, rows, live = self._len_value.value, self._all_rows(), self._live
        if live is None or live.cells != cells:
            live = self._live = rows.first(cells // prod(rows.lanes))
        return live

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
        rows = self._written()
        if is_key(index):
            return rows.view()[index]
        if isinstance(index, list | range | np.ndarray):
            index = as_index(index)
        if is_mask(index) and index.shape == rows.shape:
            index = index.nonzero(as_tuple=True)
        if is_index(index):
            return rows.at_steps(index.to(self.device, torch.int64))
        if isinstance(index, tuple) and len(index) == self.ndim and all(map(is_index, index)):
            return rows.at_coordinates(tuple(part.to(self.device, torch.int64) for part in index))
        return super().get(index)

    def gather(self, flat: torch.Tensor) -> TensorDict:
        """Return the transitions at flat positions (``t * E + e``): ``[B]`` int64 on this device, not negative."""
        return self._written().at_cells(flat)

    def blank(self, count: int) -> TensorDict:
        """Return memory for ``count`` transitions, packed as the rows are, for a kernel to fill."""
        return self._all_rows().blank(count)

    def gather_batches(self, flat: torch.Tensor, size: int) -> list[TensorDict]:
        """Return what :meth:`gather` would for each ``size`` of ``flat``, with one gather for all.

        The batches are parts of one block of fresh memory, which lives as long as any of them.
        """
        return self._written().batches_at_cells(flat, size)

    def skip_rewritten(self, flat: torch.Tensor, stamp: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Return flat rows with -1 for each that was rewritten since its stamp; see :class:`WriteClock`."""
        return self.clock.skip_rewritten(flat, stamp, self._all_rows().shape)

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
        data = _as_tensordict(data)
        if self._rows is None or self._is_reserved:
            data = data.exclude("index")
        rows, leaves, count = self._admit(data, single)
        self._about_to_write(rows, start, count)
        rows.copy_(start, count, leaves)
        self.clock.advance(start, count, rows.shape, rows.matrix.device)
        self._advance(rows, min(start + count, rows.steps), (start + count - 1) % rows.steps)

    def _about_to_write(self, rows: Rows, start: int, count: int) -> None:
        """Let what must survive a killed process be noted, before time steps from ``start`` on are overwritten."""
        if self._sharing is not None:
            lanes = rows.cells // rows.steps
            self._sharing.journal.begin(start * lanes, count * lanes, self._len_value.value)
        self.keep_for_dump(start, count)

    def write_packed(self, start: int, block: torch.Tensor) -> None:
        """Write one time step whose rows are packed as those of this storage are: one copy, and nothing is checked.

        Args:
            start: as for :meth:`write`.
            block: ``[*lanes, row_bytes]`` in bytes, of the layout's carrier dtype.
        """
        rows = self._rows
        if rows is None or self._is_reserved:
            raise RuntimeError("packed rows cannot be written before the first write has fixed the layout")
        self._about_to_write(rows, start, 1)
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
        data = _as_tensordict(data)
        if isinstance(cursor, tuple) or is_mask(cursor):
            rows = self._written()
            cells = rows.cells_of(cursor)
            leaves = rows.layout.collect(data, cells.shape)
            self.keep_for_dump(0, rows.steps)
            self._announce(cells.reshape(-1))
            rows.replace_(cells, leaves)
            self.clock.note(cells.reshape(-1), 1, self._all_rows().shape)
            return self._bump_mutation_revision()
        single = isinstance(cursor, int | np.integer) or (isinstance(cursor, torch.Tensor) and not cursor.ndim)
        total = self._max_size_along_dim0(**{"single_data" if single else "batched_data": data})
        live = 0 if self._rows is None else self._written().steps
        steps = as_steps(cursor, total if set_cursor else live)
        refuse_steps(steps, total, live, set_cursor)
        if not single and data.batch_size[:1] != steps.shape:
            raise SchemaError(f"data of batch size {tuple(data.batch_size)} cannot fill {len(steps)} positions")
        rows, leaves, count = self._admit(data, single)
        if self._sharing is not None:
            self._announce(rows.cells_at(steps))
        self.keep_for_dump(int(steps.min()), int(steps.max() - steps.min()) + 1)
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
        if self._sharing is not None:
            self._sharing.journal.begin_at(cells)

    def _admit(self, data: TensorDictBase, single: bool) -> tuple[Rows, list[torch.Tensor], int]:
        """Return the rows, the leaves of transitions that fit them, and the number of time steps.

        The first time, the rows are made to fit.
        """
        rows = self._rows
        if rows is None or self._is_reserved:
            rows = self._fix_rows(data, self.ndim - single)
        if single:
            return rows, rows.layout.collect(data, rows.lanes), 1
        lead = data.batch_size[:1] + rows.lanes
        return rows, rows.layout.collect(data, lead), lead[0]

    def _fix_rows(self, data: TensorDictBase, lead_dims: int) -> Rows:
        """Return rows for the first write, and for all that follow."""
        if data.batch_dims < lead_dims:
            raise SchemaError(
                f"a storage with ndim={self.ndim} takes TensorDicts with {lead_dims} or more batch dims here "
                f"(time, lanes), got batch size {tuple(data.batch_size)}"
            )
        lanes = data.batch_size[1 + lead_dims - self.ndim : lead_dims]
        reserved, layout = self._rows, RowLayout(data, lead_dims)
        if reserved is not None:
            lead = data.batch_size[: lead_dims + 1 - self.ndim] + reserved.lanes
            refuse_unfit(data, reserved.layout.leaves, lead, more=True)
            if layout != reserved.layout:
                self._release()
                reserved = None
        rows = reserved or self._allocate(layout, lanes, data.device)
        self._is_reserved = False
        return rows

    def _release(self) -> None:
        """Give back rows that have been reserved, and not written."""
        self._rows = self._live = self._storage = None
        if self.scratch_dir is not None:
            (self.scratch_dir / ROWS_FILE).unlink()

    def _advance(self, rows: Rows, steps: int, last: int) -> None:
        """Count ``steps`` time steps as written, the newest of this write being ``last``."""
        cells = steps * prod(rows.lanes)
        if cells > self._len_value.value:
            self._len_value.value = cells
        self._last_cursor = last
        self._last_cursor_index_value.value = last
        self._bump_mutation_revision()

    def _empty(self) -> None:
        self._len_value.value = 0
        if self._rows is not None:
            self.clock.forget(self._rows.steps)
        self._bump_mutation_revision()

    # -- processes

    def share_memory_(self) -> PackedStorage:
        """Let processes that are forked from now on, or spawned and sent this storage, use the same rows.

        Rows in RAM move to shared memory; those of a mapped file stay where they are. It may be done before the first
        write: whichever process writes first then allocates the rows. :attr:`lock` excludes the others, and a process
        that dies in the middle of a write has written nothing.

        Cost: a copy of the rows. From then on, each write to a full storage copies the rows that it overwrites.

        Raises:
            ValueError: the rows are on a CUDA device.
        """
        if self._sharing is not None:
            return self
        if torch.device("cpu" if self.device == "auto" else self.device).type != "cpu":
            raise ValueError(
                f"rows on {self.device} cannot be shared by several processes: keep them on the CPU, and move batches "
                "(a transform does), or let one process write"
            )
        with self.lock:
            self.device = torch.device("cpu")
            sharing = SharedRows(self.lock, self._find_rows, self._repair)
            sharing.journal.watch(self._len_value, self._last_cursor_index_value, *self.clock.counters())
            self._sharing, rows = sharing, self._rows
            self._is_reserved = False  # no process may put other rows in their place
            if rows is not None and self.scratch_dir is None:
                memory = sharing.memory(rows.nbytes).view(*rows.shape, rows.layout.row_bytes)
                self._adopt(Rows(rows.layout, memory)).matrix.copy_(rows.matrix)
            elif rows is not None:
                self._describe(sharing, rows)
            self.shared = self.scratch_dir is None
            self.lock = sharing.lock
        return self

    @property
    def is_shared(self) -> bool:
        """Whether several processes may use the rows: see :meth:`share_memory_`."""
        return self._sharing is not None

    def undo_also(self, *counters: Any) -> None:
        """Put these counters (objects with a ``value``) back, too, where the write of a dead process is undone."""
        if self._sharing is not None:
            self._sharing.journal.watch(*counters)

    def _describe(self, sharing: SharedRows, rows: Rows) -> None:
        written = sharing.place(rows.flat, {"layout": rows.layout.state(), "shape": list(rows.shape)})
        self.clock.keep_in(written)

    def _find_rows(self) -> None:
        """Map the rows that another process has made, if there are any."""
        found = None if self._sharing is None else self._sharing.description()
        if found is not None and self._sharing is not None:
            layout, shape = RowLayout.from_state(found["layout"]), torch.Size(found["shape"])
            nbytes = shape.numel() * layout.row_bytes
            folder = self.scratch_dir
            memory = self._sharing.memory(nbytes) if folder is None else map_bytes(folder, nbytes)
            self._adopt(Rows(layout, memory.view(*shape, layout.row_bytes)))

    def _repair(self, journal: Journal) -> None:
        """Put right what depends on the rows, after a process has died at work."""
        for listener in self._attached_entities:
            repair = getattr(listener, "repair", None)
            if repair is not None:
                repair()
        self._bump_mutation_revision()
        if journal.phase != WRITTEN:
            return
        start, count = journal.range
        for listener in self._attached_entities:
            if start < 0 or not hasattr(listener, "mark_range"):
                rows = self._all_rows()
                cells = journal.cells if start < 0 else (start + torch.arange(count)) % rows.cells
                index = coordinates(cells, self)
                listener.mark_update(torch.stack(index, -1) if isinstance(index, tuple) else index)
                continue
            head = min(count, self._all_rows().cells - start)
            listener.mark_range(start, head)
            if head < count:
                listener.mark_range(0, count - head)

    def _make_init_directory(self) -> None:
        """Do nothing: TorchRL's collectors call it to let a worker write first, which shared rows see to themselves."""

    # -- state

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            kept = {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}
            saved = self._mutation_revision, self.state_dict()
            return kept | {"_rng": None, "scratch_dir": None, "initialized": False, "_saved": saved}
        state = self.__dict__ | {"_rng": None, "_storage": None, "_live": None}
        if self._sharing is not None:
            return state | {"_rows": None, "lock": None}
        if self._rows is None:
            raise RuntimeError(
                "a PackedStorage cannot be sent to another process before its first write, which allocates the rows: "
                "the processes would not share them. Write one batch first, or call share_memory_()."
            )
        self._is_reserved = False  # the rows are shared from here on: no process may put others in their place
        state |= {"lock": None, "_is_reserved": False, "journal": None}
        if self.scratch_dir is not None:  # torch cannot send a mapped file: the other process maps it, too
            state |= {"_rows": None, "_mapped": (self._rows.layout, self._rows.shape)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved, mapped = state.pop("_saved", None), state.pop("_mapped", None)
        self.__dict__.update(state)
        if saved is not None:  # a copy: rows and counters of its own
            self._rows = self._live = self._storage = self._sharing = self.journal = None
            self.lock = RLock()
            self.clock = WriteClock()
            self._make_counters()
            revision, rows = saved
            self.load_state_dict(rows)
            self._mutation_revision_value.value = revision  # what was read from the original holds for the copy
        elif self._sharing is not None:
            self.lock = self._sharing.lock
            self._find_rows()
        elif mapped is not None:  # another process: the same rows
            layout, shape = mapped
            memory = map_bytes(state["scratch_dir"], shape.numel() * layout.row_bytes)
            self.lock = RLock()
            self._adopt(Rows(layout, memory.view(*shape, layout.row_bytes)))
        else:
            self.lock = RLock()
            self._adopt(state["_rows"])

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the rows written so far, with their layout, as tensors, numbers and strings."""
        state = self.snapshot()
        return state | {"rows": state["rows"].clone()} if "rows" in state else state

    def snapshot(self) -> dict[str, Any]:
        """Return :meth:`state_dict` with the rows themselves rather than a copy."""
        if self._rows is None:
            return {"_len": 0}
        return {
            "_len": len(self),
            "full": self._is_full,
            "reserved": self._is_reserved,
            "last_cursor": self._last_cursor_index_value.value,
            "layout": self._rows.layout.state(),
            "rows": self._written().matrix,
            "clock": self.clock.state_dict() | {"capacity": self._rows.cells},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content by what :meth:`state_dict` returned.

        Raises:
            SchemaError: the saved rows differ in keys, dtypes or shapes; this storage stays as it was.
            ValueError: the capacity or the lanes do not fit the saved rows; this storage stays as it was.
        """
        reserved = state_dict.get("reserved", False)
        if "layout" not in state_dict or (reserved and self._rows is not None):  # saved before the first write
            return self._empty()
        matrix = state_dict["rows"]
        layout, lanes = self.admit_state(state_dict, matrix.shape[1:-1])
        if self._rows is not None and self._rows.layout != layout:
            self._release()
        rows = self._rows or self._allocate(layout, lanes, matrix.device)
        self.keep_for_dump(0, rows.steps)
        rows.matrix[: matrix.shape[0]].copy_(matrix)
        self.restore_counters(state_dict)

    def admit_state(self, state_dict: dict[str, Any], lanes: torch.Size) -> tuple[RowLayout, torch.Size]:
        """Return the layout and the lanes of saved rows that this storage can take in; changes nothing.

        Raises:
            SchemaError: the saved rows differ in keys, dtypes or shapes.
            ValueError: the capacity or the lanes do not fit the saved rows.
        """
        layout = RowLayout.from_state(state_dict["layout"])
        if self._rows is not None and not self._takes(layout):
            raise SchemaError("the saved rows hold other keys, dtypes or shapes than those of this storage")
        if len(lanes) != self.ndim - 1 or (self._rows is not None and lanes != self._rows.lanes):
            own = tuple(self._rows.lanes) if self._rows is not None else f"of a storage with ndim={self.ndim}"
            raise ValueError(f"saved rows of lanes {tuple(lanes)} do not fit lanes {own}")
        capacity = self._steps(lanes) * prod(lanes)
        if state_dict["_len"] > capacity or (state_dict["full"] and state_dict["_len"] != capacity):
            raise ValueError(
                f"{state_dict['_len']} rows of a {'full ' if state_dict['full'] else ''}buffer do not fit "
                f"a capacity of {capacity}"
            )
        return layout, lanes

    def restore_counters(self, state_dict: dict[str, Any]) -> None:
        """Count the rows that a loader has put in place as :meth:`state_dict` did."""
        self._is_reserved = state_dict.get("reserved", False)
        clock, rows = state_dict.get("clock"), self._all_rows()
        if clock is not None and clock["capacity"] == rows.cells:
            self.clock.load_state_dict(clock, rows.steps, state_dict["last_cursor"])
        else:
            self.clock.forget(rows.steps, state_dict["last_cursor"])
        self._len_value.value = state_dict["_len"]
        self._last_cursor = self._last_cursor_index_value.value = state_dict["last_cursor"]
        self._bump_mutation_revision()

    def _takes(self, layout: RowLayout) -> bool:
        """Return whether rows of this layout may be loaded: where they are only reserved, it may hold more."""
        ours = self._rows.layout if self._rows is not None else layout
        return layout == ours or (self._is_reserved and set(ours.leaves) <= set(layout.leaves))

    def __repr__(self) -> str:
        if self._rows is None:
            return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, device={self.device}, empty)"
        place = "shared memory" if self.shared else "mapped file" if self.scratch_dir else str(self.device)
        lines = (
            f"    {leaf.name}: {str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
            for leaf in self._rows.layout.leaves
        )
        return "\n".join(
            (
                f"{type(self).__name__}({len(self):,} of {self.max_size:,} rows, shape {tuple(self._rows.shape)}, "
                f"{self.row_bytes} bytes a row, {self.nbytes / 2**20:,.1f} MiB, {place}",
                *lines,
                ")",
            )
        )


def _remedy(layout: RowLayout, scratch_dir: Path | None) -> str:
    """Return what to do if the rows do not fit."""
    largest = max(layout.leaves, key=lambda leaf: leaf.nbytes)
    elsewhere = "another scratch_dir" if scratch_dir else "scratch_dir=..., which keeps the rows in a file"
    return (
        f"Take a smaller max_size, or {elsewhere}; the largest key is {largest.name}, {largest.nbytes:,} bytes a row. "
        "rlbuf_td.plan(...) tells more."
    )


def _as_tensordict(data: Any) -> TensorDictBase:
    """Return the data of a write as one TensorDict.

    Raises:
        TypeError: it is none.
    """
    if type(data) is TensorDict:
        return data
    if isinstance(data, (list, tuple)) and data and all(map(is_tensor_collection, data)):
        data = torch.stack(list(data))
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"PackedStorage stores TensorDicts, got {type(data).__name__}: wrap it in a TensorDict, "
            "or use torchrl.data.LazyTensorStorage, which takes tensors, tensorclasses and pytrees"
        )
    return data
