"""The demos run, leave their results, and (slow) learn."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
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
    assert "mean return of the best policy over 10 new episodes" in done.stdout
    assert "next:" in done.stdout
    assert (tmp_path / "run" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run" / "policy.pt").stat().st_size > 10_000
    assert "in buffer=" in done.stderr
    assert "return=" in done.stderr


@pytest.mark.parametrize("sampler", ["uniform", "rank"])
def test_the_dqn_demo_runs_with_other_samplers(sampler, tmp_path, monkeypatch):
    monkeypatch.setattr(dqn, "UPDATES", 2)
    run = dqn.train("CartPole-v1", sampler, 1_280, 0, torch.device("cpu"), tmp_path)
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
    assert "mean return of the best policy over 10 new episodes" in capsys.readouterr().out
    assert learned[0]["advantage"].shape == (256, 1)


def test_the_ppo_agent_acts_within_the_bounds_of_continuous_actions():
    env = ppo.make_env("Pendulum-v1")
    actor, critic = ppo.make_agent(env, torch.device("cpu"))
    rollout = critic(env.rollout(50, actor))
    assert (rollout["action"].abs() <= 2).all()
    assert rollout["action_log_prob"].shape == (50,)
    assert rollout["state_value"].shape == (50, 1)


@pytest.mark.slow
def test_the_ppo_demo_solves_cartpole(tmp_path):
    run = ppo.train("CartPole-v1", None, 0, torch.device("cpu"), tmp_path)
    assert run.final >= 475


class Always(torch.nn.Module):
    def __init__(self, action: int) -> None:
        super().__init__()
        self.register_buffer("action", torch.tensor(action))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.action.expand(observation.shape[:-1])


def test_the_last_of_the_best_policies_is_kept_and_tested_on_new_episodes(tmp_path, monkeypatch):
    scores = iter([1.0, 3.0, 3.0, 2.0, 5.0])  # of four evaluations and the test
    monkeypatch.setattr(Run, "evaluate", lambda run, policy, seed: next(scores))
    run = Run(lambda: GymEnv("CartPole-v1"), tmp_path, 0, 100, 500.0)
    policies = [TensorDictModule(Always(action), ["observation"], ["action"]) for action in (0, 1, 0, 1)]
    for policy in policies:
        run.is_solved_by(policy)
    run.finish(policies[-1], "title")
    assert [score for _, score in run.evaluations] == [1.0, 3.0, 3.0, 2.0]
    assert int(policies[-1].module.action) == 0  # the third one's
    assert run.final == 5.0
