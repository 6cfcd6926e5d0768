"""Describes deduplicated rows: what a row and an entry hold, and where they are.

Compiled loops receive one address, :attr:`Table.address`: that of a :class:`Stored`, which has the addresses of arrays
of :class:`Group`, :class:`Part` and :class:`Run`. All fields are int64, and have the same names there and here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Group(NamedTuple):
    """A group of deduplicated keys; one entry holds the values of all keys of the group."""

    names_at: int  # offset of the names in a row: ``pieces`` for its own observation, then ``pieces`` for the next one
    pieces: int  # entries per observation, oldest first
    sides: int  # 2 if rows have a next observation, else 1
    names: int  # in a row: ``pieces * sides``
    reach: int  # an upper bound of the distance, in time steps, between rows that refer to the same entry
    nbytes: int  # of an entry
    first_part: int  # its keys are the parts from number `first_part` to number `past_part - 1`
    past_part: int
    entries: int = 0  # the addresses of its tensors in a Table
    stack: int = 0
    counters: int = 0


class Part(NamedTuple):
    """The position of one deduplicated key's bytes in an entry, in an observation and in a batch."""

    into: int  # offset of its bytes in an entry
    inner: int  # bytes per contiguous run of the key in a row
    outer: int  # number of these runs
    pitch: int  # distance between the starts of runs in a row, in bytes
    root: int  # index of the key's leaf in a batch, for the row's own observation
    next: int  # index of the key's leaf in a batch, for the next observation


class Run(NamedTuple):
    """A key that rows hold themselves."""

    offset: int  # of its bytes in a stored row
    leaf: int  # index of the key's leaf in a batch
    nbytes: int


class Source(NamedTuple):
    """Where the values of one key to write are: the address of the first, and the strides in bytes."""

    address: int
    along_time: int
    along_lanes: int


SOURCE_FIELDS = len(Source._fields)


class Stored(NamedTuple):
    """The rows, ``total`` of ``row_bytes`` bytes, ``lanes`` per time step, and the addresses of three arrays."""

    rows: int
    row_bytes: int
    total: int
    lanes: int
    groups: int
    group_count: int
    parts: int
    part_count: int
    runs: int
    run_count: int


@dataclass(eq=False)
class Table:
    """Stored rows, and the pools of entries to which they refer."""

    groups: tuple[Group, ...]  # the deduplicated keys; each group has a pool of entries
    parts: tuple[Part, ...]
    runs: tuple[Run, ...]  # all other keys
    rows: Tensor  # ``[N, row_bytes]`` uint8, the stored rows
    lanes: int  # rows per time step
    entries: Sequence[Tensor]  # per group ``[M + 1, bytes]`` uint8; name i is entry i - 1, the last entry is scratch
    stacks: Sequence[Tensor]  # per group ``[M + 1]`` int32, a stack of the free names that have been used before
    counters: Sequence[Tensor]  # per group ``[2]`` int64: the number of names on the stack, and the largest name used
    is_compiled: bool = True  # whether the rows are on the CPU, where compiled loops read and write them

    def __post_init__(self) -> None:
        self._stored = np.zeros(len(Stored._fields), np.int64)

    def names(self, g: int) -> Tensor:
        """Return a view of the int32 entry names that the rows store for group number ``g``."""
        group = self.groups[g]
        return self.rows.narrow(1, group.names_at, 4 * group.names).view(torch.int32)

    @property
    def address(self) -> int:
        """The address of a :class:`Stored`: always the same, but what it says is made anew if the rows have moved."""
        if self._stored[0] != self.rows.data_ptr():
            self._describe()
        return int(self._stored.ctypes.data)  # not kept: a copy of the table has another one

    def _describe(self) -> None:
        tensors = zip(self.entries, self.stacks, self.counters, strict=True)
        groups = [
            group._replace(entries=entries.data_ptr(), stack=stack.data_ptr(), counters=counters.data_ptr())
            for group, (entries, stack, counters) in zip(self.groups, tensors, strict=True)
        ]
        self._arrays = [np.array(each, np.int64) for each in (groups, self.parts, self.runs)]  # kept alive
        groups_at, parts_at, runs_at = (array.ctypes.data for array in self._arrays)
        total, row_bytes = self.rows.shape
        self._stored[:] = Stored(
            rows=self.rows.data_ptr(),
            row_bytes=row_bytes,
            total=total,
            lanes=self.lanes,
            groups=groups_at,
            group_count=len(groups),
            parts=parts_at,
            part_count=len(self.parts),
            runs=runs_at,
            run_count=len(self.runs),
        )
