"""Rows that share observations and frames, filled by real environments through TorchRL's collectors."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torchrl.collectors import Collector
from torchrl.envs import (
    CatFrames,
    EnvBase,
    GymEnv,
    GymWrapper,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)

from rlbuf_td import PackedStorage, ReplayBuffer
from rlbuf_td.storages.rows.dedup import DedupRows
from tests.catalogue import assert_same
from tests.kernels.invariants import check_pool

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl", "ignore::UserWarning:torchrl")


class Screen(gymnasium.Env):
    """A dot that walks over a screen; episodes end in both ways."""

    observation_space = Box(0, 255, (1, 12, 12), np.uint8)
    action_space = Discrete(3)

    def _see(self) -> np.ndarray:
        screen = np.zeros((1, 12, 12), np.uint8)
        screen[0, self.steps % 12, self.place % 12] = 255
        return screen

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.place = 0, int(self.np_random.integers(12))
        self.last = int(self.np_random.integers(3, 25))
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps, self.place = self.steps + 1, self.place + int(action) - 1
        over = self.steps == self.last
        return self._see(), 1.0, over and self.last % 2 == 0, over and self.last % 2 == 1, {}


def cart_pole() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=25))


def screen(dim: int = -3, padding: str = "same") -> EnvBase:
    env = TransformedEnv(GymWrapper(Screen()), CatFrames(N=4, dim=dim, in_keys=["observation"], padding=padding))
    env.append_transform(RewardSum())
    return env


def collected(make: Any, how: dict[str, Any], lanes: int, frames: int, capacity: int) -> tuple[ReplayBuffer, ...]:
    """Return a plain buffer and one that shares, with the same content."""
    ndim = 1 + (lanes > 1)
    kinds: list[Any] = [PackedStorage, partial(PackedStorage, **how)]
    buffers = tuple(ReplayBuffer(storage=kind(capacity * lanes, ndim=ndim), batch_size=32) for kind in kinds)
    env = make() if lanes == 1 else SerialEnv(lanes, make)
    env.set_seed(0)
    for data in Collector(env, None, frames_per_batch=20 * lanes, total_frames=frames * lanes):
        for rb in buffers:
            rb.extend(data.clone())
    return buffers


def check(plain: ReplayBuffer, pooled: ReplayBuffer, most: float) -> None:
    """Compare all rows; each takes at most so many entries."""
    assert_same(plain[:], pooled[:])
    torch.manual_seed(0)
    index = torch.randint(len(plain.storage[:].reshape(-1)), (50,))
    assert_same(plain.storage.gather(index), pooled.storage.gather(index))
    rows = pooled.storage.rows
    assert isinstance(rows, DedupRows)
    check_pool(rows.table)
    assert max(rows.in_use) <= most * len(plain)
    pooled.sample()


@pytest.mark.parametrize(("share", "capacity", "lanes"), [(True, 70, 3), ("auto", 500, 1), (["observation"], 70, 1)])
def test_observations_of_cart_pole(share, capacity, lanes) -> None:
    plain, pooled = collected(cart_pole, {"share_next": share}, lanes, 200, capacity)
    assert ("observation",) in pooled.storage.saved_bytes
    check(plain, pooled, most=1.15)


@pytest.mark.parametrize(
    ("make", "frames", "capacity", "lanes"),
    [
        (screen, 4, 70, 2),
        (partial(screen, padding="constant"), 4, 500, 1),
        (partial(screen, dim=-1), (4, -1), 70, 1),
    ],
    ids=["same", "constant", "another dim"],
)
def test_stacks_of_frames(make, frames, capacity, lanes) -> None:
    plain, pooled = collected(make, {"frames": {"observation": frames}}, lanes, 200, capacity)
    check(plain, pooled, most=1.6)
    assert make is screen or pooled.storage.nbytes < plain.storage.nbytes
    assert make is not screen or pooled.storage.nbytes < 0.3 * plain.storage.nbytes
