"""How a device is timed, and the table that times are printed in.

Wall times are those of many calls with one synchronisation at the end; device times come from CUDA events around many
launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Measured:
    """One line of the table.

    Attributes:
        what: was done.
        value: a number, in ``unit``.
        unit: of the number.
        goal: what it is to be, ``None`` where nothing is asked.
        at_least: whether more is better.
    """

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Whether the goal is met."""
        if self.goal is None:
            return ""
        return "yes" if (self.value >= self.goal if self.at_least else self.value <= self.goal) else "NO"


def wall(call: Callable[[], object], seconds: float, wait: Callable[[], None] | None = None, rounds: int = 5) -> float:
    """Return microseconds a call: the median of blocks of about ``seconds``, the device being waited for after each."""
    wait = torch.cuda.synchronize if wait is None else wait
    for _ in range(3):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(5):
        call()
    wait()
    count, blocks = max(5, int(seconds / ((time.perf_counter() - start) / 5))), []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        blocks.append((time.perf_counter() - start) / count * 1e6)
    return sorted(blocks)[len(blocks) // 2]


def on_device(call: Callable[[], object], count: int = 100) -> float:
    """Return microseconds of the device a call: ``count`` calls as one graph, so that no launch is waited for."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        call()
    torch.cuda.current_stream().wait_stream(beside)
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


def launches(call: Callable[[], object]) -> int:
    """Return how many kernels (and copies on the device) a call launches."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def table(measured: list[Measured], title: str) -> str:
    """Return the results as a Markdown table."""
    lines = [title, "", "| | measured | goal | met |", "|---|---|---|---|"]
    for line in measured:
        bound = "" if line.goal is None else f"{'>=' if line.at_least else '<='} {line.goal:g} {line.unit}".rstrip()
        value = f"{line.value:.1f} {line.unit}".rstrip()
        lines.append(f"| {line.what} | {value} | {bound} | {line.verdict} |")
    return "\n".join(lines)
