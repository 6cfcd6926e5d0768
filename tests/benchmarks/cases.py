"""Benchmark cases other than replay: Dicts of many leaves, recorded Gymnasium steps, GAE and PPO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import generalized_advantage_estimate, vec_generalized_advantage_estimate

from rlbuf_td import GymnasiumRecorder, PackedStorage, ReplayBuffer, RolloutBuffer, functional
from tests.benchmarks.contenders import small_rows
from tests.benchmarks.timing import Calls

LEAF_ROWS = 100_000
LANES, RECORDED_ROWS = 16, 16_000  # soon full: writes then need no new memory pages
GAMMA, LMBDA, EPOCHS = 0.99, 0.95, 4
LEAVES = {"leaves-12": 4, "leaves-3": 1}  # number of parts of each observation
SHAPES = ((8, 2048), (4096, 32), (1, 128))


def dict_rows(count: int, parts: int) -> TensorDict:
    """Return ``count`` nested observations, each with 3 x ``parts`` leaves and 336 bytes."""
    camera = torch.randint(256, (count, 48), dtype=torch.uint8)
    joints, counts = torch.randn(count, 40), torch.randint(9, (count, 16))

    def split(x: torch.Tensor) -> TensorDict:
        return TensorDict({f"part{i}": part for i, part in enumerate(x.chunk(parts, -1))}, [count])

    return TensorDict({"camera": split(camera), "body": {"joints": split(joints), "counts": split(counts)}}, [count])


def leaves(parts: int, batch: int) -> Calls:
    ours = ReplayBuffer(storage=PackedStorage(LEAF_ROWS), batch_size=batch)
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(LEAF_ROWS), batch_size=batch)
    data = dict_rows(LEAF_ROWS, parts)
    for buffer in (ours, theirs):
        buffer.extend(data)
    return {"rlbuf_td": ours.sample, "TorchRL": theirs.sample}


class Replayed(VectorEnv):
    """A vector environment with HalfCheetah's shapes and next-step autoreset; it returns precomputed steps."""

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
        return self.observation, {}

    def step(self, actions: Any) -> Any:
        return next(self.results)


def record() -> Calls:
    """Return, for each library, a function that takes an environment step and stores the transitions."""
    env, action = Replayed(), np.zeros((LANES, 6), np.float32)
    recorder = GymnasiumRecorder(ReplayBuffer.from_env(env, RECORDED_ROWS), env)
    recorder.reset()
    theirs, obs = TensorDictReplayBuffer(storage=LazyTensorStorage(RECORDED_ROWS)), torch.from_numpy(env.observation)

    def by_hand() -> None:
        following, reward, terminated, truncated, _ = env.step(action)
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        after = {name: torch.from_numpy(flag).view(LANES, 1) for name, flag in ends.items()}
        after["observation"] = torch.from_numpy(following)
        after["reward"] = torch.from_numpy(reward).float().view(LANES, 1)
        step = {"observation": obs, "action": torch.from_numpy(action), "next": after}
        theirs.extend(TensorDict(step, [LANES]))

    for _ in range(RECORDED_ROWS // LANES):
        recorder.step(action)
        by_hand()
    return {"rlbuf_td": lambda: recorder.step(action), "TorchRL": by_hand}


def rollout_of(lanes: int, steps: int, p: float = 0.005) -> TensorDict:
    """Return a random rollout ``[E, T]`` with HalfCheetah's shapes; about half of the episode ends are truncations."""
    rows = small_rows(lanes * steps)
    after, shape = rows["next"], (lanes * steps, 1)
    done, is_termination = torch.rand(shape) < p, torch.rand(shape) < 0.5
    after.update({"done": done, "terminated": done & is_termination, "truncated": done & ~is_termination})
    rows["state_value"], after["state_value"] = torch.randn(shape), torch.randn(shape)
    rows["action_log_prob"] = torch.randn(lanes * steps)
    return rows.reshape(lanes, steps)


def gae(lanes: int, steps: int) -> dict[str, Calls]:
    """Return, for each GAE function of TorchRL, two functions to time: TorchRL's and this package's."""
    data = rollout_of(lanes, steps)
    after = data["next"]
    values = (data["state_value"], after["state_value"], after["reward"], after["done"], after["terminated"])
    forms = {"gae": generalized_advantage_estimate, "gae-vectorized": vec_generalized_advantage_estimate}
    ours = partial(functional.generalized_advantage_estimate, GAMMA, LMBDA, *values)
    return {name: {"rlbuf_td": ours, "TorchRL": partial(form, GAMMA, LMBDA, *values)} for name, form in forms.items()}


def ppo(lanes: int, steps: int, batch: int) -> Calls:
    """Return, for each library, a function that writes a rollout, computes advantages and draws PPO's minibatches."""
    data = rollout_of(lanes, steps)
    ours = RolloutBuffer(steps, lanes, batch_size=batch, epochs=EPOCHS, gamma=GAMMA, lmbda=LMBDA)
    advantages = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=None)
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(lanes * steps), sampler=SamplerWithoutReplacement(), batch_size=batch
    )

    def our_step() -> None:
        ours.extend(data.copy())
        for _ in ours:
            pass

    def their_step() -> None:
        rows = data.copy()
        with torch.no_grad():
            advantages(rows)
        theirs.extend(rows.reshape(-1))
        for _ in range(EPOCHS):
            for _ in theirs:
                pass

    return {"rlbuf_td": our_step, "TorchRL": their_step}


def others(operations: Sequence[str], batch: int) -> Iterator[tuple[str, int, str, Calls]]:
    """Yield the chosen cases: the operation, the number of rows, their kind or shape, and a function per library."""
    for operation, parts in LEAVES.items():
        if operation in operations:
            yield operation, LEAF_ROWS, "Dict", leaves(parts, batch)
    if "record" in operations:
        yield "record", RECORDED_ROWS, "small", record()
    for lanes, steps in SHAPES:
        for operation, calls in gae(lanes, steps).items():
            if operation in operations:
                yield operation, lanes * steps, f"[{lanes}, {steps}]", calls
    if "ppo" in operations:
        lanes, steps = SHAPES[0]
        yield "ppo", lanes * steps, f"[{lanes}, {steps}]", ppo(lanes, steps, batch)
