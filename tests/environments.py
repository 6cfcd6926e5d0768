"""Environments that keep their own history, to hold what was recorded against."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Walk(gymnasium.Env):
    """Short episodes that end in both ways; every observation occurs once."""

    def __init__(self, kind: str = "box", longest: int = 6) -> None:
        self.kind, self.longest = kind, longest
        self.observation_space, self.action_space = SPACES[kind], Discrete(3)
        # (obs, action, reward, next_obs, terminated, truncated, info)
        self.history: list[tuple[Any, ...]] = []
        self._episode = self._step = self._last = 0

    def _observe(self) -> Any:
        place = np.array([self._episode, self._step], np.float32)
        image = np.full((2, 2), (7 * self._episode + self._step) % 256, np.uint8)
        if self.kind == "box":
            return place
        if self.kind == "tuple":
            return (place, self._step)
        mask = np.array([self._step % 2, 1, self._episode % 2], np.int8)
        return {
            "place": place,
            "inner": {"image": image, "step": np.int64(self._step)},
            "pair": (place[::-1], mask),
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode += 1
        self._step, self._last = 0, int(self.np_random.integers(1, self.longest))
        return self._observe(), {"energy": -1.0, "begun": True}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = self._observe()
        self._step += 1
        ended = self._step == self._last
        terminated = ended and (self._episode + self._last) % 2 == 0
        info: dict[str, Any] = {"energy": self._episode + self._step / 10}
        if ended:
            info["won"] = terminated
        result = (
            self._observe(),
            float(action) + 0.5,
            terminated,
            ended and not terminated,
            info,
        )
        self.history.append(
            deepcopy((before, int(action), *result[1:2], result[0], *result[2:]))
        )
        return result


_PLACE = Box(-np.inf, np.inf, (2,), np.float32)
SPACES = {
    "box": _PLACE,
    "tuple": Tuple((_PLACE, Discrete(100))),
    "dict": Dict(
        place=_PLACE,
        inner=Dict(image=Box(0, 255, (2, 2), np.uint8), step=Discrete(100)),
        pair=Tuple((_PLACE, MultiBinary(3))),
    ),
}


class Rewarded(Walk):
    """Each reward has the given shape, as of environments with several objectives."""

    def __init__(self, shape: tuple[int, ...], declared: bool = False) -> None:
        super().__init__()
        self.shape = shape
        if declared:
            self.reward_space = gymnasium.spaces.Box(-9, 9, shape)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        rewards: Any = reward + np.arange(
            np.prod(self.shape), dtype=np.float32
        ).reshape(self.shape)
        self.history[-1] = (*self.history[-1][:2], rewards, *self.history[-1][3:])
        return obs, rewards, *rest


def rewarded(shape: tuple[int, ...], lanes: int, declared: bool = False) -> Any:
    if not lanes:
        return Rewarded(shape, declared)
    env = SyncVectorEnv(
        [partial(Rewarded, shape, declared)] * lanes,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    # as multi-objective vector environments do
    env._rewards = np.zeros((lanes, *shape))
    if declared:
        env.reward_space = gymnasium.spaces.Box(-9, 9, shape)  # pyrefly: ignore [missing-attribute]
    return env
