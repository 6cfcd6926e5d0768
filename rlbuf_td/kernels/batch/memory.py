"""Allocates the tensors of batches, and reuses the memory of large tensors."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rlbuf_td.kernels.host_memory import Entry, address_of, has_memory

# range of sizes, in bytes, of the tensors whose memory is reused
_LARGE, _MOST = 1 << 20, 128 << 20
# largest number of batches, and of bytes, to allocate at a time
_AHEAD = 8
_MOST_AHEAD = 1 << 19
_KEPT = 2  # tensors per leaf: one in use while the next batch is drawn, and one free

_CPU = torch.device("cpu")


class LeafMemory:
    """Allocates uninitialised tensors, one for each pair of dtype and shape in
    ``entries``.

    On the CPU, tensors of 1 to 128 MiB reuse the memory of earlier tensors, because the
    operating system zeroes new memory, which takes longer than copying a batch of
    images to it. Memory is reused only if no tensor, array, autograd graph or other
    process still uses it.
    """

    __slots__ = ("_device", "_first", "_kept", "_large", "_small", "ahead")

    def __init__(self, entries: Sequence[Entry], device: torch.device = _CPU) -> None:
        bounds = range(_LARGE, _MOST + 1) if device.type == "cpu" else range(0)
        sizes = [dtype.itemsize * shape.numel() for dtype, shape in entries]
        # number of batches to allocate at a time
        self.ahead = max(1, min(_AHEAD, _MOST_AHEAD // max(1, sum(sizes))))
        self._device = device
        # the first tensor with elements
        self._first = next((i for i, size in enumerate(sizes) if size), None)
        self._large = [
            (i, *entry) for i, entry in enumerate(entries) if sizes[i] in bounds
        ]
        self._kept: dict[int, deque[Tensor]] = {
            i: deque(maxlen=_KEPT) for i, _, _ in self._large
        }
        shapes = [
            (0,) if i in self._kept else tuple(shape)
            for i, (_, shape) in enumerate(entries)
        ]
        strides = [
            torch.empty(shape, dtype=torch.uint8, device="meta").stride()
            for shape in shapes
        ]
        self._small = shapes, strides, [dtype for dtype, _ in entries]

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        state: dict[str, object] = {
            name: getattr(self, name) for name in self.__slots__
        }
        return None, state | {"_kept": {i: deque(maxlen=_KEPT) for i in self._kept}}

    def allocate(self) -> list[Tensor]:
        """Return one uninitialised tensor per entry; large ones reuse memory that is no
        longer in use."""
        if self._device.type != "cpu":
            return [
                _empty(*entry, device=self._device)
                for entry in zip(*self._small, strict=True)
            ]
        tensors = list(map(_empty_on_cpu, *self._small))
        for i, dtype, shape in self._large:
            tensors[i] = _recycled(self._kept[i], dtype, shape)
        if self._first is not None and not tensors[self._first].data_ptr():
            # raises an error: new tensors hold no data, as in FakeTensorMode
            address_of(tensors[self._first])
        return tensors


def _empty(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device = _CPU,
) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


_guards: Any = getattr(torch._C._dynamo, "guards", None)
# Code that Inductor compiles calls this function, too; it takes 40 % of the time of
# ``empty_like``.
_empty_on_cpu: Callable[..., Tensor] = getattr(_guards, "_empty_strided_cpu", _empty)


def _recycled(kept: deque[Tensor], dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return a tensor in memory of ``kept`` that is no longer in use, or in new memory,
    which is kept."""
    memory = None if torch.is_inference_mode_enabled() else _unused(kept)
    if memory is None:
        memory = torch.empty(shape, dtype=dtype, device="cpu")
    tensor = memory.data  # with a version counter of its own
    # FakeTensorMode makes tensors without memory
    if not memory.is_inference() and has_memory(memory):
        kept.append(memory)
    return tensor


def _unused(kept: deque[Tensor]) -> Tensor | None:
    """Remove and return a tensor of ``kept`` whose memory nothing else uses; return
    None if all are in use."""
    for _ in range(len(kept)):
        with suppress(IndexError):  # another thread has taken the last one
            memory = kept.popleft()  # no other thread can take it now
            if is_unused(memory):
                return memory
            kept.append(memory)
    return None


def is_unused(memory: Tensor) -> bool:
    # False after a user's ``resize_(0)``
    has_memory = memory.untyped_storage().nbytes() >= memory.nbytes
    return has_memory and _holders(memory) == _ALONE and not memory.is_shared()


def _holders(memory: Tensor) -> tuple[int, int]:
    storage = memory.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1, dtype=torch.uint8, device="cpu"))
