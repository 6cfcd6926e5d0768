r"""The law of a batch over all shards, as functions of the masses that the client knows.

Shard s has the mass :math:`M_s = \sum_{i \in s} p_i^\alpha`, or its number of rows under a uniform sampler. Positions
spread over :math:`\sum_s M_s` choose the shards, and the fraction of its mass at which each shard draws. Thus

.. math:: P(i) = \frac{M_s}{\sum_t M_t} \cdot \frac{p_i^\alpha}{M_s} = p_i^\alpha \Big/ \sum_j p_j^\alpha

If another client has changed the mass of a shard meanwhile, to :math:`M'_s`, the row is drawn with probability
:math:`M_s / \sum_t M_t \cdot p_i^\alpha / M'_s`. Importance weights use that, so that they stay right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_BELOW_ONE = 1.0 - 2.0**-53


class Split(NamedTuple):
    """Where the draws of a batch fall, in the order of the shards."""

    rank: Tensor  # ``[B]`` int64: which of the draws in the order of the shards each place of the batch is
    counts: Tensor  # ``[shards]`` int64: the number of draws from each shard
    fractions: Tensor  # ``[B]`` float64 in [0, 1): of the mass of its shard, what lies before each draw


def split(positions: Tensor, masses: Tensor) -> Split:
    """Return which shard, and what fraction of its mass, each position in the mass of all shards falls on.

    Args:
        positions: ``[B]`` float64, from 0 to the sum of the masses.
        masses: ``[shards]`` float64; a shard of mass 0 gets no draw, at least one is positive.
    """
    ends, last = masses.cumsum(0), int(masses.nonzero()[-1])  # by rounding a position may lie on the end
    place = torch.searchsorted(ends, positions, right=True).clamp_(max=last)
    order = torch.from_numpy(np.argsort(place.numpy().astype(np.uint16), kind="stable"))  # a radix sort
    fractions = ((positions - (ends - masses)[place]) / masses[place]).clamp_(0.0, _BELOW_ONE)[order]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return Split(rank, torch.bincount(place, minlength=len(masses)), fractions)


def importance_weights(probability: Tensor, least: float, rows: int, beta: float, norm: str | None) -> Tensor:
    """Return ``(N P) ** -beta``, ``[B]`` float32, divided by the largest of all rows, of the batch, or by nothing.

    Args:
        probability: P of the drawn rows, ``[B]`` float64.
        least: the smallest P of all rows.
        rows: N, of all shards.
        beta: exponent, not negative.
        norm: ``"buffer"``, ``"batch"`` or ``None``, as for :class:`~rlbuf_td.ProportionalSampler`.
    """
    unit = {"buffer": least, "batch": float(probability.min()), None: 1.0 / rows}[norm]
    return (probability / unit).pow(-beta).to(torch.float32)
