"""Where the episode of each row begins and ends: two numbers per row, so that a look-up
is one load.

Rows are ``[T, E]``: T time steps and E lanes. Row ``serial`` of a lane lies in its slot
``serial % T`` and is stored while ``tail <= serial < written``. ``numbers``,
``[E, T, 2]`` int32, holds for each slot of each lane

- ``back``: the steps since the row's episode began. It is written once, with the row,
  and counts rows that are gone, too. The bit :data:`BREAK` marks a row that begins an
  episode although no flag or id of the row before it says so: after a load, a
  reopening, a reset without ``done``, or if another actor takes the lane.
- ``left``: the rows that are left in the episode, this one included; 0 while the
  episode goes on. When an episode ends, one loop over its stored rows writes it: once
  per row.

A row has ``min(back, serial - tail)`` stored rows before it in its episode, and
``left - 1`` after it, or, in an episode that goes on, ``written - 1 - serial``. An
episode is *whole* if its first row is stored: ``back <= serial - tail``.

``following``, ``[2, E]`` int64, is what the next row of each lane continues: its
``back``, unless its id differs (0 after the end of an episode, -1 for a break), and the
id of the row before. Removing rows changes neither, so that an episode whose first rows
are gone is never whole. An episode that a break ends is closed when the next row is
written.

Invariant: within a lane, ``back`` is 0 or one more than that of the row before; stored
rows of one episode agree on their last row; only rows of the newest episode of a lane
have ``left == 0``.

The functions here are the specification, for all devices;
:mod:`rlbuf_td.kernels.episodes.cpu` has the loops of the CPU, which note rows while
they are written: what follows them is in ``following_after`` until they are published.
On other devices, a write notes nothing: the numbers of all rows are computed when they
are needed (:func:`note_`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BACK, LEFT = range(2)
BREAK = -(1 << 31)  # the bit 31 of `back`
STEPS = (1 << 31) - 1  # its other bits
MOST = 1 << 30  # up to which steps are counted: more than the slots of any lane
BACK_OF_NEXT, ID = range(2)  # the rows of `following`

_COLUMNS = "rows", "row_bytes", "flags", "flag_count", "id_offset", "id_size"
#: For the loops: addresses of ``numbers``, ``tail``, ``written``, ``following`` and
# ``following_after``, T and E; : and where the rows hold what ends an episode: ``flags``
# is the address of the offset and the size in bytes of : ``flag_count`` flags in a row,
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
    whole: Tensor  # bool: whether the first row of the episode is stored


class Lanes(NamedTuple):
    """The numbers of the rows of all lanes, on one device."""

    numbers: Tensor  # ``[E, T, 2]`` int32
    following: Tensor  # ``[2, E]`` int64
    tail: Tensor  # ``[E]`` int64
    written: Tensor  # ``[E]`` int64
    # ``[E]`` int64, up to which serial there are numbers; ``following`` is of the row
    # there
    noted: Tensor
    most: int  # the number of rows of the longest lane


def spans(
    numbers: Tensor, cells: Tensor, tail: Tensor | int, written: Tensor | int
) -> Spans:
    """Look up the stored rows at flat indices ``cells``, ``[B]``; ``tail`` and
    ``written`` are those of their lanes."""
    lanes, steps = numbers.shape[:2]
    slot = cells // lanes if lanes > 1 else cells
    ago = (written - 1 - slot) % steps
    before = written - 1 - tail - ago  # stored rows of the lane before this one
    at = slot + cells % lanes * steps if lanes > 1 else slot
    back, left = numbers.flatten(0, 1)[at].long().unbind(-1)
    back, ended = back & STEPS, left > 0
    return Spans(
        back.minimum(before), torch.where(ended, left - 1, ago), ended, back <= before
    )


def _by_age(of: Lanes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ages, 0 for the oldest row of each lane, their lanes and slots, and which
    exist, ``[E, most]`` each."""
    lanes, steps = of.numbers.shape[:2]
    age = torch.arange(of.most, device=of.numbers.device).expand(lanes, of.most)
    lane = torch.arange(lanes, device=of.numbers.device)[:, None].expand(lanes, of.most)
    return (
        age,
        lane,
        (of.tail[:, None] + age) % steps,
        age < (of.written - of.tail)[:, None],
    )


def note_(of: Lanes, ended: Tensor, name: Tensor) -> None:
    """Compute the numbers of all rows, and what follows them, from flags, ids and the
    breaks so far; O(T * E).

    What precedes the oldest row of a lane follows from its ``back``, or from
    ``following`` if it has none; nothing is known if rows that were written between are
    gone.

    Args:
        of: is changed; there is a row.
        ended: ``[T, E]`` bool, whether each row ends its episode.
        name: ``[T, E]`` int64, the id of each row's episode; equal numbers if rows have
            no ids.
    """
    age, lane, slot, exists = _by_age(of)
    old, end, name = of.numbers[lane, slot, BACK], ended[slot, lane], name[slot, lane]
    follows, name_before = of.following[..., None]
    # the age of the first row that has no numbers
    first = (of.noted - of.tail)[:, None]
    breaks = torch.where(age < first, old < 0, (age == first) & (follows < 0))
    begins = breaks | end.roll(1, 1) | (name != name.roll(1, 1))
    begins[:, 0] = False
    before = torch.where(
        first > 0,
        old[:, :1] & STEPS,
        follows.clamp(min=0) * (name[:, :1] == name_before),
    )
    before = torch.where(first < 0, MOST, before)
    start = torch.where(begins, age, 0).cummax(1).values
    back = (age - start + torch.where(start == 0, before, 0)).clamp(max=MOST)
    newest = (of.written - of.tail)[:, None] - 1
    is_last = age == newest
    is_last[:, :-1] |= begins[:, 1:] & exists[:, 1:]
    last = torch.where(is_last, age, of.most).flip(1).cummin(1).values.flip(1)
    at_newest = newest.clamp(min=0)
    is_over = end.gather(1, at_newest)  # whether the newest row ends its episode
    left = torch.where((last < newest) | is_over, last - age + 1, 0)
    of.numbers[lane, slot] = torch.stack(
        (torch.where(breaks, BREAK, back), left), -1
    ).int()
    is_known = (newest >= 0) & ((of.noted < of.written)[:, None] | (follows >= 0))
    back_of_next = torch.where(
        is_over, 0, (back.gather(1, at_newest) + 1).clamp(max=MOST)
    )
    after = torch.stack((back_of_next, name.gather(1, at_newest)))
    of.following.copy_(torch.where(is_known, after, of.following[..., None])[..., 0])


def whole(of: Lanes, only_finished: bool) -> tuple[Tensor, Tensor]:
    """Return the first cell and the length of each episode whose rows are all stored,
    by lane and age; O(T * E)."""
    age, lane, slot, exists = _by_age(of)
    back, left = of.numbers[lane, slot].long().unbind(-1)
    is_first = exists & ((back & STEPS) == 0) & ((left > 0) | (not only_finished))
    length = torch.where(left > 0, left, (of.written - of.tail)[:, None] - age)
    return (slot * of.numbers.shape[0] + lane)[is_first], length[is_first]
