"""The CPU loops of :mod:`rlbuf_td.kernels.sum_tree`; their argument ``tree`` is
``SumTree.addresses``.

Outer loops go over levels and inner loops over the batch, so that the cache misses of a
level overlap. Unsigned indices avoid numba's check for negative indices.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, uint64

from rlbuf_td.kernels.compiled import (
    address_of,
    count_sums,
    inlined,
    kernel,
    pointer,
    prefetch,
    touch,
)
from rlbuf_td.kernels.draws.cpu import acceptable, masses
from rlbuf_td.kernels.strata import (
    BY_BATCH,
    BY_BUFFER,
    Stratification,
)
from rlbuf_td.kernels.sum_tree import BLOCK, GROUP, LARGEST, REFUSED, SMALLEST, TREE

_ONE = np.uint64(1)
_NONE = np.float32(np.inf)
_ROWS, _SHIFT = (np.uint64(size.bit_length() - 1) for size in (BLOCK, GROUP))


class _Arrays(NamedTuple):
    """The memory of a tree; :class:`SumTree` describes it."""

    starts: np.ndarray  # of each level in the arrays of nodes
    magnitude: np.ndarray  # of each row
    weight: np.ndarray  # of each row
    sums: np.ndarray  # of each node
    before: np.ndarray  # the sum of the nodes before each one in its group
    minima: np.ndarray  # the smallest positive weight below each node


@inlined
def _arrays(tree):
    """Return the arrays of a ``TREE`` record."""
    record = tree[0]
    return _Arrays(
        starts=carray(pointer(record.starts), record.levels, np.uint64),
        magnitude=carray(pointer(record.magnitude), record.rows, np.float32),
        weight=carray(pointer(record.weight), record.rows, np.float32),
        sums=carray(pointer(record.sums), record.nodes, np.float64),
        before=carray(pointer(record.before), record.nodes, np.float64),
        minima=carray(pointer(record.minima), record.nodes, np.float64),
    )


@inlined
def _weight(magnitude, alpha, eps):
    priority = np.float64(magnitude) + eps
    if priority <= 0.0:
        return np.float32(1.0 if alpha == 0.0 else 0.0)
    return np.float32(min(max(priority**alpha, SMALLEST), LARGEST))


@inlined
def _set_block(weight, sums, minima, block):
    """Recompute the sum and the minimum of one block of weights; return whether the
    minimum changed."""
    row = block << _ROWS
    total = 0.0
    smallest = _NONE
    for k in range(BLOCK):
        w = weight[row + uint64(k)]
        total += w
        smallest = min(smallest, w if w > 0.0 else _NONE)
    sums[block] = total
    changed = minima[block] != smallest
    minima[block] = smallest
    return changed


@inlined
def _set_group(sums, before, first, above):
    """Recompute the cumulative sums ``before`` of the group at node ``first``, and its
    total, ``sums[above]``."""
    total = 0.0
    for k in range(GROUP):
        before[first + uint64(k)] = total
        total += sums[first + uint64(k)]
    sums[above] = total
    last = first + uint64(GROUP - 1)
    while last > first and not sums[last] > 0.0:
        before[last] = np.inf
        last -= _ONE


@inlined
def _smallest_of(minima, first):
    smallest = np.inf
    for k in range(GROUP):
        smallest = min(smallest, minima[first + uint64(k)])
    return smallest


@inlined
def _raise_minimum(starts, minima, node):
    """Recompute the minima of the nodes above block ``node``; stop at the first minimum
    that does not change."""
    for level in range(starts.shape[0] - 1):
        node >>= _SHIFT
        smallest = _smallest_of(minima, starts[level] + (node << _SHIFT))
        above = starts[level + 1] + node
        if minima[above] == smallest:
            return
        minima[above] = smallest


@kernel
def update(tree, index, size, rows, alpha, eps):
    """Implement :func:`rlbuf_td.kernels.sum_tree.update_` for the magnitudes ``size``,
    float32."""
    if not acceptable(index, size, rows):
        return REFUSED
    record = tree[0]
    (starts, magnitude, weight, sums, before, minima) = _arrays(tree)
    # where the second level begins, in bytes
    second = 8 * np.int64(starts[min(1, starts.shape[0] - 1)])
    for j in range(index.shape[0]):
        # in a separate loop, so that the cache misses of all rows overlap
        if index[j] >= 0:
            for rows_at in (record.magnitude, record.weight):
                touch(rows_at + 4 * index[j])
            for nodes in (record.sums, record.before, record.minima):
                touch(nodes + 8 * (index[j] // BLOCK))
            for nodes in (record.sums, record.before):
                touch(nodes + second + 8 * (index[j] // (BLOCK * GROUP)))
    node = np.empty(index.shape[0], np.uint64)
    largest = np.float32(-1.0)
    count = 0
    for j in range(index.shape[0]):
        if index[j] >= 0:
            row = uint64(index[j])
            magnitude[row] = size[j]
            weight[row] = _weight(size[j], alpha, eps)
            largest = max(largest, size[j])
            node[count] = row >> _ROWS
            count += 1
    for j in range(count):
        if _set_block(weight, sums, minima, node[j]):
            _raise_minimum(starts, minima, node[j])
    _sum_upwards(starts, sums, before, node, count)
    return np.float64(largest)


@inlined
def _sum_upwards(starts, sums, before, node, count):
    """Recompute the sums of all nodes above the blocks ``node[:count]``; ``node`` is
    overwritten."""
    for level in range(starts.shape[0] - 1):
        start = starts[level]
        above = starts[level + 1]
        # no more groups than blocks: recompute all groups
        if (above - start) >> _SHIFT <= uint64(count):
            for group in range((above - start) >> _SHIFT):
                _set_group(
                    sums,
                    before,
                    start + (uint64(group) << _SHIFT),
                    above + uint64(group),
                )
            continue
        for j in range(count):
            node[j] >>= _SHIFT
            _set_group(sums, before, start + (node[j] << _SHIFT), above + node[j])


@kernel
def fill(tree, start, count, value, alpha, eps):
    arrays = _arrays(tree)
    arrays.magnitude[start : start + count] = value
    arrays.weight[start : start + count] = _weight(value, alpha, eps)
    repair_range(tree, start, count)


@kernel
def repair_range(tree, start, count):
    """Recompute the blocks that hold the ``count`` rows from row ``start`` on, and all
    nodes above these blocks."""
    first = uint64(start) >> _ROWS
    last = uint64(start + count - 1) >> _ROWS
    starts, _, weight, sums, before, minima = _arrays(tree)
    for block in range(first, last + _ONE):
        _set_block(weight, sums, minima, uint64(block))
    for level in range(starts.shape[0] - 1):
        first = first >> _SHIFT
        last = last >> _SHIFT
        for group in range(first, last + _ONE):
            members = starts[level] + (uint64(group) << _SHIFT)
            above = starts[level + 1] + uint64(group)
            _set_group(sums, before, members, above)
            minima[above] = _smallest_of(minima, members)


@inlined
def _descend(arrays, mass, node):
    """Lead each position in ``mass`` from its ``node`` at the top to a block of rows;
    leave what remains of it."""
    starts, before = arrays.starts, arrays.before
    for level in range(starts.shape[0] - 2, -1, -1):
        start = starts[level]
        below = address_of(arrays.weight)
        if level:
            below = 8 * np.int64(starts[level - 1]) + address_of(before)
        for j in range(node.shape[0]):
            first = start + (node[j] << _SHIFT)
            member = uint64(0)
            for i in range(1, GROUP):
                member += uint64(mass[j] >= before[first + uint64(i)])
            mass[j] -= before[first + member]
            node[j] = (node[j] << _SHIFT) | member
            prefetch(below + 64 * np.int64(node[j]))  # a block or a group


@inlined
def _draw_in_blocks(weight, mass, node):
    """Replace each block in ``node`` by the first of its rows at which the cumulative
    weight exceeds ``mass``."""
    for j in range(node.shape[0]):
        first = node[j] << _ROWS
        row = first + min(
            count_sums(address_of(weight) + 4 * np.int64(first), mass[j]),
            uint64(BLOCK - 1),
        )
        # rounding may lead past the last positive weight of the block
        while row > first and not weight[row] > 0.0:
            row -= _ONE
        node[j] = row


@kernel
def draw(tree, uniform, rows_at, importance_at, batch, law: Stratification, rows):
    """Implement :func:`rlbuf_td.kernels.sum_tree.draw` for memory at addresses."""
    arrays = _arrays(carray(pointer(tree), 1, TREE))
    mass = carray(pointer(uniform), batch, np.float64)
    node = carray(pointer(rows_at), batch, np.uint64)
    root = arrays.starts[arrays.starts.shape[0] - 1]
    total = arrays.sums[root]
    if not total > 0.0:
        return False
    masses(mass, total, law.step)
    for j in range(batch):
        node[j] = 0
    _descend(arrays, mass, node)
    _draw_in_blocks(arrays.weight, mass, node)
    smallest = arrays.minima[root] if law.norm == BY_BUFFER else total / rows
    if law.norm == BY_BATCH:
        smallest = np.inf
        for j in range(batch):
            smallest = min(smallest, arrays.weight[node[j]])
    importance = carray(pointer(importance_at), batch, np.float32)
    exponent = np.float32(-law.beta)
    for j in range(batch):
        ratio = arrays.weight[node[j]] / smallest
        if 1e-37 < ratio < 1e37:
            # half the time of a float64 power
            importance[j] = np.float32(ratio) ** exponent
        else:
            importance[j] = ratio**-law.beta
    return True
