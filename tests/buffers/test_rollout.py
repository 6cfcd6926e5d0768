"""RolloutBuffer: loops over epochs, normalization and the summary, recurrent policies,
and recorded agents.

``tests/test_lockstep.py`` compares rows, estimates, and the batches of an epoch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    GymEnv,
    InitTracker,
    RewardScaling,
    SelectTransform,
    SerialEnv,
    TransformedEnv,
)
from torchrl.modules import (
    LSTMModule,
    ProbabilisticActor,
    ValueOperator,
    set_recurrent_mode,
)

from rlbuf_td import PettingZooRecorder
from rlbuf_td.buffers.rollout import RolloutBuffer
from rlbuf_td.functional import generalized_advantage_estimate, normalize
from rlbuf_td.writers import RolloutWriter
from tests import model as m
from tests.catalogue import assert_same, make_world
from tests.model import GROUP, Model
from tests.multi_agent import Meadow, act
from tests.test_lockstep import Agents, Rollout


def filled(world, steps=8, data=None, **kwargs):
    data = world.steps(steps) if data is None else data
    kwargs = {
        "batch_size": 5,
        "gamma": 0.9,
        "lmbda": 0.8,
        "value_network": world.module(),
    } | kwargs
    rollout = RolloutBuffer(steps, world.lanes, **kwargs)
    rollout.extend(data.clone())
    return rollout, data


# -- loops


def test_all_ways_to_draw_give_the_same_batches():
    world = make_world(3)
    data = world.steps(8)
    batches = []
    for options in ({}, {}, {"collate_fn": lambda rows: rows}):
        rollout, _ = filled(
            world, data=data, epochs=3, normalize_advantage="minibatch", **options
        )
        rollout.set_rng(torch.Generator().manual_seed(5))
        scaling = RewardScaling(1.0, 2.0, in_keys=[("next", "reward")])
        kept = SelectTransform("observation", "advantage", ("next", "reward"))
        rollout.append_transform(Compose(scaling, kept))  # which drops the index
        is_loop = not batches
        batches.append(
            [*rollout] if is_loop else [rollout.sample() for _ in range(5 * 3)]
        )
        assert rollout.sampler.ran_out
    for one, *others in zip(*batches, strict=True):
        assert "index" in one
        for other in others:
            assert_same(one, other)


def test_a_loop_left_early_starts_over_after_a_load():
    rollout, _ = filled(make_world(3), epochs=2)
    for _ in rollout:
        break
    other, _ = filled(make_world(3), epochs=2)
    other.load_state_dict(rollout.state_dict())
    assert sum(len(batch) for batch in other) == 48


def test_a_loop_whose_state_was_saved_goes_on_after_a_load():
    rollout, _ = filled(make_world(3), epochs=2, generator=torch.Generator())
    other, _ = filled(make_world(3), epochs=2, generator=torch.Generator())
    seen = []
    for number, batch in enumerate(rollout):
        if number == 2:
            other.load_state_dict(rollout.state_dict())
        if number > 2:
            seen.append(batch)
    for batch, expected in zip(other, seen, strict=True):
        assert torch.equal(batch["index"], expected["index"])
    assert sum(len(batch) for batch in other) == 48


def test_sampling_within_a_loop_takes_its_turn():
    """The sampler knows one order: whoever draws takes the next rows, and no row comes
    twice."""
    rollout, _ = filled(make_world(3))
    seen = []
    for number, batch in enumerate(rollout):
        seen.append(batch["index"])
        if number < 2:
            seen.append(rollout.sample(5 - 2 * number)["index"])
    assert len(torch.cat(seen)) == len(torch.cat(seen).unique(dim=0)) == 24


def test_a_write_within_a_loop_is_noticed():
    world = make_world(3)
    rollout, _ = filled(world)
    iterator = iter(rollout)
    next(iterator)
    rollout.add(world.steps(1)[:, 0])
    with pytest.raises(RuntimeError, match="not complete: 1 of 8 steps are written"):
        next(iterator)
    rollout.extend(world.steps(7))
    iterator = iter(rollout)
    next(iterator)
    new = world.steps(8)
    rollout.extend(new.clone())
    rows = torch.cat([batch["observation"] for batch in iterator])
    assert_same(rows.sort(0)[0], new["observation"].flatten(0, 1).sort(0)[0])


# -- the summary, and normalization


def test_the_summary_is_a_flat_dict_of_floats_computed_once_a_rollout(monkeypatch):
    world = make_world(3)
    rollout, data = filled(world)
    advantage, target = world.estimates(data)
    summary = rollout.summary()
    unexplained = advantage.var(correction=0) / target.var(correction=0)
    expected: dict[str, Any] = {
        "advantage_mean": advantage.mean(),
        "advantage_std": advantage.std(correction=0),
        "value_target_mean": target.mean(),
        "value_target_std": target.std(correction=0),
        "explained_variance": 1 - unexplained,
        "value_rows": world.rows_to_ask(data),
    }
    assert summary == pytest.approx(
        {k: float(v) for k, v in expected.items()}, rel=1e-4, abs=1e-5
    )
    with monkeypatch.context() as patched:
        patched.setattr("rlbuf_td.buffers.rollout.explained_variance", None)
        summary["advantage_mean"] = 0.0  # the caller's own copy
        assert rollout.summary()["advantage_mean"] != 0
    saved, before = rollout.state_dict(), rollout.summary()
    rollout.extend(world.steps(8))
    assert rollout.summary() != before
    rollout.load_state_dict(saved)
    assert rollout.summary() == before


def rollout_of(world: type[Rollout], **settings: Any) -> RolloutBuffer:
    """Return 20 steps of three lanes, the same ones in each call."""
    rollout = RolloutBuffer(
        20, 3, batch_size=12, generator=torch.Generator(), **settings
    )
    world(rollout, Model(20, 3), seed=1, often=(0.2, 0.1, 0.0)).extend(20)
    return rollout


@pytest.mark.parametrize("transform", [False, True])
def test_advantages_are_normalized_over_unpadded_rows(transform):
    plain, scaled = (
        rollout_of(Rollout, sequence_length=4, normalize_advantage=how)
        for how in (None, "minibatch")
    )
    if transform:
        for rollout in (plain, scaled):
            rollout.append_transform(lambda batch: batch.exclude("mask"))
    padded = 0
    for one, other in zip(plain, scaled, strict=True):
        mask = one["mask"]
        padded += int((~mask).sum())
        torch.testing.assert_close(
            other["advantage"][mask], normalize(one["advantage"][mask])
        )
    assert padded > 0


@pytest.mark.parametrize("how", ["rollout", "minibatch"])
def test_absent_agents_count_neither_for_normalization_nor_in_the_summary(how):
    plain, scaled = (
        rollout_of(Agents, group=GROUP, normalize_advantage=normalized)
        for normalized in (None, how)
    )
    rows = plain.storage[:]
    summary = plain.summary()
    for name in ("advantage", "value_target"):
        acting = rows[GROUP, name][rows[GROUP, "mask"]]
        assert summary[f"{name}_mean"] == pytest.approx(acting.mean().item())
    batches = (
        zip(plain, scaled, strict=True)
        if how == "minibatch"
        else [(rows, scaled.storage[:])]
    )
    for one, other in batches:
        acts, found = one[GROUP, "mask"], other[GROUP, "advantage"]
        expected = normalize(one[GROUP, "advantage"][acts])
        torch.testing.assert_close(found[acts], expected, rtol=1e-4, atol=1e-5)
        assert not found[~acts].any()


# -- recurrent policies


def recurrent_parts() -> tuple[Any, Any, Any, Any]:
    """Return an LSTM, a module that runs it, an actor on top of that module, and a
    critic that reads its output."""
    embed = TensorDictModule(torch.nn.Linear(4, 8), ["observation"], ["features"])
    memory = LSTMModule(
        input_size=8, hidden_size=8, in_key="features", out_key="belief"
    )
    logits = TensorDictModule(torch.nn.Linear(8, 2), ["belief"], ["logits"])
    body = TensorDictSequential(embed, memory)
    actor = ProbabilisticActor(
        TensorDictSequential(body, logits),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return memory, body, actor, ValueOperator(torch.nn.Linear(8, 1), ["belief"])


@torch.no_grad()
def assert_estimates_use_the_states_after_each_step(
    rollout: RolloutBuffer, data: TensorDict, policy: Any
) -> None:
    following = data["next"].flatten().exclude("reward", "done", "terminated")
    next_value = policy(following)["state_value"].view(*data.shape, 1)
    after = data["next"]
    values = data["state_value"], next_value, after["reward"]
    flags = after["done"], after["terminated"]
    _, target = generalized_advantage_estimate(0.99, 0.95, *values, *flags, time_dim=1)
    torch.testing.assert_close(rollout.storage["value_target"].transpose(0, 1), target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_recurrent_networks_start_from_the_stored_states():
    """Before the first update, a chunk gives the log-probabilities and values of the
    steps that were collected."""
    memory, body, actor, value = recurrent_parts()
    policy = TensorDictSequential(actor, value)
    env = TransformedEnv(
        SerialEnv(3, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)),
        InitTracker(),
    )
    env.append_transform(memory.make_tensordict_primer())
    rollout = RolloutBuffer(
        50, 3, batch_size=80, sequence_length=8, value_network=policy
    )
    collector = Collector(
        env,
        policy,
        frames_per_batch=150,
        total_frames=150,
        auto_register_policy_transforms=False,
    )
    data = next(iter(collector))
    collector.shutdown()
    rollout.extend(data)
    assert data["next", "done"].any()
    assert_estimates_use_the_states_after_each_step(rollout, data, policy)
    assert rollout.value_rows > 0
    begins_inside = False
    for batch in rollout:
        mask = batch["mask"]
        with set_recurrent_mode(True), torch.no_grad():
            state_value = value.module(body(batch.copy())["belief"])
            log_prob = actor.get_dist(batch.copy()).log_prob(batch["action"])
        torch.testing.assert_close(state_value[mask], batch["state_value"][mask])
        torch.testing.assert_close(log_prob[mask], batch["action_log_prob"][mask])
        begins_inside |= bool(batch["recurrent_state_h"][:, 0].any())
    assert begins_inside


# -- agents that die and return

pytest.importorskip("pettingzoo")

WOLVES = "wolf"


def agent_values(observation: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([0.3, -0.7])
    return (observation * weights).sum(-1, keepdim=True)


def critic_of_agents() -> TensorDictModule:
    return TensorDictModule(
        agent_values, [(WOLVES, "observation")], [(WOLVES, "state_value")]
    )


def recorded(steps: int = 48) -> RolloutBuffer:
    """Return a rollout of random steps of wolves, whose values the network computes."""
    env = Meadow(9)
    rollout = RolloutBuffer.from_env(
        env, steps, gamma=0.9, lmbda=0.8, group=WOLVES, value_network=critic_of_agents()
    )
    recorder = PettingZooRecorder(rollout, env)
    recorder.reset(seed=4)
    for _ in range(steps):
        if not env.agents:
            recorder.reset()
        recorder.step(act(env))
    return rollout


def test_advantages_of_recorded_agents_are_those_of_the_definition():
    rollout = recorded()
    rows = rollout[:].exclude("sheep", ("next", "sheep")).clone()
    assert 0.3 < rows[WOLVES, "mask"].float().mean() < 0.9
    following = agent_values(rows["next", WOLVES, "observation"])
    rows["next", WOLVES, "state_value"] = following
    rows = rows.rename_key_(WOLVES, GROUP)
    rows = rows.rename_key_(("next", WOLVES), ("next", GROUP))
    model = Model(len(rows))
    for row in rows:
        leaves = row.items(include_nested=True, leaves_only=True)
        fields = {key if isinstance(key, tuple) else (key,): x for key, x in leaves}
        model.append(0, {key: x.tolist() for key, x in fields.items()})
    m.estimate(model, 0.9, 0.8, agents=range(3))
    m.assert_batch(rows, [row.fields for row in model.rows()])


@pytest.mark.parametrize("beside", [(), (WOLVES,)], ids=["of the step", "of agents"])
def test_an_estimator_of_ones_own_gets_the_flags_of_agents(beside):
    def estimator(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        after = data["next", WOLVES]
        values = data[WOLVES, "state_value"], after["state_value"], after["reward"]
        flags = [data[("next", *beside, name)] for name in ("done", "terminated")]
        return generalized_advantage_estimate(0.9, 0.8, *values, *flags, time_dim=0)

    estimates = (WOLVES, "advantage"), (WOLVES, "value_target")
    expected = recorded()
    network = critic_of_agents()
    rollout = RolloutBuffer(
        48, estimator=estimator, value_network=network, group=WOLVES
    )
    rollout.extend(expected[:].exclude(*estimates, (WOLVES, "state_value")))
    for key in estimates:
        torch.testing.assert_close(rollout.storage[key], expected[key])


def test_a_group_names_the_entries_of_its_agents_unless_they_are_given():
    writer = RolloutWriter(group=("teams", "red"), value_target_key="target")
    estimator = writer.estimator
    assert estimator.reward_key == ("next", "teams", "red", "reward")
    assert estimator.group == ("teams", "red")
    assert writer.value_key == estimator.value_key == ("teams", "red", "state_value")
    assert writer.advantage_key == ("teams", "red", "advantage")
    assert writer.value_target_key == "target"
