"""Hints to the operating system that make memory cheaper to use."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_HUGE = 2 << 20


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python does not name


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Ask Linux to back ``memory`` with 2 MiB pages: random rows then miss the address cache less often.

    A hint only: where it is not understood, nothing changes.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and memory.numel() * memory.element_size() >= 2 * _HUGE:
        _advise(memory, advice)


def take_pages(memory: torch.Tensor) -> None:
    """Take the pages of ``memory`` from the system now: several threads that do so while they write block each other.

    A hint only: where it is not understood (before Linux 5.14), nothing changes.
    """
    if sys.platform == "linux":
        _advise(memory, _POPULATE_WRITE)


def _advise(memory: torch.Tensor, advice: int) -> None:
    if memory.device.type != "cpu":
        return
    page = mmap.PAGESIZE
    start = -(-memory.data_ptr() // page) * page
    length = memory.data_ptr() + memory.numel() * memory.element_size() - start
    if length > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
