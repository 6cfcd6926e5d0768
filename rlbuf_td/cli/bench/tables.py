"""The benchmark's results as tables, one of 80 columns and one with everything."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rlbuf_td.cli.bench.timing import OURS, Timing

NOTES = """
Mixed: TorchRL's buffer with our parts; bare: one torch.randint and one
index_select; SB3: Stable-Baselines3. pip install 'rlbuf_td[bench]' adds others.
* TorchRL has no sampler by rank: its proportional sampler is timed
record a step: of 16 environments; TorchRL stores a hand-made TensorDict
"""


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
