"""``python -m rlbuf_td bench``, run as a user runs it, only shorter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rlbuf_td.__main__ import OPERATIONS, main
from rlbuf_td.cli.bench import cases, compare, device, options, timing
from rlbuf_td.cli.bench.contenders import Ours, TorchRL
from rlbuf_td.cli.bench.others import available
from rlbuf_td.cli.bench.picture import WORDS, draw
from rlbuf_td.cli.bench.timing import Timing

SIZES = ("--rows", "1000", "--images", "64", "--batch", "128", "--rounds", "2")


@pytest.mark.slow
def test_the_benchmark_prints_a_row_for_every_operation_and_draws_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "available", lambda: [Ours, TorchRL])  # JAX starts threads, and other tests fork
    monkeypatch.setattr(timing, "CALLS", 1)
    monkeypatch.setattr(cases, "SHAPES", ((8, 64), (32, 8), (1, 32)))
    monkeypatch.setenv("COLUMNS", "160")
    picture = tmp_path / "new" / "bench.png"
    assert main(["bench", *SIZES, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    for words in ("1,000 small", "64 image", "100,000 Dict", "a Dict of 12 leaves"):
        assert words in printed
    assert printed.count("x)") > len(OPERATIONS)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_each_option_is_timed_beside_the_plain_buffer(monkeypatch, capsys):
    monkeypatch.setattr(timing, "CALLS", 1)
    assert main(["bench", "--rows", "1000", "--batch", "16", "--rounds", "1", "--only", "options"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in printed.splitlines() if line.count("│") > 5}
    assert set(options.OPTIONS) <= set(rows)
    assert all(rows[name].count("x") >= 3 for name in options.OPTIONS)
    assert "shared between processes" in " ".join(printed.split())


def test_options_are_timed_alone(capsys):
    assert main(["bench", "--only", "options", "uniform"]) == 2
    assert "options are timed alone" in capsys.readouterr().err


@pytest.mark.slow
def test_every_library_that_is_installed_is_timed():
    command = [sys.executable, "-m", "rlbuf_td", "bench", "--rows", "500", "--images", "0", "--rounds", "2", "--only"]
    done = subprocess.run(
        [*command, "uniform", "proportional", "update", "extend", "add"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [contender.name for contender in available()]
    assert [name in done.stdout for name in names] == [True] * len(names)
    assert "Flashbax" in names
    assert done.stdout.count("x)") >= 5 * 2 + 10


@pytest.mark.slow
def test_training_scripts_are_timed_and_sac_learns_the_same_weights(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["train", "--rounds", "1", "--steps", "1100"]) == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if "%" in line}
    assert set(lines) == {"dqn", "small-dqn", "sac", "ppo"}
    assert "equal" in lines["sac"]


def timed(operation: str, rows: int, kind: str, **blocks: float):
    times = {"rlbuf_td": [10.0], **{name: [time] for name, time in blocks.items()}}
    return Timing(operation, rows, kind, times, times)


def test_the_picture_has_a_line_per_operation_and_a_mark_per_library():
    timings = [
        timed("uniform", 100, "small", TorchRL=20.0),
        timed("uniform", 1_000, "small", TorchRL=70.0, SB3=5.0, cpprb=30.0, **{"TorchRL + our parts": 20.0}),
        timed("add", 1_000, "small", TorchRL=90.0),
        timed("record", 16_000, "small", TorchRL=40.0),
        timed("gae", 128, "[1, 128]", TorchRL=1_000.0),
    ]
    small, others = draw(timings, 256).axes
    assert [label.get_text() for label in small.get_yticklabels()] == ["sample, uniform", "add one, uniform"]
    assert [label.get_text() for label in others.get_yticklabels()] == ["record a step", "GAE [1,128], loop"]
    points = [np.asarray(line.get_xdata()).tolist() for line in small.lines]
    assert sorted(x[0] for x in points if len(x) == 1) == [0.5, 2.0, 3.0, 7.0, 9.0]
    assert small.get_xlim() == others.get_xlim()
    assert small.get_xlim()[1] > 100.0
    with pytest.raises(ValueError, match="no operation has been timed"):
        draw([], 256)


def test_the_command_line_and_the_picture_name_the_timed_operations():
    assert tuple(compare.OPERATIONS) == OPERATIONS
    assert set(WORDS) == set(OPERATIONS)


def test_sizes_that_do_not_fit_into_memory_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(compare, "_available", lambda: 0)
    assert list(compare.run([1_000], 0, 8, 2, ["uniform"])) == []
    assert "skipped: 1,000 small rows" in capsys.readouterr().err


@pytest.mark.parametrize("case", device.TIMINGS)
def test_what_is_timed_on_a_device_runs(case, monkeypatch):
    monkeypatch.setattr(device, "wall", lambda call, *_: call() is None or 2.0)
    found = [(what, value) for what, value, _ in case(torch.device("cpu"), 600, 0.0)]
    assert len(dict(found)) == len(found) > 0


def test_without_a_device_the_benchmark_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    assert "torch cannot use this device" in capsys.readouterr().err
    assert main(["bench", "--device", "meta"]) == 2
    assert "expected cpu or cuda" in capsys.readouterr().err
