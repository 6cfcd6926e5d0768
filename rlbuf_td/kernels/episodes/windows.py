"""Reduces the TD errors of the rows of windows to one per window."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, machine_code
from rlbuf_td.kernels.host_memory import HostTensors


def reduced(td_error: Tensor, mask: Tensor, burn_in_mask: Tensor, window: int, eta: float) -> Tensor:
    """Return ``eta * max + (1 - eta) * mean`` of the magnitudes in each window, ``[B]``, in the errors' dtype.

    Only rows of a window count for which ``mask``, ``[B * L]`` bool, is True and ``burn_in_mask`` False; a window
    without such rows has the magnitude 0.
    """
    rows = td_error.shape
    given = HostTensors([(td_error.dtype, rows), (torch.bool, rows), (torch.bool, rows)])
    is_float = td_error.dtype is torch.float32 or td_error.dtype is torch.float64
    places = given.addresses((td_error, mask, burn_in_mask)) if is_float and backend_of(td_error) == "numba" else None
    if places is not None:
        found = torch.empty(rows[0] // window, dtype=td_error.dtype, device="cpu")
        _reduce()(*places, td_error.dtype is torch.float64, len(found), window, float(eta), found.data_ptr())
        return found
    learned = mask & ~burn_in_mask
    magnitude = torch.where(learned, td_error.abs(), 0).view(-1, window)
    largest = magnitude.amax(1)
    if eta == 1.0:
        return largest
    total = magnitude.to(torch.float64).cumsum(1)[
        :, -1
    ]  # added in the same order as in the loop: the results are equal
    mean = total / learned.view(-1, window).sum(1).clamp(min=1)
    mixed = eta * largest.to(torch.float64) + (1 - eta) * mean
    return mixed.to(td_error.dtype) if td_error.is_floating_point() else mixed


@cache
def _reduce() -> Callable[..., None]:
    from rlbuf_td.kernels.episodes import batches_cpu

    return machine_code(batches_cpu.reduce_windows)
