r"""The probability of each row if rows are drawn from several shards.

The *mass* of shard s is :math:`M_s = \sum_{i \in s} p_i^\alpha` or, with a uniform sampler, the number of its rows. A
client chooses shard s with probability :math:`M_s / \sum_t M_t`; the shard then draws row i by its own priorities:

.. math:: P(i) = \frac{M_s}{\sum_t M_t} \cdot \frac{p_i^\alpha}{M_s} = p_i^\alpha \Big/ \sum_j p_j^\alpha

If another client has changed the mass to :math:`M'_s` before the draw, the probability is
:math:`(M_s / \sum_t M_t) \cdot p_i^\alpha / M'_s`. Importance weights use this probability, so they remain correct.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_BELOW_ONE = 1.0 - 2.0**-53


class Split(NamedTuple):
    """The draws of a batch, sorted by shard."""

    rank: Tensor  # ``[B]`` int64: for each row of the batch, the position of its draw among the sorted draws
    counts: Tensor  # ``[shards]`` int64: number of draws from each shard
    fractions: Tensor  # ``[B]`` float64 in [0, 1), sorted: position of each draw, as a fraction of its shard's mass


def split(positions: Tensor, masses: Tensor) -> Split:
    """Assign each draw to a shard; ``positions``, ``[B]`` float64, lie between 0 and the sum of ``masses``."""
    ends, last = masses.cumsum(0), int(masses.nonzero()[-1])  # rounding can put a position at the total mass
    place = torch.searchsorted(ends, positions, right=True).clamp_(max=last)
    order = torch.from_numpy(np.argsort(place.numpy().astype(np.uint16), kind="stable"))  # a radix sort
    fractions = ((positions - (ends - masses)[place]) / masses[place]).clamp_(0.0, _BELOW_ONE)[order]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return Split(rank, torch.bincount(place, minlength=len(masses)), fractions)


def importance_weights(probability: Tensor, least: float, rows: int, beta: float, norm: str | None) -> Tensor:
    """Return importance weights ``(rows * probability) ** -beta``, ``[B]`` float32.

    With ``norm="batch"``, weights are divided by the largest weight in the batch. With ``norm="buffer"``, they are
    divided by the largest weight of all rows, that of a row with the smallest probability, ``least``.
    """
    unit = {"buffer": least, "batch": float(probability.min()), None: 1.0 / rows}[norm]
    return (probability / unit).pow(-beta).to(torch.float32)
