"""Which memory is in RAM. ``/proc/self/statm`` is off by some pages for every core, so
by much where there are many."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import torch


def resident() -> int:
    """Return how many bytes of RAM this process holds, counted page by page."""
    found = re.search(
        r"^Rss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE
    )
    assert found is not None
    return int(found[1]) * 1024


def resident_of(memory: torch.Tensor) -> int:
    """Return how many bytes are in RAM of the pages that ``memory`` lies on."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(memory.data_ptr() + memory.nbytes - start) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert (
        libc.mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE), found
        )
        == 0
    )
    return sum(page & 1 for page in found) * mmap.PAGESIZE
