"""What recording a step of a Gymnasium vector environment costs: the environment itself takes no time here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import GymnasiumRecorder, ReplayBuffer

LANES, ROWS = 16, 16_000  # soon full, so that no page is new
OPERATIONS = {"record": f"record a step of {LANES} environments [#]"}


class Replayed(VectorEnv):
    """Environments of HalfCheetah's shape in next-step mode, whose steps were made before."""

    def __init__(self, steps: int = 1_000, ends: float = 0.01) -> None:
        self.num_envs, self.metadata = LANES, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (17,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1, 1, (6,), np.float32)
        generator, terminated = np.random.default_rng(0), np.zeros(LANES, bool)
        self.observation, never = generator.random((LANES, 17), np.float32), np.zeros(LANES, bool)
        results: list[Any] = []
        for _ in range(steps):
            terminated = (generator.random(LANES) < ends) & ~terminated
            results.append((self.observation, generator.random(LANES), terminated, never, {}))
        self.results: Iterator[Any] = cycle(results)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Return the first observations."""
        return self.observation, {}

    def step(self, actions: Any) -> Any:
        """Return the next step."""
        return next(self.results)


def calls() -> dict[str, Callable[[], object]]:
    """Return a call for each side; TorchRL's is a step put together by hand, in flat rows, reset steps and all."""
    env, action = Replayed(), np.zeros((LANES, 6), np.float32)
    recorder = GymnasiumRecorder(ReplayBuffer.from_env(env, ROWS), env)
    recorder.reset()
    theirs, obs = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS)), torch.from_numpy(env.observation)

    def by_hand() -> None:
        following, reward, terminated, truncated, _ = env.step(action)
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        after = {name: torch.from_numpy(flag).view(LANES, 1) for name, flag in ends.items()}
        after["observation"] = torch.from_numpy(following)
        after["reward"] = torch.from_numpy(reward).float().view(LANES, 1)
        step = {"observation": obs, "action": torch.from_numpy(action), "next": after}
        theirs.extend(TensorDict(step, [LANES]))

    for _ in range(ROWS // LANES):
        recorder.step(action)
        by_hand()
    return {"rlbuf_td": lambda: recorder.step(action), "TorchRL": by_hand}
