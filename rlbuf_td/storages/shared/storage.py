"""Sharing a storage between processes: moving its rows to shared memory, finding them there, and recovery."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlbuf_td.storages.allocate import bytes_of, find_rows, rows_in
from rlbuf_td.storages.dedup.layout import saved_dedup
from rlbuf_td.storages.indexing import coordinates
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.shared.rows import WRITTEN, Journal, SharedRows


def share(storage: Any, counters: list[Any]) -> None:
    """Let processes use the rows together; ``counters`` are put back when a write is undone."""
    if torch.device("cpu" if storage.device == "auto" else storage.device).type != "cpu":
        raise ValueError(
            f"rows on {storage.device} cannot be shared by several processes: keep them on the CPU, and move batches "
            "(a transform does), or let one process write"
        )
    with storage.lock:
        storage.device = torch.device("cpu")
        shared_rows = SharedRows(storage.lock, partial(_find, storage), partial(_repair, storage))
        shared_rows.journal.watch(*counters)
        storage.shared_rows, rows = shared_rows, storage.rows
        storage.is_reserved = False  # no process may put other rows in their place
        if rows is not None and storage.scratch_dir is None:
            memory = shared_rows.memory(bytes_of(rows.layout, rows.shape, rows.dedup))
            moved = rows_in(storage, memory, rows.layout, rows.shape, rows.dedup)
            storage.adopt(moved)
            moved.restore_(rows.matrix, rows.entries())
        elif rows is not None:
            rows.is_deferred = True
            storage.clock.keep_in(shared_rows.place(rows))
        storage.shared = storage.scratch_dir is None
        storage.lock = shared_rows.lock


def _find(storage: Any) -> None:
    found = storage.shared_rows.description()
    if found is not None:
        layout = RowLayout.from_state(found["layout"])
        storage.adopt(find_rows(storage, layout, torch.Size(found["shape"]), saved_dedup(layout, found)))


def _repair(storage: Any, journal: Journal) -> None:
    """Put right what depends on the rows, after a process has died at work."""
    if storage.rows is not None:
        storage.rows.rebuild()
    for listener in storage._attached_entities:
        repair = getattr(listener, "repair", None)
        if repair is not None:
            repair()
    storage._bump_mutation_revision()
    if journal.phase != WRITTEN:
        return
    start, count = journal.range
    rows = storage.all_rows().cells
    for listener in storage._attached_entities:
        if start < 0 or not hasattr(listener, "mark_range"):
            cells = journal.cells if start < 0 else (start + torch.arange(count)) % rows
            index = coordinates(cells, storage)
            listener.mark_update(torch.stack(index, -1) if isinstance(index, tuple) else index)
            continue
        head = min(count, rows - start)
        listener.mark_range(start, head)
        if head < count:
            listener.mark_range(0, count - head)
