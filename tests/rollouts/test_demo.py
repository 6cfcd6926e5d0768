"""The PPO demo: that it runs for both kinds of actions, and (slow) that it learns."""

from __future__ import annotations

import argparse

import pytest
import torch

from rlbuf_td.cli.demos import ppo


def options(tmp_path, env, steps, seed=0):
    return argparse.Namespace(env=env, steps=steps, seed=seed, device="cpu", out=tmp_path)


@pytest.mark.parametrize("env", ["CartPole-v1", pytest.param("Pendulum-v1", marks=pytest.mark.slow)])
def test_the_demo_runs_and_leaves_a_policy_and_a_picture(env, tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        assert ppo.main(options(tmp_path, env, 2048)) == 0
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "policy.pt").stat().st_size > 0
    assert (tmp_path / "learning_curve.png").stat().st_size > 0
    assert "mean return of the best policy over 10 new episodes" in capsys.readouterr().out


def test_the_agent_acts_within_the_bounds_of_continuous_actions():
    env = ppo.make_env("Pendulum-v1")
    actor, critic = ppo.make_agent(env, torch.device("cpu"))
    rollout = critic(env.rollout(50, actor))
    assert (rollout["action"].abs() <= 2).all()
    assert rollout["action_log_prob"].shape == (50,)
    assert rollout["state_value"].shape == (50, 1)


@pytest.mark.slow
def test_the_demo_solves_cartpole(tmp_path):
    run = ppo.train("CartPole-v1", None, 0, torch.device("cpu"), tmp_path)
    assert run.final >= 475
