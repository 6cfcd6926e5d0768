"""``python -m rlbuf_td bench``: time the operations of several libraries, and print a table.

Before each timed call, a learner trains an MLP for one step. As in training, this step evicts the buffer's data from
the processor's caches. With ``--wide``, the last column shows times in a tight loop, without the learner.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from rich.console import Console

from rlbuf_td.cli import UsageError
from rlbuf_td.cli.bench import cases
from rlbuf_td.cli.bench.contenders import TorchRL, image_rows, small_rows
from rlbuf_td.cli.bench.others import available
from rlbuf_td.cli.bench.tables import NOTES, narrow_table, wide_table
from rlbuf_td.cli.bench.timing import REPLAY, WORDS, Timing, measure, one_thread


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


def main(options: argparse.Namespace) -> int:
    if min(options.rows) < options.batch or 0 < options.images < options.batch:
        raise UsageError(f"--rows and --images: the buffers must hold a batch, {options.batch} rows or more")
    if options.picture is not None:
        from rlbuf_td.cli.bench.picture import draw, refuse_picture  # only pictures need matplotlib

        refuse_picture(options.picture)
    operations = options.only or list(WORDS)
    console = Console()
    timings: list[Timing] = []
    with console.status("filling buffers") as status:
        for timing in chain(
            run(options.rows, options.images, options.batch, options.rounds, operations),
            run_others(options.batch, options.rounds, operations),
        ):
            timings.append(timing)
            status.update(f"{timing.words}, {timing.rows:,} rows: TorchRL {timing.ratio(TorchRL.name):.1f} x")
    names = [contender.name for contender in available()]
    print(wide_table(timings, names) if options.wide else narrow_table(timings, names))
    print(f"{NOTES}batch {options.batch}, one thread, medians of {options.rounds} blocks, torch {torch.__version__}")
    if options.picture is not None and timings:
        draw(timings, options.batch).savefig(options.picture, dpi=180)
        print(f"saved {options.picture}")
    return 0
