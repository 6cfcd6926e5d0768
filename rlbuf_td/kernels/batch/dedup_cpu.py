"""Compiled functions that read and write the deduplicated observations of a batch.

Arguments are as in :mod:`rlbuf_td.kernels.batch.cpu`. ``groups`` and ``parts`` are the addresses of the two arrays in
``Table.arrays`` (see :mod:`rlbuf_td.kernels.rows.pool`), and ``sizes`` holds their lengths.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.cpu import batch_at
from rlbuf_td.kernels.batch.ring import RING
from rlbuf_td.kernels.batch.wrapped_cpu import NEXT as OF_LAST_ROW
from rlbuf_td.kernels.compiled import inlined, kernel, load, pointer
from rlbuf_td.kernels.rows import pool_cpu
from rlbuf_td.kernels.rows.pool_cpu import FIRST, INNER, LAST, NEXT, OUTER, PIECES, ROOT, SIDES

_ZERO, _AT_ONCE = np.int64(0), np.bool_(False)  # numba would compile the callees again for literals
_GROUP, _PART = pool_cpu.REACH + 1, NEXT + 1  # columns of the arrays


@inlined
def _arrays(groups, parts, sizes):
    return carray(pointer(groups), (sizes[0], _GROUP), np.int64), carray(pointer(parts), (sizes[1], _PART), np.int64)


@kernel
def read_entries(address, targets, groups, parts, sizes):
    """Copy the observations of the rows that another function has drawn to the batch's tensors."""
    batch = batch_at(address)
    group, part = _arrays(groups, parts, sizes)
    index = batch.flat if batch.lanes else load(targets + 8 * batch.leaves, np.int64)
    leaves, runs = carray(pointer(targets), batch.leaves, np.int64), np.empty((0, 3), np.int64)
    rows = batch.steps * max(batch.lanes, 1)
    pool_cpu.read(group, part, runs, leaves, batch.rows, batch.row_bytes, rows, index, _ZERO, batch.count)


@kernel
def read_joined_entries(address, targets, ends, groups, parts, sizes):
    """Copy the observations of n-step transitions; those in "next" are of the rows with the indices at ``ends``."""
    batch = batch_at(address)
    group, part = _arrays(groups, parts, sizes)
    leaves, kinds = (
        carray(pointer(targets), batch.leaves, np.int64),
        carray(pointer(batch.extents), (batch.leaves, 4), np.int64),
    )
    first, last, runs = np.zeros(batch.leaves, np.int64), np.zeros(batch.leaves, np.int64), np.empty((0, 3), np.int64)
    for leaf in range(batch.leaves):
        if kinds[leaf, 2] == OF_LAST_ROW:
            last[leaf] = leaves[leaf]
        else:
            first[leaf] = leaves[leaf]
    rows = batch.steps * max(batch.lanes, 1)
    pool_cpu.read(group, part, runs, first, batch.rows, batch.row_bytes, rows, batch.flat, _ZERO, batch.count)
    pool_cpu.read(group, part, runs, last, batch.rows, batch.row_bytes, rows, ends, _ZERO, batch.count)


@kernel
def write_entries(address, cursor, count, lanes_first, groups, parts, sizes):
    """Store the observations of rows that ``write_ring`` has written at the position ``cursor`` of the ring."""
    ring = carray(pointer(address), 1, RING)[0]
    group, part = _arrays(groups, parts, sizes)
    lanes, kept = max(ring.lanes, 1), min(count, ring.steps)
    start = (cursor + count - kept) % ring.steps
    sources = np.zeros((len(part), 2, 3), np.int64)
    for g in range(len(group)):
        for p in range(group[g, FIRST], group[g, LAST]):
            width = part[p, INNER] * part[p, OUTER] * group[g, PIECES]
            along_time, along_lanes = (width, count * width) if lanes_first else (lanes * width, width)
            for side in range(group[g, SIDES]):
                leaf = load(ring.sources + 8 * part[p, ROOT + side], np.int64)
                sources[p, side, 0] = leaf + (count - kept) * along_time
                sources[p, side, 1], sources[p, side, 2] = along_time, along_lanes
    where = ring.rows, ring.row_bytes, ring.steps * lanes, lanes, _ZERO, start * lanes, kept * lanes, lanes, _AT_ONCE
    pool_cpu.write(group, part, sources, *where)
