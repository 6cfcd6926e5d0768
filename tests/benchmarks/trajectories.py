"""Time what needs trajectories: ``python tests/benchmarks/trajectories.py``.

Hindsight, n-step and sequence samples against plain ones, TorchRL's ``HERReplayBuffer`` and ``SliceSampler`` and
Stable-Baselines3's ``HerReplayBuffer``, all with a reward function that costs nothing; writing with a trajectory index
and without.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer
from torchrl.data.replay_buffers import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ReplayBuffer,
    SequenceSampler,
    TrajectoryIndex,
    UniformSampler,
)
from rlbuf_td.cli.bench.contenders import small_rows
from rlbuf_td.cli.bench.timing import Learner, in_loop, one_thread

BATCH, EPISODE, CHUNK = 256, 200, 10_000
SEQUENCES, LENGTH = 32, 80
_GOAL_SIZES = {"observation": 10, "achieved_goal": 3, "desired_goal": 3}
Calls = dict[str, Callable[[], object]]


def goal_rows(count: int) -> TensorDict:
    """Return transitions like FetchReach's: 11 leaves, 151 bytes, episodes of 50 steps."""

    def observation() -> dict[str, torch.Tensor]:
        return {key: torch.randn(count, size) for key, size in _GOAL_SIZES.items()}

    ends = (torch.arange(1, count + 1) % 50 == 0).unsqueeze(-1)
    flags = {"done": ends, "truncated": ends.clone(), "terminated": torch.zeros_like(ends)}
    after = observation() | flags | {"reward": -torch.ones(count, 1)}
    return TensorDict(observation() | {"action": torch.randn(count, 4), "next": after}, [count])


def episode_rows(count: int) -> TensorDict:
    """Return transitions like HalfCheetah's, 167 bytes, in episodes of 200 steps."""
    rows = small_rows(count)
    rows["next", "done"] = (torch.arange(1, count + 1) % EPISODE == 0).unsqueeze(-1)
    return rows


def filled(buffer: Any, rows: int, make_rows: Callable[[int], TensorDict]) -> Any:
    chunk = make_rows(min(rows, CHUNK))
    for _ in range(0, rows, len(chunk)):
        buffer.extend(chunk)
    return buffer


def hindsight(rows: int) -> Calls:
    """Return samples of a goal buffer: plain, relabelled, and relabelled by others."""
    nothing = torch.zeros(BATCH, 1)
    plain = filled(ReplayBuffer(storage=PackedStorage(rows), batch_size=BATCH), rows, goal_rows)
    sampler = HindsightSampler(UniformSampler(), lambda batch: nothing)
    relabelled = ReplayBuffer(storage=plain.storage, sampler=sampler, batch_size=BATCH)
    calls: Calls = {"plain": plain.sample, "hindsight": relabelled.sample}
    if importlib.util.find_spec("stable_baselines3"):
        other = stable_baselines(rows)
        calls["Stable-Baselines3"] = lambda: other.sample(BATCH)
    return calls


def write_then_sample(rows: int) -> Calls:
    """Return cycles of writing one transition and sampling with hindsight."""
    nothing = torch.zeros(BATCH, 1)
    row = goal_rows(1)[0]
    sampler = HindsightSampler(UniformSampler(), lambda batch: nothing)
    ours = filled(ReplayBuffer(storage=PackedStorage(rows), sampler=sampler, batch_size=BATCH), rows, goal_rows)
    storage = LazyTensorStorage(rows)
    theirs = filled(HERReplayBuffer(lambda batch: batch["next", "reward"], storage=storage), rows - CHUNK, goal_rows)

    def cycle() -> None:
        ours.add(row)
        ours.sample()

    def their_cycle() -> None:
        theirs.add(row)  # never full: sampling from a full one fails
        theirs.sample(BATCH)

    return {"hindsight": cycle, "TorchRL": their_cycle}


def n_step(rows: int) -> Calls:
    plain = filled(ReplayBuffer(storage=PackedStorage(rows), batch_size=BATCH), rows, episode_rows)
    sampler = NStepSampler(UniformSampler(), n_steps=3, gamma=0.99)
    sums = ReplayBuffer(storage=plain.storage, sampler=sampler, batch_size=BATCH)
    return {"plain": plain.sample, "n-step": sums.sample}


def sequences(rows: int) -> Calls:
    """Return samples of 32 sequences of 80: padded, and only such as fit."""
    size = SEQUENCES * LENGTH
    padded = SequenceSampler(UniformSampler(), LENGTH)
    ours = filled(ReplayBuffer(storage=PackedStorage(rows), sampler=padded, batch_size=size), rows, episode_rows)
    strict = SequenceSampler(UniformSampler(), LENGTH, boundary="strict")
    fitting = ReplayBuffer(storage=ours.storage, sampler=strict, batch_size=size)
    storage = LazyTensorStorage(rows)
    calls: Calls = {"padded": ours.sample, "strict": fitting.sample}
    for name, options in (
        ("TorchRL, padded", {"strict_length": False, "pad_output": True}),
        ("TorchRL, strict", {"strict_length": True}),
    ):
        slices = SliceSampler(slice_len=LENGTH, end_key=("next", "done"), **options)
        theirs = TensorDictReplayBuffer(storage=storage, sampler=slices, batch_size=size)
        if not len(storage):
            filled(theirs, rows, episode_rows)
        calls[name] = theirs.sample
    return calls


def writes(rows: int) -> Calls:
    """Return writes of a batch, with a trajectory index and without."""
    data = episode_rows(BATCH)
    without = filled(ReplayBuffer(storage=PackedStorage(rows)), rows, episode_rows)
    indexed = filled(ReplayBuffer(storage=PackedStorage(rows)), rows, episode_rows)
    TrajectoryIndex.of(indexed.storage).boundaries()
    return {"extend": lambda: without.extend(data), "extend, indexed": lambda: indexed.extend(data)}


def stable_baselines(rows: int) -> Any:
    """Return Stable-Baselines3's buffer, full, of 100 environments: filling it takes one call a time step."""
    import gymnasium
    from stable_baselines3 import HerReplayBuffer
    from stable_baselines3.common.vec_env import DummyVecEnv

    lanes = 100
    box = {key: gymnasium.spaces.Box(-9, 9, (size,)) for key, size in _GOAL_SIZES.items()}
    spaces = gymnasium.spaces.Dict(box), gymnasium.spaces.Box(-1, 1, (4,))

    class Goals(gymnasium.Env):
        observation_space, action_space = spaces

        def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
            return np.zeros(len(achieved), np.float32)

    buffer = HerReplayBuffer(rows, *spaces, env=DummyVecEnv([Goals]), n_envs=lanes, copy_info_dict=False)
    observation = {key: torch.randn(lanes, size).numpy() for key, size in _GOAL_SIZES.items()}
    action, reward = np.zeros((lanes, 4), np.float32), np.zeros(lanes, np.float32)
    infos: list[dict[str, Any]] = [{}] * lanes
    for step in range(rows // lanes):
        buffer.add(observation, observation, action, reward, np.full(lanes, step % 50 == 49), infos)
    return buffer


CASES: dict[str, Callable[[int], Calls]] = {
    "hindsight": hindsight,
    "write one, then sample": write_then_sample,
    "n-step": n_step,
    "sequences": sequences,
    "writes": writes,
}


def main(argv: list[str] | None = None) -> None:
    """Print the median time of each call, and in brackets how many times as long as the case's first it takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--rows-of-cycle", type=float, default=1e5, help="of writing one, then sampling")
    parser.add_argument(
        "--rounds", type=int, default=15, help="interleaved blocks of 10 calls, each after a learner's step"
    )
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    options = parser.parse_args(argv)
    with one_thread():
        for name in options.only:
            rows = int(options.rows_of_cycle if CASES[name] is write_then_sample else options.rows)
            blocks = in_loop(CASES[name](rows), options.rounds, Learner(BATCH).step)
            first = next(iter(blocks))
            print(f"{name}, {rows:,} rows")
            for call, times in blocks.items():
                ratio = np.median(np.array(times) / np.array(blocks[first]))
                print(f"  {call:20s} {np.median(times):10.1f} us ({ratio:.2f})")


if __name__ == "__main__":
    main()
