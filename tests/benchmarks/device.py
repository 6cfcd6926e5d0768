"""Time operations on a CUDA device (``python -m tests.benchmarks.device``); for whole
loops, see ``device_loops.py``.

``--count`` counts the operations that calls start on a device instead, without a GPU:
the host needs about as long for each of them. Triton's interpreter runs the kernels,
``TRITON_INTERPRET=1 python -m tests.benchmarks.device --count``; without this variable,
the torch operations that specify them are counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictReplayBuffer,
)

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.cli import whole_number
from rlbuf_td.functional import generalized_advantage_estimate
from rlbuf_td.kernels import host_memory
from rlbuf_td.samplers.wrapper import SamplerWrapper
from tests.backends import forced
from tests.benchmarks.contenders import image_rows, small_rows

BATCH, LENGTH = 256, 16
Timed = Iterator[tuple[str, float, str]]  # the operation, a number, its unit


def wall(call: Callable[[], object], seconds: float, rounds: int = 5) -> float:
    """Return microseconds per call: the median of ``rounds`` blocks of about
    ``seconds`` each."""

    def time_of(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    time_of(3)
    count = max(3, int(seconds / time_of(5)))
    return 1e6 * statistics.median(time_of(count) for _ in range(rounds))


def filled(
    rb: Any,
    rows: int,
    make_rows: Callable[[int], TensorDict] = small_rows,
    part: int = 100_000,
) -> Any:
    device = rb.storage.device
    data = make_rows(min(rows, part)).to(device)
    for start in range(0, rows, len(data)):
        rb.extend(data[: rows - start])
    return rb


def buffer(
    rows: int, sampler: Any, device: torch.device, batch: int = BATCH
) -> ReplayBuffer:
    storage = PackedStorage(rows, device=device)
    return filled(
        ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch), rows
    )


def cycle(
    rb: Any, td_error: torch.Tensor, device: torch.device | None = None
) -> Callable[[], object]:

    def call() -> None:
        batch = rb.sample() if device is None else rb.sample().to(device)
        batch["td_error"] = td_error
        rb.update_tensordict_priority(batch)

    return call


def samples(device: torch.device, rows: int, seconds: float) -> Timed:
    td_error, data = torch.rand(BATCH, device=device), small_rows(BATCH).to(device)
    for name, sampler in (
        ("proportional", ProportionalSampler(rows)),
        ("by rank", RankSampler(rows)),
    ):
        rb = buffer(rows, sampler, device)
        yield f"{name}, sample + update", wall(cycle(rb, td_error), seconds), "us"
        yield (
            f"{name}, extend by {BATCH}",
            wall(partial(rb.extend, data), seconds),
            "us",
        )
    rb = buffer(rows, UniformSampler(), device)
    yield "uniform, sample", wall(rb.sample, seconds), "us"
    rb = buffer(
        rows, SequenceSampler(ProportionalSampler(rows), LENGTH), device, BATCH * LENGTH
    )
    yield f"{BATCH} sequences of {LENGTH}, sample", wall(rb.sample, seconds), "us"


def from_host(device: torch.device, rows: int, seconds: float) -> Timed:
    td_error, what = (
        torch.rand(BATCH, device=device),
        "rows in RAM: proportional, sample + update",
    )
    rb = buffer(rows, ProportionalSampler(rows), torch.device("cpu"))
    yield (
        f"{what}, rb.sample().to(device)",
        wall(cycle(rb, td_error, device), seconds),
        "us",
    )
    for ahead in (0, 2):
        other = ReplayBuffer(
            storage=rb.storage,
            sampler=rb.sampler,
            batch_size=BATCH,
            device=device,
            prefetch=ahead,
        )
        yield (
            f"{what}, device=, prefetch={ahead}",
            wall(cycle(other, td_error), seconds),
            "us",
        )


def images(device: torch.device, rows: int, seconds: float) -> Timed:
    rows = min(rows, 20_000)
    rb = ReplayBuffer(storage=PackedStorage(rows, device=device), batch_size=BATCH)
    filled(rb, rows, image_rows, part=2_000)
    speed = BATCH * rb.storage.row_bytes / wall(rb.sample, seconds) / 1e3
    yield "uniform, sample, image rows", speed, "GB/s"


def advantages(device: torch.device, rows: int, seconds: float) -> Timed:
    for shape in ((4096, 32, 1), (8, 2048, 1)):
        value, done = (
            torch.randn(shape, device=device),
            torch.rand(shape, device=device) < 0.01,
        )
        call = partial(
            generalized_advantage_estimate, 0.99, 0.95, value, value, value, done, done
        )
        yield f"GAE {list(shape[:2])}", wall(call, seconds), "us"


def torchrl(device: torch.device, rows: int, seconds: float) -> Timed:
    parts = {
        "storage": LazyTensorStorage(rows, device=device),
        "sampler": PrioritizedSampler(rows, 0.6, 0.4),
    }
    rb = filled(TensorDictReplayBuffer(**parts, batch_size=BATCH), rows)
    yield (
        "TorchRL: proportional, sample + update",
        wall(cycle(rb, torch.rand(BATCH, device=device)), seconds),
        "us",
    )


TIMINGS = (samples, from_host, images, advantages, torchrl)


class Count(TorchDispatchMode):
    """Counts operations that are neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        is_free = func.is_view or name.startswith("unsafe_split") or "empty" in name
        self.count += not is_free
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels_counted(counted: Count) -> Iterator[None]:
    """Count each kernel that Triton's interpreter runs, and each copy to the device, as
    one operation."""
    from triton.runtime.interpreter import GridExecutor

    run, copy = GridExecutor.__call__, host_memory.to_device

    def counted_run(*args: Any, **kwargs: Any) -> None:
        counted.count += 1
        with _disable_current_modes():
            run(*args, **kwargs)

    def counted_copy(*args: Any) -> torch.Tensor:
        counted.count += 1
        return copy(*args)

    # a GPU's generator starts no operation either
    start = partial(lambda *_: (1, 0))
    modules = "draws", "sum_tree", "wrappers"
    starts = [f"rlbuf_td.kernels.{name}.triton.philox_start" for name in modules]
    with (
        mock.patch.object(GridExecutor, "__call__", counted_run),
        # which looks at rows on the CPU only
        mock.patch.object(SamplerWrapper, "warn_if_interleaved"),
        mock.patch("rlbuf_td.storages.write_plan.to_device", counted_copy),
        mock.patch(starts[0], start),
        mock.patch(starts[1], start),
        mock.patch(starts[2], start),
    ):
        yield


def operations(call: Callable[[], object], are_kernels: bool) -> int:
    call()
    with Count() as counted, kernels_counted(counted) if are_kernels else nullcontext():
        call()
    return counted.count


def counts(rows: int) -> Timed:
    """Yield how many operations calls start on other devices than the CPU.

    Torch's meta device executes none; kernels run in Triton's interpreter, on the CPU.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        with forced("triton"):
            yield from counts_of(min(rows, 2_000), 8, "cpu", SAMPLERS)
    else:
        yield from counts_of(rows, BATCH, "meta", SAMPLERS)


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda rows: UniformSampler(),
    "proportional": ProportionalSampler,
    "by rank": RankSampler,
    "3-step": lambda rows: NStepSampler(UniformSampler(), 3, 0.9),
    "3-step, proportional": lambda rows: NStepSampler(
        ProportionalSampler(rows), 3, 0.9
    ),
    "windows": lambda rows: SequenceSampler(UniformSampler(), 4, burn_in=4),
    "hindsight": lambda rows: HindsightSampler(
        UniformSampler(),
        lambda batch: batch["next", "reward"],  # starts nothing
        goal_key="observation",
        achieved_goal_key="observation",
    ),
}


def counts_of(
    rows: int, batch: int, device: str, samplers: dict[str, Callable[[int], Any]]
) -> Timed:
    """Yield the counts of some samplers; on the CPU, those of kernels."""
    data, td_error = small_rows(batch), torch.rand(batch, device=device)
    are_kernels = device == "cpu"
    for name, make in samplers.items():
        sampler = make(rows)
        rb = ReplayBuffer(
            storage=PackedStorage(rows, device=device),
            sampler=sampler,
            batch_size=batch,
        )
        yield (
            f"{name}, extend by {batch}",
            operations(partial(rb.extend, data), are_kernels),
            "operations",
        )
        yield f"{name}, sample", operations(rb.sample, are_kernels), "operations"
        if name in ("proportional", "by rank"):
            update = partial(
                rb.update_tensordict_priority, rb.sample().set("td_error", td_error)
            )
            yield (
                f"{name}, update priorities",
                operations(update, are_kernels),
                "operations",
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=whole_number(BATCH), default=1_000_000)
    parser.add_argument("--count", action="store_true", help="count operations instead")
    options = parser.parse_args(arguments)
    if options.count:
        for what, value, unit in counts(min(options.rows, 10_000)):
            print(f"  {what}: {value} {unit}")
        return
    device = torch.device(options.device)
    torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device)
    print(
        f"{name}, torch {torch.__version__}, {options.rows:,} rows of 167 bytes, batch {BATCH}"
    )
    for timing in TIMINGS:
        for what, value, unit in timing(device, options.rows, 0.2):
            print(f"  {what}: {value:.1f} {unit}", flush=True)


if __name__ == "__main__":
    main()
