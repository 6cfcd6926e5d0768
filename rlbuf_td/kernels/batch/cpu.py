"""Whole operations on the CPU, one compiled call each: draw and gather a batch, take back its TD errors.

Tensors come as addresses: unboxing an array takes numba longer than reading an integer. ``tree`` and ``order`` are the
addresses of a sum tree and of a chunked order of ranks; ``lanes`` is 0 where the index is flat, else E of ``[T, E]``;
``leaves`` and ``targets`` are those of :class:`rlbuf_td.kernels.batch.Gather`. The caller keeps every tensor alive and
holds the buffer's lock.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.ring import RING
from rlbuf_td.kernels.compiled import (
    copy_bytes,
    copy_few,
    inlined,
    kernel,
    load_float64,
    load_int32,
    load_int64,
    load_uint8,
    pointer,
    prefetch_row,
    store_int32,
    store_int64,
    store_uint8,
)
from rlbuf_td.kernels.episodes.cpu import write as write_boundaries
from rlbuf_td.kernels.rank_order.chunks import Chunks
from rlbuf_td.kernels.rank_order.cpu import draw as draw_by_rank
from rlbuf_td.kernels.rank_order.cpu_update import fill as fill_order
from rlbuf_td.kernels.rank_order.cpu_update import update as update_order
from rlbuf_td.kernels.rank_order.reference import LARGEST
from rlbuf_td.kernels.rows.cpu import skip_ring
from rlbuf_td.kernels.sum_tree.cpu import draw, fill, update
from rlbuf_td.kernels.sum_tree.tree import REFUSED

_ORDER = 4 + len(Chunks._fields)  # addresses
# Rows whose cache lines are requested while as many are copied: between learner steps, with 1e6 rows and batches of
# 256, 4 to 64 differ by less than 5 %. A leaf at a time over a block takes two thirds of the time of a row at a time.
_BLOCK = 16
_LARGE = 1_024  # bytes of a row from which on the processor's own prefetching does as well


@kernel
def gather(rows, row_bytes, index, leaves, targets):
    """Copy each leaf of the rows at ``index`` to its own contiguous tensor.

    Args:
        rows: address of the first row.
        row_bytes: bytes per row.
        index: ``[B]`` int64.
        leaves: ``[leaves, 2]``, where each leaf begins in a row and its bytes.
        targets: addresses of the tensors, ``[B, bytes]`` each.
    """
    count, small = index.shape[0], row_bytes < _LARGE
    for begin in range(-_BLOCK, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        for i in range(end, min(end + _BLOCK, count) if small else end):
            prefetch_row(rows + index[i] * row_bytes, row_bytes)
        for leaf in range(leaves.shape[0]):
            source, width, target = rows + leaves[leaf, 0], leaves[leaf, 1], targets[leaf]
            if width == 1:
                for i in range(max(begin, 0), end):
                    store_uint8(target + i, load_uint8(source + index[i] * row_bytes))
            elif width == 4:
                for i in range(max(begin, 0), end):
                    store_int32(target + i * 4, load_int32(source + index[i] * row_bytes))
            else:
                for i in range(max(begin, 0), end):
                    copy_bytes(target + i * width, source + index[i] * row_bytes, width)


@kernel
def gather_within(rows, row_bytes, live, flat, count, leaves, targets):
    """Gather rows at flat positions if all are in ``[0, live)``; return whether they are."""
    index = carray(pointer(flat), count, np.int64)
    for i in range(count):
        if index[i] < 0 or index[i] >= live:
            return False
    gather(rows, row_bytes, index, leaves, targets)
    return True


@kernel
def sample_uniform(rows, row_bytes, lanes, leaves, targets, flat, count):
    """Gather the rows at the flat positions ``flat``, and write their coordinates if there are lanes."""
    index = carray(pointer(flat), count, np.int64)
    gather(rows, row_bytes, index, leaves, targets)
    if lanes:
        _coordinates(index, lanes, targets[leaves.shape[0]])


@kernel
def sample_proportional(
    tree, rows, row_bytes, lanes, leaves, targets, flat, uniform, count, step, written, beta, mode, now
):
    """Draw rows from a sum tree, weigh them, stamp them and gather them; return whether there are rows to draw.

    The targets behind the leaves are the index, the importance weights and the stamps. See
    :func:`rlbuf_td.kernels.sum_tree.draw` for the law.
    """
    index, importance, mass = _drawn(leaves, targets, lanes, flat, uniform, count)
    if not draw(tree, mass, step, written, beta, mode, index, importance):
        return False
    return _gather_drawn(rows, row_bytes, lanes, leaves, targets, index, written, now)


@kernel
def sample_rank(
    order,
    rows,
    row_bytes,
    lanes,
    leaves,
    law,
    alpha,
    shift,
    targets,
    flat,
    uniform,
    count,
    step,
    written,
    beta,
    mode,
    now,
):
    """Do as :func:`sample_proportional`, by rank. See :func:`rlbuf_td.kernels.rank_order.cpu.draw`."""
    index, importance, mass = _drawn(leaves, targets, lanes, flat, uniform, count)
    if not draw_by_rank(order, law, alpha, shift, mass, step, beta, mode, index, importance):
        return False
    return _gather_drawn(rows, row_bytes, lanes, leaves, targets, index, written, now)


@inlined
def _drawn(leaves, targets, lanes, flat, uniform, count):
    """Return where the flat rows and their importance weights go, and the uniform numbers."""
    last = leaves.shape[0]
    index = carray(pointer(flat if lanes else targets[last]), count, np.int64)
    return index, carray(pointer(targets[last + 1]), count, np.float32), carray(pointer(uniform), count, np.float64)


@inlined
def _gather_drawn(rows, row_bytes, lanes, leaves, targets, index, written, now):
    for i in range(len(index)):
        if index[i] >= written:
            return False
    last = leaves.shape[0]
    stamp = carray(pointer(targets[last + 2]), len(index), np.int64)
    stamp[:] = now
    gather(rows, row_bytes, index, leaves, targets)
    if lanes:
        _coordinates(index, lanes, targets[last])
    return True


@kernel
def fresh_rows(index, stamp, kept, count, now, newest, steps, lanes):
    """Write flat rows to ``kept``, -1 in place of each stale one; return how many are stale, -1 for an unknown lane.

    ``index`` is flat, or with ``lanes`` the coordinates ``[B, 2]``. See :func:`rlbuf_td.kernels.rows.skip_ring`.
    """
    if not lanes:
        return skip_ring(kept, index, stamp, count, now, newest, steps, 1)
    row, pair = carray(pointer(kept), count, np.int64), carray(pointer(index), (count, 2), np.int64)
    for i in range(count):
        if pair[i, 0] >= 0 and (pair[i, 1] < 0 or pair[i, 1] >= lanes):
            return -1
        row[i] = pair[i, 0] * lanes + pair[i, 1] if pair[i, 0] >= 0 else -1
    return skip_ring(kept, kept, stamp, count, now, newest, steps, lanes)


@kernel
def update_proportional(tree, index, td_error, stamp, kept, count, written, alpha, eps, now, newest, steps, lanes):
    """Give rows that still hold what was sampled their TD errors; return the largest magnitude and the stale rows.

    ``index`` is flat, or with ``lanes`` the coordinates ``[B, 2]``; ``kept`` is scratch memory for ``[B]`` int64. See
    :func:`rlbuf_td.kernels.rows.skip_ring` and :func:`rlbuf_td.kernels.sum_tree.update_`.
    """
    stale = fresh_rows(index, stamp, kept, count, now, newest, steps, lanes)
    if stale < 0:
        return REFUSED, 0
    row, error = carray(pointer(kept), count, np.int64), carray(pointer(td_error), count, np.float32)
    return update(tree, row, error, written, alpha, eps), stale


@kernel
def update_rank(order, index, td_error, stamp, kept, count, written, now, newest, steps, lanes):
    """Do as :func:`update_proportional`, for an order of ranks."""
    stale = fresh_rows(index, stamp, kept, count, now, newest, steps, lanes)
    if stale < 0:
        return REFUSED, 0
    row, error = carray(pointer(kept), count, np.int64), carray(pointer(td_error), count, np.float32)
    return update_order(order, row, error, written), stale


@kernel
def write_ring(address, count, lanes_first, index):
    """Write the leaves of ``count`` time steps at the cursor of a ring; let their rows enter as new ones.

    Args:
        address: of a ``RING``.
        count: time steps; of more than there are, the last ones stay.
        lanes_first: whether leaves are ``[E, count, ...]`` rather than ``[count, E, ...]``.
        index: address of ``[count]`` int64, or with lanes ``[count * E, 2]``, for the index; 0 for none.

    Returns:
        The cursor before; -1, with nothing changed, where a write takes more than this.
    """
    ring = carray(pointer(address), 1, RING)[0]
    cursor, revision = load_int64(ring.cursor), load_int64(ring.revision)
    kept = min(count, ring.steps)
    start = (cursor + count - kept) % ring.steps
    head = min(kept, ring.steps - start)
    last = (start + kept - 1) % ring.steps
    if not _is_usual(ring, cursor, start, kept, revision):
        return -1
    _scatter(ring, start, kept, count, lanes_first)
    lanes = max(ring.lanes, 1)
    store_int64(ring.clock, load_int64(ring.clock) + kept)
    store_int64(ring.clock_last, last)
    store_int64(ring.length, max(load_int64(ring.length), min(start + kept, ring.steps) * lanes))
    store_int64(ring.last_cursor, last)
    store_int64(ring.revision, revision + 1)
    store_int64(ring.cursor, (cursor + count) % ring.steps)
    store_int64(ring.write_count, load_int64(ring.write_count) + count)
    if ring.tree or ring.order:
        _enter(ring, start * lanes, head * lanes)
        if head < kept:
            _enter(ring, 0, (kept - head) * lanes)
    if ring.boundaries and load_int64(ring.seen) == revision:
        numbers = carray(pointer(ring.boundaries), 14, np.int64)
        write_boundaries(numbers, start, head)
        if head < kept:
            write_boundaries(numbers, 0, kept - head)
        store_int64(ring.seen, revision + 1)
    if index:
        _write_index(ring, cursor, count, index)
    return cursor


@kernel
def _is_usual(ring, cursor, start, kept, revision):
    """Whether the write goes on where the last one ended, its leaves lie elsewhere, and the weights are up to date."""
    steps, last, lanes = ring.steps, load_int64(ring.clock_last), max(ring.lanes, 1)
    in_order = start == last + 1 or (start == 0 and last == steps - 1) or kept == steps
    usual = in_order and 0 <= cursor < steps and load_int64(ring.clock_by_row) == 0
    if ring.tree:
        usual &= load_float64(ring.alpha) == load_float64(ring.weighed_alpha)
    if ring.boundaries and load_int64(ring.seen) != revision:
        usual &= kept * lanes < load_int64(ring.length)  # else they may be begun anew
    sources, end = carray(pointer(ring.sources), ring.leaves, np.int64), ring.rows + steps * lanes * ring.row_bytes
    for leaf in range(ring.leaves):
        usual &= sources[leaf] < ring.rows or sources[leaf] >= end
    return usual


@kernel
def _scatter(ring, start, kept, count, lanes_first):
    """Copy the leaves of the last ``kept`` time steps to the rows from ``start`` on."""
    lanes = max(ring.lanes, 1)
    extents = carray(pointer(ring.extents), (ring.leaves, 2), np.int64)
    sources = carray(pointer(ring.sources), ring.leaves, np.int64)
    for k in range(count - kept, count):
        t = start + k - (count - kept)
        t -= ring.steps if t >= ring.steps else 0
        for lane in range(lanes):
            row = ring.rows + (t * lanes + lane) * ring.row_bytes
            cell = lane * count + k if lanes_first else k * lanes + lane
            for leaf in range(ring.leaves):
                width = extents[leaf, 1]
                copy_few(row + extents[leaf, 0], sources[leaf] + cell * width, width)


@kernel
def _enter(ring, start, count):
    """Give flat rows the highest magnitude seen, 1 before any."""
    largest = load_float64(ring.largest)
    entry = 1.0 if largest < 0.0 else largest
    if ring.tree:
        fill(carray(pointer(ring.tree), 9, np.int64), start, count, entry, load_float64(ring.weighed_alpha), ring.eps)
    else:
        order = carray(pointer(ring.order), _ORDER, np.int64)
        bits = np.float32(min(entry, LARGEST)).view(np.int32)
        fill_order(order, np.arange(start, start + count), np.int64(bits))


@kernel
def _write_index(ring, cursor, count, index):
    lanes = ring.lanes
    if not lanes:
        flat = carray(pointer(index), count, np.int64)
        for k in range(count):
            flat[k] = (cursor + k) % ring.steps
        return
    pair = carray(pointer(index), (count * lanes, 2), np.int64)
    for k in range(count):
        for lane in range(lanes):
            pair[k * lanes + lane, 0] = (cursor + k) % ring.steps
            pair[k * lanes + lane, 1] = lane


@inlined
def _coordinates(flat, lanes, target):
    """Write the time step and the lane of flat rows into ``[B, 2]``."""
    pair = carray(pointer(target), (len(flat), 2), np.int64)
    for i in range(len(flat)):
        pair[i, 0] = flat[i] // lanes
        pair[i, 1] = flat[i] % lanes
