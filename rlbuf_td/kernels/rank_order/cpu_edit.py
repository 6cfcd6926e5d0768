"""Changing the chunked order: insert and delete one key, split and merge chunks and groups.

Cost: a move within one chunk, plus a step in one group (both at most ``WIDTH`` entries) and O(log N) in the top's
Fenwick tree. Only when a group splits or merges (once per thousands of keys at least) is the top moved, which
holds N / 8,000 entries or so.
"""

from __future__ import annotations

import numpy as np

from rlbuf_td.kernels.compiled import bare, move_items
from rlbuf_td.kernels.rank_order.chunks import (
    FULL,
    GROUPS,
    MERGE,
    NO_KEY,
    ROWS,
    SPARE_CHUNKS,
    SPARE_GROUPS,
    WIDTH,
    Chunks,
)
from rlbuf_td.kernels.rank_order.cpu import count_below, find_place

_HALF = WIDTH // 2


@bare
def add_count(before: np.ndarray, group: int, s: int, size: int, delta: int) -> None:
    """Count ``delta`` more keys in slot ``s``."""
    # Unsigned indices spare numba's test for negative ones, which would keep LLVM from vectorising.
    g = np.uint64(group)
    d = np.int32(delta)
    for t in range(np.uint64(s + 1), np.uint64(size + 1)):
        before[g, t] += d


@bare
def add_total(st: Chunks, p: int, delta: int) -> None:
    """Change the total of the group at position ``p`` in the top's Fenwick tree."""
    node = p + 1
    groups = st.head[GROUPS]
    while node <= groups:
        st.top_tree[node] += delta
        node += node & -node


@bare
def rebuild_totals(st: Chunks) -> None:
    """Make the Fenwick tree afresh from the groups' totals."""
    groups = st.head[GROUPS]
    for p in range(groups):
        g = st.top_group[p]
        st.top_tree[p + 1] = st.before[g, st.size[g]]
    for node in range(1, groups + 1):
        parent = node + (node & -node)
        if parent <= groups:
            st.top_tree[parent] += st.top_tree[node]


@bare
def split_group(st: Chunks, p: int) -> None:
    """Move the upper half of the full group at ``p`` into a new group at ``p + 1``."""
    g = st.top_group[p]
    st.head[SPARE_GROUPS] -= 1
    h = st.spare_group[st.head[SPARE_GROUPS]]
    base = st.before[g, _HALF]
    for t in range(_HALF):
        st.first[h, t] = st.first[g, _HALF + t]
        st.child[h, t] = st.child[g, _HALF + t]
        st.first[g, _HALF + t] = NO_KEY
    for t in range(_HALF + 1):
        st.before[h, t] = st.before[g, _HALF + t] - base
    for t in range(_HALF + 1, WIDTH + 1):
        st.before[g, t] = FULL
    st.size[g] = _HALF
    st.size[h] = WIDTH - _HALF
    groups = st.head[GROUPS]
    for t in range(groups, p + 1, -1):
        st.top_first[t] = st.top_first[t - 1]
        st.top_group[t] = st.top_group[t - 1]
    st.top_first[p + 1] = st.first[h, 0]
    st.top_group[p + 1] = h
    st.head[GROUPS] = groups + 1
    rebuild_totals(st)


@bare
def merge_chunks(st: Chunks, g: int, s: int) -> bool:
    """Merge the chunks in slots ``s`` and ``s + 1`` if both exist and they are small."""
    size = st.size[g]
    if s < 0 or s + 1 >= size or st.before[g, s + 2] - st.before[g, s] > MERGE:
        return False
    c = st.child[g, s]
    d = st.child[g, s + 1]
    n = st.fill[c]
    for t in range(st.fill[d]):
        st.keys[c, n + t] = st.keys[d, t]
    st.fill[c] = n + st.fill[d]
    st.fill[d] = 0
    st.spare[st.head[SPARE_CHUNKS]] = d
    st.head[SPARE_CHUNKS] += 1
    for t in range(s + 1, size - 1):
        st.first[g, t] = st.first[g, t + 1]
        st.child[g, t] = st.child[g, t + 1]
    for t in range(s + 1, size):
        st.before[g, t] = st.before[g, t + 1]
    st.first[g, size - 1] = NO_KEY
    st.before[g, size] = FULL
    st.size[g] = size - 1
    return True


@bare
def merge_groups(st: Chunks, p: int) -> bool:
    """Merge the groups at ``p`` and ``p + 1`` if both exist and they are small."""
    groups = st.head[GROUPS]
    if p < 0 or p + 1 >= groups:
        return False
    g = st.top_group[p]
    h = st.top_group[p + 1]
    n, m = st.size[g], st.size[h]
    if n + m > MERGE:
        return False
    total = st.before[g, n]
    for t in range(m):
        st.first[g, n + t] = st.first[h, t]
        st.child[g, n + t] = st.child[h, t]
        st.first[h, t] = NO_KEY
    for t in range(m + 1):
        st.before[g, n + t] = total + st.before[h, t]
        st.before[h, t] = FULL
    st.size[g] = n + m
    st.size[h] = 0
    st.spare_group[st.head[SPARE_GROUPS]] = h
    st.head[SPARE_GROUPS] += 1
    for t in range(p + 1, groups - 1):
        st.top_first[t] = st.top_first[t + 1]
        st.top_group[t] = st.top_group[t + 1]
    st.top_first[groups - 1] = NO_KEY
    st.head[GROUPS] = groups - 1
    rebuild_totals(st)
    merge_chunks(st, g, n - 1)
    return True


@bare
def rebalance(st: Chunks, key: int) -> None:
    """Restore the lower bounds on chunk and group sizes around the place of ``key``."""
    p, s = find_place(st, key)
    g = st.top_group[p]
    while merge_chunks(st, g, s):
        pass
    while merge_chunks(st, g, s - 1):
        s -= 1
    while merge_groups(st, p):
        pass
    while merge_groups(st, p - 1):
        p -= 1


@bare
def new_chunk_after(st: Chunks, p: int, s: int, bound: int, moved: int, added: int) -> tuple[int, int]:
    """Put an empty chunk with lower bound ``bound`` after slot ``s``; return the place of the chunk.

    The counts are told beforehand: the new chunk will take the last ``moved`` keys of slot ``s``, and ``added`` others.
    """
    if st.size[st.top_group[p]] == WIDTH:
        low = st.first[st.top_group[p], s]
        split_group(st, p)
        merge_groups(st, p + 1)
        merge_groups(st, p - 1)
        p, s = find_place(st, low)
    g = st.top_group[p]
    size = st.size[g]
    for t in range(size, s + 1, -1):
        st.first[g, t] = st.first[g, t - 1]
        st.child[g, t] = st.child[g, t - 1]
    for t in range(size + 1, s + 1, -1):
        st.before[g, t] = st.before[g, t - 1] + added
    st.head[SPARE_CHUNKS] -= 1
    c = st.spare[st.head[SPARE_CHUNKS]]
    st.fill[c] = 0
    st.first[g, s + 1] = bound
    st.child[g, s + 1] = c
    st.before[g, s + 1] = st.before[g, s] + st.fill[st.child[g, s]] - moved
    st.size[g] = size + 1
    if added:
        add_total(st, p, added)
    return p, s + 1


@bare
def split_chunk(st: Chunks, p: int, s: int, cut: int, bound: int) -> tuple[int, int]:
    """Move the keys from ``cut`` on into a new chunk after slot ``s``; return its place."""
    c = st.child[st.top_group[p], s]
    moved = st.fill[c] - cut
    p, s = new_chunk_after(st, p, s, bound, moved, 0)
    d = st.child[st.top_group[p], s]
    for t in range(moved):
        st.keys[d, t] = st.keys[c, cut + t]
    st.fill[c] = cut
    st.fill[d] = moved
    return p, s


@bare
def insert_key(st: Chunks, p: int, s: int, key: int) -> bool:
    """Insert a key at its place. Returns whether chunks moved, so that places found before no longer hold."""
    keys = st.keys
    c = st.child[st.top_group[p], s]
    n = st.fill[c]
    bound = 0
    if n == WIDTH:
        # At an end, cut there: monotone insertions leave full chunks behind, not half full ones.
        cut = _HALF
        if key > keys[c, WIDTH - 1]:
            cut = WIDTH
        elif key < keys[c, 0]:
            cut = 0
        bound = key if cut == WIDTH else keys[c, cut]
        split_chunk(st, p, s, cut, bound)
        p, s = find_place(st, key)
        c = st.child[st.top_group[p], s]
        n = st.fill[c]
    g = st.top_group[p]
    at = count_below(keys, c, n, key)
    move_items(keys, c, at + 1, at, n - at)
    keys[c, at] = key
    st.fill[c] = n + 1
    add_count(st.before, g, s, st.size[g], 1)
    add_total(st, p, 1)
    st.head[ROWS] += 1
    if bound > 0:
        rebalance(st, bound)
        rebalance(st, bound - 1)
    return bound > 0


@bare
def is_small(st: Chunks, g: int, s: int) -> bool:
    """Whether the chunk in slot ``s`` should merge with a neighbour."""
    if s > 0 and st.before[g, s + 1] - st.before[g, s - 1] <= MERGE:
        return True
    return s + 1 < st.size[g] and st.before[g, s + 2] - st.before[g, s] <= MERGE


@bare
def delete_key(st: Chunks, p: int, s: int, key: int) -> bool:
    """Delete a key at its place. Returns whether its chunk and a neighbour should now merge."""
    keys = st.keys
    g = st.top_group[p]
    c = st.child[g, s]
    n = st.fill[c]
    at = count_below(keys, c, n, key)
    move_items(keys, c, at, at + 1, n - at - 1)
    st.fill[c] = n - 1
    add_count(st.before, g, s, st.size[g], -1)
    add_total(st, p, -1)
    st.head[ROWS] -= 1
    return is_small(st, g, s)
