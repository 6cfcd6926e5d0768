"""Sums of blocks of weights, which a draw on a GPU scans, and the records of its
kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlbuf_td.kernels.serials import Serials

WEIGHTS = 1024  # per block


class BlockUpdate(NamedTuple):
    """TD errors of rows."""

    index: Tensor  # ``[B]`` int64
    td_error: Tensor  # ``[B]`` float32 or float64
    stamp: Tensor | None  # ``[B]`` int64
    rows: int  # rows that can have a priority
    serials: Serials | None  # None without stamps


class Run(NamedTuple):
    """New rows in consecutive cells; after the last cell comes cell 0."""

    first: int  # the first cell
    count: int  # the number of new rows
    cells: int  # the number of cells of all rows


class WeightLaw(NamedTuple):
    """How magnitudes become weights."""

    alpha: float  # exponent
    eps: float  # added to magnitudes
    least: float  # lower bound of magnitudes
    first: float  # magnitude of new rows before any TD error


def block_count(rows: int) -> int:
    return -(-rows // WEIGHTS)


def set_blocks_(blocks: Tensor, weight: Tensor) -> None:
    """Compute the sum of each block of weights, and its smallest positive weight
    (infinite if there is none), ``[2, blocks]`` float64."""
    padding = blocks.shape[1] * WEIGHTS - len(weight)
    parts = pad(weight, (0, padding)).view(-1, WEIGHTS)
    blocks[0] = parts.sum(1, dtype=torch.float64)
    blocks[1] = torch.where(parts > 0, parts, torch.inf).amin(1)
