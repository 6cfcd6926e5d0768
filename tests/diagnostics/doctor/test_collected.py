"""Buffers that are filled rightly, by TorchRL's collectors and by the recorder, give no finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, EnvBase, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv, VecNormV2

from rlbuf_td import PackedStorage, ReplayBuffer, RolloutBuffer, make_transition
from rlbuf_td.diagnostics.doctor import check

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl", "ignore::UserWarning:torchrl")


def cartpole() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(max_steps=30), RewardSum()))


def normalised_pendulum() -> EnvBase:
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(StepCounter(max_steps=40), VecNormV2(in_keys=["observation"])))


@cache
def collected(make: Callable[[], EnvBase], lanes: int, frames: int = 900, **settings: Any) -> tuple[TensorDict, ...]:
    torch.manual_seed(0)
    env = SerialEnv(lanes, make) if lanes else make()
    env.set_seed(0)
    collector = Collector(env, None, frames_per_batch=60, total_frames=frames, **settings)
    batches = tuple(data.clone() for data in collector)
    collector.shutdown()
    return batches


def fill(rb: Any, batches: Iterable[TensorDict], *, flat: bool = False) -> Any:
    for data in batches:
        rb.extend(data.reshape(-1).clone() if flat else data.clone())
    return rb


@pytest.mark.parametrize(
    ("make", "layout", "parts", "settings"),
    [
        (cartpole, "lanes", "ours", {}),
        (cartpole, "single", "theirs", {}),
        (normalised_pendulum, "flat", "ours", {}),
        (normalised_pendulum, "lanes", "theirs", {}),
        (cartpole, "lanes", "ours", {"reset_at_each_iter": True}),
    ],
)
def test_what_a_collector_fills_is_healthy(make: Any, layout: str, parts: str, settings: dict[str, Any]) -> None:
    ndim, batches = 2 if layout == "lanes" else 1, collected(make, 0 if layout == "single" else 3, **settings)
    for capacity, few in ((600, batches), (1_200, batches[:1])):
        rb: Any = ReplayBuffer(storage=PackedStorage(capacity, ndim=ndim))
        if parts == "theirs":
            rb = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity, ndim=ndim))
        fill(rb, few, flat=layout == "flat")
        report = check(rb, space=make())
        assert report.codes == [], str(report)
        assert report.rows == len(rb)


def test_rollouts_are_healthy() -> None:
    network = TensorDictModule(lambda observation: observation[..., :1] * 0.5, ["observation"], ["state_value"])
    rb = RolloutBuffer(20, 3, value_network=network)
    for data in collected(cartpole, 3)[:3]:
        rb.extend(data.clone())
        assert check(rb).codes == []


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_loop_that_stores_what_step_returns_is_not(mode: AutoresetMode) -> None:
    """What a user does who has not read about autoreset."""
    env = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    rb = ReplayBuffer(storage=PackedStorage(1_500, ndim=2), dim_extend=0)
    obs, _ = env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(500):
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        rb.add(make_transition(obs, action, reward, following, terminated, truncated))
        obs = following
    code = "reset-row-stored" if mode is AutoresetMode.NEXT_STEP else "final-observation-lost"
    assert check(rb).codes == [code]
    env.close()
