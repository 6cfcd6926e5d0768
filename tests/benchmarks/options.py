"""Time each option and wrapper beside the plain proportional buffer
(``python -m tests.benchmarks.options``).

The two buffers of a row take turns in one process, and a learner's step precedes each
call. A ratio above 2.5 for :meth:`sample` and :meth:`update_tensordict_priority`, or
above 2 for :meth:`add` and :meth:`extend`, has an exclamation mark. Lines after the
table show what ``rb.compiled`` says, if not all calls of a buffer are compiled.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from tempfile import mkdtemp
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict

from rlbuf_td import (
    EpisodeStats,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    ReplayBufferMixture,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.cli import whole_number
from tests.benchmarks.contenders import small_rows
from tests.benchmarks.timing import OURS, Calls, Learner, in_loop, one_thread

LENGTH, STEPS, GAMMA, EPISODE = 8, 3, 0.99, 200
LIMITS = {"sample": 2.5, "update": 2.5, "add": 2.0, "extend": 2.0}


class OwnSampler(ProportionalSampler):
    """A subclass that changes nothing."""


class OwnStorage(PackedStorage):
    """A subclass that changes nothing."""


def made(
    rows: int, batch: int, sampler: Any = None, storage: Any = None, **settings: Any
) -> ReplayBuffer:
    """Return a buffer; ``sampler`` and ``storage`` are functions of the number of
    rows."""
    parts = {
        "storage": (storage or PackedStorage)(rows),
        "sampler": (sampler or ProportionalSampler)(rows),
    }
    return ReplayBuffer(**parts, batch_size=batch, **settings)


def mixed(rows: int, batch: int) -> ReplayBufferMixture:
    members = {
        "demos": made(rows, batch, lambda _: UniformSampler()),
        "online": made(rows, batch),
    }
    return ReplayBufferMixture(
        members, {"demos": 0.5, "online": 0.5}, batch_size=batch, writes_to="online"
    )


def in_file(rows: int) -> PackedStorage:
    return PackedStorage(rows, scratch_dir=mkdtemp(), auto_cleanup=True)


def n_step(rows: int) -> NStepSampler:
    return NStepSampler(ProportionalSampler(rows), STEPS, GAMMA)


OPTIONS: dict[str, Callable[[int, int], Any]] = {
    "UniformSampler()": partial(made, sampler=lambda _: UniformSampler()),
    "UniformSampler(unique=True)": partial(
        made, sampler=lambda _: UniformSampler(unique=True)
    ),
    "RankSampler": partial(made, sampler=RankSampler),
    "RecencySampler": partial(made, sampler=lambda _: RecencySampler()),
    "subclass of a sampler": partial(made, sampler=OwnSampler),
    "subclass of a storage": partial(made, storage=OwnStorage),
    "n-step": partial(made, sampler=n_step),
    "n-step, share_next": partial(
        made, sampler=n_step, storage=partial(PackedStorage, share_next=True)
    ),
    "sequences": partial(
        made, sampler=lambda rows: SequenceSampler(ProportionalSampler(rows), LENGTH)
    ),
    "sequences, strict": partial(
        made,
        sampler=lambda rows: SequenceSampler(
            ProportionalSampler(rows), LENGTH, boundary="strict"
        ),
    ),
    "sequences of n-step": partial(
        made, sampler=lambda rows: SequenceSampler(n_step(rows), LENGTH)
    ),
    "share_next": partial(made, storage=partial(PackedStorage, share_next=True)),
    "scratch_dir": partial(made, storage=in_file),
    "share()": lambda rows, batch: made(rows, batch).share(),
    "share(), share_next": lambda rows, batch: made(
        rows, batch, storage=partial(PackedStorage, share_next=True)
    ).share(),
    "stats": lambda rows, batch: made(rows, batch, stats=EpisodeStats()),
    "samples_per_insert": partial(made, samples_per_insert=256.0, tolerance=1e12),
    "prefetch=3": partial(made, prefetch=3),
    "device='cpu'": partial(made, device="cpu"),
    "another batch size": made,
    "mixture, half uniform": mixed,
}


def rows_of(count: int) -> TensorDict:
    """Return ``count`` rows of episodes, in which each next observation is the
    following row's observation."""
    data = small_rows(count)
    after, ends = data["next"], torch.arange(1, count + 1) % EPISODE == 0
    after["observation"][:-1] = data["observation"][1:]
    after["done"][:, 0] = after["terminated"][:, 0] = ends
    return data


def filled(rb: Any, data: TensorDict) -> Any:
    for member in rb.members.values() if isinstance(rb, ReplayBufferMixture) else (rb,):
        for part in data.split(max(1, len(data) // 10)):
            member.extend(part)
    return rb


def calls_of(rb: Any, batch: int, size: int | None) -> Calls:
    """Return one function for each timed method; batches of another ``size`` are drawn
    if it is given."""
    sample = rb.sample if size is None else partial(rb.sample, size)
    sampled = []
    for _ in range(8):
        sampled.append(sample())
        sampled[-1]["td_error"] = torch.rand(sampled[-1].batch_size)
    batches, steps, blocks = (
        cycle(sampled),
        cycle(rows_of(8)),
        cycle(rows_of(8 * batch).split(batch)),
    )
    calls: Calls = {"sample": sample}
    if "priority_weight" in sampled[0].keys():
        calls["update"] = lambda: rb.update_tensordict_priority(next(batches))
    return calls | {
        "add": lambda: rb.add(next(steps)),
        "extend": lambda: rb.extend(next(blocks)),
    }


def compare(
    name: str, plain: Any, data: TensorDict, batch: int, rounds: int
) -> tuple[dict[str, str], str]:
    """Return what an option costs, as text.

    Returns:
        For each method, the median time and its ratio to the plain buffer's; and
        ``rb.compiled``, if not all calls are.
    """
    rb = filled(OPTIONS[name](len(data), batch), data)
    ours = calls_of(rb, batch, batch // 2 if name == "another batch size" else None)
    theirs, learn, cells = calls_of(plain, batch, None), Learner(batch).step, {}
    for method, call in ours.items():
        for each in (call, theirs[method]):
            each()  # binds stages, and compiles code
        blocks = in_loop({OURS: theirs[method], name: call}, rounds, learn)
        ratio = statistics.median(
            x / y for x, y in zip(blocks[name], blocks[OURS], strict=True)
        )
        mark = "!" if ratio > LIMITS[method] else ""
        cells[method] = (
            f"{statistics.median(blocks[name]):,.0f} {ratio:.1f}x{mark or ' '}"
        )
    said = getattr(rb, "compiled", "")
    if isinstance(rb, ReplayBuffer):
        rb.shutdown()
    return cells, said if "not " in said else ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=whole_number(1), default=1_000_000)
    parser.add_argument("--batch", type=whole_number(1), default=256)
    parser.add_argument("--rounds", type=whole_number(1), default=15)
    options = parser.parse_args(arguments)
    data, console, notes = rows_of(options.rows), Console(), []
    table = Table(
        "option",
        title="Microseconds per call, and as a multiple of the plain proportional buffer's",
    )
    for method in LIMITS:
        table.add_column(method, justify="right", no_wrap=True)
    with one_thread(), console.status("filling buffers") as status:
        plain = filled(made(options.rows, options.batch), data)
        for name in OPTIONS:
            status.update(name)
            cells, said = compare(name, plain, data, options.batch, options.rounds)
            table.add_row(name, *(cells.get(method, "") for method in LIMITS))
            notes += [f"{name}: {said}"] if said else []
    console.print(table, *notes, sep="\n", markup=False, highlight=False)
    print(
        f"{options.rows:,} rows, batch {options.batch}, one thread, torch {torch.__version__}; !: above the limit"
    )


if __name__ == "__main__":
    main()
