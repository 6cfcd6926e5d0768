"""The rows as plain state: pickling, copies, and ``state_dict``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from multiprocessing.context import get_spawning_popen
from threading import RLock
from typing import Any

import torch

from rlbuf_td.storages.allocate import allocate_sparse
from rlbuf_td.storages.dedup.pooling import Pooling
from rlbuf_td.storages.dedup.rows import PooledRows
from rlbuf_td.storages.dedup.sections import Sections
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.schema import SchemaError
from rlbuf_td.storages.shared.storage import SharedStorage
from rlbuf_td.storages.write_clock import WriteClock

_COUNTERS = ("_len_value", "_mutation_revision_value", "_last_cursor_index_value")
_MADE_ANEW = frozenset(
    (*_COUNTERS, "_rows", "_live", "_storage", "_total_shape_value", "_sharing", "lock")
)  # by a copy


class SavedStorage(SharedStorage):
    """State of :class:`~rlbuf_td.PackedStorage`."""

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            kept = {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}
            saved = self._mutation_revision, self.state_dict()
            return kept | {"_rng": None, "scratch_dir": None, "initialized": False, "_saved": saved}
        state = self.__dict__ | {"_rng": None, "_storage": None, "_live": None}
        if self._sharing is not None:
            return state | {"_rows": None, "lock": None}
        if self._rows is None:
            raise RuntimeError(
                "a PackedStorage cannot be sent to another process before its first write, which allocates the rows: "
                "the processes would not share them. Write one batch first, or call share_memory_()."
            )
        if self.offload:
            raise RuntimeError(
                "a PackedStorage with offload=True cannot be sent to another process: its rows are page-locked in this "
                "one. Let one process write, or keep the rows on the CPU with shared=True"
            )
        self._is_reserved = False  # the rows are shared from here on: no process may put others in their place
        state |= {"lock": None, "_is_reserved": False}
        if self.scratch_dir is not None:  # torch cannot send a mapped file: the other process maps it, too
            state |= {"_rows": None, "_mapped": (self._rows.layout, self._rows.shape, self.pooling)}
        elif self.pooling is not None:
            raise RuntimeError(
                "a PackedStorage whose rows share observations cannot be sent to another process as it is: call "
                "share_memory_() first, or keep the rows in a scratch_dir"
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved, mapped = state.pop("_saved", None), state.pop("_mapped", None)
        self.__dict__.update(state)
        if saved is not None:  # a copy: rows and counters of its own
            self._rows = self._live = self._storage = self._sharing = None
            self.lock = RLock()
            self.clock = WriteClock()
            self._make_counters()
            if self._asked and self.shared:
                self.share_memory_()
            revision, rows = saved
            self.load_state_dict(rows)
            self._mutation_revision_value.value = revision  # what was read from the original holds for the copy
        elif self._sharing is not None:
            self.lock = self._sharing.lock
            self._find_rows()
        elif mapped is not None:  # another process: the same rows
            self.lock = RLock()
            self._adopt(self._map(*mapped))
        else:
            self.lock = RLock()
            self._adopt(state["_rows"])

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the rows written so far, with their layout, as tensors, numbers and strings.

        It lies where the rows do, in RAM if that is in page-locked RAM.
        """
        state = self.snapshot()
        if "entries" in state:
            state["entries"] = [entries.clone() for entries in state["entries"]]
        if "rows" in state:
            rows = state["rows"]
            state["rows"] = rows.to("cpu", copy=True) if self.offload else rows.clone()  # a device may lack the room
        return state

    def snapshot(self) -> dict[str, Any]:
        """Return :meth:`state_dict` with the rows themselves rather than a copy."""
        if self._rows is None:
            return {"_len": 0}
        shared = {}
        if isinstance(self._rows, PooledRows):
            shared = {"pooled": self._rows.pooling.state(), "entries": self._rows.entries()}
        return shared | {
            "_len": len(self),
            "full": self._is_full,
            "reserved": self._is_reserved,
            "last_cursor": self._last_cursor_index_value.value,
            "layout": self._rows.layout.state(),
            "rows": self._written().matrix,
            "clock": self.clock.state_dict() | {"capacity": self._rows.cells},
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
        layout, lanes, pooling = admitted
        matrix, entries = state_dict["rows"], state_dict.get("entries", [])
        if self._rows is not None and matrix.data_ptr() == self._rows.matrix.data_ptr():  # its own snapshot
            return self.restore_counters(state_dict)
        if self._rows is not None and self._rows.layout != layout:
            self._release()
        rows = self._rows or self._allocate(layout, lanes, matrix.device, self.pooling_like(layout, pooling))
        self._about_to_write(rows, 0, rows.steps)
        if isinstance(rows, PooledRows) and rows.takes(pooling, [len(found) for found in entries]):
            rows.restore_(matrix, entries)
        elif pooling is None and not isinstance(rows, PooledRows):
            rows.matrix[: matrix.shape[0]].copy_(matrix)
        else:
            copy_rows(rows_of_state(layout, matrix, pooling, entries), rows, [(0, len(matrix))])
        self.restore_counters(state_dict)

    def examine_state(self, state_dict: dict[str, Any]) -> tuple[RowLayout, torch.Size, Pooling | None] | None:
        """Return layout, lanes and pooling of the rows that :meth:`load_state_dict` would load, None for none.

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
        if state_dict.get("reserved", False) and self._rows is not None:
            return None
        matrix = state_dict["rows"]
        layout, lanes = self.admit_state(state_dict, matrix.shape[1:-1])
        pooling = saved_pooling(layout, state_dict)
        if pooling is not None:
            refuse_foreign(pooling, matrix, state_dict.get("entries", []))
        return layout, lanes, pooling

    def pooling_like(self, layout: RowLayout, saved: Pooling | None) -> Pooling | None:
        """Return what new rows for saved ones share: what those did, if this storage's are to share anything."""
        return None if not self._asked else saved or self._pooling_of(layout)

    def admit_state(self, state_dict: dict[str, Any], lanes: torch.Size) -> tuple[RowLayout, torch.Size]:
        """Return the layout and the lanes of saved rows that this storage can take in; changes nothing.

        Raises:
            SchemaError: the saved rows differ in keys, dtypes or shapes.
            ValueError: the capacity or the lanes do not fit the saved rows.
        """
        layout = RowLayout.from_state(state_dict["layout"])
        if self._rows is not None and not self._takes(layout):
            raise SchemaError("the saved rows hold other keys, dtypes or shapes than those of this storage")
        if len(lanes) != self.ndim - 1 or (self._rows is not None and lanes != self._rows.lanes):
            own = tuple(self._rows.lanes) if self._rows is not None else f"of a storage with ndim={self.ndim}"
            raise ValueError(f"saved rows of lanes {tuple(lanes)} do not fit lanes {own}")
        capacity = self._steps(lanes) * prod(lanes)
        if state_dict["_len"] > capacity or (state_dict["full"] and state_dict["_len"] != capacity):
            raise ValueError(
                f"{state_dict['_len']} rows of a {'full ' if state_dict['full'] else ''}buffer do not fit "
                f"a capacity of {capacity}; rb.dumps and rb.loads bring the newest ones that fit into another capacity"
            )
        return layout, lanes

    def restore_counters(self, state_dict: dict[str, Any]) -> None:
        """Count the rows that a loader has put in place as :meth:`state_dict` did."""
        self._is_reserved = state_dict.get("reserved", False)
        clock, rows = state_dict.get("clock"), self._all_rows()
        if clock is not None and clock["capacity"] == rows.cells:
            self.clock.load_state_dict(clock, rows.steps, state_dict["last_cursor"], rows.matrix.device)
        else:
            self.clock.forget(rows.steps, state_dict["last_cursor"])
        self._len_value.value = state_dict["_len"]
        self._last_cursor = self._last_cursor_index_value.value = state_dict["last_cursor"]
        self._bump_mutation_revision()

    def _takes(self, layout: RowLayout) -> bool:
        """Return whether rows of this layout may be loaded: where they are only reserved, it may hold more."""
        ours = self._rows.layout if self._rows is not None else layout
        return layout == ours or (self._is_reserved and set(ours.leaves) <= set(layout.leaves))


def saved_pooling(layout: RowLayout, state: dict[str, Any]) -> Pooling | None:
    """Return what saved rows share.

    Raises:
        SchemaError: it does not fit their layout.
    """
    return Pooling.from_state(layout, state["pooled"]) if "pooled" in state else None


def refuse_foreign(pooling: Pooling, matrix: torch.Tensor, entries: Sequence[Any]) -> None:
    """Refuse saved rows that name entries which were not saved with them, or entries of another size.

    Args:
        pooling: what they share.
        matrix: the rows.
        entries: of each group: tensors, or what else has a dtype and a shape.

    Raises:
        SchemaError: see above.
    """
    names = matrix.reshape(-1, matrix.shape[-1]).view(torch.uint8)
    groups = pooling.groups
    fits = len(entries) == len(groups) and names.shape[1] == pooling.own.row_bytes
    for group, found in zip(groups, entries, strict=False):
        fits = fits and len(found.shape) == 2 and found.dtype is torch.uint8 and found.shape[1] == group.nbytes
        if fits and len(names):
            ids = names.narrow(1, group.ids, 4 * group.names).view(torch.int32)
            fits = int(ids.min()) > 0 and int(ids.max()) <= found.shape[0]
    if not fits:
        raise SchemaError("the saved rows and the observations that they share do not belong together")


def rows_of_state(
    layout: RowLayout, matrix: torch.Tensor, pooling: Pooling | None, entries: list[torch.Tensor]
) -> Rows:
    """Return saved rows, to be read only."""
    if pooling is None:
        return Rows(layout, matrix.contiguous())
    lanes, steps = matrix.shape[1:-1], len(matrix)
    for group, found in zip(pooling.groups, entries, strict=True):  # more than so few rows have: others were there once
        steps = max(steps, -(-len(found) // (2 * group.names * lanes.numel())))
    cells = steps * lanes.numel()
    sections = Sections.of(pooling, cells)
    memory = allocate_sparse(sections.total, sections.likely(pooling, cells), sections.fixed)
    rows = PooledRows(pooling, memory, torch.Size([steps, *lanes]))
    rows.restore_(matrix.cpu(), [found.cpu() for found in entries])
    return rows.first(len(matrix))


def copy_rows(source: Rows, target: Rows, ranges: Iterable[tuple[int, int]]) -> None:
    """Let ``target``, which shares other keys, hold time steps of ``source``, (first, count) one after the other."""
    at, pooled = 0, target if isinstance(target, PooledRows) else None
    if pooled is not None:
        pooled.begin_load()
    try:
        for first, total in ranges:
            for count, leaves in source.chunks(first, total):
                target.copy_(at, count, leaves)
                at += count
    finally:  # also after an error: entries that are neither free nor named would be lost
        if pooled is not None:
            pooled.end_load()
