"""``python -m rlbuf_td compile``: compile all loops ahead, for containers and clusters.

Buffers of each kind are written to, sampled and updated, so that their loops are compiled. The code is for this kind of
processor: run the command on a machine like those that will train, with the same ``NUMBA_CACHE_DIR``, if it is set.
"""

from __future__ import annotations

import multiprocessing
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import Sampler, TensorDictReplayBuffer

import rlbuf_td as rl
from rlbuf_td import functional
from rlbuf_td.cli import UsageError, usable_cores
from rlbuf_td.kernels.dispatch import OFF

ROWS, BATCH = 256, 8
Proportional, Rank = partial(rl.ProportionalSampler, ROWS), partial(rl.RankSampler, ROWS)


def transitions(*lead: int) -> TensorDict:
    """Return random rows of short episodes, with goals."""
    observation, goal = torch.rand(*lead, 3), torch.rand(*lead, 3)
    following = {"observation": observation, "achieved_goal": goal, "reward": torch.rand(*lead, 1)}
    following["done"] = torch.rand(*lead, 1) < 0.1
    return TensorDict({"observation": observation, "desired_goal": goal, "next": following}, lead)


def reward_fn(batch: TensorDictBase) -> torch.Tensor:
    return -(batch["next", "achieved_goal"] - batch["desired_goal"]).abs().sum(-1)


def use(rb: Any) -> None:
    """Write, sample and update as a training loop does."""
    for _ in range(2):
        rb.extend(transitions(60))
        rb.add(transitions())
        batch = rb.sample()
        rb.update_tensordict_priority(batch.set("td_error", torch.rand(batch.batch_size)))


def buffer(sampler: Callable[[], Sampler], cls: type = rl.ReplayBuffer, **storage: Any) -> Any:
    made = sampler()
    rows, batch_size = rl.PackedStorage(ROWS, **storage), BATCH * getattr(made, "window", 1)
    use(rb := cls(storage=rows, sampler=made, batch_size=batch_size))
    return rb


def lanes(sampler: Callable[[], Sampler]) -> None:
    rows = rl.PackedStorage(ROWS, ndim=2)
    rb = rl.ReplayBuffer(storage=rows, sampler=sampler(), batch_size=BATCH, stats=rl.EpisodeStats())
    rb.extend(transitions(2, 60))
    rb.add(transitions(2))
    for lane in range(2):
        rb.extend(transitions(3 + lane), lanes=lane)
        batch = rb.sample()
        rb.update_tensordict_priority(batch.set("td_error", torch.rand(BATCH)))


def in_files() -> None:
    with TemporaryDirectory() as folder:
        buffer(Proportional, scratch_dir=f"{folder}/rows")
        rb = buffer(rl.UniformSampler, share_next=True)
        rb.dumps(f"{folder}/dump")
        rb.loads(f"{folder}/dump")
        use(rb)


def mixture() -> None:
    members = {name: rl.ReplayBuffer(storage=rl.PackedStorage(ROWS), sampler=Proportional()) for name in "ab"}
    members["b"].extend(transitions(60))
    use(rl.ReplayBufferMixture(members, {"a": 0.5, "b": 0.5}, batch_size=BATCH, writes_to="a"))


def trajectories() -> None:
    rb = rl.ReplayBuffer(storage=rl.PackedStorage(ROWS), sampler=Rank(), batch_size=BATCH)
    rb.extend(transitions(60))
    rb.load_state_dict(rb.state_dict())
    rl.TrajectoryIndex.of(rb.storage).whole()
    rl.ReplayBuffer(storage=rl.PackedStorage(ROWS, ndim=3)).extend(transitions(2, 2, 8))


def torchrls() -> None:
    rb = buffer(Rank, cls=TensorDictReplayBuffer)
    rb.sampler.rank(torch.arange(BATCH), storage=rb.storage)


def rollouts() -> None:
    data = transitions(2, 16)
    data["state_value"], data["next", "state_value"] = torch.rand(2, 16, 1), torch.rand(2, 16, 1)
    data["next", "terminated"] = data["next", "done"].clone()
    rb = rl.RolloutBuffer(16, 2, batch_size=BATCH, epochs=1)
    rb.extend(data)
    for _ in rb:
        pass


def advantages() -> None:
    for dtype in (torch.float32, torch.float64):
        for shape in ((2, 5, 1), (2, 5, 2)):
            x = torch.rand(shape, dtype=dtype)
            functional.generalized_advantage_estimate(0.9, 0.9, x, x, x, x > 0.5)
            functional.reward2go(x, x > 0.5, 0.9)


def n_step(sampler: Callable[[], Sampler]) -> Callable[[], Sampler]:
    return lambda: rl.NStepSampler(sampler(), 3, 0.9)


def hindsight() -> Sampler:
    return rl.HindsightSampler(rl.UniformSampler(), reward_fn)


def recency() -> Sampler:
    return rl.RecencySampler(half_life=20.0, window=50)


USES: dict[str, Callable[[], object]] = {
    "proportional": partial(buffer, Proportional),
    "rank": partial(buffer, Rank),
    "uniform": partial(buffer, rl.UniformSampler),
    "observations once": partial(buffer, n_step(Proportional), share_next=True),
    "advantages": advantages,
    "n-step": partial(buffer, n_step(Proportional)),
    "sequences": partial(buffer, lambda: rl.SequenceSampler(Proportional(), 3, burn_in=1)),
    "strict sequences": partial(buffer, lambda: rl.SequenceSampler(Rank(), 3, boundary="strict")),
    "sequences of n-step": partial(buffer, lambda: rl.SequenceSampler(n_step(Proportional)(), 3, priority="mix")),
    "hindsight": partial(buffer, hindsight),
    "n-step of hindsight": partial(buffer, n_step(hindsight)),
    "rows once in a batch": partial(buffer, lambda: rl.UniformSampler(unique=True)),
    "young rows": partial(buffer, lambda: rl.UniformSampler(max_age=20)),
    "minibatches": partial(buffer, lambda: rl.MinibatchSampler(2)),
    "recency": partial(buffer, recency),
    "fresh rows": partial(buffer, lambda: rl.FreshRowsSampler(Proportional())),
    "episodes": partial(buffer, lambda: rl.EpisodeSampler(finished_only=False)),
    "lanes": partial(lanes, Proportional),
    "lanes, n-step": partial(lanes, n_step(rl.UniformSampler)),
    "shared": partial(buffer, Proportional, shared=True),
    "shared, observations once": partial(buffer, rl.UniformSampler, shared=True, share_next=True),
    "files": in_files,
    "mixture": mixture,
    "trajectories": trajectories,
    "rollouts": rollouts,
    "TorchRL's buffer": torchrls,
    "TorchRL's buffer, recency": partial(buffer, recency, cls=TensorDictReplayBuffer),
}


def compile_one(name: str) -> float:
    """Compile what a use of buffers needs, and return how long that took, in seconds."""
    begun = time.perf_counter()
    USES[name]()
    return time.perf_counter() - begun


def main(options: Namespace) -> int:
    if OFF:
        raise UsageError(f"there is nothing to compile: {OFF}")
    from rlbuf_td.kernels.code_cache import folder

    place = folder()
    if place is None:
        raise UsageError("no cache folder is writable: set NUMBA_CACHE_DIR to a writable folder")
    names = list(USES)
    with ProcessPoolExecutor(options.jobs or min(usable_cores(), 4), multiprocessing.get_context("spawn")) as pool:
        for name, seconds in zip(names, pool.map(compile_one, names), strict=True):
            print(f"{name}: {seconds:.1f} s", flush=True)
    print(f"{len([*place.rglob('*.nbc')])} compiled functions are in {place}")
    return 0
