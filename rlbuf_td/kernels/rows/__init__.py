"""Rows: copying parts of them, and which of them have been rewritten since they were sampled.

Columns are strided views of something larger. Nothing waits for the device where memory is not on the CPU.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of


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
    width = target.shape[1:].numel() * target.element_size()
    places = *_strided(target), *_strided(source), width, len(rows), rows.data_ptr(), mask.data_ptr()
    cpu_loops().copy_rows(*places)


def _strided(column: Tensor) -> tuple[int, int]:
    """Return the address of a column, and the bytes from one row to the next."""
    return column.data_ptr(), column.stride(0) * column.element_size()


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
        is_double = dtype is torch.float64
        return cpu_loops().put_values(*_strided(target), *_strided(values), is_double, rows, mask.data_ptr())
    where = mask.view(-1, *[1] * (target.ndim - 1))
    if is_on_host and target.is_floating_point():
        bad = (where & values.isnan()).nonzero()
        if len(bad):
            return int(bad[0, 0])  # in the order of rows
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


# -- which sampled rows have been rewritten since
#
# A clock counts the time steps that have been written; a stamp is its value when a row was sampled. All numbers are
# int64 and may wrap: only differences count. A stamp from the future (of another buffer, or of a time that a load has
# undone) says nothing of the row: it counts as rewritten.


def skip_ring(
    index: Tensor, stamp: Tensor, clock: int, last: int, steps: int, lanes: int
) -> tuple[Tensor, int | Tensor]:
    """Skip the rows that a ring has rewritten since they were sampled.

    A ring writes one time step after the other: the step written ``a`` steps before the newest one has been rewritten
    since a stamp if more than ``a`` have been written.

    Args:
        index: ``[B]`` int64 flat rows ``t * lanes + lane``, contiguous; -1 means "skip".
        stamp: ``[B]`` int64, contiguous.
        clock: how many time steps have been written.
        last: the one that was written last.
        steps: capacity in time steps.
        lanes: rows a time step.

    Returns:
        ``index`` with -1 in place of rewritten rows, and how many (on CUDA as a 0-dim tensor).
    """
    if backend_of(index) == "numba":
        return _on_cpu(cpu_loops().skip_ring, index, stamp, clock, last, steps, lanes)
    since = clock - stamp
    age = (last - index // lanes) % steps
    return _skipped(index, (index >= 0) & ((since < 0) | (age < since)))


def skip_recent(index: Tensor, since: int, last: int, steps: int, lanes: int) -> tuple[Tensor, int | Tensor]:
    """Skip the rows among the last ``since`` time steps of a ring: :func:`skip_ring` where all stamps are the same."""
    if backend_of(index) == "numba":
        given, skip = (index.data_ptr(), index.shape[0], since, last, steps, lanes), cpu_loops().skip_recent
        if not skip(0, *given):
            return index, 0
        kept = torch.empty_like(index)
        return kept, skip(kept.data_ptr(), *given)
    return _skipped(index, (index >= 0) & ((last - index // lanes) % steps < since))


def skip_newer(index: Tensor, stamp: Tensor, clock: int, written: Tensor) -> tuple[Tensor, int | Tensor]:
    """Skip the rows that have been rewritten since they were sampled, going by when each was written.

    As :func:`skip_ring`, but for ``written``: ``[N]`` int64, the clock after each row's last write.
    """
    if backend_of(index) == "numba":
        return _on_cpu(cpu_loops().skip_newer, index, stamp, clock, written.data_ptr(), len(written))
    inside = (index >= 0) & (index < len(written))
    newer = (written[index.clamp(0, len(written) - 1)] - stamp > 0) | (clock - stamp < 0)
    return _skipped(index, inside & newer)


def _skipped(index: Tensor, stale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(stale, -1, index), stale.sum()


def _on_cpu(skip: Any, index: Tensor, stamp: Tensor, *others: int) -> tuple[Tensor, int]:
    """Count first: that there is something to skip is rare."""
    given = index.data_ptr(), stamp.data_ptr(), index.shape[0]
    count = skip(0, *given, *others)
    if not count:
        return index, 0
    kept = torch.empty_like(index)
    return kept, skip(kept.data_ptr(), *given, *others)


@cache
def cpu_loops() -> ModuleType:
    """Return the numba backend, imported (and compiled, or read from disk) on first use."""
    from rlbuf_td.kernels.rows import cpu

    return cpu
