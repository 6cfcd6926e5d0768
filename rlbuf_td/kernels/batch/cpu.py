"""Compiled functions that gather a batch, update priorities or write rows on the CPU.

Most arguments are addresses, because numba converts an array argument more slowly than an integer.

Args:
    address: address of a ``RING`` record in functions that write rows, and of a ``BATCH`` record in those that read.
    targets: address of an array with the addresses of the output tensors.
    live: number of rows that hold data.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.ring import BATCH, RING, UPDATE
from rlbuf_td.kernels.compiled import (
    barrier,
    copy_bytes,
    copy_few,
    finish_streams,
    inlined,
    kernel,
    load,
    pointer,
    prefetch_row,
    store,
    stream_bytes,
)
from rlbuf_td.kernels.episodes.cpu import note, record_at
from rlbuf_td.kernels.rank_order import LARGEST, ORDER
from rlbuf_td.kernels.rank_order.cpu import fill as fill_order
from rlbuf_td.kernels.rank_order.cpu import update as update_order
from rlbuf_td.kernels.serials import (
    AFTER,
    DIRTY,
    IDLE,
    NEXT_PUBLICATION,
    ORDERED,
    PUBLICATION,
    PUBLISHED,
    TAIL,
    WRITTEN,
)
from rlbuf_td.kernels.serials_cpu import begin_write, block_at, head_at, is_stale, longest_of, stamp_of
from rlbuf_td.kernels.sum_tree import REFUSED, TREE
from rlbuf_td.kernels.sum_tree.cpu import fill, update

# One block of rows is copied, leaf by leaf, while the next block is prefetched. After a learner's step, blocks of 16
# rows take 6 to 12 % longer, and blocks of 256 as long. Copying row by row would take 1.5 times as long.
_BLOCK = 64
IN_CELLS, REFUSED_WRITE = -1, -2  # what `write` returns instead of a slot
_ZERO = np.int64(0)  # numba would compile the callee again for a literal
_LARGE = 1_024  # bytes; the hardware prefetches larger rows equally well
# Large leaves are copied past the caches if the batch, or the storage that is written, has more bytes than this. That
# takes 20 to 40 % less time, and the next reader loses nothing, because the caches could not keep the copy.
_STREAMED = 16 << 20


class Stored(NamedTuple):
    """Stored rows; the names are those of a ``BATCH`` record."""

    rows: int  # address
    row_bytes: int
    leaves: int  # number of leaves
    extents: int  # address of the offset and the size of each leaf in a row, ``[leaves, 2]`` int64


class Leaves(NamedTuple):
    """Stored rows, and the addresses of the tensors to which a batch's leaves are copied."""

    rows: int
    row_bytes: int
    extents: np.ndarray  # ``[leaves, 2]``
    targets: np.ndarray  # ``[leaves]``


@inlined
def leaves_of(stored, targets):
    """Return the :class:`Leaves` of a ``BATCH`` record or of :class:`Stored`; ``targets`` is an address."""
    extents = carray(pointer(stored.extents), (stored.leaves, 2), np.int64)
    return Leaves(stored.rows, stored.row_bytes, extents, carray(pointer(targets), stored.leaves, np.int64))


@inlined
def gather(leaves, index):
    """Copy the leaves of the rows in ``index`` to the targets."""
    row_bytes, count = leaves.row_bytes, index.shape[0]
    small, streams = row_bytes < _LARGE, count * row_bytes > _STREAMED
    for begin in range(-_BLOCK, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        for i in range(end, min(end + _BLOCK, count) if small else end):
            prefetch_row(leaves.rows + index[i] * row_bytes, row_bytes)
        for leaf in range(leaves.targets.shape[0]):
            source, width, target = leaves.rows + leaves.extents[leaf, 0], leaves.extents[leaf, 1], leaves.targets[leaf]
            if width == 1:
                for i in range(max(begin, 0), end):
                    store(target + i, load(source + index[i] * row_bytes, np.uint8), np.uint8)
            elif width == 4:
                for i in range(max(begin, 0), end):
                    store(target + i * 4, load(source + index[i] * row_bytes, np.int32), np.int32)
            elif streams and width >= _LARGE:
                for i in range(max(begin, 0), end):
                    stream_bytes(target + i * width, source + index[i] * row_bytes, width)
            else:
                for i in range(max(begin, 0), end):
                    copy_bytes(target + i * width, source + index[i] * row_bytes, width)
    if streams:
        finish_streams()


@kernel
def gather_within(stored: Stored, live, flat, count, targets):
    """Gather the rows with the indices at address ``flat``, or return False if an index is not in ``[0, live)``."""
    index = carray(pointer(flat), count, np.int64)
    for i in range(count):
        if index[i] < 0 or index[i] >= live:
            return False
    gather(leaves_of(stored, targets), index)
    return True


@inlined
def batch_at(address):
    return carray(pointer(address), 1, BATCH)[0]


@kernel
def gather_rows(address, flat, targets, live):
    """Gather the rows at the address ``flat``; return False, and gather nothing, if one is not in ``[0, live)``.

    The targets are the leaves, the index, of which only coordinates are written here, and the stamps of the rows if
    ``BATCH.stamped``.
    """
    batch = batch_at(address)
    index = carray(pointer(flat), batch.count, np.int64)
    if not are_written(index, live):
        return False
    gather(leaves_of(batch, targets), index)
    put_report(batch, index, targets)
    return True


@inlined
def are_written(index, live):
    inside = True
    for i in range(len(index)):
        inside &= (index[i] >= 0) & (index[i] < live)
    return inside


@inlined
def put_report(batch, index, targets):
    place = targets + 8 * batch.leaves
    if batch.lanes:
        _coordinates(index, batch.lanes, load(place, np.int64))
    if batch.stamped:
        target, head = load(place + 8, np.int64), head_at(batch.serials, max(batch.lanes, 1))
        for i in range(len(index)):
            store(target + 8 * i, stamp_of(batch, head, index[i]), np.int64)


@inlined
def _listed(given, index, td_error, stamp, every, in_pairs, is_double, written, row, error):
    """Write the rows to update to ``row``, -1 for those that are gone, and their TD errors to ``error``.

    Return the number of rows that are gone since they were sampled, or -1 if a lane is out of range.
    """
    lanes, stale = max(given.lanes, 1), 0
    for i in range(len(row)):
        error[i] = load(td_error + 8 * i, np.float64) if is_double else load(td_error + 4 * i, np.float32)
        if not in_pairs:
            row[i] = load(index + 8 * i, np.int64)
            continue
        step, lane = load(index + 16 * i, np.int64), load(index + 16 * i + 8, np.int64)
        if step >= 0 and (lane < 0 or lane >= lanes):
            return -1
        row[i] = step * lanes + lane if step >= 0 else -1
    if stamp:  # otherwise, no row counts as gone
        head, cells = head_at(given.serials, lanes), given.steps * lanes
        for i in range(len(row)):
            if row[i] < 0 or row[i] >= cells:
                continue
            own = load(stamp + 8 * every * i, np.int64)
            if every > 1:  # that of the first row of a window, which lies in the lane of its anchor
                own += (row[i] // lanes - own) % given.steps
            if is_stale(given, head, row[i], own, written):
                row[i] = -1
                stale += 1
    return stale


@inlined
def _raise_largest(given, counts, largest):
    """Raise the magnitude of new rows in the call that changes priorities: no interrupt can come between."""
    if counts and largest > load(given.largest, np.float64):
        store(given.largest, np.float64(largest), np.float64)
    return largest


@kernel
def update_proportional(
    address, index, td_error, stamp, every, in_pairs: bool, is_double: bool, count, written, counts: bool
):
    """Update the priorities of ``count`` rows; return the largest ``|td_error|`` or ``REFUSED``, and how many are gone.

    ``address`` is that of an ``UPDATE`` record. The rows at ``index`` are flat indices or, ``in_pairs``, coordinates;
    an index of -1 is skipped, and so is a row that is gone since it got its stamp. The stamps at ``stamp`` (0:
    none) are those of windows of ``every`` rows. If ``counts``, TD errors can raise the number at ``UPDATE.largest``.
    """
    given, row, error = carray(pointer(address), 1, UPDATE)[0], np.empty(count, np.int64), np.empty(count, np.float64)
    stale = _listed(given, index, td_error, stamp, every, in_pairs, is_double, written, row, error)
    if stale < 0:
        return REFUSED, 0
    tree, alpha = carray(pointer(given.table), 1, TREE), load(given.weighed_alpha, np.float64)
    return _raise_largest(given, counts, update(tree, row, error, written, alpha, given.eps)), stale


@kernel
def update_rank(address, index, td_error, stamp, every, in_pairs: bool, is_double: bool, count, written, counts: bool):
    """Update magnitudes; see :func:`update_proportional`. Those above the largest float32 count as this number."""
    given, row, error = carray(pointer(address), 1, UPDATE)[0], np.empty(count, np.int64), np.empty(count, np.float64)
    stale = _listed(given, index, td_error, stamp, every, in_pairs, is_double, written, row, error)
    if stale < 0:
        return REFUSED, 0
    magnitude = np.empty(count, np.float32)
    for i in range(count):
        size = abs(error[i])
        magnitude[i] = np.float32(min(size, LARGEST) if np.isfinite(size) else size)
    order = carray(pointer(given.table), 1, ORDER)
    return _raise_largest(given, counts, update_order(order, row, magnitude, written)), stale


@kernel
def write(address, count, lane_ids, lanes_first: bool, cells, index):
    """Write ``count`` rows to the lanes at address ``lane_ids``, or, if it is 0, ``count`` time steps to all lanes.

    Each row follows the newest one of its lane. The data is ``[count, ...]``, and for time steps
    ``[lanes, count, ...]`` if ``lanes_first``, else ``[count, lanes, ...]``. Unless ``index`` is 0, the indices of the
    rows are written to this address, and unless all lanes stand together, their flat indices to ``cells``.

    Return the slot of the first time step, ``IN_CELLS`` if rows were written to ``cells``, or ``REFUSED_WRITE`` if
    nothing was written.
    """
    cursor = store_rows(address, count, lane_ids, lanes_first, cells, index)
    if cursor != REFUSED_WRITE:
        publish(address)
        finish(address)
    return cursor


@kernel
def store_rows(address, count, lane_ids, lanes_first: bool, cells, index):
    """Give up the rows that :func:`write` replaces, and store the new ones; :func:`publish` makes these live."""
    ring = carray(pointer(address), 1, RING)[0]
    lanes, steps = max(ring.lanes, 1), ring.steps
    block, head, more = block_at(ring.head, lanes), head_at(ring.head, lanes), np.full(lanes, count)
    if not is_usual(ring, head) or block[DIRTY] != IDLE:
        return REFUSED_WRITE
    if lane_ids and not count_rows(lane_ids, count, steps, more):
        return REFUSED_WRITE
    in_steps, longest = not lane_ids and stand_together(head, steps), longest_of(head, steps)
    begin_write(block, lanes, steps, more)
    counted = count if in_steps or lane_ids else count * lanes
    store(ring.counts + 24, load(ring.counts + 8, np.int64) + counted, np.int64)
    barrier()
    store(ring.counts + 16, block[PUBLICATION], np.int64)
    barrier()
    cursor = head[WRITTEN, 0] % steps
    if in_steps:
        _scatter(ring, cursor, count, lanes_first)
        if index:
            _write_index(ring, cursor, count, index)
    else:
        _clear_holes(ring, head_at(ring.head + 8 * AFTER * lanes, lanes), longest)
        _write_cells(ring, head, count, lane_ids, lanes_first, cells, index)
    if ring.episodes:
        for e in range(lanes):
            skipped = max(np.int64(0), more[e] - steps)
            if more[e]:
                note(record_at(ring.episodes), e, head[WRITTEN, e] + skipped, more[e] - skipped, skipped > 0)
    return cursor if in_steps else IN_CELLS


@kernel
def publish(address):
    """Make the rows live that :func:`store_rows` has stored, and count them; :func:`finish` must follow."""
    ring = carray(pointer(address), 1, RING)[0]
    lanes = max(ring.lanes, 1)
    block, head = block_at(ring.head, lanes), head_at(ring.head, lanes)
    barrier()
    block[DIRTY] = PUBLISHED
    barrier()
    for i in range(AFTER * lanes):
        block[i] = block[AFTER * lanes + i]
    block[PUBLICATION] = block[NEXT_PUBLICATION]
    store(ring.revision, load(ring.revision, np.int64) + 1, np.int64)
    if stand_together(head, ring.steps):
        store(ring.counts, head[WRITTEN, 0] % ring.steps, np.int64)
    barrier()
    store(ring.counts + 8, load(ring.counts + 24, np.int64), np.int64)
    barrier()
    store(ring.counts + 16, np.int64(-1), np.int64)


@inlined
def finish(address):
    """End a write, unless the caller goes on with it."""
    ring = carray(pointer(address), 1, RING)[0]
    if not ring.goes_on:
        barrier()
        block_at(ring.head, max(ring.lanes, 1))[DIRTY] = IDLE


@inlined
def stand_together(head, steps):
    """Whether all lanes have as many rows, and their next rows go to the same slot."""
    together = True
    for e in range(1, head.shape[1]):
        together &= head[WRITTEN, e] - head[TAIL, e] == head[WRITTEN, 0] - head[TAIL, 0]
        together &= (head[WRITTEN, e] - head[WRITTEN, 0]) % steps == 0
    return together


@inlined
def count_rows(lane_ids, count, steps, more):
    """Count the rows of each lane; return False if a lane is out of range, or gets more rows than it has slots."""
    lane = carray(pointer(lane_ids), count, np.int64)
    more[:] = 0
    for i in range(len(lane)):
        if lane[i] < 0 or lane[i] >= len(more):
            return False
        more[lane[i]] += 1
        if more[lane[i]] > steps:
            return False
    return True


@inlined
def _clear_holes(ring, after, longest):
    """Clear the time steps that become the last ones, because some lanes may not write them."""
    steps, width = longest_of(after, ring.steps), after.shape[1] * ring.row_bytes
    if steps > longest:
        carray(pointer(ring.rows + longest * width), (steps - longest) * width, np.uint8)[:] = 0


@inlined
def _write_cells(ring, head, count, lane_ids, lanes_first, cells, index):
    """Copy rows to the cells that follow the newest row of each lane."""
    lanes, steps = head.shape[1], ring.steps
    extents = carray(pointer(ring.extents), (ring.leaves, 2), np.int64)
    sources = carray(pointer(ring.sources), ring.leaves, np.int64)
    following, written = head[WRITTEN].copy(), 0
    for i in range(count if lane_ids else count * lanes):
        e = load(lane_ids + 8 * i, np.int64) if lane_ids else i % lanes
        source = i if lane_ids or not lanes_first else e * count + i // lanes
        t = following[e] % steps
        following[e] += 1
        if index:
            store(index + 16 * i, t, np.int64)
            store(index + 16 * i + 8, e, np.int64)
        if not lane_ids and i // lanes < count - steps:  # a later row of this call takes its place
            continue
        cell = t * lanes + e
        store(cells + 8 * written, cell, np.int64)
        written += 1
        for leaf in range(ring.leaves):
            width = extents[leaf, 1]
            copy_few(ring.rows + cell * ring.row_bytes + extents[leaf, 0], sources[leaf] + source * width, width)


@kernel
def enter_proportional(address, count, cursor, cells):
    """Set the priorities of the rows that :func:`write` wrote, in a sum tree; ``cursor`` is what it has returned.

    ``count`` is the number of time steps, or of ``cells``.
    """
    ring = carray(pointer(address), 1, RING)[0]
    tree, alpha = carray(pointer(ring.priorities), 1, TREE), load(ring.weighed_alpha, np.float64)
    if cursor < 0:
        flat, rows = carray(pointer(cells), count, np.int64), ring.steps * max(ring.lanes, 1)
        update(tree, flat, np.full(count, entry_of(ring)), rows, alpha, ring.eps)
        return
    start, head, rest = _runs(ring, cursor, count)
    fill(tree, start, head, entry_of(ring), alpha, ring.eps)
    if rest:
        fill(tree, _ZERO, rest, entry_of(ring), alpha, ring.eps)


@kernel
def enter_rank(address, count, cursor, cells):
    """Set the priorities of the rows that :func:`write` wrote, in the order; see :func:`enter_proportional`."""
    ring = carray(pointer(address), 1, RING)[0]
    order, magnitude = carray(pointer(ring.priorities), 1, ORDER), np.float32(min(entry_of(ring), LARGEST))
    if cursor < 0:
        flat, rows = carray(pointer(cells), count, np.int64), ring.steps * max(ring.lanes, 1)
        update_order(order, flat, np.full(count, magnitude), rows)
        return
    bits = np.int64(magnitude.view(np.int32))
    start, head, rest = _runs(ring, cursor, count)
    fill_order(order, np.arange(start, start + head), bits)
    if rest:
        fill_order(order, np.arange(_ZERO, rest), bits)


@inlined
def _rows_in_cells(address, count, lane_ids):
    """Return the number of cells that :func:`write` has stored."""
    ring = carray(pointer(address), 1, RING)[0]
    return count if lane_ids else min(count, ring.steps) * ring.lanes


@kernel
def write_proportional(address, count, lane_ids, lanes_first: bool, cells, index):
    cursor = store_rows(address, count, lane_ids, lanes_first, cells, index)
    if cursor != REFUSED_WRITE:
        publish(address)
        enter_proportional(address, count if cursor >= 0 else _rows_in_cells(address, count, lane_ids), cursor, cells)
        finish(address)
    return cursor


@kernel
def write_rank(address, count, lane_ids, lanes_first: bool, cells, index):
    cursor = store_rows(address, count, lane_ids, lanes_first, cells, index)
    if cursor != REFUSED_WRITE:
        publish(address)
        enter_rank(address, count if cursor >= 0 else _rows_in_cells(address, count, lane_ids), cursor, cells)
        finish(address)
    return cursor


@inlined
def _runs(ring, cursor, count):
    kept, lanes = min(count, ring.steps), max(ring.lanes, 1)
    start = (cursor + count - kept) % ring.steps
    head = min(kept, ring.steps - start)
    return start * lanes, head * lanes, (kept - head) * lanes  # first row, rows up to the ring's end, rows from 0 on


@inlined
def entry_of(ring):
    largest = load(ring.largest, np.float64)
    return 1.0 if largest < 0.0 else largest


@inlined
def is_usual(ring, head):
    """Whether rows are in time order, weights are those of the current alpha, and the data lies outside the ring."""
    usual = True
    for e in range(head.shape[1]):
        usual &= head[ORDERED, e] <= head[TAIL, e]
    if ring.alpha:
        usual &= load(ring.alpha, np.float64) == load(ring.weighed_alpha, np.float64)
    sources = carray(pointer(ring.sources), ring.leaves, np.int64)
    end = ring.rows + ring.steps * max(ring.lanes, 1) * ring.row_bytes
    for leaf in range(ring.leaves):
        usual &= sources[leaf] < ring.rows or sources[leaf] >= end
    return usual


@inlined
def _scatter(ring, cursor, count, lanes_first):
    """Copy ``count`` time steps to the ring, from slot ``cursor`` on, except those that later ones would replace."""
    lanes, skipped = max(ring.lanes, 1), count - min(count, ring.steps)
    t = (cursor + skipped) % ring.steps
    extents = carray(pointer(ring.extents), (ring.leaves, 2), np.int64)
    sources = carray(pointer(ring.sources), ring.leaves, np.int64)
    streams = ring.steps * lanes * ring.row_bytes > _STREAMED
    for step in range(skipped, count):
        for lane in range(lanes):
            row = ring.rows + (t * lanes + lane) * ring.row_bytes
            cell = lane * count + step if lanes_first else step * lanes + lane
            for leaf in range(ring.leaves):
                width = extents[leaf, 1]
                if streams and width >= _LARGE:
                    stream_bytes(row + extents[leaf, 0], sources[leaf] + cell * width, width)
                else:
                    copy_few(row + extents[leaf, 0], sources[leaf] + cell * width, width)
        t = t + 1 if t + 1 < ring.steps else 0
    if streams:
        finish_streams()


@inlined
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
    """Write the time step and the lane of each row index in ``flat`` to address ``target``."""
    pair = carray(pointer(target), (len(flat), 2), np.int64)
    for i in range(len(flat)):
        pair[i, 0] = flat[i] // lanes
        pair[i, 1] = flat[i] % lanes
