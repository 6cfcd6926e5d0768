"""Copying parts of rows: from a storage's columns into a batch's, where both are strided views of something larger.

Cost O(B * bytes). On the CPU the numba twin copies bytes in place; elsewhere torch ops do, without waiting.
"""

from __future__ import annotations

from functools import cache
from math import inf
from types import ModuleType
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of

_LARGE = 1 << 20  # elements of a block, from where on its pages matter


def gather_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return ``matrix[rows]`` as fresh memory, ``[B, W]``.

    Args:
        matrix: ``[N, W]``, each row contiguous, of a real dtype.
        rows: ``[B]`` int64, ``0 <= row < N`` (refused on the CPU, not looked at elsewhere).

    Raises:
        IndexError: a row is out of range (on the CPU).
    """
    if rows.numel() < few_of(matrix):
        return matrix.index_select(0, rows)
    return torch.index_select(matrix, 0, rows, out=new_rows(matrix, rows.shape[0]))


def few_of(matrix: Tensor) -> float:
    """Return below how many rows a batch is so small that its pages do not matter; all are on a GPU."""
    return inf if matrix.is_cuda else _LARGE / max(1, matrix.shape[1])


def new_rows(matrix: Tensor, count: int) -> Tensor:
    """Return memory for ``count`` rows like those of ``matrix``, not initialised.

    Large blocks on the CPU come from NumPy, which asks for huge pages: those of 4 KiB that torch takes from the system
    for every batch anew cost more time than copying images into them.
    """
    shape = count, matrix.shape[1]
    if count * shape[1] < _LARGE or matrix.is_cuda:
        return matrix.new_empty(shape)
    block = np.empty(count * shape[1] * matrix.element_size(), np.uint8)
    return torch.from_numpy(block).view(matrix.dtype).view(shape)


def copy_rows_(target: Tensor, source: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Set ``target[i] = source[rows[i]]`` for every ``i`` with ``mask[i]``.

    Args:
        target: ``[B, ...]``, changed in place.
        source: ``[N, ...]``, of the same dtype and shape a row.
        rows: ``[B]`` int64, contiguous, ``0 <= row < N``.
        mask: ``[B]`` bool, contiguous.
    """
    if backend_of(rows) != "numba" or not (is_dense(target) and is_dense(source)) or target.element_size() > 8:
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
    dtype, rows, is_on_host = target.dtype, target.shape[0], backend_of(target) == "numba"
    if (dtype is torch.float32 or dtype is torch.float64) and target.numel() == rows and is_on_host:
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
    if is_on_host and target.is_floating_point():
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
    from rlbuf_td.kernels.rows import cpu as _columns_numba

    return _columns_numba
