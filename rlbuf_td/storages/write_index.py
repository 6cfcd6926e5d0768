"""What names rows: the kinds of index that a storage reads at, and of cursor that it writes at."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_INDEX_DTYPES = frozenset((torch.int64, torch.int32, torch.int16, torch.int8))


def is_key(index: Any) -> bool:
    """Return whether ``index`` is a key, nested or not."""
    return isinstance(index, str) or (
        isinstance(index, tuple) and len(index) > 0 and all(isinstance(part, str) for part in index)
    )


def is_mask(index: Any) -> bool:
    """Return whether ``index`` is a boolean mask."""
    return isinstance(index, torch.Tensor | np.ndarray) and index.dtype in (torch.bool, np.bool_)


def is_index(index: Any) -> bool:
    """Return whether ``index`` is a tensor of positions; one of no dims is an ``int``, uint8 is a mask to torch."""
    return isinstance(index, torch.Tensor) and index.ndim > 0 and index.dtype in _INDEX_DTYPES


def as_index(index: Any) -> torch.Tensor:
    """Return a list, ``range`` or array of integers or booleans as a tensor."""
    array = np.asarray(index)
    if array.dtype.kind in "iu" or (not array.size and array.dtype.kind == "f"):  # an empty list has a float dtype
        array = array.astype(np.int64, copy=False)
    return torch.as_tensor(array)


def as_steps(cursor: Any, total: int) -> np.ndarray:
    """Return a cursor along time as int64 positions; a slice counts from a storage of ``total`` steps."""
    if isinstance(cursor, slice):
        cursor = range(*cursor.indices(total))
    if isinstance(cursor, torch.Tensor):
        cursor = cursor.cpu().numpy()
    steps = np.atleast_1d(np.asarray(cursor))
    if steps.ndim != 1 or (steps.size and steps.dtype.kind not in "iu"):
        raise IndexError(f"cannot write at a cursor of shape {steps.shape} and dtype {steps.dtype}")
    return steps.astype(np.int64)


def refuse_steps(steps: np.ndarray, total: int, live: int, append: bool) -> None:
    """Refuse positions that are out of range, or that would leave a row unwritten before the last one.

    Raises:
        IndexError: see above.
    """
    if not len(steps):
        raise IndexError("cannot write at an empty set of positions")
    if steps.min() < 0 or steps.max() >= total:
        bad = steps[(steps < 0) | (steps >= total)][0]
        raise IndexError(f"position {bad} is out of range of a storage of {total} time steps")
    if append and len(np.unique(steps[steps >= live])) != max(0, int(steps.max()) + 1 - live):
        raise IndexError(
            f"positions up to {steps.max()} leave rows after {live - 1} unwritten: write them in order, "
            "or pass set_cursor=False to write without counting the rows"
        )
