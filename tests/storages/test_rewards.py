"""Rewards of several numbers in every part that adds or replaces them, and whole numbers that are never rounded."""

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
    RolloutBuffer,
    SchemaError,
    UniformSampler,
)
from rlbuf_td.functional import generalized_advantage_estimate, td_lambda_return_estimate
from tests.environments import Walk, rewarded

GAMMA, LMBDA, STEPS, LANES, KINDS = 0.9, 0.8, 24, 2, 3
LARGE = 2**24 + 1  # the smallest whole number that float32 does not have


class EveryRow(UniformSampler):
    """Draws all rows in order."""

    def draw(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        return torch.arange(batch_size), {}


def recorded(rb: ReplayBuffer, env: Any, steps: int = STEPS, **extras: Any) -> ReplayBuffer:
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=3)
    env.action_space.seed(3)
    for _ in range(steps):
        recorder.step(env.action_space.sample(), **extras)
    return rb


def ends_of(rows: TensorDict) -> torch.Tensor:
    """Return whether each row, ``[T, E]``, is the last of its trajectory."""
    ids, ends = rows["collector", "traj_ids"], rows["next", "done"][..., 0].clone()
    ends[:-1] |= ids[1:] != ids[:-1]
    return ends


def test_n_step_sums_of_reward_vectors_are_those_of_each_number(device):
    env = rewarded((KINDS,), LANES, declared=True)
    sampler = NStepSampler(EveryRow(), 3, GAMMA)
    rows = recorded(rb := ReplayBuffer.from_env(env, STEPS * LANES, sampler=sampler), env).chronological()
    batch, ends = rb.sample(STEPS * LANES).reshape(STEPS, LANES), ends_of(rows)
    assert ends.any()
    for lane in range(LANES):
        for t in range(STEPS):
            last = next((k for k in range(t, min(t + 3, STEPS) - 1) if ends[k, lane]), min(t + 3, STEPS) - 1)
            reward = rows["next", "reward"][t : last + 1, lane].double()
            total = (reward * GAMMA ** torch.arange(len(reward), dtype=torch.float64)[:, None]).sum(0)
            torch.testing.assert_close(batch["next", "reward"][t, lane].double(), total, rtol=1e-6, atol=1e-6)
            assert batch["steps_to_next_obs"][t, lane].tolist() == [last - t + 1]
            assert torch.equal(batch["next", "observation"][t, lane], rows["next", "observation"][last, lane])


@pytest.mark.parametrize("lanes", [0, LANES])
def test_advantages_of_reward_vectors_are_those_of_each_number(lanes):
    env, lead = rewarded((KINDS,), lanes, declared=True), (lanes,) if lanes else ()

    def critic(data: Any) -> Any:  # one value for each number of the reward
        data["state_value"] = torch.cat([data["observation"], data["observation"][..., :1]], -1) / 7
        return data

    critic.in_keys, critic.out_keys = ["observation"], ["state_value"]  # type: ignore[attr-defined]
    critic.parameters = lambda: iter(())  # type: ignore[attr-defined]
    rollout: Any = RolloutBuffer.from_env(env, STEPS, gamma=GAMMA, lmbda=LMBDA, value_network=critic)
    recorder = GymnasiumRecorder(rollout, env)
    recorder.reset(seed=3)
    for _ in range(STEPS):
        _, _, *flags, _ = recorder.step(np.ones(lead, int) if lanes else 1)
        if not lanes and any(flags):
            recorder.reset()
    rows = rollout.storage[:].reshape(STEPS, -1)
    ends = ends_of(rows)
    assert rows["advantage"].shape == rows["value_target"].shape == (STEPS, max(1, lanes), KINDS)
    value, following = (critic(part.select("observation").clone())["state_value"] for part in (rows, rows["next"]))
    value, following, reward = value.double(), following.double(), rows["next", "reward"].double()
    expected, carried = torch.zeros_like(value), torch.zeros_like(value[0])
    for t in reversed(range(STEPS)):
        alive = ~rows["next", "terminated"][t]
        delta = reward[t] + GAMMA * following[t] * alive - value[t]
        carried = expected[t] = delta + GAMMA * LMBDA * carried * ~ends[t][:, None]
    torch.testing.assert_close(rows["advantage"].double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(rows["value_target"].double(), expected + value, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_relabelled_reward_vectors_are_those_of_the_new_goal(n_steps, device):
    env = rewarded((KINDS,), LANES, declared=True)

    def reward_fn(batch: Any) -> torch.Tensor:
        distance = (batch["next", "observation"] - batch["goal"]).abs()
        return torch.cat([distance, -torch.ones(len(batch), 1)], 1)

    inner: Any = HindsightSampler(
        EveryRow(), reward_fn, her_ratio=1.0, strategy="final", goal_key="goal", achieved_goal_key="observation"
    )
    sampler = NStepSampler(inner, n_steps, GAMMA) if n_steps > 1 else inner
    goal = np.full((LANES, 2), -5, np.float32)
    rb = ReplayBuffer.from_env(env, STEPS * LANES, sampler=sampler, extras={"goal": torch.from_numpy(goal)})
    rows = recorded(rb, env, goal=goal).chronological()
    batch, ends = rb.sample(STEPS * LANES).reshape(STEPS, LANES), ends_of(rows)
    ends[-1] = True
    for lane in range(LANES):
        for t in range(STEPS):
            final = next(k for k in range(t, STEPS) if ends[k, lane])
            goal_now = rows["next", "observation"][final, lane]
            assert torch.equal(batch["goal"][t, lane], goal_now)
            total = torch.zeros(KINDS, dtype=torch.float64)
            for k in range(min(n_steps, final - t + 1)):
                distance = (rows["next", "observation"][t + k, lane] - goal_now).abs().double()
                total += GAMMA**k * torch.cat([distance, -torch.ones(1, dtype=torch.float64)])
            torch.testing.assert_close(batch["next", "reward"][t, lane].double(), total, rtol=1e-6, atol=1e-6)


class Rich(Walk):
    """Gives one reward in every step."""

    reward: Any = LARGE

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, self.reward, *rest


ROUNDED = [LARGE, float(LARGE), np.int64(LARGE), np.float64(-LARGE), np.array([1, LARGE])]


@pytest.mark.parametrize("reward", ROUNDED, ids=lambda value: type(value).__name__)
def test_whole_rewards_that_float32_lacks_are_refused_or_kept_in_float64(reward):
    env = Rich()
    env.reward = reward
    shape = np.shape(reward) or (1,)
    rb = ReplayBuffer.from_env(env, 10)
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
    with pytest.raises(SchemaError, match="is 9007199254740993, which float64 changes to 9007199254740992: scale it"):
        recorder.step(0)
    rb = ReplayBuffer.from_env(env, 10)
    recorder, kept = GymnasiumRecorder(rb, env), [2.0**24 + 0.3, 1e300, 2**30, float("inf")]
    recorder.reset(seed=0)
    for env.reward in kept[:1] + kept[2:]:
        recorder.step(0)
        recorder.reset()
    assert rb.storage["next", "reward"].flatten().tolist() == [2.0**24, 2**30, float("inf")]


def test_relabelled_whole_rewards_are_not_rounded(device):
    def reward_fn(batch: Any) -> torch.Tensor:
        return torch.full((len(batch),), LARGE)

    goals = {"desired_goal": torch.zeros(4, 1), "next": {"achieved_goal": torch.ones(4, 1)}}
    flags = {"done": torch.zeros(4, 1, dtype=torch.bool)}
    for dtype in (torch.float32, torch.float64):
        rb = ReplayBuffer(storage=PackedStorage(4), sampler=HindsightSampler(UniformSampler(), reward_fn), batch_size=8)
        after = goals["next"] | flags | {"reward": torch.zeros(4, 1, dtype=dtype)}
        rb.extend(TensorDict(goals | {"next": after}, [4]))
        if dtype is torch.float32:
            with pytest.raises(SchemaError, match=r"'reward' is 16777217, .*: store rewards in float64"):
                rb.sample()
        else:
            rewards, relabelled = (batch := rb.sample())["next", "reward"][:, 0], batch["relabeled"]
            assert rewards[relabelled].tolist() == [LARGE] * int(relabelled.sum())


def test_estimates_add_whole_rewards_before_they_round():
    reward, one = torch.tensor([[[LARGE], [LARGE]]]), torch.full((1, 2, 1), 2.0**24)
    done = torch.tensor([[[True], [True]]])
    advantage, _ = generalized_advantage_estimate(GAMMA, LMBDA, one, one, reward, done)
    assert advantage.flatten().tolist() == [1.0, 1.0]
    assert advantage.dtype is torch.float32
    returns = td_lambda_return_estimate(1.0, 1.0, -one, reward, torch.zeros_like(done), torch.zeros_like(done))
    assert returns.flatten().tolist() == [LARGE + 1.0, 1.0]
