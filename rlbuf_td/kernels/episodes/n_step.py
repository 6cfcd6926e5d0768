"""n-step returns: on the CPU numba works in place on rows of bytes, elsewhere :func:`sums_ahead` uses torch ops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.episodes import BitBoundaries, Boundaries, FlagBoundaries, batch_loops
from rlbuf_td.kernels.rows import refuse_rows

_GAMMA = 6  # its place among the numbers of boundaries, behind those of a law of goals


def windows(boundaries: Boundaries, rows: Tensor, n: int, lanes: int, cells: int) -> tuple[Tensor, Tensor]:
    """Return the ``n`` rows from each row on, held at the last one of its trajectory, ``[B, n]``, and steps ahead."""
    ahead = boundaries.reach(rows, n)[1]
    offset = torch.arange(n, device=rows.device).minimum(ahead[:, None])
    return (rows[:, None] + offset * lanes) % cells, ahead


def n_step_sums(reward: Tensor, end: Tensor, ahead: Tensor, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return discounted sums of rewards, ``[B, ...]``, added up in float64, and how many each adds, ``[B]`` int64.

    Args:
        reward: ``[B, n, ...]``.
        end: ``[B, n]`` bool, the trajectory ends with this row.
        ahead: ``[B]``, number of rows after the first that belong to its trajectory.
        gamma: the discount factor, a number or a 0-dim tensor.
    """
    steps = torch.arange(reward.shape[1], device=reward.device)
    ended_before = end.cumsum(1) - end.long() > 0
    counts = (steps <= ahead[:, None]) & ~ended_before
    discount = torch.where(counts, gamma ** steps.to(torch.float64), 0.0)
    wide = counts.view(*counts.shape, *[1] * (reward.ndim - 2))
    terms = torch.where(wide, reward.to(torch.float64), 0.0) * discount.view(wide.shape)
    return terms.sum(1).to(reward.dtype), counts.sum(1)


def sums_ahead(
    boundaries: Boundaries, rows: Tensor, reward: Tensor, n: int, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up to ``n`` rewards from each row on, up to the end of its trajectory.

    Args:
        boundaries: where trajectories are cut.
        rows: ``[B]`` int64, contiguous.
        reward: ``[T * E, ...]``, of a floating dtype.
        n: most rewards per sum.
        gamma: the discount factor.

    Returns:
        ``[B, ...]`` discounted sums; ``[B]`` int64, how many rewards, 1 to n; ``[B]`` int64, the last row of each.
    """
    window, ahead = windows(boundaries, rows, n, boundaries.lanes, len(reward))
    end = torch.zeros_like(window, dtype=torch.bool)
    total, taken = n_step_sums(reward[window], end, ahead, discount_of(boundaries, gamma))
    return total, taken, window.gather(1, taken[:, None] - 1)[:, 0]


def put_gamma(boundaries: FlagBoundaries, gamma: float) -> None:
    """Copy the discount factor to the device, where captured graphs read it."""
    boundaries.numbers.set_(_GAMMA, gamma)


def discount_of(boundaries: Boundaries, gamma: float) -> float | Tensor:
    """Return the discount factor; off the CPU as a tensor that captured graphs read."""
    if isinstance(boundaries, BitBoundaries) or torch.compiler.is_compiling():
        return gamma
    put_gamma(boundaries, gamma)
    return boundaries.numbers[_GAMMA]


class Parts(NamedTuple):
    """Which bytes of a row an n-step transition takes from its last row, which it keeps, and where its reward lies.

    Attributes:
        reward: offset of the reward in bytes.
        features: numbers per reward.
        double: whether they are float64 rather than float32.
        row_bytes: bytes per row.
        address, taken, number: where ``ranges`` lies; how many ranges come from the last row; how many there are.
        ranges: ``[number, 2]`` int64, offset and width of byte ranges: first those from the last row, then those that
            stay. The reward is in none.
    """

    reward: int
    features: int
    double: bool
    row_bytes: int
    address: int
    taken: int
    number: int
    ranges: np.ndarray

    @classmethod
    def of(
        cls, reward: tuple[int, int, bool], row_bytes: int, taken: list[tuple[int, int]], kept: list[tuple[int, int]]
    ) -> Parts:
        """Return them with the address of their ranges."""
        ranges = np.array(taken + kept, np.int64)
        return cls(*reward, row_bytes, ranges.ctypes.data, len(taken), len(taken) + len(kept), ranges)


def n_step_(
    boundaries: BitBoundaries,
    source: int,
    parts: Parts,
    rows: Tensor,
    n: int,
    gamma: float,
    dims: int,
    live: int,
    batch: int,
) -> Tensor:
    """Read n-step transitions, and return of how many steps each is, ``[B, 1, ...]`` int64.

    Args:
        boundaries: where trajectories are cut.
        source: address of all rows of a storage, one after the other.
        parts: what to take from the last row.
        rows: flat rows to read, ``[B]`` int64, contiguous.
        n: most steps per transition.
        gamma: the discount factor.
        dims: number of dims of the result.
        live: number of rows written.
        batch: address of ``[B]`` rows to fill.

    Raises:
        IndexError: a row has not been written.
    """
    steps = torch.from_numpy(np.empty((rows.shape[0], *(1,) * (dims - 1)), np.int64))  # half the time of torch.empty
    given = source, batch, rows.shape[0], rows.data_ptr(), steps.data_ptr(), n, gamma, live
    if not batch_loops().n_step(boundaries.bitmap, *parts[:-1], *given):
        refuse_rows(rows, live)
    return steps
