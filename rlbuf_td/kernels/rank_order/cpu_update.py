"""Updates of the chunked rank order on the CPU.

To change the magnitude of a row, the row's old key is deleted and a new key is inserted. A deletion or insertion takes
one search, and moves up to ``WIDTH`` keys of one chunk. Before an insertion into a full chunk, the chunk is split::

    position     p - 1      p                    p + 1
    before       [10 20]    [30 40 50 60]        [70 80]        the chunk at p is full (here WIDTH = 4)

    position     p - 1      p          p + 1     p + 2
    after        [10 20]    [30 40]    [50 60]   [70 80]        a new chunk takes the keys from the cut on

:mod:`rlbuf_td.kernels.rank_order.chunks` names the arrays.
"""

import numpy as np

from rlbuf_td.kernels.compiled import acceptable, address_of, bare, compiled, move_bytes
from rlbuf_td.kernels.rank_order.chunks import ABSENT, CHANGED, NO_KEY, ROOM, ROWS, USED, WIDTH
from rlbuf_td.kernels.rank_order.cpu import (
    AHEAD,
    BLOCK,
    TOP_BIT,
    chunks_at,
    count_below,
    fetch_chunk,
    key_address,
    key_of,
    search,
)
from rlbuf_td.kernels.sum_tree.tree import REFUSED

_HALF = WIDTH // 2
_ONE = np.int64(1)  # numba would compile the callee again for a literal


@compiled
def update(order, index, td_error, rows):
    """Set magnitudes; ``td_error`` is float32, otherwise as :func:`rlbuf_td.kernels.sum_tree.update_` on the CPU."""
    if not acceptable(index, td_error, rows):
        return REFUSED
    chunks, bits = chunks_at(order), td_error.view(np.int32)
    keys, positions = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    largest = -1.0
    for start in range(0, len(index), BLOCK):
        stop = min(start + BLOCK, len(index))
        _delete(chunks, index[start:stop], keys, positions)
        count = 0
        for i in range(stop - 1, start - 1, -1):  # backwards: a duplicate row keeps its last error
            row = index[i]
            if row >= 0:
                largest = max(largest, np.float64(abs(td_error[i])))
                if chunks.bits[row] < 0:
                    chunks.bits[row] = bits[i] & TOP_BIT
                    keys[count] = key_of(chunks.bits[row], row)
                    count += 1
        done = _insert(chunks, keys[:count], positions[:count])
        while done < count:
            _rearrange(order, chunks)
            done += _insert(chunks, keys[done:count], positions[done:count])
    return largest


@compiled
def fill(order, index, bits):
    """Set one magnitude for the consecutive rows ``index``; ``bits`` is this float32 magnitude, read as an int32."""
    chunks = chunks_at(order)
    keys, positions = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for start in range(0, len(index), BLOCK):
        _delete(chunks, index[start : start + BLOCK], keys, positions)
    if len(index) == 0:
        return
    chunks.bits[index[0] : index[-1] + 1] = bits
    # The keys of these rows are consecutive: no other key lies between them, so whole chunks are filled at once.
    key, end = key_of(bits, index[0]), key_of(bits, index[-1]) + 1
    while key < end:
        keys[0] = key
        search(chunks.first, chunks.head[USED], keys[:1], positions[:1])
        position = positions[0]
        count = min(end, chunks.first[position + 1]) - key
        if chunks.size[position] < WIDTH:
            key += _insert_run(chunks, position, key, count)
        elif chunks.head[USED] < len(chunks.keys):
            _split(chunks, position, key, count)
        else:
            _rearrange(order, chunks)


@compiled
def arrange(order, keys):
    """Replace all keys of the rank order by ``keys``, which must be in ascending order."""
    chunks = chunks_at(order)
    chunks.first[:] = chunks.before[:] = NO_KEY
    chunks.head[USED] = max(1, -(-len(keys) // ROOM))
    for position in range(chunks.head[USED]):
        part = keys[position * ROOM : (position + 1) * ROOM]
        chunks.keys[position, : len(part)] = part
        chunks.first[position] = part[0] if position else 0
        chunks.chunk[position], chunks.size[position] = position, len(part)
    chunks.head[ROWS], chunks.head[CHANGED] = len(keys), 1


@compiled
def _rearrange(order, chunks):
    """Move all keys to chunks that are three quarters full, when no unused chunk is left."""
    keys, done = np.empty(chunks.size[: chunks.head[USED]].sum(), np.int64), 0
    for position in range(chunks.head[USED]):
        count = chunks.size[position]
        keys[done : done + count] = chunks.keys[chunks.chunk[position], :count]
        done += count
    arrange(order, keys)


@bare
def _delete(chunks, index, keys, positions):
    """Delete the keys of the rows ``index``; the other arguments are scratch memory."""
    count = 0
    for row in index:
        if row >= 0 and chunks.bits[row] >= 0:
            keys[count] = key_of(chunks.bits[row], row)
            chunks.bits[row] = ABSENT
            count += 1
    search(chunks.first, chunks.head[USED], keys[:count], positions[:count])
    for i in range(count):
        if i + AHEAD < count:
            fetch_chunk(chunks, positions[i + AHEAD])
        position = positions[i]
        at = count_below(chunks, position, keys[i])
        above = chunks.size[position] - at - 1
        move_bytes(key_address(chunks, position, at), key_address(chunks, position, at + 1), 8 * above)
        chunks.size[position] -= 1
    chunks.head[ROWS] -= count
    chunks.head[CHANGED] = 1


@bare
def _insert(chunks, keys, positions):
    """Insert ``keys`` in order, until a chunk is full and no chunk is unused; return the number of inserted keys."""
    search(chunks.first, chunks.head[USED], keys, positions)
    for i in range(len(keys)):
        if i + AHEAD < len(keys):
            fetch_chunk(chunks, positions[i + AHEAD])
        position = positions[i]
        if chunks.size[position] == WIDTH:
            if chunks.head[USED] == len(chunks.keys):
                return i
            _split(chunks, position, keys[i], _ONE)
            for later in range(i, len(keys)):
                positions[later] += keys[later] >= chunks.first[position + 1]
        _insert_run(chunks, positions[i], keys[i], _ONE)
    return len(keys)


@bare
def _insert_run(chunks, position, key, count):
    """Insert up to ``count`` keys ``key, key + 1, ...`` into one chunk that is not full; return their number."""
    at = count_below(chunks, position, key)
    count = min(count, np.int64(WIDTH - chunks.size[position]))
    above = chunks.size[position] - at
    move_bytes(key_address(chunks, position, at + count), key_address(chunks, position, at), 8 * above)
    for i in range(count):
        chunks.keys[chunks.chunk[position], at + i] = key + i
    chunks.size[position] += count
    chunks.head[ROWS] += count
    return count


@bare
def _split(chunks, position, key, count):
    """Move the upper keys of a full chunk to a new chunk, to make room for the keys ``key, key + 1, ...``.

    Half of the keys move. If ``key`` is at an end of the chunk, or the run is long, the keys from ``key`` on move: this
    leaves full chunks behind.
    """
    below = count_below(chunks, position, key)
    cut = _HALF if 0 < below < WIDTH and count < _HALF else below
    new, later = chunks.head[USED], position + 1
    _move_up(address_of(chunks.first) + 8 * later, new - later, 8)
    _move_up(address_of(chunks.chunk) + 4 * later, new - later, 4)
    _move_up(address_of(chunks.size) + 4 * later, new - later, 4)
    chunks.chunk[later] = new
    move_bytes(key_address(chunks, later, 0), key_address(chunks, position, cut), 8 * (WIDTH - cut))
    highest = chunks.keys[chunks.chunk[position], WIDTH - 1]
    chunks.first[later] = chunks.keys[new, 0] if cut < WIDTH else highest + 1
    chunks.size[position], chunks.size[later] = cut, WIDTH - cut
    chunks.head[USED] += 1


@bare
def _move_up(address, count, nbytes):
    """Move ``count`` elements of ``nbytes`` bytes up by one place."""
    move_bytes(address + nbytes, address, count * nbytes)
