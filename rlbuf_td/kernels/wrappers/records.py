"""Records of the sums of rewards, of windows, and of hindsight goals."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GoalDistribution(NamedTuple):
    """The distribution of hindsight goals: a random number selects the strategy with
    the first threshold above it."""

    # ascending, one per strategy; above the last one, a row keeps its goal
    thresholds: tuple[float, ...]
    # relabel no rows of unfinished trajectories, except by ``random``
    only_finished: bool
    # ``future`` takes the row k steps ahead with probability proportional to exp(k
    # log_gamma)
    log_gamma: float


class Goals(NamedTuple):
    """Where a kernel finds achieved goals, and where it writes them."""

    rows: Tensor  # ``[N, width]``
    offset: int  # of the achieved goal in a row, in bytes
    leaves: list[Tensor]  # of a batch, one or two, ``[B, ...]``, contiguous
    live: int  # the number of live rows, which lie in the cells from 0 on


class Rewards(NamedTuple):
    """Where the rewards of rows lie, and where their sums go."""

    rows: Tensor  # ``[N, width]``
    offset: int  # of the rewards in a row, in bytes
    total: Tensor  # ``[B, ...]`` float32 or float64, contiguous


class Sums(NamedTuple):
    """How far sums of rewards reach, of ``B`` rows."""

    ends: Tensor  # the cells of the last rows, ``[B]`` int64
    taken: Tensor  # the number of rewards, ``[B]`` int64


class WindowShape(NamedTuple):
    """Which rows around an anchor its window has."""

    length: int  # rows from the anchor on
    burn_in: int  # rows before it
    shifts: bool  # whether a window that is too long for its trajectory begins earlier
    crosses: bool  # whether windows go on into the next episode of the lane

    @property
    def window(self) -> int:
        return self.burn_in + self.length


class Expanded(NamedTuple):
    """The rows of ``B`` windows of ``L`` rows."""

    flat: Tensor  # ``[B * L]`` int64
    anchors: Tensor  # of each row, ``[B * L]`` int64, or ``[B * L, 2]``: slot and lane
    mask: Tensor  # ``[B * L]`` bool: False for padding
    burn_in_mask: Tensor  # ``[B * L]`` bool
    # ``[B * L]`` bool: the first row of a window, and the first row that is no padding;
    # with ``crosses``, also the first rows of episodes
    first: Tensor
    last: Tensor  # ``[B * L]`` bool: the last row of a window that is no padding
