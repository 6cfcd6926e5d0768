"""Updates of the chunked rank order on the CPU.

To change the magnitude of a row, the row's old key is deleted and a new key is inserted. A deletion or insertion takes
one search, and moves up to ``WIDTH`` keys of one chunk. Before an insertion into a full chunk, the chunk is split.
"""

import numpy as np

from rlbuf_td.kernels.compiled import acceptable, bare, compiled, move_bytes
from rlbuf_td.kernels.rank_order.chunks import ABSENT, CHUNKS, FULL, GROUPS, NO_KEY, ROOM, ROWS, WIDTH
from rlbuf_td.kernels.rank_order.cpu import (
    AHEAD,
    BLOCK,
    TOP_BIT,
    chunk_at,
    chunks_at,
    count_below,
    fetch_chunk,
    find_places,
    key_address,
    key_of,
)
from rlbuf_td.kernels.sum_tree.tree import REFUSED

_HALF = WIDTH // 2
_ONE = np.int64(1)  # numba would compile the callee again for a literal


@compiled
def update(order, index, td_error, rows):
    """Set magnitudes; arguments and result are as in :func:`rlbuf_td.kernels.sum_tree.update_` on the CPU."""
    if not acceptable(index, td_error, rows):
        return REFUSED
    st = _started(order)
    bits = td_error.view(np.int32)
    keys, pos, slot = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    largest = -1.0
    for start in range(0, len(index), BLOCK):
        stop = min(start + BLOCK, len(index))
        _delete(st, index[start:stop], keys, pos, slot)
        n = 0
        for i in range(stop - 1, start - 1, -1):  # backwards: a duplicate row keeps its last error
            row = index[i]
            if row >= 0:
                largest = max(largest, np.float64(abs(td_error[i])))
                if st.bits[row] < 0:
                    st.bits[row] = bits[i] & TOP_BIT
                    keys[n] = key_of(st.bits[row], row)
                    n += 1
        done = _insert(st, keys[:n], pos[:n], slot[:n])
        while done < n:
            _arrange_afresh(order, st)
            done += _insert(st, keys[done:n], pos[done:n], slot[done:n])
    _count(st)
    return largest


@compiled
def fill(order, index, bits):
    """Set one magnitude for the consecutive rows ``index``; ``bits`` is this float32 magnitude, read as an int32."""
    st = _started(order)
    keys, pos, slot = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for start in range(0, len(index), BLOCK):
        _delete(st, index[start : start + BLOCK], keys, pos, slot)
    st.bits[index[0] : index[-1] + 1] = bits
    # The keys of these rows are consecutive: no other key lies between them, so whole chunks are filled at once.
    keys[0], end = key_of(bits, index[0]), key_of(bits, index[-1]) + 1
    while keys[0] < end:
        if st.head[CHUNKS] == len(st.keys):
            _arrange_afresh(order, st)
        find_places(st, keys[:1], pos[:1], slot[:1])
        g, s = st.top_group[pos[0]], slot[0]
        bound = st.first[g, s + 1] if s + 1 < st.size[g] else st.top_first[pos[0] + 1]
        keys[0] += _insert_run(st, pos[0], s, keys[0], min(end, bound) - keys[0])
    _count(st)


@compiled
def arrange(order, keys):
    """Replace all keys of the rank order by ``keys``, which must be in ascending order."""
    st = chunks_at(order)
    st.first[:] = NO_KEY
    st.before[:] = FULL
    st.top_first[:] = NO_KEY
    st.top_before[:] = NO_KEY
    chunks = max(1, -(-len(keys) // ROOM))
    st.head[CHUNKS] = chunks
    st.head[GROUPS] = -(-chunks // ROOM)
    for c in range(chunks):
        g, s = c // ROOM, c % ROOM
        begin = c * ROOM
        n = min(ROOM, len(keys) - begin)
        st.keys[c, :n] = keys[begin : begin + n]
        st.first[g, s] = keys[begin] if c else 0
        if s == 0:
            st.before[g, 0] = 0
            st.top_first[g] = st.first[g, 0]
            st.top_group[g] = g
        st.child[g, s] = c
        st.before[g, s + 1] = st.before[g, s] + n
        st.top_count[g] = st.before[g, s + 1]
        st.size[g] = s + 1
    _count(st)


@compiled
def _started(order):
    st = chunks_at(order)
    if st.head[GROUPS] == 0:
        arrange(order, np.empty(0, np.int64))
    return st


@compiled
def _arrange_afresh(order, st):
    keys = np.empty(st.top_count[: st.head[GROUPS]].sum(), np.int64)
    n = 0
    for p in range(st.head[GROUPS]):
        for s in range(st.size[st.top_group[p]]):
            c, count = chunk_at(st, p, s)
            keys[n : n + count] = st.keys[c, :count]
            n += count
    arrange(order, keys)


@bare
def _count(st):
    total = 0
    for p in range(st.head[GROUPS]):
        st.top_before[p] = total
        total += st.top_count[p]
    st.head[ROWS] = total


@bare
def _add_count(st, p, s, delta):
    g, d = np.uint64(st.top_group[p]), np.int32(delta)
    for t in range(np.uint64(s + 1), np.uint64(st.size[g] + 1)):
        st.before[g, t] += d
    st.top_count[p] += delta


@bare
def _delete(st, index, keys, pos, slot):
    n = 0
    for i in range(len(index)):
        row = index[i]
        if row >= 0 and st.bits[row] >= 0:
            keys[n] = key_of(st.bits[row], row)
            st.bits[row] = ABSENT
            n += 1
    find_places(st, keys[:n], pos[:n], slot[:n])
    for i in range(n):
        if i + AHEAD < n:
            fetch_chunk(st, pos[i + AHEAD], slot[i + AHEAD])
        c, count = chunk_at(st, pos[i], slot[i])
        at = count_below(st.keys, c, count, keys[i])
        move_bytes(key_address(st, c, at), key_address(st, c, at + 1), 8 * (count - at - 1))
        _add_count(st, pos[i], slot[i], -_ONE)


@bare
def _insert(st, keys, pos, slot):
    """Insert ``keys`` in order, until a chunk is full and no chunk is unused; return the number of inserted keys."""
    find_places(st, keys, pos, slot)
    have_moved = False
    for i in range(len(keys)):
        if i + AHEAD < len(keys):
            fetch_chunk(st, pos[i + AHEAD], slot[i + AHEAD])
        if have_moved:
            find_places(st, keys[i : i + 1], pos[i : i + 1], slot[i : i + 1])
        while _insert_run(st, pos[i], slot[i], keys[i], _ONE) == 0:
            if st.head[CHUNKS] == len(st.keys):
                return i
            have_moved = True
            find_places(st, keys[i : i + 1], pos[i : i + 1], slot[i : i + 1])
    return len(keys)


@bare
def _insert_run(st, p, s, key, count):
    """Insert up to ``count`` keys ``key, key + 1, ...`` into one chunk; return their number, 0 if the chunk is full.

    A full chunk, or its group, is split; this invalidates earlier results of :func:`find_places`.
    """
    c, n = chunk_at(st, p, s)
    if n == WIDTH:
        if st.size[st.top_group[p]] == WIDTH:
            _split_group(st, p)
        elif st.head[CHUNKS] < len(st.keys):
            _split_chunk(st, p, s, key, count)
        return 0
    at = count_below(st.keys, c, n, key)
    count = min(count, WIDTH - n)
    move_bytes(key_address(st, c, at + count), key_address(st, c, at), 8 * (n - at))
    for t in range(count):
        st.keys[c, at + t] = key + t
    _add_count(st, p, s, count)
    return count


@bare
def _split_chunk(st, p, s, key, count):
    """Move the upper keys of a full chunk to a new chunk after it, to make room for the keys ``key, key + 1, ...``."""
    g = st.top_group[p]
    c, d = st.child[g, s], st.head[CHUNKS]
    st.head[CHUNKS] += 1
    # Split at ``key`` if it is at an end or the run is long: monotone insertions and long runs then leave full chunks.
    cut = count_below(st.keys, c, WIDTH, key)
    if 0 < cut < WIDTH and count < _HALF:
        cut = _HALF
    for t in range(cut, WIDTH):
        st.keys[d, t - cut] = st.keys[c, t]
    for t in range(st.size[g], s + 1, -1):
        st.first[g, t] = st.first[g, t - 1]
        st.child[g, t] = st.child[g, t - 1]
    for t in range(st.size[g] + 1, s + 1, -1):
        st.before[g, t] = st.before[g, t - 1]
    st.first[g, s + 1] = st.keys[c, cut] if cut < WIDTH else st.keys[c, WIDTH - 1] + 1
    st.child[g, s + 1] = d
    st.before[g, s + 1] = st.before[g, s] + cut
    st.size[g] += 1


@bare
def _split_group(st, p):
    g, h = st.top_group[p], st.head[GROUPS]
    st.head[GROUPS] += 1
    base = st.before[g, _HALF]
    for t in range(_HALF):
        st.first[h, t] = st.first[g, _HALF + t]
        st.child[h, t] = st.child[g, _HALF + t]
        st.first[g, _HALF + t] = NO_KEY
        st.before[h, t + 1] = st.before[g, _HALF + t + 1] - base
        st.before[g, _HALF + t + 1] = FULL
    st.before[h, 0] = 0
    st.size[g] = st.size[h] = _HALF
    for t in range(h, p + 1, -1):
        st.top_first[t] = st.top_first[t - 1]
        st.top_group[t] = st.top_group[t - 1]
        st.top_count[t] = st.top_count[t - 1]
    st.top_first[p + 1] = st.first[h, 0]
    st.top_group[p + 1] = h
    st.top_count[p + 1] = st.top_count[p] - base
    st.top_count[p] = base
