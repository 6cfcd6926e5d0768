"""Rows that several processes use, and a journal of writes; the first writer allocates rows, the others map them."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch

from rlbuf_td.storages.allocate import find_rows
from rlbuf_td.storages.dedup import saved_dedup
from rlbuf_td.storages.indexing import coordinates
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.notebooks import PROCESSES
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.shared.lock import ProcessLock
from rlbuf_td.storages.shared.memory import NamelessFile, SharedNumbers

_PAGE = 4096
#: Phases: no write; rows and counters are being written; both are complete, but listeners may not be notified yet.
IDLE, WRITING, WRITTEN = range(3)
_PHASE, _START, _COUNT, _COUNTERS = range(4)
_MOST_COUNTERS = 16
_SCATTERED = -1


class Counter(Protocol):
    """A number in shared memory."""

    value: int


class Journal:
    """The write in progress, in shared memory.

    The journal saves the counters when a process takes the lock, and written rows before they are overwritten. If a
    process dies before the new rows and counters are complete, :meth:`undo` restores the old ones, as if the write had
    not begun. After that point the write counts as done, and the remaining work can safely be repeated.

    The journal belongs to the process that holds the lock. It is valid only while the lock is marked as held: from the
    end of :meth:`entered` until the work is done. Invariant: the phase is stored last, in a single store, and a process
    dies between two stores. The new phase therefore proves that everything stored before it is complete.
    """

    def __init__(self) -> None:
        self._words = SharedNumbers("q", [0] * (_COUNTERS + _MOST_COUNTERS)).share_memory_()
        self._counters: list[Counter] = []
        self._rows = self._aside = self._cells = torch.empty(0, dtype=torch.uint8, device="cpu")

    def watch(self, *counters: Counter) -> None:
        """Also restore these counters when a write is undone."""
        self._counters += [counter for counter in counters if all(counter is not known for known in self._counters)]
        if len(self._counters) > _MOST_COUNTERS:
            raise ValueError(f"a storage can be shared by buffers with {_MOST_COUNTERS} counters at most")

    def keep_in(self, rows: torch.Tensor, aside: torch.Tensor, cells: torch.Tensor) -> None:
        """Set the rows' memory, ``[N, width]``, and the memory for copies of overwritten rows and their positions."""
        self._rows, self._aside, self._cells = rows, aside, cells

    def entered(self) -> None:
        """Save the counters; nothing is being written yet."""
        words = self._words
        words[_PHASE] = IDLE
        for position, counter in enumerate(self._counters, _COUNTERS):
            words[position] = counter.value

    def begin(self, start: int, count: int, live: int) -> None:
        """Announce a write of ``count`` rows from ``start`` on, wrapping; only the first ``live`` rows need saving."""
        rows, words = self._rows, self._words
        head = min(count, len(rows) - start)
        for first, rows_here, to in ((start, head, 0), (0, count - head, head)):
            kept = min(first + rows_here, live) - first
            if kept > 0:
                self._aside[to : to + kept] = rows[first : first + kept]
        words[_START], words[_COUNT] = start, count
        words[_PHASE] = WRITING

    def begin_at(self, cells: torch.Tensor) -> None:
        """Announce a write at flat rows ``cells``, in any order."""
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
        start, count = self._words[_START], self._words[_COUNT]
        return self._cells[:count] if start < 0 else (start + torch.arange(count, device="cpu")) % len(self._rows)

    def undo(self) -> None:
        words = self._words
        for position, counter in enumerate(self._counters, _COUNTERS):
            counter.value = words[position]
        if words[_PHASE] == WRITING:
            self._rows[self.cells] = self._aside[: words[_COUNT]]

    def __getstate__(self) -> dict[str, Any]:
        nowhere = torch.empty(0, dtype=torch.uint8, device="cpu")  # a receiver of the storage maps the memory again
        return self.__dict__ | {"_rows": nowhere, "_aside": nowhere, "_cells": nowhere}


class SharedRows:
    """The memory of a storage that several processes use, their lock, and the journal of their writes.

    The first write fixes the layout, perhaps after the processes were forked. Until then the memory is an empty file;
    the first writer sets its size and describes the rows, and the others map it.
    """

    def __init__(self, storage: Any) -> None:
        self.journal = Journal()
        self._storage = storage
        self._rows, self._beside = NamelessFile(), NamelessFile()
        self._described = SharedNumbers("q", [0]).share_memory_()  # size of the rows' description in bytes; 0: none yet
        self._has_rows = False  # whether this process maps the rows
        self.lock = ProcessLock(self, storage.lock)

    # -- memory

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return the memory for the rows, ``[nbytes]`` uint8."""
        return self._rows.map(nbytes)

    def find(self) -> None:
        """Map the rows that another process has allocated, if there are any and the storage has none."""
        length, storage = self._described[0], self._storage
        if length and not self._has_rows:
            found = json.loads(bytes(self._beside.map(length).numpy()))
            layout = RowLayout.from_state(found["layout"])
            storage.adopt(find_rows(storage, layout, torch.Size(found["shape"]), saved_dedup(layout, found)))

    def place(self, made: Rows) -> torch.Tensor:
        """Describe the rows for other processes; return the memory for the rows' write times, ``[N]`` int64."""
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

    # -- hooks of the lock

    def entered(self) -> None:
        """Map rows that another process has allocated; save the counters."""
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
        if journal.phase == WRITTEN:  # the process may have died before it notified the listeners
            index = coordinates(journal.cells, storage)
            for listener in storage._attached_entities:
                listener.mark_update(torch.stack(index, -1) if isinstance(index, tuple) else index)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_has_rows": False}


def share(storage: Any) -> Any:
    """Share the rows with processes that are forked from now on, or spawned and sent this storage.

    Rows in RAM move to shared memory. Before the first write, the first process to write allocates the rows.
    The storage's ``lock`` admits one process at a time. If a process dies during a write, the write is undone.
    Cost: one copy of all rows in RAM; later, each write also copies the rows that it overwrites.

    Raises:
        ValueError: the rows are on a CUDA device.
    """
    if storage.shared_rows is not None:
        return storage
    if storage.offload or torch.device("cpu" if storage.device == "auto" else storage.device).type != "cpu":
        where = f"page-locked in this process for {storage.device}" if storage.offload else f"on {storage.device}"
        raise ValueError(
            f"rows {where} cannot be shared by several processes: keep them on the CPU, and move batches "
            f"(a transform does), or let one process write{PROCESSES}"
        )
    with storage.lock:
        storage.device = torch.device("cpu")
        storage.shared_rows = shared = SharedRows(storage)
        storage.numbers.share_memory_()
        clock = storage.clock.numbers.share_memory_().counters()
        shared.journal.watch(storage._len_value, storage._last_cursor_index_value, *clock)
        storage.is_reserved, rows = False, storage.rows  # reserved rows can no longer be replaced
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
