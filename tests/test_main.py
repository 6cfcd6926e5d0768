"""The command line, run as a user runs it, only shorter."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import numpy as np
import pytest

from rlbuf_td.__main__ import OPERATIONS, main


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "rlbuf_td", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize("sampler", ["uniform", "proportional", "rank"])
def test_the_demo_learns_a_little_in_two_thousand_steps_and_leaves_its_picture_and_policy(tmp_path, sampler):
    done = run("demo", "--steps", "2048", "--sampler", sampler, "--seed", "1", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "mean return of the best policy over 10 new episodes" in done.stdout
    assert "next:" in done.stdout
    assert (tmp_path / "run" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run" / "policy.pt").stat().st_size > 10_000
    assert "in buffer=" in done.stderr
    assert "return=" in done.stderr


def test_the_benchmark_prints_a_row_for_every_operation_and_draws_it(tmp_path):
    picture = tmp_path / "new" / "bench.png"
    sizes = ("--rows", "500", "1000", "--images", "64", "--batch", "32", "--rounds", "2")
    done = run("bench", *sizes, "--picture", str(picture), COLUMNS="160")
    assert done.returncode == 0, done.stderr
    assert "1,000 small" in done.stdout
    assert "64 image" in done.stdout
    assert done.stdout.count("(") > 2 * len(OPERATIONS)
    assert "Flashbax" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def timing(operation: str, rows: int, kind: str, **blocks: float):
    from rlbuf_td.cli.bench.compare import Timing

    return Timing(operation, rows, kind, {"rlbuf_td": [10.0], **{name: [time] for name, time in blocks.items()}})


def test_the_picture_of_the_benchmark_has_a_line_an_operation_at_the_largest_size_and_a_mark_a_library():
    from rlbuf_td.cli.bench.picture import draw

    timings = [
        timing("uniform", 100, "small", TorchRL=20.0),
        timing("uniform", 1_000, "small", TorchRL=70.0, SB3=5.0, cpprb=30.0, **{"TorchRL + our parts": 20.0}),
        timing("add", 1_000, "small", TorchRL=90.0),
        timing("record", 16_000, "small", TorchRL=40.0),
        timing("gae", 128, "[1, 128]", TorchRL=1_000.0),
    ]
    small, others = draw(timings, 256).axes
    assert [label.get_text() for label in small.get_yticklabels()] == ["sample, uniform", "add one"]
    assert [label.get_text() for label in others.get_yticklabels()] == ["record a step", "GAE [1,128], loop"]
    points = [np.asarray(line.get_xdata()).tolist() for line in small.lines]
    assert sorted(x[0] for x in points if len(x) == 1) == [0.5, 2.0, 3.0, 7.0, 9.0]
    assert small.get_xlim() == others.get_xlim()
    assert small.get_xlim()[1] > 100.0
    with pytest.raises(ValueError, match="no operation has been timed"):
        draw([], 256)


def test_every_operation_has_words_for_the_picture():
    from rlbuf_td.cli.bench.picture import _WORDS

    assert set(_WORDS) == set(OPERATIONS)


def test_operations_named_on_the_command_line_are_those_that_the_benchmark_knows():
    from rlbuf_td.cli.bench import compare

    assert tuple(compare.OPERATIONS) == OPERATIONS


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        ([], "rlbuf_td.cli.demos.dqn", "demo"),
        (["--algo", "drqn"], "rlbuf_td.cli.demos.drqn", "demo"),
        (["--algo", "sac-her"], "gymnasium_robotics", "demo-robotics"),
    ],
)
def test_a_missing_extra_is_named(arguments, missing, extra, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "rlbuf_td.cli.demos.sac_her", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["demo", *arguments]) == 1
    assert f"'{missing}' is missing: pip install 'rlbuf_td[{extra}]'" in capsys.readouterr().err


def test_what_a_picture_needs_is_asked_for_before_anything_is_timed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "rlbuf_td.cli.bench.picture", raising=False)
    assert main(["bench", "--rows", "10", "--images", "0", "--picture", "unwritten.png"]) == 1
    assert "pip install 'rlbuf_td[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "env", "sampler"),
    [
        (["--algo", "sac-her"], "FetchReach-v4", "uniform"),
        (["--algo", "sac-her", "--env", "FetchPush-v4", "--sampler", "rank"], "FetchPush-v4", "rank"),
        (["--algo", "drqn"], "CartPole-v1", "uniform"),
        ([], "CartPole-v1", "proportional"),
    ],
)
def test_a_demo_has_an_environment_and_a_sampler_of_its_own(arguments, env, sampler, monkeypatch, capsys):
    def say(options):
        print(options.env, options.sampler)
        return 0

    for algo in ("dqn", "sac_her", "drqn"):
        monkeypatch.setitem(sys.modules, f"rlbuf_td.cli.demos.{algo}", types.SimpleNamespace(main=say))
    assert main(["demo", *arguments]) == 0
    assert capsys.readouterr().out == f"{env} {sampler}\n"


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["play"])
    assert "invalid choice: 'play'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "Pendulum-v1"], "DQN needs an environment with discrete actions"),
        (["--steps", "100"], "--steps must be at least 1024"),
    ],
)
def test_a_demo_that_cannot_work_says_why(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["demo", "--out", str(tmp_path), *arguments])


def test_sizes_that_do_not_fit_into_memory_are_left_out(monkeypatch, capsys):
    from rlbuf_td.cli.bench import compare

    monkeypatch.setattr(compare, "_available", lambda: 0)
    assert list(compare.run([1_000], 0, 8, 2, ["uniform"])) == []
    assert "left out: 1,000 small rows" in capsys.readouterr().err
