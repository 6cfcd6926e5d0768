"""``python -m rlbuf_td compile``: compile all loops ahead, for containers and clusters.

Buffers of each kind are written to, sampled and updated, so that their loops are
compiled. The code is for this kind of
processor: run the command on a machine like those that will train, with the same
``NUMBA_CACHE_DIR``, if it is set.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data.replay_buffers import Sampler, TensorDictReplayBuffer

import rlbuf_td as rl
from rlbuf_td import functional
from rlbuf_td.cli import UsageError
from rlbuf_td.kernels.dispatch import OFF

ROWS, BATCH = 256, 8


def transitions(*lead: int) -> TensorDict:
    """Return random rows of short episodes, with goals and values."""
    observation, goal, value = (torch.rand(*lead, width) for width in (3, 3, 1))
    following = {
        "observation": observation,
        "achieved_goal": goal,
        "reward": value,
        "state_value": value,
    }
    following |= dict.fromkeys(("done", "terminated"), torch.rand(*lead, 1) < 0.1)
    root: dict[NestedKey, Any] = {
        "observation": observation,
        "desired_goal": goal,
        "state_value": value,
    }
    return TensorDict(root | {"next": following}, lead)


def reward_fn(batch: TensorDictBase) -> torch.Tensor:
    return (
        -(batch.get(("next", "achieved_goal")) - batch.get("desired_goal"))
        .abs()
        .sum(-1)
    )


def n_step(sampler: Sampler) -> Sampler:
    return rl.NStepSampler(sampler, 3, 0.9)


def proportional() -> Sampler:
    return rl.ProportionalSampler(ROWS)


def use(rb: Any) -> None:
    """Write, sample and update as a training loop does."""
    for _ in range(2):
        rb.extend(transitions(60))
        rb.add(transitions())
        batch = rb.sample()
        rb.update_tensordict_priority(
            batch.set("td_error", torch.rand(batch.batch_size))
        )


def buffer(
    sampler: Callable[[], Sampler], cls: type = rl.ReplayBuffer, **storage: Any
) -> Any:
    """Make a buffer with a new sampler, and make all its calls."""
    made = sampler()
    rows = rl.PackedStorage(ROWS, **storage)
    batch_size = BATCH * getattr(made, "window", 1)
    rb = cls(storage=rows, sampler=made, batch_size=batch_size)
    use(rb)
    return rb


def lanes(sampler: Sampler) -> None:
    """Make the calls of buffers of several lanes."""
    rows = rl.PackedStorage(ROWS, ndim=2)
    rb = rl.ReplayBuffer(
        storage=rows, sampler=sampler, batch_size=BATCH, stats=rl.EpisodeStats()
    )
    rb.extend(transitions(2, 60))
    rb.add(transitions(2))
    for lane in range(2):
        rb.extend(transitions(3 + lane), lanes=lane)
        batch = rb.sample()
        rb.update_tensordict_priority(batch.set("td_error", torch.rand(BATCH)))
    rl.ReplayBuffer(storage=rl.PackedStorage(ROWS, ndim=3)).extend(transitions(2, 2, 8))


def in_files() -> None:
    with TemporaryDirectory() as folder:
        buffer(proportional, scratch_dir=f"{folder}/rows")
        rb = buffer(rl.UniformSampler, share_next=True)
        rb.dumps(f"{folder}/dump")
        rb.loads(f"{folder}/dump")
        use(rb)


def mixture() -> None:
    """Make the calls of a mixture of two buffers."""
    members = {
        name: rl.ReplayBuffer(storage=rl.PackedStorage(ROWS), sampler=proportional())
        for name in "ab"
    }
    members["b"].extend(transitions(60))
    use(
        rl.ReplayBufferMixture(
            members, {"a": 0.5, "b": 0.5}, batch_size=BATCH, writes_to="a"
        )
    )


def states() -> None:
    rb = buffer(SAMPLERS["rank"])
    rb.load_state_dict(rb.state_dict())
    rl.TrajectoryIndex(rb.storage).whole()


def torchrls() -> None:
    buffer(SAMPLERS["recency"], cls=TensorDictReplayBuffer)
    rb = buffer(SAMPLERS["rank"], cls=TensorDictReplayBuffer)
    rb.sampler.rank(torch.arange(BATCH), storage=rb.storage)


def rollouts() -> None:
    """Make the calls of a rollout buffer and of the estimates of advantages."""
    rb = rl.RolloutBuffer(16, 2, batch_size=BATCH, epochs=1)
    rb.extend(transitions(2, 16))
    for _ in rb:
        pass
    for dtype in (torch.float32, torch.float64):
        for shape in ((2, 5, 1), (2, 5, 2)):
            x = torch.rand(shape, dtype=dtype)
            functional.generalized_advantage_estimate(0.9, 0.9, x, x, x, x > 0.5)
            functional.reward2go(x, x > 0.5, 0.9)


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "proportional": proportional,
    "rank": lambda: rl.RankSampler(ROWS),
    "uniform": rl.UniformSampler,
    "n-step": lambda: n_step(proportional()),
    "sequences": lambda: rl.SequenceSampler(proportional(), 3, burn_in=1),
    "strict sequences": lambda: rl.SequenceSampler(
        rl.RankSampler(ROWS), 3, boundary="strict"
    ),
    "sequences of n-step": lambda: rl.SequenceSampler(
        n_step(proportional()), 3, priority="mix"
    ),
    "hindsight": lambda: rl.HindsightSampler(rl.UniformSampler(), reward_fn),
    "rows once in a batch": lambda: rl.UniformSampler(unique=True),
    "young rows": lambda: rl.UniformSampler(max_age=20),
    "minibatches": lambda: rl.MinibatchSampler(2),
    "recency": lambda: rl.RecencySampler(half_life=20.0, window=50),
    "episodes": lambda: rl.EpisodeSampler(finished_only=False),
}
USES: dict[str, Callable[[], object]] = {
    name: partial(buffer, sampler) for name, sampler in SAMPLERS.items()
} | {
    "observations once": partial(buffer, SAMPLERS["n-step"], share_next=True),
    "lanes": lambda: lanes(proportional()),
    "lanes, n-step": lambda: lanes(n_step(rl.UniformSampler())),
    "shared": partial(buffer, proportional, shared=True),
    "shared, observations once": partial(
        buffer, rl.UniformSampler, shared=True, share_next=True
    ),
    "files": in_files,
    "mixture": mixture,
    "states": states,
    "rollouts": rollouts,
    "TorchRL's buffer": torchrls,
}


def main(options: Namespace) -> int:
    if OFF:
        raise UsageError(f"there is nothing to compile: {OFF}")
    from rlbuf_td.kernels.code_cache import folder

    cache_folder = folder()
    if cache_folder is None:
        raise UsageError(
            "no cache folder is writable: set NUMBA_CACHE_DIR to a writable folder"
        )
    for name, run in USES.items():
        begun = time.perf_counter()
        run()
        print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)
    print(
        f"{len([*cache_folder.rglob('*.nbc')])} compiled functions are in {cache_folder}"
    )
    return 0
