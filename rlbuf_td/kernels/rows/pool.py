"""Deduplicated rows: each observation is stored once, in a pool of entries that rows share.

An *entry* is a fixed number of bytes: an observation, or one frame of a frame stack. Rows refer to entries by *names*:
int32 numbers from 1 on; 0 means no entry. If a row's next observation equals the observation of the following row in
its lane, both rows store the same names. Only nearby rows of a lane share entries, so no reference counts are needed.
When a row is overwritten, each of its entries becomes free unless a nearby row refers to it (see ``pool_cpu.py``).

On the CPU, numba processes one row after another. On a GPU, torch operations process all lanes of a time step at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.host_memory import address_of
from rlbuf_td.kernels.rows.pool_steps import write_by_steps_
from rlbuf_td.kernels.rows.table import Source, Table

_CHUNK = 1 << 18  # rows whose names are read at once


def read_(table: Table, cells: Tensor, live: int, leaves: Sequence[Tensor | None]) -> bool:
    """Copy the rows in ``cells`` to the tensors ``leaves``; return False if a row is not in ``[0, live)``.

    ``leaves`` has one contiguous tensor, or None, per key; after False, their contents are undefined. On a GPU, indices
    are not checked.
    """
    if not table.is_compiled:
        return _read(table, cells, live, leaves)
    from rlbuf_td.kernels.rows import pool_cpu

    targets = np.array([0 if leaf is None else leaf.data_ptr() for leaf in leaves], np.int64)
    return pool_cpu.read(table.address, targets, address_of(cells), cells.numel(), live, True)


def write_(
    table: Table, given: Sequence[Sequence[Tensor]], cells: Tensor | int, count: int, *, deferred: bool = False
) -> None:
    """Write the observations of rows to entries, and the names of these entries to the rows.

    Args:
        table: the rows and the pools of entries.
        given: per key, its observations and, if rows store them, its next observations: ``[T, E, ...]``, where each row
            is contiguous.
        cells: the first of consecutive rows of the ring, whole time steps; or the indices of single rows (``E`` is 1),
            contiguous int64, without repetitions.
        count: number of written rows, ``T * E``.
        deferred: whether only later writes may reuse the entries that this write frees.
    """
    if not table.is_compiled:
        return write_by_steps_(table, given, cells, count, deferred=deferred)
    from rlbuf_td.kernels.rows import pool_cpu

    sources = np.array([[_source(sides[0]), _source(sides[-1])] for sides in given], np.int64)
    at, start = (0, cells) if isinstance(cells, int) else (cells.data_ptr(), 0)
    return pool_cpu.write(table.address, sources, at, start, count, deferred)


def _source(leaf: Tensor) -> Source:
    (time, lane, *_), size = leaf.stride(), leaf.element_size()
    return Source(address=leaf.data_ptr(), along_time=time * size, along_lanes=lane * size)


def rebuild_(table: Table, *, used: Sequence[int] | None = None) -> None:
    """Free all entries to which no row refers. ``used`` holds the largest name in each group; None: find it."""
    for g, (stack, counters) in enumerate(zip(table.stacks, table.counters, strict=True)):
        names = table.names(g)
        most = max(int(counters[1]), int(names.max())) if used is None else used[g]
        named = torch.zeros(most + 1, dtype=torch.bool, device=stack.device)
        for first in range(0, len(names), _CHUNK):
            named[names[first : first + _CHUNK].flatten().long()] = True
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
    for run in table.runs:
        if run.leaf in out:
            out[run.leaf].copy_(rows[:, run.offset : run.offset + run.nbytes])
    for g, group in enumerate(table.groups):
        for side in range(group.sides):
            parts = table.parts[group.first_part : group.past_part]
            wanted = [(part, leaf) for part in parts if (leaf := (part.root, part.next)[side]) in out]
            if not wanted:
                continue
            first = group.names_at + 4 * side * group.pieces
            names = rows.narrow(1, first, 4 * group.pieces).clone().view(torch.int32).long()
            found = table.entries[g][names - 1]
            for part, leaf in wanted:
                raw = found[:, :, part.into : part.into + part.inner * part.outer]
                out[leaf].copy_(raw.unflatten(2, (part.outer, part.inner)).transpose(1, 2).flatten(1))
    return True
