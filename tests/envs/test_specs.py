"""From spaces, specs and environments to rows, and that data of these environments fit
them."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase, GymEnv, SerialEnv, StepCounter, TransformedEnv

import rlbuf_td as td
from rlbuf_td.envs.specs import transition_schema
from tests.catalogue import assert_same
from tests.environments import SPACES
from tests.storages.test_memory import resident

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torchrl", "ignore::UserWarning:torchrl"
)


def leaves(data) -> dict[Any, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        key: (data[key].dtype, tuple(data[key].shape)) for key in data.keys(True, True)
    }


CATALOGUE = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(-1, 1, (2, 2), np.float16),
    spaces.Box(0, 255, (4, 4, 3), np.uint8),
    spaces.Box(-1, 1, (), np.float32),
    spaces.Discrete(5, start=-2),
    spaces.Discrete(5, dtype=np.int32),
    spaces.MultiDiscrete([[2, 3], [4, 5]], dtype=np.int16),
    spaces.MultiBinary([2, 3]),
    spaces.Dict(
        a=spaces.Discrete(2),
        b=spaces.Dict(c=spaces.Box(0, 1, (1,)), d=spaces.MultiBinary(2)),
    ),
    spaces.Tuple(
        (
            spaces.Discrete(2),
            spaces.Dict(x=spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.Discrete(3)))),
        )
    ),
    *SPACES.values(),
]


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("space", CATALOGUE, ids=str)
def test_samples_of_a_space_have_its_schema_as_observations_and_as_actions(
    space, num_envs
):
    space.seed(0)
    batched, reward, ends = space, 0.0, (False, True)
    if num_envs is not None:
        batched = gymnasium.vector.utils.batch_space(space, num_envs)
        batched.seed(0)
        reward = np.zeros(num_envs)
        ends = np.array([True, False, False]), np.array([False, True, False])
    first, action, second = (batched.sample() for _ in range(3))
    step = td.make_transition(first, action, reward, second, *ends)
    schema = transition_schema(space, space, num_envs)
    assert all(schema.get(key).device.type == "meta" for key in schema.keys(True, True))
    assert leaves(step) == leaves(schema)
    assert step.batch_size == schema.batch_size
    outcome = step["next"]
    assert torch.equal(outcome["done"], outcome["terminated"] | outcome["truncated"])
    if num_envs is None:
        observation = td.schema_of(space)
        assert observation.batch_size == torch.Size([])
        assert leaves(observation).items() <= leaves(schema["next"]).items()
    rb = td.ReplayBuffer.from_spaces(space, space, 30, num_envs=num_envs)
    rb.add(step)
    assert leaves(rb.storage[0]) == leaves(step)


def test_specs_give_what_their_values_are():
    observation = Composite(
        pixels=Bounded(0, 255, (3, 4, 4), dtype=torch.uint8),
        inner=Composite(x=Unbounded((2,))),
    )
    schema = transition_schema(observation, OneHot(4), 2)
    assert leaves(schema)["pixels"] == (torch.uint8, (2, 3, 4, 4))
    assert leaves(schema)["next", "inner", "x"] == (torch.float32, (2, 2))
    assert leaves(schema)["action"] == (torch.bool, (2, 4))
    named = transition_schema(
        Unbounded((2,)), Composite(action=Categorical(4), speed=Unbounded((1,)))
    )
    assert leaves(named)["action"] == (torch.int64, ())
    assert leaves(named)["speed"] == (torch.float32, (1,))
    assert leaves(td.schema_of(observation)) == leaves(observation.zero())


def test_extras_are_added_or_replace_an_entry():
    extras = {
        "log_prob": np.zeros(3, np.float32),
        "next": {"reward": torch.zeros(3, 1, dtype=torch.float64)},
    }
    schema = td.schema_of(
        transition_schema(spaces.Discrete(2), spaces.Discrete(2), 3), extras=extras
    )
    assert leaves(schema)["log_prob"] == (torch.float32, (3,))
    assert leaves(schema)["next", "reward"] == (torch.float64, (3, 1))


def limited_cartpole() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(20))


def torchrl_env(kind: str) -> EnvBase:
    return limited_cartpole() if kind == "single" else SerialEnv(2, limited_cartpole)


@pytest.mark.parametrize(
    ("kind", "how", "with_policy"),
    [
        ("single", "extend", True),
        ("vectorised", "extend", False),
        ("single", "whole batches", False),
        ("vectorised", "step by step", True),
    ],
)
def test_what_a_collector_gives_fits_the_rows_of_its_environment(
    kind, how, with_policy
):
    env = torchrl_env(kind)
    rb = td.ReplayBuffer.from_env(env, 200, batch_size=4)
    keys = set(leaves(rb.storage.all_rows().view()))
    actions, policy = env.full_action_spec["action"], None
    if with_policy:
        policy = TensorDictModule(
            lambda obs: (actions.rand(), obs.sum(-1)),
            ["observation"],
            ["action", "value"],
        )
    written: dict[str, Any] = {}
    if how != "extend":
        written = {"replay_buffer": rb, "extend_buffer": how == "whole batches"}
    collector = Collector(
        env,
        policy,
        frames_per_batch=20,
        total_frames=40,
        auto_register_policy_transforms=False,
        **written,
    )
    for data in collector:
        if how == "extend":
            rb.extend(data)
    collector.shutdown()
    stored = leaves(rb.sample())
    assert keys | {("collector", "traj_ids")} <= set(stored)
    assert ("value" in stored) is with_policy
    with pytest.raises(td.SchemaError, match="is missing"):
        rb.add(rb.storage[0].exclude("action"))


def test_a_rollout_buffer_is_made_for_an_environment():
    env = torchrl_env("vectorised")
    rollout = td.RolloutBuffer.from_env(env, 10, batch_size=5)
    assert (rollout.num_envs, rollout.storage.max_size) == (2, 20)
    assert td.RolloutBuffer.from_env(torchrl_env("single"), 10).num_envs is None
    data = env.rollout(10, break_when_any_done=False)
    data["state_value"] = data["next", "state_value"] = torch.zeros(2, 10, 1)
    rollout.extend(data)
    assert sum(len(batch) for batch in rollout) == 20


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in RAM")
def test_ten_million_rows_touch_only_what_is_written():
    def begun(capacity: int) -> td.ReplayBuffer:
        env = gymnasium.make_vec("CartPole-v1", num_envs=16)
        rb = td.ReplayBuffer.from_env(env, capacity)
        steps = torch.zeros_like(rb.storage.all_rows().view()[:100], device="cpu")
        rb.extend(steps.transpose(0, 1))
        return rb

    begun(10_000)  # what is imported and compiled first takes memory, too
    before = resident()
    rb = begun(10_000_000)
    assert resident() - before < 50_000_000
    assert rb.storage.nbytes > 400_000_000
    assert len(rb) == 1_600


def example(n: int = 4, **more: torch.Tensor) -> TensorDict:
    return TensorDict({"x": torch.arange(3.0 * n).view(n, 3), **more}, [n])


@pytest.mark.parametrize("where", ["memory", "file"])
def test_the_first_write_to_rows_that_are_not_shared_may_add_keys(where, tmp_path):
    place = {"scratch_dir": tmp_path / "rows"} if where == "file" else {}
    rb = td.ReplayBuffer.from_schema(example()[0], 10, **place)
    assert rb.storage.is_reserved
    rows = example(4, y=torch.ones(4, 2, dtype=torch.int16))
    rb.extend(rows)
    assert not rb.storage.is_reserved
    assert_same(rb.storage[:], rows)


def test_reserved_rows_with_other_keys_than_saved_ones_stay_reserved():
    saved = td.ReplayBuffer(storage=td.PackedStorage(10))
    saved.extend(example())
    rb = td.ReplayBuffer.from_schema(example(1, z=torch.ones(1))[0], 10)
    with pytest.raises(td.SchemaError, match="other keys"):
        rb.load_state_dict(saved.state_dict())
    assert rb.storage.is_reserved


def test_arrays_that_torch_cannot_share_are_copied():
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    extras = {"log_prob": -1.0, "next": {"info": {"x": (1, 2.0)}}}
    big_endian = np.arange(3, dtype=">f8")
    step = td.make_transition(
        frozen, np.arange(4)[::-1], 0, big_endian, False, False, **extras
    )
    assert step["next", "reward"].dtype == torch.float32
    assert step["observation"].tolist() == [0, 1, 2]
    assert step["next", "observation"].tolist() == [0, 1, 2]
    assert step["action"].tolist() == [3, 2, 1, 0]
    assert step["log_prob"].dtype is torch.float32
    assert step["next", "info", "x", "1"] == 2.0


def test_a_dict_with_an_observation_is_the_observation():
    first, second = np.ones(3), np.zeros(3)
    named = {"observation": first}, {"observation": second}
    reward = torch.zeros(1, dtype=torch.float64)
    step = td.make_transition(first, 0, reward, second, False, False)
    assert step["next", "reward"].dtype == torch.float64
    assert_same(step, td.make_transition(named[0], 0, reward, named[1], False, False))


@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_loop_without_trajectory_ids_writes_to_shared_rows_of_spaces(num_envs):
    space = gymnasium.spaces.Box(-1, 1, (3,))
    rb = td.ReplayBuffer.from_spaces(space, space, 20, num_envs=num_envs, shared=True)
    lanes = () if num_envs is None else (num_envs,)
    zeros, over = np.zeros((*lanes, 3), np.float32), np.zeros(lanes, bool)
    for _ in range(3):
        rb.add(td.make_transition(zeros, zeros, np.zeros(lanes), zeros, over, over))
    assert len(rb) == 3 * (num_envs or 1)
    assert rb["collector", "traj_ids"].eq(0).all()


class Mine(td.ReplayBuffer):
    pass


@pytest.mark.parametrize(
    "cls", [td.ReplayBuffer, Mine, td.RolloutBuffer, td.ExperienceQueue]
)
def test_constructors_return_the_class_on_which_they_are_called(cls):
    env = gymnasium.make("CartPole-v1")
    spaces = env.observation_space, env.action_space
    assert type(cls.from_env(env, 10)) is cls
    assert type(cls.from_spaces(*spaces, 10)) is cls
    assert type(cls.from_schema(td.schema_of(env), 10)) is cls
