"""Timers: after a learner's step and in a tight loop on the CPU, by wall clock on a CUDA device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

OURS = "rlbuf_td"  # every ratio is relative to this package's time
CALLS = 16  # per block, each after a learner's step


@dataclass(frozen=True)
class Timing:
    """Microseconds per call for each contender, one number per block; the contenders' blocks alternate.

    ``blocks``: each call follows a learner's step. ``tight``: calls follow each other directly.
    """

    operation: str
    rows: int
    kind: str
    blocks: dict[str, list[float]]
    tight: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.blocks[name])

    def ratio(self, name: str) -> float:
        """Return the median ratio of the times of ``name`` and this package after a learner's step, over blocks."""
        return _ratio(self.blocks, name)

    def tight_ratio(self, name: str) -> float:
        """Return the median ratio of the times of ``name`` and this package in a tight loop, over blocks."""
        return _ratio(self.tight, name)


def _ratio(blocks: dict[str, list[float]], name: str) -> float:
    return statistics.median(theirs / ours for theirs, ours in zip(blocks[name], blocks[OURS], strict=True))


class Learner:
    """A learner whose step evicts a buffer's rows and code from the processor's caches, as in training."""

    def __init__(self, batch: int) -> None:
        layers = (torch.nn.Linear(17, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU())
        self.network = torch.nn.Sequential(*layers, torch.nn.Linear(256, 6))
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.observation = torch.randn(batch, 17)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.network(self.observation).square().mean().backward()
        self.optimizer.step()


def measure(
    operation: str, rows: int, kind: str, calls: dict[str, Callable[[], object]], rounds: int, batch: int = 256
) -> Timing:
    """Return the times of interleaved calls, after a learner's step and in a tight loop."""
    gc.collect()
    return Timing(operation, rows, kind, in_loop(calls, rounds, Learner(batch).step), interleave(calls, rounds))


def in_loop(calls: dict[str, Callable[[], object]], rounds: int, learn: Callable[[], object]) -> dict[str, list[float]]:
    """Return microseconds per call: the mean of each of ``rounds`` blocks, with ``learn`` before each call.

    Blocks of the calls alternate; the first call of a block is not timed. The mean counts calls that prepare work for
    the next ones; a median would ignore them.
    """
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times = []
            for _ in range(CALLS + 1):
                learn()
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            blocks[name].append(statistics.fmean(times[1:]) * 1e6)
    return blocks


def interleave(calls: dict[str, Callable[[], object]], rounds: int, seconds: float = 0.01) -> dict[str, list[float]]:
    """Return microseconds per call in a tight loop: ``rounds`` blocks for each call, about ``seconds`` long."""
    sizes = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        for _ in range(5):
            call()
        sizes[name] = max(3, int(seconds / ((time.perf_counter() - start) / 5)))
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(sizes[name]):
                call()
            blocks[name].append((time.perf_counter() - start) / sizes[name] * 1e6)
    return blocks


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def wall(call: Callable[[], object], seconds: float, rounds: int = 5) -> float:
    """Return microseconds per call: the median over blocks of about ``seconds`` that end with a synchronization."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    count, blocks = max(5, int(seconds / ((time.perf_counter() - start) / 5))), []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        blocks.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(blocks)
