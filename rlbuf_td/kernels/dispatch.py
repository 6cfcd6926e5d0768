"""Selects the backend of each operation.

- ``"numba"``: compiled loops, for memory on the CPU.
- ``"triton"``: kernels for memory on a GPU, where Triton, which torch brings along on
  Linux, can compile them, and a self-check has found their results right.
- ``"torch"``: the reference implementation, for all other memory, for operations that
  have no kernel, under ``torch.compile``, and without numba, which does not know the
  newest Python for some months.

Importing numba takes a second, and so does Triton, so compiled modules are imported
only when they are needed.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    get_type_hints,
)

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.host_memory import in_dispatch_mode

if TYPE_CHECKING:
    from numba.core.dispatcher import Dispatcher

Backend: TypeAlias = Literal["numba", "triton", "torch"]
Given = ParamSpec("Given")
Result = TypeVar("Result")

#: Why nothing can be compiled in this process; "" if loops can be.
# ``NUMBA_DISABLE_JIT=1`` is for debuggers.
OFF = (
    "NUMBA_DISABLE_JIT is set"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    else ""
)
if not OFF and find_spec("numba") is None:
    OFF = f"numba is not installed for Python {platform.python_version()}"
    warnings.warn(
        f"{OFF}: rlbuf_td runs the same operations in torch, several times slower. pip install numba, or take a Python "
        "that numba supports",
        RuntimeWarning,
        stacklevel=2,
    )
#: For every device; tests set it.
_forced: Backend | None = None
_ON_CPU: Backend = "torch" if OFF else "numba"
is_compiling = torch.compiler.is_compiling


def backend_of(memory: Tensor) -> Backend:
    """Return which form of an operation runs on a tensor's device."""
    if _forced is not None:
        return _forced
    if is_compiling():
        return "torch"
    if memory.is_cpu:
        return _ON_CPU
    return "triton" if uses_triton(memory.device) else "torch"


def uses_triton(device: torch.device) -> bool:
    """Whether kernels run on memory on ``device``, see :func:`backend_of`."""
    if _forced is not None:
        return _forced == "triton"
    if device.type != "cuda" or is_compiling() or in_dispatch_mode():
        return False
    return not why_not_triton(device)


@cache
def why_not_triton(device: torch.device) -> str:
    """Say in one line why Triton's kernels do not run on a GPU; "" if they do.

    The first call for a device checks each kernel, and warns if one is wrong.
    """
    if find_spec("triton") is None:
        reason = "Triton is not installed"
    else:
        self_check = importlib.import_module(f"{__package__}.self_check")
        reason = self_check.fault_on(device)
    if reason:
        warnings.warn(
            f"{reason}: rlbuf_td runs the same operations in torch on {device}, several times slower",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason


def uses_numba(device: torch.device) -> bool:
    """Whether compiled loops will work on an object that is made now for memory on
    ``device``."""
    if _forced is not None:
        return _forced == "numba"
    return device.type == "cpu" and not OFF


def untraced(
    reason: str,
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Return a decorator like ``torch.compiler.disable``, without a call around the
    method.

    Such a call takes a twentieth of the time of a sample in a learner's loop. Instead,
    torch is told to run the method's code, and what it calls, as it is.
    """

    def decorate(method: Callable[Given, Result]) -> Callable[Given, Result]:
        try:
            from torch._C._dynamo import eval_frame

            skip = eval_frame._FrameAction.SKIP
            strategy = eval_frame._FrameExecStrategy(skip, skip)
            eval_frame.set_code_exec_strategy(method.__code__, strategy)
        # a version of torch without them
        except (ImportError, AttributeError):
            return torch.compiler.disable(method, reason=reason)
        # what a trace of a caller looks for
        method._torchdynamo_disable = True  # pyrefly: ignore [missing-attribute]
        method._torchdynamo_disable_msg = reason  # pyrefly: ignore [missing-attribute]
        return method

    return decorate


def import_kernels() -> None:
    """Import all loops now. A child that is forked while a thread imports one could
    never import it."""
    if OFF or _forced == "torch":
        return
    room = str(Path(__file__).parent)
    for module in pkgutil.walk_packages([room], f"{__package__}."):
        if not module.name.endswith((".triton", ".self_check")):
            importlib.import_module(module.name)


def compiled_form(part: object, name: str, *methods: str) -> Any:
    """Return the method ``name`` of a part, the compiled form of some other
    ``methods``; None if there is none, or a class below overrides one of these."""
    for members in (vars(part), *map(vars, type(part).__mro__)):
        if name in members:
            return getattr(part, name)
        if not members.keys().isdisjoint(methods):
            return None
    return None


def record_of(dtype: np.dtype, **fields: float) -> np.ndarray:
    """Return a record that compiled loops read, ``[1]``; a missing field is 0."""
    return np.array([tuple(fields.get(name, 0) for name in dtype.names or ())], dtype)


@cache
def loop(module: str, name: str, **examples: object) -> Callable[..., Any]:
    """Return the :func:`machine_code` of a loop in a module of this room, which is
    imported when it is needed."""
    return machine_code(
        getattr(importlib.import_module(f"{__package__}.{module}"), name), **examples
    )


@torch.compiler.disable(reason="torch.compile would trace numba's compiler")
def machine_code(loop: Dispatcher, **examples: object) -> Callable[..., Any]:
    """Compile a numba loop for the types of its arguments, and return the compiled
    function.

    A parameter has the type of its example, otherwise that of its annotation (a type of
    numbers, or a NamedTuple of them), and without an annotation it is an int: an
    address or a count.

    In a training loop, a call of the returned function takes 5 us less than a call of
    ``loop``, which first looks at the types of its arguments. It takes positional
    arguments, and does not check the types of tuples.
    """
    from numba import typeof

    kinds = get_type_hints(loop.py_func)
    arguments = {
        name: _example_of(kinds.get(name, int))
        for name in signature(loop.py_func).parameters
    } | examples
    return loop.compile(tuple(map(typeof, arguments.values())))


def _example_of(kind: type[Result]) -> Result:
    """Return 0 of a type of numbers, or a NamedTuple of such examples."""
    return kind(*map(_example_of, get_type_hints(kind).values()))
