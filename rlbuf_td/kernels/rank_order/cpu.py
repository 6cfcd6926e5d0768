"""Draws rows by rank and finds the ranks of rows, on the CPU.

:mod:`rlbuf_td.kernels.rank_order.chunks` explains chunks, groups and slots. The argument ``order`` is the result of
:func:`~rlbuf_td.kernels.rank_order.chunks.addresses`. The searches of a batch advance together through the levels
(groups, chunks, slots), without branches, so that their cache misses overlap.
"""

import math

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import address_of, bare, compiled, inlined, load, masses, pointer, prefetch
from rlbuf_td.kernels.rank_order.chunks import GROUPS, ROWS, WIDTH, Chunks
from rlbuf_td.kernels.rank_order.law import HEAD
from rlbuf_td.kernels.strata import BY_BATCH, BY_NONE

#: Searches that descend together: enough to overlap cache misses, few enough for the scratch memory to stay in cache.
BLOCK = 256
#: How many searches ahead chunks are prefetched.
AHEAD = 4
TOP_BIT = 0x7FFFFFFF
_ROW = 0xFFFFFFFF


@inlined
def chunks_at(order):
    at = order[0]
    return Chunks(
        head=carray(pointer(at.head), 3, np.int64),
        bits=carray(pointer(at.bits), at.rows, np.int32),
        keys=carray(pointer(at.keys), (at.chunks, WIDTH), np.int64),
        first=carray(pointer(at.first), (at.groups, WIDTH), np.int64),
        child=carray(pointer(at.child), (at.groups, WIDTH), np.int32),
        before=carray(pointer(at.before), (at.groups, WIDTH + 1), np.int32),
        size=carray(pointer(at.size), at.groups, np.int32),
        top_first=carray(pointer(at.top_first), at.tops, np.int64),
        top_group=carray(pointer(at.top_group), at.tops, np.int32),
        top_count=carray(pointer(at.top_count), at.tops, np.int64),
        top_before=carray(pointer(at.top_before), at.tops, np.int64),
    )


@bare
def key_of(bits, row):
    """Return the sort key of a row: larger magnitudes (``bits``, a float32 read as int32) have smaller keys."""
    return ((TOP_BIT - np.int64(bits)) << 32) | np.int64(row)


@bare
def _search_top(bounds, groups, wanted, positions):
    """For each value in ``wanted``, find the last position with ``bounds[position] <= value``."""
    positions[:] = 0
    step = 1
    while step < groups:
        step *= 2
    step >>= 1
    while step > 0:
        for i in range(len(wanted)):
            position = positions[i]
            positions[i] = position + step * (bounds[np.uint64(position + step)] <= wanted[i])
        step >>= 1


@bare
def _search_groups(bounds, top_group, wanted, positions, slots):
    """For each value, find the last slot with ``bounds[group, slot] <= value`` in the group at its position."""
    slots[:] = 0
    step = WIDTH // 2
    while step > 0:
        for i in range(len(wanted)):
            slot = slots[i]
            group = top_group[np.uint64(positions[i])]
            slots[i] = slot + step * (bounds[np.uint64(group), np.uint64(slot + step)] <= wanted[i])
        step >>= 1


@bare
def find_places(chunks, keys, positions, slots):
    """For each key, find the position of its group, and the slot of its chunk in the group."""
    _search_top(chunks.top_first, chunks.head[GROUPS], keys, positions)
    _search_groups(chunks.first, chunks.top_group, keys, positions, slots)


@bare
def chunk_at(chunks, position, slot):
    """Return the number of the chunk in a slot, and how many keys it holds."""
    group = np.uint64(chunks.top_group[position])
    return chunks.child[group, slot], chunks.before[group, slot + 1] - chunks.before[group, slot]


@bare
def key_address(chunks, chunk, at):
    return address_of(chunks.keys) + 8 * (chunk * np.int64(WIDTH) + at)


@bare
def fetch_chunk(chunks, position, slot):
    """Prefetch a chunk, except the last quarter, which is seldom in use."""
    address = key_address(chunks, chunks.child[chunks.top_group[position], slot], 0)
    for line in range(0, 6 * WIDTH, 64):
        prefetch(address + line)


@bare
def count_below(keys, chunk, filled, key):
    """Return how many of the first ``filled`` keys of a chunk are smaller than ``key``."""
    # Unsigned indices avoid numba's check for negative indices, which would prevent vectorisation.
    count = 0
    for i in range(filled):
        count += keys[np.uint64(chunk), np.uint64(i)] < key
    return count


@compiled
def ranks_of(order, rows, ranks):
    """Write each row's rank to ``ranks``, 0 for rows without a magnitude; return False if a row is out of range."""
    chunks = chunks_at(order)
    ranks[:] = 0
    inside = True
    for row in rows:
        inside &= (row >= 0) & (row < len(chunks.bits))
    if not inside or chunks.head[ROWS] == 0:
        return inside
    keys, positions, slots = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for start in range(0, len(rows), BLOCK):
        count = min(BLOCK, len(rows) - start)
        for i in range(count):
            keys[i] = key_of(max(chunks.bits[rows[start + i]], 0), rows[start + i])
        find_places(chunks, keys[:count], positions[:count], slots[:count])
        for i in range(count):
            if i + AHEAD < count:
                fetch_chunk(chunks, positions[i + AHEAD], slots[i + AHEAD])
            position, slot = positions[i], slots[i]
            chunk, filled = chunk_at(chunks, position, slot)
            at = chunks.top_before[position] + chunks.before[chunks.top_group[position], slot]
            rank = at + count_below(chunks.keys, chunk, filled, keys[i]) + 1
            ranks[start + i] = rank * (chunks.bits[rows[start + i]] >= 0)
    return True


@bare
def _mass_of_all(rows, ranks):
    if rows <= HEAD:
        return load(ranks.head + 8 * (rows - 1), np.float64)
    x = rows + 0.5
    bend = 1.0 - ranks.alpha
    y = math.log(x)
    if bend != 0.0:
        y = math.expm1(bend * y) / bend
    return ranks.shift + y + ranks.alpha / 24.0 * x ** (-ranks.alpha - 1.0)


@bare
def _rank_of_mass(mass, rows, ranks):
    if mass >= load(ranks.head + 8 * (HEAD - 1), np.float64):
        y = mass - ranks.shift
        bend = 1.0 - ranks.alpha
        if bend != 0.0:
            y = math.log1p(max(bend * y, -1.0 + 2.0**-53)) / bend
        x = min(math.exp(min(y, 36.0)), 2.0**52)
        return min(max(np.int64(x - ranks.alpha / (24.0 * x) + 0.5), HEAD + 1), rows)
    below = 0
    step = HEAD // 2
    while step > 0:
        below += step * (load(ranks.head + 8 * (below + step - 1), np.float64) <= mass)
        step >>= 1
    return min(below + 1, rows)


@bare
def _find_rows(chunks, rest, positions, rows):
    """Write the rows with the ranks ``rest + 1`` to ``rows``; overwrite ``rest`` and ``positions``."""
    slots, children = rows, positions  # the same memory, used one after the other
    _search_top(chunks.top_before, chunks.head[GROUPS], rest, positions)
    for j in range(len(rows)):
        rest[j] -= chunks.top_before[np.uint64(positions[j])]
    _search_groups(chunks.before, chunks.top_group, rest, positions, slots)
    for j in range(len(rows)):
        group, slot = np.uint64(chunks.top_group[np.uint64(positions[j])]), np.uint64(slots[j])
        rest[j] -= chunks.before[group, slot]
        children[j] = chunks.child[group, slot]
    for j in range(len(rows)):
        rows[j] = chunks.keys[np.uint64(children[j]), np.uint64(rest[j])] & _ROW


@compiled
def draw(order, ranks, drawn, law):
    """Draw rows by rank, and compute importance weights; return False if no row has a rank.

    ``ranks`` is a :class:`~rlbuf_td.kernels.rank_order.law.Ranks`, ``drawn`` a :class:`~rlbuf_td.kernels.strata.Draws`,
    ``law`` a :class:`~rlbuf_td.kernels.strata.DrawLaw`.
    """
    chunks = chunks_at(order)
    rows = chunks.head[ROWS]
    if rows == 0:
        return False
    uniform, index, weight = drawn
    total = _mass_of_all(rows, ranks)
    masses(uniform, total, law.step, uniform)
    last = 1
    rest, positions = np.empty_like(index), np.empty_like(index)
    for j in range(len(index)):
        rank = _rank_of_mass(uniform[j], rows, ranks)
        last = max(last, rank)
        rest[j] = rank - 1
        uniform[j] = math.log(rank)
    _find_rows(chunks, rest, positions, index)
    # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has the largest weight.
    power = ranks.alpha * law.beta
    scale = -power * math.log(last if law.norm == BY_BATCH else rows)
    if law.norm == BY_NONE:
        scale = law.beta * math.log(total / rows)
    for j in range(len(index)):
        weight[j] = math.exp(power * uniform[j] + scale)
    return True
