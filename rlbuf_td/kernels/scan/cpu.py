"""The loops of :mod:`rlbuf_td.kernels.scan`, over contiguous tensors,
``[lanes, steps, features]``, at addresses.

``dtype`` is np.float32 or np.float64; a loop is compiled for each.

The steps of one lane must be computed one after another, but lanes are independent.
With one feature, GAE therefore alternates between four lanes. With more features, the
compiler vectorises over features. Unsigned indices avoid numba's check for negative
indices.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from rlbuf_td.kernels.code_cache import cached_njit
from rlbuf_td.kernels.compiled import inlined, pointer

_contracted = cached_njit(nogil=True, fastmath={"contract"})


class Rollout(NamedTuple):
    """The arguments of :func:`gae`: numbers, and addresses of ``[lanes, steps,
    features]`` elements."""

    gamma: float
    decay: float  # gamma * lmbda
    # inputs
    value: int
    next_value: int
    reward: int
    done: int
    terminated: int
    # results
    advantage: int
    target: int
    # numbers
    lanes: int
    steps: int
    features: int


@inlined
def _gae_lanes(gamma, decay, columns):
    """Compute advantages and targets of one feature; four lanes at a time hide the
    latency of sums."""
    value, next_value, reward, done, terminated, advantage, target = columns
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
            j = i + np.uint64(1)
            k = i + np.uint64(2)
            m = i + np.uint64(3)
            xi = xj = xk = xm = zero
            for back in range(steps):
                step = np.uint64(steps - 1 - back)
                xi = advantage[i, step] + (zero if done[i, step] else decay * xi)
                xj = advantage[j, step] + (zero if done[j, step] else decay * xj)
                xk = advantage[k, step] + (zero if done[k, step] else decay * xk)
                xm = advantage[m, step] + (zero if done[m, step] else decay * xm)
                advantage[i, step] = xi
                advantage[j, step] = xj
                advantage[k, step] = xk
                advantage[m, step] = xm
        else:
            for row in range(first, end):
                i = np.uint64(row)
                x = zero
                for back in range(steps):
                    step = np.uint64(steps - 1 - back)
                    x = advantage[i, step] + (zero if done[i, step] else decay * x)
                    advantage[i, step] = x
        for row in range(first, end):
            i = np.uint64(row)
            for t in range(steps):
                target[i, t] = advantage[i, t] + value[i, t]


@inlined
def _gae_rows(gamma, decay, columns):
    """Compute advantages and targets of several features."""
    value, next_value, reward, done, terminated, advantage, target = columns
    lanes, steps, features = advantage.shape
    zero = advantage.dtype.type(0)
    for i in range(lanes):
        for t in range(steps):
            for f in range(features):
                ahead = zero if terminated[i, t, f] else gamma * next_value[i, t, f]
                advantage[i, t, f] = reward[i, t, f] + ahead - value[i, t, f]
        for f in range(features):
            target[i, steps - 1, f] = (
                advantage[i, steps - 1, f] + value[i, steps - 1, f]
            )
        for t in range(steps - 2, -1, -1):
            for f in range(features):
                later = zero if done[i, t, f] else decay * advantage[i, t + 1, f]
                x = advantage[i, t, f] + later
                advantage[i, t, f] = x
                target[i, t, f] = x + value[i, t, f]


@_contracted
def gae(rollout: Rollout, dtype):
    """Implement :func:`rlbuf_td.kernels.scan.gae`."""
    gamma = dtype(rollout.gamma)
    decay = dtype(rollout.decay)
    lanes, steps, features = rollout.lanes, rollout.steps, rollout.features
    if features > 1:
        _gae_rows(gamma, decay, _columns(rollout, (lanes, steps, features), dtype))
    else:
        _gae_lanes(gamma, decay, _columns(rollout, (lanes, steps), dtype))


@inlined
def _columns(rollout, shape, dtype):
    """Return the arrays of a rollout, in the order of the arguments of GAE."""
    return (
        carray(pointer(rollout.value), shape, dtype),
        carray(pointer(rollout.next_value), shape, dtype),
        carray(pointer(rollout.reward), shape, dtype),
        carray(pointer(rollout.done), shape, np.bool_),
        carray(pointer(rollout.terminated), shape, np.bool_),
        carray(pointer(rollout.advantage), shape, dtype),
        carray(pointer(rollout.target), shape, dtype),
    )


@_contracted
def scan(terms, carry, sums, lanes, steps, features, dtype):
    """Implement :func:`rlbuf_td.kernels.scan.reverse_scan`."""
    shape = (lanes, steps, features)
    zero = dtype(0)
    a = carray(pointer(terms), shape, dtype)
    b = carray(pointer(carry), shape, dtype)
    x = carray(pointer(sums), shape, dtype)
    for i in range(lanes):
        for f in range(features):
            x[i, steps - 1, f] = a[i, steps - 1, f]
        for t in range(steps - 2, -1, -1):
            for f in range(features):
                ahead = b[i, t, f]
                x[i, t, f] = a[i, t, f] + (
                    zero if ahead == zero else ahead * x[i, t + 1, f]
                )
