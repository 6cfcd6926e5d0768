"""Changing many rows of the chunked order at once."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlbuf_td.kernels._rank_chunks import ABSENT, GROUPS, ROWS, WIDTH, Chunks
from rlbuf_td.kernels._rank_edit_numba import (
    add_total,
    delete_key,
    insert_key,
    merge_chunks,
    merge_groups,
    new_chunk_after,
    rebalance,
    rebuild_totals,
    split_chunk,
)
from rlbuf_td.kernels._rank_find_numba import count_below, find_place, find_places, key_of, next_bound

# Rows that are found in lockstep before they are changed one by one: enough to overlap cache misses, few enough for
# their scratch space to stay in the first cache.
BLOCK = 256


@njit(cache=True, nogil=True)
def update_rows(st: Chunks, rows: np.ndarray, bits: np.ndarray) -> None:
    """Give each row a magnitude (as float bits). Rows of -1 are skipped; of equal rows the last one counts."""
    keys = np.empty(BLOCK, np.int64)
    pos = np.empty(BLOCK, np.int64)
    slot = np.empty(BLOCK, np.int64)
    for start in range(0, len(rows), BLOCK):
        stop = min(start + BLOCK, len(rows))
        n = 0
        for i in range(start, stop):
            row = rows[i]
            if row >= 0 and st.bits[row] != ABSENT:
                keys[n] = key_of(st.bits[row], row)
                st.bits[row] = ABSENT
                n += 1
        _delete_block(st, keys, pos, slot, n)
        n = 0
        for i in range(stop - 1, start - 1, -1):
            row = rows[i]
            if row >= 0 and st.bits[row] == ABSENT:
                st.bits[row] = bits[i]
                keys[n] = key_of(bits[i], row)
                n += 1
        _insert_block(st, keys, pos, slot, n)


@njit(cache=True, nogil=True)
def _delete_block(st: Chunks, keys: np.ndarray, pos: np.ndarray, slot: np.ndarray, n: int) -> None:
    find_places(st, keys, pos, slot, n)
    for i in range(n):
        # Nothing merges before all are deleted: the places stay right.
        slot[i] = delete_key(st, pos[i], slot[i], keys[i])
    for i in range(n):
        if slot[i]:
            rebalance(st, keys[i])


@njit(cache=True, nogil=True)
def _insert_block(st: Chunks, keys: np.ndarray, pos: np.ndarray, slot: np.ndarray, n: int) -> None:
    find_places(st, keys, pos, slot, n)
    moved = False
    for i in range(n):
        p, s = pos[i], slot[i]
        if moved:
            p, s = find_place(st, keys[i])
        moved |= insert_key(st, p, s, keys[i])


@njit(cache=True, nogil=True)
def take_range(st: Chunks, start: int, stop: int) -> np.ndarray:
    """Mark rows ``start .. stop - 1`` absent and return the keys that must now be deleted."""
    keys = np.empty(stop - start, np.int64)
    n = 0
    for row in range(start, stop):
        if st.bits[row] != ABSENT:
            keys[n] = key_of(st.bits[row], row)
            st.bits[row] = ABSENT
            n += 1
    return keys[:n]


@njit(cache=True, nogil=True)
def delete_sorted(st: Chunks, keys: np.ndarray) -> None:
    """Delete many keys, given in ascending order: each group is visited once."""
    i = 0
    while i < len(keys):
        p, s = find_place(st, keys[i])
        i = _delete_in_group(st, p, s, keys, i)
        g = st.top_group[p]
        s = 0
        while s < st.size[g]:
            if not merge_chunks(st, g, s):
                s += 1
        while merge_groups(st, p):
            pass
        while merge_groups(st, p - 1):
            p -= 1


@njit(cache=True, nogil=True)
def _delete_in_group(st: Chunks, p: int, s: int, keys: np.ndarray, i: int) -> int:
    g = st.top_group[p]
    size = st.size[g]
    gone = 0
    while s < size:
        bound = next_bound(st, p, s)
        begin = i
        while i < len(keys) and keys[i] < bound:
            i += 1
        if i > begin:
            _delete_in_chunk(st, st.child[g, s], keys, begin, i)
            gone += i - begin
        s += 1
        st.before[g, s] -= gone
    add_total(st, p, -gone)
    st.head[ROWS] -= gone
    return i


@njit(cache=True, nogil=True)
def _delete_in_chunk(st: Chunks, c: int, keys: np.ndarray, begin: int, end: int) -> None:
    n = st.fill[c]
    kept = count_below(st.keys, c, n, keys[begin])
    i = begin
    for t in range(kept, n):
        key = st.keys[c, t]
        if i < end and key == keys[i]:
            i += 1
        else:
            st.keys[c, kept] = key
            kept += 1
    st.fill[c] = kept


@njit(cache=True, nogil=True)
def insert_range(st: Chunks, start: int, stop: int, bits: int) -> None:
    """Insert rows ``start .. stop - 1``, all absent, at one magnitude.

    No other key lies between theirs, so whole chunks are filled at once. Lower bounds of chunks may lie between them.
    """
    for row in range(start, stop):
        st.bits[row] = bits
    st.head[ROWS] += stop - start
    key = key_of(bits, start)
    last = key_of(bits, stop - 1)
    while key <= last:
        p, s = find_place(st, key)
        end = min(last, next_bound(st, p, s) - 1)
        c = st.child[st.top_group[p], s]
        n = st.fill[c]
        at = count_below(st.keys, c, n, key)
        above = end
        if at < n and n + end - key >= WIDTH:
            above = st.keys[c, at]
            split_chunk(st, p, s, at, above)
            n = at
        elif n == WIDTH:
            new_chunk_after(st, p, s, key, 0, 0)
            n = 0
            at = 0
        p, s = find_place(st, key)
        key = _insert_run(st, p, s, at, key, min(end, key + WIDTH - n - 1))
        if key > end:
            rebalance(st, end)
        rebalance(st, above)


@njit(cache=True, nogil=True)
def _insert_run(st: Chunks, p: int, s: int, at: int, key: int, end: int) -> int:
    """Put the keys ``key .. end`` into one chunk that has room, at ``at``; return the key after them."""
    g = st.top_group[p]
    c = st.child[g, s]
    n = st.fill[c]
    count = end - key + 1
    for t in range(n - 1, at - 1, -1):
        st.keys[c, t + count] = st.keys[c, t]
    for t in range(count):
        st.keys[c, at + t] = key + t
    st.fill[c] = n + count
    for t in range(s + 1, st.size[g] + 1):
        st.before[g, t] += count
    add_total(st, p, count)
    return end + 1


@njit(cache=True, nogil=True)
def keys_of(bits: np.ndarray) -> np.ndarray:
    """Keys of all rows that have a magnitude, by row."""
    keys = np.empty(len(bits), np.int64)
    n = 0
    for row in range(len(bits)):
        if bits[row] != ABSENT:
            keys[n] = key_of(bits[row], row)
            n += 1
    return keys[:n]


@njit(cache=True, nogil=True)
def append_sorted(st: Chunks, keys: np.ndarray) -> None:
    """Append ascending keys, all above those present, leaving each chunk some room."""
    room = 3 * WIDTH // 4
    p = st.head[GROUPS] - 1
    s = st.size[st.top_group[p]] - 1
    for begin in range(0, len(keys), room):
        count = min(room, len(keys) - begin)
        if begin > 0:
            p, s = new_chunk_after(st, p, s, keys[begin], 0, count)
        else:
            g = st.top_group[p]
            st.before[g, s + 1] += count
            add_total(st, p, count)
        c = st.child[st.top_group[p], s]
        for t in range(count):
            st.keys[c, t] = keys[begin + t]
        st.fill[c] = count
    st.head[ROWS] += len(keys)
    if len(keys):
        rebalance(st, keys[-1])
    rebuild_totals(st)
