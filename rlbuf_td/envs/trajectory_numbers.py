"""Unique trajectory numbers within a storage."""

from __future__ import annotations

from typing import Any

import numpy as np
from torchrl.data.replay_buffers import Storage

from rlbuf_td.storages.indexing import lanes_of, stored_rows


class TrajectoryNumbers:
    """Assigns the trajectory numbers of a storage to all recorders that write to it; attached to the storage."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.loads = 0  # number of loads that replaced the rows: earlier trajectories do not continue
        self._next, self._has_read = 0, False

    def take(self, count: int, key: tuple[str, ...] | None) -> np.ndarray:
        """Return new numbers, ``[count]``, greater than those stored under ``key``; O(rows) after a load, else O(1)."""
        rows = None if self._has_read else stored_rows(self.storage)
        stored = None if rows is None or key is None else rows.get(key, None)
        if stored is not None and len(self.storage):
            steps = len(self.storage) // lanes_of(self.storage).numel()
            self._next = max(self._next, int(stored[:steps].max()) + 1)
        self._has_read = True
        self._next += count
        return np.arange(self._next - count, self._next)

    def mark_update(self, index: Any) -> None:
        """Do nothing: the rows of a recorder need no check."""

    def mark_load(self) -> None:
        self.loads, self._has_read = self.loads + 1, False
