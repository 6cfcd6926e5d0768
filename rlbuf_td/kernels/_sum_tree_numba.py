"""The sum tree on the CPU: the same functions as :mod:`rlbuf_td.kernels.sum_tree`, over NumPy arrays.

Levels outside, batch inside: the cache misses of a level overlap, where following one row at a time would wait for
each. Unsigned indices spare numba's check for negative ones.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from rlbuf_td.kernels.sum_tree import BLOCK, LARGEST, REFUSED, SMALLEST

#: The Python error model would check every division for zero, which keeps loops from being vectorised.
_kernel = njit(cache=True, nogil=True, error_model="numpy")
_ONE, _TWO, _THREE, _FOUR = (np.uint64(k) for k in (1, 2, 3, 4))
_BLOCK = np.uint64(BLOCK)
_SHIFT = np.uint64(BLOCK.bit_length() - 1)


@_kernel
def _weight(magnitude, alpha, eps):
    priority = magnitude + eps
    if priority <= 0.0:
        return 1.0 if alpha == 0.0 else 0.0
    return min(max(priority**alpha, SMALLEST), LARGEST)


@_kernel
def _set_block(weight, sums, minima, block, leaves):
    """Recompute one block; return whether its minimum changed."""
    row = block << _SHIFT
    half = (weight[row] + weight[row + _ONE]) + (weight[row + _TWO] + weight[row + _THREE])
    row += _FOUR
    total = half + ((weight[row] + weight[row + _ONE]) + (weight[row + _TWO] + weight[row + _THREE]))
    smallest = np.inf
    for k in range(BLOCK):
        w = weight[(block << _SHIFT) + uint64(k)]
        smallest = min(smallest, w if w > 0.0 else np.inf)
    node = block + leaves
    sums[node] = total
    changed = minima[node] != smallest
    minima[node] = smallest
    return changed


@_kernel
def _raise_minimum(minima, node):
    """Recompute the minima above ``node`` until one does not change."""
    while node > _ONE:
        node >>= _ONE
        left, right = minima[node << _ONE], minima[(node << _ONE) | _ONE]
        smallest = min(left, right)
        if minima[node] == smallest:
            return
        minima[node] = smallest


@_kernel
def _acceptable(index, td_error, rows):
    good = True
    for j in range(index.shape[0]):
        good &= (index[j] >= -1) & (index[j] < rows) & np.isfinite(td_error[j])
    return good


@_kernel
def update(magnitude, weight, sums, minima, index, td_error, rows, alpha, eps):
    """See :func:`rlbuf_td.kernels.sum_tree.update_`."""
    if not _acceptable(index, td_error, rows):
        return REFUSED
    leaves = uint64(sums.shape[0] // 2)
    node = np.empty(index.shape[0], np.uint64)
    largest = -1.0
    count = 0
    for j in range(index.shape[0]):
        if index[j] >= 0:
            row = uint64(index[j])
            error = abs(np.float64(td_error[j]))
            magnitude[row] = error
            weight[row] = _weight(error, alpha, eps)
            largest = max(largest, error)
            node[count] = row >> _SHIFT
            count += 1
    for j in range(count):
        if _set_block(weight, sums, minima, node[j], leaves):
            _raise_minimum(minima, node[j] + leaves)
        node[j] += leaves
    _sum_upwards(sums, node, count, leaves)
    return largest


@_kernel
def _sum_upwards(sums, node, count, leaves):
    """Recompute the sums above ``count`` nodes of the lowest stored level."""
    size = leaves
    while size > _ONE:
        size >>= _ONE
        if size <= uint64(count):  # fewer nodes than rows: take this level whole, and all above it
            while size >= _ONE:
                for k in range(size, size << _ONE):
                    sums[k] = sums[2 * k] + sums[2 * k + 1]
                size >>= _ONE
            return
        for j in range(count):
            parent = node[j] >> _ONE
            node[j] = parent
            sums[parent] = sums[parent << _ONE] + sums[(parent << _ONE) | _ONE]


@_kernel
def fill(magnitude, weight, sums, minima, start, count, value, alpha, eps):
    """See :func:`rlbuf_td.kernels.sum_tree.fill_`."""
    leaves = uint64(sums.shape[0] // 2)
    new = _weight(value, alpha, eps)
    magnitude[start : start + count] = value
    weight[start : start + count] = new
    first, last = uint64(start) >> _SHIFT, uint64(start + count - 1) >> _SHIFT
    for block in range(first, last + _ONE):
        _set_block(weight, sums, minima, uint64(block), leaves)
    first, last = first + leaves, last + leaves
    while first > _ONE:
        first, last = first >> _ONE, last >> _ONE
        for k in range(first, last + _ONE):
            node = uint64(k)
            left, right = node << _ONE, (node << _ONE) | _ONE
            sums[node] = sums[left] + sums[right]
            minima[node] = min(minima[left], minima[right])


@_kernel
def _draw_in_blocks(weight, leaves, mass, node):
    """Go on for the three levels within a block, whose sums are added on the way: ``node`` becomes a row."""
    for j in range(node.shape[0]):
        row = (node[j] - leaves) << _SHIFT
        four = row | _FOUR
        left = (weight[row] + weight[row | _ONE]) + (weight[row | _TWO] + weight[row | _THREE])
        total = (weight[four] + weight[four | _ONE]) + (weight[four | _TWO] + weight[four | _THREE])
        right = (mass[j] >= left) & (total > 0.0)
        mass[j] -= left * right
        node[j] = row | (uint64(right) << _TWO)
    for j in range(node.shape[0]):
        row = node[j]
        left = weight[row] + weight[row | _ONE]
        right = (mass[j] >= left) & (weight[row | _TWO] + weight[row | _THREE] > 0.0)
        mass[j] -= left * right
        node[j] = row | (uint64(right) << _ONE)
    for j in range(node.shape[0]):
        row = node[j]
        node[j] = row | uint64((mass[j] >= weight[row]) & (weight[row | _ONE] > 0.0))


@_kernel
def draw(weight, sums, minima, uniform, stratified, rows, beta, mode, index, importance):
    """See :func:`rlbuf_td.kernels.sum_tree.draw`; ``mode``: 0 the buffer's norm, 1 the batch's, 2 none."""
    if not sums[1] > 0.0:
        return False
    leaves = uint64(sums.shape[0] // 2)
    batch = uniform.shape[0]
    mass, node = uniform, index.view(np.uint64)  # each becomes what is asked of it, step by step, in place
    segment = sums[1] / batch if stratified else sums[1]
    for j in range(batch):
        mass[j] = ((j if stratified else 0) + uniform[j]) * segment
        node[j] = _ONE
    level = leaves
    while level > _ONE:
        level >>= _ONE
        for j in range(batch):
            child = node[j] << _ONE
            left = sums[child]
            right = (mass[j] >= left) & (sums[child | _ONE] > 0.0)
            mass[j] -= left * right
            node[j] = child | uint64(right)
    _draw_in_blocks(weight, leaves, mass, node)
    smallest = minima[1] if mode == 0 else np.inf if mode == 1 else sums[1] / rows
    if mode == 1:
        for j in range(batch):
            smallest = min(smallest, weight[node[j]])
    _importance(weight, node, smallest, beta, importance)
    return True


@_kernel
def _importance(weight, row, smallest, beta, importance):
    exponent = np.float32(-beta)
    for j in range(row.shape[0]):
        ratio = weight[row[j]] / smallest
        if 1e-37 < ratio < 1e37:
            importance[j] = np.float32(ratio) ** exponent  # half the time of the power in float64
        else:
            importance[j] = ratio**-beta
