"""Compiled functions that sample a batch, update priorities or write rows on the CPU.

Most arguments are addresses, because numba converts an array argument more slowly than an integer.

Args:
    address: address of a ``RING`` record in functions that write rows, and of a ``BATCH`` record in all others.
    targets: address of an array with the addresses of the output tensors: the leaves, the index, the sampler's outputs.
        If ``BATCH.reads`` is 0, a function that draws writes neither leaves nor index.
    law: a :class:`~rlbuf_td.kernels.strata.DrawLaw`.
    written: number of rows that hold data.
    now: number of time steps written so far, including overwritten ones.
    clock: a :class:`~rlbuf_td.kernels.batch.ring.Clock`.
    stamp: address of the batch's ``"sampled_at"``: for each row, the value of ``now`` when the row was sampled. 0 if
        the batch lacks this entry.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.ring import BATCH, RING, WINDOWS, Clock
from rlbuf_td.kernels.compiled import (
    address_of,
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
from rlbuf_td.kernels.distinct.cpu import append_at
from rlbuf_td.kernels.episodes import MARKS
from rlbuf_td.kernels.episodes.cpu import set_beginnings
from rlbuf_td.kernels.episodes.cpu import write as write_boundaries
from rlbuf_td.kernels.rank_order.chunks import ORDER
from rlbuf_td.kernels.rank_order.cpu import draw as draw_by_rank
from rlbuf_td.kernels.rank_order.cpu_update import fill as fill_order
from rlbuf_td.kernels.rank_order.cpu_update import update as update_order
from rlbuf_td.kernels.rank_order.law import Ranks
from rlbuf_td.kernels.rank_order.reference import LARGEST
from rlbuf_td.kernels.recency import Ages, Counters
from rlbuf_td.kernels.recency.cpu import recent_rows
from rlbuf_td.kernels.recency.fresh_cpu import take
from rlbuf_td.kernels.rows.cpu import Sampled, skip_newer, skip_ring
from rlbuf_td.kernels.strata import BY_BATCH, DrawLaw, Draws
from rlbuf_td.kernels.sum_tree.cpu import draw, fill, update, weigh_beside
from rlbuf_td.kernels.sum_tree.tree import REFUSED, TREE
from rlbuf_td.kernels.threads import LARGE, ParallelLoop
from rlbuf_td.kernels.threads_cpu import run_loop, take_part

# One block of rows is copied, leaf by leaf, while the next block is prefetched. After a learner's step, blocks of 16
# rows take 6 to 12 % longer, and blocks of 256 as long. Copying row by row would take 1.5 times as long.
_BLOCK = 64
GATHER, SCATTER = 2, 3  # places of the loops in ``parallel_loops()``, after those of the sum tree
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


@kernel
def gather(leaves, index, first, last):
    """Copy the leaves of the rows in ``index[first:last]`` to the same places of the targets."""
    row_bytes = leaves.row_bytes
    small, streams = row_bytes < _LARGE, index.shape[0] * row_bytes > _STREAMED
    for begin in range(first - _BLOCK, last, _BLOCK):
        end = min(begin + _BLOCK, last)
        for i in range(end, min(end + _BLOCK, last) if small else end):
            prefetch_row(leaves.rows + index[i] * row_bytes, row_bytes)
        for leaf in range(leaves.targets.shape[0]):
            source, width, target = leaves.rows + leaves.extents[leaf, 0], leaves.extents[leaf, 1], leaves.targets[leaf]
            if width == 1:
                for i in range(max(begin, first), end):
                    store(target + i, load(source + index[i] * row_bytes, np.uint8), np.uint8)
            elif width == 4:
                for i in range(max(begin, first), end):
                    store(target + i * 4, load(source + index[i] * row_bytes, np.int32), np.int32)
            elif streams and width >= _LARGE:
                for i in range(max(begin, first), end):
                    stream_bytes(target + i * width, source + index[i] * row_bytes, width)
            else:
                for i in range(max(begin, first), end):
                    copy_bytes(target + i * width, source + index[i] * row_bytes, width)
    if streams:
        finish_streams()


class _GatherJob(NamedTuple):
    """The numbers of a job of :func:`gather_in_parts`."""

    batch: int
    flat: int
    rows: int
    row_bytes: int
    leaves: int
    extents: int
    targets: int


class _ScatterJob(NamedTuple):
    """The numbers of a job of :func:`scatter_in_parts`."""

    kept: int
    ring: int
    cursor: int
    steps: int
    lanes_first: int


_GATHER_JOB = np.dtype([(name, np.int64) for name in _GatherJob._fields])
_SCATTER_JOB = np.dtype([(name, np.int64) for name in _ScatterJob._fields])


@ParallelLoop
def gather_in_parts(job):
    given = carray(pointer(job + 16), 1, _GATHER_JOB)[0]
    leaves, index = leaves_of(given, given.targets), carray(pointer(given.flat), given.batch, np.int64)
    begin, end = take_part(job)
    while begin < end:
        gather(leaves, index, begin, end)
        begin, end = take_part(job)


@kernel
def gather_within(stored: Stored, live, flat, count, targets, loops):
    """Gather the rows with the indices at address ``flat``, or return False if an index is not in ``[0, live)``."""
    index = carray(pointer(flat), count, np.int64)
    for i in range(count):
        if index[i] < 0 or index[i] >= live:
            return False
    _gather(stored, index, targets, loops)
    return True


@inlined
def _gather(stored, index, targets, loops):
    if loops:
        job = _GatherJob(
            batch=len(index),
            flat=address_of(index),
            rows=stored.rows,
            row_bytes=stored.row_bytes,
            leaves=stored.leaves,
            extents=stored.extents,
            targets=targets,
        )
        run_loop(loops, GATHER, len(index) * stored.row_bytes, job, 0.0, 0.0)
    else:
        gather(leaves_of(stored, targets), index, _ZERO, len(index))


@inlined
def batch_at(address):
    return carray(pointer(address), 1, BATCH)[0]


@inlined
def gather_batch(batch, index, targets):
    _gather(batch, index, targets, batch.loops)


@kernel
def gather_flat(address, targets):
    """Gather the rows that the caller has drawn; their indices are at the address ``BATCH.flat``."""
    batch = batch_at(address)
    _put_fresh(batch, batch.flat)
    if batch.reads:
        index = carray(pointer(batch.flat), batch.count, np.int64)
        gather_batch(batch, index, targets)
        put_index(batch, index, load(targets + 8 * batch.leaves, np.int64))


@kernel
def gather_distinct(address, targets, kept, drawn):
    """Add the ``BATCH.count`` rows at address ``drawn`` to the ``kept`` distinct rows at ``BATCH.flat``.

    Gather the rows as soon as ``BATCH.count`` rows are distinct. Return the number of distinct rows.
    """
    batch = batch_at(address)
    kept = append_at(batch.flat, batch.count, kept, drawn, batch.count)
    if kept == batch.count:
        gather_flat(address, targets)
    return kept


@inlined
def put_index(batch, flat, target):
    """Write the index of the rows in ``flat`` to address ``target``."""
    if batch.lanes:
        _coordinates(flat, batch.lanes, target)
    else:
        copy_bytes(target, address_of(flat), 8 * len(flat))


@kernel
def gather_slice(address, targets, begin, count, source, now):
    """Gather the first ``count`` rows that a member has drawn, and write them from position ``begin`` of a batch.

    The entries after the leaves are the index, the number of the member (``source``), and unless ``now`` is negative,
    weights and stamps, which become 1 and ``now``.
    """
    batch = batch_at(address)
    leaves = leaves_of(batch, targets)
    places = leaves.targets + begin * leaves.extents[:, 1]
    index, entries = carray(pointer(batch.flat), count, np.int64), targets + 8 * batch.leaves
    gather(Leaves(batch.rows, batch.row_bytes, leaves.extents, places), index, _ZERO, count)
    put_index(batch, index, load(entries, np.int64) + (16 if batch.lanes else 8) * begin)
    carray(pointer(load(entries + 8, np.int64) + 8 * begin), count, np.int64)[:] = source
    if now >= 0:
        carray(pointer(load(entries + 16, np.int64) + 4 * begin), count, np.float32)[:] = np.float32(1.0)
        carray(pointer(load(entries + 24, np.int64) + 8 * begin), count, np.int64)[:] = now


@kernel
def scale(address, count, factor: float):
    """Multiply ``count`` importance weights (float32) by ``factor``."""
    weight = carray(pointer(address), count, np.float32)
    for j in range(count):
        weight[j] *= np.float32(factor)


@kernel
def sample_recent(address, targets, ages: Ages):
    batch = batch_at(address)
    recent_rows(batch.uniform, batch.flat, batch.count, max(batch.lanes, 1), ages)
    gather_flat(address, targets)


@kernel
def sample_proportional(address, targets, law: DrawLaw, written, now):
    """Sample rows from a sum tree; return False if all weights are 0 or a drawn row has not been written."""
    batch = batch_at(address)
    drawn, tree = _draws(batch, targets), carray(pointer(batch.table), 1, TREE)
    index, importance = drawn.rows, drawn.importance
    if not draw(tree, drawn, law, written, batch.loops) or not _are_written(index, written):
        return False
    first = index[0]
    fresh = _put_fresh(batch, address_of(index))
    if fresh:
        weigh_beside(tree, index[:fresh], first, law.beta, importance)
        if law.norm == BY_BATCH:
            importance /= importance.max()
    _gather_drawn(batch, targets, index, now)
    return True


@kernel
def sample_rank(address, targets, law: DrawLaw, written, now):
    """Sample rows by priority rank; return False if no row has a priority or a drawn row has not been written."""
    batch = batch_at(address)
    drawn, ranks = _draws(batch, targets), Ranks(batch.alpha, batch.shift, batch.head)
    has_drawn = draw_by_rank(carray(pointer(batch.table), 1, ORDER), ranks, drawn, law)
    if not has_drawn or not _are_written(drawn.rows, written):
        return False
    _gather_drawn(batch, targets, drawn.rows, now)
    return True


@inlined
def _put_fresh(batch, place):
    """Overwrite the first indices at address ``place`` with fresh rows of a FreshRowsSampler; return their number."""
    if not batch.queue:
        return 0
    return take(batch.queue, Counters(batch.numbers, batch.clock), batch.count, place)


@inlined
def _draws(batch, targets):
    index, importance = load(targets + 8 * batch.leaves, np.int64), load(targets + 8 * batch.leaves + 8, np.int64)
    return Draws(
        uniform=carray(pointer(batch.uniform), batch.count, np.float64),
        rows=carray(pointer(index if batch.reads and not batch.lanes else batch.flat), batch.count, np.int64),
        importance=carray(pointer(importance), batch.count, np.float32),
    )


@inlined
def _are_written(index, written):
    return index.max() < written


@inlined
def _gather_drawn(batch, targets, index, now):
    stamp = carray(pointer(load(targets + 8 * batch.leaves + 16, np.int64)), batch.count, np.int64)
    stamp[:] = now
    if not batch.reads:
        return
    gather_batch(batch, index, targets)
    if batch.lanes:
        _coordinates(index, batch.lanes, load(targets + 8 * batch.leaves, np.int64))


@inlined
def windows_at(address):
    return carray(pointer(address), 1, WINDOWS)[0]


@kernel
def _anchored(batch, index, td_error, stamp):
    """Reduce the TD errors of windows, and return the addresses of indices, TD errors and stamps of the anchors."""
    windows, width = windows_at(batch.windows), 16 if batch.lanes else 8
    window, count = windows.burn_in + windows.length, windows.count
    anchors, stamps, errors = windows.scratch, windows.scratch + 16 * count, windows.scratch + 24 * count
    for i in range(count):
        largest, total, learned = np.float32(0.0), 0.0, 0
        for at in range(i * window, (i + 1) * window):
            if load(windows.mask + at, np.uint8) and not load(windows.burn_in_mask + at, np.uint8):
                magnitude = abs(load(td_error + 4 * at, np.float32))
                largest = max(largest, magnitude)
                total += np.float64(magnitude)
                learned += 1
        # If a TD error is NaN or infinite, so is the total, and also 0 times the total: the update refuses the batch.
        error = np.float32(windows.eta * np.float64(largest) + (1.0 - windows.eta) * (total / max(learned, 1)))
        store(errors + 4 * i, np.float32(windows.least) if error < np.float32(windows.least) else error, np.float32)
        copy_bytes(anchors + width * i, index + width * window * i, width)
        if stamp:
            store(stamps + 8 * i, load(stamp + 8 * window * i, np.int64), np.int64)
    return anchors, errors, stamps if stamp else stamp


@inlined
def _fresh_rows(batch, index, td_error, stamp, clock):
    """Return the number of rows rewritten since sampling, the row indices (-1 for these rows), and the TD errors."""
    count, lanes, stale = batch.count, batch.lanes, 0
    if batch.windows:
        index, td_error, stamp = _anchored(batch, index, td_error, stamp)
    row, error = carray(pointer(batch.flat), count, np.int64), carray(pointer(td_error), count, np.float32)
    pair = carray(pointer(index), (count, 2), np.int64)
    for i in range(count if lanes else 0):
        if pair[i, 0] >= 0 and (pair[i, 1] < 0 or pair[i, 1] >= lanes):
            return -1, row, error  # the lane is out of range
        row[i] = pair[i, 0] * lanes + pair[i, 1] if pair[i, 0] >= 0 else -1
    if stamp:  # otherwise, no row counts as rewritten
        sampled = Sampled(batch.flat if lanes else index, stamp, count)
        if batch.written_at:
            stale = skip_newer(batch.flat, sampled, clock.now, batch.written_at, batch.steps * max(lanes, 1))
        else:
            stale = skip_ring(batch.flat, sampled, clock.now, clock.newest, batch.steps, lanes)
    elif not lanes:
        copy_bytes(batch.flat, index, 8 * count)
    return stale, row, error


@inlined
def raise_largest(batch, largest):
    """Raise the magnitude of new rows in the call that changes priorities: no interrupt can come between."""
    if largest > load(batch.largest, np.float64):
        store(batch.largest, np.float64(largest), np.float64)
    return largest


@kernel
def update_proportional(address, index, td_error, stamp, clock: Clock):
    """Update priorities; return the largest ``|td_error|`` or ``REFUSED``, and how many rewritten rows are skipped."""
    batch = batch_at(address)
    stale, row, error = _fresh_rows(batch, index, td_error, stamp, clock)
    if stale < 0:
        return REFUSED, 0
    tree, alpha = carray(pointer(batch.table), 1, TREE), load(batch.weighed_alpha, np.float64)
    return raise_largest(batch, update(tree, row, error, clock.written, alpha, batch.eps)), stale


@kernel
def update_rank(address, index, td_error, stamp, clock: Clock):
    batch = batch_at(address)
    stale, row, error = _fresh_rows(batch, index, td_error, stamp, clock)
    if stale < 0:
        return REFUSED, 0
    return raise_largest(batch, update_order(carray(pointer(batch.table), 1, ORDER), row, error, clock.written)), stale


@kernel
def write_ring(address, count, lanes_first: bool, index):
    """Write ``count`` time steps at the ring's cursor; return the old cursor, or -1 if nothing was written.

    The data is ``[lanes, count, ...]`` if ``lanes_first``, else ``[count, lanes, ...]``. Unless ``index`` is 0, the
    indices of the new rows are written to this address.
    """
    ring = carray(pointer(address), 1, RING)[0]
    cursor, revision = load(ring.cursor, np.int64), load(ring.revision, np.int64)
    kept = min(count, ring.steps)
    start = (cursor + count - kept) % ring.steps
    head = min(kept, ring.steps - start)
    last = (start + kept - 1) % ring.steps
    if not is_usual(ring, cursor, start, kept, revision):
        return -1
    lanes = max(ring.lanes, 1)
    job = _ScatterJob(kept, ring=address, cursor=cursor, steps=count, lanes_first=np.int64(lanes_first))
    nbytes = kept * lanes * ring.row_bytes
    if ring.loops and nbytes >= LARGE:
        run_loop(ring.loops, SCATTER, nbytes, job, 0.0, 0.0)
    else:
        _scatter(ring, cursor, count, lanes_first, _ZERO, kept)
    now = load(ring.clock, np.int64) + kept
    if load(ring.clock_by_row, np.int64):
        written_at = carray(pointer(ring.written_at), (ring.steps, lanes), np.int64)
        for k in range(kept):
            written_at[start + k if k < head else k - head] = now - kept + 1 + k
    store(ring.clock, now, np.int64)
    store(ring.clock_last, last, np.int64)
    store(ring.length, max(load(ring.length, np.int64), min(start + kept, ring.steps) * lanes), np.int64)
    store(ring.last_cursor, last, np.int64)
    store(ring.revision, revision + 1, np.int64)
    store(ring.cursor, (cursor + count) % ring.steps, np.int64)
    store(ring.write_count, load(ring.write_count, np.int64) + count, np.int64)
    if ring.boundaries and load(ring.seen, np.int64) == revision:
        marks = carray(pointer(ring.boundaries), 1, MARKS)
        write_boundaries(marks, start, head)
        if head < kept:
            write_boundaries(marks, _ZERO, kept - head)
        if kept == ring.steps:
            written = max(load(ring.clock, np.int64), load(ring.write_count, np.int64))
            set_beginnings(marks, written == kept)
        store(ring.seen, revision + 1, np.int64)
    if index:
        _write_index(ring, cursor, count, index)
    return cursor


@kernel
def enter_ring_proportional(address, cursor, count):
    """Set the priorities of the rows that :func:`write_ring` wrote from the old ``cursor`` on, in a sum tree."""
    ring = carray(pointer(address), 1, RING)[0]
    tree, alpha = carray(pointer(ring.priorities), 1, TREE), load(ring.weighed_alpha, np.float64)
    start, head, rest = _runs(ring, cursor, count)
    fill(tree, start, head, entry_of(ring), alpha, ring.eps)
    if rest:
        fill(tree, _ZERO, rest, entry_of(ring), alpha, ring.eps)


@kernel
def enter_ring_rank(address, cursor, count):
    """Set the priorities of the rows that :func:`write_ring` wrote from the old ``cursor`` on, in the order."""
    ring = carray(pointer(address), 1, RING)[0]
    order = carray(pointer(ring.priorities), 1, ORDER)
    bits = np.int64(np.float32(min(entry_of(ring), LARGEST)).view(np.int32))
    start, head, rest = _runs(ring, cursor, count)
    fill_order(order, np.arange(start, start + head), bits)
    if rest:
        fill_order(order, np.arange(_ZERO, rest), bits)


@kernel
def write_ring_proportional(address, count, lanes_first: bool, index):
    cursor = write_ring(address, count, lanes_first, index)
    if cursor >= 0:
        enter_ring_proportional(address, cursor, count)
    return cursor


@kernel
def write_ring_rank(address, count, lanes_first: bool, index):
    cursor = write_ring(address, count, lanes_first, index)
    if cursor >= 0:
        enter_ring_rank(address, cursor, count)
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


@kernel
def is_usual(ring, cursor, start, kept, revision):
    """Whether :func:`write_ring` supports this write."""
    steps, last, lanes = ring.steps, load(ring.clock_last, np.int64), max(ring.lanes, 1)
    in_order = start == last + 1 or (start == 0 and last == steps - 1) or kept == steps
    usual = in_order and 0 <= cursor < steps and not load(ring.apart, np.int64)
    usual &= ring.written_at != 0 or not load(ring.clock_by_row, np.int64)
    if ring.boundaries and load(ring.seen, np.int64) != revision:
        usual &= kept * lanes < load(ring.length, np.int64)  # a write of the whole ring may reset the boundaries
    return usual and has_usual_parts(ring)


@kernel
def has_usual_parts(ring):
    """Whether the weights are those of the current alpha, and the data lies outside the ring."""
    usual = True
    if ring.alpha:
        usual = load(ring.alpha, np.float64) == load(ring.weighed_alpha, np.float64)
    sources = carray(pointer(ring.sources), ring.leaves, np.int64)
    end = ring.rows + ring.steps * max(ring.lanes, 1) * ring.row_bytes
    for leaf in range(ring.leaves):
        usual &= sources[leaf] < ring.rows or sources[leaf] >= end
    return usual


@kernel
def _scatter(ring, cursor, count, lanes_first, begin, end):
    """Copy ``count`` time steps to the ring, from position ``cursor`` on, except those that later ones would replace.

    Of the time steps that are kept, only those from number ``begin`` to number ``end - 1`` are copied.
    """
    lanes, skipped = max(ring.lanes, 1), count - min(count, ring.steps)
    t = (cursor + skipped + begin) % ring.steps
    extents = carray(pointer(ring.extents), (ring.leaves, 2), np.int64)
    sources = carray(pointer(ring.sources), ring.leaves, np.int64)
    streams = ring.steps * lanes * ring.row_bytes > _STREAMED
    for step in range(skipped + begin, skipped + end):
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


@ParallelLoop
def scatter_in_parts(job):
    given = carray(pointer(job + 16), 1, _SCATTER_JOB)[0]
    ring = carray(pointer(given.ring), 1, RING)[0]
    begin, end = take_part(job)
    while begin < end:
        _scatter(ring, given.cursor, given.steps, given.lanes_first != 0, begin, end)
        begin, end = take_part(job)


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
    """Write the time step and the lane of each row index in ``flat`` to address ``target``."""
    pair = carray(pointer(target), (len(flat), 2), np.int64)
    for i in range(len(flat)):
        pair[i, 0] = flat[i] // lanes
        pair[i, 1] = flat[i] % lanes
