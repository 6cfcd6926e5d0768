"""Memory by address, for the loops that numba compiles: unboxing an array takes longer than many of them do.

The callers vouch that the memory is there, and that tensors stay alive as long as their addresses are used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy ``count`` bytes from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, since = (builder.inttoptr(address, cgutils.voidptr_t) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, since, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Start loading the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[ir.IntType(32)] * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for_reading, keep, data = (ir.Constant(ir.IntType(32), value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(arguments[0], cgutils.voidptr_t), for_reading, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit(cache=True, nogil=True, forceinline=True)
def same_bytes(first, second, count):
    """Return whether ``count`` bytes at two addresses are the same."""
    at = np.int64(0)
    while at + 64 <= count:
        difference = np.int64(0)
        for word in range(8):
            difference |= load_int64(first + at + 8 * word) ^ load_int64(second + at + 8 * word)
        if difference != 0:
            return False
        at += 64
    while at + 8 <= count:
        if load_int64(first + at) != load_int64(second + at):
            return False
        at += 8
    while at + 4 <= count:
        if load_int32(first + at) != load_int32(second + at):
            return False
        at += 4
    while at < count:
        if load_uint8(first + at) != load_uint8(second + at):
            return False
        at += 1
    return True


@njit(cache=True, nogil=True, forceinline=True)
def prefetch_row(address, width):
    """Start loading ``width`` bytes at an address."""
    for line in range(0, width, 64):
        prefetch(address + line)
    prefetch(address + width - 1)


def _loader(kind: types.Type) -> Any:
    """Return a function that reads a value of a type at an address."""

    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = ir.PointerType(context.get_data_type(kind))
            return context.unpack_value(builder, kind, builder.inttoptr(arguments[0], pointer))

        return kind(types.int64), generate

    return intrinsic(load)


def _storer(kind: types.Type) -> Any:
    """Return a function that writes a value of a type at an address."""

    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = ir.PointerType(context.get_data_type(kind))
            context.pack_value(builder, kind, arguments[1], builder.inttoptr(arguments[0], pointer))
            return context.get_dummy_value()

        return types.void(types.int64, kind), generate

    return intrinsic(store)


load_uint8 = _loader(types.uint8)
load_bool, store_bool = _loader(types.boolean), _storer(types.boolean)
load_int32, store_int32 = _loader(types.int32), _storer(types.int32)
load_int64, store_int64 = _loader(types.int64), _storer(types.int64)
load_uint64 = _loader(types.uint64)
load_float32, store_float32 = _loader(types.float32), _storer(types.float32)
load_float64, store_float64 = _loader(types.float64), _storer(types.float64)
