"""Rewards of several numbers in every part that adds or replaces them, and whole
numbers that are never rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    GymnasiumRecorder,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ReplayBuffer,
    SchemaError,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.functional import (
    generalized_advantage_estimate,
    td_lambda_return_estimate,
)
from tests.environments import Walk

GAMMA, LMBDA = 0.9, 0.8
LARGE = 2**24 + 1  # the smallest whole number that float32 does not have


def distances(batch: Any) -> torch.Tensor:
    apart = (batch["next", "achieved_goal"] - batch["desired_goal"]).abs()
    return torch.cat([apart, -apart, torch.ones_like(apart)], -1)


def hindsight(reward_fn: Any) -> HindsightSampler:
    return HindsightSampler(UniformSampler(), reward_fn)


WRAPPERS: dict[str, Any] = {
    "n-step": lambda reward_fn: NStepSampler(UniformSampler(), 3, GAMMA),
    "hindsight": hindsight,
    "n-step of hindsight": lambda reward_fn: NStepSampler(
        hindsight(reward_fn), 3, GAMMA
    ),
    "sequence of both": lambda reward_fn: SequenceSampler(
        NStepSampler(hindsight(reward_fn), 3, GAMMA), 4
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_number_of_a_reward_is_treated_as_a_reward_alone(wrapper):
    step = torch.arange(48).view(2, 24)
    seen, done = torch.sin(step.float())[..., None], (step % 7 == 6)[..., None]
    after = {
        "achieved_goal": seen,
        "done": done,
        "terminated": done,
        "reward": torch.randn(2, 24, 3),
    }
    rows = TensorDict(
        {"desired_goal": seen + 1, "is_init": done, "next": after}, [2, 24]
    )
    found = []
    for part in (slice(0, 3), slice(0, 1), slice(1, 2), slice(2, 3)):
        sampler = WRAPPERS[wrapper](
            lambda batch, part=part: distances(batch)[..., part]
        )
        generator = torch.Generator().manual_seed(0)
        rb = ReplayBuffer(
            storage=PackedStorage(48, ndim=2),
            sampler=sampler,
            batch_size=64,
            generator=generator,
        )
        data = rows.clone()
        data["next", "reward"] = rows["next", "reward"][..., part].clone()
        rb.extend(data)
        found.append(torch.stack([rb.sample()["next", "reward"] for _ in range(3)]))
    assert torch.equal(found[0], torch.cat(found[1:], -1))


class Rich(Walk):
    """Gives one reward in every step."""

    reward: Any = LARGE

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, self.reward, *rest


ROUNDED = [
    LARGE,
    float(LARGE),
    np.int64(LARGE),
    np.float64(-LARGE),
    np.array([1, LARGE]),
]


@pytest.mark.parametrize("reward", ROUNDED, ids=lambda value: type(value).__name__)
def test_whole_rewards_that_float32_lacks_are_refused_or_kept_in_float64(reward):
    env = Rich()
    env.reward = reward
    shape = np.shape(reward) or (1,)
    rb = ReplayBuffer.from_env(
        env, 10, extras={"next": {"reward": np.zeros(shape, np.float32)}}
    )
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    words = r"\('next', 'reward'\) is -?16777217, which float32 changes to -?16777216: store it in float64.*extras"
    with pytest.raises(SchemaError, match=words):
        recorder.step(0)
    assert not len(rb)
    rb = ReplayBuffer.from_env(env, 10, extras={"next": {"reward": np.zeros(shape)}})
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    recorder.step(0)
    assert rb.storage["next", "reward"][0].tolist() == np.reshape(reward, -1).tolist()


def test_a_whole_number_beyond_float64_is_refused_and_fractions_are_rounded():
    env = Rich()
    rb = ReplayBuffer.from_env(env, 10, extras={"next": {"reward": np.zeros(1)}})
    recorder = GymnasiumRecorder(rb, env)
    env.reward = 2**53 + 1
    recorder.reset(seed=0)
    with pytest.raises(
        SchemaError,
        match="is 9007199254740993, which float64 changes to 9007199254740992: scale it",
    ):
        recorder.step(0)
    rb = ReplayBuffer.from_env(env, 10)
    recorder, kept = (
        GymnasiumRecorder(rb, env),
        [2.0**24 + 0.3, 1e300, 2**30, float("inf")],
    )
    recorder.reset(seed=0)
    for env.reward in kept[:1] + kept[2:]:
        recorder.step(0)
        recorder.reset()
    assert rb.storage["next", "reward"].flatten().tolist() == [
        2.0**24,
        2**30,
        float("inf"),
    ]


def test_relabelled_whole_rewards_are_not_rounded():
    def reward_fn(batch: Any) -> torch.Tensor:
        return torch.full((len(batch),), LARGE)

    goals: dict[str, Any] = {
        "desired_goal": torch.zeros(4, 1),
        "next": {"achieved_goal": torch.ones(4, 1)},
    }
    flags = {"done": torch.zeros(4, 1, dtype=torch.bool)}
    for dtype in (torch.float32, torch.float64):
        rb = ReplayBuffer(
            storage=PackedStorage(4),
            sampler=HindsightSampler(UniformSampler(), reward_fn),
            batch_size=8,
        )
        after = goals["next"] | flags | {"reward": torch.zeros(4, 1, dtype=dtype)}
        rb.extend(TensorDict(goals | {"next": after}, [4]))
        if dtype is torch.float32:
            with pytest.raises(
                SchemaError, match=r"'reward' is 16777217, .*: store rewards in float64"
            ):
                rb.sample()
        else:
            rewards, relabelled = (
                (batch := rb.sample())["next", "reward"][:, 0],
                batch["relabeled"],
            )
            assert rewards[relabelled].tolist() == [LARGE] * int(relabelled.sum())


def test_estimates_add_whole_rewards_before_they_round():
    reward, one = torch.tensor([[[LARGE], [LARGE]]]), torch.full((1, 2, 1), 2.0**24)
    done = torch.tensor([[[True], [True]]])
    advantage, _ = generalized_advantage_estimate(GAMMA, LMBDA, one, one, reward, done)
    assert advantage.flatten().tolist() == [1.0, 1.0]
    assert advantage.dtype is torch.float32
    returns = td_lambda_return_estimate(
        1.0, 1.0, -one, reward, torch.zeros_like(done), torch.zeros_like(done)
    )
    assert returns.flatten().tolist() == [LARGE + 1.0, 1.0]
