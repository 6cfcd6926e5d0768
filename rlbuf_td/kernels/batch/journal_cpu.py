"""Compiled functions that save the rows that a write to shared memory will replace, so that the write can be undone.

The caller sets the phase of the journal (``storages.shared.rows.Journal``) between this call and the write.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.cpu import count_rows, is_usual, stand_together
from rlbuf_td.kernels.batch.ring import RING
from rlbuf_td.kernels.compiled import copy_bytes, inlined, kernel, load, pointer, store
from rlbuf_td.kernels.serials import TAIL, WRITTEN
from rlbuf_td.kernels.serials_cpu import head_at

_START, _COUNT = 8, 16  # places of two words of a journal, in bytes
_SCATTERED = -1


@inlined
def _save_run(ring, first, count, live, to):
    """Save ``count`` rows from row ``first`` on, except rows from ``live`` on, which hold no data."""
    kept = min(first + count, live) - first
    if kept > 0:
        copy_bytes(ring.aside + to * ring.row_bytes, ring.rows + first * ring.row_bytes, kept * ring.row_bytes)


@kernel
def save(address, count, lane_ids):
    """Save the rows that ``cpu.write`` will replace; return False if it does not support the write."""
    ring = carray(pointer(address), 1, RING)[0]
    lanes, steps = max(ring.lanes, 1), ring.steps
    head, more = head_at(ring.head, lanes), np.full(lanes, count)
    if not is_usual(ring, head) or (lane_ids and not count_rows(lane_ids, count, steps, more)):
        return False
    kept = min(count, steps)
    if not lane_ids and stand_together(head, steps):
        start, live = (head[WRITTEN, 0] + count - kept) % steps, (head[WRITTEN, 0] - head[TAIL, 0]) * lanes
        first = min(kept, steps - start)
        _save_run(ring, start * lanes, first * lanes, live, 0)
        _save_run(ring, np.int64(0), (kept - first) * lanes, live, first * lanes)
        store(ring.journal + _START, start * lanes, np.int64)
        store(ring.journal + _COUNT, kept * lanes, np.int64)
        return True
    following, saved = head[WRITTEN] + more - np.minimum(more, steps), 0
    for i in range(count if lane_ids else kept * lanes):
        e = load(lane_ids + 8 * i, np.int64) if lane_ids else i % lanes
        cell = following[e] % steps * lanes + e
        following[e] += 1
        store(ring.aside_cells + 8 * saved, cell, np.int64)
        copy_bytes(ring.aside + saved * ring.row_bytes, ring.rows + cell * ring.row_bytes, ring.row_bytes)
        saved += 1
    store(ring.journal + _START, np.int64(_SCATTERED), np.int64)
    store(ring.journal + _COUNT, np.int64(saved), np.int64)
    return True
