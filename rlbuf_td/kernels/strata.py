"""The positions of a batch's draws in the total mass: one in each of ``B`` equal segments, or anywhere.

The total mass is the sum of all rows' weights; a draw at position ``x`` selects the row at which the running sum of
weights exceeds ``x``.
Consecutive draws of a batch come from distant segments: the first segment is random, and the step is about 0.618 ``B``
segments. Each place in a batch then follows the distribution of all draws, and any part of a batch (a minibatch, for
example) has draws from everywhere. If draws were in the order of segments, the first half of a batch would only
hold the first rows.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

#: The segment of the first draw is ``int(FIRST * first uniform number) % batch``. It depends on the last digits of that
#: number, and the position within the segment on its leading digits, so one random number serves for both.
FIRST = 2.0**48
#: Codes, in compiled loops, of the divisor of importance weights: the largest of the buffer, of the batch, or none.
NORMS = {"buffer": 0, "batch": 1, None: 2}
#: Lower bound of the ratio of two rows' probabilities; smaller ratios are raised to it.
LEAST_RATIO = 2.0**-126
_GOLDEN = 0.6180339887498949


def step_of(batch: int, stratified: bool) -> int:
    """Return the step between the segments of consecutive draws, coprime to the batch size; 0 if not stratified."""
    if not (batch and stratified):
        return 0
    step = max(1, round(_GOLDEN * batch))
    while gcd(step, batch) > 1:
        step += 1
    return step


def masses(uniform: Tensor, total: Tensor, stratified: bool) -> Tensor:
    """Return the position of each draw, ``[B]`` float64 in ``[0, total)``, for uniform numbers in ``[0, 1)``."""
    batch = uniform.shape[0]
    step = step_of(batch, stratified)
    if not step:
        return uniform * total
    first = (uniform[:1] * FIRST).to(torch.int64)
    segment = (first + step * torch.arange(batch, device=uniform.device)) % batch
    return (segment + uniform) * (total / batch)
