"""The loops of :mod:`rlbuf_td.kernels.draws`, and parts of the draws by priority."""

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import inlined, kernel, load, pointer, store
from rlbuf_td.kernels.draws import DIGITS
from rlbuf_td.kernels.strata import FIRST

# for a smaller total decay, ages are uniform, because rounding would spoil the
# logarithm
_FLAT = -1e-9
_ONE, _WORD = np.uint64(1), np.uint64(64)
# 2**64 divided by the golden ratio: close rows get distant places
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@inlined
def masses(uniform, total, step):
    """Replace uniform numbers by the positions that ``strata.masses`` returns, bit by
    bit: both forms draw equally.

    ``step`` is the result of ``strata.step_of``.
    """
    batch = uniform.shape[0]
    if step == 0:
        for j in range(batch):
            uniform[j] *= total
        return
    segment = np.int64(uniform[0] * FIRST) % batch
    width = total / batch
    for j in range(batch):
        uniform[j] = (segment + uniform[j]) * width
        segment += step
        if segment >= batch:
            segment -= batch


@inlined
def acceptable(index, td_error, rows):
    """Whether every index is in ``[-1, rows)`` and every TD error is finite; an index
    of -1 means no row."""
    good = True
    for j in range(index.shape[0]):
        good &= (index[j] >= -1) & (index[j] < rows) & np.isfinite(td_error[j])
    return good


@kernel
def recent_rows(uniform, rows, count, lanes, newest, span, steps, log_decay: float):
    """Write the rows that :func:`rlbuf_td.kernels.draws.recent_rows_` draws to the
    address ``rows``."""
    mass = np.expm1(span * log_decay)
    scale = 1 / log_decay
    is_flat = log_decay * span > _FLAT
    for i in range(count):
        u = load(uniform + 8 * i, np.float64)
        # log1p would take twice the time
        age = np.int64(u * span if is_flat else np.log(1 + u * mass) * scale)
        step = newest - min(age, span - 1)
        row = (step + steps if step < 0 else step) * lanes
        store(
            rows + 8 * i,
            row + np.int64(u * DIGITS) % lanes if lanes > 1 else row,
            np.int64,
        )


@kernel
def append_distinct(out_at, size, kept, values_at, value_count):
    """Implement :func:`rlbuf_td.kernels.draws.append_distinct_` for arrays at
    addresses."""
    out = carray(pointer(out_at), size, np.int64)
    values = carray(pointer(values_at), value_count, np.int64)
    # A hash set with open addressing. It has at least twice as many places as ``out``,
    # so a free one is always found.
    bits = _ONE
    while (_ONE << bits) < np.uint64(2 * len(out)):
        bits += _ONE
    slots = np.full(np.int64(_ONE << bits), -1, np.int64)
    last = (_ONE << bits) - _ONE
    count = 0
    for i in range(kept + len(values)):
        if count == len(out):
            break
        value = out[i] if i < kept else values[i - kept]
        slot = (np.uint64(value) * _SPREAD) >> (_WORD - bits)
        while slots[slot] >= 0 and slots[slot] != value:
            slot = (slot + _ONE) & last
        if slots[slot] < 0:
            slots[slot] = out[count] = value
            count += 1
    return count
