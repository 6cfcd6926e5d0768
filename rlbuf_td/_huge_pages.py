"""A hint to the operating system that makes random access cheaper."""

from __future__ import annotations

import ctypes
import mmap

import torch

_HUGE = 2 << 20


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Ask Linux to back ``memory`` with 2 MiB pages: random rows then miss the address cache less often.

    A hint only: where it is not understood, nothing changes.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    nbytes = memory.numel() * memory.element_size()
    if advice is None or nbytes < 2 * _HUGE or memory.device.type != "cpu":
        return
    page = mmap.PAGESIZE
    start = -(-memory.data_ptr() // page) * page
    length = memory.data_ptr() + nbytes - start
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
