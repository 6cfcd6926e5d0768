"""RolloutWriter: the same estimates whatever the way in, and no more network rows than trajectories that break off."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ReplayBuffer, TrajectoryIndex
from rlbuf_td.writers import RolloutWriter
from tests.random_walk import make_world

STORAGES = [PackedStorage, LazyTensorStorage, LazyMemmapStorage]
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
            rb.extend(lead.narrow(time, start, min(size, lead.shape[time] - start)).clone())
            start, size = start + size, size + 1


def stored(rb):
    """Everything, ``[E, T]``."""
    data = rb.storage.get(slice(None)).clone()
    return data.transpose(0, 1) if rb.storage.ndim > 1 else data[None]


def rollouts(world, steps, lanes=None, storage=PackedStorage, **kwargs):
    """Return a buffer of ``steps`` steps and all lanes, whose writer calls the world's network."""
    writer = RolloutWriter(0.9, 0.8, **{"value_network": world and world.module()} | kwargs)
    lanes = lanes or world.lanes
    return ReplayBuffer(storage=storage(steps * lanes, ndim=2), writer=writer)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize(
    ("way", "lanes", "values"), [("whole", None, True), ("parts", 1, False), ("steps", 3, True), ("whole", 3, False)]
)
def test_estimates_are_those_of_the_true_next_values(buffer, storage, way, lanes, values):
    steps = 12
    world = make_world(lanes or 1)
    writer = RolloutWriter(0.9, 0.8, value_network=world.module())
    rb = buffer(storage=storage(steps * (lanes or 1), ndim=1 if lanes is None else 2), writer=writer)
    if buffer is TensorDictReplayBuffer and lanes and way != "whole":
        rb._set_index_in_td = lambda data, index: None  # TorchRL's cannot put the index of one time step into [E] data
    for seed in range(4):
        data = world.steps(steps, values=values)
        write(rb, data, way)
        assert writer.is_complete
        rows = stored(rb)
        advantage, target = world.estimates(data)
        torch.testing.assert_close(rows["advantage"], advantage)
        torch.testing.assert_close(rows["value_target"], target)
        torch.testing.assert_close(rows["state_value"], world.value(data["observation"]))
        assert torch.equal(rows["next", "observation"], data["next", "observation"]), seed
        expected = world.rows_to_ask(data) + (0 if values else data.numel())
        assert writer.value_rows == expected


@pytest.mark.parametrize("way", WAYS)
def test_only_rows_that_break_off_are_evaluated_by_the_network(way):
    world = make_world(3)
    terminated, truncated = torch.zeros(2, 3, 6, dtype=torch.bool)
    truncated[0, 1] = truncated[0, 3] = True  # two truncations in one lane
    truncated[1, 5] = True  # one at the last step: asked once, not twice
    terminated[2, 2] = terminated[2, 5] = True  # a lane that ends by terminating: not asked
    data = world.steps(6, terminated=terminated, truncated=truncated)
    rb = rollouts(world, 6)
    writer = rb.writer
    write(rb, data, way)
    after = data["next", "observation"]
    expected = torch.stack([after[0, 1], after[0, 3], after[0, 5], after[1, 5]])
    (asked,) = world.network.asked
    assert asked.shape == (4, 2)
    assert {tuple(x.tolist()) for x in asked} == {tuple(x.tolist()) for x in expected}
    assert writer.value_rows == 4  # E + truncations in the middle - lanes that end by terminating
    torch.testing.assert_close(stored(rb)["advantage"], world.estimates(data)[0])


def test_a_change_of_trajectory_breaks_off_what_came_before():
    world = make_world(1)
    none = torch.zeros(1, 6, dtype=torch.bool)
    data = world.steps(6, terminated=none, truncated=none)
    data["collector", "traj_ids"] = torch.tensor([[7, 7, 7, 9, 9, 9]])
    data["observation"][0, 3:] += 5  # the second trajectory does not follow from the first
    data["next", "observation"][0, 3:] += 5
    data["state_value"] = world.value(data["observation"])
    rb = rollouts(world, 6)
    rb.extend(data.clone())
    marked = data.clone()
    marked["next", "done"][0, 2] = marked["next", "truncated"][0, 2] = True
    torch.testing.assert_close(stored(rb)["advantage"], world.estimates(marked)[0])
    assert rb.writer.value_rows == 2


@pytest.mark.parametrize("way", WAYS)
def test_dict_observations_are_the_native_case(way):
    world = make_world(3)

    class Value(torch.nn.Module):
        def forward(self, image, vector):
            return image.float().mean((-1, -2, -3))[..., None] + vector.sum(-1, keepdim=True)

    def dress(x):
        pixels = (x[..., :1, None, None] * 10 + 100).expand(*x.shape[:-1], 1, 2, 2).to(torch.uint8)
        return TensorDict({"image": pixels, "vector": x}, x.shape[:-1])

    keys = [("observation", "image"), ("observation", "vector")]
    network = TensorDictModule(Value(), in_keys=keys, out_keys=["state_value"])
    data = world.steps(8, values=False)
    data["observation"], data["next", "observation"] = dress(data["observation"]), dress(data["next", "observation"])
    rb = rollouts(world, 8, value_network=network)
    write(rb, data, way)
    rows = stored(rb)
    assert rows["observation", "image"].dtype == torch.uint8
    torch.testing.assert_close(rows["state_value"], network(data.clone())["state_value"])
    world.value = lambda observation: Value()(observation["image"], observation["vector"])  # type: ignore[method-assign]
    torch.testing.assert_close(rows["advantage"], world.estimates(data)[0])


def test_several_values_a_step_share_one_done_flag():
    """Agents: values and rewards [E, T, A, 1], done [E, T, 1]."""
    g = torch.Generator().manual_seed(0)
    done = torch.rand(2, 9, 1, generator=g) < 0.2
    after = {"reward": torch.randn(2, 9, 3, 1, generator=g), "done": done, "terminated": done}
    after["state_value"] = torch.randn(2, 9, 3, 1, generator=g)
    value = torch.randn(2, 9, 3, 1, generator=g)
    data = TensorDict({"state_value": value, "next": after}, [2, 9])
    rb = rollouts(None, 9, lanes=2, value_network=None)
    rb.extend(data)
    rows = stored(rb)
    for agent in range(3):
        own = {k: v if k in ("done", "terminated") else v[:, :, agent] for k, v in after.items()}
        alone = rollouts(None, 9, lanes=2, value_network=None)
        alone.extend(TensorDict({"state_value": value[:, :, agent], "next": own}, [2, 9]))
        torch.testing.assert_close(rows["advantage"][:, :, agent], stored(alone)["advantage"])


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
    for n, step in enumerate(world.steps(4).unbind(1), start=1):
        assert rb.writer.is_complete == (n == 1)
        rb.add(step)
        assert (rb.writer.steps, len(rb)) == (n, 2 * n)
        assert rb.storage["advantage"].isnan().all() == (n < 4)
    assert (rb.writer.is_complete, rb.write_count) == (True, 8)
    rb.empty()
    assert (rb.writer.is_complete, rb.writer.steps) == (False, 0)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_failing_network_leaves_the_rollout_as_it_was(steps):
    world = make_world(2)
    rb = rollouts(world, steps)
    writer = rb.writer
    first, second = world.steps(steps, p=0), world.steps(steps, p=0)
    rb.extend(first.clone())
    before = stored(rb)
    world.network.fails = True
    with pytest.raises(RuntimeError, match="the network failed"):
        rb.extend(second.clone())
    for step in second[:, :-1].unbind(1):
        rb.add(step.clone())
    with pytest.raises(RuntimeError, match="the network failed"):
        rb.add(second[:, -1].clone())
    if steps == 1:
        assert (stored(rb) == before).all()
    assert (writer.steps, rb.write_count, writer.is_complete) == (steps - 1 or 1, 2 * steps - 1, steps == 1)
    world.network.fails = False
    index = rb.add(second[:, -1].clone())
    assert index.tolist() == [[steps - 1, 0], [steps - 1, 1]]
    torch.testing.assert_close(stored(rb)["advantage"], world.estimates(second)[0])


def test_values_with_a_gradient_are_stored_without():
    world = make_world(2)
    data = world.steps(6)
    data["state_value"] = world.network(data["observation"])
    assert data["state_value"].requires_grad
    for storage in STORAGES[:2]:
        rb = rollouts(world, 6, storage=storage)
        rb.extend(data.clone())
        assert not any(x.requires_grad for x in stored(rb).values(include_nested=True, leaves_only=True))
        torch.testing.assert_close(stored(rb)["advantage"], world.estimates(data)[0])


@pytest.mark.parametrize("values", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("network", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rewards", [torch.float64, torch.float32, torch.bfloat16])
def test_estimates_have_the_dtype_of_the_values_or_of_the_network(rewards, network, values):
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
        assert {rows[key].dtype for key in ("state_value", "advantage", "value_target")} == {values or network}
        torch.testing.assert_close(rows["advantage"].float(), expected, rtol=0.05, atol=0.1)
        assert rb.writer.value_rows == (data.numel() if values is None else 0)


@pytest.mark.usefixtures("boundaries")
@pytest.mark.parametrize("storage", STORAGES[:2])
@pytest.mark.parametrize("lanes", [1, 2])
def test_the_first_step_of_a_rollout_follows_no_step_of_the_last_one(lanes, storage):
    """Steps of the last rollout that are not replaced yet are no longer stored."""
    world = make_world(lanes)
    rb = rollouts(world, 6, storage=storage)
    trajectories = TrajectoryIndex.of(rb.storage)
    ends = {name: torch.zeros(lanes, 6, dtype=torch.bool) for name in ("terminated", "truncated")}
    for way in WAYS:
        data = world.steps(6, **ends)
        write(rb, data, "whole")
        for count in range(1, 6):
            write(rb, data[:, count - 1 : count], way)
            back, ahead, ended = (each.view(count, lanes) for each in trajectories.reach(torch.arange(count * lanes)))
            steps = torch.arange(count).unsqueeze(-1).expand(count, lanes)
            assert torch.equal(back, steps)
            assert torch.equal(ahead, count - 1 - steps)
            assert not ended.any()
        write(rb, data[:, 5:], way)
