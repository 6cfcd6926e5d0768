"""The rows as plain state: pickling, copies, and ``state_dict``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from multiprocessing.context import get_spawning_popen
from threading import RLock
from typing import Any

import torch

from rlbuf_td.storages.allocate import allocate_sparse
from rlbuf_td.storages.dedup.layout import DedupLayout, Sections, saved_dedup
from rlbuf_td.storages.dedup.rows import DedupRows
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.rows import PlainRows, Rows
from rlbuf_td.storages.schema import SchemaError
from rlbuf_td.storages.shared.storage import SharedStorage
from rlbuf_td.storages.write_clock import WriteClock

_COUNTERS = ("_len_value", "_mutation_revision_value", "_last_cursor_index_value")
_MADE_ANEW = frozenset(
    (*_COUNTERS, "rows", "_live", "_storage", "_total_shape_value", "shared_rows", "lock")
)  # by a copy


class SavedStorage(SharedStorage):
    """State of :class:`~rlbuf_td.PackedStorage`."""

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            kept = {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}
            saved = self._mutation_revision, self.state_dict()
            return kept | {"_rng": None, "scratch_dir": None, "initialized": False, "_saved": saved}
        state = self.__dict__ | {"_rng": None, "_storage": None, "_live": None}
        if self.shared_rows is not None:
            return state | {"rows": None, "lock": None}
        if self.rows is None:
            raise RuntimeError(
                "a PackedStorage cannot be sent to another process before its first write, which allocates the rows: "
                "the processes would not share them. Write one batch first, or call share_memory_()."
            )
        self.rows.refuse_spawn()
        self.is_reserved = False  # the rows are shared from here on: no process may put others in their place
        state |= {"lock": None, "is_reserved": False}
        if self.scratch_dir is not None:  # torch cannot send a mapped file: the other process maps it, too
            state |= {"rows": None, "_mapped": (self.rows.layout, self.rows.shape, self.dedup)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved, mapped = state.pop("_saved", None), state.pop("_mapped", None)
        self.__dict__.update(state)
        if saved is not None:  # a copy: rows and counters of its own
            self.rows = self._live = self._storage = self.shared_rows = None
            self.lock = RLock()
            self.clock = WriteClock()
            self._make_counters()
            if self.dedup_options and self.shared:
                self.share_memory_()
            revision, rows = saved
            self.load_state_dict(rows)
            self._mutation_revision_value.value = revision  # what was read from the original holds for the copy
        elif self.shared_rows is not None:
            self.lock = self.shared_rows.lock
            self._find_rows()
        elif mapped is not None:  # another process: the same rows
            self.lock = RLock()
            self.adopt(self._map(*mapped))
        else:
            self.lock = RLock()
            self.adopt(state["rows"])

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the rows written so far, with their layout, as tensors, numbers and strings.

        It lies where the rows do, in RAM if that is in page-locked RAM.
        """
        state = self.snapshot()
        if "entries" in state:
            state["entries"] = [entries.clone() for entries in state["entries"]]
        if "rows" in state:
            state["rows"] = self.written_rows().copy_of_matrix()
        return state

    def snapshot(self) -> dict[str, Any]:
        """Return :meth:`state_dict` with the rows themselves rather than a copy."""
        if self.rows is None:
            return {"_len": 0}
        shared = {}
        if self.rows.dedup is not None:
            shared = {"pooled": self.rows.dedup.state(), "entries": self.rows.entries()}
        return shared | {
            "_len": len(self),
            "full": self._is_full,
            "reserved": self.is_reserved,
            "last_cursor": self._last_cursor_index_value.value,
            "layout": self.rows.layout.state(),
            "rows": self.written_rows().matrix,
            "clock": self.clock.state_dict() | {"capacity": self.rows.cells},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content by what :meth:`state_dict` returned.

        Raises:
            SchemaError: the saved rows differ in keys, dtypes or shapes; this storage stays as it was.
            ValueError: the capacity or the lanes do not fit the saved rows, or another kind of storage has saved them;
                this storage stays as it was.
        """
        admitted = self.examine_state(state_dict)
        if admitted is None:
            return self._empty()
        layout, lanes, dedup = admitted
        matrix, entries = state_dict["rows"], state_dict.get("entries", [])
        if self.rows is not None and matrix.data_ptr() == self.rows.matrix.data_ptr():  # its own snapshot
            return self.restore_counters(state_dict)
        if self.rows is not None and self.rows.layout != layout:
            self.release()
        rows = self.rows or self._allocate(layout, lanes, matrix.device, self.dedup_for(layout, dedup))
        self.about_to_write(rows, 0, rows.steps)
        if rows.takes(dedup, [len(found) for found in entries]):
            rows.restore_(matrix, entries)
        else:
            rows.copy_steps_(rows_of_state(layout, matrix, dedup, entries), [(0, len(matrix))])
        self.restore_counters(state_dict)

    def examine_state(self, state_dict: dict[str, Any]) -> tuple[RowLayout, torch.Size, DedupLayout | None] | None:
        """Return layout, lanes and dedup of the rows that :meth:`load_state_dict` would load, None for none.

        Raises:
            SchemaError: see :meth:`load_state_dict`.
            ValueError: see :meth:`load_state_dict`.
        """
        if "layout" not in state_dict:
            if state_dict.keys() != {"_len"}:  # what is saved before the first write
                raise ValueError(
                    f"this is not the state of a PackedStorage (it holds {', '.join(map(repr, state_dict))}): load it "
                    "into a storage of its own kind, and extend this one's buffer by what that holds"
                )
            return None
        if state_dict.get("reserved", False) and self.rows is not None:
            return None
        matrix = state_dict["rows"]
        layout, lanes = self.admit_state(state_dict, matrix.shape[1:-1])
        dedup = saved_dedup(layout, state_dict)
        if dedup is not None:
            refuse_foreign(dedup, matrix, state_dict.get("entries", []))
        return layout, lanes, dedup

    def dedup_for(self, layout: RowLayout, saved: DedupLayout | None) -> DedupLayout | None:
        """Return what new rows for saved ones share: what those did, if this storage's are to share anything."""
        return None if not self.dedup_options else saved or self.dedup_of(layout)

    def admit_state(self, state_dict: dict[str, Any], lanes: torch.Size) -> tuple[RowLayout, torch.Size]:
        """Return the layout and the lanes of saved rows that this storage can take in; changes nothing.

        Raises:
            SchemaError: the saved rows differ in keys, dtypes or shapes.
            ValueError: the capacity or the lanes do not fit the saved rows.
        """
        layout = RowLayout.from_state(state_dict["layout"])
        if self.rows is not None and not self._takes(layout):
            raise SchemaError("the saved rows hold other keys, dtypes or shapes than those of this storage")
        if len(lanes) != self.ndim - 1 or (self.rows is not None and lanes != self.rows.lanes):
            own = tuple(self.rows.lanes) if self.rows is not None else f"of a storage with ndim={self.ndim}"
            raise ValueError(f"saved rows of lanes {tuple(lanes)} do not fit lanes {own}")
        capacity = self.steps_for(lanes) * prod(lanes)
        if state_dict["_len"] > capacity or (state_dict["full"] and state_dict["_len"] != capacity):
            raise ValueError(
                f"{state_dict['_len']} rows of a {'full ' if state_dict['full'] else ''}buffer do not fit "
                f"a capacity of {capacity}; rb.dumps and rb.loads bring the newest ones that fit into another capacity"
            )
        return layout, lanes

    def restore_counters(self, state_dict: dict[str, Any]) -> None:
        """Count the rows that a loader has put in place as :meth:`state_dict` did."""
        self.is_reserved = state_dict.get("reserved", False)
        clock, rows = state_dict.get("clock"), self.all_rows()
        if clock is not None and clock["capacity"] == rows.cells:
            self.clock.load_state_dict(clock, rows.steps, state_dict["last_cursor"], rows.matrix.device)
        else:
            self.clock.forget(rows.steps, state_dict["last_cursor"])
        self._len_value.value = state_dict["_len"]
        self._last_cursor = self._last_cursor_index_value.value = state_dict["last_cursor"]
        self._bump_mutation_revision()

    def _takes(self, layout: RowLayout) -> bool:
        """Return whether rows of this layout may be loaded: where they are only reserved, it may hold more."""
        ours = self.rows.layout if self.rows is not None else layout
        return layout == ours or (self.is_reserved and set(ours.leaves) <= set(layout.leaves))


def refuse_foreign(dedup: DedupLayout, matrix: torch.Tensor, entries: Sequence[Any]) -> None:
    """Refuse saved rows that name entries which were not saved with them, or entries of another size.

    Args:
        dedup: what they share.
        matrix: the rows.
        entries: of each group: tensors, or what else has a dtype and a shape.

    Raises:
        SchemaError: see above.
    """
    names = matrix.reshape(-1, matrix.shape[-1]).view(torch.uint8)
    groups = dedup.groups
    fits = len(entries) == len(groups) and names.shape[1] == dedup.stored.row_bytes
    for group, found in zip(groups, entries, strict=False):
        fits = fits and len(found.shape) == 2 and found.dtype is torch.uint8 and found.shape[1] == group.nbytes
        if fits and len(names):
            ids = names.narrow(1, group.ids, 4 * group.names).view(torch.int32)
            fits = int(ids.min()) > 0 and int(ids.max()) <= found.shape[0]
    if not fits:
        raise SchemaError("the saved rows and the observations that they share do not belong together")


def rows_of_state(
    layout: RowLayout, matrix: torch.Tensor, dedup: DedupLayout | None, entries: list[torch.Tensor]
) -> Rows:
    """Return saved rows, to be read only."""
    if dedup is None:
        return PlainRows(layout, matrix.contiguous())
    lanes, steps = matrix.shape[1:-1], len(matrix)
    for group, found in zip(dedup.groups, entries, strict=True):  # more than so few rows have: others were there once
        steps = max(steps, -(-len(found) // (2 * group.names * lanes.numel())))
    cells = steps * lanes.numel()
    sections = Sections.of(dedup, cells)
    memory = allocate_sparse(sections.total, sections.likely(dedup, cells), sections.fixed)
    rows = DedupRows(dedup, memory, torch.Size([steps, *lanes]))
    rows.restore_(matrix.cpu(), [found.cpu() for found in entries])
    return rows.first(len(matrix))
