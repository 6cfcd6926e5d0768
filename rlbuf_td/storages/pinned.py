"""Page-locked RAM that a CUDA device accesses over the bus, as a torch tensor of that device."""

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
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, which Python does not define


def refuse_offload(device: torch.device | str, *, scratch_dir: Any, shared: bool, dedup: bool) -> None:
    if device == "auto" or torch.device(device).type != "cuda":
        raise ValueError(
            "offload=True keeps the rows of a CUDA device in RAM, where the device reads them: it needs device='cuda', "
            f"got device={str(device)!r}. Rows on the CPU are in RAM already"
        )
    remedy = "keep the rows on the CPU, and move batches to the GPU with ReplayBuffer(device=...)"
    if scratch_dir is not None or shared:
        raise ValueError(f"offload=True uses RAM of one process, without scratch_dir or shared: {remedy}")
    if dedup:
        raise ValueError(f"offload=True excludes share_next and frames: {remedy}")
    if sys.platform != "linux":
        raise ValueError("offload=True needs Linux, where page-locked RAM has the same address on a CUDA device")


def page_locked(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 zeros in page-locked RAM as a CUDA tensor, as in PyTorch-Direct (Min et al., 2021)."""
    runtime = torch.cuda.cudart()  # first: without a GPU this raises before memory is allocated
    _unlock_waiting()
    index = torch.cuda.current_device() if device.index is None else device.index
    area = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # whole pages, which hold nothing else
    with suppress(OSError):  # an old Linux: a fork then copies the locked pages
        area.madvise(_WIPE_ON_FORK)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    advise_huge_pages(memory)
    take_pages(memory)  # by several threads; the driver would populate the pages one by one
    with torch.cuda.device(index):  # the driver reports this device as the owner of the memory
        result = runtime.cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE | _MAPPED)
        if int(result):
            _forget_error(index)
            del memory, area  # freed even if a debugger keeps this frame
            raise RuntimeError(f"page-locking failed, {runtime.cudaGetErrorString(result)} ({int(result)})")
        tensor = _tensor_over(_Locked(memory, index, runtime), index)
    # CUDA C++ Programming Guide, unified virtual addressing: on 64-bit Linux, both addresses are the same.
    if tensor.data_ptr() != memory.data_ptr():
        raise RuntimeError("page-locking failed, torch takes the memory for that of another device")
    return tensor


class _Locked:
    """Unlocks page-locked memory when no tensor uses it any more: the tensors over it keep this object alive."""

    def __init__(self, memory: torch.Tensor, index: int, runtime: Any) -> None:
        place = {"data": (memory.data_ptr(), False), "shape": tuple(memory.shape), "typestr": "|u1"}
        self.__cuda_array_interface__ = place | {"strides": None, "version": 3}
        # Not at process exit: kernels may still be running then, and the system frees everything.
        weakref.finalize(self, _unlock, memory, index, runtime, os.getpid()).atexit = False


def _unlock(memory: torch.Tensor, index: int, runtime: Any, process: int) -> None:
    if os.getpid() == process:  # a forked process sees zeros there, and cannot use CUDA
        _waiting.append((memory, index, runtime))
        _unlock_waiting()


def _unlock_waiting() -> None:
    """Unlock unused memory, unless a CUDA graph is being captured: unlocking would break the capture."""
    while not torch.cuda.is_current_stream_capturing():
        try:
            memory, index, runtime = _waiting.pop()
        except IndexError:
            return
        torch.cuda.synchronize(index)  # earlier kernels may still use the memory
        result = runtime.cudaHostUnregister(memory.data_ptr())
        if int(result):
            raise RuntimeError(f"page-locked rows cannot be unlocked: {runtime.cudaGetErrorString(result)}")


_waiting: list[tuple[torch.Tensor, int, Any]] = []


def _tensor_over(locked: _Locked, index: int) -> torch.Tensor:
    return torch.as_tensor(locked, device=torch.device("cuda", index))


def _forget_error(index: int) -> None:
    """Clear CUDA's last error: launch a kernel, and suppress the error that this launch raises."""
    with suppress(RuntimeError):
        torch.ones(1, device=torch.device("cuda", index), dtype=torch.float32)
