"""Which of a kernel's forms runs: the one place where that is decided.

================= ==============================================================================
``"numba"``       the CPU's twins; memory on the CPU
``"triton"``      the GPU's twins; memory on a CUDA device, and Triton is installed
``"torch"``       the specification: any other device, or no Triton, or a graph that is being compiled
================= ==============================================================================

``"triton"`` and ``"torch"`` are the *device paths*: nothing on them waits for the host, so that what cannot be refused
without looking is skipped and counted instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Backend: TypeAlias = Literal["numba", "torch", "triton"]

_forced: Backend | None = None
_is_compiling = torch.compiler.is_compiling


def backend_of(memory: Tensor) -> Backend:
    """Return the form that works on this memory."""
    if _forced is not None:
        return _forced
    if _is_compiling():
        return "torch"
    if memory.is_cpu:
        return "numba"
    return "triton" if memory.is_cuda and has_triton() else "torch"


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; it is imported by the twins only."""
    return find_spec("triton") is not None


@contextmanager
def forced(path: Backend) -> Iterator[None]:
    """Let one form run whatever the device: for tests and comparisons.

    ``"triton"`` on the CPU needs Triton's interpreter: ``TRITON_INTERPRET=1``, set before anything imports Triton.
    Objects remember what they were made for: make them inside.

    Example:
        >>> from rlbuf_td.kernels.sum_tree import SumTree, update_
        >>> with forced("torch"):
        ...     update_(SumTree.empty(8), torch.tensor([3]), torch.tensor([2.0]), 8, 1.0, 0.0)
        tensor(2., dtype=torch.float64)
    """
    global _forced
    before, _forced = _forced, path
    try:
        yield
    finally:
        _forced = before


def launching_on(memory: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``memory`` the one that Triton launches on."""
    if not memory.is_cuda or memory.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(memory.device)
