"""The CPU loop of :mod:`rlbuf_td.kernels.recency`; tensors are passed by address."""

import numpy as np

from rlbuf_td.kernels.compiled import kernel, load, store

_DIGITS = 2.0**53
_FLAT = -1e-9  # for a smaller total decay, ages are uniform, because rounding would spoil the logarithm


@kernel
def recent_rows(uniform, rows, count, lanes, newest, span, steps, log_decay: float):
    mass, scale = np.expm1(span * log_decay), 1 / log_decay
    is_flat = log_decay * span > _FLAT
    for i in range(count):
        u = load(uniform + 8 * i, np.float64)
        age = np.int64(u * span if is_flat else np.log(1 + u * mass) * scale)  # log1p would take twice the time
        step = newest - min(age, span - 1)
        row = (step + steps if step < 0 else step) * lanes
        store(rows + 8 * i, row + np.int64(u * _DIGITS) % lanes if lanes > 1 else row, np.int64)
