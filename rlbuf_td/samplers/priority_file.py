"""A file with the priorities of the rows of ``PackedStorage(reopen=True)``, from which
another process continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.indexing import written_rows
from rlbuf_td.storages.memory import HEADER, PRIORITY_FILE, SharedFile
from rlbuf_td.storages.numbers import SharedNumbers

_CELLS = 2  # the place of the number of rows, behind:
# the file's first numbers: what it is, and its version
_KIND = int.from_bytes(b"rlbuf_pr", "little"), 1


class PriorityFile:
    """A copy of each row's ``|td_error|``, float32, -1 for rows without a priority, and
    its serial plus 1, int32.

    A process may be killed at any time: a row then has its old or its new priority. Its
    serial says whose priority it is, so that a row never continues with the priority of
    the row that it has replaced. Both lie beside each other in 8 bytes; the serial's
    lowest 32 bits tell a row from those that the cell held before.

    Raises:
        OSError: the disk has too little room.
    """

    def __init__(self, storage: PackedStorage) -> None:
        self.folder = storage.scratch_dir
        self.cells = storage.max_size
        self.process = os.getpid()
        path = Path(self.folder or "", PRIORITY_FILE)
        self.file = SharedFile(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), HEADER
        )
        expected = [*_KIND, self.cells]
        self.numbers = SharedNumbers("q", expected)
        self.largest = SharedNumbers("d", [-1.0])
        size = HEADER + 8 * self.cells
        is_old = os.fstat(self.file.descriptor).st_size == size
        if not is_old:
            os.ftruncate(self.file.descriptor, 0)
            os.ftruncate(self.file.descriptor, size)
        self.file.reserve(-HEADER, size)
        self.numbers.keep_in(self.file, 0, exists=is_old)
        self.largest.keep_in(self.file, 64, exists=is_old)
        self._view()
        if [*self.numbers] != expected:
            self.numbers.set(expected)
            self.largest[0] = -1.0
            self.following[:] = 0

    def _view(self) -> None:
        with torch.inference_mode(False):
            pairs = self.file.map(8 * self.cells).view(torch.int32).view(self.cells, 2)
            self.magnitude, self.following = (
                pairs.view(torch.float32)[:, 0],
                pairs[:, 1],
            )

    def grow(self, cells: int) -> None:
        """Make room for more rows; their priorities follow with the write that needs
        the room."""
        first, self.cells = self.cells, cells
        size = HEADER + 8 * cells
        os.ftruncate(self.file.descriptor, size)
        self.file.reserve(-HEADER, size)  # from the beginning of the file on
        self._view()
        self.magnitude[first:] = -1.0
        # last: a process that dies earlier leaves a file of another size, which is new
        self.numbers[_CELLS] = cells

    def read(self, storage: PackedStorage) -> tuple[Tensor, float]:
        """Return the magnitudes that earlier processes have left, -1 for rows written
        since, and the largest so far."""
        kept = torch.full_like(self.magnitude, -1.0)
        cells = written_rows(storage)
        magnitude = self.magnitude[cells]
        is_kept = (
            magnitude.isfinite()
            & (magnitude >= 0)
            & (self.following[cells] == _next(storage, cells))
        )
        kept[cells] = torch.where(is_kept, magnitude, -1.0)
        largest = (
            self.largest[0]
            if 0 <= self.largest[0] < float("inf") and is_kept.any()
            else -1.0
        )
        return kept, largest

    def copy(
        self,
        rows: Any,
        magnitude: Tensor,
        largest: float,
        storage: PackedStorage | None,
    ) -> None:
        """Copy the magnitudes of some rows, and their serials if ``storage`` is
        given."""
        self.magnitude[rows] = magnitude[rows]
        self.largest[0] = largest
        if storage is not None and storage.rows is not None:
            if isinstance(rows, slice):
                rows = torch.arange(*rows.indices(storage.rows.cells), device="cpu")
            self.following[rows] = _next(storage, rows)

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("magnitude", "following")
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._view()


def _next(storage: PackedStorage, cells: Tensor) -> Tensor:
    return (storage.ring.serial(cells) + 1).to(torch.int32)
