"""Functions that time calls after a learner's step, which evicts a buffer's data from
the processor's caches."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Each of TorchRL's storages logs its first write, into the middle of the progress.
# Other messages are shown.
logging.getLogger("torchrl").addFilter(
    lambda record: not record.getMessage().startswith("Initialized Lazy")
)

Calls = dict[str, Callable[[], object]]  # by the name of a library or of an operation
OURS = "rlbuf_td"  # every ratio is relative to this package's time
CALLS = 16  # per block, each after a learner's step
#: The operations on replay buffers, and all operations, in words for tables and
# pictures.
REPLAY = {
    "uniform": "sample, uniform",
    "proportional": "sample, proportional",
    "update": "update priorities",
    "cycle": "sample + update",
    "rank": "sample, by rank *",
    "rank_update": "update, by rank *",
    "extend": "extend, uniform",
    "extend_proportional": "extend, proportional",
    "add": "add one, uniform",
    "add_proportional": "add one, proportional",
}
WORDS = REPLAY | {
    "leaves-12": "a Dict of 12 leaves",
    "leaves-3": "the same in 3 leaves",
    "gae": "GAE {}, loop",
    "gae-vectorized": "GAE {}, vector",
    "ppo": "PPO's data step",
}


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: for each library, one number per block of calls."""

    operation: str
    rows: int
    kind: str
    blocks: dict[str, list[float]]

    @property
    def words(self) -> str:
        return WORDS[self.operation].format(self.kind.replace(" ", ""))

    @property
    def data(self) -> str:
        """What the operation works on, in words."""
        if self.operation not in REPLAY:
            return "Dicts, rollouts"
        kind = (
            "two 4 x 84 x 84 images"
            if self.kind == "image"
            else "167 bytes in 7 leaves"
        )
        return f"{self.rows:,} rows of {kind}"

    def ratio(self, name: str) -> float:
        """Return a library's time divided by this package's time, as the median over
        blocks."""
        both = zip(self.blocks[name], self.blocks[OURS], strict=True)
        return statistics.median(theirs / ours for theirs, ours in both)


class Learner:
    """An MLP with Adam, whose step evicts a buffer's data and code from the processor's
    caches."""

    def __init__(self, batch: int) -> None:
        layers = (
            torch.nn.Linear(17, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 256),
            torch.nn.ReLU(),
        )
        self.network = torch.nn.Sequential(*layers, torch.nn.Linear(256, 6))
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.observation = torch.randn(batch, 17)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.network(self.observation).square().mean().backward()
        self.optimizer.step()


def measure(
    operation: str, rows: int, kind: str, calls: Calls, rounds: int, batch: int = 256
) -> Timing:
    gc.collect()
    for call in calls.values():
        # in virtual machines, the first reads of memory pages are slow
        for _ in range(rows // batch // 4):
            call()
    return Timing(operation, rows, kind, in_loop(calls, rounds, Learner(batch).step))


def in_loop(
    calls: Calls, rounds: int, learn: Callable[[], object]
) -> dict[str, list[float]]:
    """Return each library's mean microseconds per call in each block; ``learn()`` runs,
    untimed, before each call."""
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times = []
            for _ in range(CALLS + 1):
                learn()
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            # The first call of a block does not count. Unlike a median, the mean counts
            # rare slow calls.
            blocks[name].append(statistics.fmean(times[1:]) * 1e6)
    return blocks


# -- tables in Markdown


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def head(*names: str) -> list[str]:
    """Return the head of a table whose first column is text, the others numbers."""
    return [row(*names), row("---", *["---:"] * (len(names) - 1))]


def microseconds(times: Sequence[float]) -> str:
    return f"{statistics.median(times):,.0f}" if times else ""


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
