"""Where the episode of each row begins and ends: two numbers per row, so that a look-up is one load.

``numbers``, ``[E, T, 2]`` int32, holds for each slot of each lane

- ``back``: the steps since the row's episode began. It is written once, with the row, and counts rows that are gone,
  too. The bit ``BREAK`` marks a row that begins an episode although no flag or id of the row before it says so: after
  a load, a reopening, a reset without ``done``, or if another actor takes the lane.
- ``left``: the rows that are left in the episode, this one included; 0 while the episode goes on. When an episode ends,
  one loop over its live rows writes it: once per row.

A row of serial ``s`` has ``min(back, s - tail)`` stored rows before it in its episode, and ``left - 1`` after it, or,
in an episode that goes on, ``written - 1 - s``. An episode is *whole* if ``back <= s - tail``: its first row is stored.

The head of the ring holds what a lane's next row continues: ``FOLLOWING``, its ``back`` unless its id differs (0 after
the end of an episode, -1 for a break), and ``NAME``, the id of the newest row. Emptying a ring changes neither, so an
episode whose first rows are gone is never whole.

An episode that a break ends is closed when the next row is written.

Invariant (:meth:`Episodes.check`): within a lane, ``back`` is 0 or one more than that of the row before; rows of one
episode agree on their last row; only rows of the newest episode of a lane have ``left == 0``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlbuf_td.core.records import FOLLOWING, STEPS, Lanes
from rlbuf_td.kernels.dispatch import machine_code

if TYPE_CHECKING:
    from rlbuf_td.storages.ring import Ring


class Reach(NamedTuple):
    """The stored rows around each row in its episode, ``[B]`` each."""

    back: np.ndarray  # int64
    ahead: np.ndarray  # int64
    ended: np.ndarray  # bool
    whole: np.ndarray  # bool: whether the first row of the episode is stored


class Episodes:
    """``back`` and ``left`` of each row of a ring.

    Args:
        ring: the serials of the rows, whose head is ``[5, E]``.
        numbers: ``[E, T, 2]`` int32, memory for the numbers; default: new memory.
    """

    def __init__(self, ring: Ring, numbers: np.ndarray | None = None) -> None:
        self.ring = ring
        self.numbers = np.zeros((ring.lanes, ring.steps, 2), np.int32) if numbers is None else numbers
        ring.head[FOLLOWING] = -1
        self.draft = ring.head.copy()  # the head that a write will publish
        head, draft, places = (x.ctypes.data for x in (ring.head, self.draft, self.numbers))
        self.addresses = Lanes(head, draft, places, ring.steps, ring.lanes)

    def write(self, lane: np.ndarray, ended: np.ndarray, name: np.ndarray) -> None:
        """Note rows that are being written, after ``begin`` of the ring and before :meth:`publish`.

        The head stays as it is. ``left`` of stored rows may already count new ones: if the write is never published,
        :meth:`build` must follow.

        Args:
            lane: ``[n]`` int64, the lane of each row; those of a lane in time order.
            ended: ``[n]`` bool, whether the row ends its episode.
            name: ``[n]`` int64, the id of the row's episode; equal numbers if rows have no ids.
        """
        _loops().write(self.addresses, len(lane), *(x.ctypes.data for x in (lane, ended, name)))

    def publish(self, lanes: np.ndarray | slice, count: np.ndarray | int) -> None:
        """Publish the rows in the ring, and then what the next row continues: no break is lost between the two."""
        self.ring.publish(lanes, count)
        self.ring.head[FOLLOWING:] = self.draft[FOLLOWING:]

    def end(self, lanes: np.ndarray | None = None) -> None:
        """Let the next row of each of ``lanes`` (default: all) begin an episode: a break."""
        lanes = np.arange(self.ring.lanes) if lanes is None else lanes
        _loops().end(self.addresses, len(lanes), lanes.ctypes.data)

    def build(self, ended: np.ndarray, name: np.ndarray) -> None:
        """Compute both numbers again from flags, ids and breaks, after an edit of flags or ids, or a killed write.

        Args:
            ended: ``[T, E]`` bool.
            name: ``[T, E]`` int64.
        """
        _loops().build(self.addresses, ended.ctypes.data, name.ctypes.data)

    def reach(self, cell: np.ndarray) -> Reach:
        """Return how far the episode of each live row reaches, ``[B]``."""
        found = Reach(*(np.empty(len(cell), kind) for kind in (np.int64, np.int64, np.bool_, np.bool_)))
        _loops().reach(self.addresses, len(cell), cell.ctypes.data, *(x.ctypes.data for x in found))
        return found

    def whole(self, *, only_finished: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Return the first cell and the length of each episode whose rows are all stored, by lane and age: O(K + E)."""
        most = len(self.ring)
        first, length = np.empty(most, np.int64), np.empty(most, np.int64)
        found = _loops().whole(self.addresses, only_finished, first.ctypes.data, length.ctypes.data)
        return first[:found], length[:found]

    def check(self) -> None:
        """Raise an AssertionError unless the invariant holds."""
        ring = self.ring
        for lane in range(ring.lanes):
            serial = np.arange(ring.tail[lane], ring.written[lane])
            if not len(serial):
                continue
            back, left = self.numbers[lane, serial % ring.steps].T.astype(np.int64)
            steps, begins = back & STEPS, (back & STEPS) == 0
            last = np.where(left > 0, serial + left - 1, ring.written[lane] - 1)
            following = 0 if left[-1] else steps[-1] + 1
            for holds, what in (
                (begins[1:] | (np.diff(steps) == 1), "a row does not follow the one before"),
                (begins[back < 0], "a break does not begin an episode"),
                (np.where(begins[1:], last[:-1] == serial[:-1], last[:-1] == last[1:]), "a row has another last row"),
                (np.diff((left == 0).astype(np.int8)) >= 0, "an episode goes on that is not the newest"),
                (np.isin(ring.head[FOLLOWING, lane], [-1, following]), "the next row continues another episode"),
            ):
                if not np.all(holds):
                    raise AssertionError(f"lane {lane}: {what}: {back.tolist()}, {left.tolist()}")


class _Loops(NamedTuple):
    write: Callable[..., Any]
    end: Callable[..., Any]
    build: Callable[..., Any]
    reach: Callable[..., Any]
    whole: Callable[..., Any]


@cache
def _loops() -> _Loops:
    from rlbuf_td.core import episodes_cpu

    return _Loops(*(machine_code(getattr(episodes_cpu, name)) for name in _Loops._fields))
