"""The compiled part of :mod:`rlbuf_td.kernels.threads`."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rlbuf_td.kernels.compiled import address_of, inlined, kernel, load, store

_PART, _PARTS = 128 << 10, 8  # bytes in a part of a batch, and largest number of parts per thread
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


@inlined
def take_part(job):
    """Return begin and end of the next part of a job, or 0, 0; see :class:`rlbuf_td.kernels.threads.ParallelLoop`."""
    part, parts, count = _count_up(job), load(job + 8, np.int64), load(job + 16, np.int64)
    return (count * part // parts, count * (part + 1) // parts) if part < parts else (0, 0)


@kernel
def run_parts(functions, loop, job, nbytes):
    """Run a loop of ``nbytes`` bytes, with the results of :func:`rlbuf_td.kernels.threads.openmp`.

    Return False if torch may use one thread only.
    """
    run, threads_of = functions
    threads = _call_threads(threads_of)
    if threads < 2:
        return False
    store(job, 0, np.int64)
    parts = min(load(job + 16, np.int64), threads * _PARTS, max(threads, nbytes // _PART))
    store(job + 8, parts, np.int64)
    _call_run(run, loop, job, threads)
    return True


@kernel
def run_loop(loops, place, nbytes, numbers, first, second):
    """Run loop number ``place`` of ``loops``, the address of :func:`rlbuf_td.kernels.threads.addresses_of_loops`.

    The job holds up to seven ``numbers``, the first of which is the size of the batch, and two floats. Return False if
    torch may use one thread only.
    """
    job = np.empty(11, np.int64)
    for k in range(len(numbers)):
        job[2 + k] = numbers[k]
    store(address_of(job) + 72, first, np.float64)
    store(address_of(job) + 80, second, np.float64)
    functions, loop = (load(loops, np.int64), load(loops + 8, np.int64)), load(loops + 16 + 8 * place, np.int64)
    done = functions[0] != 0 and run_parts(functions, loop, address_of(job), nbytes)
    return done and job[0] >= 0  # uses the job, so that its memory is not freed earlier
