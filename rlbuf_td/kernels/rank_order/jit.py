"""How the loops of the chunked order are compiled.

Numba's cache on disk notices a change of a function's own file only, and these functions call each other across files:
who changes one deletes ``__pycache__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

compiled = njit(cache=True, nogil=True)
"""Decorate a function that allocates, or that is called from Python."""


def bare(function: Callable[..., Any]) -> Any:
    """Decorate a helper that makes no array: numba then counts no references, which would double its time."""
    try:
        return njit(cache=True, nogil=True, _nrt=False)(function)
    except KeyError:  # a numba without that option: the same results, slower
        return compiled(function)


@intrinsic
def prefetch(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """Start loading the cache line of ``array[row, column]`` (int64)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature, arguments, arguments[2])
        kind = ir.FunctionType(ir.VoidType(), [address.type, *[ir.IntType(32)] * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for_reading, keep, data = (ir.Constant(ir.IntType(32), value) for value in (0, 3, 1))
        builder.call(function, [address, for_reading, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic
def move(typing_context: Any, array: Any, row: Any, to: Any, start: Any, count: Any) -> Any:
    """Copy ``array[row, start:start + count]`` (int64) to ``array[row, to:to + count]``; the two may overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = _address(context, builder, signature, arguments, arguments[2])
        source = _address(context, builder, signature, arguments, arguments[3])
        size = builder.mul(arguments[4], ir.Constant(ir.IntType(64), 8))
        cgutils.raw_memmove(builder, target, source, size, 1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, types.int64, types.int64), generate


def _address(context: Any, builder: Any, signature: Any, arguments: Any, column: Any) -> Any:
    """Emit the address of ``array[row, column]``; indices are not checked."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    offset = builder.add(builder.mul(arguments[1], builder.extract_value(array.shape, 1)), column)
    return builder.bitcast(builder.gep(array.data, [offset]), ir.IntType(8).as_pointer())
