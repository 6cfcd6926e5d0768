"""Records of the sums of rewards on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rewards(NamedTuple):
    """Where the rewards of rows lie."""

    rows: Tensor  # ``[N, width]``
    offset: int  # of the rewards in a row, in bytes
    dtype: torch.dtype  # float32 or float64
    shape: torch.Size  # of the rewards of a row


class Sums(NamedTuple):
    """Sums of rewards along the steps of episodes, of ``B`` rows."""

    total: Tensor  # ``[B, *shape]``
    ends: Tensor  # the cells of the last rows, ``[B]`` int64
    taken: Tensor  # the number of rewards, ``[B]`` int64
