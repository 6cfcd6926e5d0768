"""Hints to the system about memory: what lies there stays, and pages that were asked for are there."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from rlbuf_td._huge_pages import advise_huge_pages, take_pages

MIB = 1 << 20


@pytest.mark.parametrize(("start", "end"), [(0, 40 * MIB), (5, 40 * MIB - 3), (3 * MIB + 1, 7 * MIB), (9, 9), (9, 60)])
def test_taking_pages_changes_no_byte(start, end):
    memory = torch.arange(40 * MIB // 8).view(torch.uint8)
    before = memory.clone()
    advise_huge_pages(memory)
    take_pages(memory[start:end])
    assert torch.equal(memory, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes pages ahead")
def test_pages_that_were_taken_are_resident():
    memory = torch.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=torch.uint8)
    before = resident()
    take_pages(memory)
    taken = resident() - before
    if taken < MIB:
        pytest.skip("this system does not know MADV_POPULATE_WRITE")
    assert 60 * MIB < taken < 80 * MIB
    assert not memory.any()


def resident() -> int:
    """Return how many bytes of RAM this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
