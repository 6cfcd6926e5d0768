"""Selects the backend of each operation.

- ``"numba"``: compiled loops, for memory on the CPU.
- ``"torch"``: the reference implementation, for all other memory, and under ``torch.compile``.

Importing numba takes a second, so compiled modules are imported only when they are needed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Backend: TypeAlias = Literal["numba", "torch"]

_forced: Backend | None = None  # set by tests; applies to every device
_is_compiling = torch.compiler.is_compiling


def backend_of(memory: Tensor) -> Backend:
    if _forced is not None:
        return _forced
    if _is_compiling():
        return "torch"
    return "numba" if memory.is_cpu else "torch"


def uses_numba(device: torch.device) -> bool:
    """Whether compiled loops will work on an object that is made now for memory on ``device``."""
    return device.type == "cpu" if _forced is None else _forced == "numba"


def import_kernels() -> None:
    """Import all kernels now. A child that is forked while a thread imports one could never import it."""
    room = str(Path(__file__).parent)
    for module in pkgutil.walk_packages([room], f"{__package__}."):
        importlib.import_module(module.name)


def machine_code(loop: Any, *examples: Any) -> Callable[..., Any]:
    """Compile a numba loop for the types of ``examples``, and return the compiled function.

    In a training loop, a call of the returned function takes 5 us less than a call of ``loop``, which first looks at
    the types of its arguments.
    """
    from numba import typeof

    return loop.compile(tuple(map(typeof, examples)))
