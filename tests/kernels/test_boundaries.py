"""Boundaries: the specification against a walk through Python histories, and the bitmap against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbuf_td.kernels.episodes import BitBoundaries, FlagBoundaries
from tests.kernels.invariants import check_boundaries, flags

Write = tuple[int, int]  # the first step, how many


class Rows:
    def __init__(self, steps: int, lanes: int, named: bool, often: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.often, self.lanes = often, lanes
        self.end = torch.zeros(steps, lanes, dtype=torch.bool)
        self.name = torch.zeros(steps, lanes, dtype=torch.int64) if named else None
        self.current = np.zeros(lanes, np.int64)

    def fill(self, start: int, count: int) -> None:
        for step in range(start, start + count):
            self.end[step] = torch.from_numpy(self.rng.random(self.lanes) < self.often)
            if self.name is not None:
                self.current += self.rng.random(self.lanes) < self.often
                self.name[step] = torch.from_numpy(self.current)


@st.composite
def writes(draw: st.DrawFn, steps: int, longest: int) -> list[Write]:
    """Draw writes that go on around the ring, and some that jump."""
    found, head = [], draw(st.sampled_from([-1, -1, steps - 2]))
    for _ in range(draw(st.integers(1, 12))):
        start = (head + 1) % steps
        if draw(st.integers(0, 4)) == 0:
            start = draw(st.integers(0, steps - 1))
        stop = min(steps, start + draw(st.one_of(st.integers(1, 3), st.integers(1, longest))))
        found.append((start, stop - start))
        head = stop - 1
    return found


@st.composite
def cases(draw: st.DrawFn, sizes: list[int]) -> tuple[int, int, list[Write], Rows]:
    steps = draw(st.sampled_from(sizes))
    lanes = draw(st.sampled_from([1, 2, 3, 70] if 9 < steps < 200 else [1, 2, 3]))
    often = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    rows = Rows(steps, lanes, draw(st.booleans()), often, draw(st.integers(0, 2**20)))
    return steps, lanes, draw(writes(steps, steps)), rows


@given(cases([1, 2, 7, 63, 64, 65, 128, 4095, 4096, 4097]))
def test_the_bitmap_equals_the_specification_after_every_write(case):
    steps, lanes, operations, rows = case
    spec, bits = FlagBoundaries(steps, lanes), BitBoundaries(steps, lanes)
    written = torch.zeros(steps, dtype=torch.bool)
    for start, count in operations:
        rows.fill(start, count)
        written[start : start + count] = True
        for boundaries in (spec, bits):
            boundaries.write(start, count, rows.end, rows.name)
        check_boundaries(bits)
        for name, tensor in flags(bits).tensors().items():
            assert torch.equal(tensor, spec.tensors()[name]), name
        oldest = torch.full((lanes,), (start + count) % steps)
        for only_finished in (True, False):
            given = oldest, torch.full((lanes,), steps), bits.begun, only_finished
            for ours, theirs in zip(bits.whole(*given), spec.whole(*given), strict=True):
                assert torch.equal(ours, theirs)
        cells = torch.arange(steps * lanes)[written.repeat_interleave(lanes)]
        for within in (None, 0, 2, 70):
            for ours, theirs in zip(bits.reach(cells, within), spec.reach(cells, within), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("steps", [262_143, 262_144, 262_145])
def test_a_long_trajectory_is_found_across_three_levels_and_the_wrap(steps):
    bits = BitBoundaries(steps, 1)
    end = torch.zeros(steps, 1, dtype=torch.bool)
    bits.write(0, steps, end, None)
    ask = torch.tensor([0, 1, steps // 2, steps - 1])
    back, ahead, over = bits.reach(ask)
    assert back.tolist() == ask.tolist()
    assert ahead.tolist() == (steps - 1 - ask).tolist()
    assert not over.any()
    bits.write(0, 10, end, None)  # the newest ten, after the others
    check_boundaries(bits)
    back, ahead, _ = bits.reach(torch.tensor([0, 9, 10, steps - 1]))
    assert back.tolist() == [steps - 10, steps - 1, 0, steps - 11]
    assert ahead.tolist() == [9, 0, steps - 1, 10]
