"""What it costs to count episodes, under pytest-benchmark: a step of 16 environments, a different one each time.

pip install -e '.[tests,bench]' && pytest tests/benchmarks/bench_stats.py --benchmark-columns=median,iqr
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import EpisodeStats

LANES = 16


def step(numbered: bool) -> TensorDict:
    done = torch.rand(LANES, 1) < 0.02
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    data = TensorDict(
        {"observation": torch.randn(LANES, 17), "next": {"reward": torch.randn(LANES, 1), **flags}}, [LANES]
    )
    if numbered:
        data["collector", "traj_ids"] = torch.arange(LANES)
    return data


@pytest.mark.parametrize("numbered", [False, True], ids=["lanes", "trajectory numbers"])
@pytest.mark.parametrize("cached", [1, 1_000], ids=["in the cache", "from memory"])
def test_time(benchmark, cached, numbered):
    torch.manual_seed(0)
    stats = EpisodeStats()
    steps = itertools.cycle([step(numbered) for _ in range(cached)])
    stats.update(next(steps), time_dim=None)
    benchmark(lambda: stats.update(next(steps), time_dim=None))
