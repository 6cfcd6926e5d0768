"""The memory of tensors on the CPU: its address, if it has all its bytes, aliases that
others may move, and its pages.

Compiled code takes addresses. An address is valid during the call that takes it, and
afterwards only if the next call compares it with ``data_ptr()``, because
``share_memory_``, a queue to another process or ``resize_`` move the memory of a tensor
while the tensor object stays the same.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache, partial
from operator import is_
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Entry: TypeAlias = tuple[torch.dtype, torch.Size]

_HUGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python does not define
_AT_ONCE = 4 * _HUGE  # bytes per task of a thread
_TAKERS = min(4, os.cpu_count() or 1)

#: The number of active dispatch modes. A mode such as FakeTensorMode may not execute
# operations that fill memory.
in_dispatch_mode: Callable[[], int] = getattr(
    torch._C, "_len_torch_dispatch_stack", int
)


class HostTensors:
    """Recognizes plain tensors of given dtypes and shapes, and returns their addresses.

    Args:
        entries: the dtype and shape that each tensor must have.
    """

    __slots__ = ("_are_like_before", "_entries", "_nbytes")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = list(entries)
        self._nbytes = [dtype.itemsize * shape.numel() for dtype, shape in entries]
        #: Whether tensors are like those of an earlier call, which compiled code could
        # read.
        self._are_like_before: Callable[..., bool] = _never

    def addresses(self, tensors: Sequence[Any]) -> list[int] | None:
        """Return the address of each tensor, or None if compiled code cannot read them.

        Compiled code can read a tensor on the CPU of the expected dtype and shape, of
        class ``Tensor`` itself, that is contiguous, not lazily negated, and whose
        memory has not been freed or shrunk. The call must not be traced by
        ``torch.compile``: a graph frees a tensor that it does not need any more,
        although its address is still used.
        """
        if len(tensors) != len(self._nbytes):
            return None
        try:
            if not self._are_like_before(*tensors):
                if not all(map(_is_readable, tensors, self._entries)):
                    return None
                self._are_like_before = _recognizer(tensors)
            addresses = []
            # after a learner's step, in half the time of `map`
            for number, tensor in enumerate(tensors):
                nbytes = self._nbytes[number]
                address = tensor.data_ptr()
                storage = tensor.untyped_storage()
                end = address - storage.data_ptr() + nbytes
                if nbytes and (not address or end > storage.nbytes()):
                    return None
                addresses.append(address)
            return addresses
        # a nested tensor raises an error for its shape
        except (RuntimeError, ValueError):
            return None


def _is_readable(tensor: Any, entry: Entry) -> bool:
    is_like = (
        type(tensor) is Tensor
        and (tensor.dtype, tensor.shape) == entry
        and tensor.layout is torch.strided
    )
    return is_like and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def _never(*tensors: object) -> bool:
    return False


def _recognizer(examples: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that tells in one call whether tensors have the class, dtype,
    strides ... of the examples.

    It is the check that ``torch.compile`` makes of arguments: for six tensors it takes
    a tenth of the time of the same comparisons in Python, which are a fifth of the time
    of a write in a learner's loop.
    """
    try:
        make: Any = partial(
            torch._C._dynamo.guards.TensorGuards,
            dynamic_dims_sizes=None,
            dynamic_dims_strides=None,
        )
        ids = [*map(id, examples)]
        # the place of the first of equal tensors: a check lets none stand twice
        first = [*map(ids.index, ids)]
        places = sorted({*first})
        check = make(*map(examples.__getitem__, places)).check
        if len(places) == len(ids):
            return check
        return lambda *tensors: (
            all(map(is_, tensors, map(tensors.__getitem__, first)))
            and check(*map(tensors.__getitem__, places))
        )
    # a version of torch without this class, or with other arguments
    except (AttributeError, TypeError):
        return _never


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is strided and has memory for all its elements.

    Memory is missing after ``untyped_storage().resize_(0)``, as FSDP frees it, and in
    the tensors of FakeTensorMode and ``torch.func.functionalize``.
    """
    if tensor.is_nested:
        return False
    if not tensor.numel():
        return True
    spans = (
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    end = (tensor.storage_offset() + sum(spans) + 1) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < end:
        return False
    if type(tensor) is Tensor:
        return tensor.data_ptr() != 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a FakeTensor, which has no address
        return tensor.data_ptr() != 0


def address_of(tensor: Tensor) -> int:
    """Return the address of a strided tensor on the CPU; raise a RuntimeError if its
    memory is missing or too small."""
    if not has_memory(tensor):
        raise RuntimeError(
            f"a {tensor.dtype} tensor of {tensor.numel()} elements has no memory, or not enough, for them: it is "
            "nested, its storage was freed or shrunk, or the call runs under FakeTensorMode or "
            "torch.func.functionalize, where tensors hold no data. Pass a tensor with data, and call the buffer "
            "outside of these modes"
        )
    return tensor.data_ptr()


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor as compiled code reads it: contiguous, on the CPU, neither
    conjugated nor negated lazily."""
    return Tensor.contiguous(
        tensor.as_subclass(Tensor).cpu().resolve_conj().resolve_neg()
    )


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Return numbers as a tensor, on the CPU over the same memory; the host does not
    wait for a GPU.

    CUDA's driver reads memory that is not page-locked before the call returns, so that
    the numbers may then change.
    """
    return torch.from_numpy(numbers).to(
        device, non_blocking=device.type in ("cuda", "meta")
    )


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return :func:`address_of` each of several contiguous tensors."""
    return [*map(address_of, tensors)]


def alias_of(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that counts its own edits, on the CPU with a
    storage object of its own.

    Whoever moves the alias (``share_memory_``, a queue to another process) gets a copy,
    and ``tensor`` stays in place.
    """
    with torch.inference_mode(False):
        return torch.from_numpy(tensor.numpy()) if tensor.is_cpu else tensor.data


def outside_inference_mode() -> AbstractContextManager[object]:
    """Disable inference mode in a ``with`` block: tensors made in this mode cannot be
    changed outside of it."""
    return torch.inference_mode(False)


def advise_huge_pages(memory: Tensor) -> None:
    """Ask Linux to use 2 MiB pages for ``memory``, which reduces TLB misses when random
    rows are read."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if (
        advice is not None
        and memory.device.type == "cpu"
        and memory.nbytes >= 2 * _HUGE
    ):
        advise(memory.data_ptr(), memory.data_ptr() + memory.nbytes, advice)


def take_pages(memory: Tensor) -> None:
    """Allocate physical memory for all pages of ``memory`` now; without Linux 5.14 or
    later, do nothing."""
    if sys.platform != "linux" or memory.device.type != "cpu":
        return
    first = memory.data_ptr()
    end = memory.data_ptr() + memory.nbytes
    edges = [first, *range((first // _HUGE + 1) * _HUGE, end, _AT_ONCE), end]
    # madvise, because threads that write to pages would block each other
    with ThreadPoolExecutor(_TAKERS) as pool:
        list(pool.map(advise, edges, edges[1:], [_POPULATE_WRITE] * (len(edges) - 1)))


def advise(first: int, end: int, advice: int) -> None:
    """Call ``madvise`` for all pages whose first address is in ``[first, end)``."""
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    if end > start:
        _libc().madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(advice)
        )


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
