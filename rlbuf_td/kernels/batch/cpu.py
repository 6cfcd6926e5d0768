"""Compiled functions that gather a batch, or update priorities, on the CPU.

Most arguments are addresses, because numba converts an array argument more slowly than
an integer.

Args:
    address: address of a ``BATCH`` record.
    targets: address of an array with the addresses of the output tensors.
    live: number of rows that hold data.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.ring import BATCH, UPDATE, Updates
from rlbuf_td.kernels.compiled import (
    copy_bytes,
    finish_streams,
    inlined,
    kernel,
    load,
    pointer,
    prefetch_row,
    store,
    stream_bytes,
)
from rlbuf_td.kernels.rank_order import ORDER
from rlbuf_td.kernels.rank_order.cpu import update as update_order
from rlbuf_td.kernels.serials_cpu import head_at, is_stale, stamp_of
from rlbuf_td.kernels.sum_tree import LARGEST_MAGNITUDE, REFUSED, TREE
from rlbuf_td.kernels.sum_tree.cpu import update as update_tree

# One block of rows is copied, leaf by leaf, while the next block is prefetched. After a
# learner's step, blocks of 16 rows take 6 to 12 % longer, and blocks of 256 as long.
# Copying row by row would take 1.5 times as long.
_BLOCK = 64
_LARGE = 1_024  # bytes; the hardware prefetches larger rows equally well
# Large leaves are copied past the caches if the batch has more bytes than this. That
# takes 20 to 40 % less time, and the next reader loses nothing, because the caches
# could not keep the copy.
_STREAMED = 16 << 20


@inlined
def gather(batch, index, targets, first, last):
    """Copy the leaves of the rows in ``index[first:last]`` to the tensors with the
    addresses at ``targets``."""
    rows, row_bytes = batch.rows, batch.row_bytes
    extents = carray(pointer(batch.extents), (batch.leaves, 2), np.int64)
    out = carray(pointer(targets), batch.leaves, np.int64)
    small = row_bytes < _LARGE
    streams = index.shape[0] * row_bytes > _STREAMED
    for begin in range(first - _BLOCK, last, _BLOCK):
        end = min(begin + _BLOCK, last)
        for i in range(end, min(end + _BLOCK, last) if small else end):
            prefetch_row(rows + index[i] * row_bytes, row_bytes)
        for leaf in range(batch.leaves):
            source = rows + extents[leaf, 0]
            width = extents[leaf, 1]
            target = out[leaf]
            if width == 1:
                for i in range(max(begin, first), end):
                    store(
                        target + i,
                        load(source + index[i] * row_bytes, np.uint8),
                        np.uint8,
                    )
            elif width == 4:
                for i in range(max(begin, first), end):
                    store(
                        target + i * 4,
                        load(source + index[i] * row_bytes, np.int32),
                        np.int32,
                    )
            elif streams and width >= _LARGE:
                for i in range(max(begin, first), end):
                    stream_bytes(
                        target + i * width, source + index[i] * row_bytes, width
                    )
            else:
                for i in range(max(begin, first), end):
                    copy_bytes(target + i * width, source + index[i] * row_bytes, width)
    if streams:
        finish_streams()


@inlined
def batch_at(address):
    return carray(pointer(address), 1, BATCH)[0]


@kernel
def gather_rows(address, flat, targets, live, first, last):
    """Gather the rows at the address ``flat``; return False, and gather nothing, if one
    is not in ``[0, live)``.

    Only the rows with the numbers ``first`` to ``last - 1`` are gathered: several
    threads share a large batch.

    The targets are the leaves, the index, of which only coordinates are written here,
    and the stamps of the rows if ``BATCH.stamped``.
    """
    batch = batch_at(address)
    index = carray(pointer(flat), batch.count, np.int64)
    if not are_written(index[first:last], live):
        return False
    gather(batch, index, targets, first, last)
    put_report(batch, index, targets, first, last)
    return True


@inlined
def are_written(index, live):
    """Whether all cells are below ``live``; without an early end, so that the loop is
    vectorized."""
    inside = True
    for i in range(len(index)):
        inside &= (index[i] >= 0) & (index[i] < live)
    return inside


@inlined
def put_report(batch, index, targets, first, last):
    """Write the coordinates and the stamps of the rows in ``index[first:last]``, where
    a batch has them."""
    index_target = targets + 8 * batch.leaves
    if batch.lanes:
        _coordinates(
            index[first:last], batch.lanes, load(index_target, np.int64) + 16 * first
        )
    if batch.stamped:
        target = load(index_target + 8, np.int64)
        head = head_at(batch.serials, max(batch.lanes, 1))
        for i in range(first, last):
            store(target + 8 * i, stamp_of(batch, head, index[i]), np.int64)


@inlined
def _size_of(updates, begin):
    """Return ``|td_error|`` of a row, or of a window."""
    largest = 0.0
    total = 0.0
    learned = 0
    for i in range(begin, begin + updates.every):
        if not updates.mask or (
            load(updates.mask + i, np.uint8)
            and not load(updates.burn_in_mask + i, np.uint8)
        ):
            error = (
                load(updates.td_error + 8 * i, np.float64)
                if updates.is_double
                else load(updates.td_error + 4 * i, np.float32)
            )
            largest = max(largest, abs(np.float64(error)))
            total += abs(np.float64(error))
            learned += 1
    # If a TD error is NaN or infinite, so is the total, and also 0 times the total: the
    # update refuses the batch.
    return updates.eta * largest + (1.0 - updates.eta) * (total / max(learned, 1))


@inlined
def _listed(record, updates):
    """Return the rows to update, -1 for those that are gone, their ``|td_error|``
    within its bounds, and how many are gone since they were sampled, or -1 if a lane is
    out of range.
    """
    row = np.empty(updates.count, np.int64)
    magnitude = np.empty(updates.count, np.float32)
    lanes = max(record.lanes, 1)
    stale = 0
    for i in range(updates.count):
        first = updates.every * i
        size = _size_of(updates, first)
        size = record.least if size < record.least else size  # NaN stays
        magnitude[i] = np.float32(
            min(size, LARGEST_MAGNITUDE) if np.isfinite(size) else size
        )
        if not updates.in_pairs:
            row[i] = load(updates.index + 8 * first, np.int64)
            continue
        step = load(updates.index + 16 * first, np.int64)
        lane = load(updates.index + 16 * first + 8, np.int64)
        if step >= 0 and (lane < 0 or lane >= lanes):
            return row, magnitude, -1
        row[i] = step * lanes + lane if step >= 0 else -1
    if updates.stamp:  # otherwise, no row counts as gone
        head = head_at(record.serials, lanes)
        cells = record.steps * lanes
        for i in range(updates.count):
            if row[i] < 0 or row[i] >= cells:
                continue
            stamp = load(updates.stamp + 8 * updates.every * i, np.int64)
            # that of the first row of a window, which lies in the lane of its anchor
            if updates.every > 1:
                stamp += (row[i] // lanes - stamp) % record.steps
            if is_stale(record, head, row[i], stamp, updates.written):
                row[i] = -1
                stale += 1
    return row, magnitude, stale


@inlined
def _raise_largest(record, counts, largest):
    """Raise the magnitude of new rows in the call that changes priorities: no interrupt
    can come between."""
    if counts and largest > load(record.largest, np.float64):
        store(record.largest, np.float64(largest), np.float64)
    return largest


@kernel
def update_proportional(address, updates: Updates):
    """Update priorities; return the largest ``|td_error|`` or ``REFUSED``, and the
    number of rows that are gone.

    ``address`` is that of an ``UPDATE`` record.
    """
    record = carray(pointer(address), 1, UPDATE)[0]
    row, magnitude, stale = _listed(record, updates)
    if stale < 0:
        return REFUSED, 0
    tree = carray(pointer(record.table), 1, TREE)
    alpha = load(record.weighed_alpha, np.float64)
    return _raise_largest(
        record,
        updates.counts,
        update_tree(tree, row, magnitude, updates.written, alpha, record.eps),
    ), stale


@kernel
def update_rank(address, updates: Updates):
    """Update magnitudes; see :func:`update_proportional`."""
    record = carray(pointer(address), 1, UPDATE)[0]
    row, magnitude, stale = _listed(record, updates)
    if stale < 0:
        return REFUSED, 0
    order = carray(pointer(record.table), 1, ORDER)
    return _raise_largest(
        record, updates.counts, update_order(order, row, magnitude, updates.written)
    ), stale


@inlined
def _coordinates(flat, lanes, target):
    """Write the time step and the lane of each row index in ``flat`` to address
    ``target``."""
    pair = carray(pointer(target), (len(flat), 2), np.int64)
    for i in range(len(flat)):
        pair[i, 0] = flat[i] // lanes
        pair[i, 1] = flat[i] % lanes
