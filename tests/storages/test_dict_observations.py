"""A Dict observation is the native case: demos, buffers and hindsight run on a nested one."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, GymWrapper, SerialEnv

from rlbuf_td import (
    GymnasiumRecorder,
    HindsightSampler,
    ProportionalSampler,
    ReplayBuffer,
    RolloutBuffer,
    gymnasium_reward_fn,
)
from rlbuf_td.__main__ import main
from rlbuf_td.cli.demos import dqn
from tests.catalogue import assert_same
from tests.environments import Nested

pytestmark = pytest.mark.filterwarnings(
    *(f"ignore::{kind}:torchrl" for kind in ("DeprecationWarning", "UserWarning", "FutureWarning")),
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
)
NAME = "NestedCartPole-v1"
PARTS = {
    "observation": torch.float32,
    ("camera", "image"): torch.uint8,
    ("body", "vector"): torch.float32,
    ("body", "mode"): torch.int64,
    ("body", "mask"): torch.bool,
}


@pytest.fixture(autouse=True)
def _registered():
    gymnasium.register(NAME, entry_point=lambda: Nested(gymnasium.make("CartPole-v1")), reward_threshold=475.0)
    yield
    del gymnasium.registry[NAME]


@pytest.mark.parametrize(
    ("algo", "buffer", "steps"), [("dqn", ReplayBuffer, "1280"), ("ppo", RolloutBuffer, "1024")], ids=["dqn", "ppo"]
)
def test_the_demos_learn_from_a_nested_dict(algo, buffer, steps, tmp_path, monkeypatch, capsys):
    batches: list[TensorDict] = []
    sample, iterate = ReplayBuffer.sample, RolloutBuffer.__iter__

    def noted(batch: TensorDict) -> TensorDict:
        batches.append(batch)
        return batch

    monkeypatch.setattr(ReplayBuffer, "sample", lambda rb: noted(sample(rb)))
    monkeypatch.setattr(RolloutBuffer, "__iter__", lambda rb: map(noted, iterate(rb)))
    monkeypatch.setattr(dqn, "UPDATES", 2)
    assert main(["demo", "--algo", algo, "--env", NAME, "--steps", steps, "--out", str(tmp_path)]) == 0
    assert "mean return of the final policy" in capsys.readouterr().out
    assert batches
    for key, dtype in PARTS.items():
        assert batches[-1][key].dtype == dtype, key
    image, observation = batches[-1]["camera", "image"], batches[-1]["observation"]
    number = (observation[..., 0].abs() * 1_000).long() % 256  # each part is that of its own row
    assert torch.equal(image[..., 0, 0, 0].long(), number)


@pytest.mark.parametrize("lanes", [None, 3])
def test_batches_of_a_nested_dict_are_numpy_arrays_on_demand(lanes):
    env: Any = gymnasium.make(NAME) if lanes is None else gymnasium.make_vec(NAME, num_envs=lanes)
    rb = ReplayBuffer.from_env(env, 90, batch_size=8)
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    for _ in range(5):
        recorder.step(env.action_space.sample())
    for batch, shape in (
        (rb.sample(), (8,)),
        (rb.last(4), (4,) if lanes is None else (4, lanes)),
        (rb.last(4, flat=True), (4 * (lanes or 1),)),
        (rb.chronological(), (5,) if lanes is None else (5, lanes)),
        (rb.chronological(flat=True), (5 * (lanes or 1),)),
    ):
        assert batch.shape == shape
        arrays = batch.numpy()
        assert type(arrays["body"]["mask"]) is type(arrays["next"]["camera"]["image"]) is np.ndarray
        assert np.array_equal(arrays["body"]["mask"], batch["body", "mask"].numpy())
        assert np.array_equal(arrays["next"]["camera"]["image"], batch["next", "camera", "image"].numpy())
    assert_same(rb.last(4, flat=True), rb.last(4).reshape(-1))


class Goals(gymnasium.ObservationWrapper):
    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        place = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        parts = dict(env.observation_space.spaces)
        self.observation_space = gymnasium.spaces.Dict(parts | {"desired_goal": place, "achieved_goal": place})

    def observation(self, observation: Any) -> Any:
        goals = {"desired_goal": np.ones(1, np.float32), "achieved_goal": observation["observation"][:1]}
        return observation | goals

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -np.abs(achieved - desired)[:, 0]


@pytest.mark.parametrize("lanes", [1, 3])
def test_hindsight_relabels_only_the_goals_of_a_nested_dict(lanes):
    def make() -> EnvBase:
        return GymWrapper(Goals(Nested(gymnasium.make("CartPole-v1"))), categorical_action_encoding=True)

    env = SerialEnv(lanes, make) if lanes > 1 else make()
    reward_fn = gymnasium_reward_fn(Goals(Nested(gymnasium.make("CartPole-v1"))))
    sampler = HindsightSampler(ProportionalSampler(600), reward_fn, her_ratio=0.5)
    rb = ReplayBuffer.from_env(env, 600, sampler=sampler, batch_size=64, dim_extend=int(lanes > 1))
    for data in Collector(env, frames_per_batch=60, total_frames=300):
        rb.extend(data)
    batch = rb.sample()
    stored = rb.storage.get(tuple(batch["index"].T) if lanes > 1 else batch["index"])
    new = batch["relabeled"]
    assert new.any()
    assert not new.all()
    assert (batch["desired_goal"][~new] == 1).all()
    reached = rb.chronological(flat=True)["next", "achieved_goal"]
    assert torch.isin(batch["desired_goal"][new], reached).all()
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).abs()
    assert torch.equal(batch["next", "reward"][new], -distance[new])
    untouched = ["observation", "camera", "body", ("next", "observation"), ("next", "camera"), ("next", "body")]
    assert_same(batch.select(*untouched), stored.select(*untouched))
    for key, dtype in PARTS.items():
        assert batch[key].dtype == batch["next"][key].dtype == dtype, key
