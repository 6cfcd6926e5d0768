"""Time batches from shards on Ray (sample + update, 4 shards, one learner) beside those
of TorchRL's ``RayReplayBuffer`` (``python -m tests.benchmarks.sharded``)."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import ray
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RayReplayBuffer,
    TensorDictReplayBuffer,
)

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
from rlbuf_td.distributed import ShardedReplayBuffer

BATCHES = 256, 4_096
SHARDS = 4


def rows(count: int) -> TensorDict:
    seen = torch.rand(count + 1, 17)
    outcome = {
        "observation": seen[1:],
        "reward": torch.rand(count, 1),
        "done": torch.zeros(count, 1).bool(),
    }
    return TensorDict(
        {"observation": seen[:-1], "action": torch.rand(count, 6), "next": outcome},
        [count],
    )


def make_buffer(capacity: int) -> ReplayBuffer:
    return ReplayBuffer(
        storage=PackedStorage(capacity),
        sampler=ProportionalSampler(capacity, alpha=0.6, beta=0.4),
    )


def sharded(stored: int, prefetch: int = 0) -> ShardedReplayBuffer:
    """Return a buffer whose shards hold ``stored`` rows together."""
    rb = ShardedReplayBuffer(
        SHARDS, partial(make_buffer, stored // SHARDS), prefetch=prefetch
    )
    for client in rb.clients(SHARDS):
        for _ in range(10):
            client.extend(rows(stored // SHARDS // 10))
        client.synchronize()
    return rb


def torchrls(stored: int) -> RayReplayBuffer:
    rb = RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(LazyTensorStorage, stored),
        sampler=partial(PrioritizedSampler, stored, alpha=0.6, beta=0.4),
        remote_config={"num_cpus": 0},
        batch_size=256,
    )
    for _ in range(10):
        rb.extend(rows(stored // 10))
    return rb


def step(rb, size: int) -> None:
    batch = rb.sample(size)
    batch["td_error"] = torch.rand(size)
    rb.update_tensordict_priority(batch)


def seconds(
    contenders: Sequence[Callable[[], None]], rounds: int, calls: int = 10
) -> list[float]:
    """Return the median time of a call of each; they take turns."""
    for contender in contenders:
        for _ in range(calls):
            contender()
    found: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, times in zip(contenders, found, strict=True):
            begin = time.perf_counter()
            for _ in range(calls):
                contender()
            times.append((time.perf_counter() - begin) / calls)
    return [median(times) for times in found]


def compare(stored: int, rounds: int) -> None:
    buffers = {
        "RayReplayBuffer": torchrls(stored),
        f"{SHARDS} shards": sharded(stored),
        f"{SHARDS} shards, prefetch=8": sharded(stored, prefetch=8),
    }
    for size in BATCHES:
        times = seconds([partial(step, rb, size) for rb in buffers.values()], rounds)
        for name, taken in zip(buffers, times, strict=True):
            speed = f"{1e3 * taken:8.2f} ms  {size / taken:10,.0f} rows/s  x{times[0] / taken:.1f}"
            print(f"{size:>6} rows  {name:<22} {speed}")
    for rb in buffers.values():
        rb.shutdown()


def start_ray() -> None:
    # the answers of a batch take no detour
    os.environ.setdefault("RAY_max_direct_call_object_size", "1000000")
    # Ray's 15 lets any other process of the machine go first
    os.environ.setdefault("RAY_worker_niceness", "0")
    paths = {
        "PYTHONPATH": os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", "")))
    }
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=500_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": paths},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=100_000, help="stored in all shards together"
    )
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start_ray()
    compare(options.rows, options.rounds)


if __name__ == "__main__":
    main()
