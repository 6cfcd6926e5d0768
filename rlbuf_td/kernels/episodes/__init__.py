"""Where the episode of each row begins and ends: two numbers per row, so that a look-up
is one load.

Rows are ``[T, E]``: T time steps and E lanes. Row ``serial`` of a lane lies in its slot
``serial % T`` and is stored while ``tail <= serial < written``. ``numbers``,
``[E, T, 2]`` int32, holds for each slot of each lane

- ``back``: the steps since the row's episode began. It is written once, with the row,
  and counts rows that are gone, too. The bit :data:`BREAK` marks a row that begins an
  episode although no flag or id of the row before it says so: after a load, a
  reopening, a reset without ``done``, or if another actor takes the lane.
- ``rows_to_end``: the number of rows up to the end of the episode, this one included; 0
  while the episode goes on. When an episode ends, one loop over its stored rows writes
  it: once per row.

A row has ``min(back, serial - tail)`` stored rows before it in its episode, and
``rows_to_end - 1`` after it, or, in an episode that goes on, ``written - 1 - serial``.
An episode is *whole* if its first row is stored: ``back <= serial - tail``.

``following``, ``[2, E]`` int64, is what the next row of each lane continues: its
``back``, unless its id differs (0 after the end of an episode, -1 for a break), and the
id of the row before. Removing rows changes neither, so that an episode whose first rows
are gone is never whole. An episode that a break ends is closed when the next row is
written.

Invariant: within a lane, ``back`` is 0 or one more than that of the row before; stored
rows of one episode agree on their last row; only rows of the newest episode of a lane
have ``rows_to_end == 0``.

The functions here are the specification, for all devices;
:mod:`rlbuf_td.kernels.episodes.cpu` has the loops of the CPU, and
:mod:`rlbuf_td.kernels.episodes.triton` the kernel of a GPU. All of them note rows while
they are written: what follows them is in ``following_after`` until they are published.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BACK, ROWS_TO_END = range(2)
BREAK = -(1 << 31)  # the bit 31 of `back`
STEPS = (1 << 31) - 1  # its other bits
MOST = 1 << 30  # up to which steps are counted: more than the slots of any lane
BACK_OF_NEXT, ID = range(2)  # the rows of `following`

_COLUMNS = "rows", "row_bytes", "flags", "flag_count", "id_offset", "id_size"
#: For the loops: addresses of ``numbers``, ``tail``, ``written``, ``following`` and
# ``following_after``, T and E; and where the rows hold what ends an episode: ``flags``
# is the address of the offset and the size in bytes of ``flag_count`` flags in a row,
# ``[n, 2]`` int64; ids begin at ``id_offset`` and have ``id_size`` bytes (0: no ids).
EPISODES = np.dtype(
    [
        (name, np.int64)
        for name in (
            "numbers",
            "tail",
            "written",
            "following",
            "following_after",
            "steps",
            "lanes",
            *_COLUMNS,
        )
    ]
)


class Spans(NamedTuple):
    """The stored rows around each row in its episode, ``[B]`` each."""

    back: Tensor  # int64
    ahead: Tensor  # int64
    ended: Tensor  # bool


class Lanes(NamedTuple):
    """Rows of all lanes whose numbers are computed: those from ``first`` up to
    ``written``; ``[E]`` int64 each, but the first two."""

    numbers: Tensor  # ``[E, T, 2]`` int32
    following: Tensor  # ``[2, E]`` int64, what the row ``noted`` continues
    first: Tensor
    written: Tensor
    # up to which serial rows have numbers; below `first` if rows between are gone
    noted: Tensor

    @property
    def newest(self) -> Tensor:
        """The age of the newest row of each lane, ``[E, 1]``; -1 if there is none."""
        return (self.written - self.first)[:, None] - 1


class RowsByAge(NamedTuple):
    """The rows of :class:`Lanes`, ``[E, n]`` each, for the ``n`` rows of the longest
    lane."""

    age: Tensor  # 0 for the first row
    lane: Tensor
    slot: Tensor
    exists: Tensor

    @property
    def cells(self) -> Tensor:
        return self.slot * len(self.slot) + self.lane


def spans(
    numbers: Tensor, cells: Tensor, tail: Tensor | int, written: Tensor | int
) -> Spans:
    """Look up the stored rows at flat indices ``cells``, ``[B]``; ``tail`` and
    ``written`` are those of their lanes."""
    lanes, steps = numbers.shape[:2]
    slot = cells // lanes if lanes > 1 else cells
    ago = (written - 1 - slot) % steps
    before = written - 1 - tail - ago  # stored rows of the lane before this one
    rows = slot + cells % lanes * steps if lanes > 1 else slot
    back, rows_to_end = numbers.flatten(0, 1)[rows].long().unbind(-1)
    ended = rows_to_end > 0
    ahead = torch.where(ended, rows_to_end - 1, ago)
    return Spans((back & STEPS).minimum(before), ahead, ended)


def lanes_of_write(numbers: Tensor, following: Tensor, serials: Tensor) -> Lanes:
    """Return the new rows of a write, and those before them whose numbers it may
    change: the newest episode of each lane that gets rows.

    ``serials``, ``[3, E]`` int64: ``tail`` and ``written`` after the write, and
    ``written`` before it.
    """
    tail, written, noted = serials
    slot = (noted - 1) % numbers.shape[1]
    back = numbers[torch.arange(len(numbers), device=slot.device), slot, BACK]
    begin = torch.maximum(tail, noted - 1 - (back.long() & STEPS))
    first = torch.where(noted > tail, begin, tail)
    first = torch.where(noted < written, first, written)
    return Lanes(numbers, following, first, written, noted)


def by_age(lanes: Lanes, longest: int) -> RowsByAge:
    """Return the rows of all lanes; ``longest`` is the number of those of the longest
    lane."""
    count, steps = lanes.numbers.shape[:2]
    device = lanes.numbers.device
    shape = (count, longest)
    age = torch.arange(longest, device=device).expand(shape)
    lane = torch.arange(count, device=device)[:, None].expand(shape)
    slot = (lanes.first[:, None] + age) % steps
    return RowsByAge(age, lane, slot, age <= lanes.newest)


def note_(lanes: Lanes, rows: RowsByAge, ended: Tensor, traj_id: Tensor) -> Tensor:
    """Compute the numbers of ``rows`` from flags, ids and the breaks so far; return what
    follows them, ``[2, E]`` int64.

    What precedes the first row of a lane follows from its ``back``, or from
    ``following`` if it has none; nothing is known if rows that were written between are
    gone.

    Args:
        lanes: its numbers are changed; there is a row.
        rows: those of ``lanes``, :func:`by_age`.
        ended: ``[E, n]`` bool, whether each row ends its episode.
        traj_id: ``[E, n]`` int64, the id of each row's episode; equal numbers if rows
            have no ids.
    """
    age, lane, slot, exists = rows
    old = lanes.numbers[lane, slot, BACK]
    follows, id_before = lanes.following[..., None]
    # the age of the first row that has no numbers
    first_new = (lanes.noted - lanes.first)[:, None]
    breaks = torch.where(age < first_new, old < 0, (age == first_new) & (follows < 0))
    begins = breaks | ended.roll(1, 1) | (traj_id != traj_id.roll(1, 1))
    begins[:, 0] = False
    before = torch.where(
        first_new > 0,
        old[:, :1] & STEPS,
        follows.clamp(min=0) * (traj_id[:, :1] == id_before),
    )
    before = torch.where(first_new < 0, MOST, before)
    start = torch.where(begins, age, 0).cummax(1).values
    back = (age - start + torch.where(start == 0, before, 0)).clamp(max=MOST)
    is_last = age == lanes.newest
    is_last[:, :-1] |= begins[:, 1:] & exists[:, 1:]
    last = torch.where(is_last, age, age.shape[1]).flip(1).cummin(1).values.flip(1)
    newest = lanes.newest.clamp(min=0)
    is_over = ended.gather(1, newest)  # whether the newest row ends its episode
    rows_to_end = torch.where((last < newest) | is_over, last - age + 1, 0)
    numbers = torch.stack((torch.where(breaks, BREAK, back), rows_to_end), -1).int()
    lanes.numbers[lane[exists], slot[exists]] = numbers[exists]
    has_new_rows = (lanes.noted < lanes.written)[:, None]
    is_known = (lanes.newest >= 0) & (has_new_rows | (follows >= 0))
    next_back = torch.where(is_over, 0, (back.gather(1, newest) + 1).clamp(max=MOST))
    after = torch.stack((next_back, traj_id.gather(1, newest)))
    return torch.where(is_known, after, lanes.following[..., None])[..., 0]


def whole(
    numbers: Tensor, rows: RowsByAge, newest: Tensor, *, only_finished: bool
) -> tuple[Tensor, Tensor]:
    """Return the first cell and the length of each episode whose rows are all stored,
    by lane and age; O(T * E). See :class:`Lanes` for ``newest``."""
    back, rows_to_end = numbers[rows.lane, rows.slot].long().unbind(-1)
    is_first = (
        rows.exists & ((back & STEPS) == 0) & ((rows_to_end > 0) | (not only_finished))
    )
    length = torch.where(rows_to_end > 0, rows_to_end, newest + 1 - rows.age)
    return rows.cells[is_first], length[is_first]
