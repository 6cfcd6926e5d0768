"""RolloutWriter: the same estimates whatever the way in, few rows for the network,
estimators of one's own, and the read that computes the estimates."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from itertools import count, product
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import TensorDictReplayBuffer
from torchrl.objectives.value import GAE, TDLambdaEstimator

from rlbuf_td import (
    PackedStorage,
    ReplayBuffer,
    ReplayBufferMixture,
    RolloutBuffer,
    RolloutWriter,
    TrajectoryIndex,
)
from rlbuf_td.diagnostics.plots import plot_advantages
from rlbuf_td.functional import vtrace_advantage_estimate
from tests.catalogue import RandomWalk, make_world
from tests.model import gae
from tests.test_lockstep import forked, stopped

BUFFERS = [ReplayBuffer, TensorDictReplayBuffer]
WAYS = ["whole", "parts", "steps"]


def write(rb, data, way):
    """Write ``[E, T]`` data whole, in parts of 1, 2, 3 ... steps, or step by step."""
    lead = data if rb.storage.ndim > 1 else data[0]
    time = lead.ndim - 1
    if way == "whole":
        rb.extend(lead.clone())
    elif way == "steps":
        for step in lead.unbind(time):
            rb.add(step.clone())
    else:
        start, size = 0, 1
        while start < lead.shape[time]:
            rb.extend(
                lead.narrow(time, start, min(size, lead.shape[time] - start)).clone()
            )
            start, size = start + size, size + 1


def stored(rb):
    """Everything, ``[E, T]``."""
    data = rb.storage.get(slice(None)).clone()
    return data.transpose(0, 1) if rb.storage.ndim > 1 else data[None]


def rollouts(world, steps, lanes=None, **kwargs):
    """Return a buffer of ``steps`` steps and all lanes, whose writer calls the world's
    network."""
    writer = RolloutWriter(
        0.9, 0.8, **{"value_network": world and world.module()} | kwargs
    )
    lanes = lanes or world.lanes
    return ReplayBuffer(storage=PackedStorage(steps * lanes, ndim=2), writer=writer)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize(
    ("way", "lanes", "values"),
    [
        ("whole", None, True),
        ("parts", 1, False),
        ("steps", 3, True),
        ("whole", 3, False),
    ],
)
def test_estimates_are_those_of_the_true_next_values(buffer, way, lanes, values):
    steps = 12
    world = make_world(lanes or 1)
    writer = RolloutWriter(0.9, 0.8, value_network=world.module())
    rb = buffer(
        storage=PackedStorage(steps * (lanes or 1), ndim=1 if lanes is None else 2),
        writer=writer,
    )
    if buffer is TensorDictReplayBuffer and lanes and way != "whole":
        # TorchRL's cannot put the index of one time step into [E] data
        rb._set_index_in_td = lambda data, index: None
    for seed in range(4):
        data = world.steps(steps, values=values)
        write(rb, data, way)
        assert writer.is_complete
        rows = stored(rb)
        advantage, target = world.estimates(data)
        torch.testing.assert_close(rows["advantage"], advantage)
        torch.testing.assert_close(rows["value_target"], target)
        torch.testing.assert_close(
            rows["state_value"], world.value(data["observation"])
        )
        assert torch.equal(rows["next", "observation"], data["next", "observation"]), (
            seed
        )
        expected = world.rows_to_ask(data) + (0 if values else data.numel())
        assert writer.value_rows == expected


@pytest.mark.parametrize("way", WAYS)
def test_only_rows_that_break_off_are_evaluated_by_the_network(way):
    world = make_world(3)
    terminated, truncated = torch.zeros(2, 3, 6, dtype=torch.bool)
    truncated[0, 1] = truncated[0, 3] = True  # two truncations in one lane
    truncated[1, 5] = True  # one at the last step: asked once, not twice
    # a lane that ends by terminating: not asked
    terminated[2, 2] = terminated[2, 5] = True
    data = world.steps(6, terminated=terminated, truncated=truncated)
    rb = rollouts(world, 6)
    writer = rb.writer
    write(rb, data, way)
    rows = stored(rb)
    after = data["next", "observation"]
    expected = torch.stack([after[0, 1], after[0, 3], after[0, 5], after[1, 5]])
    (asked,) = world.network.asked
    assert asked.shape == (4, 2)
    assert {tuple(x.tolist()) for x in asked} == {tuple(x.tolist()) for x in expected}
    # E + truncations in the middle - lanes that end by terminating
    assert writer.value_rows == 4
    torch.testing.assert_close(rows["advantage"], world.estimates(data)[0])


def test_a_change_of_trajectory_breaks_off_what_came_before():
    world = make_world(1)
    none = torch.zeros(1, 6, dtype=torch.bool)
    data = world.steps(6, terminated=none, truncated=none)
    data["collector", "traj_ids"] = torch.tensor([[7, 7, 7, 9, 9, 9]])
    # the second trajectory does not follow from the first
    data["observation"][0, 3:] += 5
    data["next", "observation"][0, 3:] += 5
    data["state_value"] = world.value(data["observation"])
    rb = rollouts(world, 6)
    rb.extend(data.clone())
    marked = data.clone()
    marked["next", "done"][0, 2] = marked["next", "truncated"][0, 2] = True
    torch.testing.assert_close(stored(rb)["advantage"], world.estimates(marked)[0])
    assert rb.writer.value_rows == 2


def test_several_values_a_step_share_one_done_flag():
    """Agents: values and rewards [E, T, A, 1], done [E, T, 1]."""
    g = torch.Generator().manual_seed(0)
    done = torch.rand(2, 9, 1, generator=g) < 0.2
    after = {
        "reward": torch.randn(2, 9, 3, 1, generator=g),
        "done": done,
        "terminated": done,
    }
    after["state_value"] = torch.randn(2, 9, 3, 1, generator=g)
    value = torch.randn(2, 9, 3, 1, generator=g)
    data = TensorDict({"state_value": value, "next": after}, [2, 9])
    rb = rollouts(None, 9, lanes=2, value_network=None)
    rb.extend(data)
    rows = stored(rb)
    for agent in range(3):
        own = {
            k: v if k in ("done", "terminated") else v[:, :, agent]
            for k, v in after.items()
        }
        alone = rollouts(None, 9, lanes=2, value_network=None)
        alone.extend(
            TensorDict({"state_value": value[:, :, agent], "next": own}, [2, 9])
        )
        torch.testing.assert_close(
            rows["advantage"][:, :, agent], stored(alone)["advantage"]
        )


def test_terminated_is_what_is_done_but_not_truncated_where_it_is_missing():
    world = make_world(3)
    data = world.steps(20)
    for missing in ("terminated", "done"):
        rb = rollouts(world, 20)
        rb.extend(data.exclude(("next", missing)))
        torch.testing.assert_close(stored(rb)["advantage"], world.estimates(data)[0])


def test_estimates_are_nan_until_the_last_step_of_a_rollout():
    world = make_world(2)
    rb = rollouts(world, 4)
    assert not rb.writer.is_complete
    write(rb, world.steps(4), "whole")
    names = "advantage", "value_target", "state_value"
    for n, step in enumerate(world.steps(4).unbind(1), start=1):
        assert rb.writer.is_complete == (n == 1)
        # those in the data, as of a batch, are not stored
        estimates = {name: torch.ones(2, 1) for name in names}
        rb.add(step.clone().update(estimates) if n > 1 else step)
        assert (rb.writer.steps, len(rb)) == (n, 2 * n)
        assert rb.storage["advantage"].isnan().all() == (n < 4)
    assert (rb.writer.is_complete, rb.write_count) == (True, 16)
    rb.empty()
    assert (rb.writer.is_complete, rb.writer.steps) == (False, 0)


def test_values_with_a_gradient_are_stored_without():
    world = make_world(2)
    data = world.steps(6)
    data["state_value"] = world.network(data["observation"])
    assert data["state_value"].requires_grad
    rb = rollouts(world, 6)
    rb.extend(data.clone())
    assert not any(
        x.requires_grad
        for x in stored(rb).values(include_nested=True, leaves_only=True)
    )
    torch.testing.assert_close(stored(rb)["advantage"], world.estimates(data)[0])


@pytest.mark.parametrize(
    ("rewards", "network", "values"),
    [
        (torch.float64, torch.float32, None),
        (torch.float32, torch.bfloat16, torch.float64),
        (torch.bfloat16, torch.bfloat16, None),
    ],
)
def test_estimates_have_the_dtype_of_the_values_or_of_the_network(
    rewards, network, values
):
    """Stored next values are used before the network is asked."""
    world = make_world(2)
    world.network.to(network)
    rb = rollouts(world, 6)
    for way in (*WAYS, "whole"):
        data = world.steps(6, values=values is not None)
        expected, _ = world.estimates(data)
        data["next", "reward"] = data["next", "reward"].to(rewards)
        data["next", "state_value"] = world.value(data["next", "observation"])
        if values is not None:
            data["state_value"] = data["state_value"].to(values)
        write(rb, data, way)
        rows = stored(rb)
        assert {
            rows[key].dtype for key in ("state_value", "advantage", "value_target")
        } == {values or network}
        is_narrow = torch.bfloat16 in (rewards, network, values)
        near: dict[str, Any] = (
            {"rtol": 0.05, "atol": 0.1} if is_narrow else {"rtol": 1e-4, "atol": 1e-4}
        )
        torch.testing.assert_close(rows["advantage"].float(), expected, **near)
        assert rb.writer.value_rows == (data.numel() if values is None else 0)


@pytest.mark.usefixtures("boundaries")
@pytest.mark.parametrize("lanes", [1, 2])
def test_the_first_step_of_a_rollout_follows_no_step_of_the_last_one(lanes):
    """Steps of the last rollout that are not replaced yet are no longer stored."""
    world = make_world(lanes)
    rb = rollouts(world, 6)
    trajectories = TrajectoryIndex(rb.storage)
    ends: dict[str, Any] = {
        name: torch.zeros(lanes, 6, dtype=torch.bool)
        for name in ("terminated", "truncated")
    }
    for way in WAYS:
        data = world.steps(6, **ends)
        write(rb, data, "whole")
        for steps in range(1, 6):
            write(rb, data[:, steps - 1 : steps], way)
            back, ahead, ended = (
                each.view(steps, lanes)
                for each in trajectories.reach(torch.arange(steps * lanes))
            )
            behind = torch.arange(steps).unsqueeze(-1).expand(steps, lanes)
            assert torch.equal(back, behind)
            assert torch.equal(ahead, steps - 1 - behind)
            assert not ended.any()
        write(rb, data[:, 5:], way)


GAMMA = 0.9


def columns(data):
    after = data["next"]
    return (
        data["state_value"],
        after["state_value"],
        after["reward"],
        after["done"],
        after["terminated"],
    )


def vtrace(data):
    value, next_value, reward, done, terminated = columns(data)
    log_pi = data["log_prob"] * 0.5
    return vtrace_advantage_estimate(
        GAMMA, log_pi, data["log_prob"], value, next_value, reward, done, terminated
    )


def brute_vtrace(value, following, reward, done, terminated, log_prob):
    """Sum the corrections of one lane, as in Espeholt et al., 2018, equation 1."""
    steps, ratio = len(value), (-0.5 * log_prob).exp()
    rho, target = ratio.clamp(max=1), value.clone()
    for s in range(steps):
        weight = 1.0
        for t in range(s, steps):
            delta = rho[t] * (
                reward[t] + GAMMA * following[t] * (not terminated[t]) - value[t]
            )
            target[s] += weight * delta
            if done[t]:
                break
            weight = weight * GAMMA * rho[t]
    inside = [t + 1 < steps and not done[t] for t in range(steps)]
    bootstrap = [
        target[t + 1] if inside[t] else following[t] * (not terminated[t])
        for t in range(steps)
    ]
    return rho * (reward + GAMMA * torch.stack(bootstrap) - value), target


def expected(world, data):
    """Compute the estimates of ``[E, n]`` steps lane by lane."""
    after = data["next"]
    values = (
        world.value(data["observation"]),
        world.value(after["observation"]),
        after["reward"],
    )
    given = (
        *(x.double() for x in values),
        after["done"],
        after["terminated"],
        data["log_prob"].double(),
    )
    lanes = [brute_vtrace(*(x[lane, :, 0] for x in given)) for lane in range(len(data))]
    return [torch.stack(parts).unsqueeze(-1) for parts in zip(*lanes, strict=True)]


def steps_of(world, n, **kwargs):
    data = world.steps(n, **kwargs)
    return data.set(
        "log_prob", torch.randn(world.lanes, n, 1, generator=world.generator)
    )


@pytest.mark.parametrize(
    ("way", "lanes", "values"),
    [
        ("whole", None, True),
        ("parts", 3, False),
        ("steps", 3, True),
        ("whole", 3, False),
    ],
)
def test_estimates_of_ones_own_are_those_of_the_definition(way, lanes, values):
    world = make_world(lanes or 1)
    writer = RolloutWriter(estimator=vtrace, value_network=world.module())
    rb = ReplayBuffer(
        storage=PackedStorage(12 * (lanes or 1), ndim=2 if lanes else 1), writer=writer
    )
    for _ in range(3):
        data = steps_of(world, 12, values=values)
        write(rb, data, way)
        rows = stored(rb)
        for key, x in zip(
            ("advantage", "value_target"), expected(world, data), strict=True
        ):
            torch.testing.assert_close(rows[key].double(), x, rtol=1e-5, atol=1e-5)
        assert torch.equal(rows["next", "reward"], data["next", "reward"])
        assert torch.equal(rows["next", "done"], data["next", "done"])
        assert ("next", "state_value") not in rows.keys(include_nested=True)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("module", [GAE, TDLambdaEstimator])
def test_torchrls_estimators_fit(buffer, module):
    world = make_world(3)
    theirs = module(gamma=0.9, lmbda=0.8, value_network=None)

    def estimator(data):
        data = theirs(data)
        return data["advantage"], data["value_target"]

    data = world.steps(12)
    writer = RolloutWriter(estimator=estimator, value_network=world.module())
    rb = buffer(storage=PackedStorage(36, ndim=2), writer=writer)
    rb.extend(data.clone())
    for key, x in zip(
        ("advantage", "value_target"), world.estimates(data), strict=True
    ):
        torch.testing.assert_close(stored(rb)[key], x)


def test_it_sees_ends_where_trajectories_change_and_all_that_was_written():
    world, seen = make_world(2), []
    none = torch.zeros(2, 4, dtype=torch.bool)

    def estimator(data):
        seen.append(data)
        return vtrace(data)

    data = steps_of(world, 4, terminated=none, truncated=none)
    data["collector", "traj_ids"][1, 2:] += 7
    network = TensorDictModule(
        world.network, in_keys=["observation"], out_keys=[("critic", "v")]
    )
    writer = RolloutWriter(
        estimator=estimator, value_network=network, value_key=("critic", "v")
    )
    rb = ReplayBuffer(storage=PackedStorage(8, ndim=2), writer=writer)
    rb.extend(data.exclude("state_value"))
    with pytest.raises(KeyError, match="state_value"):
        stored(rb)
    (given,) = seen
    assert given.shape == (2, 4)
    assert torch.equal(given["next", "done"][..., 0].nonzero(), torch.tensor([[1, 1]]))
    assert not given["next", "terminated"].any()
    torch.testing.assert_close(given["critic", "v"], world.value(data["observation"]))
    following = world.value(data["observation"])[:, 1:].clone()
    following[1, 1] = world.value(data["next", "observation"])[1, 1]
    torch.testing.assert_close(given["next", "critic", "v"][:, :-1], following)
    assert torch.equal(given["log_prob"], data["log_prob"])


@pytest.mark.parametrize("how", [None, "rollout", "minibatch"])
@pytest.mark.parametrize("own", [None, vtrace])
def test_partial_rollouts_normalization_and_the_summary_use_it(own, how):
    world = make_world(3)
    data = steps_of(world, 8)
    settings = {"estimator": own} if own else {"gamma": 0.9, "lmbda": 0.8}
    settings |= {
        "value_network": world.module(),
        "normalize_advantage": how,
        "partial": True,
    }
    rollout = RolloutBuffer(8, 3, batch_size=5, shuffle=False, **settings)
    for written in (5, 8):
        rollout.extend(data[:, rollout.writer.steps : written].clone())
        part = data[:, :written]
        found = expected(world, part) if own else world.estimates(part)
        advantage, target = (x.float() for x in found)
        scaled = (advantage - advantage.mean()) / advantage.std(correction=0)
        for batch in rollout:
            t, e = batch["index"].unbind(-1)
            torch.testing.assert_close(
                batch["value_target"], target[e, t], rtol=1e-4, atol=1e-5
            )
            want = (scaled if how == "rollout" else advantage)[e, t]
            if how == "minibatch":
                want = (want - want.mean()) / want.std(correction=0)
            torch.testing.assert_close(batch["advantage"], want, rtol=1e-3, atol=1e-4)
        unscaled = (
            target - world.value(part["observation"]) if how == "rollout" else advantage
        )
        assert rollout.summary()["advantage_mean"] == pytest.approx(
            unscaled.mean().item(), abs=1e-4
        )
        assert rollout.summary()["advantage_std"] == pytest.approx(
            unscaled.std(correction=0).item(), rel=1e-3
        )


def alternating(steps: int, ids: bool) -> TensorDict:
    """Return the steps of four environments, one after the other."""
    step = torch.arange(steps)[:, None].expand(steps, 4)
    state = (step * 100.0 + torch.arange(4)).unsqueeze(-1)
    done = (step % 20 == 19).unsqueeze(-1)
    following = {"observation": state + 100, "state_value": state, "reward": state * 0}
    rows = {"observation": state, "state_value": state.clone()}
    rows["next"] = following | {"done": done, "terminated": done.clone()}
    if ids:
        rows["collector"] = {"traj_ids": step // 20 * 4 + torch.arange(4)}
    return TensorDict(rows, [steps, 4])


ALTERNATE = {
    True: r"trajectories alternate after 1.0 rows .*RolloutBuffer\(num_steps, num_envs",
    False: r"environments alternate in the rollout, .*RolloutBuffer\(num_steps, num_envs",
}


@pytest.mark.parametrize("ids", ALTERNATE)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("parts", [1, 4])
def test_trajectories_that_alternate_in_a_rollout_are_reported_once(ids, lanes, parts):
    rows = alternating(40, ids).flatten()
    if lanes == 2:
        rows = torch.stack([rows, rows], 1)
    rb = ReplayBuffer(
        storage=PackedStorage(160 * lanes, ndim=lanes),
        writer=RolloutWriter(),
        dim_extend=0,
    )
    for number in range(2):
        for part in rows.split(160 // parts):
            rb.extend(part)
        if number:
            rb.sample(4)
        else:
            with pytest.warns(RuntimeWarning, match=ALTERNATE[ids]):
                rb.sample(4)


@pytest.mark.parametrize("ids", ALTERNATE)
def test_lanes_and_whole_trajectories_in_a_rollout_need_no_warning(ids):
    rows = alternating(40, ids)
    for storage, data in (
        (PackedStorage(160, ndim=2), rows),
        (PackedStorage(160), rows.transpose(0, 1).reshape(160)),
    ):
        rb = ReplayBuffer(storage=storage, writer=RolloutWriter(), dim_extend=0)
        rb.extend(data)
        assert rb.sample(4)["advantage"].isfinite().all()


def components(lanes: int = 2, steps: int = 9) -> TensorDict:
    """Rewards and values of three components, ``[lanes, steps, 3]``, one done flag."""
    g = torch.Generator().manual_seed(0)
    done = torch.rand(lanes, steps, 1, generator=g) < 0.2
    after = {"done": done, "terminated": done.clone()}
    for name in ("reward", "state_value"):
        after[name] = torch.randn(lanes, steps, 3, generator=g, dtype=torch.float64)
    value = torch.randn(lanes, steps, 3, generator=g, dtype=torch.float64)
    # the state after a step is that of the next step, unless the episode ends
    following = torch.where(done[:, :-1], after["state_value"][:, :-1], value[:, 1:])
    after["state_value"][:, :-1] = following
    return TensorDict({"state_value": value, "next": after}, [lanes, steps])


@pytest.mark.parametrize("as_given", [list, torch.tensor, tuple])
def test_each_component_has_its_own_gamma_and_lambda(as_given):
    gammas, lambdas = [0.9, 0.5, 1.0], [1.0, 0.3, 0.8]
    data = components()
    rb = RolloutBuffer(
        9, 2, batch_size=18, gamma=as_given(gammas), lmbda=as_given(lambdas)
    )
    rb.extend(data.clone())
    rows = stored(rb)
    after = data["next"]
    steps = [data["state_value"], after["state_value"], after["reward"]]
    steps += [flag.expand_as(steps[0]) for flag in (after["done"], ~after["done"])]
    expected = torch.zeros_like(steps[0])
    for e, c in product(range(2), range(3)):
        lane = [entry[e, :, c].tolist() for entry in steps]
        advantage = gae(*lane, gamma=gammas[c], lmbda=lambdas[c])
        expected[e, :, c] = torch.tensor(advantage, dtype=torch.float64)
    torch.testing.assert_close(rows["advantage"], expected)
    torch.testing.assert_close(rows["value_target"], expected + data["state_value"])


@pytest.mark.parametrize("how", ["rollout", "minibatch"])
def test_advantages_can_be_normalized_by_component(how):
    rb = RolloutBuffer(
        9,
        2,
        batch_size=6,
        gamma=[0.9, 0.5, 1.0],
        normalize_advantage=how,
        normalize_advantage_exclude_dims=(-1,),
    )
    rb.extend(components())
    batches = [*rb] if how == "minibatch" else [stored(rb)]
    for batch in batches:
        advantage = batch["advantage"].reshape(-1, 3)
        torch.testing.assert_close(advantage.mean(0), torch.zeros(3).double())
        torch.testing.assert_close(
            advantage.std(0, correction=0), torch.ones(3).double()
        )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gamma": [0.9, 0.5]}, r"gamma has the shape \(2,\).*\(3,\)"),
        ({"lmbda": torch.ones(1, 3)}, r"lmbda has the shape \(1, 3\)"),
        ({"normalize_advantage_exclude_dims": [-2]}, r"exclude_dims=\[-2\]"),
    ],
)
def test_numbers_of_other_components_are_refused_at_the_first_write(settings, match):
    rb = RolloutBuffer(9, 2, batch_size=6, normalize_advantage="rollout", **settings)
    with pytest.raises(ValueError, match=match):
        rb.extend(components())
    assert not len(rb)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gamma": [0.9, 1.5]}, "gamma must lie in"),
        ({"lmbda": "high"}, "lmbda must be a number"),
        ({"normalize_advantage_exclude_dims": [0]}, "from the last one"),
        ({"normalize_advantage_exclude_dims": -1}, r"such as \(-1,\), got -1"),
    ],
)
def test_components_out_of_range_are_refused(settings, match):
    with pytest.raises((TypeError, ValueError), match=match):
        RolloutWriter(**settings)


# -- the first read of a complete rollout computes its estimates


STEPS, LANES = 4, 2
READS: dict[str, Callable[[Any], Any]] = {
    "sample": lambda rb: rb.sample()["advantage"],
    "a loop": lambda rb: next(iter(rb))["advantage"],
    "summary": lambda rb: rb.summary(),
    "index": lambda rb: rb[:]["advantage"],
    "key": lambda rb: rb["advantage"],
    "last": lambda rb: rb.last(1)["advantage"],
    "chronological": lambda rb: rb.chronological()["value_target"],
    "storage, rows": lambda rb: rb.storage[:]["advantage"],
    "storage, key": lambda rb: rb.storage["state_value"],
    "storage, indices": lambda rb: rb.storage.get((torch.zeros(1, dtype=torch.int64),) * 2),
    "plot": plot_advantages,
    "mixture": lambda rb: ReplayBufferMixture({"a": rb}, {"a": 1}, batch_size=3).sample(),
}  # fmt: skip


def made(world: RandomWalk, **settings: Any) -> RolloutBuffer:
    default = {"batch_size": 3, "gamma": 0.9, "lmbda": 0.8}
    default |= {"value_network": world.module()} | settings
    return RolloutBuffer(STEPS, LANES, **default)


def as_stored(rb: Any) -> torch.Tensor:
    """Return the advantages ``[E, T, 1]`` that lie in memory, without a read."""
    return rb.storage._storage["advantage"].transpose(0, 1)


def assert_estimated(rb: Any, world: RandomWalk, data: Any) -> None:
    advantage, target = world.estimates(data)
    rows = rb.storage[:].transpose(0, 1)
    torch.testing.assert_close(rows["advantage"], advantage)
    torch.testing.assert_close(rows["value_target"], target)
    torch.testing.assert_close(rows["state_value"], world.value(rows["observation"]))
    rb.storage.check()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_any_read_of_a_complete_rollout_computes_its_estimates_once(read):
    world = make_world(LANES)
    rb, data = made(world), world.steps(STEPS, values=False)
    rb.extend(data.clone())
    assert rb.is_complete
    assert not rb.writer.is_estimated
    assert as_stored(rb).isnan().all()
    read(rb)
    asked = rb.value_rows
    assert asked == STEPS * LANES + world.rows_to_ask(data)
    assert_estimated(rb, world, data)
    for again in READS.values():
        again(rb)
    assert sum(len(each.flatten(0, -2)) for each in world.network.asked) == asked


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_any_buffer_with_the_writer_or_over_its_storage_reads_estimates(cls):
    world = make_world(LANES)
    data, storage = world.steps(STEPS), PackedStorage(STEPS * LANES, ndim=2)
    writer = RolloutWriter(0.9, 0.8, value_network=world.module())
    rb = cls(storage=storage, writer=writer, batch_size=3)
    other = ReplayBuffer(storage=storage, batch_size=3)
    for buffer in (rb, other):
        rb.extend(data.clone())
        assert as_stored(rb).isnan().all()
        assert buffer.sample()["advantage"].isfinite().all()
        assert_estimated(rb, world, data)


def test_other_entries_are_read_without_an_estimate():
    world = make_world(LANES)
    rb = made(world)
    rb.extend(world.steps(STEPS))
    world.network.fails = True
    assert rb.storage["observation"].isfinite().all()
    assert rb.storage["next", "reward"].isfinite().all()
    assert len(rb.state_dict()["_storage"]["rows"]) == STEPS


def test_a_read_that_fails_changes_nothing_and_the_next_one_tries_again():
    world = make_world(LANES)
    rb, data = (
        made(world, samples_per_insert=2.0, tolerance=99),
        world.steps(STEPS, p=0),
    )
    for step in data.unbind(1):
        rb.add(step.clone())
    world.network.fails = True
    for read in READS.values():
        with pytest.raises(RuntimeError, match="the network failed"):
            read(rb)
    flow: Any = rb.flow
    assert rb.write_count == len(rb) == STEPS * LANES
    assert (flow.report()["inserts"], flow.report()["samples"]) == (STEPS * LANES, 0)
    assert as_stored(rb).isnan().all()
    world.network.fails = False
    rb.sample()
    assert_estimated(rb, world, data)
    assert flow.report()["samples"] == 3


@pytest.mark.parametrize("shuffled", [False, True])
def test_values_may_be_missing_in_some_of_the_rows(shuffled):
    """Where the data has values, these count."""
    world = make_world(LANES)
    rb, data = made(world), world.steps(STEPS, p=0)
    expected = world.value(data["observation"])
    for number, step in enumerate(data.unbind(1)):
        step = step.clone()
        if shuffled:
            step["state_value"] += 1
            step["state_value"][number % LANES] = torch.nan
            expected[1 - number % LANES, number] += 1
        rb.add(step.exclude("state_value") if number < 2 and not shuffled else step)
    torch.testing.assert_close(rb.storage["state_value"].transpose(0, 1), expected)
    assert rb.value_rows == STEPS * LANES + LANES
    if not shuffled:
        assert_estimated(rb, world, data)


def test_edits_before_the_first_read_count():
    world = make_world(LANES)
    rb, data = made(world), world.steps(STEPS)
    rb.extend(data.clone())
    data["next", "reward"] += 1
    rb["next", "reward"] = data["next", "reward"]
    assert_estimated(rb, world, data)


# -- processes


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("child_first", [True, False])
def test_processes_that_share_a_rollout_agree_on_it(child_first, values):
    world = make_world(LANES)
    rb = made(world, partial=True).share()

    def write(steps: Any) -> None:
        for step in steps.unbind(1):
            rb.add(step.clone())

    for number in range(2):
        data = world.steps(STEPS, values=values)
        early, late = data[:, :2], data[:, 2:]
        if child_first:
            assert forked(lambda early=early: write(early)) == 0
        else:
            write(early)
        # of two steps, as if the last one were the end
        torch.testing.assert_close(rb[:]["advantage"], world.estimates(early)[0])
        if child_first:
            write(late)
        else:
            assert forked(lambda late=late: write(late)) == 0
        assert rb.is_complete
        assert not rb.writer.is_estimated
        if number:
            assert forked(rb.sample) == 0
            world.network.fails = True  # the child has computed them
            assert rb.value_rows > 0
        assert_estimated(rb, world, data)


def test_a_kill_between_the_last_step_and_its_estimates_leaves_a_rollout_to_read():
    world = make_world(LANES)
    parent, forward = os.getpid(), world.network.forward

    def dies(observation: torch.Tensor) -> torch.Tensor:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(observation)

    world.network.forward = dies
    rb, data = made(world).share(), world.steps(STEPS, p=0)
    rb.extend(data[:, :3].clone())

    def finish() -> None:
        rb.add(data[:, 3].clone())
        rb.sample()

    assert forked(finish) == -signal.SIGKILL
    assert rb.is_complete
    assert rb.sample()["advantage"].isfinite().all()
    assert_estimated(rb, world, data)


@pytest.mark.parametrize("stride", [90, pytest.param(29, marks=pytest.mark.slow)])
def test_a_kill_at_any_line_of_the_first_read_leaves_a_rollout_to_read(stride):
    world = make_world(LANES)
    rb = made(world).share()
    for line in count(1, stride):
        data = world.steps(STEPS, values=False)
        rb.extend(data.clone())

        def read(line: int = line) -> None:
            with stopped(line, signal.SIGKILL):
                rb.storage["advantage"]

        code = forked(read)
        assert rb.is_complete
        assert_estimated(rb, world, data)
        if not code:
            break
    assert line > 60


@pytest.mark.parametrize("how", ["sample", "storage, key"])
@pytest.mark.parametrize("stride", [23, pytest.param(5, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_of_the_first_read_leaves_a_rollout_to_read(
    how, stride
):
    world = make_world(LANES)
    rb = made(world)
    data = world.steps(STEPS, values=False)
    for line in count(1, stride):
        rb.extend(data.clone())
        with stopped(line, signal.SIGINT) as stopper:
            READS[how](rb)
        rb.storage.check()
        assert len(rb) == STEPS * LANES
        assert rb.is_complete
        # whatever is marked as computed is
        if rb.writer.is_estimated:
            assert as_stored(rb).isfinite().all()
        advantage = torch.cat([batch["advantage"].flatten() for batch in rb])
        expected = world.estimates(data)[0].flatten()
        torch.testing.assert_close(advantage.sort()[0], expected.sort()[0])
        if stopper.left > 0:
            break
    assert line > 60


# -- ways to go on


def by_state(rb: Any, other: Any) -> Any:
    other.load_state_dict(rb.state_dict())
    return other


def by_dump(rb: Any, other: Any, folder: Any) -> Any:
    rb.dumps(folder)
    other.loads(folder)
    return other


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("way", ["state", "dump", "copy", "pickle", "share", "emptied"])
def test_whether_a_rollout_has_been_read_goes_with_its_rows(way, read, tmp_path):
    world = make_world(LANES)
    rb, data = made(world), world.steps(STEPS, values=False)
    rb.extend(data.clone())
    if read:
        rb.sample()
    before = rb.value_rows
    other = {
        "state": lambda: by_state(rb, made(world)),
        "dump": lambda: by_dump(rb, made(world), tmp_path),
        "copy": lambda: copy.deepcopy(rb),
        "pickle": lambda: pickle.loads(pickle.dumps(rb)),
        "share": rb.share,
        "emptied": lambda: (rb.empty(), rb.extend(data.clone()), rb)[-1],
    }[way]()
    is_estimated = read and way != "emptied"
    assert other.writer.is_estimated == is_estimated
    assert other.value_rows == (before if is_estimated else 0)
    assert as_stored(other).isfinite().all() == is_estimated
    other.writer.estimator.value_network.module.fails = is_estimated
    assert_estimated(other, world, data)


@pytest.mark.parametrize(
    "read", ["index", "last", "chronological", "sample", "summary"]
)
def test_reads_of_a_part_estimate_it_if_partial_is_set(read):
    world = make_world(LANES)
    data = world.steps(STEPS)
    for partial in (False, True):
        rb = made(world, partial=partial)
        rb.extend(data[:, :2].clone())
        if not partial and read in ("sample", "summary", "mixture"):
            with pytest.raises(RuntimeError, match="the rollout is not complete"):
                READS[read](rb)
        else:
            READS[read](rb)
        assert rb.writer.is_estimated == partial
        assert as_stored(rb)[:, :2].isfinite().all() == partial
        rb.extend(data[:, 2:].clone())
        assert as_stored(rb)[:, 2:].isnan().all()
        assert_estimated(rb, world, data)


def test_flow_control_counts_each_row_of_a_rollout_once():
    def estimator(data: Any) -> Any:
        raise RuntimeError("bad")

    world = make_world(LANES)
    settings: Any = {"gamma": None, "lmbda": None, "samples_per_insert": 0.1}
    settings["tolerance"] = 99
    rb = made(world, estimator=estimator, **settings)
    flow: Any = rb.flow
    for number, step in enumerate(world.steps(3 * STEPS).unbind(1), 1):
        rb.add(step.clone())
        assert flow.inserted == LANES * number
        if rb.is_complete:
            with pytest.raises(RuntimeError, match="bad"):
                rb.summary()
    assert rb.write_count == 3 * STEPS * LANES
