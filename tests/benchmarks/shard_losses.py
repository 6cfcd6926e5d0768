"""Choose a random shard every 3 seconds and kill it if it runs, while writers and a
learner work; report the pauses.

Run ``python -m tests.benchmarks.shard_losses``: it prints the longest pause of the
learner and of each writer, how many shards were alive, and that no row was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
from rlbuf_td.distributed import ShardedReplayBuffer
from tests.benchmarks.sharded import start_ray

FACTOR = 7_919
CAPACITY = 20_000
_LOOK = 0.1  # seconds between looks at the shards


def rows(first: int, count: int) -> TensorDict:
    """Return rows with a checksum in each, so that a torn or mixed one is seen."""
    number = torch.arange(first, first + count)
    checks = {
        "check": number * FACTOR,
        "wide": number[:, None].expand(count, 40).float(),
    }
    return TensorDict({"id": number, "next": checks}, [count])


def wrong(batch: TensorDict) -> int:
    is_right = batch["next", "check"] == batch["id"] * FACTOR
    return int(
        (
            ~(is_right & (batch["next", "wide"] == batch["id"][:, None].float()).all(1))
        ).sum()
    )


def make_buffer() -> ReplayBuffer:
    return ReplayBuffer(
        storage=PackedStorage(CAPACITY),
        sampler=ProportionalSampler(CAPACITY),
        batch_size=256,
    )


def timed(seconds: float, step: Callable[[], None]) -> tuple[int, list[float]]:
    """Call ``step`` for some time; return how often, and the longest calls, in
    seconds."""
    calls, longest, end = 0, [0.0], time.monotonic() + seconds
    while (begin := time.monotonic()) < end:
        step()
        longest = sorted([*longest, time.monotonic() - begin])[-5:]
        calls += 1
    return calls, longest[::-1]


class Writer:
    def __init__(self, client: Any, first: int) -> None:
        torch.set_num_threads(1)
        self.client, self.next = client, first

    def write(self, seconds: float, count: int = 50) -> tuple[int, list[float]]:
        """Write some rows, wait 10 ms, and so on."""

        def step() -> None:
            self.client.extend(rows(self.next, count))
            self.next += count
            time.sleep(0.01)

        return timed(seconds, step)


def watch(
    rb: ShardedReplayBuffer,
    every: float,
    stop: threading.Event,
    kills: list[int],
    alive: list[int],
) -> None:
    """Choose a random shard now and then, kill it if it runs, and note how many run."""
    handles, due = rb.links.handles, time.monotonic() + every
    processes: dict[int, int] = {}  # of living shards
    calls: list[tuple[int, Any]] = []
    while not stop.wait(_LOOK):
        calls += [
            (place, handle.process.remote())
            for place, handle in enumerate(handles)
            if place not in processes
        ]
        for place, call in list(calls):
            if ray.wait([call], timeout=0)[0]:
                calls.remove((place, call))
                with suppress(ray.exceptions.RayError):
                    processes[place] = ray.get(call)
        alive.append(len(processes))
        if time.monotonic() >= due:
            due += every
            place = random.randrange(len(handles))
            if place in processes:  # a shard that restarts has no known process
                with suppress(ProcessLookupError):
                    os.kill(processes.pop(place), signal.SIGKILL)
                    kills.append(place)


def longest_without(alive: list[int]) -> float:
    longest = current = 0
    for count in alive:
        current = 0 if count else current + 1
        longest = max(longest, current)
    return longest * _LOOK


def soak(
    rb: ShardedReplayBuffer, writers: list[Any], seconds: float, every: float
) -> None:
    bad = 0

    def learn() -> None:
        nonlocal bad
        batch = rb.sample(wait=True)
        bad += wrong(batch)
        batch["td_error"] = torch.rand(len(batch))
        rb.update_tensordict_priority(batch)

    timed(1.0, learn)
    stop = threading.Event()
    kills: list[int] = []
    alive: list[int] = []
    killer = threading.Thread(target=watch, args=(rb, every, stop, kills, alive))
    killer.start()
    written = [writer.write.remote(seconds) for writer in writers]
    batches, longest = timed(seconds, learn)
    stop.set()
    killer.join()
    print(
        f"{len(kills)} kills; {sum(alive) / len(alive):.1f} shards alive, none for {longest_without(alive):.1f} s"
    )
    print(
        f"learner: {batches} batches, longest pauses {[round(each, 2) for each in longest]} s, {bad} wrong rows"
    )
    for calls, pauses in ray.get(written):
        print(
            f"writer:  {calls} writes, longest pauses {[round(each, 2) for each in pauses]} s"
        )
    print(
        f"training goes on: {timed(1.0, learn)[0]} batches in the next second, {bad} wrong rows"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--every", type=float, default=3.0, help="seconds between kills"
    )
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--writers", type=int, default=2)
    options = parser.parse_args()
    start_ray()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ShardedReplayBuffer(options.shards, make_buffer, dump_dir=folder) as rb,
    ):
        for place, client in enumerate(rb.clients(options.shards)):
            client.extend(rows(10**6 * place, 5_000))
            client.synchronize()
        rb.dumps()
        start = ray.remote(Writer).options(num_cpus=0).remote
        writers = [
            start(client, 10**8 * (1 + place))
            for place, client in enumerate(rb.clients(options.writers))
        ]
        ray.get([writer.write.remote(0.1) for writer in writers])  # pyrefly: ignore [missing-attribute]
        soak(rb, writers, options.seconds, options.every)


if __name__ == "__main__":
    main()
