"""The CPU loops of :mod:`rlbuf_td.kernels.scan`; :func:`gae` and :func:`scan` take addresses of contiguous tensors.

The steps of one lane must be computed one after another, but lanes are independent. With one feature, GAE therefore
alternates between four lanes. With more features, the compiler vectorises over features. Unsigned indices avoid
numba's check for negative indices.
"""

import numpy as np
from numba import carray

from rlbuf_td.kernels.code_cache import cached_njit
from rlbuf_td.kernels.compiled import load, pointer
from rlbuf_td.kernels.threads import ParallelLoop
from rlbuf_td.kernels.threads_cpu import take_part

_contracted = cached_njit(nogil=True, fastmath={"contract"})


@_contracted
def _gae_lanes(gamma, decay, value, next_value, reward, done, terminated, advantage, target):
    lanes, steps = advantage.shape
    zero = advantage.dtype.type(0)
    for first in range(0, lanes, 4):
        end = min(first + 4, lanes)
        for row in range(first, end):
            i = np.uint64(row)
            for t in range(steps):
                ahead = zero if terminated[i, t] else gamma * next_value[i, t]
                advantage[i, t] = reward[i, t] + ahead - value[i, t]
        if end - first == 4:
            i = np.uint64(first)
            j, k, m = i + np.uint64(1), i + np.uint64(2), i + np.uint64(3)
            xi = xj = xk = xm = zero
            for back in range(steps):
                step = np.uint64(steps - 1 - back)
                xi = advantage[i, step] + (zero if done[i, step] else decay * xi)
                xj = advantage[j, step] + (zero if done[j, step] else decay * xj)
                xk = advantage[k, step] + (zero if done[k, step] else decay * xk)
                xm = advantage[m, step] + (zero if done[m, step] else decay * xm)
                advantage[i, step], advantage[j, step], advantage[k, step], advantage[m, step] = xi, xj, xk, xm
        else:
            for row in range(first, end):
                i, x = np.uint64(row), zero
                for back in range(steps):
                    step = np.uint64(steps - 1 - back)
                    x = advantage[i, step] + (zero if done[i, step] else decay * x)
                    advantage[i, step] = x
        for row in range(first, end):
            i = np.uint64(row)
            for t in range(steps):
                target[i, t] = advantage[i, t] + value[i, t]


@_contracted
def _gae_rows(gamma, decay, value, next_value, reward, done, terminated, advantage, target):
    lanes, steps, features = advantage.shape
    zero = advantage.dtype.type(0)
    for i in range(lanes):
        for t in range(steps):
            for f in range(features):
                ahead = zero if terminated[i, t, f] else gamma * next_value[i, t, f]
                advantage[i, t, f] = reward[i, t, f] + ahead - value[i, t, f]
        for f in range(features):
            target[i, steps - 1, f] = advantage[i, steps - 1, f] + value[i, steps - 1, f]
        for t in range(steps - 2, -1, -1):
            for f in range(features):
                later = zero if done[i, t, f] else decay * advantage[i, t + 1, f]
                x = advantage[i, t, f] + later
                advantage[i, t, f] = x
                target[i, t, f] = x + value[i, t, f]


@_contracted
def _scan(a, b, x):
    lanes, steps, features = x.shape
    zero = x.dtype.type(0)
    for i in range(lanes):
        for f in range(features):
            x[i, steps - 1, f] = a[i, steps - 1, f]
        for t in range(steps - 2, -1, -1):
            for f in range(features):
                carry = b[i, t, f]
                x[i, t, f] = a[i, t, f] + (zero if carry == zero else carry * x[i, t + 1, f])


@_contracted
def _blocks(numbers, flags, found, shape, dtype):
    value, next_value, reward = numbers
    done, terminated = flags
    return (
        carray(pointer(value), shape, dtype),
        carray(pointer(next_value), shape, dtype),
        carray(pointer(reward), shape, dtype),
        carray(pointer(done), shape, np.bool_),
        carray(pointer(terminated), shape, np.bool_),
        carray(pointer(found[0]), shape, dtype),
        carray(pointer(found[1]), shape, dtype),
    )


@_contracted
def _gae_at(gamma, decay, numbers, flags, found, shape, dtype):
    if shape[2] > 1:
        _gae_rows(gamma, decay, *_blocks(numbers, flags, found, shape, dtype))
    else:
        _gae_lanes(gamma, decay, *_blocks(numbers, flags, found, shape[:2], dtype))


@_contracted
def _scan_at(a, b, x, shape, dtype):
    _scan(carray(pointer(a), shape, dtype), carray(pointer(b), shape, dtype), carray(pointer(x), shape, dtype))


@_contracted
def gae(double, gamma, decay, value, next_value, reward, done, terminated, advantage, target, lanes, steps, features):
    """Implement :func:`rlbuf_td.kernels.scan.gae_contiguous`; the dtype is float64 if ``double``, else float32."""
    blocks = (value, next_value, reward), (done, terminated), (advantage, target), (lanes, steps, features)
    if double:
        _gae_at(gamma, decay, *blocks, np.float64)
    else:
        _gae_at(np.float32(gamma), np.float32(decay), *blocks, np.float32)


@_contracted
def scan(double, a, b, x, lanes, steps, features):
    """Implement :func:`rlbuf_td.kernels.scan.reverse_scan`; the dtype is float64 if ``double``, else float32."""
    if double:
        _scan_at(a, b, x, (lanes, steps, features), np.float64)
    else:
        _scan_at(a, b, x, (lanes, steps, features), np.float32)


@ParallelLoop
def gae_in_parts(job):
    """Run :func:`gae` on groups of four lanes; its arguments follow in the job."""
    numbers = carray(pointer(job + 24), 13, np.int64)
    double, gamma, decay = numbers[0], load(job + 32, np.float64), load(job + 40, np.float64)
    lanes, steps, features = numbers[10], numbers[11], numbers[12]
    begin, end = take_part(job)
    while begin < end:
        first, last = 4 * begin, min(4 * end, lanes)
        flag = first * steps * features  # bytes before the first of these lanes: of a flag, and of a number
        number = flag * (8 if double else 4)
        value, next_value, reward = numbers[3] + number, numbers[4] + number, numbers[5] + number
        done, terminated, advantage, target = (
            numbers[6] + flag,
            numbers[7] + flag,
            numbers[8] + number,
            numbers[9] + number,
        )
        columns = value, next_value, reward, done, terminated, advantage, target
        gae(double, gamma, decay, *columns, last - first, steps, features)
        begin, end = take_part(job)
