"""Which sampled rows have been rewritten since: two ways to know, each in O(B).

A *clock* counts the time steps that have been written; a *stamp* is its value when a row was sampled. All numbers are
int64 and may wrap: only differences count. A stamp from the future (of another buffer, or of a time that a load has
undone) says nothing of the row: it counts as rewritten.

The functions here are the specification, and run on any device without waiting for it; on the CPU the numba twin runs.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlbuf_td.kernels.dispatch import backend_of


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
    if _is_on_cpu(index):
        return _on_cpu(_twin().skip_ring, index, stamp, clock, last, steps, lanes)
    since = clock - stamp
    age = (last - index // lanes) % steps
    return _skipped(index, (index >= 0) & ((since < 0) | (age < since)))


def skip_recent(index: Tensor, since: int, last: int, steps: int, lanes: int) -> tuple[Tensor, int | Tensor]:
    """Skip the rows among the last ``since`` time steps of a ring: :func:`skip_ring` where all stamps are the same."""
    if _is_on_cpu(index):
        given, twin = (index.data_ptr(), index.shape[0], since, last, steps, lanes), _twin().skip_recent
        if not twin(0, *given):
            return index, 0
        kept = torch.empty_like(index)
        return kept, twin(kept.data_ptr(), *given)
    return _skipped(index, (index >= 0) & ((last - index // lanes) % steps < since))


def skip_newer(index: Tensor, stamp: Tensor, clock: int, written: Tensor) -> tuple[Tensor, int | Tensor]:
    """Skip the rows that have been rewritten since they were sampled, going by when each was written.

    Args:
        index: as for :func:`skip_ring`.
        stamp: as for :func:`skip_ring`.
        clock: as for :func:`skip_ring`.
        written: ``[N]`` int64, the clock after each row's last write.

    Returns:
        As :func:`skip_ring`.
    """
    if _is_on_cpu(index):
        return _on_cpu(_twin().skip_newer, index, stamp, clock, written.data_ptr(), len(written))
    inside = (index >= 0) & (index < len(written))
    newer = (written[index.clamp(0, len(written) - 1)] - stamp > 0) | (clock - stamp < 0)
    return _skipped(index, inside & newer)


def _skipped(index: Tensor, stale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(stale, -1, index), stale.sum()


def _is_on_cpu(index: Tensor) -> bool:
    return backend_of(index) == "numba"


def _on_cpu(twin: Any, index: Tensor, stamp: Tensor, *others: int) -> tuple[Tensor, int]:
    """Count first: that there is something to skip is rare."""
    given = index.data_ptr(), stamp.data_ptr(), index.shape[0]
    count = twin(0, *given, *others)
    if not count:
        return index, 0
    kept = torch.empty_like(index)
    return kept, twin(kept.data_ptr(), *given, *others)


@cache
def _twin() -> ModuleType:
    from rlbuf_td.kernels.rows import staleness_cpu as _staleness_numba

    return _staleness_numba
