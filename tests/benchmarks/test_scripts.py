"""The benchmarks run and print what they measure; the faults of ``breaks.py`` can be
made; the published figures are recent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import date, timedelta
from importlib.metadata import version
from itertools import pairwise

import pytest
import torch
from matplotlib.patches import Rectangle

from tests.benchmarks import (
    bench,
    breaks,
    device,
    device_loops,
    figures,
    loop_sides,
    loops,
    timing,
)
from tests.benchmarks.contenders import Ours, TorchRL, available
from tests.benchmarks.figures import Figures
from tests.benchmarks.loops import PACKAGES, Result
from tests.benchmarks.timing import OURS, Timing

SIZES = ["--rows", "1000", "--images", "0", "--batch", "128", "--rounds", "1"]


@pytest.mark.slow
def test_the_benchmark_times_every_operation_of_every_library():
    # JAX starts threads, and other tests of this process fork
    command = [sys.executable, "-m", "tests.benchmarks.bench", *SIZES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for words in ("1,000 rows of 167", "Dicts, rollouts", *timing.REPLAY.values()):
        assert words.replace("*", r"\*") in done.stdout
    assert done.stdout.count("\n| ") > len(timing.WORDS)
    assert all(contender.name in done.stdout for contender in available())


@pytest.fixture
def small_loops(monkeypatch):
    """Cases whose rollouts, frames and buffers are small."""
    monkeypatch.setattr(loop_sides.RolloutSide, "T", 32)
    monkeypatch.setattr(loop_sides.ManySide, "E", 16)
    monkeypatch.setattr(loop_sides.CollectorSide, "FRAMES", 4)
    monkeypatch.setitem(loop_sides.IMAGES, "capacity", 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", loops.CASES)
def test_each_side_of_a_loop_is_timed(name, small_loops):
    case = loops.CASES[name]
    results = loops.measure(case, segments=2, steps=3, fill=20)
    assert [each.side for each in results] == list(case.sides)
    for each in results:
        assert each.rate > 0
        assert {len(each.rates), *map(len, each.parts.values())} == {2}
        assert min(each.in_buffer) > 0
        assert each.parts.keys() <= set(loops.PARTS)


@pytest.mark.slow
def test_sac_learns_the_same_weights_from_torchrls_buffer_and_ours():
    weights = []
    for make in (loop_sides.collect_theirs, loop_sides.collect_ours):
        side = make()  # uniform: both draw the same rows
        side.run(192)
        weights.append([*side.actor.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.slow
def test_the_loops_are_printed_with_their_circumstances(capsys):
    loops.main(["pendulum", "--segments", "2", "--steps", "2", "--fill", "5"])
    printed = capsys.readouterr().out
    assert "steps/s" in printed
    assert f"torch {torch.__version__.partition('+')[0]}" in printed


@pytest.mark.slow
def test_all_figures_are_measured_in_one_run(monkeypatch, small_loops, tmp_path):
    small = loops.Case("small", {timing.OURS: loop_sides.recorded_pendulum}, 2, 5)
    monkeypatch.setattr(figures, "CASES", {"pendulum": small})
    monkeypatch.setattr(figures, "ROWS", 1000)
    monkeypatch.setattr(figures, "WORDS", ["uniform", "gae"])
    monkeypatch.setattr(figures, "IMAGES", 256)
    monkeypatch.setattr(bench, "available", lambda: [Ours, TorchRL])
    monkeypatch.setattr(bench, "SHAPES", ((8, 64),))
    monkeypatch.setattr(timing, "CALLS", 1)
    measured = figures.measure(rounds=2)
    ((result,),) = measured.loops.values()
    assert len(result.rates) == 2
    assert [call.kind for call in measured.calls] == ["small", "image", "[8, 64]"]
    assert {
        len(times) for call in measured.calls for times in call.blocks.values()
    } == {2}
    assert measured.circumstances["date"].startswith("20")


@pytest.mark.slow
def test_whole_loops_on_a_device_run(capsys):
    device_loops.main(["--device", "cpu", "--smoke"])
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')}" in lines[0]
    rows = [line.strip("| ").split(" | ") for line in lines if "-like" in line]
    timed = {(loop, side) for loop, _, side, *_ in rows}
    sides = device_loops.NOTHING, "rlbuf_td", "a tensor per key"
    expected = {(sizes.words, side) for sizes in device_loops.CASES for side in sides}
    # TorchRL may have no prioritized one there
    expected |= {(sizes.words, "TorchRL") for sizes in device_loops.CASES[:2]}
    assert expected <= timed


@pytest.mark.slow
def test_uniform_calls_on_a_device_take_few_operations():
    found = dict(device.counts(600))
    assert len(found) == 16
    (extend,) = (found[what] for what in found if what.startswith("uniform, extend"))
    assert 0 < found["uniform, sample"] < 10 > extend > 0


def test_each_fault_can_still_be_made():
    assert not [fault for each in breaks.BREAKS if (fault := breaks.fault_of(each))]
    named = [
        name
        for each in breaks.BREAKS
        for name in each.tests.split()
        if name.startswith("tests/")
    ]
    assert not [name for name in named if not (breaks.ROOT / name).exists()]


# -- the published figures are those that were measured last


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
