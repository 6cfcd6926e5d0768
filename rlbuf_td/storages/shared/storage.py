"""Rows that several processes use: moving them to shared memory, finding them there, and what a dead process leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlbuf_td.storages.allocated import AllocatedStorage
from rlbuf_td.storages.dedup.layout import DedupLayout
from rlbuf_td.storages.indexing import coordinates
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.shared.journal import WRITTEN, Journal
from rlbuf_td.storages.shared.rows import SharedRows

if TYPE_CHECKING:
    from typing_extensions import Self


class SharedStorage(AllocatedStorage):
    """How :class:`~rlbuf_td.PackedStorage` is shared between processes."""

    def share_memory_(self) -> Self:
        """Let processes that are forked from now on, or spawned and sent this storage, use the same rows.

        Rows in RAM move to shared memory; those of a mapped file stay where they are. It may be done before the first
        write: whichever process writes first then allocates the rows. :attr:`lock` excludes the others, and a process
        that dies in the middle of a write has written nothing.

        Cost: a copy of the rows. From then on, each write to a full storage copies the rows that it overwrites.

        Raises:
            ValueError: the rows are on a CUDA device.
        """
        if self.shared_rows is not None:
            return self
        if torch.device("cpu" if self.device == "auto" else self.device).type != "cpu":
            raise ValueError(
                f"rows on {self.device} cannot be shared by several processes: keep them on the CPU, and move batches "
                "(a transform does), or let one process write"
            )
        with self.lock:
            self.device = torch.device("cpu")
            sharing = SharedRows(self.lock, self._find_rows, self._repair)
            sharing.journal.watch(self._len_value, self._last_cursor_index_value, *self.clock.counters())
            self.shared_rows, rows = sharing, self.rows
            self.is_reserved = False  # no process may put other rows in their place
            if rows is not None and self.scratch_dir is None:
                memory = sharing.memory(self._bytes_of(rows.layout, rows.shape, self.dedup))
                moved = self.adopt(self._rows_in(memory, rows.layout, rows.shape, self.dedup))
                moved.restore_(rows.matrix, rows.entries())
            elif rows is not None:
                rows.is_deferred, self._live = True, None
                self._describe(sharing, rows)
            self.shared = self.scratch_dir is None
            self.lock = sharing.lock
        return self

    @property
    def is_shared(self) -> bool:
        """Whether several processes may use the rows: see :meth:`share_memory_`."""
        return self.shared_rows is not None

    def undo_also(self, *counters: Any) -> None:
        """Put these counters (objects with a ``value``) back, too, where the write of a dead process is undone."""
        if self.shared_rows is not None:
            self.shared_rows.journal.watch(*counters)

    def _find_rows(self) -> None:
        """Map the rows that another process has made, if there are any."""
        found = None if self.shared_rows is None else self.shared_rows.description()
        if found is not None and self.shared_rows is not None:
            layout, shape = RowLayout.from_state(found["layout"]), torch.Size(found["shape"])
            dedup = DedupLayout.from_state(layout, found["pooled"]) if "pooled" in found else None
            if self.scratch_dir is not None:
                self.adopt(self._map(layout, shape, dedup))
            else:
                memory = self.shared_rows.memory(self._bytes_of(layout, shape, dedup))
                self.adopt(self._rows_in(memory, layout, shape, dedup))

    def _repair(self, journal: Journal) -> None:
        """Put right what depends on the rows, after a process has died at work."""
        if self.rows is not None:
            self.rows.rebuild()
        for listener in self._attached_entities:
            repair = getattr(listener, "repair", None)
            if repair is not None:
                repair()
        self._bump_mutation_revision()
        if journal.phase != WRITTEN:
            return
        start, count = journal.range
        for listener in self._attached_entities:
            if start < 0 or not hasattr(listener, "mark_range"):
                rows = self.all_rows()
                cells = journal.cells if start < 0 else (start + torch.arange(count)) % rows.cells
                index = coordinates(cells, self)
                listener.mark_update(torch.stack(index, -1) if isinstance(index, tuple) else index)
                continue
            head = min(count, self.all_rows().cells - start)
            listener.mark_range(start, head)
            if head < count:
                listener.mark_range(0, count - head)

    def _make_init_directory(self) -> None:
        """Do nothing: TorchRL's collectors call it to let a worker write first, which shared rows see to themselves."""
