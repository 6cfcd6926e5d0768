"""The rows of a dump: how they are checked, read, and put into a storage."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from rlbuf_td.checkpoint.files import DumpReader, flat_bytes
from rlbuf_td.checkpoint.manifest import CheckpointError
from rlbuf_td.kernels.host_memory import take_pages
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.entries import refuse_foreign
from rlbuf_td.storages.memory import ROWS_FILE
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.writes import begin_load


def split_rows(content: dict[str, Any]) -> list[torch.Tensor]:
    """Remove the tensors of the rows from a storage's state, and return them."""
    return [content.pop("rows"), *content.pop("entries", [])] if "rows" in content else []


class SavedRows:
    """The rows of a dump; the constructor refuses rows that do not fit the storage.

    If capacity and deduplication are equal, files are read straight into the storage's memory.
    Otherwise, the rows are read into another storage first, and :meth:`PackedStorage.load_newest` writes them.
    """

    def __init__(self, reader: DumpReader, saved: dict[str, Any], storage: PackedStorage) -> None:
        self.reader, self.saved, self.storage, self.state = reader, saved, storage, saved["_storage"]
        self.matrix, *self.entries = map(reader.tensor, saved["rows"])
        content, lead, dtype = self.state, self.matrix.shape[:-1], self.matrix.dtype
        self.steps, ring = int(saved["shape"][0]), content["ring"]
        if not (dtype.is_floating_point or dtype is torch.uint8) or not 0 <= lead[0] <= self.steps:
            raise CheckpointError(f"{dtype} of shape {tuple(self.matrix.shape)} cannot be the rows of a storage")
        if ring["steps"] != self.steps:
            raise CheckpointError(f"a ring of {ring['steps']} slots and shape {saved['shape']} contradict each other")
        form = storage.saved_form(content, self.matrix)
        self.layout, self.lanes, self.dedup, self.is_fresh = form.layout, form.lanes, form.dedup, form.is_new
        self.capacity, self.is_direct, self.fits = form.capacity, form.is_direct, self.steps == form.capacity
        tail, written, ordered = ring["head"]
        self.in_order = bool((ordered <= tail).all())
        self.dropped = max(0, int((written - tail).max()) - self.capacity)  # time steps
        own = storage.scratch_dir
        self._replaces_file = self.is_fresh and own is not None and own.resolve() == reader.path.resolve()
        # Files read into new memory are checked while they are read: if one is damaged, that memory is discarded.
        self._is_read_once = (not self.is_direct or self.is_fresh) and not self._replaces_file

    @property
    def nbytes(self) -> int:
        return (1 if self._is_read_once else 2) * sum(stored.nbytes for stored in (self.matrix, *self.entries))

    def verify(self) -> None:
        if not self._is_read_once:
            self.reader.verify([self.matrix, *self.entries])

    def read(self) -> Rows | PackedStorage | None:
        """Read the rows into new memory, or into another storage; return None if :meth:`put` reads them."""
        storage = self.storage
        found = None if self.is_direct else opened(self.reader, self.saved)
        # The reserved and the new rows may not fit together.
        if self.is_fresh and storage.is_reserved and storage.scratch_dir is not None:
            storage.release()
        if storage.scratch_dir is not None and self._replaces_file:  # left by the process that wrote the dump
            (storage.scratch_dir / ROWS_FILE).unlink(missing_ok=True)
        if found is not None or not self.is_fresh:
            return found
        rows = storage.make_rows(self.layout, self.lanes, None, self.dedup)
        if storage.scratch_dir is None:
            take_pages(rows.first(self.matrix.shape[0]).matrix)
        try:
            self._read_into(rows)
        except BaseException:
            if storage.scratch_dir is not None:
                (storage.scratch_dir / ROWS_FILE).unlink()
            raise
        return rows

    def put(self, found: Rows | PackedStorage | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Replace the rows of the storage by what :meth:`read` has returned.

        If they lie in other cells than in the dump, return their cells there and here, ``[n]`` each.
        """
        storage = self.storage
        if isinstance(found, PackedStorage):
            moved = storage.load_newest(found)
            return None if self.fits else moved
        if found is not None:
            storage.adopt(found)
        elif storage.rows is not None:
            self._read_into(storage.rows)
        storage.restore_counters(self.state)
        return None

    def _read_into(self, rows: Rows) -> None:
        used, matrix = [stored.shape[0] for stored in self.entries], None
        if self.dedup is not None:
            matrix = self.reader.read(self.matrix)
            refuse_foreign(self.dedup, matrix, self.entries, self.state["ring"])
        if rows is self.storage.rows:
            begin_load(self.storage)
        if matrix is not None:
            rows.matrix[: len(matrix)].copy_(matrix)
        else:
            self.reader.read_into(self.matrix, flat_bytes(rows.matrix[: self.matrix.shape[0]]))
        for entries, stored in zip(rows.room_for(used), self.entries, strict=True):
            self.reader.read_into(stored, flat_bytes(entries))


def opened(reader: DumpReader, saved: dict[str, Any]) -> PackedStorage:
    """Return a storage in RAM with the rows of a dump, in the form and of the capacity that they were saved in."""
    shape = [int(size) for size in saved["shape"]]
    is_deduplicated = "deduplicated" in saved["_storage"]
    storage = PackedStorage(prod(shape), ndim=int(saved["ndim"]), share_next=is_deduplicated and "auto")
    rows = SavedRows(reader, saved, storage)
    if rows.lanes != tuple(shape[1:]) or not rows.is_direct:
        raise CheckpointError("the layout of the rows does not fit their size")
    rows.put(rows.read())
    return storage
