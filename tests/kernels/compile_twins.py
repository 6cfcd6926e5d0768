"""Compile every Triton kernel for an H100 or H200, as far as it goes without one: to machine code that nobody runs.

``TRITON_INTERPRET=0 python -m tests.kernels.compile_twins`` prints one line a kernel. The interpreter checks what a
kernel computes, but takes programs that the compiler refuses; this checks the other half. Needs no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.dispatch import forced
from rlbuf_td.kernels.episodes import FlagBoundaries

compiled: dict[str, set[str]] = {}


class Device:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _compile(self: Any, grid: Any) -> Any:
    """Take the place of a launch."""

    def run(*args: Any, **kwargs: Any) -> Any:
        kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
        compiled.setdefault(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}", set()).update(kernel.asm)
        return kernel

    return run


def of_sum_tree() -> None:
    for capacity in (5, 100, 5_003):
        tree = sum_tree.SumTree.empty(capacity)
        for dtype, batch in ((torch.float32, 7), (torch.float32, 256), (torch.float64, 3_000)):
            sum_tree.update_(tree, torch.zeros(batch, dtype=torch.int64), torch.ones(batch, dtype=dtype), 5, 0.6, 1e-6)
        sum_tree.fill_(tree, 0, 5, 1.0, 0.6, 1e-6)
        for norm in ("buffer", "batch", None):
            for stratified in (True, False):
                uniform = torch.rand(100, dtype=torch.float64)
                sum_tree.draw(tree, uniform, stratified, 5, 0.4, norm)


def of_trajectories() -> None:
    rows = torch.zeros(6, dtype=torch.int64)
    for steps, lanes in ((1, 1), (5_000, 1), (64, 8)):
        boundaries = FlagBoundaries(steps, lanes)
        boundaries.reach(rows)


def main() -> None:
    """Compile all, and fail unless each has become machine code."""
    driver.set_active(Device())
    JITFunction.__getitem__ = _compile
    with forced("triton"):
        for part in (of_sum_tree, of_trajectories):
            part()
    for name, kinds in sorted(compiled.items()):
        print(f"{name}: {', '.join(sorted(kinds))}")
        if "cubin" not in kinds:
            raise SystemExit(f"{name} has not become machine code")


if __name__ == "__main__":
    main()
