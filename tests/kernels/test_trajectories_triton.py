"""Look-ups of trajectories by the GPU's twins (reach, goals, n steps) in lockstep with the specification."""

from __future__ import annotations

import pytest
import torch

from rlbuf_td.kernels.dispatch import forced
from rlbuf_td.kernels.episodes import FlagBoundaries
from rlbuf_td.kernels.episodes.goals import Law, choose_goals
from rlbuf_td.kernels.episodes.n_step import sums_ahead


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


@pytest.mark.parametrize(("steps", "lanes", "often", "fill"), RINGS)
@pytest.mark.parametrize("only_finished", [False, True])
@pytest.mark.parametrize("shares", [(1.0, 0, 0, 0), (0.3, 0.2, 0.3, 0.2), (0, 0, 1.0, 0)])
def test_goals_are_those_of_the_specification(gpu, steps, lanes, often, fill, only_finished, shares):
    boundaries = ring(steps, lanes, often, fill, gpu)
    live = min(steps, int(fill * steps)) * lanes
    law = Law(tuple(0.9 * sum(shares[: k + 1]) for k in range(4)), only_finished)
    generator = torch.Generator().manual_seed(steps)
    cells = torch.randint(live, (40,), generator=generator).to(gpu)
    uniform = torch.rand(40, dtype=torch.float64, generator=generator).to(gpu)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    with forced("triton"):
        rows, mask = choose_goals(boundaries, cells, uniform, law, live)
    with forced("torch"):
        expected_rows, expected_mask = choose_goals(boundaries, cells, uniform, law, live)
    assert torch.equal(rows, expected_rows)
    assert torch.equal(mask, expected_mask)


@pytest.mark.parametrize(("steps", "lanes", "often", "fill"), RINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 5])
def test_rewards_are_added_up_as_the_specification_does(gpu, steps, lanes, often, fill, dtype, n):
    boundaries = ring(steps, lanes, often, fill, gpu)
    live = min(steps, int(fill * steps)) * lanes
    rows = torch.linspace(0, live - 1, min(live, 70), dtype=torch.float64).long().to(gpu)
    block = torch.randn(steps * lanes, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for reward in (block.to(gpu)[:, 1:3], block.to(gpu)[:, 0]):
        with forced("triton"):
            total, taken, last = sums_ahead(boundaries, rows, reward, n, 0.9)
        with forced("torch"):
            expected = sums_ahead(boundaries, rows, reward, n, 0.9)
        torch.testing.assert_close(total, expected[0])
        assert torch.equal(taken, expected[1])
        assert torch.equal(last, expected[2])
