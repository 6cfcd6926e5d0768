"""Draws rows by rank and finds the ranks of rows, on the CPU.

:mod:`rlbuf_td.kernels.rank_order.chunks` explains chunks, groups and slots. The argument ``order`` is the result of
:func:`~rlbuf_td.kernels.rank_order.chunks.addresses`. The searches of a batch advance together through the levels
(groups, chunks, slots), without branches, so that their cache misses overlap.
"""

import math

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import address_of, bare, compiled, inlined, masses, pointer, prefetch
from rlbuf_td.kernels.rank_order.chunks import GROUPS, ROWS, WIDTH, Chunks
from rlbuf_td.kernels.rank_order.law import HEAD

#: Searches that descend together: enough to overlap cache misses, few enough for the scratch memory to stay in cache.
BLOCK = 256
#: How many searches ahead chunks are prefetched.
AHEAD = 4
TOP_BIT = 0x7FFFFFFF
_ROW = 0xFFFFFFFF


@inlined
def chunks_at(order):
    rows, chunks, groups, top = order[0], order[1], order[2], order[3]
    return Chunks(
        carray(pointer(order[4]), 3, np.int64),
        carray(pointer(order[5]), rows, np.int32),
        carray(pointer(order[6]), (chunks, WIDTH), np.int64),
        carray(pointer(order[7]), (groups, WIDTH), np.int64),
        carray(pointer(order[8]), (groups, WIDTH), np.int32),
        carray(pointer(order[9]), (groups, WIDTH + 1), np.int32),
        carray(pointer(order[10]), groups, np.int32),
        carray(pointer(order[11]), top, np.int64),
        carray(pointer(order[12]), top, np.int32),
        carray(pointer(order[13]), top, np.int64),
        carray(pointer(order[14]), top, np.int64),
    )


@bare
def key_of(bits, row):
    """Return the sort key of a row: larger magnitudes (``bits``, a float32 read as int32) have smaller keys."""
    return ((TOP_BIT - np.int64(bits)) << 32) | np.int64(row)


@bare
def _search_top(bounds, groups, wanted, pos):
    """For each value in ``wanted``, write the last position with ``bounds[position] <= value`` to ``pos``."""
    pos[:] = 0
    step = 1
    while step < groups:
        step *= 2
    step >>= 1
    while step > 0:
        for i in range(len(wanted)):
            p = pos[i]
            pos[i] = p + step * (bounds[np.uint64(p + step)] <= wanted[i])
        step >>= 1


@bare
def _search_groups(bounds, top_group, wanted, pos, slot):
    """For each value, write the last slot of the group at ``pos`` with ``bounds[group, slot] <= value`` to ``slot``."""
    slot[:] = 0
    step = WIDTH // 2
    while step > 0:
        for i in range(len(wanted)):
            s = slot[i]
            g = top_group[np.uint64(pos[i])]
            slot[i] = s + step * (bounds[np.uint64(g), np.uint64(s + step)] <= wanted[i])
        step >>= 1


@bare
def find_places(st, keys, pos, slot):
    """For each key, write the position of its group to ``pos``, and the slot of its chunk in the group to ``slot``."""
    _search_top(st.top_first, st.head[GROUPS], keys, pos)
    _search_groups(st.first, st.top_group, keys, pos, slot)


@bare
def chunk_at(st, p, s):
    g = np.uint64(st.top_group[p])
    return st.child[g, s], st.before[g, s + 1] - st.before[g, s]


@bare
def key_address(st, c, at):
    return address_of(st.keys) + 8 * (c * np.int64(WIDTH) + at)


@bare
def fetch_chunk(st, p, s):
    """Prefetch a chunk, except the last quarter, which is seldom in use."""
    address = key_address(st, st.child[st.top_group[p], s], 0)
    for line in range(0, 6 * WIDTH, 64):
        prefetch(address + line)


@bare
def count_below(keys, c, n, key):
    """Return how many of the first ``n`` keys of chunk ``c`` are smaller than ``key``."""
    # Unsigned indices avoid numba's check for negative indices, which would prevent vectorisation.
    count = 0
    for t in range(n):
        count += keys[np.uint64(c), np.uint64(t)] < key
    return count


@compiled
def ranks_of(order, rows, ranks):
    """Write each row's rank to ``ranks``, 0 for rows without a magnitude; return False if a row is out of range."""
    st = chunks_at(order)
    ranks[:] = 0
    inside = True
    for row in rows:
        inside &= (row >= 0) & (row < len(st.bits))
    if not inside or st.head[ROWS] == 0:
        return inside
    keys, pos, slot = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for start in range(0, len(rows), BLOCK):
        n = min(BLOCK, len(rows) - start)
        for i in range(n):
            keys[i] = key_of(max(st.bits[rows[start + i]], 0), rows[start + i])
        find_places(st, keys[:n], pos[:n], slot[:n])
        for i in range(n):
            if i + AHEAD < n:
                fetch_chunk(st, pos[i + AHEAD], slot[i + AHEAD])
            c, fill = chunk_at(st, pos[i], slot[i])
            at = st.top_before[pos[i]] + st.before[st.top_group[pos[i]], slot[i]]
            rank = at + count_below(st.keys, c, fill, keys[i]) + 1
            ranks[start + i] = rank * (st.bits[rows[start + i]] >= 0)
    return True


@bare
def _mass_of_all(rows, law, alpha, shift):
    if rows <= HEAD:
        return law[rows - 1]
    x = rows + 0.5
    bend = 1.0 - alpha
    y = math.log(x)
    if bend != 0.0:
        y = math.expm1(bend * y) / bend
    return shift + y + alpha / 24.0 * x ** (-alpha - 1.0)


@bare
def _rank_of_mass(mass, rows, law, alpha, shift):
    if mass >= law[HEAD - 1]:
        y = mass - shift
        bend = 1.0 - alpha
        if bend != 0.0:
            y = math.log1p(max(bend * y, -1.0 + 2.0**-53)) / bend
        x = min(math.exp(min(y, 36.0)), 2.0**52)
        return min(max(np.int64(x - alpha / (24.0 * x) + 0.5), HEAD + 1), rows)
    below = 0
    step = HEAD // 2
    while step > 0:
        below += step * (law[np.uint64(below + step - 1)] <= mass)
        step >>= 1
    return min(below + 1, rows)


@bare
def _find_rows(st, rest, pos, rows):
    """Write the rows with the ranks ``rest + 1`` to ``rows``; overwrite ``rest`` and ``pos``."""
    slot = rows
    _search_top(st.top_before, st.head[GROUPS], rest, pos)
    for j in range(len(rows)):
        rest[j] -= st.top_before[np.uint64(pos[j])]
    _search_groups(st.before, st.top_group, rest, pos, slot)
    for j in range(len(rows)):
        g, s = np.uint64(st.top_group[np.uint64(pos[j])]), np.uint64(slot[j])
        rest[j] -= st.before[g, s]
        pos[j] = st.child[g, s]
    for j in range(len(rows)):
        rows[j] = st.keys[np.uint64(pos[j]), np.uint64(rest[j])] & _ROW


@compiled
def draw(order, law, alpha, shift, uniform, step, beta, mode, index, weight):
    """Draw rows by rank, and compute importance weights; return False if no row has a rank. Overwrites ``uniform``."""
    st = chunks_at(order)
    rows = st.head[ROWS]
    if rows == 0:
        return False
    total = _mass_of_all(rows, law, alpha, shift)
    masses(uniform, total, step, uniform)
    last = 1
    rest, pos = np.empty_like(index), np.empty_like(index)
    for j in range(len(index)):
        rank = _rank_of_mass(uniform[j], rows, law, alpha, shift)
        last = max(last, rank)
        rest[j] = rank - 1
        uniform[j] = math.log(rank)
    _find_rows(st, rest, pos, index)
    # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has the largest weight.
    power = alpha * beta
    scale = beta * math.log(total / rows) if mode == 2 else -power * math.log(last if mode == 1 else rows)
    for j in range(len(index)):
        weight[j] = math.exp(power * uniform[j] + scale)
    return True
