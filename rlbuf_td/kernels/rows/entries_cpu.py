"""The loops that read and write deduplicated observations;
:mod:`rlbuf_td.kernels.rows.entries` explains them.

``address`` is that of a :class:`Stored`. A *piece* is one frame of a stack, or a whole
observation. Side 0 of a row is its observation, side 1 its next observation.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import (
    address_of,
    copy_bytes,
    copy_few,
    inlined,
    kernel,
    load,
    load_fields,
    pointer,
    prefetch,
    prefetch_row,
    same_bytes,
    store,
)
from rlbuf_td.kernels.rows.entries import Group, Part, Run, Stored

# a row is prefetched 20 rows before its use, its entries 8 rows before
_ROWS, _ENTRIES = 20, 8
# cache lines of an entry to prefetch: the hardware prefetches the following ones
_MOST_LINES = 4
_NONE = -1  # the newest row of a lane: it has none
# offsets in bytes of the counters of a group
_SPARE = 0  # the first spare chunk plus 1; 0: none
_USED = 8  # the number of chunks used so far


@inlined
def _names_of(stored, group, cell):
    """Return the address of the names in the row of a cell."""
    return stored.rows + cell * stored.row_bytes + group.names_at


@inlined
def _entry(group, name):
    """Return the address of the entry with this name."""
    return group.entries + (np.int64(name) - 1) * group.nbytes


# -- reading


@inlined
def _expect_entries(stored, row):
    """Prefetch the entries of the row at address ``row``."""
    for g in range(stored.group_count):
        group = load_fields(stored.groups, g, Group)
        last = np.int32(0)
        for n in range(group.names):
            name = load(row + group.names_at + 4 * n, np.int32)
            if name != last:
                prefetch_row(_entry(group, name), min(group.nbytes, 64 * _MOST_LINES))
            last = name


@inlined
def _copy_entry(stored, group, name, n, targets, i):
    """Copy the entry whose name is number ``n`` in a row to row ``i`` of a batch."""
    source = _entry(group, name)
    side = np.int64(n >= group.pieces)
    piece = n - side * group.pieces
    for p in range(group.first_part, group.past_part):
        part = load_fields(stored.parts, p, Part)
        target = targets[part.next if side else part.root]
        if not target:
            continue
        target += (i * part.outer * group.pieces + piece) * part.inner
        for o in range(part.outer):
            copy_bytes(
                target + o * part.pitch, source + part.into + o * part.inner, part.inner
            )


@kernel
def read(address, targets, cells, begin, end, live, whole):
    """Copy rows with the flat indices at ``cells``, an address; return False if one of
    them is not in ``[0, live)``.

    Of these indices and of the rows of the leaves, only the numbers ``begin`` to
    ``end - 1`` are read and written. ``targets``, ``[leaves]`` int64, holds the
    addresses of the leaves; 0 skips a leaf. Keys that rows hold themselves are read
    only if ``whole``.
    """
    stored = load_fields(address, 0, Stored)
    for begun in range(begin, end + _ROWS):
        if begun < end:
            cell = load(cells + 8 * begun, np.int64)
            if cell < 0 or cell >= live:
                return False
            row = stored.rows + cell * stored.row_bytes
            prefetch(row)
            prefetch(row + stored.row_bytes - 1)
        near = begun - _ROWS + _ENTRIES
        if begin <= near < end:
            near_cell = load(cells + 8 * near, np.int64)
            _expect_entries(stored, stored.rows + near_cell * stored.row_bytes)
        i = begun - _ROWS
        if i < begin:
            continue
        row = stored.rows + load(cells + 8 * i, np.int64) * stored.row_bytes
        for r in range(stored.run_count if whole else 0):
            run = load_fields(stored.runs, r, Run)
            target = targets[run.leaf]
            if target:
                copy_few(target + i * run.nbytes, row + run.offset, run.nbytes)
        for g in range(stored.group_count):
            group = load_fields(stored.groups, g, Group)
            for n in range(group.names):
                # A row that has not been written has name 0. Reading entry 1 then
                # avoids an invalid address.
                name = max(load(row + group.names_at + 4 * n, np.int32), np.int32(1))
                _copy_entry(stored, group, name, n, targets, i)
    return True


# -- the rings of entries


# What is known of a lane during a write: three int64. Offsets in bytes:
_ROW = 0  # the flat index of its newest row, or `_NONE`
_NEWEST = 8  # the name of the newest entry; 0: the lane has no ring yet
_OLDEST = 16  # the name of the oldest entry that must not change; 0: none
_ENDS = 3


@inlined
def _next_chunk(group, chunk):
    """Return the chunk after a chunk in the ring of its lane."""
    return np.int64(load(group.following + 4 * chunk, np.int32))


@inlined
def _set_next_chunk(group, chunk, next_chunk):
    store(group.following + 4 * chunk, np.int32(next_chunk), np.int32)


@inlined
def _enter_chunk(group, newest, oldest):
    """Return the chunk after the one whose last entry is ``newest``; a new one if the
    next in the ring is live."""
    last = (newest - 1) >> group.bits
    after = _next_chunk(group, last) if newest else np.int64(-1)
    spare = load(group.counters + _SPARE, np.int64)
    used = load(group.counters + _USED, np.int64)
    is_full = newest == 0 or (oldest != 0 and after == (oldest - 1) >> group.bits)
    # there are always enough chunks, except in forged states
    if not is_full or (spare == 0 and used == group.chunks):
        return max(after, np.int64(0))
    if spare:
        chunk = spare - 1
        store(group.counters + _SPARE, _next_chunk(group, chunk) + 1, np.int64)
    else:
        chunk = used
        store(group.counters + _USED, used + 1, np.int64)
    _set_next_chunk(group, chunk, after if newest else chunk)
    if newest:
        _set_next_chunk(group, last, chunk)
    return chunk


@inlined
def _append(group, ends):
    """Return the name of the next entry of a lane, whose bytes the caller writes."""
    newest, oldest = load(ends + _NEWEST, np.int64), load(ends + _OLDEST, np.int64)
    if newest & ((np.int64(1) << group.bits) - 1) == 0:
        newest = _enter_chunk(group, newest, oldest) << group.bits
    store(ends + _NEWEST, newest + 1, np.int64)
    if oldest == 0:
        store(ends + _OLDEST, newest + 1, np.int64)
    return np.int32(newest + 1)


@kernel
def link(address, head):
    """Build the rings of all lanes from their live rows; ``head``, ``[2, E]`` int64, is
    that of :func:`write`.

    All chunks without live entries become spare. The rings hold no information of their
    own: they are linked again after a load, and after a write that did not end.
    """
    stored = load_fields(address, 0, Stored)
    ring = carray(pointer(head), (2, stored.lanes), np.int64)
    for number in range(stored.group_count):
        group = load_fields(stored.groups, number, Group)
        is_live = np.zeros(group.chunks, np.bool_)
        for lane in range(stored.lanes):
            _link_lane(stored, group, lane, ring, is_live)
        _list_spare(group, is_live)


@inlined
def _link_lane(stored, group, lane, ring, is_live):
    """Build the ring of a lane: the chunks of its live rows, in their order; mark these
    chunks in ``is_live``."""
    steps = stored.total // stored.lanes
    first = np.int64(-1)
    last = np.int64(-1)
    for serial in range(ring[0, lane], ring[1, lane]):
        cell = serial % steps * stored.lanes + lane
        for position in range(group.names):
            name = load(_names_of(stored, group, cell) + 4 * position, np.int32)
            chunk = (np.int64(name) - 1) >> group.bits
            if chunk == last or name < 1 or is_live[chunk]:
                continue
            is_live[chunk] = True
            if last < 0:
                first = chunk
            else:
                _set_next_chunk(group, last, chunk)
            last = chunk
    if last >= 0:
        _set_next_chunk(group, last, first)


@inlined
def _list_spare(group, is_live):
    """List the chunks before the last live one that are not live as spare."""
    used = np.int64(0)
    for chunk in range(len(is_live)):
        if is_live[chunk]:
            used = np.int64(chunk + 1)
    spare = np.int64(-1)
    for chunk in range(used):
        if not is_live[chunk]:
            _set_next_chunk(group, chunk, spare)
            spare = np.int64(chunk)
    store(group.counters + _SPARE, spare + 1, np.int64)
    store(group.counters + _USED, used, np.int64)


# -- writing


class Data(NamedTuple):
    """The observations of row ``row`` of the data to write."""

    leaves: int  # address of the addresses of the leaves
    parts: int
    row: int | np.int64


@inlined
def _given(group, data, part, side):
    """Return the address of the values of a part in the observation of side
    ``side``."""
    leaf = load(data.leaves + 8 * (part.next if side else part.root), np.int64)
    return leaf + data.row * part.inner * part.outer * group.pieces


@inlined
def _is_entry(group, data, side, name, piece):
    """Whether the bytes of a piece of the data equal those of the entry with this
    name."""
    stored = _entry(group, name)
    for p in range(group.first_part, group.past_part):
        part = load_fields(data.parts, p, Part)
        source = _given(group, data, part, side) + piece * part.inner
        for o in range(part.outer):
            if not same_bytes(
                stored + part.into + o * part.inner, source + o * part.pitch, part.inner
            ):
                return False
    return True


@inlined
def _new_entry(group, data, side, piece, ends):
    """Copy one piece of an observation to a new entry; return the name of the entry."""
    name = _append(group, ends)
    target = _entry(group, name)
    for p in range(group.first_part, group.past_part):
        part = load_fields(data.parts, p, Part)
        source = _given(group, data, part, side) + piece * part.inner
        for o in range(part.outer):
            copy_bytes(
                target + part.into + o * part.inner, source + o * part.pitch, part.inner
            )
    return name


@inlined
def _share(group, data, side, row, others, common):
    """Take the first ``common`` names of a side from address ``others`` if their bytes
    are equal; return whether."""
    for piece in range(common - 1, -1, -1):  # the newest first: it differs soonest
        if not _is_entry(group, data, side, load(others + 4 * piece, np.int32), piece):
            return False
    for piece in range(common):
        store(
            row + 4 * (side * group.pieces + piece),
            load(others + 4 * piece, np.int32),
            np.int32,
        )
    return True


@inlined
def _fresh(group, data, side, row, ends):
    """Store an observation in new entries; equal consecutive frames share an entry."""
    name = np.int32(0)
    for piece in range(group.pieces):
        if piece == 0 or not _is_entry(group, data, side, name, piece):
            name = _new_entry(group, data, side, piece, ends)
        store(row + 4 * (side * group.pieces + piece), name, np.int32)


@inlined
def _put(stored, group, data, row, ends):
    """Store the observations of the next row of a lane; ``row`` is the address of its
    names."""
    newest = load(ends + _ROW, np.int64)
    pieces = group.pieces
    for side in range(group.sides):
        # The first names may be those of the row before, whose next observation this
        # is, or of the stack a step before.
        common = pieces if side == 0 and group.sides == 2 else pieces - 1
        others = row if side else _names_of(stored, group, max(newest, np.int64(0)))
        others += 4 * (group.sides * pieces - common if side == 0 else 1)
        if (side or newest >= 0) and _share(group, data, side, row, others, common):
            if load(ends + _OLDEST, np.int64) == 0:
                store(ends + _OLDEST, np.int64(load(row, np.int32)), np.int64)
            if common < pieces:
                name = _new_entry(group, data, side, common, ends)
                store(row + 4 * (side * pieces + common), name, np.int32)
        else:
            _fresh(group, data, side, row, ends)


@inlined
def _find_ends(stored, group, ends, lane, head, new_rows):
    """Look up the ends of a lane; ``new_rows`` rows are written to it, and replace its
    oldest ones."""
    steps = stored.total // stored.lanes
    written = load(head + 8 * (stored.lanes + lane), np.int64)
    live = written - load(head + 8 * lane, np.int64)
    row = (written - 1) % steps * stored.lanes + lane if live else np.int64(_NONE)
    store(ends + _ROW, row, np.int64)
    if live:
        name = load(_names_of(stored, group, row) + 4 * (group.names - 1), np.int32)
        store(ends + _NEWEST, np.int64(name), np.int64)
    kept = min(live, steps - new_rows)
    if kept > 0:
        oldest = (written - kept) % steps * stored.lanes + lane
        store(
            ends + _OLDEST,
            np.int64(load(_names_of(stored, group, oldest), np.int32)),
            np.int64,
        )


@inlined
def _expect_ends(group, ends):
    """Prefetch the newest entry of a lane, and the one that follows unless the ring
    grows."""
    newest = load(ends + _NEWEST, np.int64)
    if newest > 0:
        prefetch(_entry(group, newest))
        if newest & ((np.int64(1) << group.bits) - 1) == 0:
            newest = _next_chunk(group, (newest - 1) >> group.bits) << group.bits
        prefetch_row(_entry(group, newest + 1), min(group.nbytes, 64 * _MOST_LINES))


@kernel
def _write_group(stored, group, leaves, head, cells, count, lane_counts, ends):
    """Implement :func:`write` for a group; ``lane_counts`` counts the rows of each lane, and
    ``ends`` is memory for them."""
    ends_at = address_of(ends)
    for lane in range(stored.lanes):
        if lane_counts[lane]:
            _find_ends(
                stored, group, ends_at + 8 * _ENDS * lane, lane, head, lane_counts[lane]
            )
    for i in range(count):
        if stored.lanes > _ENTRIES and i + _ENTRIES < count:
            soon = max(load(cells + 8 * (i + _ENTRIES), np.int64), np.int64(0))
            _expect_ends(group, ends_at + 8 * _ENDS * (soon % stored.lanes))
        cell = load(cells + 8 * i, np.int64)
        if cell >= 0:
            lane_ends = ends_at + 8 * _ENDS * (cell % stored.lanes)
            _put(
                stored,
                group,
                Data(leaves, stored.parts, np.int64(i)),
                _names_of(stored, group, cell),
                lane_ends,
            )
            store(lane_ends + _ROW, cell, np.int64)


@kernel
def write(address, leaves, head, cells, count):
    """Write the observations of ``count`` new rows to entries, and the names of these
    entries to the rows.

    Args:
        address: that of a :class:`Stored`.
        leaves: address of the addresses of the leaves of whole rows, contiguous.
        head: address of ``[2, E]`` int64: the serials of the oldest row of each lane,
            and of the row to write next, before this write; the row with a serial is in
            time step ``serial % T``.
        cells: address of flat indices, those of a lane in the order of their serials;
            rows with -1 are not stored. A lane gets at most as many rows as it has
            steps.
        count: the number of rows of the data.
    """
    stored = load_fields(address, 0, Stored)
    lane_counts = np.zeros(stored.lanes, np.int64)
    for i in range(count):
        cell = load(cells + 8 * i, np.int64)
        if cell >= 0:
            lane_counts[cell % stored.lanes] += 1
    for g in range(stored.group_count):
        ends = np.zeros((stored.lanes, _ENDS), np.int64)
        group = load_fields(stored.groups, g, Group)
        _write_group(stored, group, leaves, head, cells, count, lane_counts, ends)
