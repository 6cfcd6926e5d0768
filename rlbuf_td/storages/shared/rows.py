"""Rows that several processes share, and a journal of the write in progress."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from ctypes import addressof
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from rlbuf_td.kernels.dispatch import import_kernels
from rlbuf_td.kernels.episodes import BACK_OF_NEXT
from rlbuf_td.kernels.inference_mode import outside_inference_mode
from rlbuf_td.storages.allocate import find_rows, steps_for
from rlbuf_td.storages.dedup import saved_dedup
from rlbuf_td.storages.indexing import coordinates
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.listeners import Attached, WeakReference
from rlbuf_td.storages.memory_budget import Purpose, require_room
from rlbuf_td.storages.row_class import RowClass
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.shared.journal_file import JournalFile
from rlbuf_td.storages.shared.lock import ProcessLock
from rlbuf_td.storages.shared.memory import NamelessFile, NumberOf, SharedFile, SharedNumbers
from rlbuf_td.storages.torchrl_parts import count_change, listeners_of

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage

_PAGE = 4096
#: Phases: no write; rows and counters are being written; both are written, but listeners may not be notified yet.
IDLE, WRITING, WRITTEN = range(3)
_PHASE, _START, _COUNT, _COUNTERS = range(4)
_MOST_COUNTERS = 32
_SCATTERED = -1
_COPY = Purpose(
    "A copy of the written rows in shared memory takes",
    "Share the rows before they are written (shared=True), or keep them in a file (scratch_dir=...).",
)


class Journal:
    """An undo log of the write in progress, in shared memory; only the holder of the lock uses the log.

    If a process dies during a write, :meth:`undo` restores the old rows and counters.
    """

    def __init__(self) -> None:
        self._words = SharedNumbers("q", [0] * (_COUNTERS + _MOST_COUNTERS)).share_memory_()
        self._counters: list[NumberOf] = []
        self._rows = self._aside = self._cells = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._make_room: Callable[[int], None] | None = None

    def watch(self, *counters: NumberOf) -> None:
        """Add counters that :meth:`undo` restores."""
        self._counters += [counter for counter in counters if all(counter is not known for known in self._counters)]
        if len(self._counters) > _MOST_COUNTERS:
            raise ValueError(f"a storage can be shared by buffers with {_MOST_COUNTERS} counters at most")

    def keep_in(
        self,
        rows: torch.Tensor,
        aside: torch.Tensor,
        cells: torch.Tensor,
        make_room: Callable[[int], None] | None = None,
    ) -> None:
        """Set the memory of the rows, ``[N, width]``, of copies of the rows that a write replaces, and of indices.

        ``make_room(nbytes)`` reserves disk space for that many bytes of copies.
        """
        self._rows, self._aside, self._cells, self._make_room = rows, aside, cells, make_room

    def keep_words_in(self, file: JournalFile) -> None:
        """Keep the phase, the place of the current write, and the old counters in a file."""
        file.keep(self._words)

    def fit(self, count: int) -> None:
        """Make room for copies of ``count`` rows; OSError, before any change, if the disk has too little."""
        if self._make_room is not None:
            self._make_room(count * self._aside.stride(0) * self._aside.element_size())

    def entered(self) -> None:
        words = self._words
        words[_PHASE] = IDLE
        for position, counter in enumerate(self._counters, _COUNTERS):
            words[position] = counter.value

    def begin(self, start: int, count: int, live: int) -> None:
        """Save ``count`` rows of the ring from row ``start`` on, except rows from ``live`` on, which hold no data."""
        rows, words = self._rows, self._words
        self.fit(count if start < live or start + count > len(rows) else 0)
        head = min(count, len(rows) - start)
        for first, rows_here, to in ((start, head, 0), (0, count - head, head)):
            kept = min(first + rows_here, live) - first
            if kept > 0:
                self._aside[to : to + kept] = rows[first : first + kept]
        words[_START], words[_COUNT] = start, count
        words[_PHASE] = WRITING  # last, because this phase says that the rows are saved

    def begin_at(self, cells: torch.Tensor) -> None:
        """Save the rows at flat indices ``cells``, which the write will replace."""
        cells = cells.unique()
        count = len(cells)
        self.fit(count)
        self._cells[:count] = cells
        self._aside[:count] = self._rows[cells]
        self._words[_START], self._words[_COUNT] = _SCATTERED, count
        self._words[_PHASE] = WRITING  # last, as in `begin`

    @property
    def addresses(self) -> dict[str, int]:
        """The addresses with which compiled code saves rows."""
        rows, cells = self._aside.data_ptr(), self._cells.data_ptr()
        return {"journal": addressof(self._words.values), "aside": rows, "aside_cells": cells}

    def saved(self) -> None:
        """Note that compiled code has saved the rows that the write will replace."""
        self._words[_PHASE] = WRITING

    def written(self) -> None:
        if self._words[_PHASE] == WRITING:
            self._words[_PHASE] = WRITTEN

    @property
    def phase(self) -> int:
        return self._words[_PHASE]

    @property
    def cells(self) -> torch.Tensor:
        start, count = self._words[_START], self._words[_COUNT]
        return self._cells[:count] if start < 0 else (start + torch.arange(count, device="cpu")) % len(self._rows)

    def undo(self) -> None:
        words = self._words
        for position, counter in enumerate(self._counters, _COUNTERS):
            counter.value = words[position]
        if words[_PHASE] == WRITING:
            self._rows[self.cells] = self._aside[: words[_COUNT]]

    def __getstate__(self) -> dict[str, Any]:
        nowhere = torch.empty(0, dtype=torch.uint8, device="cpu")  # the receiving process maps the memory again
        return self.__dict__ | {"_rows": nowhere, "_aside": nowhere, "_cells": nowhere, "_make_room": None}


class SharedRows(Attached):
    """The shared memory and the journal of a storage, which a lock protects; the first writer allocates the rows."""

    def __init__(self, storage: PackedStorage) -> None:
        super().__init__(storage)
        self.journal = Journal()
        self.file = NamelessFile()  # for the rows
        self._beside: SharedFile = NamelessFile()  # for all else
        # Size of the rows' description in bytes (0: none yet), and its checksum.
        self._described = SharedNumbers("q", [0, 0]).share_memory_()
        self._has_rows = False  # whether this process maps the rows
        #: Memory for the numbers of episodes, and for what follows in each lane.
        self.of_episodes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._journal_file: JournalFile | None = None
        #: The cursor and the write count of the first ring writer over rows in a file, which later processes continue.
        self.of_writer: SharedNumbers | None = None

    def keep_in(self, journal_file: JournalFile) -> None:
        """Keep all that describes the rows in a file; rows that another process has left are found at the next lock."""
        self._beside = self._journal_file = journal_file
        storage, self.of_writer = self.storage, SharedNumbers("q", [0, 0])
        journal_file.keep(self._described, storage.numbers, storage.episode_state, self.of_writer)
        self.journal.keep_words_in(journal_file)

    def close(self) -> None:
        """Let another process open the file."""
        if self._journal_file is not None:
            self._journal_file.close()

    def restore(self, storage: PackedStorage) -> None:
        """Connect to the storage that a spawned process has received, and map its rows."""
        self._owner = WeakReference(storage)
        self.find()

    def find(self) -> None:
        """Map the rows if another process has allocated them and this process has not mapped them."""
        length = self._described[0]
        if length and not self._has_rows:
            storage = self.storage
            if self._journal_file is not None:
                self._journal_file.refuse_short(length)
            text = bytes(self._beside.map(length).numpy())
            if self._journal_file is not None and zlib.crc32(text) != self._described[1]:
                self._journal_file.refuse("the description of the rows does not match its checksum")
            found = json.loads(text)
            layout, shape = RowLayout.from_state(found["layout"]), torch.Size(found["shape"])
            _refuse_other(storage, shape)
            storage.row_class = storage.row_class or RowClass.of_state(found.get("row_class"))
            storage.adopt(find_rows(storage, layout, shape, saved_dedup(layout, found)))

    def place(self, made: Rows) -> None:
        """Describe the rows to other processes, and move their ring to shared memory."""
        flat, description = made.flat, {"layout": made.layout.state(), "shape": list(made.shape)}
        if self.storage.row_class is not None:
            description["row_class"] = self.storage.row_class.state()
        if made.dedup is not None:
            description["pooled"] = made.dedup.state()
        text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
        rows, row_bytes = flat.shape[0], flat.shape[1] * flat.element_size()
        first = -(-len(text) // _PAGE) * _PAGE
        lanes = rows // made.steps
        nbytes, copies = first + rows * (row_bytes + 24) + 64 * lanes, rows * row_bytes
        make_room = None if self._journal_file is None else self._room(self._journal_file, first, copies, nbytes)
        memory = self._beside.map(nbytes)
        aside, numbers = memory[first : first + rows * row_bytes], memory[first + rows * row_bytes :]
        with outside_inference_mode():  # a later write could not change views that inference mode has made
            numbers, aside = numbers.view(torch.int64), aside.view(flat.dtype).view(flat.shape)
        self.journal.keep_in(flat, aside, numbers[:rows], make_room)
        self._has_rows = True
        ring, found = self.storage._ring, bool(self._described[0])
        end = 2 * rows + 6 * lanes
        ring.keep_in(numbers[2 * rows : end].view(2, 3, lanes), numbers[rows : 2 * rows], found=found)
        following, episodes = numbers[end : end + 2 * lanes].view(2, lanes), numbers[end + 2 * lanes :]
        if not found:
            memory[: len(text)] = text
            self._described[1] = zlib.crc32(text.numpy())
            following[BACK_OF_NEXT] = -1
            self._described[0] = len(text)  # last
        self.of_episodes = episodes.view(torch.int32).view(lanes, made.steps, 2), following

    def _room(self, file: JournalFile, first: int, copies: int, nbytes: int) -> Callable[[int], None]:
        """Return what reserves disk space for copies of rows, from byte ``first`` on; reserve that of all else."""
        if self._described[0]:
            file.refuse_short(nbytes)
        else:
            file.reserve(0, first)
            file.reserve(first + copies, nbytes - first - copies)
        reserved = 0

        def make_room(wanted: int) -> None:
            nonlocal reserved
            if wanted > reserved:
                ahead = min(copies, max(wanted, 2 * reserved))
                file.reserve(first + reserved, ahead - reserved)
                reserved = ahead

        return make_room

    def entered(self) -> None:
        self.find()
        self.journal.entered()
        self._owner().ring.save()  # 1 us less than by the property

    def leaving(self, failed: bool) -> bool:
        return not (failed and self.journal.phase == WRITING)

    def recover(self) -> None:
        self.find()
        journal, storage = self.journal, self.storage
        if journal.phase != WRITTEN:
            journal.undo()
            storage.ring.undo()
        if storage.rows is not None:
            storage.rows.link(storage.ring.serials)
        for listener in listeners_of(storage):
            if hasattr(listener, "repair"):
                listener.repair()
        count_change(storage)
        if journal.phase == WRITTEN:  # the process may have died before it notified the listeners
            index = coordinates(journal.cells, storage)
            for listener in listeners_of(storage):
                listener.mark_update(torch.stack(index, -1) if isinstance(index, tuple) else index)

    def __getstate__(self) -> dict[str, Any]:
        # Without the storage, so that TorchRL's data sets can send the state of a storage without the storage.
        return self.__dict__ | {"_has_rows": False, "of_episodes": None, "_owner": None}


def _refuse_other(storage: PackedStorage, shape: torch.Size) -> None:
    """Raise a ValueError if rows that another process has left do not fit the arguments of this storage."""
    lanes = shape[1:]
    if len(shape) != storage.ndim:
        raise ValueError(f"the rows in {storage.scratch_dir} have ndim={len(shape)}, not ndim={storage.ndim}")
    if storage.lanes_wanted not in (None, *lanes):
        raise ValueError(f"the rows in {storage.scratch_dir} have lanes={lanes[0]}, not lanes={storage.lanes_wanted}")
    if steps_for(storage, lanes) != shape[0]:
        raise ValueError(
            f"the rows in {storage.scratch_dir} have capacity {prod(shape)}, not {storage.max_size}: reopen them with "
            f"max_size={prod(shape)}; rb.dumps and rb.loads transfer rows into another capacity"
        )


def share(storage: PackedStorage, journal_file: JournalFile | None = None) -> None:
    """Move the rows to shared memory, see :meth:`PackedStorage.share_memory_`."""
    if storage.shared_rows is not None:
        return
    if torch.device("cpu" if storage.device == "auto" else storage.device).type != "cpu":
        raise ValueError(
            f"rows on {storage.device} cannot be shared by several processes: keep them on the CPU, and move batches "
            f"(a transform does), or let one process write"
        )
    import_kernels()
    with storage.lock:
        rows = storage.rows
        written = None if rows is None or storage.scratch_dir is not None else rows
        if written is not None and written.dedup is None:
            written = storage.written_rows()  # only these are copied
        if written is not None:
            nbytes = sum(tensor.nbytes for tensor in (written.matrix, *written.used_entries()))
            require_room(nbytes, torch.device("cpu"), _COPY, shared=True)
        storage.device = torch.device("cpu")
        storage.shared_rows = shared = SharedRows(storage)
        lock = ProcessLock(shared, storage.lock)
        if journal_file is not None:
            shared.keep_in(journal_file)
            lock.keep_in(journal_file)
        storage.numbers.share_memory_()
        storage.episode_state.share_memory_()
        if shared.of_writer is not None:
            shared.journal.watch(*shared.of_writer.counters())
        storage.is_reserved = False  # reserved rows can no longer be replaced
        if rows is not None and written is not None:
            moved = find_rows(storage, rows.layout, rows.shape, rows.dedup)
            storage.adopt(moved)
            moved.restore_(written.matrix, written.used_entries())
        elif rows is not None:
            rows.keeps_replaced = True
            shared.place(rows)
            storage.find_episodes(storage.episodes)
        storage.shared = storage.scratch_dir is None
        storage.lock, storage.live = lock, None
