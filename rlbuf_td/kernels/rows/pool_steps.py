"""Writes deduplicated rows with torch operations: all lanes of a time step at once.

The module :mod:`rlbuf_td.kernels.rows.pool` explains entries and their names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlbuf_td.kernels.rows.table import Group, Part, Table


def write_by_steps_(
    table: Table, given: Sequence[Sequence[Tensor]], cells: Tensor | int, count: int, *, deferred: bool = False
) -> None:
    """Implement :func:`rlbuf_td.kernels.rows.pool.write_` on any device."""
    if isinstance(cells, int):
        cells = (cells + torch.arange(count, device=table.rows.device)) % len(table.rows)
    steps, lanes = given[0][0].shape[:2]
    for g, group in enumerate(table.groups):
        parts, keys = table.parts[group.first_part : group.past_part], given[group.first_part : group.past_part]
        freed: list[tuple[Tensor, Tensor]] = []
        for t, rows in enumerate(cells.view(steps, lanes)):
            write = _Step(table, g, rows)
            held = write.release()
            if deferred:
                freed.append(held)
            else:
                write.give(*held)
            write.fill(*(_raw(group, parts, [side[t] for side in sides]) for sides in zip(*keys, strict=True)))
        for held in freed:
            _Step(table, g, cells[:0]).give(*held)


def _raw(group: Group, parts: Sequence[Part], values: Sequence[Tensor]) -> Tensor:
    """Convert observations, one tensor ``[B, ...]`` per key, to ``[B, group.pieces, bytes]``, as in pool entries."""
    found = []
    for value, part in zip(values, parts, strict=True):
        flat = value.reshape(len(value), value.shape[1:].numel())
        raw = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        found.append(raw.view(len(raw), part.outer, group.pieces, part.inner).transpose(1, 2).flatten(2))
    return torch.cat(found, 2)


class _Step:
    """Writes the rows of one time step at once, which is possible because rows of different lanes share no entries."""

    def __init__(self, table: Table, g: int, rows: Tensor) -> None:
        self.table, self.group, self.rows = table, table.groups[g], rows
        self.names, self.entries = table.names(g), table.entries[g]
        self.stack, self.counters = table.stacks[g], table.counters[g]

    def near(self, steps: int) -> Tensor:
        """Return the names in the rows ``steps`` time steps after the written rows; a negative number means before."""
        return self.names[(self.rows + steps * self.table.lanes) % len(self.names)]

    def release(self) -> tuple[Tensor, Tensor]:
        """Set the names in the written rows to 0; return the old names, and a mask of the names to free."""
        names, total = self.names[self.rows], len(self.names) // self.table.lanes
        held = (names[:, :, None] == names[:, None, :]).tril(-1).any(2) | (names == 0)
        for d in range(1, min(self.group.reach, total - 1) + 1):
            for steps in (d, -d):
                held |= (names[:, :, None] == self.near(steps)[:, None, :]).any(2)
        self.names[self.rows] = 0
        return names.flatten(), ~held.flatten()

    def give(self, names: Tensor, are_free: Tensor) -> None:
        at = self.counters[0] + are_free.cumsum(0) - 1
        self.stack[torch.where(are_free, at, len(self.stack) - 1)] = names
        self.counters[0] += are_free.sum()

    def new(self, where: Tensor, raw: Tensor) -> Tensor:
        """Store the bytes ``raw[i]`` in a new entry if ``where[i]``; return the names of the entries, 0 for none."""
        rank, free, used = where.cumsum(0) - 1, self.counters[0].clone(), self.counters[1].clone()
        on_stack = rank < free
        name = torch.where(on_stack, self.stack[(free - 1 - rank).clamp(min=0)].long(), used + 1 + rank - free)
        name = torch.where(where, name, 0)
        self.entries[torch.where(where, name - 1, len(self.entries) - 1)] = raw
        count = where.sum()
        self.counters[0] -= torch.minimum(count, free)
        self.counters[1] += (count - free).clamp(min=0)
        return name.to(torch.int32)

    def are(self, names: Tensor, raw: Tensor) -> Tensor:
        """Whether the entries with these names hold the bytes ``raw``, ``[B, pieces, bytes]``; one result per row."""
        return ((self.entries[names.long() - 1] == raw).flatten(1).all(1)) & (names != 0).all(1)

    def fresh(self, where: Tensor, raw: Tensor) -> Tensor:
        """Store the frames ``raw[i]`` in new entries if ``where[i]``; return the names of the entries, 0 for none."""
        name, names = torch.zeros_like(self.rows, dtype=torch.int32), []
        for piece in range(raw.shape[1]):
            is_new = where if not piece else where & (raw[:, piece] != raw[:, piece - 1]).any(1)
            name = torch.where(is_new, self.new(is_new, raw[:, piece]), name)
            names.append(name)
        return torch.stack(names, 1)

    def fill(self, root: Tensor, following: Tensor | None = None) -> None:
        """Store the observations ``root`` and the next observations ``following``, both ``[B, pieces, bytes]``."""
        pieces = self.group.pieces
        everywhere = torch.ones_like(self.rows, dtype=torch.bool)
        others = self.near(-1)[:, pieces:] if following is not None else self.near(-1)[:, 1:]
        common = others.shape[1]
        shared = self.are(others, root[:, :common])
        if common < pieces:
            others = torch.cat([others, self.new(shared, root[:, -1])[:, None]], 1)
        self.names[self.rows, :pieces] = torch.where(shared[:, None], others, self.fresh(~shared, root))
        if following is None:
            return
        own = self.names[self.rows, 1:pieces]
        shifts = self.are(own, following[:, :-1]) if pieces > 1 else everywhere
        newest = self.near(1)[:, pieces - 1]
        known = shifts & self.are(newest[:, None], following[:, -1:])
        newest = torch.where(known, newest, self.new(shifts & ~known, following[:, -1]))
        stack = torch.cat([own, newest[:, None]], 1)
        self.names[self.rows, pieces:] = torch.where(shifts[:, None], stack, self.fresh(~shifts, following))
