"""The CPU loops of :mod:`rlbuf_td.kernels.rows.pool`, where *entries* and their *names* are explained.

A *piece* is one frame of a frame stack, or a whole observation. Side 0 of a row is its observation, side 1 its next
observation.
"""

import numpy as np

from rlbuf_td.kernels.compiled import (
    copy_bytes,
    copy_few,
    inlined,
    kernel,
    load,
    prefetch,
    prefetch_row,
    same_bytes,
    store,
)

_ROWS, _ENTRIES = 20, 8  # a row is prefetched 20 rows before its use, its entries 8 rows before
_MOST_LINES = 4  # cache lines of an entry to prefetch: the hardware prefetches the following ones

# Columns of ``groups`` and ``parts``, see :class:`rlbuf_td.kernels.rows.pool.Table`.
IDS, PIECES, SIDES, NAMES, BYTES, BASE, STACK, COUNTERS, FIRST, LAST, REACH = range(11)
INTO, INNER, OUTER, PITCH, ROOT, NEXT = range(6)
OWN, OWN_BYTES, TOTAL, LANES = range(4)  # fields of ``rows``: address, bytes per row, number of rows, rows per step


@inlined
def _wrapped(cell, total):
    """Wrap a row index in ``[-total, 2 * total)`` to ``[0, total)``."""
    return cell + total if cell < 0 else cell - total if cell >= total else cell


@inlined
def _numbers(groups, g):
    # A tuple stays in registers; array elements would be reloaded after each write.
    first = groups[g, 0], groups[g, 1], groups[g, 2], groups[g, 3], groups[g, 4], groups[g, 5]
    return (*first, groups[g, 6], groups[g, 7], groups[g, 8], groups[g, 9], groups[g, 10])


@inlined
def _row(group, rows, cell):
    """Return the address at which row ``cell`` stores the ids of its observations."""
    return rows[OWN] + _wrapped(cell, rows[TOTAL]) * rows[OWN_BYTES] + group[IDS]


@inlined
def _entry(group, name):
    return group[BASE] + (np.int64(name) - 1) * group[BYTES]


# -- reading


@inlined
def _sides(parts, targets):
    """Return the range ``(first, last + 1)`` of the sides for which ``targets`` holds an address."""
    low, high = np.int64(1), np.int64(1)
    for p in range(len(parts)):
        low = min(low, np.int64(not targets[parts[p, ROOT]]))
        high = max(high, np.int64(2 * (targets[parts[p, NEXT]] != 0)))
    return low, high


@inlined
def _expect_entries(group, row, sides):
    last = np.int32(0)
    for j in range(sides[0] * group[PIECES], min(sides[1], group[SIDES]) * group[PIECES]):
        name = load(row + group[IDS] + 4 * j, np.int32)
        if name != last:
            prefetch_row(_entry(group, name), min(group[BYTES], 64 * _MOST_LINES))
        last = name


@inlined
def _copy_piece(group, parts, name, piece, side, targets, i):
    """Copy an entry to row ``i`` of a batch; ``targets`` holds the addresses of the batch's tensors."""
    at = _entry(group, name)
    for p in range(group[FIRST], group[LAST]):
        inner, outer = parts[p, INNER], parts[p, OUTER]
        target = targets[parts[p, ROOT + side]]
        if not target:
            continue
        target += (i * outer * group[PIECES] + piece) * inner
        for o in range(outer):
            copy_bytes(target + o * parts[p, PITCH], at + parts[p, INTO] + o * inner, inner)


@kernel
def read(groups, parts, runs, targets, own, own_bytes, live, cells, order, count):
    """Implement :func:`rlbuf_td.kernels.rows.pool.read_`; ``targets`` holds an address per leaf, 0 to skip the leaf."""
    sides = _sides(parts, targets)
    for begun in range(count + _ROWS):
        if begun < count:
            i = load(order + 8 * begun, np.int64) if order else np.int64(begun)
            cell = load(cells + 8 * i, np.int64)
            if cell < 0 or cell >= live:
                return False
            row = own + cell * own_bytes
            prefetch(row)
            prefetch(row + own_bytes - 1)
        near = begun - _ROWS + _ENTRIES
        if 0 <= near < count:
            i = load(order + 8 * near, np.int64) if order else np.int64(near)
            for g in range(len(groups)):
                _expect_entries(_numbers(groups, g), own + load(cells + 8 * i, np.int64) * own_bytes, sides)
        now = begun - _ROWS
        if now < 0:
            continue
        i = load(order + 8 * now, np.int64) if order else np.int64(now)
        row = own + load(cells + 8 * i, np.int64) * own_bytes
        for r in range(len(runs)):
            width, target = runs[r, 2], targets[runs[r, 1]]
            if target:
                copy_few(target + i * width, row + runs[r, 0], width)
        for g in range(len(groups)):
            group = _numbers(groups, g)
            for j in range(sides[0] * group[PIECES], min(sides[1], group[SIDES]) * group[PIECES]):
                # A row that is being written may have name 0. Reading entry 1 then avoids an invalid address.
                name = max(load(row + group[IDS] + 4 * j, np.int32), np.int32(1))
                side = np.int64(j >= group[PIECES])
                _copy_piece(group, parts, name, j - side * group[PIECES], side, targets, i)
    return True


# -- which entries are free


@inlined
def _take(group):
    free = load(group[COUNTERS], np.int64)
    if free > 0:
        store(group[COUNTERS], free - 1, np.int64)
        return load(group[STACK] + 4 * (free - 1), np.int32)
    used = load(group[COUNTERS] + 8, np.int64) + 1
    store(group[COUNTERS] + 8, used, np.int64)
    return np.int32(used)


@inlined
def _give(group, name):
    free = load(group[COUNTERS], np.int64)
    store(group[STACK] + 4 * free, name, np.int32)
    store(group[COUNTERS], free + 1, np.int64)


@inlined
def _set_free(group, name, freed, kept):
    if not len(freed):  # the write is not deferred; otherwise, `freed` collects `kept` names for later
        _give(group, name)
        return kept
    freed[kept] = name
    return kept + 1


@inlined
def _is_held(group, rows, cell, name):
    """Whether a nearby row in the lane of row ``cell`` refers to entry ``name``."""
    for d in range(1, group[REACH] + 1):
        away = d * rows[LANES]
        if away >= rows[TOTAL]:
            return False
        for step in (away, -away):
            row = _row(group, rows, cell + step)
            for j in range(group[NAMES]):
                if load(row + 4 * j, np.int32) == name:
                    return True
    return False


@inlined
def _release(group, rows, cell, freed, kept):
    """Clear the entry names in a row; free the entries to which no other row refers."""
    row = _row(group, rows, cell)
    for j in range(group[NAMES]):
        name = load(row + 4 * j, np.int32)
        if name == 0:
            continue
        repeated = False
        for before in range(j):
            repeated |= load(row + 4 * before, np.int32) == name
        if not repeated and not _is_held(group, rows, cell, name):
            kept = _set_free(group, name, freed, kept)
    for j in range(group[NAMES]):
        store(row + 4 * j, np.int32(0), np.int32)
    return kept


# -- writing


@inlined
def _given(parts, sources, p, piece, side, t, lane):
    return sources[p, side, 0] + t * sources[p, side, 1] + lane * sources[p, side, 2] + piece * parts[p, INNER]


@inlined
def _is_entry(group, parts, sources, name, piece, side, t, lane):
    at = _entry(group, name)
    for p in range(group[FIRST], group[LAST]):
        inner = parts[p, INNER]
        given = _given(parts, sources, p, piece, side, t, lane)
        for o in range(parts[p, OUTER]):
            if not same_bytes(at + parts[p, INTO] + o * inner, given + o * parts[p, PITCH], inner):
                return False
    return True


@inlined
def _new_entry(group, parts, sources, piece, side, t, lane):
    """Copy one piece of an observation to a new entry; return the name of the entry."""
    name = _take(group)
    at = _entry(group, name)
    for p in range(group[FIRST], group[LAST]):
        inner = parts[p, INNER]
        given = _given(parts, sources, p, piece, side, t, lane)
        for o in range(parts[p, OUTER]):
            copy_bytes(at + parts[p, INTO] + o * inner, given + o * parts[p, PITCH], inner)
    return name


@inlined
def _fresh(group, parts, sources, side, t, lane, row):
    """Store an observation in new entries; equal consecutive frames share an entry."""
    name = np.int32(0)
    for piece in range(group[PIECES]):
        if piece == 0 or not _is_entry(group, parts, sources, name, piece, side, t, lane):
            name = _new_entry(group, parts, sources, piece, side, t, lane)
        store(row + 4 * (side * group[PIECES] + piece), name, np.int32)


@inlined
def _fill_root(group, parts, sources, row, before, t, lane):
    """Store a row's observation; reuse entries of the previous row if their bytes are equal."""
    pieces, side = group[PIECES], np.int64(0)
    others = before + 4 * (pieces if group[SIDES] == 2 else 1)
    common = pieces if group[SIDES] == 2 else pieces - 1
    for piece in range(common - 1, -1, -1):  # the newest first: it differs soonest
        name = load(others + 4 * piece, np.int32)
        if name == 0 or not _is_entry(group, parts, sources, name, piece, side, t, lane):
            _fresh(group, parts, sources, side, t, lane, row)
            return
    for piece in range(common):
        store(row + 4 * piece, load(others + 4 * piece, np.int32), np.int32)
    if common < pieces:
        store(row + 4 * common, _new_entry(group, parts, sources, common, side, t, lane), np.int32)


@inlined
def _fill_next(group, parts, sources, row, after, t, lane):
    """Store a row's next observation; reuse entries of this row and of the following row if their bytes are equal."""
    pieces, newest, side = group[PIECES], group[PIECES] - 1, np.int64(1)
    for piece in range(newest - 1, -1, -1):
        if not _is_entry(group, parts, sources, load(row + 4 * (piece + 1), np.int32), piece, side, t, lane):
            _fresh(group, parts, sources, side, t, lane, row)
            return
    for piece in range(newest):
        store(row + 4 * (pieces + piece), load(row + 4 * (piece + 1), np.int32), np.int32)
    name = load(after + 4 * newest, np.int32)
    if name == 0 or not _is_entry(group, parts, sources, name, newest, side, t, lane):
        name = _new_entry(group, parts, sources, newest, side, t, lane)
    store(row + 4 * (pieces + newest), name, np.int32)


@inlined
def _cell(rows, cells, start, i):
    return load(cells + 8 * i, np.int64) if cells else _wrapped(start + i, rows[TOTAL])


@inlined
def _expect_old(group, rows, cells, start, count, i):
    """Prefetch into the CPU cache the next rows to overwrite, and one entry of each row."""
    if i + _ROWS < count:
        prefetch(_row(group, rows, _cell(rows, cells, start, i + _ROWS)))
    if i + _ENTRIES < count:
        row = _row(group, rows, _cell(rows, cells, start, i + _ENTRIES))
        name = load(row + 4 * (group[PIECES] - 1), np.int32)
        if name != 0:
            at = _entry(group, name)
            prefetch(at)
            prefetch(at + min(group[BYTES] - 1, 64))


@inlined
def _write_pair(group, parts, sources, row, before, after, t, lane, freed, kept):
    """Do what ``_release``, ``_fill_root`` and ``_fill_next`` do, for a row without frame stacks, in half the time."""
    # Of all other rows, only the two adjacent rows can refer to the same entries.
    shared, newer = load(before + 4, np.int32), load(after, np.int32)
    for name, other in ((load(row, np.int32), shared), (load(row + 4, np.int32), newer)):
        if name != 0 and name != other:
            kept = _set_free(group, name, freed, kept)
    for side, name in enumerate((shared, newer)):
        if name == 0 or not _is_entry(group, parts, sources, name, 0, side, t, lane):
            name = _new_entry(group, parts, sources, 0, side, t, lane)
        store(row + 4 * side, name, np.int32)
    return kept


@kernel
def write(groups, parts, sources, own, own_bytes, total, lanes, cells, start, count, given_lanes, deferred):
    """Implement :func:`rlbuf_td.kernels.rows.pool.write_`."""
    rows = own, own_bytes, total, lanes
    for g in range(len(groups)):
        group = _numbers(groups, g)
        are_pairs = group[PIECES] == 1 and group[SIDES] == 2 and total > lanes
        freed = np.empty(count * group[NAMES] if deferred else 0, np.int32)
        kept, t, lane = 0, np.int64(0), np.int64(0)
        for i in range(count):
            _expect_old(group, rows, cells, start, count, i)
            cell = _cell(rows, cells, start, i)
            row, before = _row(group, rows, cell), _row(group, rows, cell - lanes)
            after = _row(group, rows, cell + lanes)
            if are_pairs:
                kept = _write_pair(group, parts, sources, row, before, after, t, lane, freed, kept)
            else:
                kept = _release(group, rows, cell, freed, kept)
                _fill_root(group, parts, sources, row, before, t, lane)
                if group[SIDES] == 2:
                    _fill_next(group, parts, sources, row, after, t, lane)
            lane += 1
            if lane == given_lanes:
                t, lane = t + 1, np.int64(0)
        for j in range(kept):
            _give(group, freed[j])
