"""Starts kernels on a GPU, and tells them where their random numbers begin.

A kernel is a Triton function in ``<operation>/triton.py``, beside the torch operations
that specify it. No function here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def launch(
    kernel: Any, grid: Sequence[int], memory: Tensor, *arguments: Any, **constants: Any
) -> None:
    """Start ``kernel`` on the device of ``memory``, which is its first argument.

    Raises a RuntimeError while a CUDA graph is captured.
    """
    if memory.is_cuda:
        _refuse_capture()
    with torch.cuda.device_of(memory):
        kernel[tuple(grid)](memory, *arguments, **constants)


def _refuse_capture() -> None:
    """Raise a RuntimeError if a CUDA graph is being captured: it would repeat the
    arguments of this call, such as its random numbers and serials."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph would repeat this call of the buffer with the same random numbers and rows: capture the "
            "learner's step alone, and copy each batch to its tensors (notebook 09)"
        )


def blocks_of(count: int, size: int) -> int:
    """Return how many blocks of ``size`` elements hold ``count`` elements."""
    return -(-count // size)


def philox_start(
    generator: torch.Generator | None, device: torch.device, count: int
) -> tuple[int, int]:
    """Return the seed and the first counter of ``count`` Philox numbers.

    A generator on a GPU is such a seed and counter itself; the call advances it. A
    generator on the CPU, whose state is saved as well, draws a new seed.
    """
    source = generator
    if source is None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        source = torch.cuda.default_generators[index]
    if source is not None and source.device.type == "cuda":
        offset = source.get_offset()
        source.set_offset(offset + 4 * count)
        return source.initial_seed(), offset // 4
    seed = torch.randint(2**62, (), generator=generator, device="cpu")
    return int(seed), 0
