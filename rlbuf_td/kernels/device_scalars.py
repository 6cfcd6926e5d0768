"""Stores host-side settings on the device for CUDA graphs.

A CUDA graph repeats its captured kernel launches with the same arguments. Numbers that change between launches (rows
written, alpha, beta) are therefore kept in device memory, which the host changes before a launch.
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
    """Mark this thread as capturing a CUDA graph; operations then read settings from the device and ignore caches."""
    token = _is_capturing.set(True)
    try:
        yield
    finally:
        _is_capturing.reset(token)


def is_capturing() -> bool:
    """Whether this thread is inside :func:`capturing`; always False under ``torch.compile``."""
    return not torch.compiler.is_compiling() and _is_capturing.get()


def outside_inference_mode() -> AbstractContextManager[object]:
    """Disable inference mode, because normal code cannot modify tensors that were created in inference mode."""
    return torch.inference_mode(False)


class DeviceScalars:
    """``count`` float64 numbers in device memory at a fixed address, initially 0."""

    def __init__(self, count: int, device: torch.device | str) -> None:
        with outside_inference_mode():
            self.tensor = torch.zeros(count, dtype=torch.float64, device=device)
        self._known: list[float | None] = [0.0] * count

    def set_(self, at: int, value: float | Tensor) -> None:
        """Set number ``at`` to a float or a 0-dim device tensor; setting an unchanged float launches no kernel."""
        if isinstance(value, Tensor):
            self.tensor[at].copy_(value)
            self._known[at] = None
        elif value != self._known[at]:
            self.tensor[at].fill_(value)
            self._known[at] = value

    def __getitem__(self, at: int) -> Tensor:
        return self.tensor[at]


class PriorityState:
    """Settings and counters in device memory, which captured CUDA graphs read and change.

    The memory holds the settings ``names``, the largest magnitude ``|td_error|`` so far (``largest``, 0-dim float64, -1
    if none), and the number of skipped NaN or infinite TD errors (``refused``, 0-dim int64).
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._numbers = DeviceScalars(len(names), device)
        with outside_inference_mode():
            self.largest = torch.full((), -1.0, dtype=torch.float64, device=device)
            self._unseen = self.largest.clone()
            self.refused = torch.zeros((), dtype=torch.int64, device=device)

    def __getitem__(self, name: str) -> Tensor:
        return self._numbers[self._places[name]]

    def put(self, **values: float | Tensor) -> tuple[float | Tensor, ...]:
        """Copy settings to device memory and return them as 0-dim tensors; under ``torch.compile`` only return them."""
        if torch.compiler.is_compiling():
            return tuple(values.values())
        for name, value in values.items():
            self._numbers.set_(self._places[name], value)
        return tuple(self[name] for name in values)

    def note(self, largest: Tensor, refused: Tensor, counts: bool) -> Tensor:
        """Record an update's largest magnitude and number of refused TD errors; return the largest magnitude so far.

        Updates with ``counts=False`` have a separate maximum, which does not affect the priority of new rows.
        """
        kept = self.largest if counts else self._unseen
        kept.copy_(torch.maximum(kept, largest))
        self.refused.add_(refused)
        return kept


def write_magnitudes(
    memory: Tensor, index: Tensor, magnitude: Tensor, rows: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write finite magnitudes to rows ``index`` within ``[0, rows)``; a duplicate row keeps its last magnitude.

    Returns the written rows (``[B]`` int64, row 0 if there are none), the largest finite magnitude (-1 if there is
    none), and the number of NaN or infinite magnitudes. The last two results ignore rows outside ``[0, rows)``.
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
