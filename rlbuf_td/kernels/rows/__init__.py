"""Rows: copies of columns, and detection of rows that were rewritten since they were sampled.

Columns are strided views of larger tensors. Off the CPU, no operation waits for the device.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of, loops


def put_values_(target: Tensor, values: Tensor, mask: Tensor) -> int:
    """Set ``target[i] = values[i]`` for every ``i`` with ``mask[i]``; ``target`` and ``values`` are ``[B, ...]``.

    ``mask``, ``[B]`` bool, is contiguous. Returns the first such ``i`` whose value is NaN (then nothing has changed),
    or -1. On CUDA it always returns -1 and copies NaN as any other value, because a check would make the host wait.
    """
    dtype, rows, is_on_host = target.dtype, target.shape[0], backend_of(target) == "numba"
    if (dtype is torch.float32 or dtype is torch.float64) and target.numel() == rows and is_on_host:
        columns = target.data_ptr(), target.stride(0), values.data_ptr(), values.stride(0)
        return loops("rows.cpu").put_values(*columns, dtype.itemsize, rows, mask.data_ptr())
    where = mask.view(-1, *[1] * (target.ndim - 1))
    if is_on_host and target.is_floating_point():
        bad = (where & values.isnan()).nonzero()
        if len(bad):
            return int(bad[0, 0])  # the first in row order
    target.copy_(torch.where(where, values, target))
    return -1


def put_rows_(target: Tensor, column: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Set ``target[i] = column[rows[i]]`` for every ``i`` with ``mask[i]``; ``target`` and ``column`` are ``[B, ...]``.

    ``rows``, ``[B]`` int64, and ``mask``, ``[B]`` bool, are contiguous.
    """
    if backend_of(target) == "numba" and target.is_contiguous() and column[:1].is_contiguous():
        width, step = target.nbytes // max(1, len(target)), column.stride(0) * column.itemsize
        given = target.data_ptr(), column.data_ptr(), step, width, rows.data_ptr(), mask.data_ptr(), len(rows)
        return loops("rows.cpu").put_rows(*given)
    where = mask.view(-1, *[1] * (target.ndim - 1))
    target.copy_(torch.where(where, column.index_select(0, rows), target))
    return None


def refuse_rows(rows: Tensor, live: int) -> NoReturn:
    """Raise an IndexError that names a drawn row outside ``[0, live)``."""
    low, high = int(rows.min()), int(rows.max())
    raise IndexError(f"row {high if high >= live else low} was drawn, but only rows 0 to {live - 1} have been written")


# -- which sampled rows have been rewritten since
#
# A clock counts the time steps written; a stamp is its value when a row was sampled. Both are int64 and may wrap, so
# only differences matter. If a stamp is ahead of the clock (because it comes from another buffer, or a load has set the
# clock back), the row counts as rewritten.


def skip_ring(
    index: Tensor, stamp: Tensor, clock: int, last: int, steps: int, lanes: int
) -> tuple[Tensor, int | Tensor]:
    """Skip the rows that a ring has rewritten since they were sampled.

    A row that lies ``a`` time steps before the newest one has been rewritten if more than ``a`` time steps have been
    written since the batch was sampled. ``index``, ``[B]`` int64, holds flat rows, -1 for none; ``stamp`` is ``[B]``
    int64; both are contiguous. ``clock`` counts the time steps written; ``last`` is the position, in ``[0, steps)``, of
    the time step written last; ``lanes`` is the number of rows per time step. Returns ``index`` with -1 for rewritten
    rows, and their number (on CUDA as a 0-dim tensor).
    """
    if backend_of(index) == "numba":
        others = index.data_ptr(), stamp.data_ptr(), index.shape[0], clock, last, steps, lanes
        skip = loops("rows.cpu").skip_ring
        count = skip(0, *others)  # stale rows are rare
        if not count:
            return index, 0
        kept = torch.empty_like(index)
        return kept, skip(kept.data_ptr(), *others)
    since = clock - stamp
    age = (last - index // lanes) % steps
    return _skipped(index, (index >= 0) & ((since < 0) | (age < since)))


def skip_newer(index: Tensor, stamp: Tensor, clock: int, written: Tensor) -> tuple[Tensor, int | Tensor]:
    """As :func:`skip_ring`, for rows written in any order; ``written``, ``[N]`` int64: the clock after each write."""
    inside = (index >= 0) & (index < len(written))
    newer = (written[index.clamp(0, len(written) - 1)] - stamp > 0) | (clock - stamp < 0)
    return _skipped(index, inside & newer)


def _skipped(index: Tensor, stale: Tensor) -> tuple[Tensor, int | Tensor]:
    count = stale.sum()
    return torch.where(stale, -1, index), int(count) if backend_of(index) == "numba" else count
