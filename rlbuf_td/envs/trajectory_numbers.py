"""Unique numbers for the trajectories in a storage."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import numpy as np
from torchrl.data.replay_buffers import Storage

from rlbuf_td.storages.indexing import lanes_of, stored_rows
from rlbuf_td.storages.shared.memory import SharedNumbers

_NEXT, _HAS_READ, _LOADS = range(3)


class TrajectoryNumbers:
    """Gives unique trajectory numbers to all recorders of a storage, in all processes that share the storage."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.recorders: WeakSet[Any] = WeakSet()  # the recorders of this process
        self._numbers = SharedNumbers("q", [0, 0, 0])

    @property
    def loads(self) -> int:
        """How many times a checkpoint was loaded into the storage."""
        return self._numbers.values[_LOADS]

    def take(self, count: int, key: tuple[str, ...] | None) -> np.ndarray:
        """Return ``count`` new trajectory numbers, larger than all numbers stored at ``key``."""
        with getattr(self.storage, "lock", nullcontext()):
            first, numbers = self._numbers[_NEXT], self._numbers
            rows = None if numbers[_HAS_READ] else stored_rows(self.storage)
            stored = None if rows is None or key is None else rows.get(key, None)
            if stored is not None and len(self.storage):
                steps = len(self.storage) // lanes_of(self.storage).numel()
                first = max(first, int(stored[:steps].max()) + 1)
            numbers[_NEXT], numbers[_HAS_READ] = first + count, 1
        return np.arange(first, first + count)

    @property
    def next_number(self) -> int:
        """The number that :meth:`take` gives next, unless larger ones are stored."""
        return self._numbers[_NEXT]

    def go_on(self, number: int) -> None:
        """Give next what another process, which a recorder's state is from, would have given next."""
        with getattr(self.storage, "lock", nullcontext()):
            self._numbers[_NEXT], self._numbers[_HAS_READ] = max(number, self._numbers[_NEXT]), 1

    def mark_update(self, index: Any) -> None:
        """Do nothing; writers call this method after each write."""

    def mark_load(self) -> None:
        self._numbers[_LOADS], self._numbers[_HAS_READ] = self.loads + 1, 0

    def share_memory_(self) -> None:
        self._numbers.share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "recorders"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, recorders=WeakSet())
