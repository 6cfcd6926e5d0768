"""Changing many rows of the chunked order at once."""

from __future__ import annotations

import numpy as np

from rlbuf_td.kernels.compiled import bare, compiled, move_items
from rlbuf_td.kernels.rank_order.chunks import ABSENT, GROUPS, ROWS, WIDTH, Chunks
from rlbuf_td.kernels.rank_order.cpu import (
    BLOCK,
    count_below,
    fetch_chunk,
    find_in_chunks,
    find_place,
    find_places,
    key_of,
    next_bound,
)
from rlbuf_td.kernels.rank_order.cpu_edit import (
    add_count,
    add_total,
    delete_key,
    insert_key,
    is_small,
    new_chunk_after,
    rebalance,
    rebuild_totals,
    split_chunk,
)

#: How many chunks ahead of the one that is being changed are fetched.
AHEAD = 4
#: In place of a slot: its chunk and a neighbour should now merge.
SMALL = -1
_LARGEST = np.float32(3.4028234663852886e38)


@compiled
def acceptable(index: np.ndarray, td_error: np.ndarray, rows: int) -> bool:
    """Whether every row lies in ``[-1, rows)`` and every error is finite."""
    good = True
    for i in range(len(index)):
        good &= (index[i] >= -1) & (index[i] < rows) & (abs(td_error[i]) <= _LARGEST)
    return good


@compiled
def update_rows(st: Chunks, index: np.ndarray, td_error: np.ndarray) -> float:
    """Give rows the magnitudes of float32 errors; return the largest. Skips -1; of equal rows the last one counts."""
    magnitude = np.abs(td_error)
    bits = magnitude.view(np.int32)
    keys = np.empty(BLOCK, np.int64)
    pos = np.empty(BLOCK, np.int64)
    slot = np.empty(BLOCK, np.int64)
    largest = np.float32(-1.0)
    for start in range(0, len(index), BLOCK):
        stop = min(start + BLOCK, len(index))
        n = 0
        for i in range(start, stop):
            row = index[i]
            if row >= 0:
                largest = max(largest, magnitude[i])
                if st.bits[row] >= 0:
                    keys[n] = key_of(st.bits[row], row)
                    st.bits[row] = ABSENT
                    n += 1
        _delete_block(st, keys, pos, slot, n)
        n = 0
        for i in range(stop - 1, start - 1, -1):
            row = index[i]
            if row >= 0 and st.bits[row] < 0:
                st.bits[row] = bits[i]
                keys[n] = key_of(bits[i], row)
                n += 1
        _insert_block(st, keys, pos, slot, n)
    return np.float64(largest)


@bare
def _delete_block(st: Chunks, keys: np.ndarray, pos: np.ndarray, slot: np.ndarray, n: int) -> None:
    find_places(st, keys, pos, slot, n)
    for i in range(n):
        if i + AHEAD < n:
            fetch_chunk(st.keys, st.child[st.top_group[pos[i + AHEAD]], slot[i + AHEAD]])
        # Nothing merges before all are deleted: the places stay right.
        if delete_key(st, pos[i], slot[i], keys[i]):
            slot[i] = SMALL
    for i in range(n):
        if slot[i] == SMALL:
            rebalance(st, keys[i])


@bare
def _insert_block(st: Chunks, keys: np.ndarray, pos: np.ndarray, slot: np.ndarray, n: int) -> None:
    find_places(st, keys, pos, slot, n)
    moved = False
    for i in range(n):
        if i + AHEAD < n:
            fetch_chunk(st.keys, st.child[st.top_group[pos[i + AHEAD]], slot[i + AHEAD]])
        p, s = pos[i], slot[i]
        if moved:
            p, s = find_place(st, keys[i])
        moved |= insert_key(st, p, s, keys[i])


@compiled
def take_range(st: Chunks, start: int, stop: int) -> np.ndarray:
    """Mark rows ``start .. stop - 1`` absent and return the keys that must now be deleted."""
    keys = np.empty(stop - start, np.int64)
    n = 0
    for row in range(start, stop):
        if st.bits[row] >= 0:
            keys[n] = key_of(st.bits[row], row)
            st.bits[row] = ABSENT
            n += 1
    return keys[:n]


@compiled
def delete_sorted(st: Chunks, keys: np.ndarray) -> None:
    """Delete many keys, given in ascending order."""
    pos = np.empty(BLOCK, np.int64)
    slot = np.empty(BLOCK, np.int64)
    chunk = np.empty(BLOCK, np.int64)
    at = np.empty(BLOCK, np.int64)
    for start in range(0, len(keys), BLOCK):
        block = keys[start : start + BLOCK]
        find_places(st, block, pos, slot, len(block))
        find_in_chunks(st, block, pos, slot, chunk, at, len(block))
        _delete_sorted_block(st, pos, slot, chunk, at, len(block))
        for i in range(len(block)):
            if slot[i] == SMALL:
                rebalance(st, block[i])


@bare
def _delete_sorted_block(
    st: Chunks, pos: np.ndarray, slot: np.ndarray, chunk: np.ndarray, at: np.ndarray, n: int
) -> None:
    i = 0
    while i < n:
        c = chunk[i]
        begin = i
        # What lies between one deleted key and the next moves down by the number deleted so far.
        while i < n and chunk[i] == c:
            stop = at[i + 1] if i + 1 < n and chunk[i + 1] == c else np.int64(st.fill[c])
            move_items(st.keys, c, at[i] - (i - begin), at[i] + 1, stop - at[i] - 1)
            i += 1
        gone = i - begin
        p, s = pos[begin], slot[begin]
        g = st.top_group[p]
        st.fill[c] -= gone
        add_count(st.before, g, s, st.size[g], -gone)
        add_total(st, p, -gone)
        st.head[ROWS] -= gone
        if is_small(st, g, s):
            slot[begin] = SMALL


@bare
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


@bare
def _insert_run(st: Chunks, p: int, s: int, at: int, key: int, end: int) -> int:
    """Put the keys ``key .. end`` into one chunk that has room, at ``at``; return the key after them."""
    g = st.top_group[p]
    c = st.child[g, s]
    n = st.fill[c]
    count = end - key + 1
    move_items(st.keys, c, at + count, at, n - at)
    for t in range(count):
        st.keys[c, at + t] = key + t
    st.fill[c] = n + count
    add_count(st.before, g, s, st.size[g], count)
    add_total(st, p, count)
    return end + 1


@compiled
def keys_of(bits: np.ndarray) -> np.ndarray:
    """Keys of all rows that have a magnitude, by row."""
    keys = np.empty(len(bits), np.int64)
    n = 0
    for row in range(len(bits)):
        if bits[row] >= 0:
            keys[n] = key_of(bits[row], row)
            n += 1
    return keys[:n]


@bare
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
