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

from rlbuf_td.cli.bench.selected_order import SelectedOrder
from rlbuf_td.kernels import rows as columns
from rlbuf_td.kernels import scan, sum_tree
from rlbuf_td.kernels.dispatch import forced
from rlbuf_td.kernels.episodes import FlagBoundaries, goals, n_step
from rlbuf_td.kernels.rank_order.law import rank_law
from rlbuf_td.kernels.rank_order.merged import MergedOrder
from rlbuf_td.kernels.rank_order.sorted import SortedOrder

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
                for width in (1, 21 * 8, 1_024):
                    along = columns.gathering(torch.zeros(5, width, dtype=torch.uint8), 100)
                    sum_tree.draw(tree, uniform, stratified, 5, 0.4, norm, along)


def of_rank() -> None:
    for dtype, batch in ((torch.float32, 7), (torch.float64, 256), (torch.float32, 3_000)):
        for order in (SortedOrder(torch.rand(20_000)), MergedOrder(torch.rand(20_000))):
            order.update_(torch.zeros(batch, dtype=torch.int64), torch.ones(batch, dtype=dtype), 20_000)
            order.fill_(3, batch, 1.0)
            for norm in ("buffer", "batch", None):
                for stratified in (True, False):
                    uniform = torch.rand(100, dtype=torch.float64)
                    order.draw(rank_law(0.7), uniform, stratified=stratified, beta=0.4, norm=norm)


def of_selection() -> None:
    for capacity in (9, 1_000_000):
        order = SelectedOrder(torch.rand(capacity))
        for norm in ("buffer", "batch", None):
            for stratified in (True, False):
                uniform = torch.rand(256, dtype=torch.float64)
                order.draw(rank_law(0.7), uniform, stratified=stratified, beta=0.4, norm=norm)


def of_scan() -> None:
    for shape in ((4096, 32, 1), (8, 2048, 1), (3, 1, 1), (1, 16, 64), (1, 128, 100), (1, 2048, 8)):
        zero = torch.zeros(shape)
        scan.gae(0.9, 0.9, zero, zero, zero, zero > 0, zero > 0)
        scan.reverse_scan(zero, zero)
        scan.reverse_scan(zero.double(), zero.double())


def of_rows() -> None:
    rows = torch.zeros(6, dtype=torch.int64)
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        for width in (1, 42, 3_528):
            block = torch.zeros(6, width, dtype=dtype)
            if dtype is not torch.bool:
                columns.gather_rows(block, rows)
            columns.copy_rows_(block, block, rows, rows == 0)


def of_trajectories() -> None:
    rows = torch.zeros(6, dtype=torch.int64)
    for steps, lanes in ((1, 1), (5_000, 1), (64, 8)):
        boundaries = FlagBoundaries(steps, lanes)
        boundaries.reach(rows)
        law = goals.Law((0.2, 0.3, 0.5, 0.8), True)
        goals.choose_goals(boundaries, rows, torch.rand(6, dtype=torch.float64), law, steps)
        for dtype in (torch.float32, torch.float64):
            for n in (1, 5):
                n_step.sums_ahead(boundaries, rows, torch.zeros(steps * lanes, 2, dtype=dtype), n, 0.9)


def main() -> None:
    """Compile all, and fail unless each has become machine code."""
    driver.set_active(Device())
    JITFunction.__getitem__ = _compile
    with forced("triton"):
        for part in (of_sum_tree, of_rank, of_selection, of_scan, of_rows, of_trajectories):
            part()
    for name, kinds in sorted(compiled.items()):
        print(f"{name}: {', '.join(sorted(kinds))}")
        if "cubin" not in kinds:
            raise SystemExit(f"{name} has not become machine code")


if __name__ == "__main__":
    main()
