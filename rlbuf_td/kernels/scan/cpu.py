"""The loops of :mod:`rlbuf_td.kernels.scan` on the CPU.

Entry points take addresses, not arrays: turning seven tensors into NumPy arrays costs more than the whole
estimate of a short rollout. The callers vouch that each address is that of a contiguous block of the size and
type in question.

Loop order. With one feature (``[E, T, 1]``) a lane is a chain in which each step waits for the next one; four
lanes are walked side by side so that their chains overlap. With more features (time-major rollouts) whole
rows are independent and contiguous, and the compiler vectorises over them. In the chains indices are
unsigned, for numba would otherwise guard each access against negative ones; in the rows, where the compiler
vectorises signed ones just as well, they are not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from rlbuf_td.kernels.compiled import pointer

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "fastmath": {"contract"}}


@njit(**_OPTIONS)
def _gae_lanes(gamma, decay, value, next_value, reward, done, terminated, advantage, target):
    """GAE of ``[L, T]`` arrays, up to the last multiple of four lanes: four chains side by side."""
    lanes, steps = advantage.shape
    zero = advantage.dtype.type(0)
    for block in range(lanes // 4):
        i = np.uint64(4 * block)
        j, k, m = i + np.uint64(1), i + np.uint64(2), i + np.uint64(3)
        for offset in range(4):
            row = i + np.uint64(offset)
            for t in range(steps):
                ahead = zero if terminated[row, t] else gamma * next_value[row, t]
                advantage[row, t] = reward[row, t] + ahead - value[row, t]
        xi = xj = xk = xm = zero
        for back in range(steps):
            step = np.uint64(steps - 1 - back)
            xi = advantage[i, step] + (zero if done[i, step] else decay * xi)
            xj = advantage[j, step] + (zero if done[j, step] else decay * xj)
            xk = advantage[k, step] + (zero if done[k, step] else decay * xk)
            xm = advantage[m, step] + (zero if done[m, step] else decay * xm)
            advantage[i, step], advantage[j, step], advantage[k, step], advantage[m, step] = xi, xj, xk, xm
        for offset in range(4):
            row = i + np.uint64(offset)
            for t in range(steps):
                target[row, t] = advantage[row, t] + value[row, t]


@njit(**_OPTIONS)
def _gae_lane(lane, gamma, decay, value, next_value, reward, done, terminated, advantage, target):
    """GAE of one lane of ``[L, T]`` arrays."""
    steps, i = advantage.shape[1], np.uint64(lane)
    x = zero = advantage.dtype.type(0)
    for back in range(steps):
        t = np.uint64(steps - 1 - back)
        ahead = zero if terminated[i, t] else gamma * next_value[i, t]
        x = (reward[i, t] + ahead - value[i, t]) + (zero if done[i, t] else decay * x)
        advantage[i, t] = x
        target[i, t] = x + value[i, t]


@njit(**_OPTIONS)
def _gae_rows(gamma, decay, value, next_value, reward, done, terminated, advantage, target):
    """GAE of ``[L, T, F]`` arrays, one contiguous row of features after the other."""
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


@njit(**_OPTIONS)
def _gae(gamma, decay, value, next_value, reward, done, terminated, advantage, target):
    lanes, steps, features = advantage.shape
    if features > 1:
        _gae_rows(gamma, decay, value, next_value, reward, done, terminated, advantage, target)
        return
    shape = lanes, steps
    flags = done.reshape(shape), terminated.reshape(shape)
    given = value.reshape(shape), next_value.reshape(shape), reward.reshape(shape), *flags
    found = advantage.reshape(shape), target.reshape(shape)
    _gae_lanes(gamma, decay, *given, *found)
    for lane in range(lanes // 4 * 4, lanes):
        _gae_lane(lane, gamma, decay, *given, *found)


@njit(**_OPTIONS)
def _scan(a, b, x):
    """``x[t] = a[t] + b[t] * x[t + 1]`` over ``[L, T, F]`` arrays."""
    lanes, steps, features = x.shape
    zero = x.dtype.type(0)
    for i in range(lanes):
        for f in range(features):
            x[i, steps - 1, f] = a[i, steps - 1, f]
        for t in range(steps - 2, -1, -1):
            for f in range(features):
                carry = b[i, t, f]
                x[i, t, f] = a[i, t, f] + (zero if carry == zero else carry * x[i, t + 1, f])


@njit(**_OPTIONS)
def _gae_at(gamma, decay, addresses, shape, dtype):
    _gae(
        gamma,
        decay,
        carray(pointer(addresses[0]), shape, dtype),
        carray(pointer(addresses[1]), shape, dtype),
        carray(pointer(addresses[2]), shape, dtype),
        carray(pointer(addresses[3]), shape, np.bool_),
        carray(pointer(addresses[4]), shape, np.bool_),
        carray(pointer(addresses[5]), shape, dtype),
        carray(pointer(addresses[6]), shape, dtype),
    )


@njit(**_OPTIONS)
def _scan_at(a, b, x, shape, dtype):
    _scan(carray(pointer(a), shape, dtype), carray(pointer(b), shape, dtype), carray(pointer(x), shape, dtype))


@njit(**_OPTIONS)
def gae_float32(gamma, decay, value, next_value, reward, done, terminated, advantage, target, lanes, steps, features):
    """Write advantage and target of float32 blocks ``[lanes, steps, features]`` given by their addresses."""
    addresses = (value, next_value, reward, done, terminated, advantage, target)
    _gae_at(np.float32(gamma), np.float32(decay), addresses, (lanes, steps, features), np.float32)


@njit(**_OPTIONS)
def gae_float64(gamma, decay, value, next_value, reward, done, terminated, advantage, target, lanes, steps, features):
    """Do as :func:`gae_float32` for float64 blocks."""
    addresses = (value, next_value, reward, done, terminated, advantage, target)
    _gae_at(gamma, decay, addresses, (lanes, steps, features), np.float64)


@njit(**_OPTIONS)
def scan_float32(a, b, x, lanes, steps, features):
    """Scan float32 blocks ``[lanes, steps, features]`` given by their addresses."""
    _scan_at(a, b, x, (lanes, steps, features), np.float32)


@njit(**_OPTIONS)
def scan_float64(a, b, x, lanes, steps, features):
    """Scan float64 blocks ``[lanes, steps, features]`` given by their addresses."""
    _scan_at(a, b, x, (lanes, steps, features), np.float64)
