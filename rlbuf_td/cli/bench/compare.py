"""``python -m rlbuf_td bench``: time the operations of several libraries, and print a table.

Before each timed call, a learner trains an MLP for one step. As in training, this step evicts the buffer's data from
the processor's caches. The last column shows this package's time in a tight loop, without the learner.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlbuf_td.cli.bench import cases
from rlbuf_td.cli.bench.contenders import Ours, TorchRL, image_rows, small_rows
from rlbuf_td.cli.bench.others import available
from rlbuf_td.cli.bench.timing import Timing, measure, one_thread

REPLAY = {
    "uniform": "sample, uniform",
    "proportional": "sample, proportional",
    "update": "update priorities",
    "cycle": "sample + update, proportional",
    "rank": "sample, by rank [*]",
    "rank_update": "update priorities, by rank [*]",
    "extend": "extend by a batch, uniform",
    "extend_proportional": "extend by a batch, proportional",
    "add": "add one, uniform",
    "add_proportional": "add one, proportional",
}

OPERATIONS = REPLAY | cases.OPERATIONS


def run(rows: Sequence[int], images: int, batch: int, rounds: int, operations: Sequence[str]) -> Iterator[Timing]:
    operations = [operation for operation in operations if operation in REPLAY]
    with one_thread():
        for count, kind, make_rows in [(n, "small", small_rows) for n in rows] + [(images, "image", image_rows)]:
            if not count or not operations:
                continue
            if (2 * len(available()) + 1) * count * (make_rows(1).bytes() + 24) > _available():
                print(f"skipped: {count:,} {kind} rows need more memory than is free", file=sys.stderr)
                continue
            contenders = [contender(count, batch, make_rows) for contender in available()]
            for operation in operations:
                calls = {c.name: getattr(c, operation) for c in contenders if hasattr(c, operation)}
                yield measure(operation, count, kind, calls, rounds, batch)
            del contenders, calls
            gc.collect()


def _available() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run_others(batch: int, rounds: int, operations: Sequence[str]) -> Iterator[Timing]:
    with one_thread():
        for operation, parts in cases.LEAVES.items():
            if operation in operations:
                yield measure(operation, cases.LEAF_ROWS, "Dict", cases.leaves(parts, batch), rounds, batch)
        if "record" in operations:
            yield measure("record", cases.RECORDED_ROWS, "small", cases.record(), rounds, batch)
        for operation, rows, kind, both_sides in cases.on_policy(operations, batch):
            yield measure(operation, rows, kind, both_sides, rounds, batch)


def table(timings: Sequence[Timing], names: Sequence[str]) -> Table:
    title = "Microseconds per call after a learner's step (in brackets: relative to rlbuf_td)"
    result = Table(title=title, title_justify="left")
    result.add_column("operation")
    result.add_column("rows", justify="right")
    for name in names:
        result.add_column(name, justify="right", style="bold" if name == Ours.name else "")
    result.add_column("in a tight loop", justify="right", no_wrap=True)
    for timing in timings:
        cells = [escape(OPERATIONS[timing.operation]), f"{timing.rows:,} {timing.kind}"]
        for name in names:
            if name not in timing.blocks:
                cells.append("")
            elif name == Ours.name:
                cells.append(f"{timing.median(name):.1f}")
            else:
                cells.append(f"{timing.median(name):.1f} ({timing.ratio(name):.1f}x)")
        theirs = f" (TorchRL {timing.ratio(TorchRL.name, tight=True):.1f}x)" if TorchRL.name in timing.tight else ""
        result.add_row(*cells, f"{statistics.median(timing.tight[Ours.name]):.1f}{theirs}")
    return result


def main(options: argparse.Namespace) -> int:
    operations = options.only or list(OPERATIONS)
    console = Console(width=None if sys.stdout.isatty() else 190)
    timings: list[Timing] = []
    with console.status("filling buffers") as status:
        for timing in chain(
            run(options.rows, options.images, options.batch, options.rounds, operations),
            run_others(options.batch, options.rounds, operations),
        ):
            timings.append(timing)
            status.update(f"{timing.operation} at {timing.rows:,} rows: {timing.ratio(TorchRL.name):.1f}x TorchRL")
    console.print(table(timings, [contender.name for contender in available()]))
    console.print(
        f"batch {options.batch}, one thread, medians of {options.rounds} interleaved blocks, "
        f"torch {torch.__version__}; rlbuf_td[bench] installs the other libraries\n"
        "[*] TorchRL has no rank-based sampler: the time of its proportional sampler is shown\n"
        "[#] TorchRL does not record Gymnasium loops: a hand-made TensorDict is shown, with its reset steps",
        markup=False,
    )
    if options.picture is not None:
        from rlbuf_td.cli.bench.picture import draw  # only pictures need matplotlib

        options.picture.parent.mkdir(parents=True, exist_ok=True)
        draw(timings, options.batch).savefig(options.picture, dpi=180)
        console.print(f"saved {options.picture}", markup=False)
    return 0
