"""Draws rows by rank and finds the ranks of rows, on the CPU.

:mod:`rlbuf_td.kernels.rank_order.chunks` explains chunks and positions. The argument ``order`` is the result of
:func:`~rlbuf_td.kernels.rank_order.chunks.addresses`. The searches of a batch advance together, without branches, so
that their cache misses overlap.
"""

import math

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import address_of, bare, compiled, inlined, load, masses, pointer, prefetch
from rlbuf_td.kernels.rank_order.chunks import CHANGED, ORDER, ROWS, USED, WIDTH, Chunks
from rlbuf_td.kernels.rank_order.law import HEAD, Ranks
from rlbuf_td.kernels.strata import BY_BATCH, BY_NONE, DrawLaw, Draws

#: Searches that advance together: enough to overlap cache misses, few enough for the scratch memory to stay in cache.
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
        first=carray(pointer(at.first), at.positions, np.int64),
        chunk=carray(pointer(at.chunk), at.positions, np.int32),
        size=carray(pointer(at.size), at.positions, np.int32),
        before=carray(pointer(at.before), at.positions, np.int64),
    )


@bare
def key_of(bits, row):
    """Return the sort key of a row: larger magnitudes (``bits``, a float32 read as int32) have smaller keys."""
    return ((TOP_BIT - np.int64(bits)) << 32) | np.int64(row)


@bare
def search(bounds, used, wanted, positions):
    """For each value in ``wanted``, find the last of ``used`` positions with ``bounds[position] <= value``."""
    positions[:] = 0
    step = 1
    while step < used:
        step *= 2
    step >>= 1
    while step > 0:
        for i in range(len(wanted)):
            position = positions[i]
            positions[i] = position + step * (bounds[np.uint64(position + step)] <= wanted[i])
        step >>= 1


@bare
def key_address(chunks, position, at):
    return address_of(chunks.keys) + 8 * (np.int64(chunks.chunk[position]) * WIDTH + at)


@bare
def fetch_chunk(chunks, position):
    """Prefetch a chunk, except the last quarter, which is seldom in use."""
    address = key_address(chunks, position, 0)
    for line in range(0, 6 * WIDTH, 64):
        prefetch(address + line)


@bare
def count_below(chunks, position, key):
    """Return how many keys of a chunk are smaller than ``key``."""
    # Unsigned indices avoid numba's check for negative indices, which would prevent vectorisation.
    chunk, count = np.uint64(chunks.chunk[position]), 0
    for i in range(chunks.size[position]):
        count += chunks.keys[chunk, np.uint64(i)] < key
    return count


@bare
def _count(chunks):
    """Count the keys before each chunk, if keys have changed since the last look-up."""
    if chunks.head[CHANGED]:
        total = np.int64(0)
        for position in range(chunks.head[USED]):
            chunks.before[np.uint64(position)] = total
            total += chunks.size[np.uint64(position)]
        chunks.head[CHANGED] = 0


@compiled
def ranks_of(order, rows, ranks):
    """Write each row's rank to ``ranks``, 0 for rows without a magnitude; return False if a row is out of range."""
    chunks = chunks_at(order)
    inside = True
    for row in rows:
        inside &= (row >= 0) & (row < len(chunks.bits))
    if not inside:
        return False
    _count(chunks)
    keys, positions = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for start in range(0, len(rows), BLOCK):
        count = min(BLOCK, len(rows) - start)
        for i in range(count):
            keys[i] = key_of(max(chunks.bits[rows[start + i]], 0), rows[start + i])
        search(chunks.first, chunks.head[USED], keys[:count], positions[:count])
        for i in range(count):
            if i + AHEAD < count:
                fetch_chunk(chunks, positions[i + AHEAD])
            rank = chunks.before[positions[i]] + count_below(chunks, positions[i], keys[i]) + 1
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
    _count(chunks)
    uniform, index, weight = drawn
    total = _mass_of_all(rows, ranks)
    masses(uniform, total, law.step)
    last, before = 1, np.empty_like(index)  # the number of rows before each drawn one
    for j in range(len(index)):
        rank = _rank_of_mass(uniform[j], rows, ranks)
        last = max(last, rank)
        before[j] = rank - 1
        uniform[j] = math.log(rank)
    search(chunks.before, chunks.head[USED], before, index)
    for j in range(len(index)):
        position = np.uint64(index[j])
        at = np.uint64(before[j] - chunks.before[position])
        index[j] = chunks.keys[np.uint64(chunks.chunk[position]), at] & _ROW
    # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has the largest weight.
    power = ranks.alpha * law.beta
    scale = -power * math.log(last if law.norm == BY_BATCH else rows)
    if law.norm == BY_NONE:
        scale = law.beta * math.log(total / rows)
    for j in range(len(index)):
        weight[j] = math.exp(power * uniform[j] + scale)
    return True


@compiled
def draw_at(order, ranks: Ranks, uniform, rows, importance, batch, law: DrawLaw):
    """Call :func:`draw` for memory at addresses."""
    drawn = Draws(
        uniform=carray(pointer(uniform), batch, np.float64),
        rows=carray(pointer(rows), batch, np.int64),
        importance=carray(pointer(importance), batch, np.float32),
    )
    return draw(carray(pointer(order), 1, ORDER), ranks, drawn, law)
