"""The rows of a dump, and how to load them into a :class:`~rlbuf_td.PackedStorage` of any capacity."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from rlbuf_td.checkpoint.files import DumpReader, Report, flat_bytes
from rlbuf_td.checkpoint.manifest import CheckpointError
from rlbuf_td.kernels.huge_pages import take_pages
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.allocate import ROWS_FILE, make_rows, steps_for
from rlbuf_td.storages.dedup import saved_dedup
from rlbuf_td.storages.ring import saved_serials
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.state import (
    admit_state,
    dedup_for,
    has_holes,
    refuse_counters,
    refuse_foreign,
    rows_of_state,
    stand_together,
)
from rlbuf_td.storages.writes import begin


@dataclass(frozen=True)
class Fit:
    """The time steps of a dump that fit into a storage."""

    ranges: tuple[tuple[int, int], ...]  # (first, count) of the saved steps that fill the storage from step 0 on
    steps: int  # number of these steps
    is_same: bool  # whether the capacities are equal, so that rows keep their positions
    dropped: int  # number of oldest time steps that do not fit
    cells: torch.Tensor | None = None  # of lanes that stand apart: for each loaded row, its flat index in the dump

    @property
    def moves(self) -> bool:
        """Whether any row changes its position or is dropped."""
        if self.cells is not None:
            return self.dropped > 0 or not torch.equal(self.cells, torch.arange(len(self.cells), device="cpu"))
        return not self.is_same and (self.ranges != ((0, self.steps),) or self.dropped > 0)

    def rows(self, lanes: int) -> torch.Tensor:
        """Return, for each loaded row, its flat index in the dump: ``[steps * lanes]`` int64."""
        if self.cells is not None:
            return self.cells
        parts = [torch.arange(first * lanes, (first + count) * lanes, device="cpu") for first, count in self.ranges]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def fit(saved: int, capacity: int, live: int, cursor: int | None) -> Fit:
    """Choose the newest of ``live`` time steps that fit into ``capacity``; ``saved`` is the capacity of the dump."""
    if saved == capacity or (live < saved and live <= capacity):
        return Fit(((0, live),) if live else (), live, saved == capacity, 0)
    if cursor is None:
        remedy = "its rows have no order of age to choose the oldest by: load it into the same capacity"
        raise CheckpointError(f"a dump of {live} time steps does not fit a capacity of {capacity}, and {remedy}")
    oldest = cursor if live == saved else 0  # a full ring overwrites its oldest step next
    kept = min(live, capacity)
    start = oldest + live - kept
    head = min(kept, max(0, live - start))  # up to the end of the ring
    parts = (start, head), (max(0, start - live), kept - head)
    return Fit(tuple(part for part in parts if part[1]), kept, False, live - kept)


def fit_lanes(saved: int, capacity: int, live: int, head: torch.Tensor) -> Fit:
    """Choose the newest rows of each lane, of lanes that stand apart; ``head`` is that of the saved ring."""
    if saved == capacity:
        return Fit(((0, live),), live, True, 0)
    tail, written, _ = head
    count, newest = written - tail, (written - 1) % saved
    kept, lane = count.clamp(max=capacity), torch.arange(len(count), device="cpu")
    step = torch.arange(int(kept.max()), device="cpu")[:, None]
    # A lane with fewer rows than others is not full: the dump has its holes at the same steps.
    source = torch.where(step < kept, (newest - (kept - 1 - step)) % saved, step)
    cells, dropped = (source * len(count) + lane).flatten(), int((count - kept).max())
    return Fit(((0, len(step)),), len(step), False, dropped, cells)


def newest_rows(head: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return the numbers of a ring of which each lane keeps its newest ``capacity`` rows."""
    tail, written, ordered = head
    return torch.stack((torch.maximum(tail, written - capacity), written, ordered))


def moved_episodes(saved: dict[str, Any] | None, rows: torch.Tensor, lanes: int) -> dict[str, Any] | None:
    """Return the saved numbers of episodes of a storage that holds the ``rows``, ``[n]`` cells of the dump."""
    if saved is None:
        return None
    return saved | {"back": saved["back"].T.reshape(-1)[rows].view(-1, lanes).T.contiguous()}


def split_rows(saved: dict[str, Any]) -> list[torch.Tensor]:
    """Remove the row tensors from a storage's state, and return them; the dump must store these tensors first."""
    state = saved["state"]
    if "rows" not in state:
        return []
    tensors = [state.pop("rows"), *state.pop("entries", [])]
    saved["rows"] = 0  # the number of the tensor in the dump
    if len(tensors) > 1:
        saved["entries"] = [*range(1, len(tensors))]
    return tensors


class SavedRows:
    """The rows of a dump; the constructor refuses rows that do not fit the storage."""

    def __init__(self, reader: DumpReader, saved: dict[str, Any], storage: PackedStorage) -> None:
        self.reader, self.storage = reader, storage
        state, self.matrix = saved["state"], reader.tensor(saved["rows"])
        lead, dtype, steps = self.matrix.shape[:-1], self.matrix.dtype, int(saved["shape"][0])
        if not (dtype.is_floating_point or dtype is torch.uint8) or not 0 <= lead[0] <= steps:
            raise CheckpointError(f"{dtype} of shape {tuple(self.matrix.shape)} cannot be the rows of a storage")
        is_wrong = state["_len"] != prod(lead) or (state["full"] and lead[0] != steps)
        if is_wrong or state["ring"]["steps"] != steps:
            raise CheckpointError(f"{state['_len']} rows and shape {[*lead]} contradict each other")
        self.layout, self.lanes = admit_state(storage, state | {"_len": 0, "full": False}, lead[1:])
        refuse_counters(state, lead)
        self.dedup = saved_dedup(self.layout, state)
        self.entries = [reader.tensor(number) for number in saved.get("entries", [])]
        row_bytes = self.layout.row_bytes if self.dedup is None else self.dedup.stored.row_bytes
        if self.matrix.shape[-1] * dtype.itemsize != row_bytes:
            raise CheckpointError("the layout of the rows does not fit their size")
        self.capacity = steps_for(storage, self.lanes) if storage.rows is None else storage.rows.steps
        tail, written, ordered = head = state["ring"]["head"]
        self.in_order, self._has_holes, self._state = bool((ordered <= tail).all()), has_holes(state), state
        if stand_together(state["ring"]):
            cursor = int(written[0]) % steps if self.in_order else None
            self.fit = fit(steps, self.capacity, lead[0], cursor)
        else:
            self.fit = fit_lanes(steps, self.capacity, lead[0], head)
        self.is_fresh = storage.rows is None or not storage.rows.layout.is_like(self.layout)  # allocates the rows
        self._own_layout = self.layout.realigned()
        own = storage.scratch_dir
        self._replaces_file = self.is_fresh and own is not None and own.resolve() == reader.path.resolve()
        # Files read into new memory are checked while they are read: if one is damaged, that memory is discarded.
        is_moved = not self.fit.is_same or self._own_layout is not self.layout
        self._is_read_once = self.is_fresh and not is_moved and not self._replaces_file

    @property
    def nbytes(self) -> int:
        return (1 if self._is_read_once else 2) * sum(stored.nbytes for stored in (self.matrix, *self.entries))

    def verify(self, report: Report) -> None:
        if not self._is_read_once:
            self.reader.verify([self.matrix, *self.entries], report)

    def allocated(self, report: Report) -> Rows | None:
        """Return new rows with the saved content, or None if the storage already has rows of this layout."""
        if not self.is_fresh:
            return None
        storage = self.storage
        # The reserved and the new rows may not fit together.
        if storage.is_reserved and storage.scratch_dir is not None:
            storage.release()
        if storage.scratch_dir is not None and self._replaces_file:  # left by the process that wrote the dump
            (storage.scratch_dir / ROWS_FILE).unlink(missing_ok=True)
        own = self._own_layout
        rows = make_rows(storage, own, self.lanes, None, dedup_for(storage, own, self.dedup))
        if storage.scratch_dir is None:
            take_pages(rows.first(self.fit.steps).matrix)
        try:
            self._read_into(rows, report)
        except BaseException:
            if storage.scratch_dir is not None:
                (storage.scratch_dir / ROWS_FILE).unlink()
            raise
        return rows

    def put(self, allocated: Rows | None, report: Report) -> None:
        """Make ``allocated`` the storage's rows; if it is None, read the saved rows into the existing rows."""
        storage = self.storage
        if allocated is not None:
            storage.adopt(allocated)
        elif storage.rows is not None:
            begin(storage)
            self._read_into(storage.rows, report)

    def _read_into(self, rows: Rows, report: Report) -> None:
        if self.fit.cells is not None:
            return self._read_lanes(rows, self.fit.cells, report)
        if self.dedup is not None or rows.dedup is not None or rows.layout != self.layout:
            return self._read_converted(rows, report)
        data, at, step = flat_bytes(rows.matrix), 0, rows.nbytes // rows.steps
        for first, count in self.fit.ranges:
            self.reader.read_into(self.matrix, first * step, data[at * step : (at + count) * step], report)
            at += count

    def _read_lanes(self, rows: Rows, cells: torch.Tensor, report: Report) -> None:
        """Read the rows of lanes that stand apart, each lane from its oldest row on."""
        matrix = self.reader.read_stored(self.matrix, report)
        entries = [self.reader.read_stored(stored, report) for stored in self.entries]
        if self.dedup is not None:
            refuse_foreign(self.dedup, matrix, self.entries, has_holes=True)
        source = rows_of_state(self.layout, matrix, self.dedup, entries)
        rows.copy_cells_(source, cells, self._serials(rows), self._serials_before(rows))

    def _serials(self, rows: Rows) -> np.ndarray:
        """Return :attr:`Ring.serials` after the load."""
        ring = self._state["ring"]
        return saved_serials(ring | {"head": newest_rows(ring["head"], rows.steps)}, rows.steps)

    def _serials_before(self, rows: Rows) -> np.ndarray:
        """Return :attr:`Ring.serials` before the load."""
        nothing = np.zeros((2, self.lanes.numel()), np.int64)
        return self.storage.ring.serials if rows is self.storage.rows else nothing

    def _read_converted(self, rows: Rows, report: Report) -> None:
        """Read saved rows that are deduplicated, or that ``rows`` hold in another form, by way of a copy of them all.

        Dumps of earlier versions hold rows in which leaves are not aligned to cache lines.
        """
        matrix = self.reader.read_stored(self.matrix, report)
        if self.dedup is not None:
            refuse_foreign(self.dedup, matrix, self.entries, has_holes=self._has_holes)
        used = [stored.shape[0] for stored in self.entries]
        if self.fit.is_same and rows.layout == self.layout and rows.takes(self.dedup, used):
            for entries, stored in zip(rows.room_for(used), self.entries, strict=True):
                self.reader.read_into(stored, 0, flat_bytes(entries), report)
            rows.matrix[: len(matrix)].copy_(matrix)
        else:
            entries = [self.reader.read_stored(stored, report) for stored in self.entries]
            source = rows_of_state(self.layout, matrix, self.dedup, entries)
            rows.copy_steps_(source, self.fit.ranges, self._serials(rows), self._serials_before(rows))
