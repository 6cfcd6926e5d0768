"""Whether Triton's interpreter, which runs kernels of a GPU on the CPU, works here."""

from __future__ import annotations

from functools import cache

import torch


@cache
def why_not() -> str | None:
    try:
        import triton
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError as error:
        return f"no Triton's interpreter: {error}"
    if not triton.knobs.runtime.interpret:
        return "Triton was imported before TRITON_INTERPRET=1 was set"
    try:
        InterpretedFunction(_count)[(1,)](torch.zeros(1, dtype=torch.int64), 2)
    except Exception as error:  # noqa: BLE001  the interpreter raises what NumPy does
        return f"Triton's interpreter does not work with this NumPy: {error}"
    return None


def _count(out, steps):
    for _ in range(steps):
        pass
