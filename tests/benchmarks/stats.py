"""Time ``EpisodeStats.update`` for a step of 16 environments: ``python tests/benchmarks/stats.py``."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDict

from rlbuf_td import EpisodeStats
from rlbuf_td.cli.bench.timing import interleave, one_thread

LANES = 16


def step(numbered: bool) -> TensorDict:
    """Return a step of all environments, with trajectory numbers or without."""
    done = torch.rand(LANES, 1) < 0.02
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    data = TensorDict(
        {"observation": torch.randn(LANES, 17), "next": {"reward": torch.randn(LANES, 1), **flags}}, [LANES]
    )
    if numbered:
        data["collector", "traj_ids"] = torch.arange(LANES)
    return data


def main(argv: list[str] | None = None) -> None:
    """Print the median time of a call, for steps in the cache and from memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000, help="steps that are not in the cache")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args(argv)
    calls: dict[str, Callable[[], object]] = {}
    for numbered, count in itertools.product((False, True), (1, options.steps)):
        stats, steps = EpisodeStats(), itertools.cycle([step(numbered) for _ in range(count)])
        name = f"{'trajectory numbers' if numbered else 'lanes'}, {'in the cache' if count == 1 else 'from memory'}"
        calls[name] = partial(lambda stats, steps: stats.update(next(steps), time_dim=None), stats, steps)
    with one_thread():
        for name, times in interleave(calls, options.rounds, 0.01).items():
            print(f"{name}: {statistics.median(times):.1f} us")


if __name__ == "__main__":
    main()
