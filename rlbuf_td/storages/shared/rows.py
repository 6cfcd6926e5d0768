"""Rows that several processes use: made by whichever writes first, found by all others, and the journal of a write."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import torch

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
        self._words = SharedNumbers("q", [0] * (_COUNTERS + _MOST_COUNTERS))
        self._counters: list[Counter] = []
        self._rows = self._aside = self._cells = torch.empty(0)

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
        """Announce that rows and counters are complete."""
        if self._words[_PHASE] == WRITING:
            self._words[_PHASE] = WRITTEN

    @property
    def phase(self) -> int:
        """How far the write in progress is."""
        return self._words[_PHASE]

    @property
    def range(self) -> tuple[int, int]:
        """First flat row and number of rows of the write in progress; the first is negative if they are scattered."""
        return self._words[_START], self._words[_COUNT]

    @property
    def cells(self) -> torch.Tensor:
        """The flat rows of the write in progress, if they are scattered."""
        return self._cells[: self._words[_COUNT]]

    def undo(self) -> None:
        """Put back the counters, and the rows that could be read; may be done again."""
        words = self._words
        for position, counter in enumerate(self._counters, _COUNTERS):
            counter.value = words[position]
        if words[_PHASE] != WRITING:
            return
        start, count = self.range
        if start == _SCATTERED:
            self._rows[self.cells] = self._aside[:count]
            return
        head = min(count, len(self._rows) - start)
        self._rows[start : start + head] = self._aside[:head]
        self._rows[: count - head] = self._aside[head:count]

    def __getstate__(self) -> dict[str, Any]:
        nowhere = torch.empty(0)  # whoever is sent the storage finds its memory anew
        return self.__dict__ | {"_rows": nowhere, "_aside": nowhere, "_cells": nowhere}


class SharedRows:
    """The memory of a storage that several processes use, the lock that they take, and the journal of their writes.

    What the rows hold is known only with the first write, which may come after the processes have parted. Until then
    the memory is an empty file; whoever writes first settles its size and describes the rows, the others map it.

    Args:
        thread_lock: what has guarded the rows so far.
        find: called by a process that comes in and does not have the rows that another has made meanwhile.
        repair: called with a journal whose writer has died, see :class:`Journal`.
    """

    def __init__(self, thread_lock: Any, find: Callable[[], object], repair: Callable[[Journal], None]) -> None:
        self.journal = Journal()
        self.find, self._repair = find, repair
        self._rows, self._beside = NamelessFile(), NamelessFile()
        self._described = SharedNumbers("q", [0])  # bytes of the description of the rows; 0: there are none yet
        self._has_rows = False  # in this process
        self.lock = ProcessLock(self, thread_lock)

    # -- memory

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return the memory for the rows, ``[nbytes]`` uint8."""
        return self._rows.map(nbytes)

    def description(self) -> dict[str, Any] | None:
        """Return how the rows were described, or None: there are none yet."""
        length = self._described[0]
        return json.loads(bytes(self._beside.map(length).numpy())) if length else None

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

    def begin_write(self, rows: Rows, start: int, count: int, live: int) -> None:
        """Announce a write of ``count`` time steps from ``start`` on, the first ``live`` flat rows being written."""
        lanes = rows.cells // rows.steps
        self.journal.begin(start * lanes, count * lanes, live)

    # -- what the lock tells

    def entered(self) -> None:
        """Look for rows that another process has made; remember the counters."""
        if not self._has_rows and self._described[0]:
            self.find()
        self.journal.entered()

    def leaving(self, failed: bool) -> bool:
        """Return whether the write is finished: an error may have ended it in the middle."""
        return not (failed and self.journal.phase == WRITING)

    def recover(self) -> None:
        """Undo the write of a process that has died, or finish it."""
        if not self._has_rows and self._described[0]:
            self.find()
        if self.journal.phase != WRITTEN:
            self.journal.undo()
        self._repair(self.journal)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_has_rows": False}
