"""How calls are timed: in turns on the CPU, by events on a CUDA device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

OURS = "rlbuf_td"  # every ratio is a multiple of this package's time


@dataclass(frozen=True)
class Timing:
    """Microseconds per call for each contender, block by block; the blocks took turns."""

    operation: str
    rows: int
    kind: str
    blocks: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median over the blocks."""
        return statistics.median(self.blocks[name])

    def ratio(self, name: str) -> float:
        """Return the time of ``name`` as a multiple of this package's: the median over the rounds."""
        return statistics.median(
            theirs / ours for theirs, ours in zip(self.blocks[name], self.blocks[OURS], strict=True)
        )


def interleave(calls: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return microseconds per call of calls that take turns: ``rounds`` blocks each, about ``seconds`` long."""
    sizes = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        for _ in range(5):
            call()
        sizes[name] = max(3, int(seconds / ((time.perf_counter() - start) / 5)))
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(sizes[name]):
                call()
            blocks[name].append((time.perf_counter() - start) / sizes[name] * 1e6)
    return blocks


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside the ``with`` block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def wall(call: Callable[[], object], seconds: float, rounds: int = 5) -> float:
    """Return microseconds per call: the median of blocks of about ``seconds`` that end with a synchronization."""
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


def on_device(call: Callable[[], object], count: int = 20) -> float:
    """Return the device's microseconds per call: ``count`` calls as one CUDA graph, so that launches cost nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / count
