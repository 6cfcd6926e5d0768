"""A warning about importance weights that stay small."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from rlbuf_td.kernels.host_memory import in_dispatch_mode

EVERY, IN_A_ROW = 100, 10  # of 1,000 batches, every 100th one is looked at
LEAST_MEAN = 0.1
REMEDY = (
    f"the importance weights of every {EVERY}th of the last {EVERY * IN_A_ROW:,} batches "
    f"have a mean below {LEAST_MEAN}: the least probable row has the largest weight of the "
    "buffer, by which all are divided, so that losses and gradients are small (with a "
    "ProportionalSampler, one tiny TD error suffices). Pass "
    'weight_norm="batch" to the sampler, which divides by the largest weight of the batch'
)


class WeightWatch:
    """Warns once if the mean weight of every 100th batch is small ten times in a row.

    Invariant: ``0 <= small_means <= IN_A_ROW``; the warning has been given if they are
    equal. A copy, also in another process, starts anew.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.small_means = 0  # in a row
        self._copied: tuple[Tensor, torch.cuda.Event] | None = None

    def __reduce__(self) -> tuple[type[WeightWatch], tuple[()]]:
        return WeightWatch, ()

    def see(self, weight: Tensor) -> None:
        """Count a batch; look at the mean of its weights if it is the 100th."""
        self.batches += 1
        if self.batches % EVERY or self.small_means == IN_A_ROW:
            return
        mean = self._mean(weight)
        if mean is None:
            return
        self.small_means = self.small_means + 1 if mean < LEAST_MEAN else 0
        if self.small_means == IN_A_ROW:
            warnings.warn(REMEDY, RuntimeWarning, stacklevel=2)

    def _mean(self, weight: Tensor) -> float | None:
        """Return the mean weight, of a batch on a GPU that of the 100th batch before,
        whose copy has arrived; None if it is not known."""
        if in_dispatch_mode():
            return None  # tensors may hold no data
        if weight.device.type == "cpu":
            return float(weight.mean())
        if not weight.is_cuda or torch.cuda.is_current_stream_capturing():
            return None
        before = self._copied
        copy = weight.mean().to("cpu", non_blocking=True)
        self._copied = copy, torch.cuda.current_stream(weight.device).record_event()
        if before is None or not before[1].query():
            return None
        return float(before[0])
