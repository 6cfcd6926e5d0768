"""The memory of tensors on the CPU: its address, if it has all its bytes, and aliases that others may move.

Compiled code takes addresses. An address is valid during the call that takes it, and afterwards only if the next call
compares it with ``data_ptr()``, because ``share_memory_``, a queue to another process or ``resize_`` move the memory of
a tensor while the tensor object stays the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from operator import ge
from typing import Any, TypeAlias

import torch
from torch import Tensor

Entry: TypeAlias = tuple[torch.dtype, torch.Size]

_nbytes_of = Tensor.nbytes.__get__
_storage_nbytes = torch.UntypedStorage.nbytes

#: The number of active dispatch modes. A mode such as FakeTensorMode may not execute operations that fill memory.
in_dispatch_mode: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


class HostTensors:
    """Recognizes plain tensors of given dtypes and shapes, and returns their addresses.

    Args:
        entries: the dtype and shape that each tensor must have.
    """

    __slots__ = ("_expected",)

    def __init__(self, entries: Sequence[Entry]) -> None:
        #: For each tensor: dtype, shape, size in bytes, and whether torch can negate it lazily.
        self._expected = [
            (dtype, shape, dtype.itemsize * shape.numel(), dtype.is_floating_point) for dtype, shape in entries
        ]

    def addresses(self, tensors: Sequence[Any]) -> list[int] | None:
        """Return the address of each tensor, or None if compiled code cannot read them.

        Compiled code can read a tensor on the CPU of the expected dtype and shape, of class ``Tensor`` itself, that is
        contiguous, not lazily negated, and whose memory has not been freed or shrunk. Under ``torch.compile``, it can
        read none: a graph frees a tensor that it does not need any more, although its address is still used.
        """
        if torch.compiler.is_compiling():
            return None
        found = []
        try:
            for tensor, (dtype, shape, nbytes, may_be_negated) in zip(tensors, self._expected, strict=True):
                if (  # a nested tensor raises an error for its shape, a sparse one for its address
                    type(tensor) is not Tensor
                    or tensor.dtype is not dtype
                    or tensor.shape != shape
                    or not tensor.is_contiguous()
                    or not tensor.is_cpu
                    or (may_be_negated and tensor.is_neg())
                ):
                    return None
                address = tensor.data_ptr()
                is_whole = address and not tensor.storage_offset() and tensor.untyped_storage().nbytes() >= nbytes
                if not is_whole and not has_memory(tensor):
                    return None
                found.append(address)
        except (RuntimeError, ValueError):
            return None
        return found


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is strided and has memory for all its elements.

    Memory is missing after ``untyped_storage().resize_(0)``, as FSDP frees it, and in the tensors of FakeTensorMode and
    ``torch.func.functionalize``.
    """
    if tensor.is_nested:
        return False
    if not tensor.numel():
        return True
    spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + sum(spans) + 1) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < end:
        return False
    if type(tensor) is Tensor:
        return tensor.data_ptr() != 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a FakeTensor, which has no address
        return tensor.data_ptr() != 0


def address_of(tensor: Tensor) -> int:
    """Return the address of a strided tensor on the CPU; raise a RuntimeError if its memory is missing or too small."""
    if not has_memory(tensor):
        raise RuntimeError(
            f"a {tensor.dtype} tensor of {tensor.numel()} elements has no memory, or not enough, for them: it is "
            "nested, its storage was freed or shrunk, or the call runs under FakeTensorMode or "
            "torch.func.functionalize, where tensors hold no data. Pass a tensor with data, and call the buffer "
            "outside of these modes"
        )
    return tensor.data_ptr()


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return :func:`address_of` each of several contiguous tensors."""
    found = [*map(Tensor.data_ptr, tensors)]
    sizes = map(_storage_nbytes, map(Tensor.untyped_storage, tensors))
    if 0 in found or any(map(Tensor.storage_offset, tensors)) or not all(map(ge, sizes, map(_nbytes_of, tensors))):
        return [*map(address_of, tensors)]
    return found


def alias_of(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory with a storage object of its own; on other devices, the tensor itself.

    Whoever moves the alias (``share_memory_``, a queue to another process) gets a copy, and ``tensor`` stays in place.
    """
    if not tensor.is_cpu:
        return tensor
    with torch.inference_mode(False):
        return torch.from_numpy(tensor.numpy())
