"""Time rank-based replay against proportional replay: ``python -m rlbuf_td.cli.bench.rank``.

TorchRL has no rank-based sampler; what comes nearest, its proportional one, is the third column.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torchrl.data.replay_buffers import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer
from rlbuf_td.cli.bench.contenders import small_rows
from rlbuf_td.kernels.rank_order.chunked import ChunkedOrder

BATCH, LONG = 256, 10_000
Buffers = dict[str, TensorDictReplayBuffer]


def buffers(rows: int) -> Buffers:
    """Return full buffers whose rows have random priorities, set in random order."""
    made: Buffers = {
        "rank": ReplayBuffer(storage=PackedStorage(rows), sampler=RankSampler(rows), batch_size=BATCH),
        "proportional": ReplayBuffer(storage=PackedStorage(rows), sampler=ProportionalSampler(rows), batch_size=BATCH),
        "TorchRL": TensorDictReplayBuffer(
            storage=LazyTensorStorage(rows), sampler=PrioritizedSampler(rows, 0.6, 0.4), batch_size=BATCH
        ),
    }
    data = small_rows(LONG)
    for rb in made.values():
        for _ in range(rows // LONG):
            rb.extend(data)
    for index in torch.randperm(rows).split(LONG):
        prioritize(made, index)
    return made


def prioritize(made: Buffers, index: torch.Tensor) -> None:
    """Give rows new random priorities, the same in all buffers."""
    td_error = torch.randn(len(index)).abs()
    for rb in made.values():
        rb.update_priority(index, td_error)


def race(made: Buffers, prepare: Callable[[int], Callable[[TensorDictReplayBuffer], object]], rounds: int) -> str:
    """Time one call of each buffer in turn; ``prepare`` runs before each round, untimed. Medians and ratios."""
    spent: dict[str, list[float]] = {name: [] for name in made}
    for step in range(rounds):
        call = prepare(step)
        for name in sorted(made, key=lambda _: random.random()):  # nobody always finds the caches cold
            start = time.perf_counter()
            call(made[name])
            spent[name].append((time.perf_counter() - start) * 1e6)
    median = {name: statistics.median(times) for name, times in spent.items()}
    return "  ".join(f"{name} {us:8.1f} us ({median['rank'] / us:.2f})" for name, us in median.items())


def compare(rows: int, rounds: int) -> None:
    """Print sample, update and extend of one size; in brackets the time of ``rank`` as a multiple of each."""
    made = buffers(rows)

    def update(step: int) -> Callable[[TensorDictReplayBuffer], object]:
        index, td_error = torch.randint(rows, (BATCH,)), torch.randn(BATCH).abs()
        return lambda rb: rb.update_priority(index, td_error)

    def extend(count: int) -> Callable[[int], Callable[[TensorDictReplayBuffer], object]]:
        data = small_rows(count)

        def prepare(step: int) -> Callable[[TensorDictReplayBuffer], object]:
            # What is about to be overwritten has random priorities, as in a buffer that has been learned from.
            prioritize(made, (step * count + torch.arange(count)) % rows)
            return lambda rb: rb.extend(data)

        return prepare

    print(f"{rows:>12,} rows")
    print("  sample      ", race(made, lambda step: lambda rb: rb.sample(), rounds))
    print("  update      ", race(made, update, rounds))
    print("  extend 256  ", race(made, extend(BATCH), -(-rounds // 3)))
    print("  extend 10000", race(made, extend(LONG), -(-rounds // 16)))
    made.clear()


def adversaries(rows: int) -> dict[str, Callable[[int], tuple[torch.Tensor, torch.Tensor]]]:
    """Return histories of updates that are meant to hurt: ``step -> (rows, TD errors)``."""
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


def compare_adversaries(rows: int, rounds: int) -> None:
    """Print the time of an update of the order alone in random and in adversarial histories."""
    print(f"{rows:>12,} rows, update of the order alone")
    first = 0.0
    for name in adversaries(rows):
        order = ChunkedOrder(torch.rand(rows))
        for index in torch.randperm(rows).split(LONG):
            order.update_(index, torch.randn(len(index)), rows)
        batch_of, times = adversaries(rows)[name], []
        for step in range(rounds):
            index, td_error = batch_of(step)
            start = time.perf_counter()
            order.update_(index, td_error, rows)
            times.append((time.perf_counter() - start) * 1e6)
        times = times[len(times) // 5 :]  # the history has to take hold
        median = statistics.median(times)
        first = first or median
        print(f"  {name:16s} median {median:6.1f} us ({median / first:.2f}), mean {statistics.mean(times):6.1f} us")


def main(argv: list[str] | None = None) -> None:
    """Print all figures for the sizes named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m rlbuf_td.cli.bench.rank", description=__doc__)
    parser.add_argument("--rows", type=float, nargs="*", default=[1e5, 1e6])
    parser.add_argument("--rounds", type=int, default=1_000, help="turns that the buffers take")
    parser.add_argument("--adversaries", type=float, default=1e6, help="rows under adversarial updates")
    options = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for rows in map(int, options.rows):
            compare(rows, options.rounds)
        compare_adversaries(int(options.adversaries), options.rounds)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
