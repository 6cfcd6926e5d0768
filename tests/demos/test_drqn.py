"""The recurrent demo: that sequences mean what was lived through, that it runs, and that memory helps."""

from __future__ import annotations

import argparse

import pytest
import torch

from rlbuf_td import PackedStorage, ReplayBuffer, SequenceSampler, UniformSampler
from rlbuf_td.cli.demos import drqn

WINDOW = drqn.BURN_IN + drqn.LENGTH


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def options(tmp_path, **changes):
    given = {"env": "CartPole-v1", "sampler": "uniform", "steps": 1_280, "seed": 0, "device": "cpu", "out": tmp_path}
    return argparse.Namespace(**given | changes)


def sampled_sequences(steps=200, windows=64):
    """Return the learning networks, and windows of episodes that the same networks have acted in."""
    torch.manual_seed(0)
    policy, learner = drqn.make_agent(drqn.make_env().action_spec, True, torch.device("cpu"))
    env = drqn.make_env(policy[1])
    env.set_seed(0)
    with torch.no_grad():
        data = env.rollout(steps, policy, break_when_any_done=False)
    buffer = ReplayBuffer(
        storage=PackedStorage(steps),
        sampler=SequenceSampler(UniformSampler(), drqn.LENGTH, burn_in=drqn.BURN_IN),
        batch_size=windows * WINDOW,
    )
    states = [*drqn.STATE, *(("next", key) for key in drqn.STATE), "action_value"]
    buffer.extend(data.select(*drqn.KEYS, *states))
    return learner, drqn.as_sequences(buffer.sample())


@pytest.mark.parametrize("sampler", ["uniform", "proportional"])
def test_the_demo_runs_with_memory_and_without_and_leaves_policies_and_a_picture(
    sampler, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(drqn, "UPDATES", 4)
    assert drqn.main(options(tmp_path, sampler=sampler)) == 0
    assert (tmp_path / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "with-memory" / "policy.pt").stat().st_size > 0
    assert (tmp_path / "without" / "policy.pt").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "with memory: mean return" in printed
    assert "without: mean return" in printed


def test_going_through_sequences_gives_the_values_that_acting_step_by_step_gave():
    learner, batch = sampled_sequences()
    acted = batch["action_value"].clone()
    stored = batch["next", "recurrent_state_h"].clone()
    with torch.no_grad():
        values = learner(batch.clone())["action_value"]
    real = batch["mask"]
    assert not real.all()  # windows at the beginnings and ends of episodes are among them
    torch.testing.assert_close(values[real], acted[real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch["next", "recurrent_state_h"], stored)


def test_going_through_next_steps_gives_the_values_of_the_steps_that_follow():
    learner, batch = sampled_sequences()
    with torch.no_grad():
        values = learner(batch["next"].clone())["action_value"]
    follows = batch["mask"][:, :-1] & batch["mask"][:, 1:]
    assert follows.any()
    torch.testing.assert_close(values[:, :-1][follows], batch["action_value"][:, 1:][follows], rtol=1e-4, atol=1e-5)


def test_steps_of_burn_in_and_copies_are_left_out_of_what_is_learned():
    _, batch = sampled_sequences()
    learn = batch["learn"]
    assert not learn[:, : drqn.BURN_IN].any()
    assert learn[:, drqn.BURN_IN].all()
    assert not learn[~batch["mask"]].any()
    assert (~learn[:, drqn.BURN_IN :]).any()


def test_only_steps_to_learn_from_count_in_the_loss():
    learner, batch = sampled_sequences()
    loss_module, _ = drqn.make_loss(learner, drqn.make_env().action_spec)
    loss = loss_module(batch.clone())["loss"]
    for others, same in ((~batch["learn"], True), (batch["learn"], False)):
        changed = batch.clone()
        changed["next", "reward"][others] += 100.0
        assert (loss_module(changed)["loss"] == loss) == same


def test_the_agent_does_not_see_velocities():
    observation = torch.tensor([[0.24, 99.0, -0.2095, 99.0]])
    torch.testing.assert_close(drqn.positions(observation), torch.tensor([[1.0, -10.0]]))
    policy, _ = drqn.make_agent(drqn.make_env().action_spec, True, torch.device("cpu"))
    assert policy[0].in_keys == ["position"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": "Pendulum-v1"}, "hides the velocities of CartPole-v1; it does not know what to hide of Pendulum-v1"),
        ({"steps": 100}, "--steps must be at least 1024"),
    ],
)
def test_a_run_that_cannot_work_says_why(changes, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        drqn.main(options(tmp_path, **changes))
