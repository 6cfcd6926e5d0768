"""Rows of lanes (environments) that wait to be written to a buffer: one per lane, or a queue per lane."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.storages.layout import RowLayout

_FIRST_STEPS = 16


class StepRows:
    """Memory for one row of each of E lanes (environments)."""

    def __init__(self, example: TensorDict) -> None:
        self.layout = RowLayout(example, 1)
        self.lanes = example.shape[0]
        rows, self.words = self.block(self.lanes)
        #: The rows to fill, ``[E]``, and their leaves as writable arrays ``[E, ...]``, in the same memory.
        self.now = self.layout.unpack(rows)
        columns = zip(self.layout.leaves, self.layout.columns(rows), strict=True)
        self.columns = {leaf.key: column.numpy() for leaf, column in columns}

    def block(self, rows: int) -> tuple[torch.Tensor, np.ndarray]:
        """Return zeroed memory for ``rows`` rows, seen as a tensor of rows and as an array of 8-byte words."""
        words = np.zeros((rows, self.layout.row_bytes // 8), np.int64)
        return torch.from_numpy(words.view(np.uint8)).view(self.layout.carrier), words


class LaneQueues(StepRows):
    """For each of E lanes (environments), a row to fill and a queue of filled rows."""

    def __init__(self, example: TensorDict) -> None:
        super().__init__(example)
        step, self._step = self.block(self.lanes)
        self.step = self.layout.unpack(step)  # the last time step taken, ``[E]``
        self._ring = np.zeros((_FIRST_STEPS, *self.words.shape), np.int64)
        self._head, self._tails = 0, np.zeros(self.lanes, np.int64)  # lane e has the steps head .. tails[e] - 1
        self._every_lane = np.arange(self.lanes)
        self.pending = 0  # number of rows in all queues

    @property
    def waiting(self) -> np.ndarray:
        """The number of rows in each queue, ``[E]``."""
        return self._tails - self._head

    @property
    def steps(self) -> int:
        return len(self._ring)

    def push(self, lanes: np.ndarray | None = None) -> None:
        """Append the rows in :attr:`now` to the queues of ``lanes``, a mask ``[E]`` (``None``: all lanes)."""
        where = self._every_lane if lanes is None else lanes.nonzero()[0]
        tails = self._tails[where]
        if not len(tails):
            return
        if tails.max() == self._head + len(self._ring):
            self._grow()
        self._ring[tails % len(self._ring), where] = self.words if lanes is None else self.words[where]
        self._tails[where] = tails + 1
        self.pending += len(tails)

    def clear(self) -> None:
        self._tails[:] = self._head
        self.pending = 0

    def contents(self) -> dict[str, torch.Tensor]:
        """Return copies of the waiting rows: their number in each lane, ``[E]``, and the rows, lane after lane."""
        waiting = self.waiting
        lanes = np.repeat(self._every_lane, waiting)
        steps = self._head + np.concatenate([np.arange(count) for count in waiting])
        words = self._ring[steps % len(self._ring), lanes]
        return {"waiting": torch.from_numpy(waiting), "rows": torch.from_numpy(words)}

    def restore(self, waiting: np.ndarray, words: np.ndarray) -> None:
        """Restore :meth:`contents`; raise a ValueError, and change nothing, if the rows have other sizes."""
        if (waiting < 0).any() or words.shape != (waiting.sum(), self.words.shape[1]):
            raise ValueError(f"{words.shape} words for {waiting.tolist()} waiting rows of {self.words.shape[1]} words")
        size = max(_FIRST_STEPS, 1 << int(waiting.max()).bit_length())
        self._ring = np.zeros((size, *self.words.shape), np.int64)
        steps = np.concatenate([np.arange(count) for count in waiting])
        self._ring[steps, np.repeat(self._every_lane, waiting)] = words
        self._head, self._tails = 0, waiting.copy()
        self.pending = int(waiting.sum())

    def _grow(self) -> None:
        steps, size = self._head + np.arange(len(self._ring)), 2 * len(self._ring)
        ring = np.zeros((size, *self.words.shape), np.int64)
        ring[steps % size] = self._ring[steps % len(self._ring)]
        self._ring = ring

    def take_step(self) -> bool:
        """Move the oldest row of every lane to :attr:`step`; if a lane has no row, return False and move none."""
        if self.pending < self.lanes or int(self._tails.min()) <= self._head:
            return False
        self._step[...] = self._ring[self._head % len(self._ring)]
        self._head += 1
        self.pending -= self.lanes
        return True

    def take_stretch(self, lane: int) -> TensorDict:
        """Remove all rows from the queue of a lane; return a copy, ``[n]``."""
        count = int(self._tails[lane])  # the head is 0: do not use take_step and take_stretch on the same queues
        rows, words = self.block(count)
        words[...] = self._ring[:count, lane]
        self._tails[lane] = 0
        self.pending -= count
        return self.layout.unpack(rows)
