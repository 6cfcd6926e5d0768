"""Compiled functions that read the deduplicated observations of a batch.

Arguments are as in :mod:`rlbuf_td.kernels.batch.cpu`. ``entries`` is the address of a
:class:`~rlbuf_td.kernels.rows.entries.Stored`.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.cpu import batch_at
from rlbuf_td.kernels.batch.ring import NEXT
from rlbuf_td.kernels.compiled import inlined, kernel, pointer
from rlbuf_td.kernels.rows import entries_cpu

_WHOLE = np.bool_(False)  # numba would compile the callees again for a literal


@inlined
def _rows(batch):
    return batch.steps * max(batch.lanes, 1)


@kernel
def read_entries(address, flat, targets, entries):
    """Copy the observations of rows with the indices at ``flat`` to the batch's
    tensors; see ``gather_rows``."""
    batch = batch_at(address)
    entries_cpu.read(
        entries,
        carray(pointer(targets), batch.leaves, np.int64),
        flat,
        np.int64(0),
        batch.count,
        _rows(batch),
        _WHOLE,
    )


@kernel
def read_joined_entries(address, flat, targets, ends, entries):
    """Copy the observations of n-step transitions; those in "next" are of the rows with
    the indices at ``ends``."""
    batch = batch_at(address)
    leaves = carray(pointer(targets), batch.leaves, np.int64)
    kinds = carray(pointer(batch.extents), (batch.leaves, 4), np.int64)
    first, last = np.zeros(batch.leaves, np.int64), np.zeros(batch.leaves, np.int64)
    for leaf in range(batch.leaves):
        if kinds[leaf, 2] == NEXT:
            last[leaf] = leaves[leaf]
        else:
            first[leaf] = leaves[leaf]
    entries_cpu.read(
        entries, first, flat, np.int64(0), batch.count, _rows(batch), _WHOLE
    )
    entries_cpu.read(
        entries, last, ends, np.int64(0), batch.count, _rows(batch), _WHOLE
    )
