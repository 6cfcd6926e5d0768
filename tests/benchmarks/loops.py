"""Measure whole training loops, as users write them, with this package's buffers and
with others (``python -m tests.benchmarks.loops``).

The sides of a case run in one process, one segment of steps after another, in turn.
Each side acts, steps its environment, writes, samples and learns. Time in the buffer is
the time of writing, sampling and updating priorities; with a recorder, it is the time
of the recorder's ``step`` less that of the environment's. ``figures.py`` publishes the
results.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torchrl.data import PrioritizedSampler

from rlbuf_td import ProportionalSampler
from rlbuf_td.cli import info, whole_number
from tests.benchmarks import loop_sides as sides
from tests.benchmarks.contenders import ALPHA, BETA
from tests.benchmarks.loop_sides import CAPACITY, Side
from tests.benchmarks.timing import OURS, head, microseconds, one_thread, row

PARTS = ("write", "sample", "update")
PACKAGES = (
    "torch",
    "torchrl",
    "numba",
    "gymnasium",
    "stable_baselines3",
    "cpprb",
    "flashbax",
)


@dataclass(frozen=True)
class Case:
    """Loops that do the same with different buffers; the last one is ours."""

    words: str
    sides: dict[str, Callable[[], Side]]
    steps: int  # per segment
    fill: int  # steps before the first segment


CASES = {
    "pendulum": Case(
        "one environment, batches of 256",
        {
            "NumPy ring by hand": sides.NumpyRing,
            "Stable-Baselines3": sides.baselines_pendulum,
            "TorchRL": sides.TorchRLByHand,
            OURS: sides.recorded_pendulum,
        },
        100,
        5_000,
    ),
    "dqn": Case(
        "8 environments, prioritized, batches of 128",
        {
            "cpprb": sides.Cpprb,
            f"{OURS}, 1 step": partial(sides.prioritized, 1),
            f"{OURS}, 3 steps": partial(sides.prioritized, 3),
        },
        100,
        3_000,
    ),
    "images": Case(
        "4 x 84 x 84 images, batches of 64",
        {
            "Stable-Baselines3": sides.baselines_images,
            "Stable-Baselines3, memory saved": partial(
                sides.baselines_images,
                optimize_memory_usage=True,
                handle_timeout_termination=False,
            ),
            OURS: sides.images,
            f"{OURS}, share_next": partial(sides.images, share_next=True),
            f"{OURS}, frames": partial(
                sides.images, share_next=True, frames={"observation": 4}
            ),
        },
        20,
        2_500,
    ),
    "ppo": Case(
        "PPO, 8 environments x 128 steps, 4 epochs",
        {"tensors by hand": sides.PPOByHand, OURS: sides.PPORecorder},
        sides.RolloutSide.T,
        sides.RolloutSide.T,
    ),
    "many": Case(
        "a write of 4,096 environments, after a learner's step",
        {"copy_ of each leaf": sides.ManyByHand, OURS: sides.ManyAdded},
        2 * sides.ManySide.T,
        2 * sides.ManySide.T,
    ),
    "collector": Case(
        "TorchRL's collector and SAC, prioritized, batches of 256",
        {
            "TorchRL": lambda: sides.collect_theirs(
                sampler=PrioritizedSampler(CAPACITY, ALPHA, BETA)
            ),
            OURS: lambda: sides.collect_ours(
                sampler=ProportionalSampler(CAPACITY, ALPHA, BETA)
            ),
        },
        sides.CollectorSide.FRAMES,
        4 * sides.CollectorSide.FRAMES,
    ),
    "agent": Case(
        "Stable-Baselines3's SAC, batches of 256",
        {
            "Stable-Baselines3": sides.AgentSide,
            OURS: partial(sides.AgentSide, sides.guides_buffer),
        },
        100,
        200,
    ),
}


# -- measuring


@dataclass(frozen=True)
class Result:
    """What a side did in each segment: steps per second, and microseconds per step in
    each part of the buffer."""

    side: str
    rates: list[float]
    parts: dict[str, list[float]]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def in_buffer(self) -> list[float]:
        return [sum(spent) for spent in zip(*self.parts.values(), strict=True)]

    def times(self, part: str | None = None) -> list[float]:
        """Microseconds per step in a part, or in the buffer, per segment."""
        return self.in_buffer if part is None else self.parts.get(part, [])

    def ratio(self, ours: Result) -> float:
        """Return this side's time in the buffer divided by ours, as the median over
        segments."""
        both = zip(self.in_buffer, ours.in_buffer, strict=True)
        return statistics.median(theirs / own for theirs, own in both)


def measure(
    case: Case, segments: int, steps: int | None, fill: int | None
) -> list[Result]:
    """Run the sides of a case in turn; leave out those of other libraries that are
    missing, or fail."""
    running: dict[str, Side] = {}
    for name, make in case.sides.items():
        try:
            side = make()
            side.fill(case.fill if fill is None else fill)
        except Exception as error:
            if name.startswith(OURS):
                raise
            print(f"{name} is left out: {type(error).__name__}: {error}")
        else:
            running[name] = side

    rates: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, Any] = {name: defaultdict(list) for name in running}
    for _ in range(segments):
        for name, side in running.items():
            side.spent.clear()
            began = sides.now()
            done = side.run(steps or case.steps)
            rates[name].append(done / (sides.now() - began))
            for part, seconds in side.spent.items():
                parts[name][part].append(1e6 * seconds / done)
    return [Result(name, rates[name], dict(parts[name])) for name in running]


def circumstances() -> dict[str, str]:
    """Return the date, the processor and the versions."""
    facts = dict(info.facts())
    result = {"date": date.today().isoformat(), "processor": facts["processor"]}
    for name in PACKAGES:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            result[name] = "not installed"
    return result


def lines(facts: dict[str, str]) -> list[str]:
    return [f"{name} {fact}" for name, fact in facts.items()]


def table(case: Case, results: Sequence[Result]) -> Iterator[str]:
    """Yield a row per side, with the time in each part of the buffer."""
    yield from head(case.words, "steps/s", "in buffer, µs", *PARTS, "ratio")
    for result in results:
        times = (microseconds(result.times(part)) for part in (None, *PARTS))
        ratio = f"{result.ratio(results[-1]):.2f}"
        yield row(result.side, f"{result.rate:,.0f}", *times, ratio)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("cases", nargs="*", choices=[[], *CASES], metavar="CASE", help=", ".join(CASES))
    add("--steps", type=whole_number(1), help="per segment (default: each case's own)")
    add("--segments", type=whole_number(1), default=15, help="per side (default: 15)")
    add("--fill", type=whole_number(1), help="steps that are stored before")
    options = parser.parse_args(arguments)

    print(", ".join(lines(circumstances())))
    with one_thread():
        for name in options.cases or CASES:
            case = CASES[name]
            results = measure(case, options.segments, options.steps, options.fill)
            print("", *table(case, results), sep="\n", flush=True)


if __name__ == "__main__":
    main()
