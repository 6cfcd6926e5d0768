"""Rows in the order of their magnitudes ``|td_error|``: rank 1 is the largest, ties are ordered by row.

Two classes have the same methods and give the same ranks after any history:

- :class:`~rlbuf_td.kernels.rank_order.reference.SortedOrder` sorts the magnitudes when they are needed. It runs on any
  device without host synchronisation.
- :class:`~rlbuf_td.kernels.rank_order.chunked.ChunkedOrder` keeps the rows sorted, in short chunks that split when they
  are full, and counts the rows before each chunk. These counts give the chunk of a rank in O(log N), and a changed
  row moves from one chunk to another. The CPU uses it.

The probability of rank ``r`` depends on ``r`` and ``N`` alone (``law.py``), so priorities need no sums.
Magnitudes are float32: errors that are equal as float32 are a tie, and errors beyond its range count as its maximum.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.rank_order.chunked import ChunkedOrder
from rlbuf_td.kernels.rank_order.chunks import allocate
from rlbuf_td.kernels.rank_order.law import RankLaw, cumulative, mass, rank_law, ranks_of_mass
from rlbuf_td.kernels.rank_order.reference import LARGEST, SortedOrder, as_float32

__all__ = ["LARGEST", "ChunkedOrder", "RankLaw", "RankOrder", "SortedOrder", "as_float32", "cumulative", "make_order"]
__all__ += ["mass", "order_bytes", "rank_law", "ranks_of_mass"]


RankOrder: TypeAlias = SortedOrder | ChunkedOrder


def make_order(magnitude: Tensor, stale_updates: int = 0) -> RankOrder:
    """Make the order for the magnitudes' device; ``stale_updates`` applies to :class:`SortedOrder` only."""
    return ChunkedOrder(magnitude) if backend_of(magnitude) == "numba" else SortedOrder(magnitude, stale_updates)


def order_bytes(capacity: int, device: torch.device) -> int:
    if device.type == "cuda":
        return capacity * (4 + 2 * 8)  # magnitudes, rows by rank and ranks by row
    return sum(tensor.nbytes for tensor in allocate(capacity, "meta").values())  # shapes without memory
