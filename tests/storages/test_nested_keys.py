"""A nested Dict observation is the native case of recorders, buffers and hindsight; keys
may be lists of strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, GymWrapper, SerialEnv

import rlbuf_td as td
from rlbuf_td import (
    GymnasiumRecorder,
    HindsightSampler,
    ProportionalSampler,
    ReplayBuffer,
    gymnasium_reward_fn,
)
from tests.catalogue import assert_same
from tests.environments import Nested

pytestmark = pytest.mark.filterwarnings(
    *(
        f"ignore::{kind}:torchrl"
        for kind in ("DeprecationWarning", "UserWarning", "FutureWarning")
    ),
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
)
PARTS = {
    "observation": torch.float32,
    ("camera", "image"): torch.uint8,
    ("body", "vector"): torch.float32,
    ("body", "mode"): torch.int64,
    ("body", "mask"): torch.bool,
}


def test_a_recorded_nested_dict_comes_back_part_by_part():
    env = gymnasium.vector.SyncVectorEnv(
        [lambda: Nested(gymnasium.make("CartPole-v1"))] * 2
    )
    rb = ReplayBuffer.from_env(env, 1_000, batch_size=64)
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    for _ in range(100):
        recorder.step(env.action_space.sample())
    batch = rb.sample()
    for rows in (batch, batch["next"]):
        for key, dtype in PARTS.items():
            assert rows[key].dtype == dtype, key
        # each part is that of its own row
        image, observation = rows["camera", "image"], rows["observation"]
        number = (observation[..., 0].abs() * 1_000).long() % 256
        assert torch.equal(image[..., 0, 0, 0].long(), number)


class Goals(gymnasium.ObservationWrapper):
    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        place = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        parts: Any = dict(vars(env.observation_space)["spaces"])
        self.observation_space = gymnasium.spaces.Dict(
            parts | {"desired_goal": place, "achieved_goal": place}
        )

    def observation(self, observation: Any) -> Any:
        goals = {
            "desired_goal": np.ones(1, np.float32),
            "achieved_goal": observation["observation"][:1],
        }
        return observation | goals

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -np.abs(achieved - desired)[:, 0]


@pytest.mark.parametrize("lanes", [1, 3])
def test_hindsight_relabels_only_the_goals_of_a_nested_dict(lanes):
    def make() -> EnvBase:
        return GymWrapper(
            Goals(Nested(gymnasium.make("CartPole-v1"))),
            categorical_action_encoding=True,
        )

    env = SerialEnv(lanes, make) if lanes > 1 else make()
    reward_fn = gymnasium_reward_fn(Goals(Nested(gymnasium.make("CartPole-v1"))))
    sampler = HindsightSampler(ProportionalSampler(600), reward_fn, her_ratio=0.5)
    rb = ReplayBuffer.from_env(
        env, 600, sampler=sampler, batch_size=64, dim_extend=int(lanes > 1)
    )
    for data in Collector(env, frames_per_batch=60, total_frames=300):
        rb.extend(data)
    batch = rb.sample()
    stored = rb.storage.get(
        tuple(batch.get("index").T) if lanes > 1 else batch["index"]
    )
    new = batch["relabeled"]
    assert new.any()
    assert not new.all()
    assert (batch["desired_goal"][~new] == 1).all()
    reached = rb.chronological(flat=True)["next", "achieved_goal"]
    assert torch.isin(batch["desired_goal"][new], reached).all()
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).abs()
    assert torch.equal(batch["next", "reward"][new], -distance[new])
    untouched = [
        "observation",
        "camera",
        "body",
        ("next", "observation"),
        ("next", "camera"),
        ("next", "body"),
    ]
    assert_same(batch.select(*untouched), stored.select(*untouched))
    for key, dtype in PARTS.items():
        assert batch[key].dtype == batch["next"][key].dtype == dtype, key


def keys_of(key: Callable[[str], Any]) -> list[Any]:
    """Return the keys that parts keep; ``key`` makes a key of names with dots."""
    plain = td.UniformSampler()
    hindsight: Any = {
        "goal_key": key("a.wanted"),
        "achieved_goal_key": key("a.goal"),
        "reward_key": key("next.r"),
    }
    relabel, index = (
        td.HindsightSampler(plain, torch.zeros_like, **hindsight),
        td.PackedStorage(4),
    )
    episodes = td.EpisodeSampler(reward_key=key("next.r"), init_key=key("a.is_init"))
    lanes = ReplayBuffer(
        storage=td.PackedStorage(4, ndim=2, lanes=2), lane_key=key("a.env")
    )
    writer = td.RolloutWriter(
        value_key=key("a.value"), advantage_key=key("a.advantage")
    )
    return [
        td.NStepSampler(plain, 3, 0.9, reward_key=key("next.r")).reward_key,
        td.SequenceSampler(plain, 2, init_key=key("a.is_init")).flag_keys,
        (
            episodes.reward_key,
            episodes.init_key,
            relabel.goal_key,
            relabel.achieved_goal_key,
            relabel.reward_key,
        ),
        (writer.value_key, lanes.lane_key),
        ReplayBuffer(
            sampler=ProportionalSampler(20), priority_key=key("td.error")
        ).priority_key,
        td.PackedStorage(
            20, share_next=[key("a.obs")], frames={"pixels": 4}
        ).dedup_options,
        td.TrajectoryIndex(index, done_key=key("a.end"), traj_key=key("a.id")).keys,
    ]


def test_a_list_of_strings_is_a_nested_key():
    expected = keys_of(lambda names: tuple(names.split(".")))
    for key in (
        lambda names: names.split("."),
        lambda names: OmegaConf.create(names.split(".")),
    ):
        assert keys_of(key) == expected
