"""Allocates the tensors of batches, and reuses the memory of large tensors."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor

Entry: TypeAlias = tuple[torch.dtype, torch.Size]

_LARGE, _MOST = 1 << 20, 128 << 20  # range of sizes, in bytes, of the tensors whose memory is reused
_AHEAD, _MOST_AHEAD = 8, 1 << 19  # largest number of batches, and of bytes, to allocate at a time
_KEPT = 2  # tensors per leaf: one in use while the next batch is drawn, and one free

_CPU = torch.device("cpu")


class LeafMemory:
    """Allocates uninitialised tensors, one for each pair of dtype and shape in ``entries``.

    The operating system zeroes new memory, which takes longer than copying images to it. On the CPU, tensors of 1 to
    128 MiB therefore reuse the memory of earlier tensors. Memory is reused only if no tensor, array, autograd graph or
    other process still uses it.
    """

    __slots__ = ("_kept", "_large", "_small", "ahead")

    def __init__(self, entries: Sequence[Entry], device: torch.device = _CPU) -> None:
        # ``empty_like`` takes two thirds of the time of ``empty``; each example uses one element of memory.
        self._small = [_example(shape, dtype, device) for dtype, shape in entries]
        nbytes = sum(example.nbytes for example in self._small)
        self.ahead = max(1, min(_AHEAD, _MOST_AHEAD // max(1, nbytes)))  # number of batches to allocate at a time
        self._large: list[tuple[int, Tensor]] = []
        self._kept: dict[int, deque[Tensor]] = {}
        for place, example in enumerate(self._small):
            if device.type == "cpu" and _LARGE <= example.nbytes <= _MOST:
                self._large.append((place, example))
                self._kept[place] = deque(maxlen=_KEPT)
                self._small[place] = example.new_empty(0)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        kept: dict[int, deque[Tensor]] = {place: deque(maxlen=_KEPT) for place, _ in self._large}
        return None, {"_small": self._small, "_large": self._large, "_kept": kept, "ahead": self.ahead}

    def allocate(self) -> list[Tensor]:
        tensors = list(map(torch.empty_like, self._small))
        for place, example in self._large:
            tensors[place] = _recycled(self._kept[place], example)
        return tensors


def _recycled(kept: deque[Tensor], example: Tensor) -> Tensor:
    memory = None if torch.is_inference_mode_enabled() else _unused(kept)
    if memory is None:
        memory = torch.empty_like(example)
    tensor = memory.data  # with a version counter of its own
    if not memory.is_inference():
        kept.append(memory)
    return tensor


def _unused(kept: deque[Tensor]) -> Tensor | None:
    """Remove and return a tensor of ``kept`` whose memory nothing else uses; return None if all are in use."""
    for _ in range(len(kept)):
        with suppress(IndexError):  # another thread has taken the last one
            memory = kept.popleft()  # no other thread can take it now
            if is_unused(memory):
                return memory
            kept.append(memory)
    return None


def is_unused(memory: Tensor) -> bool:
    has_memory = memory.untyped_storage().nbytes() >= memory.nbytes  # False after a user's ``resize_(0)``
    return has_memory and _holders(memory) == _ALONE and not memory.is_shared()


def _holders(memory: Tensor) -> tuple[int, int]:
    storage = memory.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _example(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a template for ``empty_like`` that uses at most one element of memory."""
    few = shape.numel() < 2  # ``empty_like`` would keep the strides of an expanded tensor
    return torch.empty(shape if few else (), dtype=dtype, device=device).expand(shape)


_ALONE = _holders(torch.empty(1, dtype=torch.uint8, device="cpu"))
