"""Rows in the order of their magnitudes ``|td_error|``: rank 1 is the largest, equal magnitudes are ranked by row.

Two classes have the methods of :class:`RankOrder` and give the same ranks after any history:

- :class:`~rlbuf_td.kernels.rank_order.reference.SortedOrder` sorts the magnitudes when asked. It runs on any device
  without waiting for it.
- :class:`~rlbuf_td.kernels.rank_order.chunked.ChunkedOrder` changes in O(log N) per row: the CPU uses it.

Magnitudes are float32: errors that are equal as float32 are a tie, and larger ones count as the largest float32.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.rank_order.chunked import ChunkedOrder
from rlbuf_td.kernels.rank_order.chunks import allocate
from rlbuf_td.kernels.rank_order.law import RankLaw, cumulative, mass, rank_law, ranks_of_mass
from rlbuf_td.kernels.rank_order.reference import LARGEST, SortedOrder, as_float32

__all__ = ["LARGEST", "ChunkedOrder", "RankLaw", "RankOrder", "SortedOrder", "as_float32", "cumulative", "make_order"]
__all__ += ["mass", "order_bytes", "rank_law", "ranks_of_mass"]


class RankOrder(Protocol):
    """What a rank-based sampler asks of an order over ``capacity`` rows. ``B`` is the length of a batch."""

    def update_(self, index: Tensor, td_error: Tensor, rows: int, counts: bool = True) -> float | Tensor | None:
        """Give rows ``|td_error|``; -1 is skipped, and the last error of a duplicate row stays.

        Args:
            index: ``[B]`` int64.
            td_error: ``[B]`` float32 or float64.
            rows: number of rows that may be named.
            counts: whether these are errors that have been seen: on CUDA, whether the largest one is remembered.

        Returns:
            The largest magnitude given, -1 if none. On the CPU ``None`` if a row is not in ``[-1, rows)`` or an error
            is NaN or infinite, and then nothing has changed; on CUDA rows with such errors keep what they have, the
            errors are counted, and the largest magnitude is that of all updates, a 0-dim tensor that later ones change.
        """

    def fill_(self, start: int, count: int, magnitude: float | Tensor) -> None:
        """Give ``count`` rows from ``start`` on one magnitude."""

    def draw(
        self, law: RankLaw, uniform: Tensor, *, stratified: bool, beta: float, norm: str | None
    ) -> tuple[Tensor, Tensor] | None:
        """Draw rows by rank.

        Args:
            law: probabilities of ranks.
            uniform: ``[B]`` float64 in ``[0, 1)``.
            stratified: draw one row from each of ``B`` segments of equal mass, rather than each row from the whole.
            beta: exponent of the importance weight ``(N P)^-beta``, not negative.
            norm: divide by the ``"buffer"``'s largest weight, the ``"batch"``'s, or nothing (``None``).

        Returns:
            ``[B]`` int64 rows and ``[B]`` float32 importance weights; ``None`` if no row has a magnitude (not on CUDA).
        """

    def ranks_of(self, index: Tensor) -> Tensor:
        """Return ranks of rows, int64; 0 for a row without a magnitude."""

    def count(self) -> Tensor:
        """Return how many rows have a magnitude, a 0-dim int64 tensor."""

    def assign_(self, magnitude: Tensor) -> None:
        """Make the order anew of ``[capacity]`` float32 magnitudes, in the memory that it has, whatever that holds."""

    def share_memory_(self) -> None:
        """Move the state into shared memory: a process that is given this object sees the same order."""

    @property
    def magnitude(self) -> Tensor:
        """``[capacity]`` float32, -1 for rows without; to be read only."""

    @property
    def refused(self) -> Tensor | int:
        """How many NaN or infinite errors have been left out; 0 on the CPU, which refuses the whole batch."""

    def prepare_capture(self, law: RankLaw, beta: float, rows: int) -> Tensor | None:
        """Copy host-side settings to where captured graphs read them.

        Returns:
            Where the largest magnitude seen is kept, a 0-dim tensor; ``None`` on the CPU.
        """

    def forget_order(self) -> None:
        """Take note that a captured graph has changed magnitudes."""


def make_order(magnitude: Tensor, stale_updates: int = 0) -> RankOrder:
    """Make the order that serves the device of some magnitudes.

    Args:
        magnitude: ``[capacity]`` float32, -1 for rows without.
        stale_updates: of an order that sorts when asked; on the CPU the order is always exact.
    """
    return ChunkedOrder(magnitude) if backend_of(magnitude) == "numba" else SortedOrder(magnitude, stale_updates)


def order_bytes(capacity: int, device: torch.device) -> int:
    """Return the bytes of what :func:`make_order` makes for ``capacity`` rows."""
    if device.type == "cuda":
        return capacity * (4 + 2 * 8)  # magnitudes, rows by rank and ranks by row
    with torch.device("meta"):  # shapes without memory
        return sum(tensor.nbytes for tensor in allocate(capacity).values())
