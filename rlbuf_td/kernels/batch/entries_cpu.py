"""Compiled functions that read and write the deduplicated observations of a batch.

Arguments are as in :mod:`rlbuf_td.kernels.batch.cpu`. ``entries`` is the address of a
:class:`~rlbuf_td.kernels.rows.entries.Stored`.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.cpu import batch_at
from rlbuf_td.kernels.batch.ring import NEXT, RING
from rlbuf_td.kernels.compiled import inlined, kernel, load, load_fields, pointer
from rlbuf_td.kernels.rows import entries_cpu
from rlbuf_td.kernels.rows.entries import Group, Part, Source, Stored

_ZERO, _WHOLE = np.int64(0), np.bool_(False)  # numba would compile the callees again for literals
_FIELDS = len(Source._fields)


@inlined
def _rows(batch):
    return batch.steps * max(batch.lanes, 1)


@kernel
def read_entries(address, flat, targets, entries):
    """Copy the observations of the rows with the indices at ``flat`` to the batch's tensors."""
    batch = batch_at(address)
    entries_cpu.read(entries, carray(pointer(targets), batch.leaves, np.int64), flat, batch.count, _rows(batch), _WHOLE)


@kernel
def read_joined_entries(address, flat, targets, ends, entries):
    """Copy the observations of n-step transitions; those in "next" are of the rows with the indices at ``ends``."""
    batch = batch_at(address)
    leaves = carray(pointer(targets), batch.leaves, np.int64)
    kinds = carray(pointer(batch.extents), (batch.leaves, 4), np.int64)
    first, last = np.zeros(batch.leaves, np.int64), np.zeros(batch.leaves, np.int64)
    for leaf in range(batch.leaves):
        if kinds[leaf, 2] == NEXT:
            last[leaf] = leaves[leaf]
        else:
            first[leaf] = leaves[leaf]
    entries_cpu.read(entries, first, flat, batch.count, _rows(batch), _WHOLE)
    entries_cpu.read(entries, last, ends, batch.count, _rows(batch), _WHOLE)


@kernel
def write_entries(address, cursor, count, lanes_first: bool, entries, head):
    """Store the observations of rows that ``cpu.store_rows`` has stored from the slot ``cursor`` on.

    ``head`` is that of :func:`rlbuf_td.kernels.rows.entries_cpu.write`.
    """
    ring, stored = carray(pointer(address), 1, RING)[0], load_fields(entries, 0, Stored)
    lanes, kept = stored.lanes, min(count, ring.steps)
    start = (cursor + count - kept) % ring.steps
    sources = np.zeros((stored.part_count, 2, _FIELDS), np.int64)
    for g in range(stored.group_count):
        group = load_fields(stored.groups, g, Group)
        for p in range(group.first_part, group.past_part):
            part = load_fields(stored.parts, p, Part)
            width = part.inner * part.outer * group.pieces
            along_time, along_lanes = (width, count * width) if lanes_first else (lanes * width, width)
            for side in range(group.sides):
                leaf = load(ring.sources + 8 * (part.next if side else part.root), np.int64)
                source = Source(leaf + (count - kept) * along_time, along_time, along_lanes)
                for field in range(_FIELDS):
                    sources[p, side, field] = source[field]
    entries_cpu.write(entries, sources, head, _ZERO, start * lanes, kept * lanes)
