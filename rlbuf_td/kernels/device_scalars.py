"""Numbers of the host as a tensor on the device: kernels read them there.

A CUDA graph repeats what was launched when it was captured, arguments included. What changes between replays (how many
rows are written, alpha, beta) is therefore no argument but memory, which the host changes outside the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_is_capturing: ContextVar[bool] = ContextVar("is_capturing", default=False)


@contextmanager
def capturing() -> Iterator[None]:
    """Say that what is launched inside will be launched again as it is, in this thread.

    What the host decides anew each time must be read on the device then, and what an earlier launch has found, or one
    inside, must not be taken to be right for others.
    """
    token = _is_capturing.set(True)
    try:
        yield
    finally:
        _is_capturing.reset(token)


def is_capturing() -> bool:
    """Return whether this is inside of :func:`capturing`; a function that is being compiled is not."""
    return not torch.compiler.is_compiling() and _is_capturing.get()


def outside_inference_mode() -> AbstractContextManager[object]:
    """Make memory inside that may be written to later, wherever: torch refuses that of what inference mode made."""
    return torch.inference_mode(False)


class DeviceScalars:
    """``count`` float64 numbers, 0 at first. Integers up to 2**53 are exact.

    Attributes:
        tensor: ``[count]`` float64, always the same memory.
    """

    def __init__(self, count: int, device: torch.device | str) -> None:
        with outside_inference_mode():
            self.tensor = torch.zeros(count, dtype=torch.float64, device=device)
        self._known: list[float | None] = [0.0] * count

    def set_(self, at: int, value: float | Tensor) -> None:
        """Change a number; launches nothing if it is what it was.

        Args:
            at: which one.
            value: a number, or a 0-dim tensor on the device, which the host does not look at.
        """
        if isinstance(value, Tensor):
            self.tensor[at].copy_(value)
            self._known[at] = None
        elif value != self._known[at]:
            self.tensor[at].fill_(value)
            self._known[at] = value

    def __getitem__(self, at: int) -> Tensor:
        return self.tensor[at]
