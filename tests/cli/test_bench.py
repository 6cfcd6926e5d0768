"""``python -m rlbuf_td bench``, run as a user runs it, only shorter."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

from rlbuf_td import PackedStorage
from rlbuf_td.__main__ import OPERATIONS, main
from rlbuf_td.cli.bench import cases, compare, device, options, timing
from rlbuf_td.cli.bench.compare import NOTES, narrow_table, wide_table
from rlbuf_td.cli.bench.contenders import Ours, TorchRL, available
from rlbuf_td.cli.bench.picture import draw
from rlbuf_td.cli.bench.timing import WORDS, Timing
from tests.narrow import assert_narrow

SIZES = ("--rows", "1000", "--images", "128", "--batch", "128", "--rounds", "2")


@pytest.mark.slow
def test_the_benchmark_prints_a_row_for_every_operation_and_draws_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "available", lambda: [Ours, TorchRL])  # JAX starts threads, and other tests fork
    monkeypatch.setattr(timing, "CALLS", 1)
    monkeypatch.setattr(cases, "SHAPES", ((8, 64), (32, 8), (1, 32)))
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "new" / "bench.png"
    assert main(["bench", *SIZES, "--picture", "new/bench.png"]) == 0
    printed = capsys.readouterr().out
    assert_narrow(printed)
    for words in ("1,000 rows of 167 bytes in 7 leaves", "128 rows of two 4 x 84 x 84 images", "a Dict of 12 leaves"):
        assert words in printed
    assert printed.count(" us ") >= len(OPERATIONS)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_each_option_is_timed_beside_the_plain_buffer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "CALLS", 1)
    storage = partial(PackedStorage, scratch_dir=tmp_path, share_next=True)
    monkeypatch.setitem(options.OPTIONS, "not compiled", partial(options.made, storage=storage))
    assert main(["bench", "--rows", "1000", "--batch", "16", "--rounds", "1", "--only", "options"]) == 0
    printed = capsys.readouterr().out
    assert_narrow(printed)
    for name in options.OPTIONS:
        (row,) = re.findall(rf"^{re.escape(name):<27} +\d.*$", printed, re.MULTILINE)
        assert row.removeprefix(name).count("x") >= 3
    assert "deduplicated rows are in a file" in " ".join(printed.split())


def test_options_are_timed_alone(capsys):
    assert main(["bench", "--only", "options", "uniform"]) == 2
    assert "options are timed alone" in capsys.readouterr().err


@pytest.mark.slow
def test_every_library_that_is_installed_is_timed():
    command = [sys.executable, "-m", "rlbuf_td", "bench", "--rows", "500", "--images", "0", "--rounds", "2", "--only"]
    done = subprocess.run(
        [*command, "uniform", "proportional", "update", "extend", "add", "--wide"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [contender.name for contender in available()]
    assert [name in done.stdout for name in names] == [True] * len(names)
    assert "Flashbax" in names
    assert done.stdout.count("x)") >= 5 * 2 + 10


@pytest.mark.slow
def test_training_scripts_are_timed_and_sac_learns_the_same_weights(capsys):
    assert main(["train", "--rounds", "1", "--steps", "1100"]) == 0
    printed = capsys.readouterr().out
    assert_narrow(printed)
    lines = {line.split()[0]: line for line in printed.splitlines() if "%" in line}
    assert set(lines) == {"dqn", "small-dqn", "sac", "ppo"}
    assert "equal" in lines["sac"]


def timed(operation: str, rows: int, kind: str, **blocks: float):
    times = {"rlbuf_td": [10.0], **{name: [time] for name, time in blocks.items()}}
    return Timing(operation, rows, kind, times, times)


def test_the_picture_has_a_line_per_operation_and_a_mark_per_library():
    timings = [
        timed("uniform", 100, "small", TorchRL=20.0),
        timed("uniform", 1_000, "small", TorchRL=70.0, SB3=5.0, cpprb=30.0, Mixed=20.0),
        timed("add", 1_000, "small", TorchRL=90.0),
        timed("record", 16_000, "small", TorchRL=40.0),
        timed("gae", 128, "[1, 128]", TorchRL=1_000.0),
    ]
    small, others = draw(timings, 256).axes
    points = [np.asarray(line.get_xdata()).tolist() for line in small.lines]
    assert sorted(x[0] for x in points if len(x) == 1) == [0.5, 2.0, 3.0, 7.0, 9.0]
    assert small.get_xlim() == others.get_xlim()
    assert small.get_xlim()[1] > 100.0
    with pytest.raises(ValueError, match="no operation has been timed"):
        draw([], 256)


def test_the_command_line_and_the_picture_name_the_timed_operations():
    assert tuple(WORDS) == OPERATIONS


def test_tables_have_the_multiples_of_every_library_and_the_default_one_is_narrow():
    others = {"TorchRL": 3141.0, "Mixed": 20.0, "bare": 5.0, "SB3": 1.0, "cpprb": 15.26, "Flashbax": 100.0}
    timings = [
        timed("extend_proportional", 10_000_000, "image", **others),
        timed("gae-vectorized", 131_072, "[4096, 32]", TorchRL=9_995.0),
    ]
    narrow = narrow_table(timings, ["rlbuf_td", *others])
    assert_narrow(narrow + NOTES)
    head, row, *_ = (line for line in narrow.splitlines() if "rlbuf_td  " in line or " us" in line)
    assert head.split() == ["rlbuf_td", *others]
    assert row.split()[2:] == ["10", "us", "314", "2.0", "0.5", "0.1", "1.5", "10.0"]
    wide = wide_table(timings, ["rlbuf_td", *others])
    assert "3141.0 (314x)" in wide
    assert wide.splitlines()[-1].split()[-2:] == ["9995.0", "(1000x)"]


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
