"""The command line: what it takes, and what it says when something is missing."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import rlbuf_td
from rlbuf_td import EpisodeStats
from rlbuf_td.__main__ import COMMANDS, main, parser
from rlbuf_td.cli import demo
from rlbuf_td.kernels import code_cache
from tests.environments import Walk


def test_a_missing_extra_is_named(monkeypatch, capsys):
    loaded = dict(sys.modules)
    for name in [
        name
        for name in loaded
        if name.startswith(("rlbuf_td.cli.", "rlbuf_td.diagnostics.plots"))
    ]:
        parent, _, child = name.rpartition(".")
        if hasattr(loaded[parent], child):  # another import changes it, to be put back
            monkeypatch.setattr(loaded[parent], child, loaded[name])
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["demo"]) == 1
    assert (
        "the package 'matplotlib' is missing: pip install 'rlbuf_td[demo]'"
        in capsys.readouterr().err
    )


def test_a_missing_package_of_an_environment_is_not_said_to_be_in_an_extra(
    monkeypatch, capsys
):
    def train(options: object) -> int:
        raise ModuleNotFoundError("No module named 'ale_py'", name="ale_py")

    monkeypatch.setattr("rlbuf_td.cli.demo.main", train)
    assert main(["demo", "--env", "ALE/Pong-v5"]) == 1
    said = capsys.readouterr().err
    assert "the package 'ale_py' is missing: no extra of rlbuf_td has it" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("play", "invalid choice: 'play'"),
        (
            "demo --steps 1e30",
            "expected a whole number from 1 to 1,000,000,000,000,000, got 1e30",
        ),
        ("demo --env Nope", "--env Nope: Environment `Nope` doesn't exist"),
        ("demo --device nothing", "--device nothing: torch cannot use this device"),
        ("demo --env Pendulum-v1", "DQN needs an environment with discrete actions"),
        ("demo --steps 100", "--steps must be at least 1000"),
        ("demo --out file", "--out: cannot write to file"),
        ("doctor nowhere", "cannot examine nowhere"),
    ],
)
def test_a_command_that_cannot_work_says_why_and_exits_with_status_2(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    try:
        status: object = main(arguments.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_each_command_works(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    purpose, example = COMMANDS[command]
    assert purpose[1:40] in " ".join(capsys.readouterr().out.split())
    assert parser().parse_args([command, *example.split()]).command == command


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupt(name: str, num_envs: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gymnasium, "make_vec", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.slow
def test_output_may_be_cut_by_a_pipe():
    command = f"{shlex.quote(sys.executable)} -W ignore -m rlbuf_td info | head -1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("rlbuf_td: ")
    assert done.stderr == ""


def test_info_says_what_a_bug_report_needs(capsys):
    assert main(["info"]) == 0
    facts = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert facts["torch"] == torch.__version__
    assert facts["Python"].startswith(platform.python_version())
    assert facts["compiled loops"] == "in use"
    assert facts["cache folder"].startswith(f"{code_cache.folder()} (writable, ")


@pytest.mark.slow
def test_info_needs_no_extra_and_no_compiler():
    without = "import sys; sys.modules.update(dict.fromkeys(['gymnasium', 'matplotlib', 'rich']));"
    code = f"{without} from rlbuf_td.__main__ import main; sys.exit(main(['info']))"
    variables = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=variables,
    )
    assert "compiled loops: off (NUMBA_DISABLE_JIT is set)" in done.stdout
    assert "cache folder: none" in done.stdout


LOOPS = """
import gc
import sys
from numba.core.dispatcher import Dispatcher
from rlbuf_td.__main__ import main
from rlbuf_td.kernels.dispatch import import_kernels

assert main(["compile"]) == 0
import_kernels()
loops = {id(loop): loop for loop in gc.get_objects() if isinstance(loop, Dispatcher)}.values()
ours = [loop for loop in loops if loop.py_func.__module__.startswith("rlbuf_td.") and hasattr(loop.compile, "func")]
print(len(ours), *(f"{loop.py_func.__module__}.{loop.py_func.__name__}" for loop in ours if not loop.overloads))
"""


@pytest.mark.slow
def test_compile_compiles_every_loop_and_later_processes_compile_none(tmp_path):
    variables = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=True,
            env=variables,
        )

    loops, *missing = run("-c", LOOPS).stdout.splitlines()[-1].split()
    assert int(loops) > 40
    assert not missing, "cli/compile.py has no use of these loops"
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    done = run("-m", "rlbuf_td", "compile")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == files
    assert re.search(
        rf"^{len(files)} compiled functions are in {tmp_path}",
        done.stdout,
        re.MULTILINE,
    )
    assert done.stderr == ""


# -- the demo


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Image(gymnasium.ObservationWrapper):
    """Images in place of CartPole's observations."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = gymnasium.spaces.Box(0, 255, (2, 3, 3), np.uint8)

    def observation(self, observation):
        return self.observation_space.sample()


class Endless(Walk):
    """An environment whose episodes never end."""

    def step(self, action):
        obs, reward, *_, info = super().step(action)
        return obs, reward, False, False, info


class Interrupted(Walk):
    """The user presses Ctrl-C after a few hundred steps."""

    def step(self, action):
        if len(self.history) == 80:
            raise KeyboardInterrupt
        return super().step(action)


@pytest.fixture
def play(monkeypatch, tmp_path, one_thread):
    """Return a function that runs a short demo on an environment, and returns its exit
    status."""
    monkeypatch.setattr(demo, "UPDATES", 2)

    def run(make: Callable[[], gymnasium.Env]) -> int:
        gymnasium.register("Played-v0", entry_point=make)
        command = ["demo", "--env", "Played-v0", "--steps", "1000"]
        return main([*command, "--out", str(tmp_path)])

    yield run
    gymnasium.registry.pop("Played-v0", None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Walk("dict"),
        lambda: Walk("tuple"),
        Image,
    ],
    ids=["dict", "tuple", "image"],
)
def test_the_demo_learns_from_any_observation_of_fixed_size(make, play, tmp_path):
    assert play(make) == 0
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_names_no_picture_if_no_episode_has_ended(play, tmp_path, capsys):
    assert play(Endless) == 0
    printed = capsys.readouterr().out
    assert "no episode has ended in 1,024 steps" in printed
    assert "png" not in printed
    assert not list(tmp_path.iterdir())


def test_ctrl_c_during_the_demo_leaves_the_curve_of_what_was_reached(
    play, tmp_path, capsys
):
    assert play(Interrupted) == 130
    printed = capsys.readouterr()
    assert f"learning curve: {tmp_path / 'learning_curve.png'}" in printed.out
    assert "interrupted" in printed.err
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_dqn_demo_learns_a_little_and_leaves_its_picture(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rlbuf_td",
            "demo",
            "--steps",
            "1025",
            "--seed",
            "1",
            "--out",
            "run",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(rlbuf_td.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert "mean return of the last 20 training episodes" in done.stdout
    assert "next:" in done.stdout
    assert (tmp_path / "run" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "solved" not in done.stdout
    assert re.search(r"\d+/1025 .* mean return of 20 episodes: \d+", done.stderr)
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_the_demo_solves_cartpole(one_thread):
    options = Namespace(seed=4, device="cpu", sampler="proportional")
    stats = EpisodeStats(window=demo.WINDOW)
    demo.train(options, demo.make_env("CartPole-v1"), demo.STEPS, stats)
    assert demo.mean_return(stats) >= 475
    assert stats.steps < demo.STEPS
