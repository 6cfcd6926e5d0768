"""Compare the speed of this package with that of other libraries (``python -m tests.benchmarks.bench``).

Before each timed call, a learner trains an MLP for one step. As in training, this step evicts the buffer's data from
the processor's caches. ``docs/BENCHMARKS.md`` has the results of a run.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from rlbuf_td.cli import whole_number
from rlbuf_td.diagnostics.plots import STYLE
from tests.benchmarks import cases
from tests.benchmarks.contenders import TorchRL, available, image_rows, small_rows
from tests.benchmarks.timing import OURS, REPLAY, WORDS, Timing, measure, one_thread

NOTES = """Mixed: TorchRL's buffer with our parts; bare: one torch.randint and one index_select; SB3: Stable-Baselines3
* TorchRL has no sampler by rank: its proportional sampler is timed
record a step: of 16 environments; TorchRL stores a hand-made TensorDict"""
#: What the picture shows: an operation on each kind of buffer.
SHOWN = {"proportional": "sample", "update": "update priorities", "extend_proportional": "extend"}


def run(rows: Sequence[int], images: int, batch: int, rounds: int, operations: Sequence[str]) -> Iterator[Timing]:
    operations = [operation for operation in operations if operation in REPLAY]
    for count, kind, make_rows in [(n, "small", small_rows) for n in rows] + [(images, "image", image_rows)]:
        if not count or not operations:
            continue
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if (2 * len(available()) + 1) * count * (make_rows(1).bytes() + 24) > free:
            print(f"skipped: {count:,} {kind} rows need more memory than is free", file=sys.stderr)
            continue
        found = {contender.name: contender(count, batch, make_rows).operations() for contender in available()}
        for operation in operations:
            calls = {name: each[operation] for name, each in found.items() if operation in each}
            yield measure(operation, count, kind, calls, rounds, batch)
        del found, calls
        gc.collect()


def run_others(batch: int, rounds: int, operations: Sequence[str]) -> Iterator[Timing]:
    for operation, rows, kind, calls in cases.others(operations, batch):
        yield measure(operation, rows, kind, calls, rounds, batch)


def table(timings: Sequence[Timing], names: Sequence[str]) -> Table:
    """Return a table with the time of this package, and the times of the others as multiples of it."""
    result = Table(
        "", title="Time per call, after a learner's step; of others: as a multiple of rlbuf_td's", caption=NOTES
    )
    for name in names:
        result.add_column(name, justify="right", no_wrap=True)
    for place, timing in enumerate(timings):
        if not place or timing.data != timings[place - 1].data:
            result.add_section()
            result.add_row(timing.data, style="bold")
        ratios = (f"{timing.ratio(name):.3g}" if name in timing.blocks else "" for name in names if name != OURS)
        result.add_row(timing.words, f"{timing.median(OURS):,.0f} us", *ratios)
    return result


def draw(timings: Sequence[Timing]) -> Figure:
    """Return six bars: the time of each operation in :data:`SHOWN`, ours beside TorchRL's."""
    chosen = {timing.operation: timing for timing in timings if timing.operation in SHOWN and timing.kind == "small"}
    figure = Figure(figsize=(3.4, 1.5))
    axes = figure.subplots()
    for side, (name, colour) in enumerate(((OURS, "#c8500a"), (TorchRL.name, "0.78"))):
        places = [place + 0.4 * side for place in range(len(chosen))]
        bars = axes.barh(places, [each.median(name) for each in chosen.values()], 0.4, color=colour, label=name)
        axes.bar_label(bars, fmt="{:,.0f} µs", padding=2)
    axes.set_yticks([place + 0.2 for place in range(len(chosen))], [SHOWN[operation] for operation in chosen])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.margins(x=0.15)
    axes.spines["bottom"].set_visible(False)
    axes.legend(loc="center right")
    figure.suptitle("A call with 256 rows, between a learner's steps")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    rows = "numbers of stored rows; 1e7 needs 18 GB"
    parser.add_argument("--rows", type=whole_number(1), nargs="+", default=[10**6], help=rows)
    parser.add_argument("--images", type=whole_number(0), default=5_000, help="number of image rows, 0 for none")
    parser.add_argument("--batch", type=whole_number(1), default=256, help="rows per batch")
    parser.add_argument("--rounds", type=whole_number(1), default=15, help="timed blocks of 16 calls")
    parser.add_argument("--only", nargs="+", choices=[*WORDS], default=[*WORDS], metavar="OPERATION")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"draw {', '.join(SHOWN)} of both")
    options = parser.parse_args(arguments)
    if min(options.rows) < options.batch or 0 < options.images < options.batch:
        parser.error(f"--rows and --images: the buffers must hold a batch, {options.batch} rows or more")
    console, timings = Console(), []
    with one_thread(), console.status("filling buffers") as status:
        for timing in chain(
            run(options.rows, options.images, options.batch, options.rounds, options.only),
            run_others(options.batch, options.rounds, options.only),
        ):
            timings.append(timing)
            status.update(f"{timing.words}, {timing.rows:,} rows: TorchRL {timing.ratio(TorchRL.name):.1f} x")
    names = [contender.name for contender in available()]
    console.print(table(timings, names), highlight=False)
    print(f"batch {options.batch}, one thread, medians of {options.rounds} blocks, torch {torch.__version__}")
    if options.picture is not None:
        with rc_context(fname=STYLE):
            draw(timings).savefig(options.picture, dpi=270)


if __name__ == "__main__":
    main()
