"""Writes magnitudes ``|td_error|`` in torch operations, without host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


def write_magnitudes(
    memory: Tensor, index: Tensor, magnitude: Tensor, rows: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Set ``memory[index] = magnitude`` for finite magnitudes and ``0 <= index < rows``, the last one of equal indices.

    Return the written indices (``[B]``, some repeated; all 0 if nothing was written), the largest valid magnitude (-1:
    none), and the number of NaN or infinite magnitudes at indices in ``[0, rows)``.
    """
    named = (index >= 0) & (index < rows)
    valid = named & magnitude.isfinite()
    # All duplicates of a row write its last magnitude, and every skipped entry writes the valid row with the highest
    # index once more. The order of the scatter therefore does not matter, and no shape depends on data.
    ordered, order = torch.where(valid, index, -1).sort(stable=True)
    target = torch.where(ordered < 0, ordered[-1], ordered)
    last = order[torch.searchsorted(ordered, target, right=True) - 1]
    row = target.clamp(min=0)
    memory[row] = torch.where(target < 0, memory[row], magnitude[last])
    return row, torch.where(valid, magnitude, -1.0).max(), (named & ~valid).sum()
