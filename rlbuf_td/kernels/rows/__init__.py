"""Copies values of rows."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of
from rlbuf_td.kernels.host_memory import address_of


def put_values_(target: Tensor, values: Tensor, mask: Tensor) -> int:
    """Copy ``values[i]`` to ``target[i]`` where ``mask[i]`` is True; return the first such ``i`` with a NaN, or -1.

    On the CPU, a NaN prevents the whole copy; on a GPU, NaN is copied, too. ``mask`` must be contiguous.
    """
    dtype, rows, is_on_host = target.dtype, target.shape[0], backend_of(target) == "numba"
    if (dtype is torch.float32 or dtype is torch.float64) and target.numel() == rows and is_on_host:
        values = values.resolve_neg()  # the memory of a lazily negated tensor has the opposite sign
        from rlbuf_td.kernels.rows import cpu

        width = dtype.itemsize
        to, given = (cpu.Column(address_of(each), each.stride(0) * width) for each in (target, values))
        return cpu.put_values(to, given, width, rows, address_of(mask))
    where = mask.view(-1, *[1] * (target.ndim - 1))
    if is_on_host and target.is_floating_point():
        bad = (where & values.isnan()).nonzero()
        if len(bad):
            return int(bad[0, 0])
    target.copy_(torch.where(where, values, target))
    return -1


def put_rows_(target: Tensor, column: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Copy ``column[rows[i]]`` to ``target[i]`` where ``mask[i]`` is True."""
    where = mask.view(-1, *[1] * (target.ndim - 1))
    target.copy_(torch.where(where, column.index_select(0, rows), target))


def refuse_rows(rows: Tensor, live: int) -> NoReturn:
    """Raise an IndexError that names an element of ``rows`` outside ``[0, live)``."""
    low, high = int(rows.min()), int(rows.max())
    raise IndexError(f"row {high if high >= live else low} was drawn, but only rows 0 to {live - 1} have been written")
