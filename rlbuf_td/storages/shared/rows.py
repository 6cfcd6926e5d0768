"""Rows that several processes use: made by whichever writes first, found by all others, and the journal of a write."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch

from rlbuf_td.storages.allocate import find_rows
from rlbuf_td.storages.dedup import saved_dedup
from rlbuf_td.storages.indexing import coordinates
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.shared.lock import ProcessLock
from rlbuf_td.storages.shared.memory import NamelessFile, SharedNumbers

_PAGE = 4096
#: Nothing is being written; rows are being written; rows and counters are, and listeners are being told.
IDLE, WRITING, WRITTEN = range(3)
_PHASE, _START, _COUNT, _COUNTERS = range(4)
_MOST_COUNTERS = 16
_SCATTERED = -1


class Counter(Protocol):
    """A number in shared memory."""

    value: int


class Journal:
    """The write in progress, in memory that all processes see.

    Before rows are overwritten, those that can be read are copied aside, and so are the counters when a process comes
    in. Until the new rows and counters are complete, a process that dies has written nothing: :meth:`undo` puts back
    what was there. From then on its write is done, and what is left to do can be done twice.

    The journal is of the process that holds the lock; what it says counts only while the lock is marked as held, which
    it is from after :meth:`entered` until the work is done. All rests on one invariant: a process is killed between two
    stores, so that a store to one number, made after others, says that these are made.
    """

    def __init__(self) -> None:
        self._words = SharedNumbers("q", [0] * (_COUNTERS + _MOST_COUNTERS)).share_memory_()
        self._counters: list[Counter] = []
        self._rows = self._aside = self._cells = torch.empty(0, dtype=torch.uint8, device="cpu")

    def watch(self, *counters: Counter) -> None:
        """Put these counters back, too, when a write is undone."""
        self._counters += [counter for counter in counters if all(counter is not known for known in self._counters)]
        if len(self._counters) > _MOST_COUNTERS:
            raise ValueError(f"a storage can be shared by buffers with {_MOST_COUNTERS} counters at most")

    def keep_in(self, rows: torch.Tensor, aside: torch.Tensor, cells: torch.Tensor) -> None:
        """Take note where the rows are (``[N, width]``), and where to put copies of them and their positions."""
        self._rows, self._aside, self._cells = rows, aside, cells

    def entered(self) -> None:
        """Remember the counters; nothing is being written yet."""
        words = self._words
        words[_PHASE] = IDLE
        for position, counter in enumerate(self._counters, _COUNTERS):
            words[position] = counter.value

    def begin(self, start: int, count: int, live: int) -> None:
        """Announce a write of ``count`` rows from flat row ``start`` on, wrapping; the first ``live`` rows are read."""
        rows, words = self._rows, self._words
        head = min(count, len(rows) - start)
        for first, rows_here, to in ((start, head, 0), (0, count - head, head)):
            kept = min(first + rows_here, live) - first
            if kept > 0:
                self._aside[to : to + kept] = rows[first : first + kept]
        words[_START], words[_COUNT] = start, count
        words[_PHASE] = WRITING

    def begin_at(self, cells: torch.Tensor) -> None:
        """Announce a write at flat rows that can be read, in any order."""
        cells = cells.unique()
        count = len(cells)
        self._cells[:count] = cells
        self._aside[:count] = self._rows[cells]
        self._words[_START], self._words[_COUNT] = _SCATTERED, count
        self._words[_PHASE] = WRITING

    def written(self) -> None:
        if self._words[_PHASE] == WRITING:
            self._words[_PHASE] = WRITTEN

    @property
    def phase(self) -> int:
        return self._words[_PHASE]

    @property
    def cells(self) -> torch.Tensor:
        """The flat rows of the write in progress."""
        start, count = self._words[_START], self._words[_COUNT]
        return self._cells[:count] if start < 0 else (start + torch.arange(count, device="cpu")) % len(self._rows)

    def undo(self) -> None:
        """Put back the counters, and the rows that could be read; may be done again."""
        words = self._words
        for position, counter in enumerate(self._counters, _COUNTERS):
            counter.value = words[position]
        if words[_PHASE] == WRITING:
            self._rows[self.cells] = self._aside[: words[_COUNT]]

    def __getstate__(self) -> dict[str, Any]:
        nowhere = torch.empty(0, dtype=torch.uint8, device="cpu")  # whoever is sent the storage finds its memory anew
        return self.__dict__ | {"_rows": nowhere, "_aside": nowhere, "_cells": nowhere}


class SharedRows:
    """The memory of a storage that several processes use, the lock that they take, and the journal of their writes.

    What the rows hold is known only with the first write, which may come after the processes have parted. Until then
    the memory is an empty file; whoever writes first settles its size and describes the rows, the others map it.
    """

    def __init__(self, storage: Any) -> None:
        self.journal = Journal()
        self._storage = storage
        self._rows, self._beside = NamelessFile(), NamelessFile()
        self._described = SharedNumbers("q", [0]).share_memory_()  # bytes of the rows' description; 0: none yet
        self._has_rows = False  # in this process
        self.lock = ProcessLock(self, storage.lock)

    # -- memory

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return the memory for the rows, ``[nbytes]`` uint8."""
        return self._rows.map(nbytes)

    def find(self) -> None:
        """Let the storage use the rows that another process has made, if there are any, unless it does."""
        length, storage = self._described[0], self._storage
        if length and not self._has_rows:
            found = json.loads(bytes(self._beside.map(length).numpy()))
            layout = RowLayout.from_state(found["layout"])
            storage.adopt(find_rows(storage, layout, torch.Size(found["shape"]), saved_dedup(layout, found)))

    def place(self, made: Rows) -> torch.Tensor:
        """Describe the rows, unless that is done; return memory to note the times of writes in, ``[N]`` int64."""
        flat, description = made.flat, {"layout": made.layout.state(), "shape": list(made.shape)}
        if made.dedup is not None:
            description["pooled"] = made.dedup.state()
        text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
        rows, row_bytes = flat.shape[0], flat.shape[1] * flat.element_size()
        first = -(-len(text) // _PAGE) * _PAGE
        memory = self._beside.map(first + rows * (row_bytes + 16))
        aside, numbers = memory[first : first + rows * row_bytes], memory[first + rows * row_bytes :].view(torch.int64)
        self.journal.keep_in(flat, aside.view(flat.dtype).view(flat.shape), numbers[:rows])
        self._has_rows = True
        if not self._described[0]:
            memory[: len(text)] = text
            self._described[0] = len(text)
        return numbers[rows:]

    # -- what the lock tells

    def entered(self) -> None:
        """Look for rows that another process has made; remember the counters."""
        self.find()
        self.journal.entered()

    def leaving(self, failed: bool) -> bool:
        """Return whether the write is finished: an error may have ended it in the middle."""
        return not (failed and self.journal.phase == WRITING)

    def recover(self) -> None:
        self.find()
        journal, storage = self.journal, self._storage
        if journal.phase != WRITTEN:
            journal.undo()
        if storage.rows is not None:
            storage.rows.rebuild()
        for listener in storage._attached_entities:
            if hasattr(listener, "repair"):
                listener.repair()
        storage._bump_mutation_revision()
        if journal.phase == WRITTEN:  # the process may have died before it told the listeners
            index = coordinates(journal.cells, storage)
            for listener in storage._attached_entities:
                listener.mark_update(torch.stack(index, -1) if isinstance(index, tuple) else index)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_has_rows": False}


def share(storage: Any) -> Any:
    """Let processes that are forked from now on, or spawned and sent this storage, use the same rows.

    Rows in RAM move to shared memory. Before the first write, whichever process writes first allocates the rows.
    The storage's ``lock`` lets one process in at a time; a write that a dying process leaves unfinished is undone.
    Cost: a copy of the rows, then one of the rows that a write overwrites.

    Raises:
        ValueError: the rows are on a CUDA device.
    """
    if storage.shared_rows is not None:
        return storage
    if storage.offload or torch.device("cpu" if storage.device == "auto" else storage.device).type != "cpu":
        where = f"page-locked in this process for {storage.device}" if storage.offload else f"on {storage.device}"
        raise ValueError(
            f"rows {where} cannot be shared by several processes: keep them on the CPU, and move batches "
            "(a transform does), or let one process write"
        )
    with storage.lock:
        storage.device = torch.device("cpu")
        storage.shared_rows = shared = SharedRows(storage)
        storage.numbers.share_memory_()
        clock = storage.clock.numbers.share_memory_().counters()
        shared.journal.watch(storage._len_value, storage._last_cursor_index_value, *clock)
        storage.is_reserved, rows = False, storage.rows  # no process may put other rows in place of reserved ones
        if rows is not None and storage.scratch_dir is None:
            moved = find_rows(storage, rows.layout, rows.shape, rows.dedup)
            storage.adopt(moved)
            moved.restore_(rows.matrix, rows.entries())
        elif rows is not None:
            rows.is_deferred = True
            storage.clock.keep_in(shared.place(rows))
        storage.shared = storage.scratch_dir is None
        storage.lock, storage._live = shared.lock, None
    return storage
