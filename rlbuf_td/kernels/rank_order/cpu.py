"""Reading the chunked order on the CPU: key to place, rank to row, row to rank, and drawing.

Batches go down in lockstep (levels outside, entries inside, no branches), so that their cache misses overlap.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlbuf_td.kernels.compiled import bare, compiled, masses, prefetch_item
from rlbuf_td.kernels.rank_order.chunks import GROUPS, NO_KEY, ROWS, WIDTH, Chunks
from rlbuf_td.kernels.rank_order.law import HEAD

#: Rows that are found in lockstep: enough to overlap cache misses, few enough for the scratch space to stay in cache.
BLOCK = 256
_TOP_BIT = 0x7FFFFFFF
_ROW = 0xFFFFFFFF


@bare
def key_of(bits: int, row: int) -> Any:
    """Sort key of a row: the larger the magnitude the smaller, ties by row. Positive float bits sort as floats do."""
    return ((_TOP_BIT - np.int64(bits)) << 32) | np.int64(row)


@bare
def top_span(groups: int) -> int:
    """Half of the smallest power of two that holds ``groups``: the first step of a search."""
    step = 1
    while step * 2 < groups:
        step *= 2
    return step if groups > 1 else 0


@bare
def find_place(st: Chunks, key: int) -> tuple[int, int]:
    """Position in the top and slot of the chunk that holds ``key``, or would."""
    p = 0
    step = top_span(st.head[GROUPS])
    while step > 0:
        if st.top_first[p + step] <= key:
            p += step
        step >>= 1
    g = st.top_group[p]
    s = 0
    step = WIDTH // 2
    while step > 0:
        if st.first[g, s + step] <= key:
            s += step
        step >>= 1
    return p, s


@bare
def next_bound(st: Chunks, p: int, s: int) -> int:
    """Lower bound of the chunk after slot ``s``: all keys of slot ``s`` lie below it."""
    g = st.top_group[p]
    if s + 1 < st.size[g]:
        return st.first[g, s + 1]
    if p + 1 < st.head[GROUPS]:
        return st.top_first[p + 1]
    return NO_KEY


@bare
def find_places(st: Chunks, keys: np.ndarray, pos: np.ndarray, slot: np.ndarray, n: int) -> None:
    """``find_place`` for ``keys[:n]``, in lockstep."""
    top_first, top_group, first = st.top_first, st.top_group, st.first
    for i in range(n):
        pos[i] = 0
        slot[i] = 0
    step = top_span(st.head[GROUPS])
    while step > 0:
        for i in range(n):
            p = pos[i]
            pos[i] = p + step * (top_first[np.uint64(p + step)] <= keys[i])
        step >>= 1
    step = WIDTH // 2
    while step > 0:
        for i in range(n):
            s = slot[i]
            g = top_group[np.uint64(pos[i])]
            slot[i] = s + step * (first[np.uint64(g), np.uint64(s + step)] <= keys[i])
        step >>= 1


@bare
def fetch_chunk(keys: np.ndarray, chunk: int) -> None:
    """Start loading a chunk that is needed soon: its cache lines then arrive together.

    Of its 16 lines the last quarter is seldom in use; loading it costs more than it saves.
    """
    for column in range(0, 3 * WIDTH // 4, 8):
        prefetch_item(keys, chunk, column)


@bare
def count_below(keys: np.ndarray, c: int, n: int, key: int) -> int:
    """How many of the first ``n`` keys of chunk ``c`` are smaller than ``key``."""
    count = 0
    for t in range(n):
        count += keys[np.uint64(c), np.uint64(t)] < key
    return count


@bare
def find_in_chunks(
    st: Chunks, wanted: np.ndarray, pos: np.ndarray, slot: np.ndarray, chunk: np.ndarray, at: np.ndarray, n: int
) -> None:
    """Chunks at the places given, and positions therein of keys that are there, in lockstep."""
    keys, fill, child, top_group = st.keys, st.fill, st.child, st.top_group
    for i in range(n):
        chunk[i] = child[np.uint64(top_group[np.uint64(pos[i])]), np.uint64(slot[i])]
        at[i] = 0
    step = WIDTH // 2
    while step > 0:
        for i in range(n):
            c = np.uint64(chunk[i])
            t = at[i] + step
            inside = t < fill[c]
            at[i] += step * (inside & (keys[c, np.uint64(t * inside)] <= wanted[i]))
        step >>= 1


@bare
def _find_groups(head: np.ndarray, top_tree: np.ndarray, rest: np.ndarray, pos: np.ndarray) -> None:
    """Write the positions of the groups that hold ranks into ``pos``, and reduce ``rest`` to ranks in these groups."""
    n = len(rest)
    groups = head[GROUPS]
    step = 1
    while step * 2 <= groups:
        step *= 2
    while step > 0:
        for i in range(n):
            # Past the last group the tree's nodes hold what FULL holds in a group: they are never entered.
            p = pos[i] + step
            inside = p < groups
            mass = top_tree[np.uint64(p * inside)]
            go = inside & (mass <= rest[i])
            pos[i] += step * go
            rest[i] -= mass * go
        step >>= 1


@compiled
def rows_at(
    head: np.ndarray,
    top_tree: np.ndarray,
    top_group: np.ndarray,
    before: np.ndarray,
    child: np.ndarray,
    keys: np.ndarray,
    ranks: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Write the row of each rank (1 the largest magnitude) into ``rows``. Ranks must lie in ``1 .. N``.

    Takes its arrays one by one: handing over the whole state costs more than a third of the search.
    """
    n = len(ranks)
    pos = np.zeros(n, np.int64)
    rest = np.empty(n, np.int64)
    for i in range(n):
        rest[i] = ranks[i] - 1
        rows[i] = 0
    _find_groups(head, top_tree, rest, pos)
    slot = rows
    step = WIDTH // 2
    while step > 0:
        for i in range(n):
            s = slot[i]
            g = top_group[np.uint64(pos[i])]
            slot[i] = s + step * (before[np.uint64(g), np.uint64(s + step)] <= rest[i])
        step >>= 1
    for i in range(n):
        g = np.uint64(top_group[np.uint64(pos[i])])
        s = np.uint64(slot[i])
        rest[i] -= before[g, s]
        pos[i] = child[g, s]
    for i in range(n):
        rows[i] = keys[np.uint64(pos[i]), np.uint64(rest[i])] & _ROW


@compiled
def ranks_of(st: Chunks, rows: np.ndarray, ranks: np.ndarray) -> bool:
    """Write the rank of each row (1 the largest, 0 for none) into ``ranks``; False if a row is out of range."""
    inside = True
    for row in rows:
        inside &= (row >= 0) & (row < len(st.bits))
    if not inside:
        return False
    pos = np.empty(BLOCK, np.int64)
    slot = np.empty(BLOCK, np.int64)
    chunk = np.empty(BLOCK, np.int64)
    keys = np.empty(BLOCK, np.int64)
    for start in range(0, len(rows), BLOCK):
        n = min(BLOCK, len(rows) - start)
        for i in range(n):
            keys[i] = key_of(max(st.bits[rows[start + i]], 0), rows[start + i])
        at = ranks[start : start + n]
        find_places(st, keys, pos, slot, n)
        find_in_chunks(st, keys, pos, slot, chunk, at, n)
        for i in range(n):
            p = pos[i]
            rank = at[i] + 1 + st.before[st.top_group[p], slot[i]]
            while p > 0:
                rank += st.top_tree[p]
                p -= p & -p
            at[i] = rank if st.bits[rows[start + i]] >= 0 else 0
    return True


# -- drawing: uniform numbers to ranks, ranks to rows, ranks to importance weights

BUFFER, BATCH = 0, 1


@bare
def mass_of_all(rows: int, law: np.ndarray, alpha: float, shift: float) -> float:
    """``H_N``: see :func:`rlbuf_td.kernels.rank_order.law.mass`."""
    if rows <= HEAD:
        return law[rows - 1]
    x = rows + 0.5
    bend = 1.0 - alpha
    y = math.log(x)
    if bend != 0.0:
        y = math.expm1(bend * y) / bend
    return shift + y + alpha / 24.0 * x ** (-alpha - 1.0)


@bare
def rank_of_mass(mass: float, rows: int, law: np.ndarray, alpha: float, shift: float) -> Any:
    """See :func:`rlbuf_td.kernels.rank_order.law.ranks_of_mass`."""
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


@compiled
def draw(
    head: np.ndarray,
    top_tree: np.ndarray,
    top_group: np.ndarray,
    before: np.ndarray,
    child: np.ndarray,
    keys: np.ndarray,
    uniform: np.ndarray,
    law: np.ndarray,
    alpha: float,
    shift: float,
    beta: float,
    step: int,
    norm: int,
    index: np.ndarray,
    weight: np.ndarray,
) -> bool:
    """Draw rows and their importance weights; return whether there are rows to draw from.

    ``step``: see :func:`rlbuf_td.kernels.strata.step_of`.
    """
    rows = head[ROWS]
    if rows == 0:
        return False
    batch = len(uniform)
    ranks, mass = np.empty(batch, np.int64), np.empty(batch)
    total = mass_of_all(rows, law, alpha, shift)
    masses(uniform, total, step, mass)
    last = 1
    for j in range(batch):
        ranks[j] = rank_of_mass(mass[j], rows, law, alpha, shift)
        last = max(last, ranks[j])
    rows_at(head, top_tree, top_group, before, child, keys, ranks, index)
    # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has the largest weight.
    power = alpha * beta
    log_scale = -power * math.log(rows if norm == BUFFER else last)
    if norm != BUFFER and norm != BATCH:
        log_scale = beta * math.log(total / rows)
    for j in range(batch):
        weight[j] = math.exp(power * math.log(ranks[j]) + log_scale)
    return True
