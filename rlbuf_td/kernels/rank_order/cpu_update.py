"""Updates of the chunked rank order on the CPU.

To change the magnitude of a row, the row's old key is deleted and a new key is inserted. A deletion or insertion takes
one search, and moves up to ``WIDTH`` keys of one chunk. Before an insertion into a full chunk, the chunk is split::

    slot       s - 1      s                    s + 1
    before     [10 20]    [30 40 50 60]        [70 80]        chunk s is full (here WIDTH = 4)

    slot       s - 1      s          s + 1     s + 2
    after      [10 20]    [30 40]    [50 60]   [70 80]        a new chunk takes the keys from the cut on

A full group is split in the same way before a chunk is added to it. :mod:`rlbuf_td.kernels.rank_order.chunks` names the
arrays. A *position* is the place of a group in the top, a *slot* the place of a chunk in its group.
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
    """Set magnitudes; ``td_error`` is float32, otherwise as :func:`rlbuf_td.kernels.sum_tree.update_` on the CPU."""
    if not acceptable(index, td_error, rows):
        return REFUSED
    chunks = _started(order)
    bits = td_error.view(np.int32)
    keys, positions, slots = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    largest = -1.0
    for start in range(0, len(index), BLOCK):
        stop = min(start + BLOCK, len(index))
        _delete(chunks, index[start:stop], keys, positions, slots)
        count = 0
        for i in range(stop - 1, start - 1, -1):  # backwards: a duplicate row keeps its last error
            row = index[i]
            if row >= 0:
                largest = max(largest, np.float64(abs(td_error[i])))
                if chunks.bits[row] < 0:
                    chunks.bits[row] = bits[i] & TOP_BIT
                    keys[count] = key_of(chunks.bits[row], row)
                    count += 1
        done = _insert(chunks, keys[:count], positions[:count], slots[:count])
        while done < count:
            _rearrange(order, chunks)
            done += _insert(chunks, keys[done:count], positions[done:count], slots[done:count])
    _count_rows(chunks)
    return largest


@compiled
def fill(order, index, bits):
    """Set one magnitude for the consecutive rows ``index``; ``bits`` is this float32 magnitude, read as an int32."""
    chunks = _started(order)
    keys, positions, slots = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for start in range(0, len(index), BLOCK):
        _delete(chunks, index[start : start + BLOCK], keys, positions, slots)
    chunks.bits[index[0] : index[-1] + 1] = bits
    # The keys of these rows are consecutive: no other key lies between them, so whole chunks are filled at once.
    key, end = key_of(bits, index[0]), key_of(bits, index[-1]) + 1
    while key < end:
        if chunks.head[CHUNKS] == len(chunks.keys):
            _rearrange(order, chunks)
        keys[0] = key
        find_places(chunks, keys[:1], positions[:1], slots[:1])
        position, slot = positions[0], slots[0]
        group, following = chunks.top_group[position], slot + 1
        is_last = following == chunks.size[group]
        bound = chunks.top_first[position + 1] if is_last else chunks.first[group, following]
        key += _insert_run(chunks, position, slot, key, min(end, bound) - key)
    _count_rows(chunks)


@compiled
def arrange(order, keys):
    """Replace all keys of the rank order by ``keys``, which must be in ascending order."""
    chunks = chunks_at(order)
    chunks.first[:] = NO_KEY
    chunks.before[:] = FULL
    chunks.top_first[:] = NO_KEY
    chunks.top_before[:] = NO_KEY
    chunks.head[CHUNKS] = max(1, -(-len(keys) // ROOM))
    chunks.head[GROUPS] = -(-chunks.head[CHUNKS] // ROOM)
    for chunk in range(chunks.head[CHUNKS]):
        group, slot, begin = chunk // ROOM, chunk % ROOM, chunk * ROOM
        count = min(ROOM, len(keys) - begin)
        chunks.keys[chunk, :count] = keys[begin : begin + count]
        chunks.first[group, slot] = keys[begin] if chunk else 0
        if slot == 0:
            chunks.before[group, 0] = 0
            chunks.top_first[group] = chunks.first[group, 0]
            chunks.top_group[group] = group
        chunks.child[group, slot] = chunk
        chunks.before[group, slot + 1] = chunks.before[group, slot] + count
        chunks.top_count[group] = chunks.before[group, slot + 1]
        chunks.size[group] = slot + 1
    _count_rows(chunks)


@compiled
def _started(order):
    chunks = chunks_at(order)
    if chunks.head[GROUPS] == 0:
        arrange(order, np.empty(0, np.int64))
    return chunks


@compiled
def _rearrange(order, chunks):
    """Move all keys to chunks that are three quarters full, when no unused chunk is left."""
    keys = np.empty(chunks.top_count[: chunks.head[GROUPS]].sum(), np.int64)
    done = 0
    for position in range(chunks.head[GROUPS]):
        for slot in range(chunks.size[chunks.top_group[position]]):
            chunk, count = chunk_at(chunks, position, slot)
            keys[done : done + count] = chunks.keys[chunk, :count]
            done += count
    arrange(order, keys)


@bare
def _count_rows(chunks):
    total = 0
    for position in range(chunks.head[GROUPS]):
        chunks.top_before[position] = total
        total += chunks.top_count[position]
    chunks.head[ROWS] = total


@bare
def _add_count(chunks, position, slot, added):
    """Record that the number of keys of a chunk has grown by ``added``."""
    group, difference = np.uint64(chunks.top_group[position]), np.int32(added)
    for later in range(np.uint64(slot + 1), np.uint64(chunks.size[group] + 1)):
        chunks.before[group, later] += difference
    chunks.top_count[position] += added


@bare
def _delete(chunks, index, keys, positions, slots):
    """Delete the keys of the rows ``index``; the other arguments are scratch memory."""
    count = 0
    for i in range(len(index)):
        row = index[i]
        if row >= 0 and chunks.bits[row] >= 0:
            keys[count] = key_of(chunks.bits[row], row)
            chunks.bits[row] = ABSENT
            count += 1
    find_places(chunks, keys[:count], positions[:count], slots[:count])
    for i in range(count):
        if i + AHEAD < count:
            fetch_chunk(chunks, positions[i + AHEAD], slots[i + AHEAD])
        chunk, filled = chunk_at(chunks, positions[i], slots[i])
        at = count_below(chunks.keys, chunk, filled, keys[i])
        move_bytes(key_address(chunks, chunk, at), key_address(chunks, chunk, at + 1), 8 * (filled - at - 1))
        _add_count(chunks, positions[i], slots[i], -_ONE)


@bare
def _insert(chunks, keys, positions, slots):
    """Insert ``keys`` in order, until a chunk is full and no chunk is unused; return the number of inserted keys."""
    find_places(chunks, keys, positions, slots)
    have_moved = False
    for i in range(len(keys)):
        if i + AHEAD < len(keys):
            fetch_chunk(chunks, positions[i + AHEAD], slots[i + AHEAD])
        if have_moved:
            find_places(chunks, keys[i : i + 1], positions[i : i + 1], slots[i : i + 1])
        while _insert_run(chunks, positions[i], slots[i], keys[i], _ONE) == 0:
            if chunks.head[CHUNKS] == len(chunks.keys):
                return i
            have_moved = True
            find_places(chunks, keys[i : i + 1], positions[i : i + 1], slots[i : i + 1])
    return len(keys)


@bare
def _insert_run(chunks, position, slot, key, count):
    """Insert up to ``count`` keys ``key, key + 1, ...`` into one chunk; return their number, 0 if the chunk is full.

    A full chunk, or its group, is split; this invalidates earlier results of :func:`find_places`.
    """
    chunk, filled = chunk_at(chunks, position, slot)
    if filled == WIDTH:
        if chunks.size[chunks.top_group[position]] == WIDTH:
            _split_group(chunks, position)
        elif chunks.head[CHUNKS] < len(chunks.keys):
            _split_chunk(chunks, position, slot, _cut_of(chunks.keys, chunk, key, count))
        return 0
    at = count_below(chunks.keys, chunk, filled, key)
    count = min(count, WIDTH - filled)
    move_bytes(key_address(chunks, chunk, at + count), key_address(chunks, chunk, at), 8 * (filled - at))
    for i in range(count):
        chunks.keys[chunk, at + i] = key + i
    _add_count(chunks, position, slot, count)
    return count


@bare
def _cut_of(keys, chunk, key, count):
    """Return how many keys a full chunk keeps when it makes room for the keys ``key, key + 1, ...``.

    Half of them, except if ``key`` is at an end of the chunk or the run is long: cutting at ``key`` then leaves full
    chunks behind.
    """
    below = count_below(keys, chunk, WIDTH, key)
    return _HALF if 0 < below < WIDTH and count < _HALF else below


@bare
def _split_chunk(chunks, position, slot, cut):
    """Move the keys of a full chunk from number ``cut`` on to a new chunk in the next slot."""
    group, new = chunks.top_group[position], chunks.head[CHUNKS]
    old, size = chunks.child[group, slot], np.int64(chunks.size[group])
    for i in range(cut, WIDTH):
        chunks.keys[new, i - cut] = chunks.keys[old, i]
    following = slot + 1
    _make_place(chunks.first[group], following, size)
    _make_place(chunks.child[group], following, size)
    _make_place(chunks.before[group], following, size + 1)
    chunks.first[group, following] = chunks.keys[old, cut] if cut < WIDTH else chunks.keys[old, WIDTH - 1] + 1
    chunks.child[group, following] = new
    chunks.before[group, following] = chunks.before[group, slot] + cut
    chunks.size[group] += 1
    chunks.head[CHUNKS] += 1


@bare
def _split_group(chunks, position):
    """Move the upper half of a full group to a new group in the next position."""
    old, new, following = chunks.top_group[position], chunks.head[GROUPS], position + 1
    kept = chunks.before[old, _HALF]  # number of keys that stay in the old group
    for slot in range(_HALF):
        moved = _HALF + slot
        chunks.first[new, slot] = chunks.first[old, moved]
        chunks.child[new, slot] = chunks.child[old, moved]
        chunks.first[old, moved] = NO_KEY
        chunks.before[new, slot + 1] = chunks.before[old, moved + 1] - kept
        chunks.before[old, moved + 1] = FULL
    chunks.before[new, 0] = 0
    chunks.size[old] = chunks.size[new] = _HALF
    _make_place(chunks.top_first, following, new)
    _make_place(chunks.top_group, following, new)
    _make_place(chunks.top_count, following, new)
    chunks.top_first[following] = chunks.first[new, 0]
    chunks.top_group[following] = new
    chunks.top_count[following] = chunks.top_count[position] - kept
    chunks.top_count[position] = kept
    chunks.head[GROUPS] += 1


@bare
def _make_place(values, place, size):
    """Move ``values[place:size]`` one place up."""
    for i in range(size, place, -1):
        values[i] = values[i - 1]
