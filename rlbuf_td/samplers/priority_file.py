"""A file with the priorities of the rows of ``PackedStorage(reopen=True)``, from which another process continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.lane_heads import holes_among
from rlbuf_td.storages.shared.journal_file import PRIORITY_FILE
from rlbuf_td.storages.shared.memory import SharedFile, SharedNumbers

_HEADER = 1 << 16  # bytes of the header; a multiple of every system's page size
_KIND = int.from_bytes(b"rlbuf_pr", "little"), 1  # the file's first numbers: what it is, and its version
_ENTERED = 3  # position in the header: the count of the write clock when new rows last got their priority


class PriorityFile:
    """A copy of each row's ``|td_error|``, float64, -1 for rows without a priority, after a header of 64-bit numbers.

    A process may be killed at any time: a row then has its old or its new priority. The header says which writes have
    entered their rows, so that a row never continues with the priority of the row that it has replaced.

    Raises:
        OSError: the disk has too little room.
    """

    def __init__(self, storage: PackedStorage) -> None:
        self.folder, self.cells, self.process = storage.scratch_dir, storage.max_size, os.getpid()
        path = Path(self.folder or "", PRIORITY_FILE)
        self.file = SharedFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), _HEADER)
        expected = [*_KIND, self.cells]
        self.numbers, self.largest = SharedNumbers("q", [*expected, -1]), SharedNumbers("d", [-1.0])
        size = _HEADER + 8 * self.cells
        is_old = os.fstat(self.file.descriptor).st_size == size
        if not is_old:
            os.ftruncate(self.file.descriptor, 0)
            os.ftruncate(self.file.descriptor, size)
        if hasattr(os, "posix_fallocate"):  # a write to a mapped file crashes the process on a full disk
            os.posix_fallocate(self.file.descriptor, 0, size)
        self._map(is_old)
        if self.numbers.values[:3] != expected:
            self.numbers.values[:] = [*expected, -1]
            self.largest[0] = -1.0

    def _map(self, found: bool) -> None:
        self.numbers.keep_in(self.file, 0, found=found)
        self.largest.keep_in(self.file, 64, found=found)
        self._view()

    def _view(self) -> None:
        with torch.inference_mode(False):
            self.magnitude = self.file.map(8 * self.cells).view(torch.float64)

    def grow(self, cells: int) -> None:
        """Make room for more rows; their priorities follow with the write that needs the room."""
        first, self.cells = self.cells, cells
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.file.descriptor, 0, _HEADER + 8 * cells)
        self._view()
        self.magnitude[first:] = -1.0
        self.numbers[2] = cells

    def found(self, storage: PackedStorage) -> tuple[Tensor, float]:
        """Return the magnitudes that earlier processes have left, -1 for rows written since, and the largest so far."""
        entered, now, kept = int(self.numbers[_ENTERED]), storage.clock.now, torch.full_like(self.magnitude, -1.0)
        cells, found = torch.arange(len(storage), device="cpu"), self.magnitude[: len(storage)]
        if not len(cells) or not 0 <= entered <= now:
            return kept, -1.0
        is_kept = found.isfinite() & (found >= 0)
        if entered < now:
            stamps = torch.full_like(cells, entered)
            is_kept &= storage.clock.skip_rewritten(cells, stamps, storage.all_rows().shape)[0] >= 0
        if (holes := holes_among(storage, cells)) is not None:
            is_kept &= ~holes
        kept[: len(cells)] = torch.where(is_kept, found, -1.0)
        largest = self.largest[0] if 0 <= self.largest[0] < float("inf") and is_kept.any() else -1.0
        return kept, largest

    def copy(self, rows: Any, magnitude: Tensor, largest: float, now: int | None = None) -> None:
        """Copy the magnitudes of some rows; ``now`` is the write clock's count if the rows are new."""
        self.magnitude[rows] = magnitude[rows].to(torch.float64)
        self.largest[0] = largest
        if now is not None:
            self.numbers[_ENTERED] = now

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "magnitude"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._view()
