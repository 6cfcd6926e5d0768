"""Writes rows on the CPU in one compiled call: their bytes, the serials, the episodes,
and the priorities of new rows.

Other arguments than counts are addresses, because numba converts an array argument more
slowly than an integer. ``address`` is that of a :data:`WRITE_RECORD`. Nothing has
changed if :func:`write` returns one of the codes from :data:`UNFINISHED` on.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from rlbuf_td.kernels.batch.ring import UPDATE, WRITE_RECORD
from rlbuf_td.kernels.code_cache import Callback
from rlbuf_td.kernels.compiled import (
    address_of,
    barrier,
    call,
    copy_few,
    finish_streams,
    inlined,
    kernel,
    load,
    pointer,
    store,
    stream_bytes,
)
from rlbuf_td.kernels.episodes.cpu import note, record_at
from rlbuf_td.kernels.rank_order import ORDER
from rlbuf_td.kernels.rank_order.cpu import fill as fill_order
from rlbuf_td.kernels.rank_order.cpu import update as update_order
from rlbuf_td.kernels.rows import entries_cpu
from rlbuf_td.kernels.serials import (
    AFTER,
    DIRTY,
    EPISODES_STALE,
    IDLE,
    NEXT_PUBLICATION,
    NEXT_ROWS_WRITTEN,
    PUBLICATION,
    PUBLISHED,
    REVISION,
    ROWS_WRITTEN,
    TAIL,
    WRITTEN,
)
from rlbuf_td.kernels.serials_cpu import (
    begin_write,
    block_at,
    head_at,
    longest_of,
)
from rlbuf_td.kernels.sum_tree import TREE
from rlbuf_td.kernels.sum_tree.cpu import fill, update

# what `write` returns, instead of a slot, if rows were written to ragged lanes
IN_CELLS = -1
#: Why nothing was written: the write before did not end; weights are those of another
#: alpha; the data lies in the rows; a lane is out of range; after an edit, a load or
#: a recovery, nobody has looked up episodes.
UNFINISHED, UNWEIGHED, OVERLAPPING, NO_LANE, EDITED = range(-2, -7, -1)
# bytes of leaves that are copied past the caches if the rows have more bytes than this:
_LARGE = 1_024
_STREAMED = 16 << 20


class _Rows(NamedTuple):
    """The rows of a write, for the functions that :func:`write` calls."""

    ring: int
    priorities: int  # address of an ``UPDATE`` record
    cells: int  # of each row of the data; -1: a later row takes its place
    size: int  # the number of rows of the data
    slot: int  # of the first time step that is stored, or IN_CELLS
    head: int  # of the ring, before the write


_WORDS = len(_Rows._fields)
_ROWS = np.dtype([(name, np.int64) for name in _Rows._fields])


@kernel
def write(
    address,
    count,
    lane_ids,
    lanes_first: bool,
    index,
    priorities,
    goes_on: bool,
):
    """Write ``count`` rows to the lanes at ``lane_ids``, or, if it is 0, ``count`` time
    steps to all lanes.

    Each row follows the newest one of its lane. The data is ``[count, ...]``; for time
    steps, ``[count, lanes, ...]`` or, if ``lanes_first``, ``[lanes, count, ...]``. The
    indices of the rows, in time order, are written to ``index`` unless it is 0.
    ``priorities`` is an ``UPDATE`` record (0: new rows get no priority). The caller
    ends the write if it ``goes_on``.

    Return the slot of the first time step, or :data:`IN_CELLS`, or why nothing was
    written.
    """
    ring = carray(pointer(address), 1, WRITE_RECORD)[0]
    lanes = max(ring.lanes, 1)
    steps = ring.steps
    block = block_at(ring.head, lanes)
    head = head_at(ring.head, lanes)
    counts = np.full(lanes, count)
    code = _refusal(ring, block, lane_ids, priorities, counts)
    if code:
        return code
    are_ragged = lane_ids != 0 or not _are_aligned(head, steps)
    before = head.copy()
    longest = longest_of(head, steps)
    cursor = head[WRITTEN, 0] % steps
    cells = np.empty(count if lane_ids else count * lanes, np.int64)
    begin_write(block, lanes, steps, counts)
    if are_ragged:
        _clear_holes(ring, head_at(ring.head + 8 * AFTER * lanes, lanes), longest)
    _place(ring, before, counts, lane_ids, lanes_first, index, cells)
    _copy(ring, cells)
    rows = np.empty(_WORDS, np.int64)
    slot = (cursor + max(count - steps, 0)) % steps
    rows_of_write = _Rows(
        address,
        priorities,
        address_of(cells),
        len(cells),
        IN_CELLS if are_ragged else slot,
        address_of(before),
    )
    for field in range(_WORDS):
        rows[field] = rows_of_write[field]
    if ring.write_entries:
        _call(ring.write_entries, rows, cells, before)
    if ring.episodes:
        _note_episodes(ring, before, counts)
    _publish(block, lanes)
    if priorities:
        _call(ring.enter, rows, cells, before)
    if not goes_on:
        barrier()
        block[DIRTY] = IDLE
    return IN_CELLS if are_ragged else cursor


@inlined
def _note_episodes(ring, before, counts):
    """Note the episodes of ``counts[e]`` new rows of each lane ``e``."""
    for e in range(len(counts)):
        skipped = max(counts[e] - ring.steps, 0)
        if counts[e]:
            note(
                record_at(ring.episodes),
                e,
                before[WRITTEN, e] + skipped,
                counts[e] - skipped,
                skipped > 0,
            )


@kernel
def _call(function, rows, cells, before):
    """Call a :class:`Callback`; the arguments that it finds by their addresses live at
    least until it returns."""
    call(function, address_of(rows))


@inlined
def _refusal(ring, block, lane_ids, priorities, counts):
    """Return why nothing can be written, or 0; count the rows of each lane in ``counts``,
    which holds the rows of all."""
    if block[DIRTY] != IDLE:
        return UNFINISHED
    # the rows that are about to go tell where episodes of later ones begin
    if ring.episodes and block[EPISODES_STALE]:
        return EDITED
    if priorities:
        record = carray(pointer(priorities), 1, UPDATE)[0]
        if record.alpha and load(record.alpha, np.float64) != load(
            record.weighed_alpha, np.float64
        ):
            return UNWEIGHED
    nbytes = ring.steps * len(counts) * ring.row_bytes
    for leaf in range(ring.leaves):
        if 0 <= load(ring.sources + 8 * leaf, np.int64) - ring.rows < nbytes:
            return OVERLAPPING
    if lane_ids:
        lane = carray(pointer(lane_ids), counts[0], np.int64)
        counts[:] = 0
        for i in range(len(lane)):
            if lane[i] < 0 or lane[i] >= len(counts):
                return NO_LANE
            counts[lane[i]] += 1
    return 0


@inlined
def _are_aligned(head, steps):
    """Whether all lanes have as many rows, and their next rows go to the same slot."""
    are_aligned = True
    for e in range(1, head.shape[1]):
        are_aligned &= (
            head[WRITTEN, e] - head[TAIL, e] == head[WRITTEN, 0] - head[TAIL, 0]
        )
        are_aligned &= (head[WRITTEN, e] - head[WRITTEN, 0]) % steps == 0
    return are_aligned


@inlined
def _clear_holes(ring, after, longest):
    """Clear the time steps that become the last ones, because some lanes may not write
    them."""
    steps = longest_of(after, ring.steps)
    width = after.shape[1] * ring.row_bytes
    if steps > longest:
        for byte in range(longest * width, steps * width):
            store(ring.rows + byte, np.uint8(0), np.uint8)


@inlined
def _place(ring, before, counts, lane_ids, lanes_first, index, cells):
    """Write the cell of each row of the data to ``cells``, and the indices of the rows,
    in time order, to ``index``."""
    lanes = len(counts)
    steps = ring.steps
    slots, replaced = np.empty(lanes, np.int64), np.empty(lanes, np.int64)
    for lane in range(lanes):
        slots[lane] = before[WRITTEN, lane] % steps
        replaced[lane] = max(counts[lane] - steps, 0)
    step, e = 0, 0
    for i in range(len(cells)):
        if lane_ids:
            e = load(lane_ids + 8 * i, np.int64)
        slot = slots[e]
        slots[e] = slot + 1 if slot + 1 < steps else 0
        cell = slot * lanes + e
        if replaced[e]:
            replaced[e] -= 1
            cell = -1
        cells[e * counts[0] + step if lanes_first else i] = cell
        if index and ring.lanes:
            store(index + 16 * i, slot, np.int64)
            store(index + 16 * i + 8, e, np.int64)
        elif index:
            store(index + 8 * i, slot, np.int64)
        if not lane_ids:
            e += 1
            if e == lanes:
                step = step + 1
                e = 0


@inlined
def _copy(ring, cells):
    """Copy the rows of the data to their cells."""
    extents = carray(pointer(ring.extents), (ring.leaves, 2), np.int64)
    sources = carray(pointer(ring.sources), ring.leaves, np.int64)
    streams = ring.steps * max(ring.lanes, 1) * ring.row_bytes > _STREAMED
    for i in range(len(cells)):
        if cells[i] < 0:
            continue
        row = ring.rows + cells[i] * ring.row_bytes
        for leaf in range(ring.leaves):
            width = extents[leaf, 1]
            if streams and width >= _LARGE:
                stream_bytes(row + extents[leaf, 0], sources[leaf] + i * width, width)
            else:
                copy_few(row + extents[leaf, 0], sources[leaf] + i * width, width)
    if streams:
        finish_streams()


@inlined
def _publish(block, lanes):
    """Make the rows live whose bytes have been stored; see ``Ring.publish``."""
    barrier()
    block[DIRTY] = PUBLISHED
    barrier()
    for i in range(AFTER * lanes):
        block[i] = block[AFTER * lanes + i]
    block[ROWS_WRITTEN] = block[NEXT_ROWS_WRITTEN]
    block[PUBLICATION] = block[NEXT_PUBLICATION]
    block[REVISION] += 1
    barrier()


# -- what else a write does: the functions take the address of a `_Rows`


@Callback
def write_entries(rows):
    """Store the deduplicated observations of rows whose other bytes have been
    stored."""
    new_rows = carray(pointer(rows), 1, _ROWS)[0]
    ring = carray(pointer(new_rows.ring), 1, WRITE_RECORD)[0]
    entries_cpu.write(
        ring.entries, ring.sources, new_rows.head, new_rows.cells, new_rows.size
    )


@Callback
def enter_proportional(rows):
    """Set the priorities of new rows in a sum tree."""
    new_rows = carray(pointer(rows), 1, _ROWS)[0]
    record = carray(pointer(new_rows.priorities), 1, UPDATE)[0]
    tree = carray(pointer(record.table), 1, TREE)
    alpha = load(record.weighed_alpha, np.float64)
    if new_rows.slot == IN_CELLS:
        cells = carray(pointer(new_rows.cells), new_rows.size, np.int64)
        live = record.steps * max(record.lanes, 1)
        update(
            tree, cells, np.full(new_rows.size, _entry(record)), live, alpha, record.eps
        )
        return
    start, head, rest = _runs(record, new_rows)
    fill(tree, start, head, _entry(record), alpha, record.eps)
    if rest:
        fill(tree, np.int64(0), rest, _entry(record), alpha, record.eps)


@Callback
def enter_rank(rows):
    """Set the priorities of new rows in a rank order."""
    new_rows = carray(pointer(rows), 1, _ROWS)[0]
    record = carray(pointer(new_rows.priorities), 1, UPDATE)[0]
    order = carray(pointer(record.table), 1, ORDER)
    # for Python 3.10, where numba takes `view` of no inlined result
    magnitude = np.float32(_entry(record))
    if new_rows.slot == IN_CELLS:
        cells = carray(pointer(new_rows.cells), new_rows.size, np.int64)
        live = record.steps * max(record.lanes, 1)
        update_order(order, cells, np.full(new_rows.size, magnitude), live)
        return
    start, head, rest = _runs(record, new_rows)
    bits = np.int64(magnitude.view(np.int32))
    fill_order(order, np.arange(start, start + head), bits)
    if rest:
        fill_order(order, np.arange(np.int64(0), rest), bits)


@inlined
def _entry(record):
    """Return the magnitude of new rows."""
    largest = load(record.largest, np.float64)
    return np.float32(record.first if largest < 0.0 else largest)


@inlined
def _runs(record, new_rows):
    """Return the first cell of new time steps, and the number of cells up to the last
    one, and from cell 0 on."""
    lanes = max(record.lanes, 1)
    kept = min(new_rows.size // lanes, record.steps)
    head = min(kept, record.steps - new_rows.slot)
    return new_rows.slot * lanes, head * lanes, (kept - head) * lanes
