"""Deduplicated rows: each observation is stored once, in a pool of entries that rows share.

An *entry* is a fixed number of bytes: an observation, or one frame of a frame stack. Rows refer to entries by *names*:
int32 numbers from 1 on; 0 means no entry. If a row's next observation equals the observation of the following row in
its lane, both rows store the same names. Only nearby rows of a lane share entries, so no reference counts are needed.
When a row is overwritten, each of its entries becomes free unless a nearby row refers to it.

On the CPU, numba processes one row after another. On a GPU, torch operations process all lanes of a time step at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.host_memory import address_of
from rlbuf_td.kernels.inference_mode import outside_inference_mode

_CHUNK = 1 << 18  # rows whose names are read at once


@dataclass(frozen=True)
class Part:
    """The position of one deduplicated key's bytes in an entry, in an observation and in a batch."""

    into: int  # offset of its bytes in an entry
    inner: int  # bytes per contiguous run of the key in a row
    outer: int  # number of these runs
    pitch: int  # distance between the starts of runs in a row, in bytes
    root: int  # index of the key's leaf in a batch, for the row's own observation
    next: int  # index of the key's leaf in a batch, for the next observation


@dataclass(frozen=True)
class Group:
    """A group of deduplicated keys; one entry holds the values of all keys of the group."""

    ids: int  # offset of the names in a row: ``pieces`` for its own observation, then ``pieces`` for the next one
    pieces: int  # entries per observation, oldest first
    sides: int  # 2 if rows have a next observation, else 1
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.inner * part.outer for part in self.parts)

    @property
    def names(self) -> int:
        return self.pieces * self.sides

    @property
    def reach(self) -> int:
        """An upper bound of the distance, in time steps, between rows that refer to the same entry."""
        # A row at step t stacks the frames of steps t + 1 - pieces to t; its next observation ends one step later. Rows
        # that share a frame are thus at most `pieces` steps apart, twice as many if stacks repeat a frame.
        return 1 if self.pieces == 1 else 2 * self.pieces


@dataclass(frozen=True)
class Table:
    """Stored rows, and the pools of entries to which they refer."""

    groups: tuple[Group, ...]  # the deduplicated keys
    runs: np.ndarray  # ``[R, 3]`` int64, all other keys: offset in a stored row, index of the leaf in a batch, bytes
    rows: Tensor  # ``[N, own_bytes]`` uint8, the stored rows
    lanes: int  # rows per time step
    entries: list[Tensor]  # per group ``[M + 1, bytes]`` uint8; name i refers to entry i - 1, the last entry is scratch
    stacks: list[Tensor]  # per group ``[M + 1]`` int32, a stack of the free names that have been used before
    counters: tuple[Tensor, ...]  # per group ``[2]`` int64: the number of names on the stack, and the largest name used
    is_compiled: bool = True

    def ids(self, g: int) -> Tensor:
        """Return a view of the int32 entry names that the rows store for group number ``g``."""
        group = self.groups[g]
        return self.rows.narrow(1, group.ids, 4 * group.names).view(torch.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers and addresses of the groups and parts, for compiled loops; made anew if the rows have moved."""
        place, found = self.__dict__.get("_arrays", (None, None))
        if found is None or place != self.rows.data_ptr():
            found = self._numbers()
            self.__dict__["_arrays"] = self.rows.data_ptr(), found
        return found

    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        groups: list[list[int]] = []
        parts: list[list[int]] = []
        for g, group in enumerate(self.groups):
            first = len(parts)
            parts += [[p.into, p.inner, p.outer, p.pitch, p.root, p.next] for p in group.parts]
            base, stack, counters = (x[g].data_ptr() for x in (self.entries, self.stacks, self.counters))
            where = [base, stack, counters, first, len(parts), group.reach]
            groups.append([group.ids, group.pieces, group.sides, group.names, group.nbytes, *where])
        return np.array(groups, np.int64), np.array(parts, np.int64)

    @property
    def addresses(self) -> tuple[int, int, tuple[int, int]]:
        """The addresses of :attr:`arrays`, and their lengths."""
        groups, parts = self.arrays
        return groups.ctypes.data, parts.ctypes.data, (len(groups), len(parts))


def read_(table: Table, cells: Tensor, live: int, leaves: Sequence[Tensor | None], order: Tensor | None = None) -> bool:
    """Copy the rows in ``cells`` to the tensors ``leaves``; return False if a row is not in ``[0, live)``.

    ``leaves`` has one contiguous tensor, or None, per key; after False, their contents are undefined. On a GPU, indices
    are not checked. The CPU reads the rows in the order of the permutation ``order``.
    """
    if not table.is_compiled:
        return _read(table, cells, live, leaves)
    own, where, count = table.rows, 0 if order is None else order.data_ptr(), cells.numel()
    targets = np.array([0 if leaf is None else leaf.data_ptr() for leaf in leaves], np.int64)
    given = targets, own.data_ptr(), own.shape[1], live, address_of(cells), where, count
    from rlbuf_td.kernels.rows import pool_cpu

    return pool_cpu.read(*table.arrays, table.runs, *given)


def write_(
    table: Table, sources: np.ndarray, cells: Tensor | int, count: int, lanes: int, *, deferred: bool = False
) -> None:
    """Write the observations of rows to entries, and the names of these entries to the rows, on the CPU.

    Args:
        table: the rows and the pools of entries.
        sources: ``[P, 2, 3]`` int64. For each of P keys, and for observations and next observations, three numbers: the
            address of the data, its byte stride along time, and its byte stride along lanes.
        cells: row indices, contiguous int64, without repetitions; or an int, the first of consecutive rows of the ring.
        count: number of written rows.
        lanes: number of lanes if whole time steps are written, else 1.
        deferred: whether only later writes may reuse the entries that this write frees.
    """
    rows, (where, start) = table.rows, (0, cells) if isinstance(cells, int) else (cells.data_ptr(), 0)
    given = sources, rows.data_ptr(), rows.shape[1], len(rows), table.lanes, where, start, count, lanes, deferred
    from rlbuf_td.kernels.rows import pool_cpu

    pool_cpu.write(*table.arrays, *given)


def grow_(table: Table, g: int, most: int) -> None:
    """Enlarge the pool of group number ``g`` to a capacity of ``most`` entries; existing entries keep their names."""
    entries, stack = table.entries[g], table.stacks[g]
    with outside_inference_mode():
        table.entries[g] = entries.new_empty((most + 1, entries.shape[1]))
        table.stacks[g] = stack.new_empty(most + 1)
    table.entries[g][: len(entries) - 1] = entries[:-1]
    table.stacks[g][: len(stack) - 1] = stack[:-1]
    table.__dict__.pop("_arrays", None)


def rebuild_(table: Table, *, used: Sequence[int] | None = None) -> None:
    """Free all entries to which no row refers. ``used`` holds the largest name in each group; None: find it."""
    for g, (stack, counters) in enumerate(zip(table.stacks, table.counters, strict=True)):
        ids = table.ids(g)
        most = max(int(counters[1]), int(ids.max())) if used is None else used[g]
        named = torch.zeros(most + 1, dtype=torch.bool, device=stack.device)
        for first in range(0, len(ids), _CHUNK):
            named[ids[first : first + _CHUNK].flatten().long()] = True
        named[0] = True
        free = (~named).nonzero()[:, 0].flip(0)
        stack[: len(free)] = free.to(torch.int32)
        counters.copy_(torch.tensor([len(free), most], device="cpu"))


def _read(table: Table, cells: Tensor, live: int, leaves: Sequence[Tensor | None]) -> bool:
    cells = cells.reshape(-1)
    if not len(cells):
        return True
    if backend_of(cells) == "numba" and not 0 <= int(cells.min()) <= int(cells.max()) < live:
        return False
    rows = table.rows.index_select(0, cells)
    count, given = len(cells), [(place, leaf) for place, leaf in enumerate(leaves) if leaf is not None]
    out = {place: leaf.view(count, leaf.numel() // count).view(torch.uint8) for place, leaf in given}
    for source, leaf, width in table.runs.tolist():
        if leaf in out:
            out[leaf].copy_(rows[:, source : source + width])
    for g, group in enumerate(table.groups):
        for side in range(group.sides):
            wanted = [(part, leaf) for part in group.parts if (leaf := (part.root, part.next)[side]) in out]
            if not wanted:
                continue
            first = group.ids + 4 * side * group.pieces
            names = rows.narrow(1, first, 4 * group.pieces).clone().view(torch.int32).long()
            found = table.entries[g][names - 1]
            for part, leaf in wanted:
                raw = found[:, :, part.into : part.into + part.inner * part.outer]
                out[leaf].copy_(raw.unflatten(2, (part.outer, part.inner)).transpose(1, 2).flatten(1))
    return True
