"""A naive order, and values that are hard to order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def empty(capacity: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the magnitudes of rows that have none."""
    return torch.full((capacity,), -1.0, device=device)


class NaiveOrder:
    """A list of magnitudes, sorted whenever someone asks."""

    def __init__(self, capacity: int) -> None:
        self.magnitude: list[float | None] = [None] * capacity

    def update(self, index: list[int], td_error: list[float]) -> None:
        for row, error in zip(index, td_error, strict=True):
            if row >= 0:
                self.magnitude[row] = abs(error)

    def ranks(self) -> list[int]:
        given = sorted((-m, row) for row, m in enumerate(self.magnitude) if m is not None)
        ranks = [0] * len(self.magnitude)
        for rank, (_, row) in enumerate(given, 1):
            ranks[row] = rank
        return ranks


VALUES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "continuous": lambda rng, n: rng.standard_normal(n),
    "few": lambda rng, n: rng.integers(-2, 3, n).astype(float),
    "equal": lambda rng, n: np.full(n, float(rng.integers(3))),
    "rising": lambda rng, n: 1.0 + np.sort(rng.random(n)),
    "falling": lambda rng, n: 1.0 - np.sort(rng.random(n)),
    "neighbours": lambda rng, n: 0.5 + 1e-6 * rng.integers(0, 50, n),
    "outliers": lambda rng, n: np.where(rng.random(n) < 0.1, 1e30, rng.random(n)),
}
