"""Measure all published figures in one run, and write them into the documents
(``python -m tests.benchmarks.figures``).

The figures are kept in ``docs/figures.json``. The tables of the README and of
``docs/BENCHMARKS.md``, and the picture ``docs/loops.svg``, are made from this file
alone: ``--write`` makes them again without measuring.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from rlbuf_td.cli import whole_number
from rlbuf_td.diagnostics.plots import STYLE
from tests.benchmarks import bench, loops
from tests.benchmarks.loop_sides import ROOT
from tests.benchmarks.loops import CASES, PACKAGES, Result
from tests.benchmarks.timing import OURS, WORDS, Timing, microseconds, one_thread, row

README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "BENCHMARKS.md"
DATA = ROOT / "docs" / "figures.json"
PICTURE = ROOT / "docs" / "loops.svg"
IN_LOOPS = "torch", "torchrl", "gymnasium", "stable_baselines3", "cpprb"
ROWS, IMAGES, BATCH = 1_000_000, 5_000, 256  # of the calls


@dataclass(frozen=True)
class Figures:
    """The results of one run."""

    circumstances: dict[str, str]  # date, processor, versions
    loops: dict[str, list[Result]]  # by case; ours is the last one
    calls: list[Timing]

    @classmethod
    def load(cls, path: Path = DATA) -> Figures:
        data = json.loads(path.read_text())
        cases = {
            name: [Result(**result) for result in results]
            for name, results in data["loops"].items()
        }
        calls = [Timing(**timing) for timing in data["calls"]]
        return cls(data["circumstances"], cases, calls)

    def save(self, path: Path = DATA) -> None:
        path.write_text(json.dumps(_rounded(asdict(self)), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Round the floats of nested dicts and lists to four digits."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def measure(rounds: int) -> Figures:
    """Measure all loops, and then all calls, on one thread."""
    cases, calls = {}, []
    with one_thread():
        for name, case in CASES.items():
            print(case.words, flush=True)
            cases[name] = loops.measure(case, rounds, None, None)
        for timing in bench.run_all([ROWS], IMAGES, BATCH, rounds, [*WORDS]):
            print(f"{timing.words}, {timing.data}", flush=True)
            calls.append(timing)
    return Figures(loops.circumstances(), cases, calls)


# -- tables


def circumstances(figures: Figures, packages: Sequence[str] = PACKAGES) -> str:
    facts = figures.circumstances
    versions = ", ".join(f"{name} {facts[name]}" for name in packages)
    return f"{facts['date']}, {facts['processor']}, one thread; {versions}."


def summary_of_loops(figures: Figures) -> Iterator[str]:
    """Yield the README's table: a row per case."""
    yield row("a step of a loop", OURS, "in its buffer", "others, in theirs")
    yield "|---|---|---|---|"
    for name, (*others, ours) in figures.loops.items():
        ratios = (f"{other.side} {other.ratio(ours):.1f} x" for other in others)
        rate = f"{ours.rate:,.0f} steps/s"
        spent = f"{microseconds(ours.in_buffer)} µs"
        yield row(CASES[name].words, rate, spent, ", ".join(ratios))
    yield ""
    yield circumstances(figures, IN_LOOPS)


def table_of_loops(figures: Figures) -> Iterator[str]:
    """Yield a row per side of each case, with the time in each part of the buffer."""
    yield circumstances(figures)
    for name, results in figures.loops.items():
        yield ""
        yield from loops.table(CASES[name], results)


def table_of_calls(figures: Figures) -> Iterator[str]:
    """Yield a table per kind of rows, with the time of this package and the ratios."""
    yield circumstances(figures)
    yield from bench.tables(figures.calls)


# -- the documents


def between_marks(text: str, name: str, lines: Iterator[str]) -> str:
    """Return a document with lines in place of those between its two marks.

    Raises:
        SystemExit: the document lacks ``<!-- name -->`` or ``<!-- /name -->``.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise SystemExit(
            f"a document needs the lines {begin.strip()} and {end.strip()}, "
            "for a table to stand between them"
        )
    return before + begin + "\n".join(lines) + "\n" + end + after


def readme(text: str, figures: Figures) -> str:
    """Return the README's text with these figures."""
    return between_marks(text, "loops", summary_of_loops(figures))


def benchmarks(text: str, figures: Figures) -> str:
    """Return the text of ``docs/BENCHMARKS.md`` with these figures."""
    text = between_marks(text, "loops", table_of_loops(figures))
    return between_marks(text, "calls", table_of_calls(figures))


def bars(figures: Figures) -> dict[str, float]:
    """Return the picture's bars: time in other buffers divided by the time in ours."""
    return {
        f"{name}: {other.side}": other.ratio(ours)
        for name, (*others, ours) in figures.loops.items()
        for other in others
    }


def draw(figures: Figures) -> Figure:
    """Draw bars: the time in each buffer as a multiple of ours, which is a line."""
    ratios = bars(figures)
    places, place = [], 0.0
    for results in figures.loops.values():
        for _ in results[:-1]:
            places.append(place)
            place += 1
        place += 0.5

    figure = Figure(figsize=(3.4, 0.4 + 0.14 * place))
    axes = figure.subplots()
    drawn = axes.barh(places, [*ratios.values()], 0.7)
    axes.bar_label(drawn, fmt="{:.1f} x", padding=2)
    axes.axvline(1, color="#c8500a", linewidth=1.2)
    axes.set_yticks(places, [*ratios])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.margins(x=0.12)
    axes.spines["bottom"].set_visible(False)
    figure.suptitle(f"Time in the buffer per step of a loop (line: {OURS})")
    return figure


def write(figures: Figures) -> None:
    """Write the figures into the documents, and draw the picture."""
    pages = {
        README: readme(README.read_text(), figures),
        BENCHMARKS: benchmarks(BENCHMARKS.read_text(), figures),
    }
    for path, text in pages.items():
        path.write_text(text)
    with rc_context(fname=STYLE, rc={"svg.hashsalt": "loops"}):
        draw(figures).savefig(PICTURE, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=whole_number(1), default=15, help="per side (default: 15)"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the kept figures; measure nothing"
    )
    options = parser.parse_args(arguments)
    if not options.write:
        measure(options.rounds).save()
    write(Figures.load())


if __name__ == "__main__":
    main()
