"""Where draws fall: one in each segment, every place of a batch anywhere, and any part of a batch everywhere."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
import torch

from rlbuf_td.kernels.strata import masses, step_of
from tests.statistics import assert_follows

ONE = torch.ones((), dtype=torch.float64)


def segments(uniform: torch.Tensor) -> torch.Tensor:
    """Return the segment of each draw, found by brute force: which of the equal parts its mass lies in."""
    return (masses(uniform, ONE, stratified=True)[:, None] >= torch.arange(1, len(uniform)) / len(uniform)).sum(1)


@pytest.mark.parametrize("batch", [*range(1, 40), 64, 100, 255, 256, 1_000])
def test_each_segment_is_drawn_from_once_where_its_uniform_number_says(batch):
    uniform = torch.rand(batch, dtype=torch.float64)
    mass = masses(uniform, 3 * ONE, stratified=True)
    assert (segments(uniform).sort().values == torch.arange(batch)).all()
    torch.testing.assert_close(mass * batch / 3 - segments(uniform), uniform, rtol=0.0, atol=1e-9)
    assert gcd(step_of(batch, stratified=True), batch) == 1


@pytest.mark.parametrize("batch", [2, 6, 16])
def test_every_place_of_a_batch_is_in_every_segment_equally_often(batch):
    drawn = torch.stack([segments(torch.rand(batch, dtype=torch.float64)) for _ in range(4_000)])
    for place in range(batch):
        assert_follows(drawn[:, place].bincount(minlength=batch), np.full(batch, 1 / batch))


def test_the_offset_of_segments_is_independent_of_the_first_place():
    uniform = torch.rand(40_000, 2, dtype=torch.float64)
    first = torch.stack([segments(each)[0] for each in uniform])
    both = 8 * first + (uniform[:, 0] * 8).long()
    assert_follows(both.bincount(minlength=16), np.full(16, 1 / 16))


@pytest.mark.parametrize("batch", [32, 60, 64, 256, 1_000])
def test_a_part_of_a_batch_has_draws_from_everywhere(batch):
    uniform = torch.rand(batch, dtype=torch.float64)
    for parts in (2, 4):
        for part in segments(uniform).split(batch // parts):
            counts = (part * 4 // batch).bincount(minlength=4)
            assert (counts - len(part) / 4).abs().max() <= 3 + len(part) // 100
