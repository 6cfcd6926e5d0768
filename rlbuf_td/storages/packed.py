"""A storage in which a transition is one row of bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data.replay_buffers import LazyTensorStorage

from rlbuf_td.storages import allocate, state, writes
from rlbuf_td.storages.dedup import DedupLayout, DedupOptions
from rlbuf_td.storages.interrupts import held_back
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.schema import Leaf
from rlbuf_td.storages.shared.memory import SharedNumbers
from rlbuf_td.storages.shared.rows import SharedRows, share
from rlbuf_td.storages.write_clock import WriteClock
from rlbuf_td.storages.writes import as_index, as_tensordict, is_index, is_key, is_mask


class PackedStorage(LazyTensorStorage):
    """A TensorDict storage with one row of bytes per transition: a batch is one gather for any number of keys.

    The first write fixes the schema (keys, dtypes, shapes, nesting) and allocates the rows; RAM is committed as rows
    are written. A sampled batch is fresh memory; as in TorchRL, an ``int`` or a ``slice`` gives a view instead.

    Args:
        max_size: capacity in transitions. With ``ndim > 1`` it is rounded up to whole time steps of all lanes.
        device: where the rows live: ``"cpu"``, a CUDA device, or ``"auto"`` (that of the first write).
        ndim: number of leading dims that count as transitions: 1 for ``[T]``, 2 for ``[T, E]`` (time, lanes).
        scratch_dir: a folder for a memory-mapped file of the rows (CPU only); an existing file is never overwritten.
        shared: put the rows into shared memory (CPU only), see :meth:`ReplayBuffer.share`.
        offload: keep the rows of a CUDA device in page-locked RAM, which the device reads and writes over the bus, so
            that the buffer may exceed the device's memory. The RAM is committed at once. (Linux; not with
            ``share_next`` or ``frames``.)
        share_next: store an observation once if the next observation of a row and the observation of the following row
            in the same lane have equal bytes. Where they differ, as at the end of a trajectory, both are stored.
            ``True``: all keys at the root that also exist under ``"next"``. A list: these keys. ``"auto"``: the keys
            that repeat in at least half of the first write's rows and save memory; if that write is one time step, all
            keys of 16 bytes or more, each compared by itself. Keys of less than 8 bytes, flags and rewards are always
            stored in the row. Reading a column, a slice or one time step copies deduplicated keys. To edit them, use
            the methods of :class:`ReplayBuffer`; those of TorchRL's own buffers change only the copy.
        frames: the number of frames in each stack, by key, ``{"pixels": 4}``, or with the dim of the frames (default
            0), ``{"pixels": (4, -1)}``; the newest frame is last. A row stores only its newest frame if the others
            equal the last frames of the previous row, else the whole stack. The same holds for the next observation.
        existsok: replace an existing file of rows in ``scratch_dir``; processes that use the old file keep it.
        auto_cleanup: delete the file, and its folder if empty, when the storage is deleted or the process ends.
            TorchRL's ``LazyMemmapStorage(n)`` is ``PackedStorage(n, scratch_dir=mkdtemp(), auto_cleanup=True)``.
        shared_init: share the rows from the start, see :meth:`share_memory_`; the first writer allocates them.
        cleanup_memmap: ``False`` is refused with ``shared_init``, which makes no temporary files; otherwise no effect.
        compilable: refused with sharing, as in TorchRL. ``torch.compile`` breaks its graph at every call of a storage.
        consolidated: no effect; the rows always lie in one block of memory.

    A copy, pickled or deep, has its own rows, in RAM if the original's are in a file. A CPU storage that is sent to a
    spawned process keeps its rows: both processes read and write the same ones.

    Raises:
        ValueError: an argument is out of range, or two arguments exclude each other.
        SchemaError: (on writing) the data does not match the rows; nothing is written.
        MemoryError: (on the first write) the rows can never fit; with ``offload``, RAM is not free or cannot be locked.
        OSError: (on the first write) the disk of ``scratch_dir`` has too little room.

    Warns:
        MemoryWarning: (on the first write) a full buffer will exceed the free RAM.

    Cost: a gather of ``B`` rows is O(B * row_bytes), one kernel on CUDA; a write of ``n`` rows is O(n * row_bytes).
    ``python tests/benchmarks/memory.py`` measures the savings and the cost of deduplicated observations.

    Differs from TorchRL's ``LazyTensorStorage``: a missing or unknown key is an error, and it only accepts TensorDicts
    of tensors.

    Example:
        >>> from tensordict import TensorDict
        >>> storage = PackedStorage(1000)
        >>> storage.set(range(2), TensorDict({"observation": torch.ones(2, 3), "done": torch.zeros(2, 1).bool()}, [2]))
        >>> storage.get(torch.tensor([1, 1]))["observation"].sum()
        tensor(6.)
        >>> storage["observation"].shape, storage.row_bytes
        (torch.Size([2, 3]), 16)

        Each observation stored once:

        >>> storage, seen = PackedStorage(1000, share_next=True), torch.rand(1001, 17)
        >>> rows = TensorDict({"observation": seen[:-1], "next": {"observation": seen[1:]}}, [1000])
        >>> storage.set(range(1000), rows)
        >>> storage.row_bytes, storage.nbytes / 1000
        (136, 76.068)
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
        existsok: bool = False,
        auto_cleanup: bool | None = None,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
        compilable: bool = False,
        consolidated: bool = False,
    ) -> None:
        self.dedup_options = DedupOptions.of(share_next, frames)
        allocate.refuse_arguments(max_size, ndim, device, scratch_dir, shared, offload, bool(self.dedup_options))
        allocate.refuse_init(shared_init, cleanup_memmap, compilable, shared, device)
        super().__init__(max_size, device=device, ndim=ndim)
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self.existsok, self.auto_cleanup = existsok, bool(auto_cleanup)
        self.shared, self.offload = shared, offload
        self.rows: Rows | None = None  # from the first write on
        self._live: Rows | None = None  # the written rows, cached by the last read
        self.is_reserved = False  # whether rows were allocated for a schema; the first write may add keys
        self.shared_rows: SharedRows | None = None
        self.clock = WriteClock()
        self.process = os.getpid()  # the process that created this storage; forked ones have their own counters
        self.lock: Any = RLock()  # taken by every buffer over this storage
        self.make_counters()
        if shared_init or (self.dedup_options and shared):
            self.share_memory_()

    # -- counters: 64 bits, per process until the rows are shared; the buffer's locks serialize writes

    def make_counters(self) -> None:
        """Create the counters of a new storage, which TorchRL's constructor also sets."""
        self.numbers = SharedNumbers("q", [0, 0, -1])  # rows written, revision, last written time step
        self._len_value, self._mutation_revision_value, self._last_cursor_index_value = self.numbers.counters()

    @property
    def _len(self) -> int:
        return self._len_value.value

    @_len.setter
    def _len(self, value: int) -> None:
        if "_len_value" in self.__dict__:  # absent while TorchRL's constructor runs
            self._len_value.value = value

    def __len__(self) -> int:
        return self.numbers.values[0]

    def _bump_mutation_revision(self) -> None:
        self._mutation_revision_value.value += 1

    # TorchRL also sets this attribute; the counters replace it.
    _last_cursor = property(lambda self: self._last_cursor_index, lambda self, cursor: None)

    def count_written(self, rows: Rows, steps: int, last: int) -> None:
        """Count the first ``steps`` time steps as written; ``last`` is the newest one of this write."""
        self._len_value.value = max(self._len_value.value, steps * prod(rows.lanes))
        self._last_cursor_index_value.value = last
        self._mutation_revision_value.value += 1

    # -- properties

    @property
    def layout(self) -> RowLayout | None:
        """The layout of a row; ``None`` before the first write."""
        return None if self.rows is None else self.rows.layout

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row in a batch, padding included; 0 before the first write."""
        return 0 if self.rows is None else self.rows.layout.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and of the observations that are stored once; 0 before the first write."""
        return 0 if self.rows is None else self.rows.nbytes

    @property
    def saved_bytes(self) -> dict[tuple[str, ...], int]:
        """Bytes saved so far by storing observations or frames once, by key at the root."""
        return {} if self.rows is None else self.written_rows().saved_bytes()

    @property
    def dedup(self) -> DedupLayout | None:
        """The layout of observations that are stored once; ``None`` if there are none."""
        return None if self.rows is None else self.rows.dedup

    @property
    def deduplicated(self) -> Mapping[tuple[str, ...], Leaf]:
        """The leaves that are stored once, by key; empty before the first write."""
        return {} if self.dedup is None else self.dedup.deduplicated

    @property
    def lanes(self) -> torch.Size:
        """The dims after time; empty before the rows are allocated."""
        return torch.Size([]) if self.rows is None else self.rows.lanes

    def all_rows(self) -> Rows:
        """Return all allocated rows; RuntimeError before the first write."""
        if self.rows is None:
            raise RuntimeError("cannot read from a PackedStorage before the first write: its rows have no keys yet")
        return self.rows

    def written_rows(self) -> Rows:
        """Return the rows written so far, as a view."""
        cells, rows, live = self.numbers.values[0], self.rows, self._live
        if live is None or live.cells != cells:
            rows = self.all_rows()
            live = self._live = rows.first(cells // prod(rows.lanes))
        return live

    # -- reading

    def get(self, index: Any) -> Any:
        """Return the transitions at ``index``, or one column of all of them.

        Args:
            index: a key, an ``int`` or a ``slice`` along time gives a view. A tensor, list, ``range`` or array of
                integers of any shape, a boolean mask, or a tuple of one index per dim gives fresh memory.

        Raises:
            RuntimeError: nothing has been written yet.
            IndexError: an index is out of range of the written rows.
            KeyError: no such key.
        """
        rows = self.written_rows()
        if is_key(index):
            return rows.column((index,) if isinstance(index, str) else index)
        if isinstance(index, list | range | np.ndarray):
            index = as_index(index)
        if is_mask(index) and index.shape == rows.shape:
            index = index.nonzero(as_tuple=True)
        if is_index(index):
            return rows.at_steps(index.to(self.device, torch.int64))
        if isinstance(index, tuple) and len(index) == self.ndim and all(map(is_index, index)):
            return rows.at_coordinates(tuple(part.to(self.device, torch.int64) for part in index))
        return rows.at_region(index)

    def gather(self, flat: torch.Tensor) -> TensorDict:
        """Return the transitions at flat positions (``t * E + e``): ``[B]`` int64 on this device, not negative."""
        return self.written_rows().at_cells(flat)

    # -- writing

    @held_back
    def write(self, start: int, data: TensorDictBase, *, single: bool = False) -> None:
        """Write ``[n, *lanes]`` transitions (``single``: ``[*lanes]``) from time step ``start`` on; wraps at the end.

        ``start`` is at most the number of steps written so far; ``1 <= n <= T``. An entry ``"index"`` is not stored. If
        the data does not match the rows, this raises a ``SchemaError`` and writes nothing.
        """
        rows, leaves, count = writes.admit(self, data, single, drop_index=True)
        writes.begin(self, start, count)
        rows.copy_(start, count, leaves)
        self.clock.advance(start, count, rows.shape, rows.matrix.device)
        self.count_written(rows, min(start + count, rows.steps), (start + count - 1) % rows.steps)

    def set(self, cursor: Any, data: TensorDictBase | Sequence[TensorDictBase], *, set_cursor: bool = True) -> None:
        """Write transitions at ``cursor``.

        Args:
            cursor: an ``int``, ``slice``, integer tensor, array, list or ``range`` along time; or, to replace
                transitions, a boolean mask or a tuple of one index per dim. If positions repeat, the last row counts.
            data: the same number of transitions; a list of TensorDicts is stacked.
            set_cursor: whether the write may append rows; they must leave no gap.

        Raises:
            SchemaError: ``data`` does not match the rows; nothing has been written.
            IndexError: a position is out of range; nothing has been written.
            TypeError: ``data`` is not a TensorDict.
        """
        data = as_tensordict(data)
        with self.lock, held_back:  # writes of a buffer already hold the lock
            if isinstance(cursor, tuple) or is_mask(cursor):
                writes.replace(self, cursor, data)
                set_cursor = False
            else:
                writes.set_steps(self, cursor, data, set_cursor)
            if not set_cursor:  # otherwise they are already counted
                self._bump_mutation_revision()

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace the transitions at an index; if the index is a key, replace that entry of all transitions."""
        if is_key(index):
            self.edit(lambda data: data.set_(index, value))
        else:
            self.set(index, value, set_cursor=False)

    edit = writes.edit

    # -- memory

    reserve = allocate.reserve

    def _init(self, data: TensorDictBase) -> None:
        """Allocate rows for time steps like ``data``, which has no time dim; TorchRL's checkpointers call this."""
        writes.fix_rows(self, data, self.ndim - 1)

    def adopt(self, rows: Rows) -> None:
        """Use ``rows`` from now on; TorchRL's attribute ``_storage`` becomes a TensorDict of views of them."""
        self.rows, self._live = rows, None
        self.device = rows.matrix.device
        self._storage = rows.view()
        self.max_size = rows.cells
        self.__dict__["_total_shape_value"] = rows.shape
        self.initialized = True
        if self.shared_rows is not None:
            self.clock.keep_in(self.shared_rows.place(rows))

    release = allocate.release

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        """Return the capacity in time steps; before the first write, the capacity for the lanes of the data."""
        if self.rows is not None:
            return self.rows.steps
        if self.ndim == 1:
            return self.max_size
        single = single_data is not None
        data = as_tensordict(single_data if single else batched_data)
        return allocate.steps_for(self, data.batch_size[1 - single : self.ndim - single])

    @held_back
    def _empty(self) -> None:
        if self.rows is not None:
            if self.dedup is not None:
                writes.begin(self)
            self.rows.forget()
            self.clock.forget(self.rows.steps)
        self._len_value.value = 0
        self._bump_mutation_revision()

    # -- several processes

    share_memory_ = share

    def _make_init_directory(self) -> None:
        """Do nothing: TorchRL's collectors call it so that one worker writes first, which shared rows do not need."""

    # -- state

    state_dict = state.state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content by a result of :meth:`state_dict`.

        Unfinished trajectories with ids end with the load, because new collectors reuse the ids.

        Raises:
            SchemaError: the saved rows differ in keys, dtypes or shapes; nothing has changed.
            ValueError: capacity or lanes do not fit, or the state is of another kind of storage; nothing has changed.
        """
        state.load(self, state_dict)
        state.end_trajectories(self)

    def dumps(self, path: str | Path) -> None:
        """Save the content to a folder with TorchRL's checkpointer."""
        super().dumps(path)
        state.save_cursor(self, path)

    def loads(self, path: str | Path) -> None:
        """Replace the content by a dump of :meth:`dumps`; open trajectories end as in :meth:`load_state_dict`."""
        super().loads(path)
        state.load_cursor(self, path)
        state.end_trajectories(self)

    snapshot = state.snapshot
    restore_counters = state.restore_counters
    __getstate__ = state.pickled
    __setstate__ = state.unpickle
    __repr__ = state.describe
