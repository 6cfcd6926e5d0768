"""Selects the backend of each operation.

- ``"numba"``: compiled loops, for memory on the CPU.
- ``"triton"``: GPU kernels of the sum tree and of trajectory boundaries, for CUDA memory if Triton is installed. All
  other operations use the reference implementation on CUDA.
- ``"torch"``: the reference implementation, for all other memory, and under ``torch.compile``.

To disable Triton, set the environment variable ``RLBUF_TD_TRITON=0`` or call ``enable_triton(False)``. Importing numba
or Triton takes seconds, so compiled modules are imported only when they are needed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Backend: TypeAlias = Literal["numba", "torch", "triton"]

_forced: Backend | None = None  # set by tests; applies to every device
_triton_is_enabled = os.environ.get("RLBUF_TD_TRITON", "1") != "0"
_agrees: dict[tuple[str, torch.device], bool] = {}
_is_compiling = torch.compiler.is_compiling


def backend_of(memory: Tensor) -> Backend:
    if _forced is not None:
        return _forced
    if _is_compiling():
        return "torch"
    if memory.is_cpu:
        return "numba"
    return "triton" if memory.is_cuda and _triton_is_enabled and _has_triton() else "torch"


def enable_triton(enabled: bool = True) -> None:
    global _triton_is_enabled
    _triton_is_enabled = enabled


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def agrees_with_reference(operation: str, device: torch.device, compare: Callable[[torch.device], None]) -> bool:
    """Return whether ``compare(device)``, which checks the Triton kernel of ``operation``, raises no error.

    The comparison runs once per operation and device. A warning is issued if it raises an error.
    """
    key = operation, device
    if key not in _agrees:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # comparing would wait for the device
        _agrees[key] = False
        try:
            compare(device)
            _agrees[key] = True
        except Exception as error:  # noqa: BLE001  whatever fails in Triton, the reference still works
            warnings.warn(
                f"the Triton kernel of the {operation} does not work on {device}, so torch operations replace it: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return _agrees[key]


def launching_on(memory: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``memory`` current in a ``with`` block: Triton launches kernels on the current device."""
    if not memory.is_cuda or memory.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(memory.device)


def machine_code(loop: Any, *examples: Any) -> Callable[..., Any]:
    """Compile a numba loop for the types of ``examples``, and return the compiled function.

    In a training loop, a call of the returned function takes 5 us less than a call of ``loop``, which first looks at
    the types of its arguments.
    """
    from numba import typeof

    return loop.compile(tuple(map(typeof, examples)))
