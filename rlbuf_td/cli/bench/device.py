"""``python -m rlbuf_td bench --device cuda``: check everything that runs on a GPU, then time it, in one call.

Prints which checks pass, and a table of times beside what they are to be.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

from rlbuf_td import (
    HindsightSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
    functional,
)
from rlbuf_td.cli.bench import device_checks
from rlbuf_td.cli.bench.contenders import image_rows, small_rows
from rlbuf_td.cli.bench.timing import Measured, launches, on_device, table, wall
from rlbuf_td.kernels.rows import gather_rows


def filled(
    rows: int,
    sampler: Any,
    device: torch.device,
    batch: int,
    make_rows: Any = small_rows,
    part: int = 100_000,
    offload: bool = False,
) -> ReplayBuffer:
    """Return a full buffer on the device, the same ``part`` rows over and over; on a GPU they may lie in RAM."""
    storage = PackedStorage(rows, device=device, offload=offload and device.type == "cuda")
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch)
    part = min(rows, part)
    data = make_rows(part).to(device)
    for start in range(0, rows, part):
        rb.extend(data[: min(part, rows - start)])
    return rb


def episodes(count: int) -> TensorDict:
    """Return small rows in trajectories of a thousand."""
    rows = small_rows(count)
    rows["next", "done"][999::1_000] = True
    return rows


def cycle(rb: Any, td_error: torch.Tensor, device: torch.device | None = None) -> Callable[[], object]:
    """Return a call that samples, brings the batch to a device, if one is given, and updates priorities."""

    def call() -> None:
        batch = rb.sample() if device is None else rb.sample().to(device)
        batch["td_error"] = td_error
        rb.update_tensordict_priority(batch)

    return call


def with_errors(td_error: torch.Tensor, batch: Any) -> Any:
    """Return a batch with TD errors: a step that learns nothing."""
    return batch.set("td_error", td_error)


def prioritized(device: torch.device, rows: int, seconds: float) -> Iterator[Measured]:
    """Time proportional and rank-based replay."""
    for batch in (256, 65_536):
        td_error = torch.rand(batch, device=device)
        rb = filled(rows, ProportionalSampler(rows), device, batch)
        captured = rb.capture(partial(with_errors, td_error))
        replay = wall(captured, seconds)
        eager = wall(cycle(rb, td_error), seconds)
        goals = (20, 150) if batch == 256 else (None, None)
        yield Measured(f"proportional, sample + update, graph, batch {batch:,}", replay, "us", goals[0])
        yield Measured(f"proportional, sample + update, eager, batch {batch:,}", eager, "us", goals[1])
        if batch > 256:
            matrix, index = rb.storage._written().flat, torch.randint(rows, (batch,), device=device)
            column = torch.zeros(rows, device=device)

            def bare(matrix: Any = matrix, index: Any = index, column: Any = column, error: Any = td_error) -> None:
                matrix.index_select(0, index)
                column[index] = error

            yield Measured("the graph by a bare gather and scatter", replay / on_device(bare, 20), "x", 3)
        del rb, captured
    td_error = torch.rand(256, device=device)
    rb = filled(rows, RankSampler(rows), device, 256)
    yield Measured("by rank, exact, sample + update, eager, batch 256", wall(cycle(rb, td_error), seconds), "us", 200)
    captured = rb.capture(partial(with_errors, td_error))
    yield Measured("by rank, exact, sample + update, graph, batch 256", wall(captured, seconds), "us", 200)
    data = small_rows(256).to(device)
    yield Measured("by rank, extend by 256", wall(lambda: rb.extend(data), seconds), "us")


def plain(device: torch.device, rows: int, seconds: float) -> Iterator[Measured]:
    """Time uniform replay and writes."""
    rb = filled(rows, UniformSampler(), device, 256)
    data = small_rows(256).to(device)
    yield Measured("uniform, sample, eager, batch 256", wall(rb.sample, seconds), "us")
    yield Measured("uniform, sample, graph, batch 256", wall(rb.capture(), seconds), "us")
    yield Measured("extend by 256", wall(lambda: rb.extend(data), seconds), "us")
    rb.set_sampler(UniformSampler(unique=True))
    yield Measured("uniform without repeats, sample, eager, batch 256", wall(rb.sample, seconds), "us")
    yield Measured("uniform without repeats, sample, graph, batch 256", wall(rb.capture(), seconds), "us")
    rb = filled(rows, SequenceSampler(ProportionalSampler(rows), 16), device, 256 * 16, episodes)
    yield Measured("256 sequences of 16, sample, eager", wall(rb.sample, seconds), "us")
    yield Measured("256 sequences of 16, sample, graph", wall(rb.capture(), seconds), "us")


def images(device: torch.device, rows: int, seconds: float) -> Iterator[Measured]:
    """Compare the gather of image rows with a plain copy of as many bytes."""
    rb = filled(min(rows, 20_000), UniformSampler(), device, 256, image_rows, part=2_000)
    matrix = rb.storage._written().flat
    index = torch.randint(len(matrix), (2_048,), device=device)
    block = gather_rows(matrix, index)
    to = torch.empty_like(block)
    share = on_device(lambda: to.copy_(block), 20) / on_device(lambda: gather_rows(matrix, index), 20)
    yield Measured("gather of image rows, share of the bandwidth of a copy", 100 * share, "%", 60, at_least=True)


def advantages(device: torch.device, rows: int, seconds: float) -> Iterator[Measured]:
    """Time GAE, lanes first and time first."""
    for shape, goal in (((4096, 32, 1), 15), ((8, 2048, 1), 15), ((1, 128, 4096), None)):
        value, done = torch.randn(shape, device=device), torch.rand(shape, device=device) < 0.01
        given = value, value, value, done, done

        def call(given: Any = given) -> object:
            return functional.generalized_advantage_estimate(0.99, 0.95, *given)

        name = f"GAE {list(shape[:2])}" if shape[2] == 1 else f"GAE, time first, {list(shape[1:])}"
        yield Measured(f"{name}, device", on_device(call, 50), "us", goal)
        yield Measured(f"{name}, eager", wall(call, seconds), "us")


def from_host(device: torch.device, rows: int, seconds: float) -> Iterator[Measured]:
    """Time batches from rows on the host: gathered there and copied, or read by the device itself."""
    td_error, what = torch.rand(256, device=device), "rows on the host: proportional, sample + update"
    rb = filled(rows, ProportionalSampler(rows), torch.device("cpu"), 256)
    yield Measured(f"{what}, rb.sample().to(device)", wall(cycle(rb, td_error, device), seconds), "us")
    for ahead in (0, 2):
        given = {"storage": rb.storage, "sampler": rb.sampler, "batch_size": 256}
        fed = ReplayBuffer(**given, device=device, prefetch=ahead)
        yield Measured(f"{what}, device=, prefetch={ahead}", wall(cycle(fed, td_error), seconds), "us")
    rb = filled(rows, ProportionalSampler(rows), device, 256, offload=True)
    yield Measured(f"{what}, offload, graph", wall(rb.capture(partial(with_errors, td_error)), seconds), "us")
    yield Measured(f"{what}, offload, eager", wall(cycle(rb, td_error), seconds), "us")
    data = small_rows(256).to(device)
    yield Measured("rows on the host: extend by 256, offload", wall(lambda: rb.extend(data), seconds), "us")
    rb = filled(rows, UniformSampler(), torch.device("cpu"), 256)
    feed = rb.feed(device, ahead=2)
    yield Measured("rows on the host: uniform, sample, rb.feed, ahead=2", wall(feed.sample, seconds), "us")
    yield Measured(
        "rows on the host: uniform, rb.sample().to(device)", wall(lambda: rb.sample().to(device), seconds), "us"
    )
    sampler = HindsightSampler(UniformSampler(), reached)
    storage = filled(min(rows, 100_000), sampler, torch.device("cpu"), 256, goal_rows).storage
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=256, device=device, prefetch=2)
    yield Measured("rows on the host: hindsight, sample, device=, prefetch=2", wall(rb.sample, seconds), "us")


def goal_rows(count: int) -> TensorDict:
    """Return small rows with goals, in trajectories of 50 steps."""
    rows = small_rows(count)
    rows["desired_goal"], rows["next", "achieved_goal"] = torch.randn(count, 3), torch.randn(count, 3)
    rows["next", "done"] = (torch.arange(count) % 50 == 49)[:, None]
    return rows


def reached(batch: TensorDictBase) -> torch.Tensor:
    """Return the reward of a batch: whether its goals have been reached."""
    return ((batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True) < 0.1).float()


def images_from_host(device: torch.device, rows: int, seconds: float) -> Iterator[Measured]:
    """Compare both ways for image rows: what they move of rows in a second."""
    for offload in (False, True):
        at = device if offload else torch.device("cpu")
        rb = filled(min(rows, 20_000), UniformSampler(), at, 256, image_rows, part=2_000, offload=offload)
        draw = rb.sample if offload else rb.feed(device, ahead=2).sample
        name = "offload" if offload else "rb.feed"
        speed = 256 * rb.storage.row_bytes / wall(draw, seconds) / 1e3
        yield Measured(f"rows on the host, {name}: sample 256 image rows", speed, "GB/s")
        del rb, draw


def torchrl(device: torch.device, rows: int, seconds: float) -> Iterator[Measured]:
    """Time TorchRL's own parts on the same GPU."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(rows, device=device), sampler=PrioritizedSampler(rows, 0.6, 0.4), batch_size=256
    )
    part = small_rows(min(rows, 100_000)).to(device)
    for start in range(0, rows, len(part)):
        rb.extend(part[: min(len(part), rows - start)])
    took = wall(cycle(rb, torch.rand(256, device=device)), seconds)
    yield Measured("TorchRL: proportional, sample + update, batch 256", took, "us")


def flashbax(device: torch.device, rows: int, seconds: float) -> Iterator[Measured]:
    """Time Flashbax on the same GPU, as two programs, between which a learner computes, and as one."""
    if importlib.util.find_spec("flashbax") is None:
        print("Flashbax is not installed: left out", file=sys.stderr)
        return
    from rlbuf_td.cli.bench.flashbax import Flashbax

    platform = "gpu" if device.type == "cuda" else "cpu"
    for batch in (256, 65_536):
        theirs = Flashbax(rows, batch, small_rows, platform)
        for call, how in ((theirs.cycle, "sample + update"), (theirs.cycle_at_once, "sample + update, one program")):
            yield Measured(f"Flashbax: proportional, {how}, batch {batch:,}", wall(call, seconds, theirs.wait), "us")


def counted(device: torch.device, rows: int, seconds: float) -> Iterator[Measured]:
    """Count launches; last, as the profiler may be refused."""
    rb = filled(rows, ProportionalSampler(rows), device, 256)
    yield Measured("launches of a draw and its gather", launches(rb.sample), "", 8)
    call = cycle(rb, torch.rand(256, device=device))
    yield Measured("launches of proportional, sample + update, eager, batch 256", launches(call), "")


TIMINGS: tuple[Callable[[torch.device, int, float], Iterator[Measured]], ...] = (
    prioritized,
    plain,
    images,
    advantages,
    from_host,
    images_from_host,
    torchrl,
    flashbax,
    counted,
)


def main(options: argparse.Namespace) -> int:
    """Check, time and print; return 1 if there is no such device or something is wrong."""
    device = torch.device(options.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        reason = "has no CUDA device" if device.type == "cuda" else f"can time cpu and cuda, not {device.type}"
        print(f"bench --device {options.device}: this machine or build of torch {reason}", file=sys.stderr)
        return 1
    torch.cuda.set_device(device)
    rows, seconds = 1_000_000 if 1e6 in options.rows else int(max(options.rows)), 0.2  # goals are for a million
    failed = 0
    for name, error in device_checks.run(device, 100_000, 4_096):
        failed += error is not None
        print(f"check: {name}: {'ok' if error is None else f'FAILED: {type(error).__name__}: {error}'}", flush=True)
    measured: list[Measured] = []
    for timing in TIMINGS:
        try:
            for line in timing(device, rows, seconds):
                measured.append(line)
                print(f"{line.what}: {line.value:.1f} {line.unit} {line.verdict}", file=sys.stderr, flush=True)
        except Exception as error:  # noqa: BLE001  a GPU is not at hand for long: the other timings are to run, too
            failed += 1
            print(f"{timing.__name__}: FAILED: {type(error).__name__}: {error}", flush=True)
    where = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {rows:,} rows of 167 bytes"
    print(table(measured, where))
    return 1 if failed else 0
