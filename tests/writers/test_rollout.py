"""RolloutWriter: the same estimates whatever the way in, few rows for the network,
estimators of one's own, and the read that computes the estimates."""

from __future__ import annotations

import copy
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
from torchrl.objectives.value import GAE

from rlbuf_td import (
    PackedStorage,
    ReplayBuffer,
    ReplayBufferMixture,
    RolloutBuffer,
    RolloutWriter,
)
from rlbuf_td.diagnostics.plots import plot_advantages
from rlbuf_td.functional import normalize
from tests.catalogue import RandomWalk, make_world
from tests.model import gae
from tests.test_lockstep import forked, stopped

STEPS, LANES = 4, 2


def write(rb, data, way):
    """Write ``[E, T]`` data whole, in parts, or step by step."""
    rows = data.clone() if rb.storage.ndim > 1 else data[0].clone()
    time = rows.ndim - 1
    if way == "steps":
        for step in rows.unbind(time):
            rb.add(step)
    else:
        for part in rows.split(5 if way == "parts" else 99, time):
            rb.extend(part)


def stored(rb):
    """Everything, ``[E, T]``."""
    data = rb.storage.get(slice(None)).clone()
    return data.transpose(0, 1) if rb.storage.ndim > 1 else data[None]


def made(world: RandomWalk, steps: int = STEPS, **settings: Any) -> RolloutBuffer:
    default = {"batch_size": 3, "gamma": 0.9, "lmbda": 0.8}
    default |= {"value_network": world.module()} | settings
    return RolloutBuffer(steps, world.lanes, **default)


@pytest.mark.parametrize(
    ("buffer", "way", "lanes", "values"),
    [
        (ReplayBuffer, "whole", None, True),
        (ReplayBuffer, "parts", 1, False),
        (ReplayBuffer, "steps", 3, True),
        (TensorDictReplayBuffer, "parts", None, True),
        (TensorDictReplayBuffer, "whole", 3, False),
    ],
)
def test_estimates_are_those_of_the_true_next_values(buffer, way, lanes, values):
    """The network is asked for missing values, and where trajectories break off."""
    world = make_world(lanes or 1)
    writer = RolloutWriter(0.9, 0.8, value_network=world.module())
    storage = PackedStorage(12 * (lanes or 1), ndim=1 if lanes is None else 2)
    rb = buffer(storage=storage, writer=writer)
    for _ in range(4):
        data = world.steps(12, values=values)
        write(rb, data, way)
        assert writer.is_complete
        rows = stored(rb)
        advantage, target = world.estimates(data)
        torch.testing.assert_close(rows["advantage"], advantage)
        torch.testing.assert_close(rows["value_target"], target)
        value = world.value(data["observation"])
        torch.testing.assert_close(rows["state_value"], value)
        expected = world.rows_to_ask(data) + (0 if values else data.numel())
        asked = sum(len(rows.flatten(0, -2)) for rows in world.network.asked)
        assert writer.value_rows == asked == expected
        world.network.asked.clear()


def test_terminated_is_what_is_done_but_not_truncated_where_it_is_missing():
    world = make_world(3)
    data = world.steps(20)
    for missing in ("terminated", "done"):
        rb = made(world, 20)
        rb.extend(data.exclude(("next", missing)))
        torch.testing.assert_close(stored(rb)["advantage"], world.estimates(data)[0])


def test_estimates_are_nan_until_the_last_step_of_a_rollout():
    world = make_world(LANES)
    rb = made(world)
    assert not rb.is_complete
    rb.extend(world.steps(STEPS))
    estimates = {
        name: torch.ones(LANES, 1)
        for name in ("advantage", "value_target", "state_value")
    }
    for n, step in enumerate(world.steps(STEPS).unbind(1), start=1):
        assert rb.is_complete == (n == 1)
        # those in the data, as of a batch, are not stored
        rb.add(step.clone().update(estimates) if n > 1 else step)
        assert (rb.writer.steps, len(rb)) == (n, LANES * n)
        assert rb.storage["advantage"].isnan().all() == (n < STEPS)
    assert rb.is_complete
    rb.empty()
    assert (rb.is_complete, rb.writer.steps) == (False, 0)


def test_values_with_a_gradient_are_stored_without():
    world = make_world(2)
    data = world.steps(6)
    data["state_value"] = world.network(data["observation"])
    assert data["state_value"].requires_grad
    rb = made(world, 6)
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
    rb = made(world, 6)
    data = world.steps(6, values=values is not None)
    expected, _ = world.estimates(data)
    data["next", "reward"] = data["next", "reward"].to(rewards)
    data["next", "state_value"] = world.value(data["next", "observation"])
    if values is not None:
        data["state_value"] = data["state_value"].to(values)
    write(rb, data, "whole")
    rows = stored(rb)
    for key in ("state_value", "advantage", "value_target"):
        assert rows[key].dtype == (values or network)
    is_narrow = torch.bfloat16 in (rewards, network, values)
    near = 0.1 if is_narrow else 1e-4
    torch.testing.assert_close(
        rows["advantage"].float(), expected, rtol=near, atol=near
    )
    assert rb.writer.value_rows == (data.numel() if values is None else 0)


def gae_of_torchrl(data):
    data = GAE(gamma=0.9, lmbda=0.8, value_network=None)(data)
    return data["advantage"], data["value_target"]


@pytest.mark.parametrize(
    ("buffer", "way", "values"),
    [
        (TensorDictReplayBuffer, "whole", True),
        (ReplayBuffer, "parts", False),
        (ReplayBuffer, "steps", True),
    ],
)
def test_torchrls_estimators_fit(buffer, way, values):
    world = make_world(3)
    writer = RolloutWriter(estimator=gae_of_torchrl, value_network=world.module())
    rb = buffer(storage=PackedStorage(36, ndim=2), writer=writer)
    for _ in range(2):
        data = world.steps(12, values=values)
        write(rb, data, way)
        rows = stored(rb)
        advantage, target = world.estimates(data)
        torch.testing.assert_close(rows["advantage"], advantage)
        torch.testing.assert_close(rows["value_target"], target)
        assert torch.equal(rows["next", "done"], data["next", "done"])
        assert ("next", "state_value") not in rows.keys(include_nested=True)


def test_it_sees_ends_where_trajectories_change_and_all_that_was_written():
    world, seen = make_world(2), []

    def estimator(data):
        seen.append(data)
        return data["critic", "v"], data["critic", "v"]

    data = world.steps(4, p=0, values=False)
    data["collector", "traj_ids"][1, 2:] += 7
    data["log_prob"] = torch.randn(2, 4, 1)
    key = "critic", "v"
    network = TensorDictModule(world.network, ["observation"], [key])
    writer = RolloutWriter(estimator=estimator, value_network=network, value_key=key)
    rb = ReplayBuffer(storage=PackedStorage(8, ndim=2), writer=writer)
    rb.extend(data)
    stored(rb)
    (whole,) = seen
    assert whole.shape == (2, 4)
    assert whole["next", "done"][..., 0].nonzero().tolist() == [[1, 1]]
    assert not whole["next", "terminated"].any()
    for rows in (whole, whole["next"]):
        torch.testing.assert_close(rows[key], world.value(rows["observation"]))
    assert torch.equal(whole["log_prob"], data["log_prob"])


@pytest.mark.parametrize("how", ["rollout", "minibatch"])
@pytest.mark.parametrize("own", [None, gae_of_torchrl])
def test_estimates_of_a_part_are_normalized_and_the_summary_is_not(own, how):
    world = make_world(3)
    data = world.steps(8)
    settings: Any = {"estimator": own} if own else {"gamma": 0.9, "lmbda": 0.8}
    rollout = RolloutBuffer(
        8,
        3,
        batch_size=5,
        value_network=world.module(),
        normalize_advantage=how,
        partial=True,
        **settings,
    )
    for written in (5, 8):
        rollout.extend(data[:, rollout.writer.steps : written].clone())
        advantage, target = world.estimates(data[:, :written])
        for batch in rollout:
            t, e = batch["index"].unbind(-1)
            torch.testing.assert_close(
                batch["value_target"], target[e, t], rtol=1e-4, atol=1e-5
            )
            wanted = (
                normalize(advantage)[e, t]
                if how == "rollout"
                else normalize(advantage[e, t])
            )
            torch.testing.assert_close(batch["advantage"], wanted, rtol=1e-3, atol=1e-4)
        summary = rollout.summary()
        assert summary["advantage_mean"] == pytest.approx(advantage.mean().item(), 1e-3)
        assert summary["advantage_std"] == pytest.approx(
            advantage.std(correction=0).item(), 1e-3
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


@pytest.mark.parametrize(
    ("ids", "lanes", "parts"), [(True, 1, 4), (False, 2, 1), (False, 1, 4)]
)
def test_trajectories_that_alternate_in_a_rollout_are_reported_once(ids, lanes, parts):
    rows = alternating(40, ids).flatten()
    if lanes == 2:
        rows = torch.stack([rows, rows], 1)
    storage = PackedStorage(160 * lanes, ndim=lanes)
    rb = ReplayBuffer(storage=storage, writer=RolloutWriter(), dim_extend=0)
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


def test_each_component_has_its_own_gamma_and_lambda():
    gammas, lambdas = [0.9, 0.5, 1.0], [1.0, 0.3, 0.8]
    data = components()
    rb = RolloutBuffer(9, 2, gamma=gammas, lmbda=torch.tensor(lambdas))
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
