"""The benchmarks run and print what they measure; the faults of ``breaks.py`` can be
made."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

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

pytestmark = pytest.mark.slow


SIZES = ["--rows", "1000", "--batch", "128", "--rounds", "2"]


def test_the_benchmark_prints_a_row_for_every_operation(monkeypatch, capsys):
    # JAX starts threads, and other tests fork
    monkeypatch.setattr(bench, "available", lambda: [Ours, TorchRL])
    monkeypatch.setattr(timing, "CALLS", 1)
    monkeypatch.setattr(bench, "SHAPES", ((8, 64), (32, 8), (1, 32)))
    bench.main([*SIZES, "--images", "128"])
    printed = capsys.readouterr().out
    for words in ("1,000 rows of 167", "128 rows of two", "a Dict of 12 leaves"):
        assert words in " ".join(printed.split())
    assert printed.count(" us ") >= len(timing.WORDS)


def test_every_library_that_is_installed_is_timed():
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.bench",
        *SIZES,
        "--images",
        "0",
        "--only",
        "uniform",
        "extend",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [contender.name for contender in available()]
    assert [name in done.stdout for name in names] == [True] * len(names)


@pytest.fixture
def small_loops(monkeypatch):
    """Cases whose rollouts, frames and buffers are small."""
    monkeypatch.setattr(loop_sides.RolloutSide, "T", 32)
    monkeypatch.setattr(loop_sides.ManySide, "E", 16)
    monkeypatch.setattr(loop_sides.CollectorSide, "FRAMES", 4)
    monkeypatch.setitem(loop_sides.IMAGES, "capacity", 100)


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


def test_sac_learns_the_same_weights_from_torchrls_buffer_and_ours():
    weights = []
    for make in (loop_sides.collect_theirs, loop_sides.collect_ours):
        side = make()  # uniform: both draw the same rows
        side.run(192)
        weights.append([*side.actor.parameters()])
    assert all(map(torch.equal, *weights))


def test_the_loops_are_printed_with_their_circumstances(capsys):
    loops.main(["pendulum", "--segments", "2", "--steps", "2", "--fill", "5"])
    printed = capsys.readouterr().out
    assert "steps/s" in printed
    assert f"torch {torch.__version__.partition('+')[0]}" in printed


def test_all_figures_are_measured_in_one_run(monkeypatch, small_loops, tmp_path):
    small = loops.Case("small", {timing.OURS: loop_sides.recorded_pendulum}, 2, 5)
    monkeypatch.setattr(figures, "CASES", {"pendulum": small})
    monkeypatch.setattr(figures, "ROWS", 1000)
    monkeypatch.setattr(figures, "WORDS", ["uniform", "gae"])
    monkeypatch.setattr(figures, "IMAGES", 0)
    monkeypatch.setattr(bench, "available", lambda: [Ours, TorchRL])
    monkeypatch.setattr(bench, "SHAPES", ((8, 64),))
    monkeypatch.setattr(timing, "CALLS", 1)
    measured = figures.measure(rounds=2)
    ((result,),) = measured.loops.values()
    assert len(result.rates) == 2
    assert [call.operation for call in measured.calls] == ["uniform", "gae"]
    assert {
        len(times) for call in measured.calls for times in call.blocks.values()
    } == {2}
    assert measured.circumstances["date"].startswith("20")


@pytest.mark.parametrize("case", device.TIMINGS)
def test_what_is_timed_on_a_device_runs(case, monkeypatch):
    monkeypatch.setattr(device, "wall", lambda call, *_: call() is None or 2.0)
    found = [(what, value) for what, value, _ in case(torch.device("cpu"), 600, 0.0)]
    assert len(dict(found)) == len(found) > 0


def test_whole_loops_on_a_device_run():
    # Flashbax imports JAX, which starts threads, and other tests of this process fork
    command = [sys.executable, "-m", "tests.benchmarks.device_loops"]
    ran = subprocess.run(
        [*command, "--device", "cpu", "--smoke"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = ran.stdout.splitlines()
    assert f"torch {version('torch')}" in lines[0]
    rows = [line.strip("| ").split(" | ") for line in lines if "-like" in line]
    timed = [(loop, side) for loop, _, side, time, *_ in rows if time[0].isdigit()]
    # others may not be installed, or have no such loop
    sides = device_loops.NOTHING, "rlbuf_td", "a tensor per key"
    for case in device_loops.CASES:
        assert {(case.words, side) for side in sides} <= {*timed}
    for case in device_loops.CASES[:2]:  # TorchRL may have no prioritized one there
        assert (case.words, "TorchRL") in timed


def test_uniform_calls_on_a_device_take_few_operations():
    found = {what: value for what, value, _ in device.counts(600)}
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
