"""Computes episode statistics on the CPU; episodes are recorded in the order in which
they end."""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rlbuf_td.kernels.dispatch import OFF

if TYPE_CHECKING or not OFF:
    from rlbuf_td.kernels.compiled import kernel, load
else:  # Python runs the same loops, slowly

    def kernel(function: Callable[..., object]) -> Callable[..., object]:
        return function

    def load(address: int, kind: type[np.generic]) -> np.generic:
        return np.frombuffer(
            (ctypes.c_char * np.dtype(kind).itemsize).from_address(int(address)), kind
        )[0]


SUM, MEAN, LAST = 0, 1, 2
FREE = np.iinfo(np.int64).min  # the key of an unused slot in the table of open episodes
PADDING = -1  # the trajectory id that TorchRL gives to padding
STEPS, EPISODES, WRITES = 0, 1, 2  # indices into ``counters``


@kernel
def _slot(keys, key, hint):
    """Return the slot of the open episode ``key``, or a free slot if there is none, or
    -1 if no slot is free."""
    slots = keys.shape[0]
    free = -1
    for k in range(slots):
        slot = (hint + k) % slots  # the hint may exceed the present number of slots
        if keys[slot] == key:
            return slot
        if free < 0 and keys[slot] == FREE:
            free = slot
    return free


class _Open(NamedTuple):
    keys: np.ndarray
    lengths: np.ndarray
    sums: np.ndarray


class _Finished(NamedTuple):
    records: np.ndarray
    ends: np.ndarray
    counters: np.ndarray


@kernel
def _finish(slot, row, reasons, reduction, episodes, finished):
    """Record an episode that has ended, and free its slot."""
    (keys, lengths, sums), (records, ends, counters) = episodes, finished
    episode = counters[EPISODES] % records.shape[0]
    records[episode, 0] = counters[STEPS]
    records[episode, 1] = lengths[slot]
    for m in range(reduction.shape[0]):
        records[episode, 2 + m] = (
            sums[slot, m] / lengths[slot] if reduction[m] == MEAN else sums[slot, m]
        )
    for r in range(ends.shape[1]):
        ends[episode, r] = load(reasons[r] + row, np.uint8)
    keys[slot] = FREE
    counters[EPISODES] += 1


@kernel
def count_steps(
    start, shape, strides, lane_ids, inputs, is_double, reduction,
    keys, lengths, touched, sums, lane_slot, records, ends, counters,
):  # fmt: skip
    """Add the steps of one write to the statistics; return ``T * E``, or the first step
    that finds no free slot.

    Args:
        start: number of the first step to add; steps are numbered in time order, with E
            steps at each of T times.
        shape: (T, E).
        strides: elements between time steps, and between lanes, in each input.
        lane_ids: the lane of each time step if E is 1 and the steps are of unlike
            lanes; otherwise empty.
        inputs: addresses of int64 trajectory ids (0: none), bool ``done``, M metrics
            and R bool end reasons.
        is_double: for each metric, whether it is float64, else float32.
        reduction: for each metric, ``SUM``, ``MEAN`` or ``LAST``.
        keys: for each slot, the id of its open episode, or ``FREE``.
        lengths: for each slot, the number of steps.
        touched: for each slot, the number of the last write that added a step.
        sums: for each slot, the metrics, ``[S, M]``.
        lane_slot: for each lane, the slot used last.
        records: ring of finished episodes, ``[H, 2 + M]``: total steps at the end,
            length, metrics.
        ends: end reasons of the same episodes, ``[H, R]``.
        counters: numbers of steps, finished episodes and writes.
    """
    steps, lanes = shape
    metrics = is_double.shape[0]
    for number in range(start, steps * lanes):
        t = number // lanes
        lane = number % lanes
        row = t * strides[0] + lane * strides[1]
        if len(lane_ids):
            lane = lane_ids[number]
        # no trajectory id
        key = load(inputs[0] + 8 * row, np.int64) if inputs[0] else np.int64(-2 - lane)
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
            address = inputs[2 + m]
            x = (
                load(address + 8 * row, np.float64)
                if is_double[m]
                else np.float64(load(address + 4 * row, np.float32))
            )
            sums[slot, m] = x if reduction[m] == LAST else sums[slot, m] + x
        if load(inputs[1] + row, np.uint8):
            episodes = _Open(keys, lengths, sums)
            finished = _Finished(records, ends, counters)
            _finish(slot, row, inputs[2 + metrics :], reduction, episodes, finished)
    return steps * lanes
