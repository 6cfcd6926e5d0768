"""The demo runs, leaves its results, and (slow) learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import GymEnv

import rlbuf_td
from rlbuf_td.cli import demo
from rlbuf_td.cli.demo import Run


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_dqn_demo_learns_a_little_and_leaves_its_picture_and_policy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rlbuf_td", "demo", "--steps", "1025", "--seed", "1", "--out", "run"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(rlbuf_td.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert "mean return of the final policy over 10 new episodes" in done.stdout
    assert "next:" in done.stdout
    assert (tmp_path / "run" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run" / "policy.pt").stat().st_size > 10_000
    assert "solved" not in done.stdout
    assert re.search(r"1280/1280 .* mean return of 20 episodes: \d+", done.stderr)
    assert "Warning" not in done.stderr  # 1025 steps are rounded up to whole batches


@pytest.mark.slow
def test_the_demo_solves_cartpole(tmp_path):
    run = demo.train("CartPole-v1", "proportional", demo.STEPS, 4, torch.device("cpu"), tmp_path)
    assert run.recent >= 475


def test_a_run_is_solved_once_the_last_20_episodes_reach_the_threshold(tmp_path, capsys):
    run = Run(lambda: GymEnv("CartPole-v1"), tmp_path, 0, 100, 10.0)
    parts: list[tuple[list[float], bool]] = [([20.0] * 19, False), ([1.0], True), ([1.0] * 10, False)]
    for returns, is_solved in [*parts, ([20.0] * 20, True)]:
        steps = {"done": torch.ones(len(returns), 1).bool(), "episode_reward": torch.tensor(returns)[:, None]}
        run.count(TensorDict({"next": steps}, [len(returns)]))
        assert run.is_solved is is_solved
    assert run.recent == 20.0
    run.tell("")
    assert "solved, stopped early: 50 of at most 100 steps\n" in capsys.readouterr().out


def test_episodes_count_at_the_step_at_which_they_end(tmp_path):
    run = Run(lambda: GymEnv("CartPole-v1"), tmp_path, 0, 100, 10.0)
    done = torch.zeros(2, 5, 1, dtype=torch.bool)  # two environments, five steps of each
    done[0, 3] = done[1, 1] = done[1, 3] = True
    returns = torch.arange(10.0).view(2, 5, 1)
    for _ in range(2):
        run.count(TensorDict({"next": {"done": done, "episode_reward": returns}}, [2, 5]))
    assert run.steps == 20
    assert run.episodes == [(4, 6.0), (8, 3.0), (8, 8.0), (14, 6.0), (18, 3.0), (18, 8.0)]
    steps, means = run.curve
    assert steps.tolist() == [4, 8, 8, 14, 18, 18]
    assert means[1] == pytest.approx(4.5)
