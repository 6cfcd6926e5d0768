"""Rows in the order of their magnitudes: the specification by sorting, and the choice of the fast twin.

An *order* gives every row that has a magnitude a rank, 1 for the largest; rows of equal magnitude are ranked by row, the
smaller first. Both classes here have the same methods and give the same ranks after any history.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class RankOrder(Protocol):
    """What a rank-based sampler asks of an order. Magnitudes are float32 and finite; their sign does not count."""

    capacity: int

    def update_(self, rows: Tensor, magnitude: Tensor) -> None: ...
    def update_range_(self, start: int, stop: int, magnitude: float) -> None: ...
    def clear_(self) -> None: ...
    def rows_at(self, ranks: Tensor) -> Tensor: ...
    def ranks_of(self, rows: Tensor) -> Tensor: ...
    def magnitude(self) -> Tensor: ...
