"""Let writers and learners race under flow control, and report how far samples per insert went from their target.

Run ``python -m tests.benchmarks.flow threads`` (or ``processes``, or ``shards``): for 60 seconds two writers and two
learners call a buffer as fast as it lets them. The counters are read after every call of each of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer

RATIO, MIN_SIZE, TOLERANCE, CAPACITY = 4.0, 1_000, 1_024.0, 20_000
WRITES, BATCHES = (20, 50), (64, 128)  # rows of a call of each writer and of each learner
FLOW: dict[str, Any] = {"samples_per_insert": RATIO, "min_size": MIN_SIZE, "tolerance": TOLERANCE}


def make_buffer(**flow: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=ProportionalSampler(CAPACITY), batch_size=64, **flow)


def rows(count: int) -> TensorDict:
    return TensorDict({"observation": torch.rand(count, 17), "next": {"reward": torch.rand(count, 1)}}, [count])


def race(rb: Any, counters: Callable[[], dict[str, float]], count: int, is_writer: bool, seconds: float) -> list[float]:
    """Write or sample for some time; return the number of calls, their rows, and the largest distance."""
    torch.set_num_threads(1)
    end, calls, done, worst = time.monotonic() + seconds, 0, 0, 0.0
    while not is_writer or time.monotonic() < end:
        if is_writer:
            rb.extend(rows(count))
        else:
            try:
                rb.sample(count, wait=True, timeout=5.0)
            except TimeoutError:  # the last writer has finished, or has not begun
                if time.monotonic() < end:
                    continue
                break
        calls, done, found = calls + 1, done + count, counters()
        if found["samples"]:
            worst = max(worst, abs(found["samples"] - RATIO * (found["inserts"] - MIN_SIZE)))
    return [calls, done, worst]


def plain(rb: ReplayBuffer, count: int, is_writer: bool, seconds: float, found: Any) -> None:
    """Race on a buffer of this machine; the lock makes a reading of two counters one moment's."""

    def counters() -> dict[str, float]:
        with rb._replay_lock:
            assert rb.flow is not None
            return rb.flow.report()

    found.put([is_writer, *race(rb, counters, count, is_writer, seconds)])


def on_one_machine(make: Callable[..., Any], queue: Any, seconds: float, shared: bool) -> tuple[list[Any], Any]:
    rb = make_buffer(**FLOW)
    if shared:
        rb.extend(rows(1))
        rb.share()
    jobs = [(count, True) for count in WRITES] + [(count, False) for count in BATCHES]
    workers = [make(target=plain, args=(rb, *job, seconds, queue), daemon=True) for job in jobs]
    for worker in workers:
        worker.start()
    found = [queue.get() for _ in workers]
    return found, rb.health()


def on_shards(seconds: float) -> tuple[list[Any], Any]:
    import ray

    from rlbuf_td.distributed import ShardedReplayBuffer
    from tests.benchmarks.sharded import start_ray

    def work(client: Any, count: int, is_writer: bool) -> list[Any]:
        return [is_writer, *race(client, lambda: ray.get(client._flow.report.remote()), count, is_writer, seconds)]

    start_ray()
    with ShardedReplayBuffer(2, make_buffer, **FLOW) as rb:
        jobs = [(count, True) for count in WRITES] + [(count, False) for count in BATCHES]
        start = ray.remote(num_cpus=0)(work).remote
        calls = [start(client, *job) for client, job in zip(rb.clients(len(jobs)), jobs, strict=True)]
        return ray.get(calls), rb.health()["flow"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", choices=["threads", "processes", "shards"])
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if options.where == "threads":
        import queue

        found, health = on_one_machine(threading.Thread, queue.Queue(), options.seconds, shared=False)
    elif options.where == "processes":
        spawn = multiprocessing.get_context("spawn")
        found, health = on_one_machine(spawn.Process, spawn.Queue(), options.seconds, shared=True)
    else:
        found, health = on_shards(options.seconds)
    written = sum(done for is_writer, _, done, _ in found if is_writer) + (options.where == "processes")
    sampled = sum(done for is_writer, _, done, _ in found if not is_writer)
    worst = max(each[-1] for each in found)
    print(f"{sum(each[1] for each in found):,} calls, {written:,} rows written, {sampled:,} sampled")
    print(f"counted: {health['inserts']:,.0f} and {health['samples']:,.0f}")
    print(f"farthest from {RATIO} samples per insert: {worst:,.0f} sampled rows, tolerance {TOLERANCE:,.0f}")


if __name__ == "__main__":
    main()
