"""The demo runs, leaves its results, and (slow) learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlbuf_td
from rlbuf_td.cli import demo


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
    stats = demo.train("CartPole-v1", "proportional", demo.STEPS, 4, torch.device("cpu"), tmp_path)
    assert demo.mean_return(stats) >= 475
    assert stats.steps < demo.STEPS
