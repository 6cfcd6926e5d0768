"""Stratified sampling: the sum of all weights is divided into ``B`` equal segments,
with one draw in each.

A draw at position ``x`` selects the first row at which the cumulative sum of weights
exceeds ``x``. The first draw is in a random segment. Each later draw is about
``0.618 * B`` segments further, modulo ``B``. Every part of a batch, such as a
minibatch, therefore has draws from the whole buffer.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

#: The segment of the first draw is ``int(FIRST * first uniform number) % batch``. It
# depends on the last digits of the number, while the position within the segment
# depends on the leading digits.
FIRST = 2.0**48
#: Codes of ``weight_norm`` in compiled loops: the buffer's or the batch's largest
# importance weight is 1, or neither.
BY_BUFFER, BY_BATCH, BY_NONE = range(3)
NORMS = {"buffer": BY_BUFFER, "batch": BY_BATCH, None: BY_NONE}
LEAST_RATIO = 2.0**-126  # lower bound of the ratio of two importance weights
_GOLDEN = 0.6180339887498949


class Stratification(NamedTuple):
    """How the draws of a batch are spread over the segments, and how the drawn rows are
    weighed."""

    step: int  # see :func:`step_of`; 0: draws are independent
    beta: float  # exponent of the importance weights
    norm: int  # a value of :data:`NORMS`


def empty_draws(batch: int) -> tuple[Tensor, Tensor]:
    """Return memory for the rows, ``[B]`` int64, and for the importance weights,
    ``[B]`` float32, of a draw."""
    index = torch.empty(batch, dtype=torch.int64, device="cpu")
    return index, torch.empty(batch, dtype=torch.float32, device="cpu")


def step_of(batch: int, stratified: bool) -> int:
    """Return the distance from one draw to the next, in segments; 0 if draws are not
    stratified."""
    if not (batch and stratified):
        return 0
    step = max(1, round(_GOLDEN * batch))
    while gcd(step, batch) > 1:  # coprime, so that each segment has one draw
        step += 1
    return step


@lru_cache(64)
def stratification_of(
    batch: int, stratified: bool, beta: float, norm: str | None
) -> Stratification:
    """Return how a batch is drawn and weighed.

    Args:
        batch: the number of draws, ``B``.
        stratified: whether to draw one row from each of ``B`` segments.
        beta: exponent of the importance weights ``(N * P)^-beta``, not negative.
        norm: ``"buffer"`` or ``"batch"``: divide the importance weights by the largest
            one in the buffer or in the batch; None: do not divide them.
    """
    return Stratification(step_of(batch, stratified), beta, NORMS[norm])


def masses(uniform: Tensor, total: Tensor, step: int) -> Tensor:
    """Return the positions of ``B`` draws, float64 in ``[0, total)``, from ``[B]``
    uniform numbers in ``[0, 1)``; ``step`` is the result of :func:`step_of`."""
    batch = uniform.shape[0]
    if not step:
        return uniform * total
    first = (uniform[:1] * FIRST).to(torch.int64)
    offset = torch.arange(0, step * batch, step, device=uniform.device)
    segment = (first + offset) % batch
    return (segment + uniform) * (total / batch)
