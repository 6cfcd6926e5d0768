"""Estimators of one's own, against the definitions of what they compute, in float64."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.objectives.value import GAE, TDLambdaEstimator

from rlbuf_td import PackedStorage, ReplayBuffer, RolloutBuffer, RolloutWriter
from rlbuf_td.functional import vtrace_advantage_estimate
from tests.random_walk import make_world
from tests.writers.test_rollout import BUFFERS, STORAGES, stored, write

GAMMA, N = 0.9, 3


def columns(data):
    after = data["next"]
    return data["state_value"], after["state_value"], after["reward"], after["done"], after["terminated"]


def vtrace(data):
    value, next_value, reward, done, terminated = columns(data)
    log_pi = data["log_prob"] * 0.5
    return vtrace_advantage_estimate(GAMMA, log_pi, data["log_prob"], value, next_value, reward, done, terminated)


def n_step(data):
    """Estimate by returns of at most N steps; time is the last batch dim."""
    value, next_value, reward, done, terminated = columns(data)
    time, target = data.ndim - 1, torch.zeros_like(value)
    one_step = reward + GAMMA * next_value.masked_fill(terminated, 0)
    last = one_step.unbind(time)
    for t in range(data.shape[-1]):
        end = min(t + N, data.shape[-1]) - 1
        sums = last[end]
        for k in range(end - 1, t - 1, -1):
            stops = done.select(time, k)
            sums = torch.where(stops, last[k], reward.select(time, k) + GAMMA * sums)
        target.select(time, t).copy_(sums)
    return target - value, target


def brute_vtrace(value, following, reward, done, terminated, log_prob):
    """Sum the corrections of one lane, as in Espeholt et al., 2018, equation 1."""
    steps, ratio = len(value), (-0.5 * log_prob).exp()
    rho, target = ratio.clamp(max=1), value.clone()
    for s in range(steps):
        weight = 1.0
        for t in range(s, steps):
            delta = rho[t] * (reward[t] + GAMMA * following[t] * (not terminated[t]) - value[t])
            target[s] += weight * delta
            if done[t]:
                break
            weight = weight * GAMMA * rho[t]
    inside = [t + 1 < steps and not done[t] for t in range(steps)]
    bootstrap = [target[t + 1] if inside[t] else following[t] * (not terminated[t]) for t in range(steps)]
    return rho * (reward + GAMMA * torch.stack(bootstrap) - value), target


def brute_n_step(value, following, reward, done, terminated, log_prob):
    target = torch.zeros_like(value)
    for s in range(len(value)):
        for k in range(N):
            t = s + k
            target[s] += GAMMA**k * reward[t]
            if done[t] or k == N - 1 or t == len(value) - 1:
                target[s] += GAMMA ** (k + 1) * following[t] * (not terminated[t])
                break
    return target - value, target


def expected(world, data, brute):
    """Compute the estimates of ``[E, n]`` steps lane by lane."""
    after = data["next"]
    values = (world.value(data["observation"]), world.value(after["observation"]), after["reward"])
    given = *(x.double() for x in values), after["done"], after["terminated"], data["log_prob"].double()
    lanes = [brute(*(x[lane, :, 0] for x in given)) for lane in range(len(data))]
    return [torch.stack(parts).unsqueeze(-1) for parts in zip(*lanes, strict=True)]


def steps_of(world, n, **kwargs):
    data = world.steps(n, **kwargs)
    return data.set("log_prob", torch.randn(world.lanes, n, 1, generator=world.generator))


@pytest.mark.parametrize(("own", "brute"), [(vtrace, brute_vtrace), (n_step, brute_n_step)])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("way", "lanes", "values"), [("whole", None, True), ("parts", 3, False), ("steps", 3, True), ("whole", 3, False)]
)
def test_estimates_are_those_of_the_definition(own, brute, storage, way, lanes, values):
    world = make_world(lanes or 1)
    writer = RolloutWriter(estimator=own, value_network=world.module())
    rb = ReplayBuffer(storage=storage(12 * (lanes or 1), ndim=2 if lanes else 1), writer=writer)
    for _ in range(3):
        data = steps_of(world, 12, values=values)
        write(rb, data, way)
        rows = stored(rb)
        for key, x in zip(("advantage", "value_target"), expected(world, data, brute), strict=True):
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
    for key, x in zip(("advantage", "value_target"), world.estimates(data), strict=True):
        torch.testing.assert_close(stored(rb)[key], x)


def test_it_sees_ends_where_trajectories_change_and_all_that_was_written():
    world, seen = make_world(2), []
    none = torch.zeros(2, 4, dtype=torch.bool)

    def estimator(data):
        seen.append(data)
        return n_step(data)

    data = steps_of(world, 4, terminated=none, truncated=none)
    data["collector", "traj_ids"][1, 2:] += 7
    network = TensorDictModule(world.network, in_keys=["observation"], out_keys=[("critic", "v")])
    writer = RolloutWriter(estimator=estimator, value_network=network, value_key=("critic", "v"))
    rb = ReplayBuffer(storage=PackedStorage(8, ndim=2), writer=writer)
    with pytest.raises(KeyError, match="state_value"):
        rb.extend(data.exclude("state_value"))
    assert len(rb) == 0
    (given,) = seen
    assert given.shape == (2, 4)
    assert torch.equal(given["next", "done"][..., 0].nonzero(), torch.tensor([[1, 1]]))
    assert not given["next", "terminated"].any()
    torch.testing.assert_close(given["critic", "v"], world.value(data["observation"]))
    following = world.value(data["observation"])[:, 1:].clone()
    following[1, 1] = world.value(data["next", "observation"])[1, 1]
    torch.testing.assert_close(given["next", "critic", "v"][:, :-1], following)
    assert torch.equal(given["log_prob"], data["log_prob"])


def returning(*found):
    return lambda data: found if len(found) > 1 else found[0]


GOOD = torch.zeros(2, 4, 1)
BAD = torch.zeros(2, 4, 1).index_put_(tuple(torch.tensor([[1, 2, 0], [1, 3, 0]]).T), torch.tensor(torch.nan))


@pytest.mark.parametrize(
    ("found", "error", "match"),
    [
        ((None,), TypeError, r"a tuple \(advantage, value_target\), got NoneType: from TorchRL's"),
        ((TensorDict(),), TypeError, "got TensorDict: from TorchRL's"),
        ((GOOD, GOOD, GOOD), TypeError, "got tuple"),
        ((GOOD, 0.0), TypeError, "got tuple"),
        (
            (GOOD, GOOD[..., 0]),
            ValueError,
            r"estimator returned value_target as torch.float32 of shape \[2, 4\] on cpu, "
            r"expected torch.float32 of shape \[2, 4, 1\] on cpu, like the values",
        ),
        ((GOOD.transpose(0, 1), GOOD), ValueError, r"returned advantage as torch.float32 of shape \[4, 2, 1\]"),
        ((GOOD.double(), GOOD), ValueError, "returned advantage as torch.float64 of .* expected torch.float32"),
        ((GOOD, BAD), ValueError, r"NaN or infinity: 2 of 8 of value_target, first at \[1, 2, 0\]"),
        ((1 / GOOD, GOOD), ValueError, r"NaN or infinity: 8 of 8 of advantage, first at \[0, 0, 0\]"),
    ],
)
@pytest.mark.parametrize("way", ["whole", "steps"])
def test_wrong_results_are_refused_and_change_nothing(found, error, match, way):
    world = make_world(2)
    rollout = RolloutBuffer(4, 2, batch_size=4, estimator=n_step, value_network=world.module())
    first, second = world.steps(4), world.steps(4)
    rollout.extend(first.clone())
    before = stored(rollout)
    rollout.writer.estimator.own = returning(*found)
    written = 0 if way == "whole" else 3
    for step in second[:, :written].unbind(1):
        rollout.add(step.clone())
    with pytest.raises(error, match=match):
        rollout.extend(second[:, written:].clone())
    assert rollout.writer.steps == (written or 4)
    if not written:
        assert (stored(rollout) == before).all()
    rollout.writer.estimator.own = n_step
    rollout.extend(second[:, written:].clone())
    torch.testing.assert_close(stored(rollout)["observation"], second["observation"])
    assert rollout.is_complete


@pytest.mark.parametrize("how", [None, "rollout", "minibatch"])
@pytest.mark.parametrize("own", [None, vtrace])
def test_partial_rollouts_normalization_and_the_summary_use_it(own, how):
    world = make_world(3)
    data = steps_of(world, 8)
    settings = {"estimator": own} if own else {"gamma": 0.9, "lmbda": 0.8}
    settings |= {"value_network": world.module(), "normalize_advantage": how, "partial": True}
    rollout = RolloutBuffer(8, 3, batch_size=5, shuffle=False, **settings)
    for written in (5, 8):
        rollout.extend(data[:, rollout.writer.steps : written].clone())
        part = data[:, :written]
        found = expected(world, part, brute_vtrace) if own else world.estimates(part)
        advantage, target = (x.float() for x in found)
        scaled = (advantage - advantage.mean()) / advantage.std(correction=0)
        for batch in rollout:
            t, e = batch["index"].unbind(-1)
            torch.testing.assert_close(batch["value_target"], target[e, t], rtol=1e-4, atol=1e-5)
            want = (scaled if how == "rollout" else advantage)[e, t]
            if how == "minibatch":
                want = (want - want.mean()) / want.std(correction=0)
            torch.testing.assert_close(batch["advantage"], want, rtol=1e-3, atol=1e-4)
        unscaled = target - world.value(part["observation"]) if how == "rollout" else advantage
        assert rollout.advantage_mean == pytest.approx(unscaled.mean().item(), abs=1e-4)
        assert rollout.advantage_std == pytest.approx(unscaled.std(correction=0).item(), rel=1e-3)
