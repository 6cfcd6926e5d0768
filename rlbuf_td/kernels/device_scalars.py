"""Keeps settings in device memory, where CUDA graphs read them.

A CUDA graph repeats the captured kernels with the same arguments. Settings that may change later, such as alpha, are
therefore kept in device memory, and the host updates them before it launches the graph.
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
    """Mark this thread as capturing a CUDA graph: operations then read their settings from device memory."""
    token = _is_capturing.set(True)
    try:
        yield
    finally:
        _is_capturing.reset(token)


def is_capturing() -> bool:
    """Whether this thread is inside :func:`capturing`; always False under ``torch.compile``."""
    return not torch.compiler.is_compiling() and _is_capturing.get()


def outside_inference_mode() -> AbstractContextManager[object]:
    """Disable inference mode in a ``with`` block, so that tensors created in it can be modified in place later."""
    return torch.inference_mode(False)


class DeviceScalars:
    """``count`` float64 numbers in device memory at a fixed address, initially 0."""

    def __init__(self, count: int, device: torch.device | str) -> None:
        with outside_inference_mode():
            self.tensor = torch.zeros(count, dtype=torch.float64, device=device)
        self._known: list[float | None] = [0.0] * count

    def set_(self, at: int, value: float | Tensor) -> None:
        if isinstance(value, Tensor):
            self.tensor[at].copy_(value)
            self._known[at] = None
        elif value != self._known[at]:  # setting the same float again launches no kernel
            self.tensor[at].fill_(value)
            self._known[at] = value

    def __getitem__(self, at: int) -> Tensor:
        return self.tensor[at]


class PriorityState:
    """Named settings and counters in device memory, which captured CUDA graphs read and change."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._numbers = DeviceScalars(len(names), device)
        with outside_inference_mode():  # the largest |td_error| (-1: none), and the number of NaN or infinite errors
            self.largest = torch.full((), -1.0, dtype=torch.float64, device=device)
            self._unseen = self.largest.clone()
            self.refused = torch.zeros((), dtype=torch.int64, device=device)

    def __getitem__(self, name: str) -> Tensor:
        return self._numbers[self._places[name]]

    def put(self, **values: float | Tensor) -> tuple[float | Tensor, ...]:
        """Copy settings to device memory, and return the 0-dim tensors that hold them."""
        if torch.compiler.is_compiling():
            return tuple(values.values())
        for name, value in values.items():
            self._numbers.set_(self._places[name], value)
        return tuple(self[name] for name in values)

    def note(self, largest: Tensor, refused: Tensor, counts: bool) -> Tensor:
        """Record the results of an update; return the largest ``|td_error|`` so far."""
        # Updates with counts=False have a maximum of their own, which does not affect the priority of new rows.
        kept = self.largest if counts else self._unseen
        kept.copy_(torch.maximum(kept, largest))
        self.refused.add_(refused)
        return kept


def write_magnitudes(
    memory: Tensor, index: Tensor, magnitude: Tensor, rows: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Set ``memory[index] = magnitude`` for finite magnitudes and ``0 <= index < rows``, the last one of equal indices.

    Return the written indices (``[B]``, some repeated; all 0 if nothing was written), the largest valid magnitude (-1:
    none), and the number of NaN or infinite magnitudes at indices in ``[0, rows)``.
    """
    named = (index >= 0) & (index < rows)
    valid = named & magnitude.isfinite()
    # All duplicates of a row write its last magnitude, and every skipped entry writes the valid row with the highest
    # index once more. The order of the scatter therefore does not matter, and no shape depends on data.
    ordered, order = torch.where(valid, index, -1).sort(stable=True)
    target = torch.where(ordered < 0, ordered[-1], ordered)
    last = order[torch.searchsorted(ordered, target, right=True) - 1]
    row = target.clamp(min=0)
    memory[row] = torch.where(target < 0, memory[row], magnitude[last])
    return row, torch.where(valid, magnitude, -1.0).max(), (named & ~valid).sum()
