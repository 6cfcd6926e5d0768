"""Which rows are live, and where they lie: a row is (lane, serial).

Each of E lanes has T slots. Row ``serial`` of lane ``e`` lies in the cell ``(serial % T) * E + e``, and is live while
``tail <= serial < written``. These two numbers per lane lie where the rows lie. All other cells are *holes*: no sampler
draws them, and no index reads them. The *stamp* of a row is its serial: a batch of stamps tells which rows are gone.

Rows that are written elsewhere than after the newest row give up time order: rows of serials below ``ordered`` may be
in any order, until newer rows have replaced them. As long as there are such rows, ``generations`` holds the serial of
each cell's row. A write out of order moves all serials up by T or more, so that the rows that it replaces get others.

Invariant (:meth:`Ring.check`): ``0 <= tail <= written`` and ``written - tail <= T`` in each lane; while rows are out of
order, the generation of each live cell is below ``written``, and equal to its slot modulo T.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.inference_mode import outside_inference_mode
from rlbuf_td.kernels.serials import ORDERED, TAIL, WRITTEN

#: Entry of a prioritized batch: the serial of each row, its *stamp*, ``[B]`` int64.
SAMPLED_AT = "sampled_at"
_MOST = 1 << 62


class Ring:
    """The serials of the live rows of each lane.

    Args:
        steps: T, the slots of a lane.
        lanes: E, the number of lanes.
        head: ``[3, E]`` int64, or more rows, memory for the numbers, which an earlier process may have left; default:
            new memory.
    """

    def __init__(self, steps: int, lanes: int, head: np.ndarray | None = None) -> None:
        self.steps, self.lanes = steps, lanes
        self.generations: Tensor | None = None  # ``[T * E]`` int64, where the rows are; used while order is lost
        self._aside: np.ndarray | None = None  # a copy of `head` in shared memory, with which a failed write is undone
        self._place(np.zeros((3, lanes), np.int64) if head is None else head)

    def _place(self, head: np.ndarray) -> None:
        self.head, self.tail, self.written, self.ordered = head, head[TAIL], head[WRITTEN], head[ORDERED]
        self._numbers = memoryview(head.data).cast("B").cast("q")  # reads numbers in a fourth of NumPy's time

    def keep_in(self, memory: Tensor, generations: Tensor, *, found: bool) -> None:
        """Move the numbers to ``memory``, ``[2, 3, E]`` int64 in shared memory; if ``found``, take those there."""
        head, self._aside = memory.numpy()
        if not found:
            head[:] = self.head
            if self.generations is not None:
                generations.copy_(self.generations)
        self.generations = generations
        self._place(head)

    def save(self) -> None:
        """Copy the numbers of shared rows, before a write."""
        if self._aside is not None:
            self._aside[:] = self.head

    def undo(self) -> None:
        """Restore the numbers of the last :meth:`save`."""
        if self._aside is not None:
            self.head[:] = self._aside
            if not self.in_order:
                self.head += 2 * self.steps  # above the serials that the failed write may have given out

    def check(self) -> None:
        """Raise an AssertionError unless the invariant holds."""
        if not ((self.tail >= 0) & (self.tail <= self.written) & (self.written - self.tail <= self.steps)).all():
            raise AssertionError(f"tail {self.tail} and written {self.written} do not fit {self.steps} slots")
        if not self.in_order and self.generations is not None:
            live = self.cells_by_age()
            found, slot, written = self.generations[live], live // self.lanes, torch.from_numpy(self.written)
            if ((found % self.steps != slot) | (found >= written.to(live.device)[live % self.lanes])).any():
                raise AssertionError(f"generations {found.tolist()} do not fit slots {slot.tolist()}")

    # -- how many rows there are

    @property
    def serials(self) -> np.ndarray:
        """A copy of ``tail`` and ``written``, ``[2, E]``."""
        return self.head[:2].copy()

    def common(self) -> tuple[int, int] | None:
        """Return ``tail`` and ``written`` if each is the same number in all lanes, otherwise None."""
        numbers, lanes = self._numbers, self.lanes
        tail, written = numbers[0], numbers[lanes]
        if lanes == 1:
            return tail, written
        raw, size = numbers.tobytes(), 8 * lanes
        are_equal = raw[:size] == raw[:8] * lanes and raw[size : 2 * size] == raw[size : size + 8] * lanes
        return (tail, written) if are_equal else None

    @property
    def count(self) -> np.ndarray:
        """The number of live rows of each lane, ``[E]``."""
        return self.written - self.tail

    def __len__(self) -> int:
        """Return the number of live rows."""
        common = self.common()
        return int(self.count.sum()) if common is None else (common[1] - common[0]) * self.lanes

    @property
    def longest(self) -> int:
        """The number of live rows of the longest lane."""
        common = self.common()
        return int(self.count.max()) if common is None else common[1] - common[0]

    @property
    def holes(self) -> int:
        """The number of holes in the time steps up to the longest lane."""
        return 0 if self.common() is not None else self.longest * self.lanes - len(self)

    @property
    def together(self) -> bool:
        """Whether all lanes have as many rows, and their next rows go to the same slot."""
        if self.common() is not None:
            return True
        return not ((self.written - self.written[0]) % self.steps).any() and bool((self.count == self.count[0]).all())

    @property
    def cursor(self) -> int:
        """The slot of the next row, of lanes that stand together."""
        return self._numbers[self.lanes] % self.steps

    def extent(self) -> tuple[int, int]:
        """Return the number of cells of the time steps up to the longest lane, and :attr:`newest`."""
        common = self.common()
        if common is None:
            return self.longest * self.lanes, self.newest
        tail, written = common
        return (written - tail) * self.lanes, (written - 1) % self.steps if written > tail else -1

    @property
    def newest(self) -> int:
        """The slot of the newest row; -1 if there is none, or lanes do not stand together."""
        return (self.cursor - 1) % self.steps if self.longest and self.together else -1

    @property
    def newest_of_lanes(self) -> np.ndarray:
        """The slot of the newest row of each lane, ``[E]``; -1: none."""
        return np.where(self.count > 0, (self.written - 1) % self.steps, -1)

    @property
    def in_order(self) -> bool:
        """Whether the live rows of each lane were written one after another."""
        if self.lanes == 1:
            return self._numbers[2] <= self._numbers[0]
        return not self._numbers[2 * self.lanes] or bool((self.ordered <= self.tail).all())

    # -- writes

    def publish(self, lanes: np.ndarray | slice, count: np.ndarray | int) -> None:
        """Make the rows of a write live, after their bytes have been copied."""
        self.tail[lanes] = np.maximum(self.tail[lanes], self.written[lanes] + count - self.steps)
        self.written[lanes] += count
        if not self.in_order:
            counts = np.zeros(self.lanes, np.int64)
            counts[lanes] = count
            counts = np.minimum(counts, self.count)
            self._renew(self.newest_cells(counts))

    def turn_to(self, slot: int) -> None:
        """Give up all rows; the next ones lie in the slots from ``slot`` on."""
        self.tail[:] = self.written[:] = self.written + (slot - self.written) % self.steps

    def empty(self) -> None:
        """Give up all rows. The next ones lie in cells from 0 on, and no stamp of an earlier row equals theirs."""
        self.turn_to(0)

    def scatter(self, slots: Tensor) -> None:
        """Note that rows of all lanes have been written to these slots, ``[n]``, elsewhere than after the newest."""
        self.lose_order(slots.device)
        count = max(self.longest, int(slots.max()) + 1)
        moved = self.written + self.steps
        if count == self.steps:  # the next row follows the last of these
            moved += (int(slots[-1]) + 1 - moved) % self.steps
            self.tail[:] = moved - self.steps
        else:
            self.tail += self.steps
            moved = self.tail + count
        self.written[:] = self.ordered[:] = moved
        lane = torch.arange(self.lanes, device=slots.device)
        self._renew((slots[:, None] * self.lanes + lane).flatten())

    def lose_order(self, device: torch.device | str = "cpu") -> None:
        """Note that the rows written so far may be in any order."""
        if self.in_order:
            cells = torch.arange(self.steps * self.lanes, device=device)
            serials = torch.where(self.is_live(cells), self.serial(cells), -1)
            if self.generations is None:
                with outside_inference_mode():
                    self.generations = torch.empty_like(serials)
            self.generations.copy_(serials)
        self.ordered[:] = self.written

    def _renew(self, cells: Tensor) -> None:
        """Give the rows that have just been written the serials that follow from their cells."""
        if self.generations is not None:
            cells = cells.to(self.generations.device)
            self.generations[cells] = self.serial(cells)

    # -- identity: cells are tensors ``[B]`` int64

    def _of(self, lane: Tensor) -> tuple[Any, Any]:
        """Return ``tail`` and ``written`` of lanes ``[B]``: numbers if all lanes agree, else ``[B]``."""
        common = self.common()
        if common is not None:
            return common
        tail, written = (torch.from_numpy(each).to(lane.device)[lane] for each in (self.tail, self.written))
        return tail, written

    def serial(self, cell: Tensor) -> Tensor:
        """Return the serial that follows from each cell, below ``tail`` if its row is not live."""
        _, written = self._of(cell % self.lanes)
        return written - 1 - (written - 1 - cell // self.lanes) % self.steps

    def stamp(self, cell: Tensor) -> Tensor:
        """Return the serial of the row in each cell."""
        return self.serial(cell) if self.in_order or self.generations is None else self.generations[cell]

    def is_live(self, cell: Tensor) -> Tensor:
        return self.serial(cell) >= self._of(cell % self.lanes)[0]

    def is_stale(self, cell: Tensor, stamp: Tensor) -> Tensor:
        """Return whether the row that had this stamp is gone, ``[B]`` bool; cells in range."""
        is_gone = stamp != self.stamp(cell)
        return is_gone | (stamp < self._of(cell % self.lanes)[0]) if self.in_order else is_gone

    def holes_among(self, cell: Tensor) -> Tensor | None:
        """Return which cells are holes, ``[B]`` bool; None if there are none. Cells out of range are no holes."""
        if not self.holes:
            return None
        inside = (cell >= 0) & (cell < self.longest * self.lanes)
        return inside & ~self.is_live(cell)

    # -- numbers and ages

    def cell_of(self, number: Tensor) -> Tensor:
        """Return the cells of the live rows with these numbers, ``[B]``, each in ``0 .. len(ring) - 1``.

        The number itself is the cell while the live rows fill all cells, or the cells from 0 on; otherwise, numbers go
        lane after lane.
        """
        common, count = self.common(), self.count
        is_filled = common is not None and (common[1] - common[0] == self.steps or not common[0] % self.steps)
        if is_filled or ((count == count[0]).all() and (count[0] == self.steps or not (self.tail % self.steps).any())):
            return number
        return self.newest_of(number, count)

    def newest_of(self, number: Tensor, count: np.ndarray) -> Tensor:
        """Return the cells of the newest ``count`` rows of each lane with these numbers, ``[B]``, lane after lane."""
        ends = torch.from_numpy(count.cumsum()).to(number.device)
        lane = torch.searchsorted(ends, number, right=True)
        _, written = self._of(lane)
        return (written + number - ends[lane]) % self.steps * self.lanes + lane

    def newest_cells(self, count: np.ndarray) -> Tensor:
        """Return the cells of the newest ``count`` rows of each lane, ``[E]``: lane after lane, the oldest first."""
        lane = np.repeat(np.arange(self.lanes), count)
        serial = self.written[lane] + np.arange(len(lane)) - count.cumsum()[lane]
        return torch.from_numpy(serial % self.steps * self.lanes + lane)

    def cells_by_age(self) -> Tensor:
        """Return the cells of all live rows, lane after lane, each from its oldest row on."""
        return self.newest_cells(self.count)

    def reach(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many live rows of its lane precede and follow each live row, ``[B]`` each."""
        serial, (tail, written) = self.serial(cell), self._of(cell % self.lanes)
        return serial - tail, written - 1 - serial

    # -- state

    def state(self) -> dict[str, Any]:
        head, kept = torch.from_numpy(self.head[: ORDERED + 1].copy()), None if self.in_order else self.generations
        return {"steps": self.steps, "head": head, "generations": None if kept is None else kept.clone()}

    def load(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Continue a saved :meth:`state`, with serials greater by a multiple of T: no stamp of this ring matches.

        If the state is of a ring of other slots, each lane's rows lie in the cells from 0 on.
        """
        tail, _, ordered = state["head"].numpy()
        is_ordered, generations = (ordered <= tail).all(), state["generations"]
        generations = generations if state["steps"] == self.steps else None
        tail, written = saved_serials(state, self.steps)
        most = int(self.written.max())
        up = max(0, -(-(most - int(tail.min())) // self.steps) * self.steps) if most else 0
        self.tail[:], self.written[:], self.ordered[:] = tail + up, written + up, 0
        if not is_ordered:
            self.lose_order(device)
            if generations is not None and self.generations is not None:
                self.generations.copy_(torch.where(generations < 0, generations, generations + up))


def saved_serials(state: dict[str, Any], steps: int) -> np.ndarray:
    """Return :attr:`Ring.serials` of a saved ring whose rows are loaded into ``steps`` slots.

    If it had other slots, each lane's rows lie in the slots from 0 on; ``tail`` still tells whether rows had gone.
    """
    tail, written, _ = state["head"].numpy()
    if state["steps"] == steps:
        return np.stack((tail, written))
    first = np.where(tail > 0, steps, 0)
    return np.stack((first, first + written - tail))


def refuse_ring(state: Any, lead: torch.Size) -> None:
    """Raise a ValueError unless ``state`` is that of a ring whose longest lane fills the first rows, ``[steps, E]``."""
    steps, head, generations = state["steps"], state["head"], state["generations"]
    lanes = lead[1:].numel()
    if type(steps) is not int or not lead[0] <= steps <= _MOST or not steps:
        raise ValueError(f"a ring of {steps} slots cannot hold rows {[*lead]}")
    if not isinstance(head, Tensor) or head.dtype is not torch.int64 or head.shape != (3, lanes):
        raise ValueError(f"the saved numbers of lanes must be int64 of shape {[3, lanes]}")
    tail, written, ordered = head
    fits = (tail >= 0) & (tail <= written) & (written - tail <= steps) & (written < _MOST) & (ordered <= written)
    fits &= (written - tail == steps) | (tail % steps == 0)
    if int((written - tail).max()) != lead[0] or not bool(fits.all()):
        raise ValueError("the saved numbers of lanes do not fit the saved rows")
    if generations is not None and (generations.dtype, generations.shape) != (torch.int64, (steps * lanes,)):
        found = f"{generations.dtype} of shape {tuple(generations.shape)}"
        raise ValueError(f"the saved generations are {found}, not one per row")
