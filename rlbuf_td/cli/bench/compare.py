"""``python -m rlbuf_td bench``: time the operations of several libraries, and print a table.

Before each timed call, a learner trains an MLP for one step. As in training, this step evicts the buffer's data from
the processor's caches. With ``--wide``, the last column shows times in a tight loop, without the learner.
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

from rlbuf_td.cli import UsageError
from rlbuf_td.cli.bench import cases
from rlbuf_td.cli.bench.contenders import TorchRL, available, image_rows, small_rows
from rlbuf_td.cli.bench.timing import OURS, REPLAY, WORDS, Timing, measure, one_thread

NOTES = """
Mixed: TorchRL's buffer with our parts; bare: one torch.randint and one
index_select; SB3: Stable-Baselines3. pip install 'rlbuf_td[bench]' adds others.
* TorchRL has no sampler by rank: its proportional sampler is timed
record a step: of 16 environments; TorchRL stores a hand-made TensorDict
"""


def run(rows: Sequence[int], images: int, batch: int, rounds: int, operations: Sequence[str]) -> Iterator[Timing]:
    operations = [operation for operation in operations if operation in REPLAY]
    with one_thread():
        for count, kind, make_rows in [(n, "small", small_rows) for n in rows] + [(images, "image", image_rows)]:
            if not count or not operations:
                continue
            if (2 * len(available()) + 1) * count * (make_rows(1).bytes() + 24) > _available():
                print(f"skipped: {count:,} {kind} rows need more memory than is free", file=sys.stderr)
                continue
            found = {contender.name: contender(count, batch, make_rows).operations() for contender in available()}
            for operation in operations:
                calls = {name: each[operation] for name, each in found.items() if operation in each}
                yield measure(operation, count, kind, calls, rounds, batch)
            del found, calls
            gc.collect()


def _available() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run_others(batch: int, rounds: int, operations: Sequence[str]) -> Iterator[Timing]:
    with one_thread():
        for operation, rows, kind, calls in cases.others(operations, batch):
            yield measure(operation, rows, kind, calls, rounds, batch)


def narrow_table(timings: Sequence[Timing], names: Sequence[str]) -> str:
    """Return a table with the time of this package, and the times of the others as multiples of it."""
    names = [name for name in names if name != OURS]
    head = f"{'':<22} {OURS:>9}" + "".join(_column(name, name) for name in names)
    lines = ["Time per call, after a learner's step; of others: as a multiple of rlbuf_td's"]
    group = None
    for timing in timings:
        if timing.data != group:
            group = timing.data
            lines += ["", group, head]
        own = timing.median(OURS)
        time = f"{own:,.0f} us" if own < 1e5 else f"{own / 1e3:,.0f} ms"
        ratios = (_multiple(timing.ratio(name)) if name in timing.blocks else "" for name in names)
        cells = "".join(_column(name, ratio) for name, ratio in zip(names, ratios, strict=True))
        lines.append(f"{timing.words:<22} {time:>9}{cells}".rstrip())
    return "\n".join(lines)


def _column(name: str, cell: str) -> str:
    return f"  {cell:>{max(5, len(name))}}"


def _multiple(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def wide_table(timings: Sequence[Timing], names: Sequence[str]) -> str:
    """Return a table with the times of all libraries, also in a tight loop."""
    rows = [["microseconds per call", "rows", *names, f"{OURS}, tight loop", "TorchRL, tight loop"]]
    rows += [[timing.words, f"{timing.rows:,} {timing.kind}", *_cells(timing, names)] for timing in timings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["Time per call, after a learner's step (in brackets: as a multiple of rlbuf_td's)", ""]
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)


def _cells(timing: Timing, names: Sequence[str]) -> Iterator[str]:
    for blocks, columns, tight in ((timing.blocks, names, False), (timing.tight, (OURS, "TorchRL"), True)):
        for name in columns:
            if name not in blocks:
                yield ""
                continue
            ratio = "" if name == OURS else f" ({_multiple(timing.ratio(name, tight=tight))}x)"
            yield f"{statistics.median(blocks[name]):.1f}{ratio}"


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
