"""The rows of a state: how they are checked, read, and put into a storage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rlbuf_td.kernels.host_memory import take_pages
from rlbuf_td.storages.checks import State
from rlbuf_td.storages.dedup import saved_dedup
from rlbuf_td.storages.entries import refuse_foreign
from rlbuf_td.storages.episodes import refuse_episodes
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.memory import ROWS_FILE
from rlbuf_td.storages.ring import refuse_ring
from rlbuf_td.storages.schema import SchemaError

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage
    from rlbuf_td.storages.rows import Rows

#: Cells of rows before and after a load, ``[n]`` int64 each.
Moves: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class SavedRows:
    """The rows of a state; the constructor refuses rows that do not fit the storage.

    If capacity and deduplication are equal, the saved bytes are copied. Otherwise, a
    storage of the saved kind takes them first, and :meth:`PackedStorage.load_newest`
    writes its newest rows.

    Args:
        storage: takes the rows.
        content: the state. Its rows and entries are tensors, or files that are read
            where they are needed.
        folder: the folder of these files.

    Raises:
        SchemaError: the storage has other rows, or their size does not follow from
            their layout.
        ValueError: lanes do not fit, or a number is wrong.
    """

    def __init__(
        self, storage: PackedStorage, content: State, folder: Path | None
    ) -> None:
        self.storage, self.matrix, self.entries = (
            storage,
            content["rows"],
            content.get("entries", []),
        )
        self.layout = layout = RowLayout.from_state(content["layout"])
        self.lanes, self.dedup = self.matrix.shape[1:-1], saved_dedup(layout, content)
        self._refuse_others(content)
        ring, rows = content["ring"], storage.rows
        self.steps, self.capacity = ring["steps"], storage.steps_for(self.lanes)
        self.fits = self.steps == self.capacity
        self.is_new = rows is None or rows.layout != layout
        own_dedup = (
            storage.dedup_for(layout, self.dedup) if self.is_new else storage.dedup
        )
        self.is_direct = self.fits and own_dedup == self.dedup
        tail, written = ring["head"]
        self.dropped = max(0, int((written - tail).max()) - self.capacity)  # time steps
        scratch = storage.scratch_dir
        is_there = (
            folder is not None
            and scratch is not None
            and scratch.resolve() == folder.resolve()
        )
        self._replaces_file = self.is_new and is_there
        # Files read into new memory are checked while they are read: if one is damaged,
        # that memory is discarded.
        self.is_read_once = (
            not self.is_direct or self.is_new
        ) and not self._replaces_file
        if self.dedup is not None and self.is_direct:
            self.matrix = (
                self.matrix
                if isinstance(self.matrix, torch.Tensor)
                else self.matrix.read()
            )
            refuse_foreign(self.dedup, self.matrix, self.entries, ring)
        self.content = content | {"rows": self.matrix}

    def _refuse_others(self, content: State) -> None:
        """Raise an error for rows that do not fit the storage, and for numbers that do
        not fit the rows."""
        storage, layout, lanes, lead = (
            self.storage,
            self.layout,
            self.lanes,
            self.matrix.shape[:-1],
        )
        rows = storage.rows
        storage.refuse_layout(layout)
        may_get_more = (
            rows is not None
            and storage.is_reserved
            and set(rows.layout.leaves) <= set(layout.leaves)
        )
        if rows is not None and layout != rows.layout and not may_get_more:
            raise SchemaError(
                "the saved rows have other keys, dtypes or shapes than this storage"
            )
        if len(lanes) != storage.ndim - 1 or (rows is not None and lanes != rows.lanes):
            own = (
                tuple(rows.lanes)
                if rows is not None
                else f"of a storage with ndim={storage.ndim}"
            )
            remedy = "copy lane after lane into other lanes, rb.extend(old.lane(e).chronological(), lanes=e)"
            raise ValueError(
                f"saved rows of lanes {tuple(lanes)} do not fit lanes {own}: {remedy}"
            )
        if content["_len"] != lead.numel():
            raise ValueError(
                f"the saved length is {content['_len']!r}, expected that of the rows, {lead.numel()}"
            )
        refuse_ring(content["ring"], lead)
        refuse_episodes(content.get("episodes"), lanes.numel(), lead[0])
        stored = layout if self.dedup is None else self.dedup.stored
        found = self.matrix.dtype, self.matrix.shape[-1] * self.matrix.dtype.itemsize
        if found != (stored.carrier, stored.row_bytes):
            raise SchemaError(
                f"the saved rows are {found[0]}, {found[1]} bytes each, expected {stored.row_bytes}"
            )

    def read(self) -> Rows | PackedStorage | None:
        """Read the rows into new memory, or into another storage; return None if
        :meth:`put` reads them."""
        storage = self.storage
        found = None if self.is_direct else storage.of_state(self.content)
        # The reserved and the new rows may not fit together.
        if self.is_new and storage.is_reserved and storage.scratch_dir is not None:
            storage.release()
        # left by the process that wrote the dump
        if self._replaces_file and storage.scratch_dir is not None:
            (storage.scratch_dir / ROWS_FILE).unlink(missing_ok=True)
        if found is not None or not self.is_new:
            return found
        device = self.matrix.device if isinstance(self.matrix, torch.Tensor) else None
        rows = None
        try:
            with defer_sigint:
                rows = storage.make_rows(self.layout, self.lanes, device, self.dedup)
            if storage.scratch_dir is None:
                take_pages(rows.first(self.matrix.shape[0]).matrix)
            rows.restore_(self.matrix, self.entries)
        except BaseException:
            if rows is not None and storage.scratch_dir is not None:
                (storage.scratch_dir / ROWS_FILE).unlink()
            raise
        return rows

    def put(self, found: Any) -> Moves | None:
        """Replace the rows of the storage by what :meth:`read` has returned.

        If they lie in other cells than in the state, return their cells there and here.
        """
        storage = self.storage
        if not self.is_direct:
            moved = storage.load_newest(found)
            return None if self.fits else moved
        if found is not None:
            storage.adopt(found)
        else:
            storage.begin_load()
            storage.all_rows().restore_(self.matrix, self.entries)
        storage.restore_counters(self.content)
        return None
