"""Which rows are live, and where they lie: a row is (lane, serial).

Each of E lanes has T slots. Row ``serial`` of lane ``e`` lies in the cell
``(serial % T) * E + e``, and is live while ``tail <= serial < written``. These two
numbers per lane lie where the rows lie. All other cells are *holes*: no sampler draws
them, and no index reads them. The *stamp* of a row is its serial: a batch of stamps
tells which rows are gone.

A write is *published*. It first gives up the rows that it will replace, by advancing
``tail`` (:meth:`Ring.begin`); then it copies the new rows; then it advances ``written``
(:meth:`Ring.publish`). The head after the write lies in ``after``, and ``dirty`` says
how far the write has come, so that whoever finds a write that did not end can finish or
give up each step for all lanes (:meth:`Ring.recover`). Nothing is undone: the rows that
were given up are gone.

Rows are always in order: a write elsewhere than after the newest row is an edit, and
the row keeps its serial.

Invariant (:meth:`Ring.check`): ``0 <= tail <= written`` and ``written - tail <= T`` in
each lane; a lane without rows begins at slot 0. A lane whose rows neither fill all
slots nor the slots from 0 on has lost rows to a write that did not end, until newer
rows fill these holes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, uses_triton
from rlbuf_td.kernels.host_memory import address_of, to_device
from rlbuf_td.kernels.serials import (
    AFTER,
    BEFORE,
    DIRTY,
    ESTIMATED,
    FOLLOWING,
    IDLE,
    NEXT_PUBLICATION,
    NEXT_ROWS_WRITTEN,
    PUBLICATION,
    PUBLISHED,
    ROWS_WRITTEN,
    TAIL,
    UNCOUNTED,
    VALUE_ROWS,
    WRITING,
    WRITTEN,
    Serials,
    block_size,
)
from rlbuf_td.storages.checks import State, saved_number

#: Entry of a prioritized batch: the serial of each row, its *stamp*, ``[B]`` int64.
SAMPLED_AT = "sampled_at"
_MOST = 1 << 62


# a NamedTuple takes twice as long to make
@dataclass(slots=True)
class LiveRows:
    """How many rows are live, and how a number below this count names one."""

    rows: int
    #: Whether the row with a number lies in the cell with this number; otherwise,
    #: :meth:`Ring.cell_of` finds its cell.
    are_cells: bool


class Ring:
    """The serials of the live rows of each lane.

    Args:
        steps: T, the slots of a lane.
        lanes: E, the number of lanes.
    """

    def __init__(self, steps: int, lanes: int) -> None:
        self.steps, self.lanes = steps, lanes
        self._place(np.zeros(block_size(lanes), np.int64))
        self.following[0] = -1

    def _place(self, block: np.ndarray) -> None:
        address, numbers = block.ctypes.data, memoryview(block.data)
        # reads numbers in a fourth of NumPy's time
        self.block, self.address, self.numbers = block, address, numbers
        rows = block[: (BEFORE + 1) * self.lanes].reshape(-1, self.lanes)
        self.head = rows[:AFTER]
        self.after = rows[AFTER:BEFORE]
        self.before = rows[BEFORE]
        self.tail, self.written = self.head[:FOLLOWING]
        #: What the next row of each lane continues, ``[2, E]``, see
        #: :mod:`rlbuf_td.kernels.episodes`; also in `after`.
        self.following = self.head[FOLLOWING:]
        self.following_after = self.after[FOLLOWING:]

    def keep_in(self, block: Tensor, *, exists: bool) -> None:
        """Move the numbers to ``block``, int64 in shared memory; if it ``exists``, take
        those there."""
        if not exists:
            block.copy_(torch.from_numpy(self.block))
        self._place(block.numpy())

    def check(self) -> None:
        """Raise an AssertionError unless the invariant holds."""
        if not (
            (self.tail >= 0)
            & (self.tail <= self.written)
            & (self.written - self.tail <= self.steps)
        ).all():
            raise AssertionError(
                f"tail {self.tail} and written {self.written} do not fit {self.steps} slots"
            )
        if self.dirty != IDLE or (self.tail[self.count == 0] % self.steps).any():
            raise AssertionError(
                f"tail {self.tail} and written {self.written} are those of a write, {self.dirty}"
            )

    # -- how many rows there are

    @property
    def serials(self) -> np.ndarray:
        """A copy of ``tail`` and ``written``, ``[2, E]``."""
        return self.head[:FOLLOWING].copy()

    def common(self) -> tuple[int, int] | None:
        """Return ``tail`` and ``written`` if each is the same number in all lanes,
        otherwise None."""
        numbers, lanes = self.numbers, self.lanes
        tail, written = numbers[0], numbers[lanes]
        if lanes == 1:
            return tail, written
        raw, size = numbers[: 2 * lanes].tobytes(), 8 * lanes
        are_equal = (
            raw[:size] == raw[:8] * lanes
            and raw[size : 2 * size] == raw[size : size + 8] * lanes
        )
        return (tail, written) if are_equal else None

    def for_kernels(self) -> Serials | None:
        """Return what kernels on a GPU are told; None if lanes have unlike serials."""
        common = self.common()
        return None if common is None else Serials(*common, self.steps, self.lanes)

    @property
    def count(self) -> np.ndarray:
        """The number of live rows of each lane, ``[E]``."""
        return self.written - self.tail

    def __len__(self) -> int:
        """Return the number of live rows."""
        return self.numbered().rows

    @property
    def longest(self) -> int:
        """The number of time steps up to the last slot in which any lane has a row."""
        common = self.common()
        if common is None:
            return int(extents(self.tail, self.written, self.steps).max())
        tail, written = common
        return min(tail % self.steps + written - tail, self.steps)

    @property
    def holes(self) -> int:
        """The number of holes in the time steps up to :attr:`longest`."""
        live = self.numbered()
        return 0 if live.are_cells else self.longest * self.lanes - live.rows

    @property
    def are_aligned(self) -> bool:
        """Whether all lanes have as many rows, and their next rows go to the same
        slot."""
        if self.common() is not None:
            return True
        return not ((self.written - self.written[0]) % self.steps).any() and bool(
            (self.count == self.count[0]).all()
        )

    @property
    def cursor(self) -> int:
        """The slot of the next row, of lanes that stand together."""
        return self.numbers[self.lanes] % self.steps

    def numbered(self) -> LiveRows:
        """Return the number of live rows, and whether the number of each is its
        cell."""
        common = (
            (self.numbers[0], self.numbers[1]) if self.lanes == 1 else self.common()
        )
        if common is None:
            count = self.count
            are_equal = bool((count == count[0]).all())
            is_full = count[0] == self.steps
            begin_at_0 = not (self.tail % self.steps).any()
            return LiveRows(int(count.sum()), are_equal and bool(is_full or begin_at_0))
        tail, written = common
        steps = written - tail
        are_cells = steps == self.steps or not tail % self.steps
        return LiveRows(steps * self.lanes, are_cells)

    @property
    def newest(self) -> int:
        """The slot of the newest row; -1 if there is none, lanes do not stand together,
        or there are holes."""
        if not self.longest or not self.are_aligned or self.holes:
            return -1
        return (self.cursor - 1) % self.steps

    # -- writes

    @property
    def dirty(self) -> int:
        """How far a write has come that has not ended: :data:`IDLE` (there is none),
        :data:`WRITING`, ..."""
        return self.numbers[DIRTY]

    @property
    def publication(self) -> int:
        """How often rows have been published or given up."""
        return self.numbers[PUBLICATION]

    @property
    def rows_written(self) -> int:
        """The number of rows ever written, which changes with the head."""
        return self.numbers[ROWS_WRITTEN]

    @property
    def write_count(self) -> int:
        """The number of rows written since it was set to 0."""
        return self.rows_written - self.numbers[UNCOUNTED]

    @write_count.setter
    def write_count(self, count: int) -> None:
        self.numbers[UNCOUNTED] = self.rows_written - count

    @property
    def is_estimated(self) -> bool:
        """Whether no row has been written since the last :meth:`mark_estimated`."""
        return self.numbers[ESTIMATED] == self.numbers[PUBLICATION]

    def mark_estimated(self, value_rows: int) -> None:
        """Note that a writer has stored the estimates of these rows, and on how many of
        them it called its value network."""
        self.numbers[VALUE_ROWS] = value_rows
        self.numbers[ESTIMATED] = self.publication  # last

    @property
    def value_rows(self) -> int:
        """The number of rows that :meth:`mark_estimated` told; 0 unless the rows have
        estimates."""
        return self.numbers[VALUE_ROWS] if self.is_estimated else 0

    def count_from(self, rows_written: int) -> None:
        """Go on with the counts of another ring; the write count stays the same."""
        self.numbers[UNCOUNTED] += rows_written - self.rows_written
        self.numbers[ROWS_WRITTEN] = rows_written

    def count_edits(self, rows: int) -> None:
        """Count rows that were written in the place of others, or left out, which the
        write count leaves out."""
        self.numbers[UNCOUNTED] += rows
        self.numbers[ROWS_WRITTEN] += rows

    def serials_after(self, count: np.ndarray) -> np.ndarray:
        """Return ``tail`` and ``written`` after a write of ``count`` rows of each lane,
        ``[E]``, and ``written`` before it, ``[3, E]``."""
        written = self.written + count
        tail = np.maximum(self.tail, written - self.steps)
        return np.stack((tail, written, self.written))

    def begin(self, count: np.ndarray) -> None:
        """Give up the rows that a write of ``count`` rows of each lane, ``[E]``, will
        replace; the last T of them are stored."""
        after = self.after
        after[:] = self.head
        after[TAIL], after[WRITTEN], self.before[:] = self.serials_after(count)
        self._plan(int(count.sum()))
        self._give_up()

    def give_up(self) -> None:
        """Give up all rows; :meth:`load` brings others."""
        self.after[:] = self.head
        self.before[:] = self.after[TAIL] = self.written
        self._plan(0)
        self._give_up()

    def _plan(self, rows: int) -> None:
        """Note the counts after a write of ``rows`` rows."""
        self.numbers[NEXT_ROWS_WRITTEN] = self.rows_written + rows
        self.numbers[NEXT_PUBLICATION] = self.publication + 1

    def _give_up(self) -> None:
        self.numbers[DIRTY] = WRITING
        np.minimum(self.after[TAIL], self.written, out=self.tail)

    def publish(self) -> None:
        """Make the rows of a write live, after their bytes have been copied."""
        self.numbers[DIRTY] = PUBLISHED
        self._finish_publishing()

    def _finish_publishing(self) -> None:
        self.head[:] = self.after
        self.numbers[ROWS_WRITTEN] = self.numbers[NEXT_ROWS_WRITTEN]
        self.numbers[PUBLICATION] = self.numbers[NEXT_PUBLICATION]

    def finish(self) -> None:
        """Note that a write has ended: what is derived from the rows is up to date."""
        self.numbers[DIRTY] = IDLE

    def empty(self) -> None:
        """Give up all rows. The next ones lie in cells from slot 0 on, and no stamp of
        an earlier row equals theirs."""
        self.after[:] = self.head
        self.after[TAIL] = self.after[WRITTEN] = (
            self.written + -self.written % self.steps
        )
        self.before[:] = self.after[WRITTEN]  # no row is new
        self._plan(0)
        self.publish()
        self.finish()

    def recover(self) -> Tensor:
        """Finish or give up a write that did not end; return the cells of new rows, of
        which nobody may know yet."""
        new = torch.empty(0, dtype=torch.int64, device="cpu")
        if self.dirty == WRITING:
            np.minimum(self.after[TAIL], self.written, out=self.tail)
        elif self.dirty == PUBLISHED:
            self._finish_publishing()
            new = self._newest()
        without = self.count == 0
        self.tail[without] = self.written[without] = (
            self.written + -self.written % self.steps
        )[without]
        return new

    def _newest(self) -> Tensor:
        """Return the cells of the rows that the last write has published."""
        return self.newest_cells(
            self.written - np.maximum(np.minimum(self.before, self.written), self.tail)
        )

    # -- identity: cells are tensors ``[B]`` int64

    def ends_at(self, cell: Tensor) -> tuple[Any, Any]:
        """Return ``tail`` and ``written`` of the lane of each cell: numbers if all
        lanes agree, else ``[B]``."""
        common = self.common()
        if common is not None:
            return common
        lane = cell % self.lanes
        tail, written = (
            to_device(serials, lane.device)[lane]
            for serials in (self.tail, self.written)
        )
        return tail, written

    def serial(self, cell: Tensor, before: np.ndarray | None = None) -> Tensor:
        """Return the serial that follows from each cell, below ``tail`` if its row is
        not live.

        ``before``: an earlier :attr:`written`, for the rows that the cells had then.
        """
        is_now = before is None or np.array_equal(before, self.written)  # usual
        serials = self.for_kernels() if is_now and uses_triton(cell.device) else None
        if serials is not None:
            from rlbuf_td.kernels.draws.triton import stamps_of

            return stamps_of(cell, serials)
        newest = (
            self.ends_at(cell)[1]
            if is_now
            else to_device(before, cell.device)[cell % self.lanes]
        ) - 1
        slot = cell if self.lanes == 1 else cell // self.lanes
        return newest - (newest - slot) % self.steps

    def are_gone(self, written: np.ndarray) -> bool:
        """Return whether no row is live that was when ``written``, ``[E]``, rows had been
        written to each lane."""
        return bool((self.tail >= written).all())

    def is_live(self, cell: Tensor) -> Tensor:
        return self.serial(cell) >= self.ends_at(cell)[0]

    def is_stale(self, cell: Tensor, stamp: Tensor) -> Tensor:
        """Return whether the row that had this stamp is gone, ``[B]`` bool; of cells
        out of range, nothing is known."""
        return (stamp != self.serial(cell)) | (stamp < self.ends_at(cell)[0])

    def skip_stale(self, flat: Tensor, stamp: Tensor) -> tuple[Tensor, int | Tensor]:
        """Return flat indices, ``[B]``, with -1 for each row that is gone since it got
        its stamp, and their number.

        ``stamp`` is the entry ``"sampled_at"`` of the rows' batch. Of windows, it has
        the stamps of all their rows, and ``flat`` the anchors.
        """
        refuse_stamps(stamp, len(flat))
        stamp = stamp.to(flat.device, torch.int64)
        step = flat if self.lanes == 1 else flat // self.lanes
        # those of the first rows tell those of the anchors: a window lies in one lane
        if stamp.shape != flat.shape:
            first = stamp[:: len(stamp) // max(len(flat), 1)]
            stamp = first + (step - first) % self.steps
        stale = self.is_stale(flat, stamp) & (flat >= 0)
        # other stamps, and an index out of range, are errors that the caller raises
        if flat.is_cpu:
            is_of_cell = self.is_live(flat) | (stamp % self.steps == step)
            stale &= is_of_cell & (flat < self.steps * self.lanes)
        count = stale.sum()
        is_on_host = backend_of(flat) == "numba"
        return flat.masked_fill(stale, -1), int(count) if is_on_host else count

    def holes_among(self, cell: Tensor) -> Tensor | None:
        """Return which cells are holes, ``[B]`` bool; None if there are none. Cells out
        of range are no holes."""
        if not self.holes:
            return None
        inside = (cell >= 0) & (cell < self.longest * self.lanes)
        return inside & ~self.is_live(cell)

    # -- numbers and ages

    def cell_of(self, number: Tensor) -> Tensor:
        """Return the cells of the live rows with these numbers, ``[B]``, each in
        ``0 .. len(ring) - 1``.

        The number itself is the cell while the live rows fill all cells, or the cells
        from 0 on; otherwise, numbers go lane after lane.
        """
        if self.numbered().are_cells:
            return number
        return self.newest_of(number, self.count)

    def newest_of(self, number: Tensor, count: np.ndarray) -> Tensor:
        """Return the cells of the newest ``count`` rows of each lane with these
        numbers, ``[B]``, lane after lane."""
        ends = to_device(count.cumsum(), number.device)
        lane = torch.searchsorted(ends, number, right=True)
        _, written = self.ends_at(lane)
        return (written + number - ends[lane]) % self.steps * self.lanes + lane

    def newest_cells(self, count: np.ndarray) -> Tensor:
        """Return the cells of the newest ``count`` rows of each lane, ``[E]``: lane
        after lane, the oldest first."""
        lane = np.repeat(np.arange(self.lanes), count)
        serial = np.arange(len(lane)) + (self.written - count.cumsum())[lane]
        return torch.from_numpy(serial % self.steps * self.lanes + lane)

    def cells_after(self, cell: Tensor, steps: Tensor) -> Tensor:
        """Return the cells of the rows of the same lanes, ``steps`` time steps after
        those in ``cell``."""
        return (cell + steps * self.lanes) % (self.steps * self.lanes)

    def cells_by_age(self) -> Tensor:
        """Return the cells of all live rows, lane after lane, each from its oldest row
        on."""
        return self.newest_cells(self.count)

    def reach(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many live rows of its lane precede and follow each live row,
        ``[B]`` each."""
        serial, (tail, written) = self.serial(cell), self.ends_at(cell)
        return serial - tail, written - 1 - serial

    # -- state

    def state(self) -> State:
        return {
            "steps": self.steps,
            "head": torch.from_numpy(self.serials),
            "is_estimated": self.is_estimated,
            "value_rows": self.value_rows,
            "write_count": self.write_count,
        }

    def load(self, state: State) -> None:
        """Continue the :meth:`state` of a ring of as many slots, with serials greater
        by a multiple of T.

        No stamp of this ring matches then.
        """
        tail, written = state["head"].numpy()
        most = int(self.written.max())
        up = (
            max(0, -(-(most - int(tail.min())) // self.steps) * self.steps)
            if most
            else 0
        )
        self.after[:] = self.head
        self.after[TAIL], self.after[WRITTEN] = tail + up, written + up
        # all rows are new to those who have been told of others
        self.before[:] = self.after[TAIL]
        self._plan(0)
        self.publish()
        self.write_count = state["write_count"]
        if state["is_estimated"]:
            self.mark_estimated(state["value_rows"])


def extents(tail: Any, written: Any, steps: int) -> Any:
    """Return the number of slots of each lane up to the last one with a row, ``[E]``,
    as arrays or tensors."""
    return (tail % steps + written - tail).clip(max=steps)


def refuse_ring(state: Any, lead: torch.Size) -> None:
    """Raise a ValueError unless ``state`` is that of a ring whose longest lane fills
    the first rows, ``[steps, E]``."""
    steps, head = state["steps"], state["head"]
    lanes = lead[1:].numel()
    if type(state["is_estimated"]) is not bool:
        raise ValueError(
            f"the saved is_estimated is {state['is_estimated']!r}, expected True or False"
        )
    saved_number("value_rows", state["value_rows"], 0, _MOST)
    saved_number("write count", state["write_count"], 0, (1 << 63) - 1)
    if type(steps) is not int or not lead[0] <= steps <= _MOST or not steps:
        raise ValueError(f"a ring of {steps} slots cannot hold rows {[*lead]}")
    if (
        not isinstance(head, Tensor)
        or head.dtype is not torch.int64
        or head.shape != (2, lanes)
    ):
        raise ValueError(
            f"the saved numbers of lanes must be int64 of shape {[2, lanes]}"
        )
    tail, written = head
    fits = (
        (tail >= 0) & (tail <= written) & (written - tail <= steps) & (written < _MOST)
    )
    if not bool(fits.all()) or int(extents(tail, written, steps).max()) != lead[0]:
        raise ValueError("the saved numbers of lanes do not fit the saved rows")


def refuse_stamps(stamp: Tensor, rows: int) -> None:
    """Raise a ValueError unless a batch has one stamp for each of ``rows`` rows, or for
    each row of as many windows."""
    if stamp.is_cpu:
        address_of(stamp)  # refuses stamps without memory
    if (
        stamp.ndim != 1
        or stamp.shape[0] % max(rows, 1)
        or bool(stamp.shape[0]) != bool(rows)
    ):
        raise ValueError(
            f"the batch has {tuple(stamp.shape)} entries {SAMPLED_AT!r} for {rows} rows: take both from one batch, "
            f"or leave out {SAMPLED_AT!r} to update the rows without a check"
        )
