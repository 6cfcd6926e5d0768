"""What the storages should know about time, as whole Python histories: the oracle of all tests about trajectories.

A :class:`History` is told of every time step that is written, one after the other, and remembers for each stored row
which row came before it in its trajectory. Everything else is found by walking from row to row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any


@dataclass(eq=False)
class Row:
    """One transition."""

    done: bool  # the trajectory ends with it
    name: int | None  # the id of its trajectory; None where ids are not stored
    before: Row | None  # the row that it follows in its trajectory, which may have been overwritten since
    ended: bool  # the trajectory is known to have ended: it is done, or a row of another id has come right after
    values: Mapping[Any, Any]  # what else a test wants to know about it
    serial: int = -1


class History:
    """Lanes of rows, each a ring of ``steps`` slots.

    A row follows the one that was written just before it in its lane if it lies in the next slot, and if that one is
    not done and of the same id.
    """

    def __init__(self, steps: int, lanes: int) -> None:
        self.steps, self.lanes = steps, lanes
        self.slots: list[list[Row | None]] = [[None] * lanes for _ in range(steps)]
        self.head: int | None = None  # the slot that was written last
        self.serials = count()

    def put(
        self,
        slot: int,
        done: Sequence[bool],
        names: Sequence[int] | None = None,
        values: Sequence[Mapping[Any, Any]] | None = None,
    ) -> None:
        written: list[Row | None] = []
        for lane in range(self.lanes):
            name = None if names is None else int(names[lane])
            before = None
            if self.head is not None and slot == (self.head + 1) % self.steps:
                before = self.slots[self.head][lane]
            row = Row(bool(done[lane]), name, before, bool(done[lane]), {} if values is None else values[lane])
            row.serial = next(self.serials)
            _link(row)
            written.append(row)
        self.slots[slot] = written
        self.head = slot

    def interrupt(self) -> None:
        """Note that a row has come that was not stored: what is written next follows nothing."""
        self.head = None

    def forget(self) -> None:
        self.slots = [[None] * self.lanes for _ in range(self.steps)]
        self.head = None

    def read_as_ring(self, live: int, head: int) -> None:
        """Take the ``live`` first slots for a ring whose newest one is ``head``, whatever order they came in."""
        order = [(head + 1 + j) % live for j in range(live)] if live == self.steps else list(range(live))
        self.head = order[-1] if order else None
        for slot, previous in zip(order, [None, *order[:-1]], strict=True):
            for lane in range(self.lanes):
                row = self.at(slot, lane)
                row.ended = row.done
                row.before = None if previous is None else self.at(previous, lane)
                _link(row)

    def at(self, slot: int, lane: int) -> Row:
        row = self.slots[slot][lane]
        assert row is not None
        return row

    def written(self) -> list[tuple[int, int]]:
        return [(slot, lane) for slot in range(self.steps) for lane in range(self.lanes) if self.slots[slot][lane]]

    def earlier(self, slot: int, lane: int) -> Iterator[int]:
        """Yield the slots of the rows before this one in its trajectory, the nearest first."""
        row = self.at(slot, lane)
        while True:
            slot = (slot - 1) % self.steps
            neighbour = self.slots[slot][lane]
            if neighbour is None or row.before is not neighbour:
                return
            yield slot
            row = neighbour

    def later(self, slot: int, lane: int) -> Iterator[int]:
        """Yield the slots of the rows after this one in its trajectory, the nearest first."""
        row = self.at(slot, lane)
        while True:
            slot = (slot + 1) % self.steps
            neighbour = self.slots[slot][lane]
            if neighbour is None or neighbour.before is not row:
                return
            yield slot
            row = neighbour

    def trajectory(self, slot: int, lane: int) -> list[int]:
        return [*reversed(list(self.earlier(slot, lane))), slot, *self.later(slot, lane)]

    def reach(self, slot: int, lane: int) -> tuple[int, int, bool]:
        later = list(self.later(slot, lane))
        last = later[-1] if later else slot
        return len(list(self.earlier(slot, lane))), len(later), self.at(last, lane).ended


def _link(row: Row) -> None:
    """Let ``row.before`` be the row that it follows in its trajectory, or nothing; note if that one has ended."""
    if row.before is not None and (row.before.done or row.before.name != row.name):
        row.before.ended = True
        row.before = None
