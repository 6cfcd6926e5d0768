"""The columns of rows in memory, and functions that copy what environments return into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.envs.specs import Key, Paths, tensors_of
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.schema import SchemaError, refuse_rounding, show_key

_WIDER = "store it in float64, with from_env(env, ..., extras=...) and an example of {} in extras"
#: The largest number up to which a dtype holds every whole number; for other dtypes, at least 127.
_EXACT = {np.dtype(np.float32): 2**24, np.dtype(np.float64): 2**53}


class StepRows:
    """Memory for one row of each of E lanes (environments)."""

    def __init__(self, example: TensorDict) -> None:
        self.layout = RowLayout(example, 1)
        #: The rows as words of 8 bytes, as a TensorDict ``[E]``, and as arrays ``[E, ...]``, all in the same memory.
        self.words = np.zeros((example.shape[0], self.layout.row_bytes // 8), np.int64)
        rows = torch.from_numpy(self.words.view(np.uint8)).view(self.layout.carrier)
        self.now = self.layout.unpack(rows)
        columns = zip(self.layout.leaves, self.layout.columns(rows), strict=True)
        self.columns: dict[Key, np.ndarray] = {leaf.key: column.numpy() for leaf, column in columns}


def part_of(value: Any, path: Key) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, tuple) else value[part]
    return value


def to_array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def fill_(column: np.ndarray, value: Any, key: Key) -> None:
    """Copy a value into a column of equal shape.

    NumPy's "same_kind" casts (float64 to float32) are allowed unless they change a whole number, such as 2**24 + 1;
    other casts, such as from 0 and 1 to bool, if they change no number. Otherwise, a SchemaError is raised.
    """
    array = value if type(value) is np.ndarray else to_array(value)
    if array.shape != column.shape:
        raise SchemaError(f"{show_key(key)} came with shape {array.shape}, expected {column.shape}")
    if array.dtype is not column.dtype:
        array = _cast(array, column.dtype, key)
    column[...] = array


def _cast(array: np.ndarray, dtype: np.dtype, key: Key) -> np.ndarray:
    if np.can_cast(array.dtype, dtype, "same_kind"):
        if not (np.abs(array) <= _EXACT.get(dtype, 127)).all():
            given, expected = tensors_of(array.reshape(-1), *key), torch.from_numpy(np.empty(0, dtype)).dtype
            refuse_rounding(key, given, expected, _WIDER.format(show_key(key)))
        return array
    if array.dtype.kind in "biuf":
        with np.errstate(invalid="ignore"):  # NaN has no integer value
            cast = array.astype(dtype)
        if np.array_equal(cast, array):
            return cast
    raise SchemaError(f"{show_key(key)} came as {array.dtype}, expected {dtype}: cast it first")


def fill_parts_(columns: Mapping[Key, np.ndarray], paths: Paths, value: Any, at: Any = ...) -> None:
    """Copy the parts of an observation or action into the elements ``at`` of their columns."""
    for key, path in paths:
        fill_(columns[key][at], part_of(value, path), key)
