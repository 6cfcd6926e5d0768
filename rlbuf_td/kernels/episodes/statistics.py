"""Adding steps up to episodes, on the CPU. The reference is the oracle in ``tests/test_stats.py``.

Steps are walked in the order of time, lanes inside, so that episodes come out in the order in which they ended.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from rlbuf_td.kernels.compiled import compiled, pointer

SUM, MEAN, LAST = 0, 1, 2
FREE = np.iinfo(np.int64).min  # the key of a slot that no episode uses
PADDING = -1  # the trajectory number that TorchRL gives to rows that are none
STEPS, EPISODES, WRITES = 0, 1, 2  # places in ``counters``


@compiled
def _slot(keys, key, hint):
    """Return the slot of an open episode, or a free one for it, or -1 if there is neither; look at ``hint`` first."""
    slots, free = keys.shape[0], -1
    for k in range(slots):
        slot = (hint + k) % slots  # a hint may be of a time when there were more lanes than slots
        if keys[slot] == key:
            return slot
        if free < 0 and keys[slot] == FREE:
            free = slot
    return free


@compiled
def _number(address, row, is_double):
    if is_double:
        return carray(pointer(address), row + 1, np.float64)[row]
    return np.float64(carray(pointer(address), row + 1, np.float32)[row])


@compiled
def _flag(address, row):
    return carray(pointer(address), row + 1, np.uint8)[row]


@compiled
def _finish(slot, now, reduction, lengths, sums, record):
    """Write what an episode amounts to: when it ended, its length, its metrics."""
    record[0] = now
    record[1] = lengths[slot]
    for m in range(reduction.shape[0]):
        record[2 + m] = sums[slot, m] / lengths[slot] if reduction[m] == MEAN else sums[slot, m]


@compiled
def count_steps(
    start,
    shape,
    strides,
    inputs,
    is_double,
    reduction,
    keys,
    lengths,
    touched,
    sums,
    lane_slot,
    records,
    ends,
    counters,
):
    """Count the steps of one write from number ``start`` on; return how many of them are done.

    Fewer than there are means: no slot is free. Make room, and call again from there.

    Args:
        start: number of the first step, time-major.
        shape: time steps and lanes of the data; ``strides``: rows from one to the next of each.
        strides: see ``shape``.
        inputs: addresses of contiguous blocks: trajectory numbers (int64; 0: lanes are trajectories), ends (one byte),
            then M metrics (float32 or float64), then R reasons (one byte).
        is_double: which of the metrics are float64, ``[M]``.
        reduction: ``SUM``, ``MEAN`` or ``LAST``, ``[M]``.
        keys: of the open episodes, ``[S]``, ``FREE`` where there is none; with them their ``lengths``, when they were
            ``touched``, and the ``sums`` of their metrics, ``[S, M]``.
        lengths: see ``keys``.
        touched: see ``keys``.
        sums: see ``keys``.
        lane_slot: the slot that each lane used last: where to look first.
        records: a ring of finished episodes, ``[H, 2 + M]``; ``ends``: their reasons, ``[H, R]``.
        ends: see ``records``.
        counters: steps, episodes and writes so far.
    """
    steps, lanes = shape
    metrics, reasons = is_double.shape[0], ends.shape[1]
    for number in range(start, steps * lanes):
        t, lane = number // lanes, number % lanes
        row = t * strides[0] + lane * strides[1]
        key = np.int64(-2 - lane)  # lanes and trajectory numbers never meet
        if inputs[0] != 0:
            key = carray(pointer(inputs[0]), row + 1, np.int64)[row]
            if key == PADDING:
                continue
        slot = _slot(keys, key, lane_slot[lane])
        if slot < 0:
            return number
        if keys[slot] == FREE:
            keys[slot] = key
            lengths[slot] = 0
            sums[slot] = 0.0
        lane_slot[lane] = slot
        touched[slot] = counters[WRITES]
        lengths[slot] += 1
        counters[STEPS] += 1
        for m in range(metrics):
            x = _number(inputs[2 + m], row, is_double[m])
            sums[slot, m] = x if reduction[m] == LAST else sums[slot, m] + x
        if _flag(inputs[1], row):
            at = counters[EPISODES] % records.shape[0]
            _finish(slot, counters[STEPS], reduction, lengths, sums, records[at])
            for r in range(reasons):
                ends[at, r] = _flag(inputs[2 + metrics + r], row)
            keys[slot] = FREE
            counters[EPISODES] += 1
    return steps * lanes
