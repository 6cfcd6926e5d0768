"""Time updates of the rank order under histories that are meant to hurt it: ``python tests/benchmarks/rank.py``."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from rlbuf_td.cli.bench.timing import one_thread
from rlbuf_td.kernels.rank_order.chunked import ChunkedOrder

BATCH = 256


def adversaries(rows: int) -> dict[str, Callable[[int], tuple[torch.Tensor, torch.Tensor]]]:
    """Return histories of updates: ``step -> (rows, TD errors)``."""
    step_of = torch.arange(BATCH, dtype=torch.float32)
    spread = torch.arange(BATCH) * (rows // BATCH)

    def anywhere() -> torch.Tensor:
        return torch.randint(rows, (BATCH,))

    return {
        "random": lambda step: (anywhere(), torch.randn(BATCH)),
        "all equal": lambda step: (anywhere(), torch.ones(BATCH)),
        "rising": lambda step: (anywhere(), 10.0 + step + step_of / BATCH),
        "falling": lambda step: (anywhere(), 1.0 / (10.0 + step + step_of / BATCH)),
        "two values": lambda step: (spread, torch.full((BATCH,), 0.5 + 0.1 * (step % 2))),
        "one place": lambda step: (anywhere(), 0.5 + 1e-7 * step_of),
        "gather, scatter": lambda step: (spread, torch.full((BATCH,), 0.6) if step % 2 else torch.randn(BATCH)),
    }


def main(argv: list[str] | None = None) -> None:
    """Print the median time of an update for each history, in brackets as a multiple of the random one's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--rounds", type=int, default=1_000)
    options = parser.parse_args(argv)
    rows, first = int(options.rows), 0.0
    with one_thread():
        for name, batch_of in adversaries(rows).items():
            order = ChunkedOrder(torch.rand(rows))
            for index in torch.randperm(rows).split(10_000):
                order.update_(index, torch.randn(len(index)), rows)
            times = []
            for step in range(options.rounds):
                index, td_error = batch_of(step)
                start = time.perf_counter()
                order.update_(index, td_error, rows)
                times.append((time.perf_counter() - start) * 1e6)
            median = statistics.median(times[len(times) // 5 :])  # the history has to take hold
            first = first or median
            print(f"{name:16s} {median:6.1f} us ({median / first:.2f})")


if __name__ == "__main__":
    main()
