"""The rows of a dump: how they are read, and how rows of another storage are written to a buffer in order of age."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

from rlbuf_td.checkpoint.files import DumpReader, flat_bytes
from rlbuf_td.checkpoint.manifest import CheckpointError
from rlbuf_td.kernels.huge_pages import take_pages
from rlbuf_td.storages import PackedStorage, state
from rlbuf_td.storages.allocate import ROWS_FILE, make_rows, steps_for
from rlbuf_td.storages.dedup import saved_dedup
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.torchrl_parts import empty_part
from rlbuf_td.storages.writes import begin_load

_AT_ONCE = 64 << 20  # bytes of rows that are copied at once


def split_rows(content: dict[str, Any]) -> list[torch.Tensor]:
    """Remove the tensors of the rows from a storage's state, and return them."""
    return [content.pop("rows"), *content.pop("entries", [])] if "rows" in content else []


class SavedRows:
    """The rows of a dump; the constructor refuses rows that do not fit the storage.

    If capacity and deduplication are equal, files are read straight into the storage's memory.
    Otherwise, the rows are read into another storage first: see :func:`load_newest` for another capacity.
    """

    def __init__(self, reader: DumpReader, saved: dict[str, Any], storage: PackedStorage) -> None:
        self.reader, self.saved, self.storage, self.state = reader, saved, storage, saved["_storage"]
        self.matrix, *self.entries = map(reader.tensor, saved["rows"])
        content, lead, dtype = self.state, self.matrix.shape[:-1], self.matrix.dtype
        self.steps, ring = int(saved["shape"][0]), content["ring"]
        if not (dtype.is_floating_point or dtype is torch.uint8) or not 0 <= lead[0] <= self.steps:
            raise CheckpointError(f"{dtype} of shape {tuple(self.matrix.shape)} cannot be the rows of a storage")
        is_wrong = content["_len"] != prod(lead) or (content["full"] and lead[0] != self.steps)
        if is_wrong or ring["steps"] != self.steps:
            raise CheckpointError(f"{content['_len']} rows and shape {[*lead]} contradict each other")
        self.layout, self.lanes = state.admit_state(storage, content | {"_len": 0, "full": False}, lead[1:])
        state.refuse_counters(content, lead)
        self.dedup = saved_dedup(self.layout, content)
        row_bytes = self.layout.row_bytes if self.dedup is None else self.dedup.stored.row_bytes
        if self.matrix.shape[-1] * dtype.itemsize != row_bytes:
            raise CheckpointError("the layout of the rows does not fit their size")
        rows, used = storage.rows, [stored.shape[0] for stored in self.entries]
        self.capacity = steps_for(storage, self.lanes) if rows is None else rows.steps
        tail, written, ordered = ring["head"]
        self.in_order, self.fits = bool((ordered <= tail).all()), self.steps == self.capacity
        self.dropped = max(0, int((written - tail).max()) - self.capacity)  # time steps
        if not self.fits and not self.in_order:
            sizes = f"a dump of {self.steps} time steps does not fit a capacity of {self.capacity}"
            remedy = "its rows have no order of age to choose the oldest by: load it into the same capacity"
            raise CheckpointError(f"{sizes}, and {remedy}")
        self.is_fresh = rows is None or rows.layout != self.layout  # allocates the rows
        if self.is_fresh or rows is None:
            has_same_form = state.dedup_for(storage, self.layout, self.dedup) == self.dedup
        else:
            has_same_form = rows.takes(self.dedup, used)
        self.is_direct = self.fits and has_same_form
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
        rows = make_rows(storage, self.layout, self.lanes, None, self.dedup)
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
        if isinstance(found, PackedStorage) and not self.fits:
            return load_newest(storage, found)
        if isinstance(found, PackedStorage):
            state.load(storage, found.snapshot())
            return None
        if found is not None:
            storage.adopt(found)
        elif storage.rows is not None:
            begin_load(storage)
            self._read_into(storage.rows)
        storage.restore_counters(self.state)
        return None

    def _read_into(self, rows: Rows) -> None:
        used = [stored.shape[0] for stored in self.entries]
        if self.dedup is not None:
            matrix = self.reader.read(self.matrix)
            state.refuse_foreign(self.dedup, matrix, self.entries, has_holes=state.has_holes(self.state))
            rows.matrix[: len(matrix)].copy_(matrix)
        else:
            self.reader.read_into(self.matrix, flat_bytes(rows.matrix[: self.matrix.shape[0]]))
        for entries, stored in zip(rows.room_for(used), self.entries, strict=True):
            self.reader.read_into(stored, flat_bytes(entries))


def opened(reader: DumpReader, saved: dict[str, Any]) -> PackedStorage:
    """Return a storage in RAM with the rows of a dump, in the form and of the capacity that they were saved in."""
    shape = [int(size) for size in saved["shape"]]
    is_deduplicated = "pooled" in saved["_storage"]
    storage = PackedStorage(prod(shape), ndim=int(saved["ndim"]), share_next=is_deduplicated and "auto")
    rows = SavedRows(reader, saved, storage)
    if rows.lanes != tuple(shape[1:]) or not rows.is_direct:
        raise CheckpointError("the layout of the rows does not fit their size")
    rows.put(rows.read())
    return storage


def load_newest(storage: PackedStorage, source: PackedStorage) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the rows of a storage by the newest rows of ``source`` that fit, those of each lane from slot 0 on.

    Return the cells of these rows in ``source``, and in ``storage``, ``[n]`` each.
    """
    empty_part(storage)
    if storage.rows is not None and storage.rows.layout != source.layout:
        storage.release()
    if storage.rows is None:
        example = torch.empty(*source.lanes, source.row_bytes, dtype=torch.uint8, device="cpu")
        storage.allocate_for(source.all_rows().layout.unpack(example))
        storage.is_reserved = source.is_reserved
    storage.take_class(source.row_class)
    theirs = source.ring
    count = np.minimum(theirs.count, steps_for(storage, source.lanes))
    if theirs.together:
        end = int(theirs.written[0])
        steps, size = torch.arange(end - int(count[0]), end, device="cpu"), source.row_bytes * theirs.lanes
        for part in steps.split(max(1, _AT_ONCE // size)) if len(steps) else ():
            slots = (storage.ring.cursor + torch.arange(len(part), device="cpu")) % storage.ring.steps
            storage.set(slots, source.read(part % theirs.steps))
    else:
        for cells in theirs.newest_cells(count).split(max(1, _AT_ONCE // source.row_bytes)):
            storage.append(cells % theirs.lanes, source.gather(cells))
    ring = storage.ring
    ring.move_up(ring.steps * (theirs.written > count))  # rows before the oldest ones are gone
    since, to = theirs.newest_cells(count), ring.newest_cells(count)
    saved = None if source.episodes is None else source.episodes.saved(theirs.longest)
    if saved is not None:
        back = torch.zeros(theirs.lanes, ring.longest, dtype=torch.int32, device="cpu")
        back[to % theirs.lanes, to // theirs.lanes] = saved["back"][since % theirs.lanes, since // theirs.lanes]
        saved["back"] = back
    storage.load_episodes(saved)
    return since, to
