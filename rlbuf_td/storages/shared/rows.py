"""Rows in shared memory: made by whichever process writes first, found by all others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from rlbuf_td.storages.shared.journal import WRITING, WRITTEN, Journal
from rlbuf_td.storages.shared.lock import ProcessLock
from rlbuf_td.storages.shared.memory import NamelessFile
from rlbuf_td.storages.shared.numbers import SharedNumbers

_PAGE = 4096


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
        self._find, self._repair = find, repair
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

    def place(self, flat: torch.Tensor, description: dict[str, Any]) -> torch.Tensor:
        """Describe the rows, ``[N, width]``, unless that is done; return memory to note times in, ``[N]`` int64."""
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
        if not self._has_rows and self._described[0]:
            self._find()
        self.journal.entered()

    def leaving(self, failed: bool) -> bool:
        """Return whether the write is finished: an error may have ended it in the middle."""
        return not (failed and self.journal.phase == WRITING)

    def recover(self) -> None:
        """Undo the write of a process that has died, or finish it."""
        if not self._has_rows and self._described[0]:
            self._find()
        if self.journal.phase != WRITTEN:
            self.journal.undo()
        self._repair(self.journal)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_has_rows": False}
