"""Copying the values of a Gymnasium step into columns of rows: pure functions over arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlbuf_td.storages.schema import SchemaError, show_key

Key = tuple[str, ...]


def part_of(value: Any, path: Key) -> Any:
    """Return the value at ``path`` in nested dicts and tuples."""
    for part in path:
        value = value[int(part)] if isinstance(value, tuple) else value[part]
    return value


def to_array(value: Any) -> np.ndarray:
    """Return a number, array or tensor as an array."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def fill_(column: np.ndarray, value: Any, key: Key) -> None:
    """Copy a value into a column of its shape and kind of dtype (float64 into float32, for example)."""
    array = value if type(value) is np.ndarray else to_array(value)
    if array.shape != column.shape:
        raise SchemaError(f"{show_key(key)} came with shape {array.shape}, expected {column.shape}")
    if array.dtype is not column.dtype and not np.can_cast(array.dtype, column.dtype, "same_kind"):
        raise SchemaError(f"{show_key(key)} came as {array.dtype}, expected {column.dtype}: cast it first")
    column[...] = array


def look_up(info: Mapping[str, Any], path: Key) -> tuple[Any, Any]:
    """Return an info and the mask of the lanes that have it; ``(None, False)`` if it is missing.

    In a vector environment's infos, ``_x`` is the mask of ``x``; without a mask all lanes have it.
    """
    present: Any = True
    value: Any = info
    for part in path:
        if not isinstance(value, Mapping) or part not in value:
            return None, False
        mask = value.get(f"_{part}")
        if mask is not None:
            present = present & mask
        value = value[part]
    return value, present


def fill_info_(column: np.ndarray, path: Key, default: Any, info: Mapping[str, Any]) -> None:
    """Copy an info of a single environment, or its default, into its column."""
    value, _ = look_up(info, path)
    value = default if value is None else value
    if value is None:
        raise missing_info(path)
    fill_(column, value, ("next", *path))


def fill_infos_(
    column: np.ndarray,
    path: Key,
    default: Any,
    info: Mapping[str, Any],
    ended: np.ndarray | None,
    lanes: np.ndarray | None,
) -> None:
    """Copy an info of a vector environment into its column, ``[E, ...]``.

    Args:
        column: the column.
        path: the info's name.
        default: the value of lanes that lack it.
        info: the infos of all lanes.
        ended: lanes that were reset within this step, whose values are in ``final_info``.
        lanes: lanes to copy; ``None`` for all.

    Raises:
        SchemaError: a lane has neither a value nor a default; or the values do not fit the column.
    """
    missing = np.ones(len(column), bool) if lanes is None else lanes.copy()
    sources = [(info, missing.copy())]
    if ended is not None:
        sources.insert(0, (info.get("final_info") or {}, ended))
    for source, wanted in sources:
        value, present = look_up(source, path)
        here = missing & wanted & present
        if value is not None and here.any():
            array = to_array(value)[here]
            if array.dtype == object:
                array = np.stack([to_array(each) for each in array])
            part = column[here]
            fill_(part, array, ("next", *path))
            column[here] = part
            missing &= ~here
    if missing.any():
        if default is None:
            raise missing_info(path)
        column[missing] = to_array(default)


def missing_info(path: Key) -> SchemaError:
    """Return the error for a missing info."""
    return SchemaError(
        f"the infos of a step have no {show_key(path)}: give the value to store then, infos={{{show_key(path)}: 0.0}}"
    )
