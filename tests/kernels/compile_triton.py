"""Compile every Triton kernel to machine code for an H100 or H200, without one; print the kernels' names.

The interpreter checks what a kernel computes, but takes programs that the compiler refuses. Run with
``TRITON_INTERPRET=0``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rlbuf_td.kernels import dispatch, sum_tree
from rlbuf_td.kernels.episodes import FlagBoundaries
from tests.backends import forced

compiled: set[str] = set()


#: What Triton asks a driver before it compiles.
DRIVER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
)


def _compile(self: Any, grid: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
        if "cubin" not in kernel.asm:
            raise SystemExit(f"{self.fn.__name__} has not become machine code")
        compiled.add(self.fn.__name__)

    return run


def main() -> None:
    driver.set_active(DRIVER)
    JITFunction.__getitem__ = _compile
    cpu = torch.device("cpu")
    dispatch._agrees.update({("sum tree", cpu): True, ("reach of trajectories", cpu): True})
    cells = torch.zeros(6, dtype=torch.int64)
    with forced("triton"):
        for capacity in (5, 100, 5_003):
            tree = sum_tree.SumTree.empty(capacity)
            for batch in (7, 3_000):
                index, td_error = torch.zeros(batch, dtype=torch.int64), torch.ones(batch)
                sum_tree.update_(tree, index, td_error, 5, 0.6, 1e-6)
            sum_tree.fill_(tree, 0, 5, 1.0, 0.6, 1e-6)
            for norm in ("buffer", "batch", None):
                for stratified in (True, False):
                    sum_tree.draw(tree, torch.rand(100, dtype=torch.float64), stratified, 5, 0.4, norm)
        for steps, lanes in ((1, 1), (5_000, 1), (64, 8)):
            FlagBoundaries(steps, lanes).reach(cells)
    print(*sorted(compiled))


if __name__ == "__main__":
    main()
