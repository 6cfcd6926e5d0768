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
from torchrl.envs import CatFrames, EnvBase, GymEnv, GymWrapper, RewardSum, SerialEnv, StepCounter, TransformedEnv

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


CASES: dict[str, tuple[Any, dict[str, Any], int, int, float]] = {  # how, capacity, lanes, entries per row at most
    "all keys": (cart_pole, {"share_next": True}, 70, 3, 1.15),
    "auto": (cart_pole, {"share_next": "auto"}, 500, 1, 1.15),
    "one key": (cart_pole, {"share_next": ["observation"]}, 70, 1, 1.15),
    "frames": (screen, {"frames": {"observation": 4}}, 70, 2, 1.6),
    "constant padding": (partial(screen, padding="constant"), {"frames": {"observation": 4}}, 500, 1, 1.6),
    "frames along another dim": (partial(screen, dim=-1), {"frames": {"observation": (4, -1)}}, 70, 1, 1.6),
}


@pytest.mark.parametrize(("make", "how", "capacity", "lanes", "most"), CASES.values(), ids=CASES)
def test_rows_of_a_collector_are_those_of_a_plain_storage_in_less_memory(make, how, capacity, lanes, most) -> None:
    kinds: list[Any] = [PackedStorage, partial(PackedStorage, **how)]
    buffers = [ReplayBuffer(storage=kind(capacity * lanes, ndim=1 + (lanes > 1)), batch_size=32) for kind in kinds]
    env = make() if lanes == 1 else SerialEnv(lanes, make)
    env.set_seed(0)
    for data in Collector(env, None, frames_per_batch=20 * lanes, total_frames=200 * lanes):
        for rb in buffers:
            rb.extend(data.clone())
    plain, pooled = buffers
    assert_same(plain[:], pooled[:])
    index = torch.randint(len(plain.storage), (50,))
    assert_same(plain.storage.gather(index), pooled.storage.gather(index))
    rows = pooled.storage.rows
    assert isinstance(rows, DedupRows)
    check_pool(rows.table)
    assert ("observation",) in pooled.storage.saved_bytes
    assert max(rows.in_use) <= most * len(plain.storage)
    assert make is not screen or pooled.storage.nbytes < 0.3 * plain.storage.nbytes
