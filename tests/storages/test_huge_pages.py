"""Hints to the system about memory: what lies there stays, and pages that were asked for are there."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from rlbuf_td.kernels.huge_pages import advise_huge_pages, take_pages
from tests.residency import resident_of

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
    assert resident_of(memory) == 0
    take_pages(memory[: 33 * MIB])
    taken = resident_of(memory)
    if taken == 0:
        pytest.skip("this system does not know MADV_POPULATE_WRITE")
    assert 33 * MIB <= taken <= 35 * MIB  # a huge page at the end may be whole
    assert not memory.any()
