"""Train DQN as Ape-X does: collectors and shards of the buffer on Ray, and one learner.

Run this script with ``python -m rlbuf_td demo --algo apex``. The main part is :func:`train`.

Source: Horgan et al., Distributed Prioritized Experience Replay, ICLR 2018.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import ray
import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, GymEnv, RewardSum, TransformedEnv
from torchrl.modules import EGreedyModule

from rlbuf_td import NStepSampler, PackedStorage, ProportionalSampler, ReplayBuffer
from rlbuf_td.cli import UsageError
from rlbuf_td.cli.demos.dqn import GAMMA, LEFT_OUT, N_STEPS, STEPS, Learner, make_policy
from rlbuf_td.cli.demos.report import Run, prepare, whole_batches
from rlbuf_td.distributed import ShardedReplayBuffer

CAPACITY, BATCH, FRAMES, WARM_UP = 25_000, 128, 128, 1_024  # rows of a shard, of a batch, of a write, before learning
SAMPLES_PER_INSERT = 64.0
NEW_WEIGHTS = 32  # batches between updates of the collectors' weights
SHOWN = ("next", "done"), ("next", "episode_reward")


def make_env(name: str) -> EnvBase:
    return TransformedEnv(GymEnv(name), RewardSum())


def make_buffer() -> ReplayBuffer:
    sampler = NStepSampler(ProportionalSampler(CAPACITY), n_steps=N_STEPS, gamma=GAMMA)
    return ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=sampler, batch_size=BATCH)


class Actor:
    """A collector with its own exploration rate, which writes to a shard."""

    def __init__(self, env_name: str, buffer: Any, seed: int, epsilon: float) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        env = make_env(env_name)
        env.set_seed(seed)
        self.policy, _ = make_policy(env, torch.device("cpu"))
        explore = EGreedyModule(env.action_spec, eps_init=epsilon, eps_end=epsilon)
        acting = TensorDictSequential(self.policy, explore)
        collector = Collector(
            env, acting, frames_per_batch=FRAMES, total_frames=-1, auto_register_policy_transforms=False
        )
        self.buffer, self.steps = buffer, iter(collector)

    def collect(self, weights: dict[str, torch.Tensor]) -> TensorDict:
        """Collect steps and write them to the shard; return their done flags and episode returns."""
        self.policy.load_state_dict(weights)
        data = next(self.steps)
        self.buffer.extend(data.exclude(*LEFT_OUT))
        return data.select(*SHOWN)


def train(env_name: str, shards: int, collectors: int, steps: int, seed: int, out: Path) -> Run:
    torch.manual_seed(seed)
    steps = whole_batches(steps, FRAMES)
    policy, _ = make_policy(make_env(env_name), torch.device("cpu"))
    learner, batches = Learner(policy, make_env(env_name), steps), 0
    threshold = gymnasium.spec(env_name).reward_threshold or float("inf")
    run = Run(partial(GymEnv, env_name), out, seed, steps, threshold)
    flow = {"samples_per_insert": SAMPLES_PER_INSERT, "min_size": WARM_UP}
    with ShardedReplayBuffer(shards, make_buffer, prefetch=4, **flow) as buffer:  # type: ignore[arg-type]
        start = ray.remote(Actor).options(num_cpus=0).remote
        epsilons = torch.logspace(-1.3, -2.0, collectors).tolist()  # from 0.05 to 0.01
        clients = enumerate(zip(buffer.clients(collectors), epsilons, strict=True))
        actors = [start(env_name, client, seed + place, epsilon) for place, (client, epsilon) in clients]
        weights = ray.put(policy.state_dict())
        under_way = {actor.collect.remote(weights): actor for actor in actors}
        while run.steps < steps and not run.is_solved:
            for call in ray.wait(list(under_way), num_returns=len(under_way), timeout=0)[0]:
                actor = under_way.pop(call)
                run.count(ray.get(call))
                under_way[actor.collect.remote(weights)] = actor
            try:
                with run.in_buffer():
                    batch = buffer.sample(wait=True, timeout=0.05)
            except TimeoutError:  # an actor may have finished and need new work
                continue
            learner.learn(batch)
            with run.in_buffer():
                buffer.update_tensordict_priority(batch)
            batches += 1
            if batches % NEW_WEIGHTS == 0:
                weights = ray.put(policy.state_dict())
        health = buffer.health()
        for actor in actors:
            ray.kill(actor)
    run.finish(policy, f"Ape-X DQN on {env_name}, {shards} shards")
    show(health)
    return run


def show(health: dict[str, Any]) -> None:
    names = "rows", "mass", "inserts", "requests", "lost_rows", "stale_updates", "drifted"
    table = Table("shard", *names)
    for place, shard in enumerate(health["shards"]):
        table.add_row(str(place), *(f"{shard.get(name, 0):,.6g}" for name in names))
    Console().print(table)
    print(f"samples per insert: {health['flow']['samples_per_insert']:.1f}")


def main(options: argparse.Namespace) -> int:
    steps = options.steps or STEPS
    if steps < 2 * WARM_UP:
        raise UsageError(f"--steps must be at least {2 * WARM_UP}: learning begins after {WARM_UP} steps")
    if options.device != "cpu":
        raise UsageError("the shards of --algo apex are in RAM, and its learner on the CPU: use --device cpu")
    out = prepare(options, f"apex-{options.env}")
    run = train(options.env, options.shards or 2, options.collectors or 2, steps, options.seed, out)
    run.tell("the same in one process, python -m rlbuf_td demo")
    return 0
