"""The CPU loops of :mod:`rlbuf_td.kernels.rows.pool`, where *entries* and their *names* are explained.

A *piece* is one frame of a frame stack, or a whole observation. Side 0 of a row is its observation, side 1 its next
observation. With two pieces (the oldest first), steps t and t + 1 of a lane share all frames that they can::

    row t       | own keys | 7  8 | 8  9 |      the names in a row: side 0, side 1; they begin at `names_at`
    row t + 1   | own keys | 8  9 | 9  4 |      a row that starts a trajectory has names of its own: | 5  5 | 5  6 |

    entries     | entry 1 | entry 2 | ... | entry M | scratch |      name i is entry i - 1 of this array
    an entry    | bytes of key 0 | bytes of key 1 | ... |            key k begins at `Part.into`
    stack       | 3  2  . . . |    counters | 2 | 9 |    names 3 and 2 are free; 9 is the largest name used so far

Invariants between two writes:

- Each name from 1 to the largest one used is either on the stack, once, or in at least one row.
- Rows that hold the same name are in one lane, and at most ``reach`` time steps apart on the ring. Nothing else refers
  to an entry. To free the entries of a row, it is thus enough to look at the ``reach`` rows before it and after it.
- The bytes of an entry never change while a row holds its name.

While a write is *deferred*, the names that it frees are on no stack: until it ends, the entries of the rows that it
replaces keep their bytes, so that copies of these rows undo it.
"""

from typing import NamedTuple

import numpy as np

from rlbuf_td.kernels.compiled import (
    address_of,
    copy_bytes,
    copy_few,
    inlined,
    kernel,
    load,
    load_fields,
    prefetch,
    prefetch_row,
    same_bytes,
    store,
)
from rlbuf_td.kernels.rows.table import Group, Part, Run, Source, Stored

_ROWS, _ENTRIES = 20, 8  # a row is prefetched 20 rows before its use, its entries 8 rows before
_MOST_LINES = 4  # cache lines of an entry to prefetch: the hardware prefetches the following ones


@inlined
def _names_of(stored, group, cell):
    """Return the address of the names in row ``cell``, which may be up to one turn of the ring off."""
    cell = cell + stored.total if cell < 0 else cell - stored.total if cell >= stored.total else cell
    return stored.rows + cell * stored.row_bytes + group.names_at


@inlined
def _entry(group, name):
    return group.entries + (np.int64(name) - 1) * group.nbytes


# -- reading


@inlined
def _sides(stored, targets):
    """Return the range ``(first, last + 1)`` of the sides for which ``targets`` holds an address."""
    low, high = np.int64(1), np.int64(1)
    for p in range(stored.part_count):
        part = load_fields(stored.parts, p, Part)
        low = min(low, np.int64(not targets[part.root]))
        high = max(high, np.int64(2 * (targets[part.next] != 0)))
    return low, high


@inlined
def _places(group, sides):
    """Return the range of the places, among the names in a row, of the names of ``sides``."""
    return sides[0] * group.pieces, min(sides[1], group.sides) * group.pieces


@inlined
def _expect_entries(stored, row, sides):
    for g in range(stored.group_count):
        group, last = load_fields(stored.groups, g, Group), np.int32(0)
        first, past = _places(group, sides)
        for place in range(first, past):
            name = load(row + group.names_at + 4 * place, np.int32)
            if name != last:
                prefetch_row(_entry(group, name), min(group.nbytes, 64 * _MOST_LINES))
            last = name


@inlined
def _copy_entry(stored, group, name, place, targets, i):
    """Copy the entry whose name is number ``place`` in a row to row ``i`` of a batch."""
    at, side = _entry(group, name), np.int64(place >= group.pieces)
    piece = place - side * group.pieces
    for p in range(group.first_part, group.past_part):
        part = load_fields(stored.parts, p, Part)
        target = targets[part.next if side else part.root]
        if not target:
            continue
        target += (i * part.outer * group.pieces + piece) * part.inner
        for o in range(part.outer):
            copy_bytes(target + o * part.pitch, at + part.into + o * part.inner, part.inner)


@kernel
def read(address, targets, cells, count, live, whole):
    """Implement :func:`rlbuf_td.kernels.rows.pool.read_` for the ``count`` row indices at address ``cells``.

    ``address`` is :attr:`Table.address`. ``targets``, ``[leaves]`` int64, holds the addresses of the leaves; 0 skips a
    leaf. Keys that rows hold themselves are read only if ``whole``.
    """
    stored = load_fields(address, 0, Stored)
    sides = _sides(stored, targets)
    for begun in range(count + _ROWS):
        if begun < count:
            cell = load(cells + 8 * begun, np.int64)
            if cell < 0 or cell >= live:
                return False
            row = stored.rows + cell * stored.row_bytes
            prefetch(row)
            prefetch(row + stored.row_bytes - 1)
        near, i = begun - _ROWS + _ENTRIES, begun - _ROWS
        if 0 <= near < count:
            _expect_entries(stored, stored.rows + load(cells + 8 * near, np.int64) * stored.row_bytes, sides)
        if i < 0:
            continue
        row = stored.rows + load(cells + 8 * i, np.int64) * stored.row_bytes
        for r in range(stored.run_count if whole else 0):
            run = load_fields(stored.runs, r, Run)
            target = targets[run.leaf]
            if target:
                copy_few(target + i * run.nbytes, row + run.offset, run.nbytes)
        for g in range(stored.group_count):
            group = load_fields(stored.groups, g, Group)
            first, past = _places(group, sides)
            for place in range(first, past):
                # A row that is being written may have name 0. Reading entry 1 then avoids an invalid address.
                name = max(load(row + group.names_at + 4 * place, np.int32), np.int32(1))
                _copy_entry(stored, group, name, place, targets, i)
    return True


# -- which entries are free


@inlined
def _take(group):
    free = load(group.counters, np.int64)
    if free > 0:
        store(group.counters, free - 1, np.int64)
        return load(group.stack + 4 * (free - 1), np.int32)
    used = load(group.counters + 8, np.int64) + 1
    store(group.counters + 8, used, np.int64)
    return np.int32(used)


@inlined
def _give(group, name):
    free = load(group.counters, np.int64)
    store(group.stack + 4 * free, name, np.int32)
    store(group.counters, free + 1, np.int64)


@inlined
def _set_free(group, name, freed):
    """Free an entry, or add its name to ``freed``, whose first element counts the others; empty: not deferred."""
    if not len(freed):
        _give(group, name)
    else:
        freed[0] += 1
        freed[freed[0]] = name


@inlined
def _is_held(stored, group, cell, name):
    """Whether a nearby row in the lane of row ``cell`` refers to entry ``name``."""
    for d in range(1, group.reach + 1):
        away = d * stored.lanes
        if away >= stored.total:
            return False
        for step in (away, -away):
            row = _names_of(stored, group, cell + step)
            for j in range(group.names):
                if load(row + 4 * j, np.int32) == name:
                    return True
    return False


@inlined
def _release(stored, group, cell, freed):
    """Clear the entry names in a row; free the entries to which no other row refers."""
    row = _names_of(stored, group, cell)
    for j in range(group.names):
        name = load(row + 4 * j, np.int32)
        if name == 0:
            continue
        repeated = False
        for before in range(j):
            repeated |= load(row + 4 * before, np.int32) == name
        if not repeated and not _is_held(stored, group, cell, name):
            _set_free(group, name, freed)
    for j in range(group.names):
        store(row + 4 * j, np.int32(0), np.int32)


# -- writing


class Data(NamedTuple):
    """The observations of the row in lane ``lane`` of time step ``t`` of the data to write."""

    sources: int  # address of two `Source` per part, one per side
    parts: int
    t: int
    lane: int


@inlined
def _given(data, side, p):
    """Return the address of the values of part ``p`` in the observation of side ``side``."""
    source = load_fields(data.sources, 2 * p + side, Source)
    return source.address + data.t * source.along_time + data.lane * source.along_lanes


@inlined
def _is_entry(group, data, side, name, piece):
    at = _entry(group, name)
    for p in range(group.first_part, group.past_part):
        part = load_fields(data.parts, p, Part)
        given = _given(data, side, p) + piece * part.inner
        for o in range(part.outer):
            if not same_bytes(at + part.into + o * part.inner, given + o * part.pitch, part.inner):
                return False
    return True


@inlined
def _new_entry(group, data, side, piece):
    """Copy one piece of an observation to a new entry; return the name of the entry."""
    name = _take(group)
    at = _entry(group, name)
    for p in range(group.first_part, group.past_part):
        part = load_fields(data.parts, p, Part)
        given = _given(data, side, p) + piece * part.inner
        for o in range(part.outer):
            copy_bytes(at + part.into + o * part.inner, given + o * part.pitch, part.inner)
    return name


@inlined
def _fresh(group, data, side, row):
    """Store an observation in new entries; equal consecutive frames share an entry."""
    name = np.int32(0)
    for piece in range(group.pieces):
        if piece == 0 or not _is_entry(group, data, side, name, piece):
            name = _new_entry(group, data, side, piece)
        store(row + 4 * (side * group.pieces + piece), name, np.int32)


@inlined
def _fill_root(group, data, row, before):
    """Store a row's observation; reuse entries of the previous row if their bytes are equal."""
    side, others = np.int64(0), before + 4 * (group.pieces if group.sides == 2 else 1)
    common = group.pieces if group.sides == 2 else group.pieces - 1
    for piece in range(common - 1, -1, -1):  # the newest first: it differs soonest
        name = load(others + 4 * piece, np.int32)
        if name == 0 or not _is_entry(group, data, side, name, piece):
            _fresh(group, data, side, row)
            return
    for piece in range(common):
        store(row + 4 * piece, load(others + 4 * piece, np.int32), np.int32)
    if common < group.pieces:
        store(row + 4 * common, _new_entry(group, data, side, common), np.int32)


@inlined
def _fill_next(group, data, row, after):
    """Store a row's next observation; reuse entries of this row and of the following row if their bytes are equal."""
    pieces, newest, side = group.pieces, group.pieces - 1, np.int64(1)
    for piece in range(newest - 1, -1, -1):
        if not _is_entry(group, data, side, load(row + 4 * (piece + 1), np.int32), piece):
            _fresh(group, data, side, row)
            return
    for piece in range(newest):
        store(row + 4 * (pieces + piece), load(row + 4 * (piece + 1), np.int32), np.int32)
    name = load(after + 4 * newest, np.int32)
    if name == 0 or not _is_entry(group, data, side, name, newest):
        name = _new_entry(group, data, side, newest)
    store(row + 4 * (pieces + newest), name, np.int32)


@inlined
def _write_pair(group, data, row, before, after, freed):
    """Do what ``_release``, ``_fill_root`` and ``_fill_next`` do, for a row without frame stacks, in half the time."""
    # Of all other rows, only the two adjacent rows can refer to the same entries.
    shared, newer = load(before + 4, np.int32), load(after, np.int32)
    for name, other in ((load(row, np.int32), shared), (load(row + 4, np.int32), newer)):
        if name != 0 and name != other:
            _set_free(group, name, freed)
    for side, name in enumerate((shared, newer)):
        if name == 0 or not _is_entry(group, data, side, name, 0):
            name = _new_entry(group, data, side, 0)
        store(row + 4 * side, name, np.int32)


@inlined
def _cell(cells, start, i):
    return load(cells + 8 * i, np.int64) if cells else start + i


@inlined
def _expect_old(stored, group, cells, start, count, i):
    """Prefetch into the CPU cache the next rows to overwrite, and one entry of each row."""
    if i + _ROWS < count:
        prefetch(_names_of(stored, group, _cell(cells, start, i + _ROWS)))
    if i + _ENTRIES < count:
        row = _names_of(stored, group, _cell(cells, start, i + _ENTRIES))
        name = load(row + 4 * (group.pieces - 1), np.int32)
        if name != 0:
            at = _entry(group, name)
            prefetch(at)
            prefetch(at + min(group.nbytes - 1, 64))


@kernel
def write(address, sources, cells, start, count, deferred):
    """Implement :func:`rlbuf_td.kernels.rows.pool.write_` for the ``count`` row indices at address ``cells``.

    ``address`` is :attr:`Table.address`. ``sources`` is ``[parts, 2, 3]`` int64, a `Source` for each part and side. If
    ``cells`` is 0, whole time steps of the ring are written, from row ``start`` on.
    """
    stored = load_fields(address, 0, Stored)
    lanes, given = np.int64(1) if cells else stored.lanes, address_of(sources)
    for g in range(stored.group_count):
        group = load_fields(stored.groups, g, Group)
        are_pairs = group.pieces == 1 and group.sides == 2 and stored.total > stored.lanes
        freed = np.zeros(1 + count * group.names if deferred else 0, np.int32)
        t, lane = np.int64(0), np.int64(0)
        for i in range(count):
            _expect_old(stored, group, cells, start, count, i)
            cell = _cell(cells, start, i)
            cell -= stored.total if cell >= stored.total else 0
            row, before = _names_of(stored, group, cell), _names_of(stored, group, cell - stored.lanes)
            after, data = _names_of(stored, group, cell + stored.lanes), Data(given, stored.parts, t, lane)
            if are_pairs:
                _write_pair(group, data, row, before, after, freed)
            else:
                _release(stored, group, cell, freed)
                _fill_root(group, data, row, before)
                if group.sides == 2:
                    _fill_next(group, data, row, after)
            lane += 1
            if lane == lanes:
                t, lane = t + 1, np.int64(0)
        for j in range(freed[0] if deferred else 0):
            _give(group, freed[1 + j])
