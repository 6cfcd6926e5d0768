"""Where the episode of each row begins and ends: two numbers per row, so that a look-up is one load.

Rows are ``[T, E]``: T time steps and E lanes. Row ``serial`` of a lane lies in its slot ``serial % T`` and is stored
while ``tail <= serial < written``. ``numbers``, ``[E, T, 2]`` int32, holds for each slot of each lane

- ``back``: the steps since the row's episode began. It is written once, with the row, and counts rows that are gone,
  too. The bit :data:`BREAK` marks a row that begins an episode although no flag or id of the row before it says so:
  after a load, a reopening, a reset without ``done``, or if another actor takes the lane.
- ``left``: the rows that are left in the episode, this one included; 0 while the episode goes on. When an episode ends,
  one loop over its stored rows writes it: once per row.

A row has ``min(back, serial - tail)`` stored rows before it in its episode, and ``left - 1`` after it, or, in an
episode that goes on, ``written - 1 - serial``. An episode is *whole* if its first row is stored: ``back <= serial -
tail``.

``following``, ``[2, E]`` int64, is what the next row of each lane continues: its ``back``, unless its id differs (0
after the end of an episode, -1 for a break), and the id of the row before. Removing rows changes neither, so that an
episode whose first rows are gone is never whole. An episode that a break ends is closed when the next row is written.
A write notes in ``following_after`` what comes after its rows, which counts once these are published.

Invariant: within a lane, ``back`` is 0 or one more than that of the row before; stored rows of one episode agree on
their last row; only rows of the newest episode of a lane have ``left == 0``.

The functions here are the specification, for all devices; :mod:`rlbuf_td.kernels.episodes.cpu` has the loops of the
CPU. On other devices than the CPU, ``left`` is computed for all rows when it is needed (:func:`close_all_`).
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
#: For the loops: addresses of ``numbers``, ``tail``, ``written``, ``following`` and ``following_after``, T and E;
#: and where the rows hold what ends an episode: ``flags`` is the address of the offset and the size in bytes of
#: ``flag_count`` flags in a row, ``[n, 2]`` int64; ids begin at ``id_offset`` and have ``id_size`` bytes (0: no ids).
EPISODES = np.dtype(
    [
        (name, np.int64)
        for name in ("numbers", "tail", "written", "following", "following_after", "steps", "lanes", *_COLUMNS)
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
    following_after: Tensor  # ``[2, E]`` int64
    tail: Tensor  # ``[E]`` int64
    written: Tensor  # ``[E]`` int64


def spans(of: Lanes, cells: Tensor) -> Spans:
    """Look up the stored rows at flat indices ``cells``, ``[B]``."""
    lanes, steps = of.numbers.shape[:2]
    slot, lane = cells // lanes, cells % lanes
    newest = of.written[lane] - 1
    ago = (newest - slot) % steps
    before = newest - ago - of.tail[lane]  # stored rows of the lane before this one
    back, left = of.numbers[lane, slot].long().unbind(-1)
    back = back & STEPS
    return Spans(back.minimum(before), torch.where(left > 0, left - 1, ago), left > 0, back <= before)


def note_(of: Lanes, lane: np.ndarray, serial: np.ndarray, skips: np.ndarray, ended: Tensor, name: Tensor) -> None:
    """Write ``back`` of new rows, those of a lane in time order, and what follows them.

    Args:
        of: is changed. :func:`close_all_` must follow before a look-up.
        lane: ``[n]`` int64.
        serial: ``[n]`` int64.
        skips: ``[n]`` bool, whether the rows just before the first one of the lane have never been stored.
        ended: ``[n]`` bool, whether the row ends its episode.
        name: ``[n]`` int64, the id of the row's episode; equal numbers if rows have no ids.
    """
    steps, device = of.numbers.shape[1], of.numbers.device
    order = np.argsort(lane, kind="stable")
    lane, serial, skips = lane[order], serial[order], skips[order]
    is_first = np.diff(lane, prepend=-1) != 0
    newest = np.flatnonzero(np.diff(lane, append=-1))
    at, first, last, slot, place = (
        torch.from_numpy(each).to(device) for each in (lane, is_first, newest, serial % steps, order)
    )
    ended, name = ended[place], name[place]
    follows, name_before = of.following[:, at]
    is_new = (follows <= 0) | (name != name_before)
    unknown = first & torch.from_numpy(skips).to(device)
    follows = torch.where(unknown, MOST, follows)
    begins = torch.where(first, is_new & ~unknown, ended.roll(1) | (name != name.roll(1)))
    position = torch.arange(len(at), device=device)
    start = torch.where(begins | first, position, 0).cummax(0).values
    back = (position - start + torch.where(begins[start], 0, follows[start])).clamp(max=MOST)
    of.numbers[at, slot, BACK] = torch.where(first & (follows < 0), BREAK, back).int()
    of.numbers[at, slot, LEFT] = ended.int()
    of.following_after[BACK_OF_NEXT, at[last]] = torch.where(ended, 0, (back + 1).clamp(max=MOST))[last]
    of.following_after[ID, at[last]] = name[last]


def _by_age(of: Lanes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ages, 0 for the oldest row of each lane, their lanes and slots, and which exist, ``[E, T]`` each."""
    lanes, steps = of.numbers.shape[:2]
    age = torch.arange(steps, device=of.numbers.device).expand(lanes, steps)
    lane = torch.arange(lanes, device=of.numbers.device)[:, None].expand(lanes, steps)
    return age, lane, (of.tail[:, None] + age) % steps, age < (of.written - of.tail)[:, None]


def close_all_(of: Lanes) -> None:
    """Compute ``left`` of all rows from ``back``, and from ``left`` of the newest row of each lane; O(T * E)."""
    age, lane, slot, exists = _by_age(of)
    steps = of.numbers.shape[1]
    back, left = of.numbers[lane, slot].unbind(-1)
    newest = (of.written - of.tail)[:, None] - 1
    is_last = age == newest
    is_last[:, :-1] |= ((back[:, 1:] & STEPS) == 0) & exists[:, 1:]
    last = torch.where(is_last, age, steps).flip(1).cummin(1).values.flip(1)
    ended = exists & ((last < newest) | (left.gather(1, newest.clamp(min=0)) > 0))
    of.numbers[lane, slot, LEFT] = torch.where(ended, last - age + 1, 0).int()


def build_(of: Lanes, ended: Tensor, name: Tensor) -> None:
    """Compute all numbers again from flags, ids and breaks, after an edit; O(T * E).

    ``back`` of the oldest row of a lane stays, because the rows before it are not stored.

    Args:
        of: is changed.
        ended: ``[T, E]`` bool.
        name: ``[T, E]`` int64.
    """
    age, lane, slot, exists = _by_age(of)
    old = of.numbers[lane, slot, BACK].long()
    end, identity, is_oldest = ended[slot, lane], name[slot, lane], age == 0
    begins = (old < 0) | end.roll(1, 1) | (identity != identity.roll(1, 1))
    start = torch.where(begins & ~is_oldest, age, 0).cummax(1).values
    back = age - start + torch.where(start == 0, (old[:, :1] & STEPS).clamp(max=MOST), 0)
    kept = torch.where(old < 0, BREAK, back.clamp(max=MOST))
    of.numbers[lane, slot, BACK] = torch.where(exists & ~is_oldest, kept, old).int()
    of.numbers[lane, slot, LEFT] = end.int()
    newest = (of.written - of.tail - 1).clamp(min=0)[:, None]
    back_of_next = torch.where(end, 0, (back + 1).clamp(max=MOST)).gather(1, newest)[:, 0]
    is_known = (of.written > of.tail) & (of.following[BACK_OF_NEXT] >= 0)
    of.following[BACK_OF_NEXT] = torch.where(is_known, back_of_next, of.following[BACK_OF_NEXT])
    of.following[ID] = torch.where(of.written > of.tail, identity.gather(1, newest)[:, 0], of.following[ID])
    close_all_(of)


def whole(of: Lanes, only_finished: bool) -> tuple[Tensor, Tensor]:
    """Return the first cell and the length of each episode whose rows are all stored, by lane and age; O(T * E)."""
    age, lane, slot, exists = _by_age(of)
    back, left = of.numbers[lane, slot].long().unbind(-1)
    is_first = exists & ((back & STEPS) == 0) & ((left > 0) | (not only_finished))
    length = torch.where(left > 0, left, (of.written - of.tail)[:, None] - age)
    return (slot * of.numbers.shape[0] + lane)[is_first], length[is_first]
