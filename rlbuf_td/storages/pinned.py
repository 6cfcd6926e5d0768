"""RAM that a CUDA device reads and writes itself over the bus: page-locked, and shown to torch as the device's own."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from contextlib import suppress
from typing import Any

import torch

from rlbuf_td.kernels.huge_pages import advise_huge_pages, take_pages

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, which Python does not name


def refuse_offload(device: torch.device | str, *, scratch_dir: Any, shared: bool, dedup: bool) -> None:
    """Refuse ``offload=True`` if another argument or the system excludes it."""
    if device == "auto" or torch.device(device).type != "cuda":
        raise ValueError(
            "offload=True keeps the rows of a CUDA device in RAM, where it reads them itself: it needs device='cuda', "
            f"got device={str(device)!r}. Rows on the CPU lie in RAM as they are"
        )
    if scratch_dir is not None or shared:
        raise ValueError(
            "offload=True takes RAM of this process alone, neither scratch_dir nor shared: for those, keep the rows on "
            "the CPU and bring batches to the GPU by ReplayBuffer(device=...)"
        )
    if dedup:
        raise ValueError(
            "offload=True excludes share_next and frames: rows that share observations take less, so keep them on the "
            "GPU, or on the CPU, and bring batches to the GPU by ReplayBuffer(device=...)"
        )
    if sys.platform != "linux":
        raise ValueError(
            "offload=True needs Linux: elsewhere a CUDA device may see page-locked RAM at another address than the CPU"
        )


def page_locked(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 zeros that lie in RAM, as a tensor of a CUDA device (without an index the current one).

    Kernels and copies of the device work on it as on its own memory, in a graph, too. Its pages are taken and locked at
    once; they are unlocked and given back when the last tensor over them is gone.

    Source: unified virtual addressing, CUDA C++ Programming Guide: memory that is registered on 64-bit Linux has the
    same address on the device. Graph neural networks are fed from RAM so (PyTorch-Direct, Min et al. 2021).
    """
    runtime = torch.cuda.cudart()  # before memory is taken: there may be no GPU
    _unlock_waiting()
    index = torch.cuda.current_device() if device.index is None else device.index
    area = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # whole pages, which no other memory lies in
    with suppress(OSError):  # an old kernel: a fork then copies what is locked
        area.madvise(_WIPE_ON_FORK)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    advise_huge_pages(memory)
    take_pages(memory)  # by several threads; the driver would take them one after the other
    with torch.cuda.device(index):  # whose the memory is, as the driver tells torch
        result = runtime.cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE | _MAPPED)
        if int(result):
            _forget_error(index)
            del memory, area  # given back although a debugger may keep this frame
            raise RuntimeError(f"page-locking fails, {runtime.cudaGetErrorString(result)} ({int(result)})")
        tensor = _tensor_over(_Locked(memory, index, runtime), index)
    if tensor.data_ptr() != memory.data_ptr():
        raise RuntimeError("page-locking fails, torch takes the memory for that of another device")
    return tensor


class _Locked:
    """Memory that stays page-locked while this object lives; torch keeps it with the tensor over it."""

    def __init__(self, memory: torch.Tensor, index: int, runtime: Any) -> None:
        place = {"data": (memory.data_ptr(), False), "shape": tuple(memory.shape), "typestr": "|u1"}
        self.__cuda_array_interface__ = place | {"strides": None, "version": 3}
        # Not at the end of the process: others may still be at work then, and the system takes everything back.
        weakref.finalize(self, _unlock, memory, index, runtime, os.getpid()).atexit = False


def _unlock(memory: torch.Tensor, index: int, runtime: Any, process: int) -> None:
    if os.getpid() == process:  # a forked one has zeros there, and no device
        _waiting.append((memory, index, runtime))
        _unlock_waiting()


def _unlock_waiting() -> None:
    """Unlock what nobody uses; not while a graph is captured, which that would spoil: garbage is found at any time."""
    while not torch.cuda.is_current_stream_capturing():
        try:
            memory, index, runtime = _waiting.pop()
        except IndexError:
            return
        torch.cuda.synchronize(index)  # kernels that were launched before may not be done with it
        result = runtime.cudaHostUnregister(memory.data_ptr())
        if int(result):
            raise RuntimeError(f"page-locked rows cannot be unlocked: {runtime.cudaGetErrorString(result)}")


_waiting: list[tuple[torch.Tensor, int, Any]] = []


def _tensor_over(locked: _Locked, index: int) -> torch.Tensor:
    return torch.as_tensor(locked, device=torch.device("cuda", index))


def _forget_error(index: int) -> None:
    """Launch a kernel: it reports the error of the call before it, which is then forgotten."""
    with suppress(RuntimeError):
        torch.ones(1, device=torch.device("cuda", index), dtype=torch.float32)
