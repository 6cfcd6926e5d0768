"""Helpers of the numba loops: decorators, and access to memory by address.

Numba often takes longer to convert an array argument than to run a whole loop. Loops
therefore take memory addresses; the caller must keep the memory alive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing import Signature
from numba.extending import intrinsic

from rlbuf_td.kernels.code_cache import cached_njit

#: Decorates a loop. The Python error model would check each division for zero, which
# prevents vectorisation.
kernel = cached_njit(nogil=True, error_model="numpy")
#: Decorates a part of loops, which is compiled within each of them: compiling it by
# itself, too, takes more time.
inlined = njit(inline="always")


class Place(NamedTuple):
    """Where an instruction stands: what emits its code, and the types of its
    arguments."""

    context: BaseContext
    builder: ir.IRBuilder
    kinds: tuple[types.Type, ...]


def instruction(
    typed: Callable[..., Signature],
) -> Callable[[Callable[..., ir.Value | None]], Callable[..., Any]]:
    """Return a decorator of a function that emits the code of an instruction, and
    returns its value, if it has one.

    ``typed`` returns the signature of the instruction for the types of its arguments.
    """

    def decorate(emit: Callable[..., ir.Value | None]) -> Callable[..., Any]:
        @intrinsic
        @wraps(emit)  # numba reads the number of arguments from the function
        def typed_instruction(
            typing_context: object, *kinds: types.Type
        ) -> tuple[Signature, Callable[..., ir.Value]]:
            def generate(
                context: BaseContext,
                builder: ir.IRBuilder,
                signature: Signature,
                values: list[ir.Value],
            ) -> ir.Value:
                value = emit(Place(context, builder, signature.args), *values)
                return context.get_dummy_value() if value is None else value

            return typed(*kinds), generate

        return typed_instruction

    return decorate


@instruction(lambda address: types.voidptr(types.intp))
def pointer(at: Place, address: ir.Value) -> ir.Value:
    return at.builder.inttoptr(address, cgutils.voidptr_t)


@instruction(lambda function, argument: types.void(types.int64, types.int64))
def call(at: Place, function: ir.Value, argument: ir.Value) -> None:
    """Call a :class:`Callback` by its address."""
    kind = ir.PointerType(ir.FunctionType(ir.VoidType(), [ir.IntType(64)]))
    at.builder.call(at.builder.inttoptr(function, kind), [argument])


@instruction(lambda array: types.int64(array))
def address_of(at: Place, array: ir.Value) -> ir.Value:
    struct = at.context.make_array(at.kinds[0])(at.context, at.builder, array)
    return at.builder.ptrtoint(struct.data, ir.IntType(64))


@instruction(
    lambda target, source, count: types.void(types.int64, types.int64, types.int64)
)
def copy_bytes(at: Place, target: ir.Value, source: ir.Value, count: ir.Value) -> None:
    to, since = (
        at.builder.inttoptr(address, cgutils.voidptr_t) for address in (target, source)
    )
    cgutils.raw_memcpy(at.builder, to, since, count, 1)


_LINE = 64  # bytes per cache line
_VECTOR = ir.VectorType(ir.IntType(64), 4)


@instruction(lambda target, source: types.void(types.int64, types.int64))
def _stream_half_line(at: Place, target: ir.Value, source: ir.Value) -> None:
    """Emit a copy of half a cache line that leaves the target out of the caches."""
    builder = at.builder
    to, since = (
        builder.inttoptr(address, ir.PointerType(_VECTOR))
        for address in (target, source)
    )
    written = builder.store(builder.load(since, align=1), to, align=_LINE // 2)
    written.set_metadata(
        "nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    )


@instruction(lambda: types.void())
def finish_streams(at: Place) -> None:
    at.builder.fence("seq_cst")


@instruction(lambda: types.void())
def barrier(at: Place) -> None:
    """Keep the order of the stores before and after, as another process finds them if
    this one dies."""
    at.builder.fence("acq_rel")


@instruction(lambda address: types.void(types.int64))
def prefetch(at: Place, address: ir.Value) -> None:
    """Emit a prefetch of the cache line at ``address``."""
    line = at.builder.inttoptr(address, cgutils.voidptr_t)
    kind = ir.FunctionType(ir.VoidType(), [line.type, *[ir.IntType(32)] * 3])
    function = cgutils.get_or_insert_function(
        at.builder.module, kind, "llvm.prefetch.p0"
    )
    for_reading, keep, data = (
        ir.Constant(ir.IntType(32), value) for value in (0, 3, 1)
    )
    at.builder.call(function, [line, for_reading, keep, data])


@instruction(lambda address: types.void(types.int64))
def touch(at: Place, address: ir.Value) -> None:
    """Load the byte at an address and discard it. Processors drop some of many
    prefetches, but never a load."""
    typed = at.builder.inttoptr(address, ir.PointerType(ir.IntType(8)))
    # The compiler removes a plain load that nobody reads; "monotonic" is the cheapest
    # that it keeps (1: any place).
    at.builder.load_atomic(typed, "monotonic", 1)


@instruction(lambda address, kind: kind.dtype(types.int64, kind))
def load(at: Place, address: ir.Value, kind: ir.Value) -> ir.Value:
    dtype = at.kinds[1].dtype
    typed = at.builder.inttoptr(
        address, ir.PointerType(at.context.get_data_type(dtype))
    )
    return at.context.unpack_value(at.builder, dtype, typed)


@instruction(lambda address, bound: types.uint64(types.int64, types.float64))
def count_sums(at: Place, address: ir.Value, bound: ir.Value) -> ir.Value:
    """Count the cumulative sums, float64, of the 16 float32 numbers at an address that
    are at most ``bound``."""
    builder = at.builder
    numbers = ir.VectorType(ir.FloatType(), 16)
    lanes = ir.VectorType(ir.IntType(32), 16)
    sums = ir.VectorType(ir.DoubleType(), 16)
    typed = builder.inttoptr(address, ir.PointerType(numbers))
    total = builder.fpext(builder.load(typed, align=4), sums)
    # add to each sum the one that is ``step`` lanes before it, or 0
    for step in (1, 2, 4, 8):
        before = ir.Constant(
            lanes, [lane - step if lane >= step else 16 for lane in range(16)]
        )
        total = builder.fadd(
            total, builder.shuffle_vector(total, ir.Constant(sums, [0.0] * 16), before)
        )
    first = builder.insert_element(
        ir.Constant(sums, ir.Undefined), bound, ir.IntType(32)(0)
    )
    bounds = builder.shuffle_vector(first, first, ir.Constant(lanes, [0] * 16))
    is_below = builder.bitcast(
        builder.fcmp_ordered("<=", total, bounds), ir.IntType(16)
    )
    return builder.zext(builder.ctpop(is_below), ir.IntType(64))


def _fields(address: types.Type, i: types.Type, kind: types.Type) -> Signature:
    fields = types.NamedUniTuple(
        types.int64, len(kind.instance_class._fields), kind.instance_class
    )
    return fields(types.int64, types.int64, kind)


@instruction(_fields)
def load_fields(at: Place, address: ir.Value, i: ir.Value, kind: ir.Value) -> ir.Value:
    """Load element ``i`` of an array of NamedTuples ``kind`` of int64. It stays in
    registers when memory is written."""
    number = ir.IntType(64)
    count = len(at.kinds[2].instance_class._fields)
    builder = at.builder
    array = builder.inttoptr(address, ir.PointerType(number))
    first = builder.mul(i, number(count))
    places = (
        builder.gep(array, [builder.add(first, number(field))])
        for field in range(count)
    )
    return cgutils.pack_array(builder, [builder.load(typed) for typed in places])


@instruction(lambda address, value, kind: types.void(types.int64, kind.dtype, kind))
def store(at: Place, address: ir.Value, value: ir.Value, kind: ir.Value) -> None:
    dtype = at.kinds[2].dtype
    typed = at.builder.inttoptr(
        address, ir.PointerType(at.context.get_data_type(dtype))
    )
    at.context.pack_value(at.builder, dtype, value, typed)


_ON_BYTES = types.int64, types.int64, types.int64
# as copy_bytes, but the ranges may overlap
move_bytes = types.ExternalFunction("memmove", types.int64(*_ON_BYTES))
_compare_bytes = types.ExternalFunction("memcmp", types.int32(*_ON_BYTES))


@inlined
def same_bytes(first, second, count):
    # most differences are in the first bytes
    if count >= 8 and load(first, np.int64) != load(second, np.int64):
        return False
    return count == 8 or count == 0 or _compare_bytes(first, second, count) == 0


@inlined
def stream_bytes(target, source, count):
    """Copy bytes past the caches; other threads can rely on them only after
    :func:`finish_streams`."""
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
    """Copy few bytes; unlike :func:`copy_bytes`, without a call for 1, 4 and 8
    bytes."""
    if nbytes == 4:  # the most frequent sizes, without a call of memcpy
        store(target, load(source, np.int32), np.int32)
    elif nbytes == 1:
        store(target, load(source, np.uint8), np.uint8)
    elif nbytes == 8:
        store(target, load(source, np.int64), np.int64)
    else:
        copy_bytes(target, source, nbytes)
