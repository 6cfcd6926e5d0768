"""Keeps rows in the order of their magnitudes ``|td_error|``: rank 1 is the largest, and ties are ordered by row.

Two classes have the same methods:

- :class:`~rlbuf_td.kernels.rank_order.reference.SortedOrder` sorts all rows when ranks are needed, on any device.
- :class:`~rlbuf_td.kernels.rank_order.chunked.ChunkedOrder`, on the CPU, keeps the rows sorted in short chunks, and
  counts the rows before each chunk. Finding the row of a rank takes O(log N).

Magnitudes are float32: errors that are equal as float32 are a tie, and errors above the largest float32 are clamped.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import uses_numba
from rlbuf_td.kernels.rank_order.chunked import ChunkedOrder
from rlbuf_td.kernels.rank_order.chunks import allocate
from rlbuf_td.kernels.rank_order.law import RankLaw, cumulative, mass, rank_law, ranks_of_mass
from rlbuf_td.kernels.rank_order.reference import LARGEST, SortedOrder, as_float32

__all__ = ["LARGEST", "ChunkedOrder", "RankLaw", "RankOrder", "SortedOrder", "as_float32", "cumulative", "make_order"]
__all__ += ["mass", "order_bytes", "rank_law", "ranks_of_mass"]

RankOrder: TypeAlias = SortedOrder | ChunkedOrder


def make_order(magnitude: Tensor, stale_updates: int = 0) -> RankOrder:
    """Return the rank order of rows with the given magnitudes, ``[capacity]`` float32, -1 for rows without a priority.

    On the CPU, ranks are always exact; elsewhere, a look-up may ignore the last ``stale_updates`` updates.
    """
    return ChunkedOrder(magnitude) if uses_numba(magnitude.device) else SortedOrder(magnitude, stale_updates)


def order_bytes(capacity: int, device: torch.device) -> int:
    if device.type != "cpu":
        return capacity * (4 + 2 * 8)  # magnitudes, rows by rank and ranks by row
    return sum(tensor.nbytes for tensor in allocate(capacity, "meta").values())  # shapes without memory
