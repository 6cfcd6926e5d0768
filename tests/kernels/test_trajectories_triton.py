"""Look-ups of trajectories by the GPU's twin in lockstep with the specification."""

from __future__ import annotations

import pytest
import torch

from rlbuf_td.kernels.dispatch import forced
from rlbuf_td.kernels.episodes import FlagBoundaries


def ring(steps: int, lanes: int, often: float, fill: float, device: torch.device, seed: int = 0) -> FlagBoundaries:
    """Write ``fill`` rings' worth of steps in portions."""
    generator = torch.Generator().manual_seed(seed)
    boundaries = FlagBoundaries(steps, lanes, device)
    end = torch.zeros(steps, lanes, dtype=torch.bool, device=device)
    written, start = 0, 0
    while written < fill * steps:
        count = min(max(1, steps // 3), steps - start)
        end[start : start + count] = (torch.rand(count, lanes, generator=generator) < often).to(device)
        boundaries.write(start, count, end, None)
        written, start = written + count, (start + count) % steps
    return boundaries


RINGS = [(1, 1, 0.5, 1.0), (7, 1, 0.3, 0.5), (40, 3, 0.1, 2.5), (600, 1, 0.0, 1.3), (600, 2, 0.004, 1.3)]


@pytest.mark.parametrize(("steps", "lanes", "often", "fill"), RINGS)
@pytest.mark.parametrize(("stretch", "within"), [(64, None), (256, None), (64, 0), (64, 5), (64, 64), (64, 10_000)])
def test_trajectories_reach_as_far_as_the_specification_says(
    gpu, monkeypatch, steps, lanes, often, fill, stretch, within
):
    monkeypatch.setattr("rlbuf_td.kernels.episodes.cuda.STRETCH", stretch)
    boundaries = ring(steps, lanes, often, fill, gpu)
    live = min(steps, int(fill * steps)) * lanes
    cells = torch.linspace(0, live - 1, min(live, 40), dtype=torch.float64).long().to(gpu)
    with forced("triton"):
        got = boundaries.reach(cells, within)
        every_other = boundaries.reach(cells[::2], within)
    with forced("torch"):
        expected = boundaries.reach(cells, within)
    for mine, some, theirs in zip(got, every_other, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(some, theirs[::2])
