"""Ordered samples without replacement, with shapes that do not depend on what is drawn."""

from __future__ import annotations

import torch
from torch import Tensor


def distinct_rows(uniform: Tensor, rows: int | Tensor) -> Tensor:
    """Return ``B`` of the rows ``0 .. rows - 1``, none of them twice, each ordered selection as likely as any other.

    These are the first ``B`` steps of a shuffle by Fisher and Yates: step ``k`` takes what lies at a place drawn from
    ``k .. rows - 1``, and puts there what lies at place ``k``. A place holds its own row until a step puts another one
    there, which it has from an earlier step. All these chains are followed at once, in doubled strides.

    ``uniform``, ``[B]`` float64 in ``[0, 1)``, is one number a step; ``rows``, at least ``B``, is a number, or a 0-dim
    float64 tensor, for graphs that see it change.

    Cost: O(B log B), whatever the number of rows, without waiting for the device.
    Source: Knuth, The Art of Computer Programming, volume 2, section 3.4.2, algorithm P.
    """
    batch = uniform.shape[0]
    step = torch.arange(batch, device=uniform.device)
    place = step + (uniform * (rows - step)).long()
    ordered, order = place.sort(stable=True)
    # The step before, if any, that took from the same place: what is there now is what it put there.
    before = torch.full_like(order, -1)
    before[order[1:]] = torch.where(ordered[1:] == ordered[:-1], order[:-1], -1)
    # What a step puts away is its own row, or what the last step that took from its place has put there, and so on.
    # Steps only point to earlier ones; one that takes from its own place puts nothing away.
    last = (torch.searchsorted(ordered, step, right=True) - 1).clamp(min=0)
    away = torch.where(ordered[last] == step, order[last], step)
    for _ in range((batch - 1).bit_length()):
        away = away[away]
    return torch.where(before < 0, place, away[before.clamp(min=0)])
