"""The compiled part of :mod:`rlbuf_td.kernels.threads`."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from rlbuf_td.kernels.compiled import address_of, inlined, kernel, load, pointer, store
from rlbuf_td.kernels.threads import COST, SIZES, OpenMP, ParallelLoop, openmp

_PART, _PARTS = 128 << 10, 8  # bytes in a part of a batch, and largest number of parts per thread
_FIRST = 3  # calls with one thread at the beginning, of which the fastest counts: the first one touches new memory
_CHECK = 32  # calls with threads until the next with one thread, which keeps `COST.alone` up to date
# Debts are in calls with one thread. A call that pays off a debt pays `_PAID`, so threads add a tenth to the time at
# most. Threads may lose as much as they have just saved, `_SAVED` at most. `_LOST` bounds the time until a new attempt.
_PAID, _SAVED, _LOST = 0.1, 1.0, 100.0
_INT, _LONG = ir.IntType(32), ir.IntType(64)


@intrinsic
def _count_up(typing_context: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, and return the old value; several threads may do so at a time."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.PointerType(_LONG))
        return builder.atomic_rmw("add", place, ir.Constant(_LONG, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def _call_threads(typing_context: Any, function: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.PointerType(ir.FunctionType(_INT, []))
        return builder.sext(builder.call(builder.inttoptr(arguments[0], kind), []), _LONG)

    return types.int64(types.int64), generate


@intrinsic
def _call_run(typing_context: Any, function: Any, loop: Any, job: Any, threads: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.PointerType(ir.FunctionType(ir.VoidType(), [_LONG, _LONG, _INT, _INT]))
        function, loop, job, threads = arguments
        given = [loop, job, builder.trunc(threads, _INT), ir.Constant(_INT, 0)]
        builder.call(builder.inttoptr(function, kind), given)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def _call_loop(typing_context: Any, loop: Any, job: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.PointerType(ir.FunctionType(ir.VoidType(), [_LONG]))
        builder.call(builder.inttoptr(arguments[0], kind), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _call_clock(typing_context: Any, function: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.PointerType(ir.FunctionType(ir.DoubleType(), []))
        return builder.call(builder.inttoptr(arguments[0], kind), [])

    return types.float64(types.int64), generate


@inlined
def take_part(job):
    """Return begin and end of the next part of a job, or 0, 0; see :class:`rlbuf_td.kernels.threads.ParallelLoop`."""
    part, parts, count = _count_up(job), load(job + 8, np.int64), load(job + 16, np.int64)
    return (count * part // parts, count * (part + 1) // parts) if part < parts else (0, 0)


@inlined
def size_of(nbytes, count):
    """Return the number of bits of the bytes per item."""
    bits, rest = 0, nbytes // max(count, 1)
    while rest > 0:
        rest >>= 1
        bits += 1
    return min(bits, SIZES - 1)


@inlined
def takes_threads(cost):
    """Whether the next call shall use threads: the time of one thread is known, and they owe no time."""
    return cost.alone > 0.0 and cost.debt <= 0.0 and 0 <= cost.calls < _CHECK


@inlined
def note_threads(cost, seconds):
    """Note the time of a call in threads, in seconds per byte."""
    cost.debt = min(max(cost.debt + seconds / cost.alone - 1.0, -_SAVED), _LOST)
    cost.calls += 1


@inlined
def note_alone(cost, seconds):
    """Note the time of a call in one thread, in seconds per byte."""
    if cost.alone == 0.0:
        cost.alone, cost.calls = seconds, -_FIRST
    elif cost.calls < 0:
        cost.alone = min(cost.alone, seconds)
    else:
        cost.alone += (min(seconds, 2.0 * cost.alone) - cost.alone) / 4.0
    cost.calls = min(cost.calls + 1, 0)
    if cost.debt > 0.0:
        cost.debt -= _PAID


@kernel
def run_parts(functions, loop, job, nbytes):
    """Run a loop of ``nbytes`` bytes, in the threads that torch may use while these save time, otherwise in one.

    Args:
        functions: an :class:`~rlbuf_td.kernels.threads.OpenMP`.
        loop: ``ParallelLoop.addresses``.
        job: the address of a job; its first two numbers are written here.
        nbytes: bytes that the loop reads or writes.
    """
    function, costs = loop
    count = load(job + 16, np.int64)
    threads = _call_threads(functions.threads) if functions.run else 1
    store(job, 0, np.int64)
    store(job + 8, 1, np.int64)
    if threads < 2 or nbytes <= 0:
        _call_loop(function, job)
        return
    cost = carray(pointer(costs), SIZES, COST)[size_of(nbytes, count)]
    began = _call_clock(functions.clock)
    if takes_threads(cost):
        store(job + 8, min(count, threads * _PARTS, max(threads, nbytes // _PART)), np.int64)
        _call_run(functions.run, function, job, threads)
        note_threads(cost, (_call_clock(functions.clock) - began) / nbytes)
    else:
        _call_loop(function, job)
        note_alone(cost, max(_call_clock(functions.clock) - began, 1e-9) / nbytes)


@kernel
def run_loop(loops, place, nbytes, numbers, first, second):
    """Run loop number ``place`` of ``loops``, the address of :func:`rlbuf_td.kernels.threads.addresses_of_loops`.

    The job holds up to seven ``numbers``, the first of which is the size of the batch, and two floats.
    """
    job = np.empty(11, np.int64)
    for k in range(len(numbers)):
        job[2 + k] = numbers[k]
    store(address_of(job) + 72, first, np.float64)
    store(address_of(job) + 80, second, np.float64)
    functions = OpenMP(load(loops, np.int64), load(loops + 8, np.int64), load(loops + 16, np.int64))
    loop = load(loops + 24 + 16 * place, np.int64), load(loops + 32 + 16 * place, np.int64)
    run_parts(functions, loop, address_of(job), nbytes)
    return job[0]  # uses the job, so that its memory is not freed earlier


def run_in_parts(loop: ParallelLoop, nbytes: int, count: int, arguments: tuple[float, ...]) -> None:
    """Run a loop on a batch of ``count`` items, with ``nbytes`` bytes in all; the arguments follow in the job."""
    job = np.empty(3 + len(arguments), np.int64)
    job[2] = count
    for place, argument in enumerate(arguments, 3):
        (job.view(np.float64) if isinstance(argument, float) else job)[place] = argument
    run_parts(openmp(), loop.addresses, job.ctypes.data, nbytes)
