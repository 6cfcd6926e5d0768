"""The loops of :mod:`rlbuf_td.kernels.rows.pool` on the CPU: rows, entries and what is written, all by address."""

from __future__ import annotations

import numpy as np

from rlbuf_td.kernels.compiled import copy_bytes, copy_few, inlined, kernel, load, prefetch, same_bytes, store

_ROWS, _ENTRIES = 20, 8  # rows, and entries of so many rows, that begin to come before they are needed
_MOST_LINES = 4  # of an entry that are asked for: what follows comes by itself

# Columns of ``groups`` and ``parts``, see :class:`rlbuf_td.kernels.rows.pool.Table`.
IDS, PIECES, SIDES, BYTES, BASE, STACK, COUNTERS, FIRST, LAST, REACH = range(10)
INTO, INNER, OUTER, PITCH, ROOT, NEXT = range(6)


@inlined
def _wrapped(cell, total):
    """Return a row that may lie up to a ring before the first or behind the last one."""
    return cell + total if cell < 0 else cell - total if cell >= total else cell


@inlined
def _entry(groups, g, name):
    return groups[g, BASE] + (np.int64(name) - 1) * groups[g, BYTES]


# -- reading


@inlined
def _expect_entries(groups, row):
    for g in range(len(groups)):
        width = min(groups[g, BYTES], 64 * _MOST_LINES)
        last = np.int32(0)
        for j in range(groups[g, PIECES] * groups[g, SIDES]):
            name = load(row + groups[g, IDS] + 4 * j, np.int32)
            if name != last:
                at = _entry(groups, g, name)
                for line in range(0, width, 64):
                    prefetch(at + line)
                prefetch(at + width - 1)
            last = name


@inlined
def _copy_piece(groups, parts, g, name, piece, side, places, i):
    """Copy one entry to where it belongs in row ``i`` of the leaves at ``places``."""
    at = _entry(groups, g, name)
    for p in range(groups[g, FIRST], groups[g, LAST]):
        inner = parts[p, INNER]
        leaf = parts[p, ROOT + side]
        target = places[leaf, 0] + i * places[leaf, 1] + piece * inner
        if parts[p, OUTER] == 1:
            copy_bytes(target, at + parts[p, INTO], inner)
        else:
            for o in range(parts[p, OUTER]):
                copy_bytes(target + o * parts[p, PITCH], at + parts[p, INTO] + o * inner, inner)


@kernel
def read(groups, parts, runs, places, own, own_bytes, live, cells, order, count):
    """See :func:`rlbuf_td.kernels.rows.pool.read_`; ``places`` are ``[leaves, 2]``, address and bytes per row."""
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
            _expect_entries(groups, own + load(cells + 8 * i, np.int64) * own_bytes)
        now = begun - _ROWS
        if now < 0:
            continue
        i = load(order + 8 * now, np.int64) if order else np.int64(now)
        row = own + load(cells + 8 * i, np.int64) * own_bytes
        for r in range(len(runs)):
            width = runs[r, 2]
            copy_few(places[runs[r, 1], 0] + i * width, row + runs[r, 0], width)
        for g in range(len(groups)):
            pieces = groups[g, PIECES]
            for j in range(pieces * groups[g, SIDES]):
                # A row that is being written meanwhile may name nothing: what is read is torn then, but is memory.
                name = max(load(row + groups[g, IDS] + 4 * j, np.int32), np.int32(1))
                side = np.int64(j >= pieces)
                _copy_piece(groups, parts, g, name, j - side * pieces, side, places, i)
    return True


# -- which entries are free


@inlined
def _take(groups, g):
    counters = groups[g, COUNTERS]
    free = load(counters, np.int64)
    if free > 0:
        store(counters, free - 1, np.int64)
        return load(groups[g, STACK] + 4 * (free - 1), np.int32)
    used = load(counters + 8, np.int64) + 1
    store(counters + 8, used, np.int64)
    return np.int32(used)


@inlined
def _give(groups, g, name):
    counters = groups[g, COUNTERS]
    free = load(counters, np.int64)
    store(groups[g, STACK] + 4 * free, name, np.int32)
    store(counters, free + 1, np.int64)


@inlined
def _holds(groups, g, row, name):
    found = False
    for j in range(groups[g, PIECES] * groups[g, SIDES]):
        found |= load(row + groups[g, IDS] + 4 * j, np.int32) == name
    return found


@inlined
def _is_held(groups, g, own, own_bytes, total, lanes, cell, name):
    """Return whether a row near ``cell``, in its lane, holds an entry."""
    for d in range(1, groups[g, REACH] + 1):
        step = d * lanes
        if step >= total:
            return False
        if _holds(groups, g, own + _wrapped(cell + step, total) * own_bytes, name):
            return True
        if _holds(groups, g, own + _wrapped(cell - step, total) * own_bytes, name):
            return True
    return False


@inlined
def _release(groups, g, own, own_bytes, total, lanes, cell, freed, kept):
    """Let a row hold nothing any more; give back, or note behind ``kept`` others, what no other row holds."""
    row = own + cell * own_bytes + groups[g, IDS]
    for j in range(groups[g, PIECES] * groups[g, SIDES]):
        name = load(row + 4 * j, np.int32)
        if name == 0:
            continue
        repeated = False
        for before in range(j):
            repeated |= load(row + 4 * before, np.int32) == name
        if repeated or _is_held(groups, g, own, own_bytes, total, lanes, cell, name):
            continue
        if len(freed):
            freed[kept] = name
            kept += 1
        else:
            _give(groups, g, name)
    for j in range(groups[g, PIECES] * groups[g, SIDES]):
        store(row + 4 * j, np.int32(0), np.int32)
    return kept


# -- writing


@inlined
def _given(parts, sources, p, piece, side, t, lane):
    """Return the address of a piece of what is written."""
    return sources[p, side, 0] + t * sources[p, side, 1] + lane * sources[p, side, 2] + piece * parts[p, INNER]


@inlined
def _agrees(parts, sources, first, last, at, piece, side, t, lane):
    """Return whether the entry at an address holds a piece of what is written."""
    for p in range(first, last):
        inner = parts[p, INNER]
        given = _given(parts, sources, p, piece, side, t, lane)
        for o in range(parts[p, OUTER]):
            if not same_bytes(at + parts[p, INTO] + o * inner, given + o * parts[p, PITCH], inner):
                return False
    return True


@inlined
def _put(parts, sources, first, last, at, piece, side, t, lane):
    """Copy a piece of what is written to the entry at an address."""
    for p in range(first, last):
        inner = parts[p, INNER]
        given = _given(parts, sources, p, piece, side, t, lane)
        for o in range(parts[p, OUTER]):
            copy_bytes(at + parts[p, INTO] + o * inner, given + o * parts[p, PITCH], inner)


@inlined
def _is_entry(groups, parts, sources, g, name, piece, side, t, lane):
    at = _entry(groups, g, name)
    return _agrees(parts, sources, groups[g, FIRST], groups[g, LAST], at, piece, side, t, lane)


@inlined
def _new_entry(groups, parts, sources, g, piece, side, t, lane):
    name = _take(groups, g)
    _put(parts, sources, groups[g, FIRST], groups[g, LAST], _entry(groups, g, name), piece, side, t, lane)
    return name


@inlined
def _fresh(groups, parts, sources, g, side, t, lane, ids):
    """Name new entries for a stack; neighbouring pieces that are the same share one."""
    name = np.int32(0)
    for piece in range(groups[g, PIECES]):
        if piece == 0 or not _is_entry(groups, parts, sources, g, name, piece, side, t, lane):
            name = _new_entry(groups, parts, sources, g, piece, side, t, lane)
        store(ids + 4 * piece, name, np.int32)


@inlined
def _fill_root(groups, parts, sources, g, own, own_bytes, cell, before, t, lane):
    """Name the entries of a row's own observation: those of the row before where they are the same."""
    pieces, sides = groups[g, PIECES], groups[g, SIDES]
    ids = own + cell * own_bytes + groups[g, IDS]
    others = own + before * own_bytes + groups[g, IDS] + 4 * (pieces if sides == 2 else 1)
    common = pieces if sides == 2 else pieces - 1
    is_shared = load(others, np.int32) != 0
    if is_shared:
        for piece in range(common - 1, -1, -1):  # the newest first: it differs soonest
            name = load(others + 4 * piece, np.int32)
            if is_shared and not _is_entry(groups, parts, sources, g, name, piece, np.int64(0), t, lane):
                is_shared = False
    if not is_shared:
        _fresh(groups, parts, sources, g, np.int64(0), t, lane, ids)
        return
    for piece in range(common):
        store(ids + 4 * piece, load(others + 4 * piece, np.int32), np.int32)
    if common < pieces:
        name = _new_entry(groups, parts, sources, g, common, np.int64(0), t, lane)
        store(ids + 4 * common, name, np.int32)


@inlined
def _fill_next(groups, parts, sources, g, own, own_bytes, cell, after, t, lane):
    """Name the entries of a row's next observation: its own stack, shifted, and the newest of the row after it."""
    pieces, side = groups[g, PIECES], np.int64(1)
    ids = own + cell * own_bytes + groups[g, IDS]
    newest = pieces - 1
    for piece in range(newest - 1, -1, -1):
        name = load(ids + 4 * (piece + 1), np.int32)
        if not _is_entry(groups, parts, sources, g, name, piece, side, t, lane):
            _fresh(groups, parts, sources, g, side, t, lane, ids + 4 * pieces)
            return
    for piece in range(newest):
        store(ids + 4 * (pieces + piece), load(ids + 4 * (piece + 1), np.int32), np.int32)
    name = load(own + after * own_bytes + groups[g, IDS] + 4 * newest, np.int32)
    if name == 0 or not _is_entry(groups, parts, sources, g, name, newest, side, t, lane):
        name = _new_entry(groups, parts, sources, g, newest, side, t, lane)
    store(ids + 4 * (pieces + newest), name, np.int32)


@inlined
def _cell(total, cells, start, i):
    return load(cells + 8 * i, np.int64) if cells else _wrapped(start + i, total)


@inlined
def _expect_old(groups, g, own, own_bytes, total, cells, start, count, i):
    """Start loading what rows that are written soon hold now: their entries will be free, and taken again."""
    if i + _ROWS < count:
        prefetch(own + _cell(total, cells, start, i + _ROWS) * own_bytes + groups[g, IDS])
    if i + _ENTRIES < count:
        row = own + _cell(total, cells, start, i + _ENTRIES) * own_bytes + groups[g, IDS]
        name = load(row + 4 * (groups[g, PIECES] - 1), np.int32)
        if name != 0:
            at = _entry(groups, g, name)
            prefetch(at)
            prefetch(at + min(groups[g, BYTES], 64) - 1)


@inlined
def _write_pairs(group, parts, sources, own, own_bytes, total, lanes, cells, start, count, given_lanes, freed):
    """:func:`write` for entries of one piece, which only the rows before and after may hold: twice as fast."""
    width, base, stack, counters = group[BYTES], group[BASE] - group[BYTES], group[STACK], group[COUNTERS]
    first, last, names = group[FIRST], group[LAST], own + group[IDS]
    free, used, kept, deferred = load(counters, np.int64), load(counters + 8, np.int64), 0, len(freed) > 0
    t, lane = np.int64(0), np.int64(0)
    for i in range(count):
        if i + _ENTRIES < count:  # what it holds now will be free, and taken again
            name = np.int64(load(names + _cell(total, cells, start, i + _ENTRIES) * own_bytes, np.int32))
            prefetch(base + name * width)
            prefetch(base + name * width + min(width, 64))
        cell = _cell(total, cells, start, i)
        row = names + cell * own_bytes
        before = names + _wrapped(cell - lanes, total) * own_bytes
        after = names + _wrapped(cell + lanes, total) * own_bytes
        shared, newer = load(before + 4, np.int32), load(after, np.int32)
        for name, other in ((load(row, np.int32), shared), (load(row + 4, np.int32), newer)):
            if name != 0 and name != other:
                if deferred:
                    freed[kept] = name
                    kept += 1
                else:
                    store(stack + 4 * free, name, np.int32)
                    free += 1
        for side, name in enumerate((shared, newer)):
            if name == 0 or not _agrees(parts, sources, first, last, base + name * width, 0, side, t, lane):
                if free > 0:
                    free -= 1
                    name = load(stack + 4 * free, np.int32)
                else:
                    used += 1
                    name = np.int32(used)
                _put(parts, sources, first, last, base + name * width, 0, side, t, lane)
            store(row + 4 * side, name, np.int32)
        lane += 1
        if lane == given_lanes:
            t, lane = t + 1, np.int64(0)
    for j in range(kept):
        store(stack + 4 * (free + j), freed[j], np.int32)
    store(counters, free + kept, np.int64)
    store(counters + 8, used, np.int64)


@kernel
def write(groups, parts, sources, own, own_bytes, total, lanes, cells, start, count, given_lanes, deferred):
    """Release and fill rows one by one; see :func:`rlbuf_td.kernels.rows.pool.write_`."""
    for g in range(len(groups)):
        freed = np.empty(count * groups[g, PIECES] * groups[g, SIDES] if deferred else 0, np.int32)
        kept = 0
        if groups[g, PIECES] == 1 and groups[g, SIDES] == 2 and total > lanes:
            _write_pairs(
                groups[g], parts, sources, own, own_bytes, total, lanes, cells, start, count, given_lanes, freed
            )
            continue
        t, lane = np.int64(0), np.int64(0)
        for i in range(count):
            _expect_old(groups, g, own, own_bytes, total, cells, start, count, i)
            cell = _cell(total, cells, start, i)
            before, after = _wrapped(cell - lanes, total), _wrapped(cell + lanes, total)
            kept = _release(groups, g, own, own_bytes, total, lanes, cell, freed, kept)
            _fill_root(groups, parts, sources, g, own, own_bytes, cell, before, t, lane)
            if groups[g, SIDES] == 2:
                _fill_next(groups, parts, sources, g, own, own_bytes, cell, after, t, lane)
            lane += 1
            if lane == given_lanes:
                t, lane = t + 1, np.int64(0)
        for j in range(kept):
            _give(groups, g, freed[j])
