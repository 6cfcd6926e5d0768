"""Copying parts of rows: from a storage's columns into a batch's, where both are strided views of something larger.

Cost O(B * bytes). On the CPU the numba twin copies bytes in place; elsewhere torch ops do it, without host
synchronisation.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor


def copy_rows_(target: Tensor, source: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Set ``target[i] = source[rows[i]]`` for every ``i`` with ``mask[i]``.

    Args:
        target: ``[B, ...]``, changed in place.
        source: ``[N, ...]``, of the same dtype and shape a row.
        rows: ``[B]`` int64, contiguous, ``0 <= row < N``.
        mask: ``[B]`` bool, contiguous.
    """
    if rows.is_cuda or not (is_dense(target) and is_dense(source)):
        where = mask.view(-1, *[1] * (target.ndim - 1))
        target.copy_(torch.where(where, source.index_select(0, rows), target))
        return
    size, width = target.element_size(), target.shape[1:].numel()
    twin().copy_rows(
        target.data_ptr(),
        target.stride(0) * size,
        source.data_ptr(),
        source.stride(0) * size,
        width * size,
        len(rows),
        rows.data_ptr(),
        mask.data_ptr(),
    )


def put_values_(target: Tensor, values: Tensor, mask: Tensor) -> int:
    """Set ``target[i] = values[i]`` for every ``i`` with ``mask[i]``, unless one of these values is NaN.

    Args:
        target: ``[B, ...]``, changed in place.
        values: of the same dtype and shape.
        mask: ``[B]`` bool, contiguous.

    Returns:
        The first row whose value is NaN (nothing has been changed then), -1 if there is none. On CUDA always -1, for
        the host would have to wait: NaN is put like any other value.
    """
    dtype, rows = target.dtype, target.shape[0]
    if (dtype is torch.float32 or dtype is torch.float64) and target.numel() == rows and not target.is_cuda:
        size = 4 if dtype is torch.float32 else 8
        return twin().put_values(
            target.data_ptr(),
            target.stride(0) * size,
            values.data_ptr(),
            values.stride(0) * size,
            size == 8,
            rows,
            mask.data_ptr(),
        )
    where = mask.view(-1, *[1] * (target.ndim - 1))
    if not target.is_cuda and target.is_floating_point():
        bad = (
            (where & values.isnan()).flatten(1).any(1).nonzero()
            if target.ndim > 1
            else (mask & values.isnan()).nonzero()
        )
        if len(bad):
            return int(bad[0, 0])
    target.copy_(torch.where(where, values, target))
    return -1


def refuse_rows(rows: Tensor, live: int) -> NoReturn:
    """Say which row that a sampler drew has not been written.

    Raises:
        IndexError: always.
    """
    low, high = int(rows.min()), int(rows.max())
    raise IndexError(f"row {high if high >= live else low} was drawn, but rows 0 to {live - 1} have been written")


def is_dense(column: Tensor) -> bool:
    """Return whether each row of a column is contiguous."""
    if column.ndim == 2:
        return column.stride(1) == 1 or column.shape[1] == 1
    return column.ndim == 1 or not len(column) or column[0].is_contiguous()


@cache
def twin() -> ModuleType:
    """Return the numba twin, imported (and compiled, or read from disk) on first use."""
    from rlbuf_td.kernels import _columns_numba

    return _columns_numba
