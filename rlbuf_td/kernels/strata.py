"""Where a batch's draws fall in the mass of all rows: one in each of as many segments of equal mass, or anywhere.

The segments come spread over the batch: from a random first one on, in steps of some 0.618 of their number. Each place
of a batch then follows the law of the whole, and any part of a batch, a minibatch of it say, has draws from everywhere.
In the order of the mass the first half of a batch would hold the first half of the rows.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

#: Where the segments begin: the first uniform number in this unit, modulo the batch. None has to be drawn for it: the
#: number's leading digits, which are where in its segment the first draw falls, do not depend on its last ones.
FIRST = 2.0**48
#: What importance weights are divided by, as compiled loops take it: the buffer's largest, the batch's, or nothing.
NORMS = {"buffer": 0, "batch": 1, None: 2}
_GOLDEN = 0.6180339887498949


def step_of(batch: int, stratified: bool) -> int:
    """Return how many segments lie between those of neighbours in a batch: no divisor in common; 0 for no segments."""
    if not (batch and stratified):
        return 0
    step = max(1, round(_GOLDEN * batch))
    while gcd(step, batch) > 1:
        step += 1
    return step


def masses(uniform: Tensor, total: Tensor, stratified: bool) -> Tensor:
    """Return the mass before each draw, ``[B]`` float64 in ``[0, total)``, for numbers in ``[0, 1)``."""
    batch = uniform.shape[0]
    step = step_of(batch, stratified)
    if not step:
        return uniform * total
    first = (uniform[:1] * FIRST).to(torch.int64)
    segment = (first + step * torch.arange(batch, device=uniform.device)) % batch
    return (segment + uniform) * (total / batch)
