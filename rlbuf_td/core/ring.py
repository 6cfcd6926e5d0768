"""Which rows are live, and where they lie: a row is (lane, serial).

Each of E lanes has T slots. Row ``serial`` of lane ``e`` lies in the cell ``(serial % T) * E + e``, and is live while
``tail <= serial < written``. These two numbers per lane are all the state of a ring; they lie where the rows lie.

Invariant: ``0 <= tail <= written`` and ``written - tail <= T`` in each lane (:meth:`Ring.check`).
"""

from __future__ import annotations

import numpy as np

from rlbuf_td.core.records import FOLLOWING, TAIL, WRITTEN


class Ring:
    """The serials of the live rows of each lane.

    Args:
        steps: T, the slots of a lane.
        lanes: E, the number of lanes.
        head: ``[4, E]`` int64, memory for the numbers, which an earlier process may have left; default: new memory.
    """

    def __init__(self, steps: int, lanes: int, head: np.ndarray | None = None) -> None:
        self.steps, self.lanes = steps, lanes
        self.head = np.zeros((4, lanes), np.int64) if head is None else head
        self.tail, self.written = self.head[TAIL], self.head[WRITTEN]
        if head is None:
            self.head[FOLLOWING] = -1

    def check(self) -> None:
        """Raise an AssertionError unless the invariant holds."""
        if not ((self.tail >= 0) & (self.tail <= self.written) & (self.written - self.tail <= self.steps)).all():
            raise AssertionError(f"tail {self.tail} and written {self.written} do not fit {self.steps} slots")

    def __len__(self) -> int:
        """Return the number of live rows."""
        return int((self.written - self.tail).sum())

    # -- writes: begin, copy the rows, publish

    def begin(self, lanes: np.ndarray | slice, count: np.ndarray | int) -> np.ndarray:
        """Give up the rows that a write of ``count`` rows to each of ``lanes`` replaces; return its first serials."""
        first = self.written[lanes].copy()
        self.tail[lanes] = np.maximum(self.tail[lanes], np.minimum(first + count - self.steps, first))
        return first

    def publish(self, lanes: np.ndarray | slice, count: np.ndarray | int) -> None:
        """Make the rows of a write live, after their bytes have been copied."""
        self.tail[lanes] = np.maximum(self.tail[lanes], self.written[lanes] + count - self.steps)
        self.written[lanes] += count

    def empty(self) -> None:
        """Give up all rows. The next ones lie in cells from 0 on, and no stamp of an earlier row equals theirs."""
        self.tail[:] = self.written[:] = -(-self.written // self.steps) * self.steps

    def load(self, head: np.ndarray) -> None:
        """Continue a saved ``head``, with serials greater by a multiple of T: no stamp of this ring matches."""
        saved = head.copy()
        saved[[TAIL, WRITTEN]] += np.maximum(0, -(-(self.written - saved[TAIL]) // self.steps)) * self.steps
        self.head[:] = saved

    # -- identity

    def cell(self, lane: np.ndarray, serial: np.ndarray) -> np.ndarray:
        return serial % self.steps * self.lanes + lane

    def serial(self, cell: np.ndarray) -> np.ndarray:
        """Return the serial of the row in each cell, ``[B]``; a number below ``tail`` if it is not live."""
        slot, newest = cell // self.lanes, self.written[cell % self.lanes] - 1
        return newest - (newest - slot) % self.steps

    def is_live(self, cell: np.ndarray) -> np.ndarray:
        return self.serial(cell) >= self.tail[cell % self.lanes]

    def is_stale(self, cell: np.ndarray, stamp: np.ndarray) -> np.ndarray:
        """Return whether the row that had the serial ``stamp`` when a batch was drawn is gone, ``[B]`` bool."""
        return (stamp < self.tail[cell % self.lanes]) | (stamp != self.serial(cell))

    def cell_of(self, number: np.ndarray) -> np.ndarray:
        """Return the cells of the live rows with these numbers, ``[B]``, each in ``0 .. len(ring) - 1``.

        The number itself is the cell while the live rows fill all cells, or the cells from 0 on.
        """
        count = self.written - self.tail
        if (count == count[0]).all() and (count[0] == self.steps or not (self.tail % self.steps).any()):
            return number
        ends = count.cumsum()
        lane = ends.searchsorted(number, side="right")
        return self.cell(lane, self.tail[lane] + number - (ends - count)[lane])
