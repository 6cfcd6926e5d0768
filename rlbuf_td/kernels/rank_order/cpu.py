"""The loops of :class:`~rlbuf_td.kernels.rank_order.ChunkedOrder`, which explains
chunks and positions.

The argument ``order`` is the address of an ``ORDER`` record, or an array with this
record. The searches of a batch advance together, without branches, so that their cache
misses overlap. Unsigned indices avoid numba's check for negative indices, which would
prevent vectorisation.

To change the magnitude of a row, the row's old key is deleted and a new key is
inserted. A deletion or insertion takes one search, and moves up to ``WIDTH`` keys of
one chunk. Before an insertion into a full chunk, the chunk is split::

    position     p - 1      p                    p + 1
    before       [10 20]    [30 40 50 60]        [70 80]        the chunk at p is full (here WIDTH = 4)

    position     p - 1      p          p + 1     p + 2
    after        [10 20]    [30 40]    [50 60]   [70 80]        a new chunk takes the keys from the cut on
"""

import math
from typing import NamedTuple

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import (
    address_of,
    inlined,
    kernel,
    load,
    move_bytes,
    pointer,
    prefetch,
)
from rlbuf_td.kernels.draws.cpu import acceptable, masses
from rlbuf_td.kernels.rank_order import (
    ABSENT,
    CHANGED,
    HEAD,
    NO_KEY,
    ORDER,
    ROOM,
    ROWS,
    USED,
    WIDTH,
    Ranks,
)
from rlbuf_td.kernels.strata import BY_BATCH, BY_NONE, Stratification
from rlbuf_td.kernels.sum_tree import REFUSED

#: Searches that advance together: enough to overlap cache misses, few enough for the
# scratch memory to stay in cache.
BLOCK = 256
#: How many searches ahead chunks are prefetched.
AHEAD = 4
TOP_BIT = 0x7FFFFFFF
_ROW = 0xFFFFFFFF
_HALF = WIDTH // 2
_ONE = np.int64(1)


class Chunks(NamedTuple):
    """The memory of an order; ``ChunkedOrder`` has a drawing."""

    head: np.ndarray  # ``[3]``, see ROWS, USED and CHANGED
    bits: np.ndarray  # of the magnitude of each row
    keys: np.ndarray  # ``[chunks, WIDTH]``
    # for each position in the list:
    first: np.ndarray  # the lower bound of the chunk's keys
    chunk: np.ndarray  # the number of the chunk
    size: np.ndarray  # its number of keys
    before: np.ndarray  # the number of keys in earlier chunks


@inlined
def _chunks(record):
    """Return the arrays of an ``ORDER`` record."""
    return Chunks(
        head=carray(pointer(record.head), 3, np.int64),
        bits=carray(pointer(record.bits), record.rows, np.int32),
        keys=carray(pointer(record.keys), (record.chunks, WIDTH), np.int64),
        first=carray(pointer(record.first), record.positions, np.int64),
        chunk=carray(pointer(record.chunk), record.positions, np.int32),
        size=carray(pointer(record.size), record.positions, np.int32),
        before=carray(pointer(record.before), record.positions, np.int64),
    )


@inlined
def _chunks_at(address):
    return _chunks(carray(pointer(address), 1, ORDER)[0])


@inlined
def key_of(bits, row):
    """Return the sort key of a row: larger magnitudes (``bits``, a float32 read as
    int32) have smaller keys."""
    return ((TOP_BIT - np.int64(bits)) << 32) | np.int64(row)


@kernel
def _search(bounds, used, wanted, positions):
    """For each value in ``wanted``, find the last of ``used`` positions with
    ``bounds[position] <= value``."""
    step = 1
    while step < used:
        step *= 2
    for i in range(len(wanted)):
        positions[i] = 0
    step >>= 1
    while step > 0:
        for i in range(len(wanted)):
            position = positions[i]
            positions[i] = position + step * (
                bounds[np.uint64(position + step)] <= wanted[i]
            )
        step >>= 1


@inlined
def _key_address(chunks, position, slot):
    first = np.int64(chunks.chunk[position]) * WIDTH
    return address_of(chunks.keys) + 8 * (first + slot)


@inlined
def _fetch_chunk(chunks, position):
    """Prefetch a chunk, except the last quarter, which is seldom in use."""
    address = _key_address(chunks, position, 0)
    for line in range(0, 6 * WIDTH, 64):
        prefetch(address + line)


@inlined
def _count_below(chunks, position, key):
    """Return how many keys of a chunk are smaller than ``key``."""
    chunk = np.uint64(chunks.chunk[position])
    count = 0
    for i in range(chunks.size[position]):
        count += chunks.keys[chunk, np.uint64(i)] < key
    return count


# -- look-ups


@inlined
def _count(chunks):
    """Count the keys before each chunk, if keys have changed since the last look-up."""
    if chunks.head[CHANGED]:
        total = np.int64(0)
        for position in range(chunks.head[USED]):
            chunks.before[np.uint64(position)] = total
            total += chunks.size[np.uint64(position)]
        chunks.head[CHANGED] = 0


@kernel
def ranks_of(order, index, count, out):
    """Write each row's rank to the address ``out``, 0 for rows without a magnitude."""
    chunks = _chunks_at(order)
    rows = carray(pointer(index), count, np.int64)
    ranks = carray(pointer(out), count, np.int64)
    _count(chunks)
    keys = np.empty(BLOCK, np.int64)
    positions = np.empty(BLOCK, np.int64)
    for start in range(0, count, BLOCK):
        many = min(BLOCK, count - start)
        for i in range(many):
            keys[i] = key_of(max(chunks.bits[rows[start + i]], 0), rows[start + i])
        _search(chunks.first, chunks.head[USED], keys[:many], positions[:many])
        for i in range(many):
            if i + AHEAD < many:
                _fetch_chunk(chunks, positions[i + AHEAD])
            rank = (
                chunks.before[positions[i]]
                + _count_below(chunks, positions[i], keys[i])
                + 1
            )
            ranks[start + i] = rank * (chunks.bits[rows[start + i]] >= 0)


@inlined
def _mass_of_all(rows, ranks):
    """Return the sum of the weights of ranks 1 to ``rows``: from the table, or by Euler
    and Maclaurin."""
    if rows <= HEAD:
        return load(ranks.head + 8 * (rows - 1), np.float64)
    x = rows + 0.5
    bend = 1.0 - ranks.alpha
    y = math.log(x)
    if bend != 0.0:
        y = math.expm1(bend * y) / bend
    return ranks.shift + y + ranks.alpha / 24.0 * x ** (-ranks.alpha - 1.0)


@inlined
def _rank_of_mass(mass, rows, ranks):
    """Return the first rank at which the sum of weights exceeds ``mass``, at most
    ``rows``."""
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


@kernel
def draw(
    order, ranks: Ranks, uniform_at, rows_at, importance_at, batch, law: Stratification
):
    """Draw rows by rank, and compute importance weights; return False if no row has a
    rank.

    ``uniform_at``, ``rows_at`` and ``importance_at`` are the addresses of ``batch``
    numbers each.
    """
    chunks = _chunks_at(order)
    rows = chunks.head[ROWS]
    if rows == 0:
        return False
    _count(chunks)
    uniform = carray(pointer(uniform_at), batch, np.float64)
    index = carray(pointer(rows_at), batch, np.int64)
    importance = carray(pointer(importance_at), batch, np.float32)
    total = _mass_of_all(rows, ranks)
    masses(uniform, total, law.step)
    # the number of rows before each drawn one
    last = 1
    before = np.empty(batch, np.int64)
    for j in range(batch):
        rank = _rank_of_mass(uniform[j], rows, ranks)
        last = max(last, rank)
        before[j] = rank - 1
        uniform[j] = math.log(rank)
    _search(chunks.before, chunks.head[USED], before, index)
    for j in range(batch):
        position = np.uint64(index[j])
        slot = np.uint64(before[j] - chunks.before[position])
        index[j] = chunks.keys[np.uint64(chunks.chunk[position]), slot] & _ROW
    # (N P)^-beta is r^(alpha beta) times a constant; the least probable rank has the
    # largest weight.
    power = ranks.alpha * law.beta
    scale = -power * math.log(last if law.norm == BY_BATCH else rows)
    if law.norm == BY_NONE:
        scale = law.beta * math.log(total / rows)
    for j in range(batch):
        importance[j] = math.exp(power * uniform[j] + scale)
    return True


# -- updates


@kernel
def update(order, index, magnitude, rows):
    """Set magnitudes, float32, as :func:`rlbuf_td.kernels.sum_tree.update_` on the
    CPU."""
    if not acceptable(index, magnitude, rows):
        return REFUSED
    chunks = _chunks(order[0])
    bits = magnitude.view(np.int32)
    keys = np.empty(BLOCK, np.int64)
    positions = np.empty(BLOCK, np.int64)
    largest = -1.0
    for start in range(0, len(index), BLOCK):
        stop = min(start + BLOCK, len(index))
        _delete(chunks, index[start:stop], keys, positions)
        count = 0
        # backwards: a duplicate row keeps its last magnitude
        for i in range(stop - 1, start - 1, -1):
            row = index[i]
            if row >= 0:
                largest = max(largest, np.float64(magnitude[i]))
                if chunks.bits[row] < 0:
                    chunks.bits[row] = bits[i]
                    keys[count] = key_of(chunks.bits[row], row)
                    count += 1
        _insert(chunks, keys[:count], positions[:count])
    return largest


@kernel
def fill(order, index, bits):
    """Set one magnitude for the consecutive rows ``index``; ``bits`` is this float32
    magnitude, read as an int32."""
    chunks = _chunks(order[0])
    if len(index) == 0:
        return
    keys = np.empty(BLOCK, np.int64)
    positions = np.empty(BLOCK, np.int64)
    for start in range(0, len(index), BLOCK):
        _delete(chunks, index[start : start + BLOCK], keys, positions)
    chunks.bits[index[0] : index[-1] + 1] = bits
    # The keys of these rows are consecutive: no other key lies between them, so that
    # whole chunks are filled at once.
    key = key_of(bits, index[0])
    end = key_of(bits, index[-1]) + 1
    while key < end:
        keys[0] = key
        _search(chunks.first, chunks.head[USED], keys[:1], positions[:1])
        position = positions[0]
        count = min(end, chunks.first[position + 1]) - key
        if chunks.size[position] < WIDTH:
            key += _insert_run(chunks, position, key, count)
        elif chunks.head[USED] < len(chunks.keys):
            _split(chunks, position, key, count)
        else:
            _rearrange(chunks)


@kernel
def arrange(order, keys_at, count):
    """Replace all keys of the rank order by those at an address, which must be in
    ascending order."""
    _arrange(_chunks_at(order), carray(pointer(keys_at), count, np.int64))


@kernel
def _arrange(chunks, keys):
    """Spread ascending keys over new chunks of at most ``ROOM`` keys."""
    chunks.first[:] = NO_KEY
    chunks.before[:] = NO_KEY
    chunks.head[USED] = max(1, -(-len(keys) // ROOM))
    for position in range(chunks.head[USED]):
        start = position * ROOM
        count = min(ROOM, len(keys) - position * ROOM)
        for i in range(count):
            chunks.keys[position, i] = keys[start + i]
        chunks.first[position] = keys[start] if position else 0
        chunks.chunk[position], chunks.size[position] = position, count
    chunks.head[ROWS] = len(keys)
    chunks.head[CHANGED] = 1


@inlined
def _rearrange(chunks):
    """Move all keys to chunks that are three quarters full, when no unused chunk is
    left."""
    keys = np.empty(chunks.head[ROWS], np.int64)
    done = 0
    for position in range(chunks.head[USED]):
        for i in range(chunks.size[position]):
            keys[done] = chunks.keys[chunks.chunk[position], i]
            done += 1
    _arrange(chunks, keys)


@kernel
def _delete(chunks, index, keys, positions):
    """Delete the keys of the rows ``index``; the other arguments are scratch memory."""
    count = 0
    for row in index:
        if row >= 0 and chunks.bits[row] >= 0:
            keys[count] = key_of(chunks.bits[row], row)
            chunks.bits[row] = ABSENT
            count += 1
    _search(chunks.first, chunks.head[USED], keys[:count], positions[:count])
    for i in range(count):
        if i + AHEAD < count:
            _fetch_chunk(chunks, positions[i + AHEAD])
        position = positions[i]
        slot = _count_below(chunks, position, keys[i])
        above = chunks.size[position] - slot - 1
        move_bytes(
            _key_address(chunks, position, slot),
            _key_address(chunks, position, slot + 1),
            8 * above,
        )
        chunks.size[position] -= 1
    chunks.head[ROWS] -= count
    chunks.head[CHANGED] = 1


@kernel
def _insert(chunks, keys, positions):
    """Insert ``keys`` in order; ``positions`` is scratch memory."""
    _search(chunks.first, chunks.head[USED], keys, positions)
    for i in range(len(keys)):
        if i + AHEAD < len(keys):
            _fetch_chunk(chunks, positions[i + AHEAD])
        if chunks.size[positions[i]] == WIDTH:
            if chunks.head[USED] == len(chunks.keys):
                _rearrange(chunks)
                _search(chunks.first, chunks.head[USED], keys[i:], positions[i:])
            position = positions[i]
            if chunks.size[position] == WIDTH:
                _split(chunks, position, keys[i], _ONE)
                for later in range(i, len(keys)):
                    positions[later] += keys[later] >= chunks.first[position + 1]
        _insert_run(chunks, positions[i], keys[i], _ONE)


@inlined
def _insert_run(chunks, position, key, count):
    """Insert up to ``count`` keys ``key, key + 1, ...`` into one chunk that is not
    full; return their number."""
    first = _count_below(chunks, position, key)
    count = min(count, np.int64(WIDTH - chunks.size[position]))
    above = chunks.size[position] - first
    move_bytes(
        _key_address(chunks, position, first + count),
        _key_address(chunks, position, first),
        8 * above,
    )
    for i in range(count):
        chunks.keys[chunks.chunk[position], first + i] = key + i
    chunks.size[position] += count
    chunks.head[ROWS] += count
    return count


@inlined
def _split(chunks, position, key, count):
    """Move the upper keys of a full chunk to a new chunk, to make room for the keys
    ``key, key + 1, ...``.

    Half of the keys move. If ``key`` is at an end of the chunk, or the run is long, the
    keys from ``key`` on move: this leaves full chunks behind. There must be an unused
    chunk. The caller sets ``CHANGED``, because ``before`` is wrong now.
    """
    below = _count_below(chunks, position, key)
    cut = _HALF if 0 < below < WIDTH and count < _HALF else below
    new = chunks.head[USED]
    later = position + 1
    _move_up(chunks.first, later, new)
    _move_up(chunks.chunk, later, new)
    _move_up(chunks.size, later, new)
    chunks.chunk[later] = new
    move_bytes(
        _key_address(chunks, later, 0),
        _key_address(chunks, position, cut),
        8 * (WIDTH - cut),
    )
    highest = chunks.keys[chunks.chunk[position], WIDTH - 1]
    # the new chunk may be empty
    chunks.first[later] = chunks.keys[new, 0] if cut < WIDTH else highest + 1
    chunks.size[position] = cut
    chunks.size[later] = WIDTH - cut
    chunks.head[USED] += 1


@inlined
def _move_up(array, first, past):
    """Move the elements ``first`` to ``past - 1`` of an array up by one place."""
    address = address_of(array) + array.itemsize * first
    move_bytes(address + array.itemsize, address, (past - first) * array.itemsize)
