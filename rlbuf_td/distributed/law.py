r"""The probabilities of a batch over all shards, as functions of the masses that the client knows.

Shard s has the mass :math:`M_s = \sum_{i \in s} p_i^\alpha`; with a uniform sampler, its number of rows. A position in
the total mass :math:`\sum_s M_s` determines a shard, and a fraction of the shard's mass, at which it draws a row. Thus

.. math:: P(i) = \frac{M_s}{\sum_t M_t} \cdot \frac{p_i^\alpha}{M_s} = p_i^\alpha \Big/ \sum_j p_j^\alpha

If another client has meanwhile changed the mass of a shard to :math:`M'_s`, the row is drawn with probability
:math:`M_s / \sum_t M_t \cdot p_i^\alpha / M'_s`. Importance weights use this probability, so they remain correct.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_BELOW_ONE = 1.0 - 2.0**-53


class Split(NamedTuple):
    """The draws of a batch, in the order of the shards."""

    rank: Tensor  # ``[B]`` int64: for each row of the batch, the place of its draw among all draws, sorted by shard
    counts: Tensor  # ``[shards]`` int64: the number of draws from each shard
    fractions: Tensor  # ``[B]`` float64 in [0, 1), sorted by shard: each draw's position in the mass of its shard


def split(positions: Tensor, masses: Tensor) -> Split:
    """Split positions in the total mass into draws from shards, each at a fraction of the shard's mass.

    Args:
        positions: ``[B]`` float64, from 0 to the sum of the masses.
        masses: ``[shards]`` float64, at least one positive; a shard of mass 0 gets no draw.
    """
    ends, last = masses.cumsum(0), int(masses.nonzero()[-1])  # rounding can put a position at the total mass
    place = torch.searchsorted(ends, positions, right=True).clamp_(max=last)
    order = torch.from_numpy(np.argsort(place.numpy().astype(np.uint16), kind="stable"))  # a radix sort
    fractions = ((positions - (ends - masses)[place]) / masses[place]).clamp_(0.0, _BELOW_ONE)[order]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return Split(rank, torch.bincount(place, minlength=len(masses)), fractions)


def importance_weights(probability: Tensor, least: float, rows: int, beta: float, norm: str | None) -> Tensor:
    """Return ``(N P) ** -beta``, ``[B]`` float32, divided by the largest weight of all rows or of the batch, or by 1.

    Args:
        probability: P of the drawn rows, ``[B]`` float64.
        least: the smallest P of all rows in all shards.
        rows: N, the number of rows in all shards.
        beta: exponent, not negative.
        norm: ``"buffer"``, ``"batch"`` or ``None``, as for :class:`~rlbuf_td.ProportionalSampler`.
    """
    unit = {"buffer": least, "batch": float(probability.min()), None: 1.0 / rows}[norm]
    return (probability / unit).pow(-beta).to(torch.float32)
