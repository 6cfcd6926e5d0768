"""Helpers of the numba loops: decorators, and access to memory by address.

Numba often takes longer to convert an array argument than to run a whole loop. Loops therefore take memory
addresses; the caller must keep the memory alive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rlbuf_td.kernels.code_cache import cached_njit

#: Decorates a loop. The Python error model would check each division for zero, which prevents vectorisation.
kernel = cached_njit(nogil=True, error_model="numpy")
#: Decorates a part of loops, which is compiled within each of them: compiling it by itself, too, takes more time.
inlined = njit(inline="always")


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


@intrinsic
def call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call a :class:`Callback` by its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.PointerType(ir.FunctionType(ir.VoidType(), [ir.IntType(64)]))
        builder.call(builder.inttoptr(arguments[0], kind), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def address_of(typing_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(array.data, ir.IntType(64))

    return types.int64(array), generate


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, since = (builder.inttoptr(address, cgutils.voidptr_t) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, since, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_LINE = 64  # bytes per cache line
_VECTOR = ir.VectorType(ir.IntType(64), 4)


@intrinsic
def _stream_half_line(typing_context: Any, target: Any, source: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, since = (builder.inttoptr(address, ir.PointerType(_VECTOR)) for address in arguments)
        written = builder.store(builder.load(since, align=1), to, align=_LINE // 2)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def finish_streams(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def barrier(typing_context: Any) -> Any:
    """Keep the order of the stores before and after, as another process finds them if this one dies."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [line.type, *[ir.IntType(32)] * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for_reading, keep, data = (ir.Constant(ir.IntType(32), value) for value in (0, 3, 1))
        builder.call(function, [line, for_reading, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def touch(typing_context: Any, address: Any) -> Any:
    """Load the byte at an address and discard it. Processors drop some of many prefetches, but never a load."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(8)))
        # The compiler removes a plain load that nobody reads; "monotonic" is the cheapest that it keeps (1: any place).
        builder.load_atomic(place, "monotonic", 1)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def load(typing_context: Any, address: Any, kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.PointerType(context.get_data_type(kind.dtype)))
        return context.unpack_value(builder, kind.dtype, place)

    return kind.dtype(types.int64, kind), generate


@intrinsic
def load_fields(typing_context: Any, address: Any, i: Any, kind: Any) -> Any:
    """Load element ``i`` of an array of NamedTuples ``kind`` of int64. It stays in registers when memory is written."""
    count = len(kind.instance_class._fields)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(64)
        array, first = builder.inttoptr(arguments[0], ir.PointerType(number)), builder.mul(arguments[1], number(count))
        places = (builder.gep(array, [builder.add(first, number(field))]) for field in range(count))
        return cgutils.pack_array(builder, [builder.load(place) for place in places])

    found = types.NamedUniTuple(types.int64, count, kind.instance_class)
    return found(types.int64, types.int64, kind), generate


@intrinsic
def store(typing_context: Any, address: Any, value: Any, kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.PointerType(context.get_data_type(kind.dtype)))
        context.pack_value(builder, kind.dtype, arguments[1], place)
        return context.get_dummy_value()

    return types.void(types.int64, kind.dtype, kind), generate


_ON_BYTES = types.int64, types.int64, types.int64
move_bytes = types.ExternalFunction("memmove", types.int64(*_ON_BYTES))  # as copy_bytes, but the ranges may overlap
_compare_bytes = types.ExternalFunction("memcmp", types.int32(*_ON_BYTES))


@inlined
def same_bytes(first, second, count):
    if count >= 8 and load(first, np.int64) != load(second, np.int64):  # most differences are in the first bytes
        return False
    return count == 8 or count == 0 or _compare_bytes(first, second, count) == 0


@inlined
def stream_bytes(target, source, count):
    """Copy bytes past the caches; other threads can rely on them only after :func:`finish_streams`."""
    head = min(-target % _LINE, count)
    copy_bytes(target, source, head)
    last = count - (count - head) % _LINE
    for k in range(head, last, _LINE):
        _stream_half_line(target + k, source + k)
        _stream_half_line(target + k + _LINE // 2, source + k + _LINE // 2)
    copy_bytes(target + last, source + last, count - last)


@inlined
def prefetch_row(address, width):
    for line in range(0, width, 64):
        prefetch(address + line)
    prefetch(address + width - 1)


@inlined
def copy_few(target, source, nbytes):
    if nbytes == 4:  # the most frequent sizes, without a call of memcpy
        store(target, load(source, np.int32), np.int32)
    elif nbytes == 1:
        store(target, load(source, np.uint8), np.uint8)
    elif nbytes == 8:
        store(target, load(source, np.int64), np.int64)
    else:
        copy_bytes(target, source, nbytes)
