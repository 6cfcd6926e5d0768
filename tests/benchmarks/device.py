"""Count the operations that calls start on a device, without a GPU
(``python -m tests.benchmarks.device``): the host needs about as long for each of them.
``device_loops.py`` measures whole loops on a GPU.

Triton's interpreter runs the kernels,
``TRITON_INTERPRET=1 python -m tests.benchmarks.device``; without this variable, the
torch operations that specify them are counted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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
from rlbuf_td.kernels import host_memory
from rlbuf_td.samplers.wrapper import SamplerWrapper
from tests.backends import forced
from tests.benchmarks.contenders import small_rows

BATCH = 256
Counts = Iterator[tuple[str, int]]  # a call, and how many operations it starts


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


def counts(rows: int) -> Counts:
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
) -> Counts:
    """Yield the counts of some samplers; on the CPU, those of kernels."""
    data, td_error = small_rows(batch), torch.rand(batch, device=device)
    counted = partial(operations, are_kernels=device == "cpu")
    for name, make in samplers.items():
        storage = PackedStorage(rows, device=device)
        rb = ReplayBuffer(storage=storage, sampler=make(rows), batch_size=batch)
        yield f"{name}, extend by {batch}", counted(partial(rb.extend, data))
        yield f"{name}, sample", counted(rb.sample)
        if name in ("proportional", "by rank"):
            errors = rb.sample().set("td_error", td_error)
            update = partial(rb.update_tensordict_priority, errors)
            yield f"{name}, update priorities", counted(update)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=whole_number(BATCH), default=10_000)
    options = parser.parse_args(arguments)
    for what, value in counts(options.rows):
        print(f"  {what}: {value} operations")


if __name__ == "__main__":
    main()
