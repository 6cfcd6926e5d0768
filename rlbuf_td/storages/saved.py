"""The rows of a state: how they are checked, read, and put into a storage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlbuf_td.kernels.host_memory import take_pages
from rlbuf_td.kernels.serials import REVISION
from rlbuf_td.storages.checks import State
from rlbuf_td.storages.dedup import DedupLayout, saved_dedup
from rlbuf_td.storages.entries import refuse_foreign
from rlbuf_td.storages.episodes import refuse_episodes
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.memory import ROWS_FILE
from rlbuf_td.storages.ring import refuse_ring
from rlbuf_td.storages.row_class import loaded
from rlbuf_td.storages.schema import SchemaError, kind, show_key

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage
    from rlbuf_td.storages.rows import Rows


class SavedRows:
    """The rows of a state; the constructor refuses rows that do not fit the storage.

    Capacity, lanes and deduplication must be equal; the saved bytes are copied.

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
        self.storage = storage
        self.matrix = content["rows"]
        self.entries = content.get("entries", [])
        self.layout = layout = RowLayout.from_state(content["layout"])
        self.lanes, self.dedup = self.matrix.shape[1:-1], saved_dedup(layout, content)
        self._refuse_others(content)
        ring, rows = content["ring"], storage.rows
        self.is_new = rows is None or rows.layout != layout
        self._refuse_other_form(ring["steps"])
        scratch = storage.scratch_dir
        is_there = (
            folder is not None
            and scratch is not None
            and scratch.resolve() == folder.resolve()
        )
        self._replaces_file = self.is_new and is_there
        # Files read into new memory are checked while they are read: if one is damaged,
        # that memory is discarded.
        self.is_read_once = self.is_new and not self._replaces_file
        if self.dedup is not None:
            self.matrix = (
                self.matrix
                if isinstance(self.matrix, torch.Tensor)
                else self.matrix.read()
            )
            refuse_foreign(self.dedup, self.matrix, self.entries, ring)
        row_class = loaded(content["row_class"])
        if storage.is_class_fixed and row_class != storage.row_class:
            raise SchemaError(
                "the saved rows are of another class than those that other processes share"
            )
        self.content = content | {"rows": self.matrix, "row_class": row_class}

    def _refuse_others(self, content: State) -> None:
        """Raise an error for rows that do not fit the storage, and for numbers that do
        not fit the rows."""
        storage, layout, lead = self.storage, self.layout, self.matrix.shape[:-1]
        rows = storage.rows
        storage.refuse_layout(layout)
        may_get_more = (
            rows is not None
            and storage.is_reserved
            and set(rows.layout.leaves) <= set(layout.leaves)
        )
        if rows is not None and layout != rows.layout and not may_get_more:
            raise SchemaError(
                "the saved rows have other keys, dtypes or shapes than this storage: "
                + _difference(layout, rows.layout)
            )
        if content["_len"] != lead.numel():
            raise ValueError(
                f"the saved length is {content['_len']!r}, expected that of the rows, {lead.numel()}"
            )
        refuse_ring(content["ring"], lead)
        refuse_episodes(content.get("episodes"), self.lanes.numel(), lead[0])
        stored = layout if self.dedup is None else self.dedup.stored
        form = self.matrix.dtype, self.matrix.shape[-1] * self.matrix.dtype.itemsize
        if form != (stored.carrier, stored.row_bytes):
            raise SchemaError(
                f"the saved rows are {form[0]}, {form[1]} bytes each, expected {stored.row_bytes}"
            )

    def _refuse_other_form(self, steps: int) -> None:
        """Raise a ValueError unless the storage has ``steps`` time steps of these lanes
        in the saved form."""
        storage, lanes = self.storage, self.lanes
        own_lanes, own_dedup = storage.lanes, storage.dedup
        if self.is_new:
            own_dedup = self._dedup_of_new_rows()
        if storage.rows is None and storage.lanes_wanted is not None:
            own_lanes = torch.Size([storage.lanes_wanted])
        elif storage.rows is None:  # as many as the first write has
            is_like = len(lanes) == storage.ndim - 1
            own_lanes = lanes if is_like else torch.Size([1] * (storage.ndim - 1))
        shapes = [steps, *lanes], [storage.steps_for(own_lanes), *own_lanes]
        if shapes[0] == shapes[1] and own_dedup == self.dedup:
            return
        rows = "old.lane(e).chronological()" if lanes else "old.chronological()"
        target = ", lanes=e" if storage.ndim > 1 else ""
        raise ValueError(
            f"the saved storage is {shapes[0]} with {_form(self.dedup)}, this one {shapes[1]} with {_form(own_dedup)}: "
            f"load it into a buffer of its own kind, old, and copy the rows, new.extend({rows}{target}); "
            "rows of a writer without order are old[:]"
        )

    def _dedup_of_new_rows(self) -> DedupLayout | None:
        """Return how the storage will deduplicate these rows: as they are saved, if it
        deduplicates."""
        options = self.storage.dedup_options
        if options and self.dedup is not None:
            return DedupLayout(self.layout, self.dedup.chosen)
        return DedupLayout.chosen_for(self.layout, options)

    def read(self) -> Rows | None:
        """Read the rows into new memory; return None if :meth:`put` reads them."""
        storage = self.storage
        # The reserved and the new rows may not fit together.
        if self.is_new and storage.is_reserved and storage.scratch_dir is not None:
            storage.release()
        # left by the process that wrote the dump
        if self._replaces_file and storage.scratch_dir is not None:
            (storage.scratch_dir / ROWS_FILE).unlink(missing_ok=True)
        if not self.is_new:
            return None
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

    def put(self, rows: Rows | None) -> None:
        """Replace the rows of the storage by what :meth:`read` has returned."""
        storage, content = self.storage, self.content
        row_class = storage.row_class
        storage.row_class = content["row_class"]
        if rows is not None:
            try:
                storage.adopt(rows)  # other processes find the class with the rows
            except BaseException:
                storage.row_class = row_class
                raise
        else:
            storage.enter()
            storage.ring.give_up()
            storage.all_rows().restore_(self.matrix, self.entries)
        storage.epoch += 1
        storage.is_reserved = content.get("reserved", False)
        storage.ring.load(content["ring"])
        storage.load_episodes(content.get("episodes"))
        storage.ring.numbers[REVISION] += 1
        storage.ring.finish()


def _form(dedup: DedupLayout | None) -> str:
    if dedup is None:
        return "plain rows"
    return f"deduplicated {', '.join(map(show_key, sorted(dedup.deduplicated)))}"


def _difference(saved: RowLayout, wanted: RowLayout) -> str:
    """Name the first leaf in which two layouts differ."""
    kinds = [
        {leaf.key: kind(leaf.dtype, leaf.shape) for leaf in layout.leaves}
        for layout in (saved, wanted)
    ]
    for key in {**kinds[0], **kinds[1]}:
        was, expected = (part.get(key, "missing") for part in kinds)
        if was != expected:
            return f"{show_key(key)} is {was} there, and {expected} here"
    return "the order of their batch dims differs"
