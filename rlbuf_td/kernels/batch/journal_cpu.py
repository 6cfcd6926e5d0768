"""Compiled functions that save the rows that a write to shared memory will replace, so that the write can be undone.

The caller sets the phase of the journal (``storages.shared.rows.Journal``) between this call and the write.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.cpu import has_usual_parts, is_usual
from rlbuf_td.kernels.batch.lanes_cpu import find_heads, takes
from rlbuf_td.kernels.batch.ring import RING
from rlbuf_td.kernels.compiled import copy_bytes, inlined, kernel, load, pointer, store

_START, _COUNT = 8, 16  # places of two words of a journal, in bytes
_SCATTERED = -1


@inlined
def _save_run(ring, first, count, live, to):
    """Save ``count`` rows from row ``first`` on, except rows from ``live`` on, which hold no data."""
    kept = min(first + count, live) - first
    if kept > 0:
        copy_bytes(ring.aside + to * ring.row_bytes, ring.rows + first * ring.row_bytes, kept * ring.row_bytes)


@kernel
def save_ring(address, count):
    """Save the rows that ``cpu.write_ring`` will replace; return False if it does not support the write."""
    ring = carray(pointer(address), 1, RING)[0]
    cursor, kept = load(ring.cursor, np.int64), min(count, ring.steps)
    start = (cursor + count - kept) % ring.steps
    if not is_usual(ring, cursor, start, kept, load(ring.revision, np.int64)):
        return False
    lanes, live = max(ring.lanes, 1), load(ring.length, np.int64)
    head = min(kept, ring.steps - start)
    _save_run(ring, start * lanes, head * lanes, live, 0)
    _save_run(ring, np.int64(0), (kept - head) * lanes, live, head * lanes)
    store(ring.journal + _START, start * lanes, np.int64)
    store(ring.journal + _COUNT, kept * lanes, np.int64)
    return True


@kernel
def save_lanes(address, count, lane_ids):
    """Save the rows that ``lanes_cpu.write_lanes`` will replace; return False if it does not support the write."""
    ring = carray(pointer(address), 1, RING)[0]
    lane, heads = carray(pointer(lane_ids), count, np.int64), carray(pointer(ring.heads), (2, ring.lanes), np.int64)
    longest = load(ring.length, np.int64) // ring.lanes
    if not has_usual_parts(ring) or not takes(ring, lane) or not find_heads(ring, heads, longest):
        return False
    newest, cells = heads[0].copy(), carray(pointer(ring.aside_cells), count, np.int64)
    for i in range(count):
        t = newest[lane[i]] + 1
        t = t if t < ring.steps else 0
        newest[lane[i]] = t
        cells[i] = t * ring.lanes + lane[i]
        copy_bytes(ring.aside + i * ring.row_bytes, ring.rows + cells[i] * ring.row_bytes, ring.row_bytes)
    store(ring.journal + _START, np.int64(_SCATTERED), np.int64)
    store(ring.journal + _COUNT, count, np.int64)
    return True
