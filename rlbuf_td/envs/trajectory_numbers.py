"""Trajectory numbers that are unique among all recorders of a storage."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import lanes_of, stored_rows
from rlbuf_td.storages.listeners import Attached
from rlbuf_td.storages.shared.memory import SharedNumbers

_NEXT, _HAS_READ, _LOADS = range(3)


class TrajectoryNumbers(Attached):
    """Gives unique trajectory numbers to all recorders of a storage, in all processes that share the storage."""

    def __init__(self, storage: PackedStorage) -> None:
        super().__init__(storage)
        self._numbers = SharedNumbers("q", [0, 0, 0])

    @property
    def loads(self) -> int:
        """How many times a checkpoint was loaded into the storage."""
        return self._numbers.values[_LOADS]

    def take(self, count: int) -> np.ndarray:
        """Return ``count`` new trajectory numbers, larger than all that are stored."""
        with self.storage.lock:
            first, numbers = self._numbers[_NEXT], self._numbers
            rows = None if numbers[_HAS_READ] else stored_rows(self.storage)
            stored = None if rows is None else rows.get(TRAJ_KEY, None)
            if stored is not None and len(self.storage):
                steps = len(self.storage) // lanes_of(self.storage).numel()
                first = max(first, int(stored[:steps].max()) + 1)
            numbers[_NEXT], numbers[_HAS_READ] = first + count, 1
        return np.arange(first, first + count)

    def mark_update(self, index: Any) -> None:
        """Do nothing; writers call this method after each write."""

    def mark_load(self) -> None:
        self._numbers[_LOADS], self._numbers[_HAS_READ] = self.loads + 1, 0

    def share_memory_(self) -> None:
        self._numbers.share_memory_()
