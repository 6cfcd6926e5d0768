"""The demos run, leave their results, and (slow) learn."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import GymEnv

from rlbuf_td.__main__ import main
from rlbuf_td.cli.demos import dqn, ppo
from rlbuf_td.cli.demos.report import Run


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_dqn_demo_learns_a_little_and_leaves_its_picture_and_policy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rlbuf_td", "demo", "--steps", "1024", "--seed", "1", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mean return of the final policy over 10 new episodes" in done.stdout
    assert "next:" in done.stdout
    assert (tmp_path / "run" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run" / "policy.pt").stat().st_size > 10_000
    assert "in buffer=" in done.stderr
    assert "return=" in done.stderr


def test_the_dqn_demo_runs_with_another_sampler(tmp_path, monkeypatch):
    monkeypatch.setattr(dqn, "UPDATES", 2)
    run = dqn.train("CartPole-v1", "rank", 1_280, 0, torch.device("cpu"), tmp_path)
    assert run.steps == 1_280
    assert run.final > 5


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_ppo_demo_runs_and_leaves_its_picture_and_policy(env, tmp_path, capsys, monkeypatch):
    learned = []

    def learn(learner: ppo.Learner, batch: TensorDictBase) -> None:
        learned.append(batch)
        learner.optimizer.step()  # which the schedule waits for

    monkeypatch.setattr(ppo.Learner, "learn", learn)
    assert main(["demo", "--algo", "ppo", "--env", env, "--steps", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "policy.pt").stat().st_size > 0
    assert (tmp_path / "learning_curve.png").stat().st_size > 0
    assert "mean return of the final policy over 10 new episodes" in capsys.readouterr().out
    assert learned[0]["advantage"].shape == (256, 1)


def test_the_ppo_agent_acts_within_the_bounds_of_continuous_actions():
    env = ppo.make_env("Pendulum-v1")
    actor, critic = ppo.make_agent(env, torch.device("cpu"))
    rollout = critic(env.rollout(50, actor))
    assert (rollout["action"].abs() <= 2).all()
    assert rollout["action_log_prob"].shape == (50,)
    assert rollout["state_value"].shape == (50, 1)


@pytest.mark.slow
def test_the_demos_solve_cartpole(tmp_path):
    by_dqn = dqn.train("CartPole-v1", "proportional", dqn.STEPS, 4, torch.device("cpu"), tmp_path)
    by_ppo = ppo.train("CartPole-v1", None, 0, torch.device("cpu"), tmp_path)
    assert by_dqn.recent >= 475
    assert by_ppo.recent >= 475


def test_a_run_is_solved_once_the_last_20_episodes_reach_the_threshold(tmp_path):
    run = Run(lambda: GymEnv("CartPole-v1"), tmp_path, 0, 100, 10.0)
    parts: list[tuple[list[float], bool]] = [([20.0] * 19, False), ([1.0], True), ([1.0] * 10, False)]
    for returns, is_solved in [*parts, ([20.0] * 20, True)]:
        steps = {"done": torch.ones(len(returns), 1).bool(), "episode_reward": torch.tensor(returns)[:, None]}
        run.count(TensorDict({"next": steps}, [len(returns)]))
        assert run.is_solved is is_solved
    assert run.recent == 20.0
