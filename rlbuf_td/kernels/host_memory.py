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

_dtype_of = Tensor.dtype.__get__  # half the time of operator.attrgetter
_nbytes_of = Tensor.nbytes.__get__
_storage_nbytes = torch.UntypedStorage.nbytes


#: The number of active dispatch modes. A mode such as FakeTensorMode may not execute operations that fill memory.
in_dispatch_mode: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


class HostTensors:
    """Recognizes plain tensors of given dtypes and shapes, and returns their addresses.

    Args:
        entries: the dtype and shape that each tensor must have.

    Cost: 0.6 us per tensor, because no step is a Python function of its own.
    """

    __slots__ = ("_classes", "_devices", "_dtypes", "_nbytes", "_shapes")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._classes, self._devices = [Tensor] * len(entries), [-1] * len(entries)  # -1: not on a GPU
        self._dtypes, self._shapes = [dtype for dtype, _ in entries], [shape for _, shape in entries]
        self._nbytes = [dtype.itemsize * shape.numel() for dtype, shape in entries]

    def addresses(self, tensors: list[Any]) -> list[int] | None:
        """Return the address of each tensor, or None if compiled code cannot read them.

        Compiled code can read a tensor on the CPU of the expected dtype and shape, of class ``Tensor`` itself, that is
        contiguous, not lazily negated, and whose memory has not been freed or shrunk.
        """
        try:
            if (
                [*map(type, tensors)] != self._classes
                or [*map(_dtype_of, tensors)] != self._dtypes
                or [*map(Tensor.size, tensors)] != self._shapes  # raises an error for a nested tensor
                or [*map(Tensor.get_device, tensors)] != self._devices
                or not all(map(Tensor.is_contiguous, tensors))
                or any(map(Tensor.is_neg, tensors))
            ):
                return None
            found = [*map(Tensor.data_ptr, tensors)]  # raises an error for a sparse tensor
        except RuntimeError:
            return None
        if any(map(Tensor.storage_offset, tensors)) or 0 in found:
            return found if all(map(has_memory, tensors)) else None
        return found if all(map(ge, map(_storage_nbytes, map(Tensor.untyped_storage, tensors)), self._nbytes)) else None


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
