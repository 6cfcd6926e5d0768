"""Compiled functions that write rows to single lanes of a ring, each row after the newest one of its lane.

All arguments are addresses or integers.

Args:
    address: address of a ``RING`` record, whose data is ``[count, ...]``.
    count: number of rows.
    lane_ids: address of the lane of each row, int64.
    cells: address for the flat indices of the rows, ``[count]`` int64.
    index: address for their time steps and lanes, ``[count, 2]`` int64.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.cpu import entry_of, has_usual_parts
from rlbuf_td.kernels.batch.ring import RING
from rlbuf_td.kernels.compiled import copy_few, inlined, kernel, load, pointer, store
from rlbuf_td.kernels.episodes import MARKS
from rlbuf_td.kernels.episodes.cpu import write_rows as write_boundaries
from rlbuf_td.kernels.rank_order.chunks import ORDER
from rlbuf_td.kernels.rank_order.cpu_update import update as update_order
from rlbuf_td.kernels.rank_order.reference import LARGEST
from rlbuf_td.kernels.sum_tree.cpu import update
from rlbuf_td.kernels.sum_tree.tree import TREE

_NEWEST, _COUNT = range(2)  # rows of the heads of lanes


@kernel
def write_lanes(address, count, lane_ids, cells, index):
    """Write rows to single lanes; return False, and write nothing, if this function does not support the write."""
    ring = carray(pointer(address), 1, RING)[0]
    lane, heads = carray(pointer(lane_ids), count, np.int64), carray(pointer(ring.heads), (2, ring.lanes), np.int64)
    revision, longest = load(ring.revision, np.int64), load(ring.length, np.int64) // ring.lanes
    if not has_usual_parts(ring) or not takes(ring, lane) or not find_heads(ring, heads, longest):
        return False
    _clear_holes(ring, heads, lane, longest)
    flat, now = carray(pointer(cells), count, np.int64), load(ring.clock, np.int64)
    _scatter(ring, heads, lane, flat, carray(pointer(index), (count, 2), np.int64), now)
    store(ring.clock, now + count, np.int64)
    store(ring.revision, revision + 1, np.int64)
    store(ring.write_count, load(ring.write_count, np.int64) + count, np.int64)
    _count(ring, heads)
    if ring.boundaries and load(ring.seen, np.int64) == revision:
        write_boundaries(carray(pointer(ring.boundaries), 1, MARKS), flat)
        store(ring.seen, revision + 1, np.int64)
    return True


@kernel
def enter_lanes_proportional(address, count, cells):
    """Set the priorities of the rows at address ``cells``, new ones, in a sum tree."""
    ring = carray(pointer(address), 1, RING)[0]
    tree, alpha = carray(pointer(ring.priorities), 1, TREE), load(ring.weighed_alpha, np.float64)
    flat, rows = carray(pointer(cells), count, np.int64), ring.steps * ring.lanes
    update(tree, flat, np.full(count, entry_of(ring)), rows, alpha, ring.eps)


@kernel
def enter_lanes_rank(address, count, cells):
    """Set the priorities of the rows at address ``cells``, new ones, in the order of magnitudes."""
    ring = carray(pointer(address), 1, RING)[0]
    order, flat = carray(pointer(ring.priorities), 1, ORDER), carray(pointer(cells), count, np.int64)
    magnitude = np.full(count, min(entry_of(ring), LARGEST), np.float32)
    update_order(order, flat, magnitude, ring.steps * ring.lanes)


@kernel
def write_lanes_proportional(address, count, lane_ids, cells, index):
    written = write_lanes(address, count, lane_ids, cells, index)
    if written:
        enter_lanes_proportional(address, count, cells)
    return written


@kernel
def write_lanes_rank(address, count, lane_ids, cells, index):
    written = write_lanes(address, count, lane_ids, cells, index)
    if written:
        enter_lanes_rank(address, count, cells)
    return written


@inlined
def takes(ring, lane):
    """Whether all lanes are in range, and none gets more rows than it has time steps."""
    more = np.zeros(ring.lanes, np.int64)
    for i in range(len(lane)):
        if lane[i] < 0 or lane[i] >= ring.lanes:
            return False
        more[lane[i]] += 1
    return more.max() <= ring.steps


@inlined
def find_heads(ring, heads, longest):
    """Set the heads of lanes that stand together; return False if their newest step or write times are unknown."""
    if not ring.written_at or not load(ring.clock_by_row, np.int64) or load(ring.clock_disorder, np.int64):
        return False
    if not load(ring.apart, np.int64):
        newest = load(ring.clock_last, np.int64) if longest else np.int64(-1)
        if longest and newest < 0:
            return False
        heads[_NEWEST] = newest
        heads[_COUNT] = longest
    return True


@inlined
def _clear_holes(ring, heads, lane, longest):
    """Clear the time steps that become the last ones, because some lanes may not write them."""
    reach = np.zeros(ring.lanes, np.int64)
    for i in range(len(lane)):
        reach[lane[i]] += 1
    steps = longest
    for e in range(ring.lanes):
        steps = max(steps, min(ring.steps, heads[_COUNT, e] + reach[e]))
    width = ring.lanes * ring.row_bytes
    if steps > longest:
        carray(pointer(ring.rows + longest * width), (steps - longest) * width, np.uint8)[:] = 0


@inlined
def _scatter(ring, heads, lane, flat, index, now):
    extents = carray(pointer(ring.extents), (ring.leaves, 2), np.int64)
    sources = carray(pointer(ring.sources), ring.leaves, np.int64)
    for i in range(len(lane)):
        e = lane[i]
        t = heads[_NEWEST, e] + 1
        t = t if t < ring.steps else 0
        heads[_NEWEST, e] = t
        heads[_COUNT, e] = min(ring.steps, heads[_COUNT, e] + 1)
        flat[i] = t * ring.lanes + e
        index[i, 0] = t
        index[i, 1] = e
        row = ring.rows + flat[i] * ring.row_bytes
        for leaf in range(ring.leaves):
            width = extents[leaf, 1]
            copy_few(row + extents[leaf, 0], sources[leaf] + i * width, width)
        store(ring.written_at + 8 * flat[i], now + 1 + i, np.int64)


@inlined
def _count(ring, heads):
    """Set the counters that depend on the heads of lanes; see ``storages.lane_heads.LaneHeads.write``."""
    lanes, first, longest, total, apart = ring.lanes, heads[_NEWEST, 0], np.int64(0), np.int64(0), False
    for e in range(lanes):
        apart |= heads[_NEWEST, e] != first or heads[_COUNT, e] != heads[_COUNT, 0]
        longest = max(longest, heads[_COUNT, e])
        total += heads[_COUNT, e]
    newest = np.int64(-1) if apart else first
    store(ring.apart, np.int64(apart), np.int64)
    store(ring.holes, longest * lanes - total, np.int64)
    store(ring.length, longest * lanes, np.int64)
    store(ring.last_cursor, newest, np.int64)
    store(ring.clock_last, newest, np.int64)
    if not apart:
        store(ring.cursor, (newest + 1) % ring.steps, np.int64)
