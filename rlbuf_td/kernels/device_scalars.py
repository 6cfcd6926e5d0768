"""Host-side numbers as tensors on the device.

A CUDA graph repeats what was launched when it was captured, arguments included. What changes between replays (rows
written, alpha, beta) is therefore no argument but memory, which the host changes outside the graph.
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
    """Mark that this thread captures a graph: kernels read settings on the device, and trust no cached results."""
    token = _is_capturing.set(True)
    try:
        yield
    finally:
        _is_capturing.reset(token)


def is_capturing() -> bool:
    """Whether this is inside of :func:`capturing`; never in a function that is being compiled."""
    return not torch.compiler.is_compiling() and _is_capturing.get()


def outside_inference_mode() -> AbstractContextManager[object]:
    """Make tensors that may be written to later: torch refuses to write to those made in inference mode."""
    return torch.inference_mode(False)


class DeviceScalars:
    """``count`` float64 numbers in the same memory always, 0 at first. Integers up to 2**53 are exact."""

    def __init__(self, count: int, device: torch.device | str) -> None:
        with outside_inference_mode():
            self.tensor = torch.zeros(count, dtype=torch.float64, device=device)
        self._known: list[float | None] = [0.0] * count

    def set_(self, at: int, value: float | Tensor) -> None:
        """Change a number, or copy a 0-dim tensor of the device. Launches nothing if a number is what it was."""
        if isinstance(value, Tensor):
            self.tensor[at].copy_(value)
            self._known[at] = None
        elif value != self._known[at]:
            self.tensor[at].fill_(value)
            self._known[at] = value

    def __getitem__(self, at: int) -> Tensor:
        return self.tensor[at]


class PriorityState:
    """What captured draws and updates of priorities read and change, always in the same memory.

    Beside the numbers of these names: ``largest``, 0-dim float64, the largest magnitude seen, -1 before any, and
    ``refused``, 0-dim int64, how many NaN or infinite errors have been left out.
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
        """Copy numbers to where captured graphs read them; return them as kernels are to read them."""
        if torch.compiler.is_compiling():
            return tuple(values.values())
        for name, value in values.items():
            self._numbers.set_(self._places[name], value)
        return tuple(self[name] for name in values)

    def note(self, largest: Tensor, refused: Tensor, counts: bool) -> Tensor:
        """Take note of an update; return the largest magnitude so far, of errors that count as seen or of others."""
        kept = self.largest if counts else self._unseen
        kept.copy_(torch.maximum(kept, largest))
        self.refused.add_(refused)
        return kept


def write_magnitudes(
    memory: Tensor, index: Tensor, magnitude: Tensor, rows: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write magnitudes to rows in ``[0, rows)``; the last one of a duplicate row stays.

    Returns:
        ``[B]`` int64, the rows written; the largest magnitude given, -1 if none; how many were not finite: left out.
    """
    named = (index >= 0) & (index < rows)
    valid = named & magnitude.isfinite()
    # Every duplicate of a row gets the value of the last one, and every skipped entry repeats the last valid
    # row: the order of the scatter cannot matter, and no shape depends on data.
    ordered, order = torch.where(valid, index, -1).sort(stable=True)
    target = torch.where(ordered < 0, ordered[-1], ordered)
    last = order[torch.searchsorted(ordered, target, right=True) - 1]
    row = target.clamp(min=0)
    memory[row] = torch.where(target < 0, memory[row], magnitude[last])
    return row, torch.where(valid, magnitude, -1.0).max(), (named & ~valid).sum()
