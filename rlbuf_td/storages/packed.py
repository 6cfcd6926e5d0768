"""A storage in which a transition is one row of bytes."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from pickle import UnpicklingError
from threading import RLock
from types import EllipsisType, NoneType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer

from rlbuf_td.kernels.dispatch import (
    OFF,
    backend_of,
    import_kernels,
    untraced,
)
from rlbuf_td.kernels.host_memory import (
    address_of,
    alias_of,
    in_dispatch_mode,
)
from rlbuf_td.kernels.serials import (
    EPISODES_STALE,
    REVISION,
    ROWS_WRITTEN,
    UNCOUNTED,
)
from rlbuf_td.storages.checks import State, state_of, usable_device, whole
from rlbuf_td.storages.dedup import DedupLayout, DedupOptions
from rlbuf_td.storages.episodes import (
    EpisodeKeys,
    Episodes,
    StorageKeys,
    refuse_inner,
)
from rlbuf_td.storages.indexing import coordinates, flat_rows, written_rows
from rlbuf_td.storages.keys import as_tuple, is_key
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.listeners import (
    Completes,
    Listener,
    Listeners,
    Recovers,
)
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.memory import (
    ROWS_FILE,
    HeadFile,
    SharedFile,
    delete_rows_file,
)
from rlbuf_td.storages.memory_budget import SHARED, require_room
from rlbuf_td.storages.processes import SharedRows, shape_in_folder, watched
from rlbuf_td.storages.ring import Ring
from rlbuf_td.storages.row_class import RowClass, unwrap, wrap
from rlbuf_td.storages.rows import Rows, last_of_each
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.rows.form import RowsForm
from rlbuf_td.storages.saved import SavedRows
from rlbuf_td.storages.schema import (
    Leaf,
    SchemaError,
    kind,
    refuse_index,
    refuse_other_index,
    refuse_unfit,
    show_key,
)
from rlbuf_td.storages.torchrl_parts import listeners_of, parts_of, take_other_rows
from rlbuf_td.storages.write_plan import (
    CompiledWrites,
    TorchWrites,
    WritePlan,
    refuse_lanes,
    unwritable,
)
from rlbuf_td.storages.writes import (
    TakenLane,
    Write,
    as_lanes,
    as_steps,
    is_mask,
    refuse_shape,
    same_bytes,
    stacked,
    wrapping,
)

if TYPE_CHECKING:
    from typing_extensions import Self


_PARTS = (
    "Priorities and trajectories of a shared buffer take",
    "Mount a larger /dev/shm (docker run --shm-size=...), or use a smaller max_size, or UniformSampler.",
)
_STATE_FILE = "storage.pt"
_ONE_STEP = torch.Size([])  # the batch size of data without a dim for time
_DRAWN = "of TorchRL's samplers, all but RandomSampler draw such rows: use a MinibatchSampler, ProportionalSampler, ..."
# what an index has whose rows are read as views
_OF_VIEWS = int, np.integer, slice, EllipsisType, NoneType
_OF_ROWS = "_ring", "episodes", "rows", "live", "_total_shape_value"
_NOT_COPIED = frozenset((*_OF_ROWS, "shared_rows", "lock", "write_plan", "_clean_up"))


class PackedStorage(LazyTensorStorage):
    """A TensorDict storage that keeps each transition as one row of bytes.

    The first write fixes the schema (keys, dtypes, shapes, nesting) and allocates the
    rows. Sampled batches are copies. On the CPU, up to ``torch.get_num_threads()``
    threads copy a batch of 2 MiB or more while that saves time. As in TorchRL,
    ``storage[i]`` and ``storage[i:j]`` are views, except of deduplicated keys. A view
    whose memory is moved (``share_memory_``, a queue to another process) becomes a
    copy; the rows stay in place.

    Args:
        max_size: capacity in transitions. With ``ndim > 1``, the capacity is rounded up
            to whole time steps.
        device: device of the rows: ``"cpu"``, a CUDA device, or ``"auto"``, that of the
            first data.
        ndim: number of leading dims that index transitions: 1 for ``[T]``, 2 for
            ``[T, E]`` (time, lanes).
        lanes: E, with ``ndim=2``; by default, the first write of whole time steps, or
            :meth:`reserve`, tells it.
        scratch_dir: folder for a memory-mapped file of the rows (CPU only).
        shared: call :meth:`share_memory_` in the constructor (CPU only); the first
            process that writes allocates the rows, in shared memory or in
            ``scratch_dir``. On Linux, the size of ``/dev/shm`` does not limit the rows.
            The attribute of this name says whether other processes may use the rows.
        share_next: store an observation once if the next observation of a row and the
            observation of the following row in the same lane have equal bytes. ``True``
            deduplicates all keys at the root that also exist under ``"next"``; a list
            names the keys. Keys of less than 8 bytes, done flags, rewards and
            trajectory ids are never deduplicated. Reading a column, a slice or one time
            step copies deduplicated keys. These keys cannot be edited, also not by
            replacing rows, ``storage[i] = row``; they need rows on the CPU, and a
            writer that writes one time step after another.
        frames: a dict from a key to the number of frames in its stack,
            ``{"pixels": 4}``. A pair also gives the dim of the frames,
            ``{"pixels": (4, -1)}`` (default: 0). The newest frame is last. A row stores
            only its newest frame if its other frames equal the last frames of the
            previous row; otherwise all frames are stored.
        existsok: replace an existing file of rows in ``scratch_dir``; by default, an
            existing file is an error.
        auto_cleanup: delete the file, and its folder if empty, when the storage is
            deleted or the process ends.
            ``PackedStorage(n, scratch_dir=mkdtemp(), auto_cleanup=True)`` replaces
            TorchRL's ``LazyMemmapStorage(n)``.
        reopen: continue the rows that an earlier process has left in ``scratch_dir``;
            see below.
        shared_init: TorchRL's name of ``shared``.
        cleanup_memmap, compilable, consolidated: no effect; TorchRL's storages take
            them. ``torch.compile`` breaks its graph at every call of a storage.

    With ``reopen=True``, a second file tells which rows are stored. After a crash or a
    kill of the process, a storage made with the same arguments has all rows in their
    order, and the newest trajectory of each lane has ended. Of a write that was
    interrupted, the new rows are missing, and those that they were about to replace may
    be gone. A loss of power may lose more: save dumps for that. The folder is locked
    until the storage and its buffers are deleted, :meth:`ReplayBuffer.close`, or the
    end of the process. A :class:`ReplayBuffer` continues writing with a
    :class:`RingWriter`, also its count of writes, and keeps its priorities in a file,
    ``priorities.bin``. Rows that are not in this file get the priority of new rows,
    with a warning. The second file takes 8 bytes per row, priorities 16 bytes per row.
    Reopening is O(1), with priorities O(N).

    Forked processes may write to rows in a file, reopened or not, only if these are
    shared.

    A pickled or deep copy has its own rows, in RAM if the original's rows are in a
    file. A CPU storage that is sent to a spawned process shares its rows with that
    process.

    Raises:
        ValueError: an argument is out of range, or two arguments exclude each other.
        RuntimeError: ``device`` is a CUDA device that this machine lacks.
        SchemaError: (on writing) the data does not match the rows, or deduplicated rows
            would be edited; nothing is written.
        MemoryError: (on the first write) the rows need more than the total RAM, or, on
            another device, more than the free memory.
        OSError: (on the first write) the disk of ``scratch_dir`` has too little room;
            nothing is written.

    With ``reopen``, the constructor raises a RuntimeError if the rows are open in a
    living process, a FileExistsError if ``scratch_dir`` holds rows without that file,
    and a ValueError if the file is damaged, if the rows have another capacity or other
    lanes, or if ``existsok``, ``auto_cleanup``, ``share_next`` or ``frames`` is given
    too. Nothing is lost then.

    Warns:
        MemoryWarning: (on the first write) a full buffer will exceed the free RAM.

    Cost: a gather of ``B`` rows is O(B * row_bytes), a write of ``n`` rows O(n *
    row_bytes). On CUDA, a gather is one kernel.

    With ``ndim=2``, lanes may advance alone, see :meth:`ReplayBuffer.lane`. Cells that
    a shorter lane has not written yet, or whose row a killed write was about to
    replace, are *holes*: reads and edits of them raise an IndexError; columns, and with
    ``ndim=2`` time steps, have zeros there (deduplicated keys: any values).
    :meth:`ReplayBuffer.chronological` skips them. While lanes stand at unlike steps,
    :meth:`set` of new time steps raises a RuntimeError. Of TorchRL's samplers, only
    ``RandomSampler`` draws from rows with holes: replace ``SamplerWithoutReplacement``
    by :class:`MinibatchSampler`, ``PrioritizedSampler`` by
    :class:`ProportionalSampler`, and ``SliceSampler`` by
    ``SequenceSampler(UniformSampler(), n, boundary="strict")``.

    Rows may also be tensorclasses or tensors. :meth:`get`, and the ``sample`` of a
    buffer, then return objects of the class that was written first. Unlike
    ``LazyTensorStorage``, this class accepts no pytrees, and refuses missing and
    unknown keys.

    Example:
        >>> from tensordict import TensorDict
        >>> storage = PackedStorage(1000)
        >>> storage.set(range(2), TensorDict({"observation": torch.ones(2, 3), "done": torch.zeros(2, 1).bool()}, [2]))
        >>> storage.get(torch.tensor([1, 1]))["observation"].sum()
        tensor(6.)
        >>> storage["observation"].shape, storage.row_bytes
        (torch.Size([2, 3]), 16)

        With deduplicated observations:

        >>> storage, seen = PackedStorage(1000, share_next=True), torch.rand(1001, 17)
        >>> rows = TensorDict({"observation": seen[:-1], "next": {"observation": seen[1:]}}, [1000])
        >>> storage.set(range(1000), rows)
        >>> storage.row_bytes, storage.nbytes / 1000
        (136, 76.544)
    """

    is_packed = True  # TorchRL's storages have no such attribute
    reopened = False  # whether an earlier process has left rows
    is_closed = False  # whether :meth:`close` has released the rows
    episodes: Episodes | None = None  # of rows with flags or ids that end episodes
    # deletes the file of the rows, see `auto_cleanup`
    _clean_up: Callable[[], object] = staticmethod(lambda: None)
    # whether a writer may compute entries when rows are read, see :meth:`complete`
    has_estimates = False
    # how rows are written; None: the next write chooses
    write_plan: WritePlan | None = None
    # how often rows, their class, or the addresses of rows and serials have changed
    epoch = 0
    _ring: Ring

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        lanes: int | None = None,
        scratch_dir: str | Path | None = None,
        shared: bool = False,
        share_next: bool | Sequence[NestedKey] = False,
        frames: Mapping[NestedKey, int | tuple[int, int]] | None = None,
        existsok: bool = False,
        auto_cleanup: bool | None = None,
        reopen: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
        compilable: bool = False,
        consolidated: bool = False,
    ) -> None:
        self.dedup_options = DedupOptions.of(share_next, frames)
        if self.dedup_options and OFF:
            raise RuntimeError(
                f"share_next and frames need compiled loops, and {OFF}: install numba, and unset NUMBA_DISABLE_JIT"
            )
        max_size, ndim = whole(1)("max_size", max_size), whole(1)("ndim", ndim)
        if lanes is not None and ndim != 2:
            raise ValueError(
                f"lanes={lanes} needs ndim=2, for rows [T, E], got ndim={ndim}"
            )
        self.lanes_wanted = None if lanes is None else whole(1)("lanes", lanes)
        shared = shared or shared_init
        self._refuse_device(
            device,
            "shared" if shared else "scratch_dir" if scratch_dir is not None else None,
        )
        if reopen:
            self._refuse_reopening(scratch_dir, existsok, bool(auto_cleanup))
        super().__init__(max_size, device=device, ndim=ndim)
        self.device: torch.device  # pyrefly: ignore
        self._attached_entities_list: Any = Listeners()  # TorchRL has a list
        self.scratch_dir: Path | None = (
            None if scratch_dir is None else Path(scratch_dir).absolute()
        )
        self.existsok, self.auto_cleanup = existsok, bool(auto_cleanup)
        self.reopen = reopen
        # the class of the rows in `get`; None: TensorDict
        self.row_class: RowClass | None = None
        # by which writes and look-ups of all processes find episodes
        self.keys = StorageKeys()
        # whether the rows were allocated by `reserve`; the first write may add keys
        self.is_reserved = False
        for name in (
            "_len_value",
            "_last_cursor_index_value",
            "_mutation_revision_value",
        ):
            # TorchRL's constructor makes these counters, which the ring replaces
            self.__dict__.pop(name, None)
        self._begin()
        watched.add(self)
        if reopen:
            self._reopen()
        if shared:
            self.share_memory_()

    def _refuse_device(
        self, device: torch.device | str, needing: str | None = None
    ) -> None:
        """Raise an error if the rows cannot lie on a device; ``needing`` is an argument
        that needs the CPU."""
        on_cpu = torch.device("cpu" if device == "auto" else device).type == "cpu"
        if needing and not on_cpu:
            raise ValueError(
                f"{needing} needs device='cpu', got device={str(device)!r}"
            )
        if self.dedup_options and not on_cpu:
            raise ValueError(
                f"share_next and frames need rows on the CPU, got device={str(device)!r}: leave them out, or keep the "
                "rows on the CPU and move batches with ReplayBuffer(device=...)"
            )
        if not on_cpu:
            usable_device(device)

    @classmethod
    def of_folder(cls, folder: Path) -> PackedStorage:
        """Continue the rows in a folder of ``reopen=True``, with the capacity and the
        lanes that they have.

        Raises:
            ValueError: the folder holds no rows, or its files are damaged.
            RuntimeError: the rows are open in a living process.
        """
        shape = shape_in_folder(folder)
        return cls(prod(shape), ndim=len(shape), scratch_dir=folder, reopen=True)

    def _refuse_reopening(
        self, scratch_dir: object, existsok: bool, auto_cleanup: bool
    ) -> None:
        if scratch_dir is None:
            raise ValueError(
                "reopen=True continues the rows in a folder: pass scratch_dir"
            )
        if existsok or auto_cleanup:
            which, does = (
                ("existsok", "replaces") if existsok else ("auto_cleanup", "deletes")
            )
            raise ValueError(
                f"{which}=True {does} the rows in scratch_dir, reopen=True keeps them: pass one of them"
            )
        if self.dedup_options:
            raise ValueError(
                "reopen=True does not support deduplicated rows: leave out share_next and frames, or use dumps"
            )

    def _reopen(self) -> None:
        """Continue the rows that an earlier process has left in ``scratch_dir``."""
        file = HeadFile(cast("Path", self.scratch_dir))
        try:
            SharedRows(self).take_rows(file)
            # maps the rows, and finishes or gives up a write during which the earlier
            # process died
            with self.lock:
                if self.rows is not None:
                    try:
                        self.ring.check()
                    except AssertionError as error:
                        file.refuse(str(error))
                    self.reopened = len(self) > 0
                    # the next rows come from environments that were started anew
                    if self.episodes is not None:
                        self.episodes.end()
            file.finish()
        except BaseException:
            file.close()
            raise

    def _begin(self) -> None:
        """Begin without rows, as a storage of this process alone."""
        self.epoch += 1
        self.rows: Rows | None = None  # from the first write on
        self.live: Rows | None = None  # the written rows, cached by the last read
        self.episodes = self.write_plan = None
        self._ring = Ring(1, 1)
        # whether other processes may use the rows, wherever these lie; all that belongs
        # to the rows is then shared, too
        self.shared = False
        # what describes the rows to processes that map them: those that share them, or
        # a later one (`reopen`)
        self.shared_rows: SharedRows | None = None
        self.lock: Any = RLock()  # taken by every buffer that uses this storage
        # id of the creating process; forked processes have their own rows
        self.process = os.getpid()

    # -- what it holds

    @property
    def ring(self) -> Ring:
        """Which rows are live; without lanes and rows before the first write."""
        if self.rows is None and self.shared_rows is not None:
            self.shared_rows.find()  # another process may have allocated rows
        return self._ring

    def __len__(self) -> int:
        """Return the number of rows, and of holes up to the last time step in which a
        lane has a row."""
        ring = self.ring
        return ring.longest * ring.lanes

    @property
    def _last_cursor_index(self) -> int | None:
        """The slot of the newest row, which TorchRL reads; None if there is none, or
        lanes stand at unlike steps."""
        newest = self.ring.newest
        return None if newest < 0 else newest

    @property
    def lane_count(self) -> int | None:
        """The number of lanes, E, of rows ``[T, E]``; None before the first write if
        nobody has given it."""
        with self.lock:  # the first write may allocate reserved rows again
            return self.lanes_wanted if self.rows is None else self.lanes[0]

    @property
    def _is_full(self) -> bool:
        return len(self) == self.max_size and not self.ring.holes

    def _rand_given_ndim(self, batch_size: int) -> Any:
        """Draw written rows uniformly; TorchRL's ``RandomSampler`` calls this
        method."""
        if self.ring.are_aligned and not self.ring.holes:
            return super()._rand_given_ndim(batch_size)
        number = torch.randint(
            len(self.ring), (batch_size,), generator=self._rng, device=self.device
        )
        return coordinates(self.ring.cell_of(number), self)

    def _bump_mutation_revision(self) -> None:
        """Note a change of rows other than a write of new ones."""
        self._ring.numbers[REVISION] += 1
        if self.episodes is not None:
            self.episodes.invalidate()

    @property
    def _mutation_revision(self) -> int:
        return self._ring.numbers[REVISION]

    def take_edits(self) -> None:
        """Note edits in place, through views that users have received."""
        if self.rows is not None and self.rows.exported.take_edits():
            self._bump_mutation_revision()

    @property
    def revision(self) -> int:
        """The number of changes of the rows so far: writes, loads, and edits in
        place."""
        self.take_edits()
        return self._ring.numbers[REVISION]

    @property
    def layout(self) -> RowLayout | None:
        """The layout of a row; ``None`` until rows are allocated."""
        return None if self.rows is None else self.rows.layout

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row in a batch, padding included; 0 until rows are
        allocated."""
        return 0 if self.rows is None else self.rows.layout.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and of the deduplicated observations; 0 until rows are
        allocated."""
        return 0 if self.rows is None else self.rows.nbytes

    @property
    def saved_bytes(self) -> dict[tuple[str, ...], int]:
        """Bytes that deduplication has saved so far, by key of the observation."""
        rows = None if self.rows is None else self.written_rows()
        return rows.saved_bytes() if isinstance(rows, DedupRows) else {}

    @property
    def dedup(self) -> DedupLayout | None:
        """The layout of deduplicated rows; ``None`` if no key is deduplicated."""
        return None if self.rows is None else self.rows.dedup

    @property
    def deduplicated(self) -> Mapping[tuple[str, ...], Leaf]:
        """The deduplicated leaves, by key; empty before the first write."""
        return {} if self.dedup is None else self.dedup.deduplicated

    @property
    def lanes(self) -> torch.Size:
        """The sizes of the dims after time; empty before the rows are allocated."""
        return torch.Size([]) if self.rows is None else self.rows.lanes

    @property
    def is_launched(self) -> bool:
        """Whether kernels on a GPU read the rows."""
        return self.rows is not None and self.rows.is_launched

    # TorchRL also sets these attributes; the ring replaces them.
    _last_cursor = property(
        lambda self: self._last_cursor_index, lambda self, cursor: None
    )
    _len = property(lambda self: len(self), lambda self, length: None)

    # -- episodes

    def use_episode_keys(self, keys: EpisodeKeys) -> None:
        """Look up episodes by these keys; ValueError if others are in use, in this
        process or in another one that shares the rows."""
        known = self.keys
        if keys == known.pair and known.are_used and not known.are_outdated:
            return
        with self.lock, defer_sigint:  # takes the pair that another process has set
            if keys != known.pair:
                if known.are_used:
                    raise ValueError(
                        f"this storage looks up episodes by done_key={known.pair.done_key} and traj_key="
                        f"{known.pair.traj_key}, not by {keys.done_key} and {keys.traj_key}: use one pair of keys "
                        "for all samplers and indices over a storage, in all processes that share it"
                    )
                self._replace_keys(keys)
                if self.episodes is not None and self.reopened:
                    self.episodes.end()
                elif self.episodes is not None:
                    self.episodes.forget()
            known.use()

    def _replace_keys(self, keys: EpisodeKeys) -> None:
        """Find episodes by other keys; the numbers so far are stale."""
        self.keys.refuse_long(keys)
        # first: a process that dies here leaves numbers that are built again
        self._ring.numbers[EPISODES_STALE] = True
        self.keys.replace(keys)
        self.find_episodes()

    def find_episodes(self, before: Episodes | None = None) -> None:
        """Make the numbers of the rows' episodes, if there are rows, by the present
        keys; equal to those of ``before`` if it is given."""
        self.episodes = self.write_plan = None
        if self.rows is None:
            return
        shared = self.shared_rows
        memory = None if shared is None else shared.of_episodes
        with suppress(KeyError, TypeError, SchemaError):  # a look-up raises it
            self.episodes = Episodes(self.rows, self._ring, self.keys.pair, memory)
            if before is not None:
                self.episodes.numbers.copy_(before.numbers)
                self.episodes.following.copy_(before.following)

    def load_episodes(self, saved: State | None) -> None:
        """Restore the numbers of episodes of rows that have just been loaded; None:
        find them in the rows."""
        keys = (
            None
            if saved is None
            else EpisodeKeys.of(saved["done_key"], saved["traj_key"] or None)
        )
        if keys is not None and keys != self.keys.pair and not self.keys.are_used:
            self._replace_keys(keys)
        if self.episodes is not None:
            self.episodes.load(saved if keys == self.keys.pair else None)

    def episodes_now(self) -> Episodes:
        """Return the numbers of the rows' episodes, up to date.

        Raises:
            KeyError: the rows hold neither done flags nor trajectory ids.
            TypeError: flags are not bool, or ids are not integers.
            SchemaError: a row holds several steps.
        """
        self.take_edits()
        # without rows, the property looks for those that another process has allocated
        ring = self._ring if self.rows is not None else self.ring
        episodes = self.episodes
        if episodes is None:
            # raises an error
            episodes = Episodes(self.all_rows(), ring, self.keys.pair)
        if ring.numbers[EPISODES_STALE]:
            episodes.refresh()
        return episodes

    # -- reads

    def all_rows(self) -> Rows:
        """Return all allocated rows; raise a RuntimeError if there are none."""
        if self.rows is None and self.shared_rows is not None:
            self.shared_rows.find()  # another process may have allocated them
        if self.rows is None:
            self.refuse_closed()
            raise RuntimeError(
                "cannot read from a PackedStorage before the first write: its rows have no keys yet"
            )
        return self.rows

    def written_rows(self) -> Rows:
        """Return the rows written so far, as a view."""
        ring, live = self.ring, self.live
        steps = ring.longest
        if live is None or live.cells != steps * ring.lanes:
            live = self.all_rows().first(steps)
            # views made in FakeTensorMode have no memory
            self.live = None if in_dispatch_mode() else live
        return live

    def get(self, index: object) -> Any:
        """Return the transitions at ``index``, or one key of all transitions.

        Args:
            index: a key, an ``int`` or a ``slice`` along time returns a view (a copy
                for deduplicated keys). A boolean mask, a tuple of one index tensor per
                dim, or integers of any shape (tensor, list, ``range`` or array) return
                a copy.

        Raises:
            RuntimeError: no rows have been allocated yet.
            IndexError: an index is outside the written rows. (On CUDA, index tensors
                and lists are not checked.)
            KeyError: the key is not stored.

        In a complete rollout of a :class:`~rlbuf_td.writers.RolloutWriter`, the first
        read of whole rows, or of one of the keys that this writer adds, computes these
        entries; errors of its estimator are raised here. Views that were made before
        show NaN until then.
        """
        with self.lock:  # no row of a copy is half written
            if self.has_estimates:  # saves a microsecond of all other reads
                self.complete(as_tuple(index) if is_key(index) else None)
            rows = self.read(index)
        return rows if is_key(index) else wrap(rows, self.row_class)

    def read(self, index: Any) -> Any:
        """Return the transitions at ``index`` as :meth:`get` does, but always as a
        TensorDict, without the lock, and as they are."""
        rows = self.written_rows()
        if is_key(index):
            return rows.column((index,) if isinstance(index, str) else index)
        is_tuple = isinstance(index, tuple)
        is_view = isinstance(index, _OF_VIEWS) or (
            is_tuple and all(isinstance(part, _OF_VIEWS) for part in index)
        )
        if is_view and not (self.ring.holes and self.ndim == 1):
            return rows.at_region(index)
        cells = rows.cells_of(index)
        # in whole time steps, holes are zeros
        if not rows.lanes or _names_lanes(index):
            self.refuse_holes(cells)
        return rows.at_region(index) if is_view else rows.at_cells(cells)

    def stamps(self, index: object) -> torch.Tensor:
        """Return the stamps of the rows at ``index``, ``[B]`` int64: numbers that the
        next row of a cell does not have.

        ``index`` is that of a batch, or flat; of windows ``[B, L]``, the stamps are
        ``[B, L]``.
        :meth:`ReplayBuffer.write_back` takes the stamps of batches that have no entry
        ``"sampled_at"``.
        """
        if not isinstance(index, torch.Tensor) or index.ndim <= 1 + (self.ndim > 1):
            return self.ring.serial(flat_rows(index, self, self.device))
        shape = index.shape[: index.ndim - (self.ndim > 1)]
        return self.stamps(index.flatten(0, len(shape) - 1)).view(shape)

    def complete(self, key: tuple[str, ...] | None = None) -> None:
        """Let writers compute what they add to the rows, before all entries or those at
        ``key`` are read; the caller holds the lock."""
        for part in self._parts():
            if isinstance(part, Completes):
                part.complete(key)

    def gather(self, flat: torch.Tensor) -> TensorDict:
        """Return the transitions at flat indices ``t * E + e``, as they are.

        Args:
            flat: ``[B]`` int64, not negative, on the device of the storage.
        """
        self.refuse_holes(flat)
        return self.written_rows().at_cells(flat)

    def refuse_unwritten(self, flat: torch.Tensor) -> None:
        """Raise an IndexError if a flat index names no written row; indices on a device
        are not checked."""
        if backend_of(flat) == "numba":
            self.refuse_outside(flat)

    def refuse_outside(self, flat: torch.Tensor) -> None:
        """Raise an IndexError if a flat index, on any device, names no written row."""
        if not flat.numel():
            return
        if flat.is_cpu:
            address_of(flat)  # raises an error in FakeTensorMode, without values
        low, high = map(int, flat.aminmax())
        rows = len(self)
        if low < 0 or high >= rows:
            written = f"rows 0 to {rows - 1} have" if rows else "no rows have"
            raise IndexError(
                f"row {low if low < 0 else high} is out of range: {written} been written"
            )
        self.refuse_holes(flat)

    def refuse_holes(self, flat: torch.Tensor) -> None:
        """Raise an IndexError if a flat index names a row that its lane has not written
        yet."""
        holes = self.ring.holes_among(flat)
        if holes is not None and bool(holes.any()):
            step, lane = divmod(int(flat[holes][0]), prod(self.lanes))
            what = f"has not been written: it has {self.ring.count[lane]} rows"
            if self.ring.tail[lane] % self.ring.steps:
                what = "is gone: a write was about to replace it, and did not end (rb.chronological() skips it)"
            raise IndexError(f"step {step} of lane {lane} {what}; {_DRAWN}")

    # -- writes

    @untraced("writes change numbers that no graph knows, and call compiled loops")
    def advance(self, write: Write) -> Any:
        """Write rows after the newest ones, which replace the oldest; return their
        index, ``[n]`` or ``[n * E, ndim]``.

        If there are more rows than slots, the last ones are stored. If the process dies,
        or the thread is interrupted, the rows are written or missing as a whole; the
        rows that they were about to replace may be gone.

        Raises:
            SchemaError: the data does not match the rows; nothing has been written.
            ValueError: ``ndim`` is not 2, the number of lanes is not known yet, shapes
                do not fit, or there is no row.
            TypeError: lanes are not integers.
            IndexError: a lane is out of range; nothing has been written.
        """
        data = write.data
        if type(data) is not TensorDict:
            write.data = data = self.as_rows(data, write.lead_dims(self.ndim))
        with self.lock:
            size = _ONE_STEP
            count = 1
            if not write.is_single:
                size = data.batch_size
                time_dim = 1 if write.lanes_first else 0
                if len(size) <= time_dim:
                    refuse_shape(data, write.lead_dims(self.ndim))
                count = size[time_dim]
                if not count:
                    raise ValueError("extend needs at least one transition, got none")
            plan = self.write_plan
            if plan is None or plan.changes != plan.listeners.changes:
                plan = self._plan_writes(write)
            lead = plan.rows.lanes  # the dims of the data that number rows
            lanes = write.lanes
            if lanes is not None:
                write.lanes = as_lanes(lanes, count)
                lead = size[:1]
            elif write.lanes_first:
                lead += size[1:2]
            elif not write.is_single:
                lead = size[:1] + lead if lead or len(size) > 1 else size
            if write.begins_anew or type(lanes) is TakenLane:
                # refuses the data before anything changes
                plan.rows.layout.collect(data, lead)
                if write.begins_anew:
                    self._remove_rows()
                elif self.episodes is not None:
                    self.episodes.end(lanes.lane)
            return plan.write(self, write, lead, count)

    def _plan_writes(self, write: Write) -> WritePlan:
        """Choose how rows are written; allocate them for the data if this is the first
        write."""
        self.enter()
        data = write.data
        if write.lanes is not None:
            self._fix_lanes(data, write.lanes)
        else:
            rows = data.transpose(0, 1) if write.lanes_first else data
            self._admit(rows, write.is_single)
        with torch.inference_mode(False):
            reason = unwritable(self)
            self.write_plan = plan = (
                TorchWrites(self, reason) if reason else CompiledWrites(self)
            )
        return plan

    def recover(self) -> None:
        """Finish or give up a write that did not end, and make what follows from the
        rows agree with them: O(N).

        Whoever takes the lock after a process that died calls this method, and a thread
        whose write was interrupted.
        """
        ring, rows = self.ring, self.rows
        new = ring.recover()
        if rows is not None:
            device = rows.matrix.device
            new = new.to(device)
            cells = torch.arange(ring.longest * ring.lanes, device=device)
            rows.flat[cells[~ring.is_live(cells)]] = 0
            rows.link(ring.serials)
        self._bump_mutation_revision()
        for part in self._parts():
            if isinstance(part, Recovers):
                part.recover(self, new)
        ring.finish()
        if len(new):
            index = coordinates(new, self)
            for listener in listeners_of(self):
                listener.mark_update(
                    torch.stack(index, -1) if isinstance(index, tuple) else index
                )

    def check(self) -> None:
        """Raise an AssertionError unless serials, episodes and deduplicated entries are
        as their classes state it."""
        with self.lock:
            self.ring.check()
            self.take_edits()
            if self.episodes is not None:
                self.episodes.check()
            if isinstance(self.rows, DedupRows):
                self.rows.entries.check(self.ring.serials)

    def set(
        self,
        cursor: Any,
        data: TensorDictBase | Sequence[TensorDictBase],
        *,
        set_cursor: bool = True,
    ) -> None:
        """Write transitions at ``cursor``.

        Args:
            cursor: time steps: an ``int``, ``slice``, ``range``, list, or integer
                tensor or array. A boolean mask or a tuple of one index per dim replaces
                written transitions. If an index is repeated, its last row is kept.
            data: ``[n, *lanes]`` for ``n`` time steps, ``[*lanes]`` for an ``int``; for
                a mask or tuple, one transition per selected row. A list of TensorDicts
                is stacked.
            set_cursor: if ``True``, steps that follow the newest one are new rows. All
                others are edits of stored rows. Pass ``False`` to edit in any case.

        An edited row keeps its age, its stamp, and its priority. A process that is
        killed during an edit may leave the edited rows half changed.

        Raises:
            SchemaError: ``data`` does not match the rows; nothing has been written.
            IndexError: an index is out of range, or the rows before it have not been
                written; nothing has been written.
            TypeError: ``data`` is not a TensorDict.
        """
        single = isinstance(cursor, int | np.integer) or (
            isinstance(cursor, torch.Tensor | np.ndarray) and not cursor.ndim
        )
        selects = isinstance(cursor, tuple) or is_mask(cursor)
        data = self.as_rows(data, 1 if selects else self.ndim - single)
        with self.lock:  # writes of a buffer already hold the lock
            if selects or not set_cursor:
                if not len(self):
                    raise IndexError("cannot edit rows: none have been written")
                cells = self.written_rows().cells_of(cursor)
                return self.edit_entries(cells, self._entries_in(data, cells.shape))
            if not self.ring.are_aligned:
                raise RuntimeError(
                    "the lanes stand at unlike steps, because single lanes were written: write with rb.extend or "
                    "rb.add, which continue each lane"
                )
            total = self._max_size_along_dim0(
                **{"single_data" if single else "batched_data": data}
            )
            live = 0 if self.rows is None else self.ring.longest
            steps = as_steps(cursor, total, live)
            if not single and data.batch_size[:1] != steps.shape:
                raise SchemaError(
                    f"data of batch size {tuple(data.batch_size)} cannot fill {len(steps)} positions"
                )
            rows, ring = self._admit(data, single), self.ring
            data = data.unsqueeze(0) if single else data
            next_steps = (ring.cursor + np.arange(len(steps))) % ring.steps
            if np.array_equal(steps, next_steps):
                self.advance(Write(data, is_told=False))
                return
            is_new = steps >= ring.longest
            if not is_new.all():
                cells = rows.cells_at(torch.from_numpy(steps[~is_new]))
                edited: Any = data[torch.from_numpy(~is_new)] if is_new.any() else data
                self.edit_entries(cells, self._entries_in(edited, cells.shape))
            if is_new.any():
                new = np.flatnonzero(is_new)[::-1]
                last = new[np.unique(steps[new], return_index=True)[1]]
                self.advance(Write(data[torch.from_numpy(last)], is_told=False))

    def _entries_in(
        self, data: TensorDictBase, lead: torch.Size
    ) -> dict[tuple[str, ...], torch.Tensor]:
        """Check rows ``[*lead, ...]``, and return all their entries."""
        layout = self.all_rows().layout
        return dict(zip(layout.places, layout.collect(data, lead), strict=True))

    def __setitem__(self, index: Any, value: Any) -> None:
        if is_key(index):
            self.edit(lambda data: data.set_(index, value), key=index)
        else:
            self.set(index, value, set_cursor=False)

    # -- edits

    def edit(
        self,
        change: Callable[[TensorDictBase], object],
        region: object = None,
        *,
        key: object = None,
    ) -> None:
        """Edit rows: ``change`` receives a copy of them as a TensorDict, and modifies
        it in place; an error in it changes nothing.

        Args:
            change: a function of a TensorDict.
            region: selects the rows like an index of a tensor ``[T, *lanes]``; ``None``
                selects all written rows.
            key: the only entry, or the nested entries, that the TensorDict has.

        Raises:
            IndexError: the region is out of range, or contains holes; nothing has been
                written.
            KeyError: the rows have no entry ``key``.
            SchemaError: a deduplicated entry, a dtype or a shape has changed; nothing
                has been written.

        Cost: two copies of these entries of the selected rows.
        """
        path = () if key is None else as_tuple(key)
        with self.lock:
            rows = self.written_rows()
            cells = rows.cells_of(slice(None) if region is None else region)
            if region is not None:
                self.refuse_holes(cells.reshape(-1))
            leaves = [
                leaf for leaf in rows.layout.leaves if leaf.key[: len(path)] == path
            ]
            if not leaves:
                raise KeyError(f"the rows have no entry {show_key(path)}")
            copies: dict[Any, Any] = {
                leaf.key: rows.column_at(leaf.key, cells) for leaf in leaves
            }
            data = TensorDict(
                copies,
                cells.shape + rows.layout.root.batch_size,
                device=rows.matrix.device,
            )
            before = {
                name: copy.clone()
                for name, copy in copies.items()
                if name in self.deduplicated
            }
            change(data)
            refuse_unfit(data, leaves, cells.shape, allows_more=False)
            values = {leaf.key: data.get(leaf.key) for leaf in leaves}
            for name, value in before.items():
                if same_bytes(value, values[name]):
                    del values[name]
            holes = (
                None if region is not None else self.ring.holes_among(cells.view(-1))
            )
            if holes is not None:
                values = {
                    name: value.flatten(0, cells.ndim - 1)[~holes]
                    for name, value in values.items()
                }
                cells = cells.view(-1)[~holes]
            self.edit_entries(cells, values)

    def edit_entries(
        self,
        cells: torch.Tensor | slice,
        values: Mapping[tuple[str, ...], torch.Tensor],
        *,
        is_counted: bool = True,
    ) -> None:
        """Set entries of rows: all edits of rows go through this method.

        Args:
            cells: flat indices of any shape, or a range of them. If an index is
                repeated, its last row is kept.
            values: the entries, ``[*cells.shape, ...]`` each, in the dtypes of the
                rows; ``[B, ...]`` for a range.
            is_counted: whether the revision changes. It also does if the entries tell
                where episodes end. Otherwise, samplers of windows need not read all
                rows again.

        Raises:
            SchemaError: an entry is deduplicated, because other rows share its values.
            IndexError: a row at an index has not been written, or is gone. Nothing has
                changed.
        """
        shared = sorted(self.deduplicated.keys() & values.keys())
        if shared:
            remedy = (
                "leave it out of share_next and frames to edit it, or write new rows"
            )
            raise SchemaError(
                f"cannot edit {show_key(shared[0])}, which is deduplicated: {remedy}"
            )
        with self.lock:
            rows, leaves = self.written_rows(), [*values.values()]
            if isinstance(cells, torch.Tensor):
                if cells.ndim != 1:
                    leaves = [
                        leaf.flatten(0, cells.ndim - 1) if cells.ndim else leaf[None]
                        for leaf in leaves
                    ]
                flat = cells.reshape(-1).cpu()
                self.refuse_outside(flat)
                numbers, leaves = last_of_each(flat.numpy(), leaves)
                cells = torch.from_numpy(numbers).to(cells.device)
            self.enter()
            episodes = self.episodes
            tells_ends = episodes is not None and not values.keys().isdisjoint(
                (*episodes.flags, episodes.id_key)
            )
            with defer_sigint:
                rows.edit_(cells, dict(zip(values, leaves, strict=True)))
                if tells_ends:
                    self._bump_mutation_revision()
                elif is_counted:
                    self._ring.numbers[REVISION] += 1

    # -- allocating rows

    def reserve(self, schema: TensorDictBase) -> None:
        """Allocate the rows before the first write, for transitions with the keys of
        ``schema``.

        If the first write has more keys, such as a policy's outputs, the rows are
        allocated again. Rows that processes share are not.

        Args:
            schema: an example of one time step, ``[*lanes]``, or the result of
                :func:`~rlbuf_td.schema_of`.

        Raises:
            RuntimeError: the rows are already allocated; with ``reopen``, those of an
                earlier process are checked.
            SchemaError: these rows lack an entry of the schema, or the schema has too
                few batch dims, a lane dim of size 0, or an entry without a fixed size.
        """
        schema = self.as_rows(schema, self.ndim - 1)
        # the lock tells other processes to look for the rows, and finds theirs
        with self.lock:
            if self.reopen and self.rows is not None:
                self._refuse_other_schema(schema)
                return
            if self.rows is not None:
                raise RuntimeError(
                    "the rows of this storage are already allocated: reserve them before the first write"
                )
            if "index" in schema.keys():
                refuse_index()
            with defer_sigint:
                self._fix_rows(schema, self.ndim - 1)
                # otherwise other processes may use these rows
                self.is_reserved = self.shared_rows is None

    def is_reserved_for(self, data: TensorDictBase, lead_dims: int) -> bool:
        """Whether rows are reserved, and the data, whose first ``lead_dims`` dims number
        rows, has their entries."""
        if not self.is_reserved or self.rows is None:
            return False
        leaves = self.rows.layout.leaves
        try:
            refuse_unfit(data, leaves, data.batch_size[:lead_dims], allows_more=True)
        except SchemaError:
            return False
        return True

    def reserve_again(self, data: TensorDictBase, lead_dims: int) -> None:
        """Replace reserved rows by rows for ``data``, for the same number of lanes; the
        data has ``lead_dims`` dims that number rows."""
        with self.lock:
            if self.is_reserved and not self.is_reserved_for(data, lead_dims):
                row = cast("TensorDictBase", data[(0,) * lead_dims])
                step = row.expand(*self.lanes, *row.batch_size)
                with defer_sigint:
                    self.release()
                    self.is_reserved = False
                    self.reserve(step)

    def _refuse_other_schema(self, schema: TensorDictBase) -> None:
        """Raise a SchemaError unless the rows that an earlier process has left have the
        entries of ``schema``."""
        leaf_of = {leaf.key: leaf for leaf in self.all_rows().layout.leaves}
        if schema.batch_size[: self.ndim - 1] != self.lanes:
            raise SchemaError(
                f"the rows in {self.scratch_dir} have lanes {[*self.lanes]}, got {[*schema.batch_size]}"
            )
        for leaf in RowLayout(schema, self.ndim - 1).leaves:
            other = leaf_of.get(leaf.key)
            if other != leaf:
                stored = "none" if other is None else kind(other.dtype, other.shape)
                wanted = kind(leaf.dtype, leaf.shape)
                raise SchemaError(
                    f"{leaf.name} is {wanted} in the schema, {stored} in {self.scratch_dir}: reopen the rows with the "
                    "schema that they have, or choose another folder"
                )

    def as_rows(self, data: object, lead_dims: int) -> TensorDictBase:
        """Return data of any class that this storage takes as a TensorDict;
        ``lead_dims`` of its dims number rows."""
        if type(data) is TensorDict:
            return data
        rows, row_class = unwrap(stacked(data), lead_dims)
        if row_class is not None:
            self.take_class(row_class)
        if not isinstance(rows, TensorDictBase):
            name = type(data).__name__
            raise TypeError(
                f"PackedStorage stores TensorDicts, tensorclasses and tensors, got {name}: {wrapping(data)}, or use "
                "torchrl.data.LazyTensorStorage, which takes pytrees"
            )
        return rows

    def enter(self) -> None:
        """Refuse or warn of the first change of rows that are not shared in a forked
        process."""
        if self.shared or self.process == os.getpid():
            return
        if self.scratch_dir is not None:
            raise RuntimeError(
                f"this process was forked, and its parent writes to the same file of rows in {self.scratch_dir}: "
                "share the buffer before forking (rb.share()), or give each process a folder of its own"
            )
        warnings.warn(
            "this process was forked from the one that made the buffer, which is not shared: rows that are written "
            "here stay here. Call rb.share() before forking; or, for rows of this process alone, use "
            "copy.deepcopy(rb) in it",
            stacklevel=2,
        )
        self.process = os.getpid()

    def _admit(self, data: TensorDictBase, single: bool) -> Rows:
        """Return the rows; allocate them for ``data`` if this is the first write."""
        if self.rows is None or self.is_reserved:
            if self.keys.are_used:
                refuse_inner(data.batch_size, self.ndim - single, self.ndim)
            if "index" in data.keys():  # some writers of TorchRL's add it
                refuse_other_index(data.get("index"))
                data = data.exclude("index")
            self._fix_rows(data, self.ndim - single)
        return self.all_rows()

    def _fix_lanes(self, data: TensorDictBase, lanes: object) -> None:
        """Allocate rows for the first write to single lanes.

        Raises:
            ValueError: the number of lanes is unknown.
            IndexError: a lane is out of range; no rows have been allocated.
        """
        if self.ndim != 2:
            raise ValueError(
                f"lanes= needs a storage [T, E], PackedStorage(max_size, ndim=2), this one has ndim={self.ndim}"
            )
        if self.rows is None and self.shared_rows is not None:
            self.shared_rows.find()
        count = self.lane_count
        if count is None:
            raise ValueError(
                "the number of lanes is not known before the first write: give it, PackedStorage(max_size, ndim=2, "
                "lanes=E)"
            )
        refuse_lanes(as_lanes(lanes, len(data)).numpy(), count)
        if self.rows is None or self.is_reserved:
            self._fix_rows(
                cast("TensorDictBase", data[:1])
                .exclude("index")
                .squeeze(0)
                .expand(count),
                1,
            )

    def _fix_rows(self, data: TensorDictBase, lead_dims: int) -> None:
        """Allocate rows for ``data``; reserved rows are kept if they fit and released
        otherwise."""
        ndim = self.ndim
        self.refuse_closed()
        if data.batch_dims < lead_dims:
            raise SchemaError(
                f"a storage with ndim={ndim} takes TensorDicts with {lead_dims} or more batch dims here "
                f"(time, lanes), got batch size {tuple(data.batch_size)}: make the data of all lanes, "
                "or write a row of one environment to its lane, rb.lane(e).add(row)"
            )
        if (
            self.lanes_wanted is not None
            and self.lanes_wanted != data.batch_size[lead_dims - 1]
        ):
            raise SchemaError(
                f"data of batch size {[*data.batch_size]} does not fit lanes={self.lanes_wanted}"
            )
        layout = RowLayout(data, lead_dims)
        self.refuse_layout(layout)
        dedup = DedupLayout.chosen_for(layout, self.dedup_options)
        device = None
        if data.device is not None and data.device.type != "meta":
            device = data.device
        reserved = self.rows if self.is_reserved else None
        if reserved is not None:
            lead = data.batch_size[: lead_dims + 1 - ndim] + reserved.lanes
            refuse_unfit(data, reserved.layout.leaves, lead, allows_more=True)
        with defer_sigint:  # reserved rows alone may tell the number of lanes
            if reserved is not None and (
                layout != reserved.layout or dedup != reserved.dedup
            ):
                self.release()
            if self.rows is None:
                lanes = data.batch_size[1 + lead_dims - ndim : lead_dims]
                self.adopt(self.make_rows(layout, lanes, device, dedup))
            self.is_reserved = False

    def refuse_layout(self, layout: RowLayout) -> None:
        """Let each buffer of the storage refuse rows of this layout (SchemaError)
        before they are allocated."""
        for listener in listeners_of(self).own():
            listener._refuse_schema(layout)

    def take_class(self, row_class: RowClass | None) -> None:
        """Set the class of the rows before they are written; raise a SchemaError if
        other rows have another class, or other processes know the rows by another
        one."""
        with self.lock:
            if not len(self) and not self.is_class_fixed:
                self.row_class = row_class
            elif row_class != self.row_class:
                names = [
                    "TensorDict" if kind is None else kind[-1][-1] if kind else "Tensor"
                    for kind in (row_class, self.row_class)
                ]
                raise SchemaError(
                    f"cannot write {names[0]}: the rows of this storage are read as {names[1]}"
                )

    @property
    def is_class_fixed(self) -> bool:
        """Whether the rows keep their class when all are removed, because other
        processes have found it with them, or will."""
        return self.shared_rows is not None and self.rows is not None

    def steps_for(self, lanes: torch.Size) -> int:
        """Return T, the slots of each of ``lanes``."""
        if not prod(lanes):
            raise SchemaError(
                f"cannot store transitions without lanes: the batch dims after time are {tuple(lanes)}"
            )
        return -(-self.max_size // prod(lanes))

    def make_rows(
        self,
        layout: RowLayout,
        lanes: torch.Size,
        device: torch.device | None,
        dedup: DedupLayout | None,
    ) -> Rows:
        """Allocate rows; ``device`` is that of the first data."""
        shape, folder = torch.Size([self.steps_for(lanes), *lanes]), self.scratch_dir
        target = torch.device(self.device if self.device != "auto" else device or "cpu")
        if dedup is not None:
            self._refuse_device(target)
        self._clean_up()  # the file of rows before these
        # rows without a description hold no data
        if folder is not None and (self.existsok or self.reopen):
            (folder / ROWS_FILE).unlink(missing_ok=True)
        shared = None if self.shared_rows is None else self.shared_rows.file
        form = RowsForm(layout, shape, dedup)
        # rows allocated in inference mode could not be written outside it
        with torch.inference_mode(False):
            rows = form.allocate(target, folder, shared, self._remedy(layout))
        if self.auto_cleanup and folder is not None:
            path = folder / ROWS_FILE
            self._clean_up = weakref.finalize(
                self, delete_rows_file, path, path.stat().st_ino, os.getpid()
            )
        return rows

    def map_rows(self, form: RowsForm, shared: SharedFile) -> Rows:
        """Map the rows that lie in the file of ``scratch_dir`` or in ``shared``
        memory."""
        with torch.inference_mode(False):
            return form.map(self.scratch_dir, shared)

    def _remedy(self, layout: RowLayout) -> str:
        largest = max(layout.leaves, key=lambda leaf: leaf.nbytes)
        elsewhere = (
            "another scratch_dir"
            if self.scratch_dir
            else "scratch_dir=..., which keeps the rows in a file"
        )
        if self.device != "auto" and torch.device(self.device).type != "cpu":
            elsewhere = "keep the rows on the CPU and move batches with ReplayBuffer(device=...)"
        return (
            f"Take a smaller max_size, or {elsewhere}; the largest key is {largest.name}, {largest.nbytes:,} bytes per "
            "row. rlbuf_td.plan(...) shows the memory of every key."
        )

    @defer_sigint
    def adopt(self, rows: Rows) -> None:
        """Make ``rows`` the rows of this storage, and set the attributes that TorchRL
        reads."""
        self.take_edits()
        self.epoch += 1
        has_shape = self.rows is not None and self.rows.shape == rows.shape
        episodes = self.episodes if has_shape else None
        if not has_shape:
            before, lanes = self._ring, prod(rows.lanes)
            self._ring = Ring(rows.steps, lanes)
            self._ring.written += before.written.max()
            for count in (REVISION, ROWS_WRITTEN, UNCOUNTED):
                self._ring.numbers[count] = before.numbers[count]
            self._ring.empty()
        if self.shared_rows is not None:
            self.shared_rows.place(rows)
        self.rows, self.live = rows, None
        self.find_episodes(episodes)
        self.device = rows.matrix.device
        self.max_size = rows.cells
        self.__dict__["_total_shape_value"] = rows.shape
        self.initialized = True

    @property
    def _storage(self) -> Any:
        """The entries of all rows, which TorchRL reads; another object after somebody
        has moved their memory."""
        return None if self.rows is None else self.rows.exported.entries(self.rows.view)

    @_storage.setter
    def _storage(self, entries: None) -> None:  # TorchRL's constructor sets it
        if entries is not None:
            raise AttributeError(
                "the rows of a PackedStorage cannot be replaced: write with set, or load a state"
            )

    def close(self) -> None:
        """Release the rows: free their memory, or let another process continue those in
        ``scratch_dir``.

        Later reads and writes raise a RuntimeError. Views of the rows that were made
        before stay valid. With ``auto_cleanup``, the file of the rows is deleted.
        """
        with defer_sigint:
            with self.lock:
                shared, self.is_closed = self.shared_rows, True
                self._begin()
            self._clean_up()
            if shared is not None:
                shared.close()

    def refuse_closed(self) -> None:
        """Raise a RuntimeError if :meth:`close` has released the rows."""
        if self.is_closed:
            raise RuntimeError(
                "this storage has been closed: make another one (reopen=True continues rows in a file)"
            )

    def release(self) -> None:
        """Free reserved rows; raise a RuntimeError if rows have been written."""
        if len(self):
            raise RuntimeError(
                "rows that have been written cannot be released: empty the buffer instead"
            )
        self.epoch += 1
        # the ring stays: no stamp will match
        self.rows = self.live = self.episodes = self.write_plan = None
        if self.scratch_dir is not None:
            (self.scratch_dir / ROWS_FILE).unlink()

    def _max_size_along_dim0(
        self, *, single_data: object = None, batched_data: object = None
    ) -> int:
        """Return the capacity in time steps; before the first write, the data tells the
        number of lanes."""
        if self.rows is not None:
            return self.rows.steps
        if self.ndim == 1:
            return self.max_size
        single = single_data is not None
        data = self.as_rows(single_data if single else batched_data, self.ndim - single)
        return self.steps_for(data.batch_size[1 - single : self.ndim - single])

    def attach(self, buffer: Any) -> None:
        """Tell a buffer, or another object, of each write from now on."""
        super().attach(buffer)
        self.epoch += 1  # plans check the writers of all buffers

    def detach(self, buffer: Any) -> None:
        """Tell a buffer, or another object, of no further write."""
        listeners = listeners_of(self)
        if buffer in listeners:
            listeners.remove(buffer)

    def _empty(self) -> None:
        with self.lock, defer_sigint:
            self.remove_rows()
            self.tell_replaced(are_loaded=False)

    def remove_rows(self) -> None:
        """Remove all rows, and tell nobody, see :meth:`tell_replaced`."""
        self.epoch += 1
        self._remove_rows()
        if not self.is_class_fixed:
            self.row_class = None
        self._ring.numbers[REVISION] += 1

    def _remove_rows(self) -> None:
        self.take_edits()
        if self.episodes is not None:
            self.episodes.refresh()  # the next rows go on with the newest episodes
        self.ring.empty()
        if self.rows is not None:
            self.rows.forget()

    def tell_replaced(self, *, are_loaded: bool, but: object = None) -> None:
        """Tell all that are attached to this storage that its rows are others now: none,
        or those of a state (``are_loaded``).

        Whatever removes all rows calls this method, at its end. Buffers then treat the
        rows as new ones: they get the default priority, and epochs begin anew. ``but``
        is a buffer that loads the state of its parts itself.
        """
        cells = written_rows(self)
        for listener in listeners_of(self):
            if listener is but:
                continue
            if isinstance(listener, ReplayBuffer):
                take_other_rows(listener, self, cells)
            if isinstance(listener, Listener):
                listener._rows_replaced(are_loaded=are_loaded)

    # -- sharing

    def share_memory_(self) -> Self:
        """Share the rows with processes that are forked later, or that are spawned and
        receive this storage.

        Rows in RAM move to shared memory, and so do the priorities and counts of all
        buffers over this storage: ``shared=True``, this method and
        :meth:`ReplayBuffer.share` do the same. If no rows are allocated yet, the first
        process that writes allocates them. The storage's ``lock`` admits one process at
        a time. If a process dies during a write, the new rows are missing, and the rows
        that they were about to replace may be gone. Ctrl-C waits until everything is
        shared.

        Cost: one copy of all rows in RAM.

        Raises:
            ValueError: the rows are not on the CPU.
            MemoryError: the written rows do not fit into RAM a second time.
            OSError: the priorities do not fit into ``/dev/shm``. Nothing has changed.
        """
        if torch.device("cpu" if self.device == "auto" else self.device).type != "cpu":
            raise ValueError(
                f"rows on {self.device} cannot be shared by several processes: keep them on the CPU, and move batches "
                f"(a transform does), or let one process write"
            )
        import_kernels()
        with self.lock, defer_sigint:
            if self.is_reserved:
                for listener in listeners_of(self).own():
                    listener._complete_reserved()
            parts = [*self._parts()]
            nbytes = sum(getattr(part, "bytes_to_share", 0) for part in parts)
            require_room(nbytes, torch.device("cpu"), *_PARTS, SHARED)
            if self.shared_rows is None:
                SharedRows(self).take_rows()
            self.keys.share_memory_()
            self.share_parts()
            self.shared = True
        return self

    def share_parts(self) -> None:
        """Share what the buffers and other listeners of this storage keep about the
        rows, unless they share it already."""
        self.write_plan = None  # holds addresses of what moves
        for part in self._parts():
            share = getattr(part, "share_memory_", None)
            if share is not None:
                share()
        for listener in listeners_of(self).own():
            listener._rows_shared()

    def _parts(self) -> Iterator[Any]:
        """Yield the writers and samplers of all buffers over this storage."""
        for listener in listeners_of(self):
            yield from parts_of(listener)

    def _share_memory_(self) -> None:
        """Share rows on the CPU with the workers of a DataLoader; TorchRL's data sets
        call this method.

        Rows that :meth:`reserve` has allocated are shared after the first write, which
        may allocate them again.
        """
        if not self.is_reserved and str(self.device).startswith("cpu"):
            self.share_memory_()

    def _fork_safe(self) -> bool:
        """Return whether a forked process has as many rows as its length says; the
        workers of a DataLoader ask."""
        return self.shared or self.rows is None or self.device.type != "cpu"

    def _make_init_directory(self) -> None:
        """Do nothing. TorchRL's collectors require this method before they let workers
        initialize the storage."""

    # -- saves

    def state_dict(self) -> State:
        """Return the layout, the counters, and a copy of the rows, on the same
        device."""
        state = self.snapshot()
        if "rows" in state:
            state["rows"] = state["rows"].clone()
        if "entries" in state:
            state["entries"] = [entries.clone() for entries in state["entries"]]
        return state

    def snapshot(self) -> State:
        """Return :meth:`state_dict` with views of the rows instead of copies."""
        rows = self.rows
        self.refuse_closed()
        if rows is None:
            return {"_len": 0}
        state = {
            "_len": len(self),
            "reserved": self.is_reserved,
            "ring": self.ring.state(),
            "episodes": None
            if self.episodes is None
            else self.episodes.saved(self.ring.longest),
            "layout": rows.layout.state(),
            "rows": self.written_rows().given,
            "row_class": self.row_class,
        }
        if rows.dedup is not None:
            state |= {
                "deduplicated": rows.dedup.state(),
                "entries": [alias_of(entries) for entries in rows.used_entries()],
            }
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Replace the content of this storage by a result of :meth:`state_dict`.

        All buffers over this storage treat the rows as new ones, see
        :meth:`tell_replaced`. A load ends unfinished trajectories that have ids, because
        collectors made after the load reuse the ids. Ctrl-C during the load takes
        effect before it or after it.

        Raises:
            SchemaError: the saved rows have other keys, dtypes or shapes; nothing has
                changed.
            ValueError: the capacity or lanes do not fit, a number is wrong, or the
                state is of another kind of storage.
        """
        with self.lock:
            put = self.prepare_load(state_dict)
            with defer_sigint:
                put()
                self.end_load()

    def load(self, content: State) -> None:
        """Load a state as :meth:`load_state_dict` does, but tell nobody; open
        trajectories go on."""
        self.prepare_load(content)()

    def prepare_load(self, content: State) -> Callable[[], None]:
        """Check a state, and read what can be read before the rows are replaced; the
        result replaces them.

        The caller calls it and :meth:`end_load` within ``defer_sigint``.
        """
        saved = self.examine(content)
        if saved is None:
            return self.remove_rows
        return partial(saved.put, saved.read())

    def examine(self, content: State, folder: Path | None = None) -> SavedRows | None:
        """Check a state before it is loaded; return its rows, or None if it has no rows
        to load.

        ``folder`` is that of the files of a dump.
        """
        with state_of(self):
            if "layout" not in content:
                if content.keys() != {"_len"}:  # the state before the first write
                    raise ValueError(
                        f"this is not the state of a PackedStorage (it holds {', '.join(map(repr, content))}): load it "
                        "into a buffer with a storage of its own kind, and use ReplayBuffer.from_torchrl(buffer)"
                    )
                return None
            if content.get("reserved", False) and self.rows is not None:
                return None
            return SavedRows(self, content, folder)

    @staticmethod
    def of_state(content: State) -> PackedStorage:
        """Return a storage in RAM with the rows of a state, in the form and of the
        capacity that they were saved in."""
        lanes = content["rows"].shape[1:-1]
        size = content["ring"]["steps"] * prod(lanes)
        storage = PackedStorage(
            size, ndim=1 + len(lanes), share_next="deduplicated" in content
        )
        storage.load(content)
        return storage

    def end_load(self, but: object = None) -> None:
        """After the rows have been replaced by those of a state, tell all but one
        buffer, see :meth:`tell_replaced`.

        Unfinished trajectories that have ids end: new collectors and recorders reuse the
        ids.
        """
        if self.episodes is not None and self.episodes.id_key is not None:
            self.episodes.end()
        self.tell_replaced(are_loaded=True, but=but)

    @property
    def checkpointer(self) -> None:
        """None: this storage saves itself. TorchRL's buffers set it to None."""

    @checkpointer.setter
    def checkpointer(self, checkpointer: object) -> None:
        if checkpointer is not None:
            self.register_save_hook(checkpointer)

    def register_save_hook(self, hook: object) -> NoReturn:
        """Raise a NotImplementedError."""
        raise NotImplementedError(
            "a PackedStorage saves itself, without TorchRL's checkpointers and hooks: for those use a LazyTensorStorage"
        )

    register_load_hook = register_save_hook

    def dumps(self, path: str | Path) -> None:
        """Save :meth:`state_dict` to a folder. :meth:`ReplayBuffer.dumps` takes no copy
        in RAM, and survives a kill."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path, _STATE_FILE))

    def loads(self, path: str | Path) -> None:
        """Load a dump of :meth:`dumps` as :meth:`load_state_dict` does; no code from
        the dump is executed."""
        file = Path(path, _STATE_FILE)
        if not file.exists():
            remedy = "ReplayBuffer.from_torchrl(folder) reads dumps of TorchRL's buffers over other storages"
            raise FileNotFoundError(
                f"{file} is missing, so that this is no dump of a PackedStorage: {remedy}"
            )
        try:
            content = torch.load(file, weights_only=True)
        except (RuntimeError, UnpicklingError, EOFError) as error:
            raise ValueError(
                f"{file} is damaged, or no dump of a PackedStorage: {error}"
            ) from error
        self.load_state_dict(content)

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle: shared memory for a spawned process, otherwise a
        copy of the rows."""
        if get_spawning_popen() is not None:
            self.share_memory_()
            shared = vars(self) | dict.fromkeys(
                ("_rng", "live", "rows", "_ring", "episodes", "write_plan")
            )
            shared.pop("_clean_up", None)  # this process deletes the file
            return shared
        kept = {
            name: value for name, value in vars(self).items() if name not in _NOT_COPIED
        }
        saved = self.revision, self.ring.rows_written, self.state_dict()
        return kept | {
            "_rng": None,
            "scratch_dir": None,
            "reopen": False,
            "reopened": False,
            "initialized": False,
            "_saved": saved,
        }

    def __setstate__(self, pickled: State) -> None:
        saved = pickled.pop("_saved", None)
        self.__dict__.update(pickled)
        # data sets of TorchRL's next release put an empty one there
        if isinstance(self._attached_entities_list, list):
            self._attached_entities_list = Listeners(self._attached_entities_list)
        if saved is not None:
            revision, rows_written, content = saved
            is_shared = self.shared
            self._begin()
            if is_shared:
                self.share_memory_()
            self.load(content)  # a copy continues open trajectories
            # what was cached for the original is valid for the copy
            self._ring.numbers[REVISION] = revision
            self._ring.count_from(rows_written)
        elif self.shared_rows is not None:  # in a spawned process: map the same rows
            self._ring = Ring(1, 1)
            self.shared_rows.restore(self)
        watched.add(self)
        for listener in listeners_of(self).own():
            listener._rows_restored()

    def __repr__(self) -> str:
        name, rows = type(self).__name__, self.rows
        if rows is None:
            return f"{name}(max_size={self.max_size}, ndim={self.ndim}, device={self.device}, empty)"
        location = str(rows.matrix.device)
        if self.scratch_dir is not None:
            location = "mapped file" + ", shared" * self.shared
        elif self.shared:
            location = "shared memory"
        saved = sum(self.saved_bytes.values())
        location += f", {saved / 2**20:,.1f} MiB saved by deduplication" * (saved != 0)
        lines = (
            f"    {leaf.name}: {str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
            + " (deduplicated)" * (leaf.key in self.deduplicated)
            for leaf in rows.layout.leaves
        )
        head = f"{name}({len(self):,} of {self.max_size:,} rows, shape {tuple(rows.shape)}, "
        head += f"{rows.layout.row_bytes} bytes per row, {rows.nbytes / 2**20:,.1f} MiB, {location}"
        return "\n".join((head, *lines, ")"))


def _names_lanes(index: Any) -> bool:
    """Whether an index selects rows by their lanes, and not whole time steps."""
    first, *others = index if isinstance(index, tuple) and index else (index,)
    return (is_mask(first) and first.ndim > 1) or not all(
        part is Ellipsis or (isinstance(part, slice) and part == slice(None))
        for part in others
    )
