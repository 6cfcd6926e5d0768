"""The published figures are those that were measured last, and not much older than the
kernels."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import date, timedelta
from itertools import pairwise

import pytest
from matplotlib.patches import Rectangle

from tests.benchmarks import figures
from tests.benchmarks.figures import Figures
from tests.benchmarks.loops import PACKAGES, Result
from tests.benchmarks.timing import OURS, Timing

COMMAND = "python -m tests.benchmarks.figures"
AGE = timedelta(days=30)


@pytest.fixture(scope="module")
def published() -> Figures:
    return Figures.load()


def test_the_documents_show_the_figures_that_were_measured(published):
    """If this fails, run ``python -m tests.benchmarks.figures --write``."""
    readme = figures.README.read_text()
    assert readme == figures.readme(readme, published)
    benchmarks = figures.BENCHMARKS.read_text()
    assert benchmarks == figures.benchmarks(benchmarks, published)
    drawn = re.findall(r"<!-- ([\d.]+) x -->", figures.PICTURE.read_text())
    assert drawn == [f"{ratio:.1f}" for ratio in figures.bars(published).values()]


def test_the_figures_are_of_all_cases_and_calls(published):
    assert [*published.loops] == [*figures.CASES]
    assert {timing.operation for timing in published.calls} == {*figures.WORDS}


def git(*arguments: str) -> str:
    command = ["git", "-C", str(figures.ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_figures_are_at_most_30_days_older_than_the_kernels(published):
    if not (figures.ROOT / ".git").exists():
        pytest.skip("needs the history of the repository")
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("needs the whole history of the repository")
    # the author's date, which a rebase does not renew
    changed = git("log", "-1", "--format=%as", "--", "rlbuf_td/kernels").strip()
    if not changed:
        pytest.skip("needs the history of the kernels")
    measured = date.fromisoformat(published.circumstances["date"])
    assert date.fromisoformat(changed) - measured <= AGE, f"measure again: {COMMAND}"


# -- how texts are made from figures


@pytest.fixture
def small() -> Figures:
    """Two sides of a loop, and two calls of which one has no counterpart."""
    theirs = Result("TorchRL", [50.0, 70.0], {"write": [2e3, 3e3]})
    ours = Result(OURS, [100.0, 300.0], {"write": [1e3, 1e3]})
    alone = Timing("uniform", 10, "small", {OURS: [2.0]})
    both = Timing("update", 10, "small", {OURS: [1.0], "TorchRL": [4.0]})
    names = "date", "processor", *PACKAGES
    facts = {name: f"a {name}" for name in names}
    return Figures(facts, {"pendulum": [theirs, ours]}, [both, alone])


def test_tables_show_medians_and_ratios(small):
    (row,) = (line for line in figures.summary_of_loops(small) if "one env" in line)
    assert row == (
        "| one environment, batches of 256 | 200 steps/s | 1,000 µs | TorchRL 2.5 x |"
    )
    rows = [*figures.table_of_loops(small)]
    assert "| TorchRL | 60 | 2,500 | 2,500 |  |  | 2.50 |" in rows
    assert "| rlbuf_td | 200 | 1,000 | 1,000 |  |  | 1.00 |" in rows
    rows = [*figures.table_of_calls(small)]
    assert "| update priorities | 1 | 4 |" in rows
    assert "| sample, uniform | 2 |  |" in rows
    for lines in (figures.table_of_loops(small), figures.table_of_calls(small)):
        assert next(lines) == figures.circumstances(small)


def test_figures_are_kept_with_four_digits(small, tmp_path):
    small.calls[0].blocks[OURS][0] = 1.23456
    small.save(tmp_path / "figures.json")
    loaded = Figures.load(tmp_path / "figures.json")
    assert loaded.calls[0].blocks[OURS] == [1.235]
    small.calls[0].blocks[OURS][0] = 1.235
    assert loaded == small
    assert json.loads((tmp_path / "figures.json").read_text()).keys() == {
        "circumstances",
        "loops",
        "calls",
    }


def test_a_table_replaces_what_stands_between_its_marks():
    text = "# Title\n<!-- loops -->\nold\n<!-- /loops -->\nThe rest\n"
    for _ in range(2):  # the second time changes nothing
        text = figures.between_marks(text, "loops", iter(["new", "table"]))
        assert text == (
            "# Title\n<!-- loops -->\nnew\ntable\n<!-- /loops -->\nThe rest\n"
        )
    with pytest.raises(SystemExit, match="needs the lines <!-- loops -->"):
        figures.between_marks("# Title\n<!-- loops -->\n", "loops", iter(["new"]))


def test_the_picture_has_a_bar_per_other_side_and_a_space_between_cases(small):
    (theirs, ours) = small.loops["pendulum"]
    by_hand = Result("by hand", theirs.rates, theirs.parts)
    cases = {"pendulum": [theirs, by_hand, ours], "dqn": [theirs, ours]}
    picture = figures.draw(Figures(small.circumstances, cases, []))
    (axes,) = picture.axes
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    places = [bar.get_y() for bar in bars]
    assert [after - before for before, after in pairwise(places)] == [1, 1.5]
    assert [bar.get_width() for bar in bars] == [2.5] * 3
