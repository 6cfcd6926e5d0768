"""Selects the backend of each operation.

- ``"numba"``: compiled loops, for memory on the CPU.
- ``"torch"``: the reference implementation, for all other memory, and under ``torch.compile``.

Importing numba takes a second, so compiled modules are imported only when they are needed.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

Backend: TypeAlias = Literal["numba", "torch"]
Method = TypeVar("Method", bound=Callable[..., Any])

#: For every device; tests set it. With ``NUMBA_DISABLE_JIT=1``, a debugger can step through the reference.
_forced: Backend | None = "torch" if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0") else None
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
    if _forced == "torch":
        return
    room = str(Path(__file__).parent)
    for module in pkgutil.walk_packages([room], f"{__package__}."):
        importlib.import_module(module.name)


def compiled_form_of(*methods: str) -> Callable[[Method], Method]:
    """Mark a method ``bind_...`` as the compiled form of ``methods`` of the same part."""

    def mark(bind: Method) -> Method:
        bind.implements = frozenset(methods)  # type: ignore[attr-defined]
        return bind

    return mark


def compiled_form(part: object, name: str) -> Callable[..., Any] | None:
    """Return the method ``name`` of a part, or None if there is none, or a method that it implements is overridden."""
    overridden = set(vars(part))
    for cls in type(part).__mro__:
        bind = vars(cls).get(name)
        if bind is not None:
            return None if bind.implements & overridden else getattr(part, name)
        overridden |= vars(cls).keys()
    return None


def machine_code(loop: Any, *examples: Any) -> Callable[..., Any]:
    """Compile a numba loop for the types of ``examples``, and return the compiled function.

    In a training loop, a call of the returned function takes 5 us less than a call of ``loop``, which first looks at
    the types of its arguments.
    """
    from numba import typeof

    return loop.compile(tuple(map(typeof, examples)))
