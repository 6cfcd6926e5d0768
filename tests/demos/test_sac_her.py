"""The SAC demo: that agent and buffer see the same goals, that it runs, and that it reaches them."""

from __future__ import annotations

import argparse

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import HindsightSampler, PackedStorage, ReplayBuffer, UniformSampler

pytest.importorskip("gymnasium_robotics")  # Python 3.14 has none that works

from rlbuf_td.cli.demos import sac_her


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def options(tmp_path, **changes):
    given = {"env": "FetchReach-v4", "sampler": "uniform", "steps": 1_100, "seed": 0, "device": "cpu", "out": tmp_path}
    return argparse.Namespace(**given | changes)


def test_the_demo_runs_with_hindsight_and_without_and_leaves_policies_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sac_her, "TESTS", 2)
    monkeypatch.setattr(sac_her, "UPDATES", 2)
    assert sac_her.main(options(tmp_path, sampler="proportional")) == 0
    assert (tmp_path / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "with-hindsight" / "policy.pt").stat().st_size > 0
    assert (tmp_path / "without" / "policy.pt").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "with hindsight: " in printed
    assert "without: " in printed


def test_a_batch_shows_the_agent_the_goals_that_hindsight_put_in_place():
    size, loc, scale = 6, torch.arange(5.0), torch.linspace(1.0, 2.0, 5)
    rows = {
        "observation": torch.randn(size, 3),
        "desired_goal": torch.randn(size, 2),
        "next": {
            "observation": torch.randn(size, 3),
            "desired_goal": torch.randn(size, 2),
            "achieved_goal": torch.randn(size, 2),
            "reward": torch.zeros(size, 1),
            "done": torch.zeros(size, 1, dtype=torch.bool),
        },
    }
    buffer = ReplayBuffer(
        storage=PackedStorage(size),
        sampler=HindsightSampler(UniformSampler(), lambda batch: torch.ones(len(batch)), her_ratio=1.0),
        transform=sac_her.see_goals(loc, scale, (), ("next",)),
        batch_size=32,
    )
    buffer.extend(TensorDict(rows, [size]))
    batch = buffer.sample()
    outcomes = rows["next"]["achieved_goal"]
    assert (batch["desired_goal"][:, None] == outcomes).all(-1).any(-1).all()
    for step in (batch, batch["next"]):
        together = torch.cat([step["observation"], batch["desired_goal"]], -1)
        torch.testing.assert_close(step["input"], (together - loc) / scale)


def test_the_agent_acts_within_bounds_and_an_episode_counts_by_where_it_ends():
    env = sac_her.make_env("FetchReach-v4", sac_her.see_goals(torch.zeros(13), torch.ones(13), ()))
    actor, critic = sac_her.make_agent(13, env.action_spec, torch.device("cpu"))
    episode = critic(env.rollout(100, actor))
    assert len(episode) == 50
    assert (episode["action"].abs() <= 1).all()
    assert episode["state_action_value"].shape == (50, 1)
    last = episode["next"][-1]
    assert sac_her.is_reached(episode) == ((last["achieved_goal"] - last["desired_goal"]).norm() < 0.05)
    episode["next", "is_success"][-1] = 1.0
    assert sac_her.is_reached(episode) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": "Pendulum-v1"}, "needs an environment with goals and continuous actions"),
        ({"steps": 1_000}, "--steps must be at least 1050"),
    ],
)
def test_a_run_that_cannot_work_says_why(changes, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        sac_her.main(options(tmp_path, **changes))


@pytest.mark.slow
def test_hindsight_reaches_the_goals_of_new_episodes(tmp_path):
    torch.set_num_threads(1)
    run = sac_her.train("FetchReach-v4", "uniform", 0.8, 2_500, 0, torch.device("cpu"), tmp_path)
    assert run.final >= 0.95
