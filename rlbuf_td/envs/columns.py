"""Functions that copy what environments return into the columns of rows in memory.

Gymnasium's ``info`` is the dict of a vector environment, whose values are arrays ``[E]`` beside masks ``"_name"``, or a
list of dicts, one per environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from rlbuf_td.envs.specs import Key, Paths, tensors_of
from rlbuf_td.storages.schema import SchemaError, refuse_rounding, show_key

_WIDER = "store it in float64, with from_env(env, ..., extras=...) and an example of {} in extras"
#: The largest number up to which a dtype holds every whole number; for other dtypes, at least 127.
_EXACT = {np.dtype(np.float32): 2**24, np.dtype(np.float64): 2**53}

_LOST = (
    "the episode of environment {} ended without 'final_obs' in the infos: this environment resets in the same step, "
    "and the final observation is lost. Write the steps with buffer.add(make_transition(...)) instead of the recorder. "
    "In a rollout, pass the critic's value of the final observation: next={{'state_value': ...}}. Otherwise, pass "
    "terminated=True at each end of an episode: then no value of the next observation is used"
)

Info: TypeAlias = Mapping[str, Any] | list[Mapping[str, Any]]


def part_of(value: Any, path: Key) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, tuple) else value[part]
    return value


def to_array(value: object) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def fill_(column: np.ndarray, value: object, key: Key) -> None:
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


def fill_parts_(columns: Mapping[Key, np.ndarray], paths: Paths, value: object, at: Any = ...) -> None:
    """Copy the parts of an observation or action into the elements ``at`` of their columns."""
    for key, path in paths:
        fill_(columns[key][at], part_of(value, path), key)


def fill_final_(columns: Mapping[Key, np.ndarray], paths: Paths, info: Info, done: np.ndarray) -> None:
    """In lanes where ``done`` is True, replace the next observation by ``final_obs`` from the infos."""
    for lane in done.nonzero()[0].tolist():
        final = info[lane].get("final_obs") if isinstance(info, list) else info.get("final_obs")
        is_batched = not isinstance(info, list)
        if isinstance(final, np.ndarray) and final.dtype == object:
            final, is_batched = final[lane], False
        if final is None:
            raise RuntimeError(_LOST.format(lane))
        for key, path in paths:
            value = part_of(final, path)
            fill_(columns[key][lane, ...], value[lane] if is_batched else value, key)


def info_of(info: Info, path: Key, lane: int) -> Any:
    """Return the info of a lane at ``path``; None if it is missing."""
    value: Any = info[lane] if isinstance(info, list) else info
    for part in path:
        if not isinstance(value, Mapping) or part not in value:
            return None
        mask = None if isinstance(info, list) else value.get(f"_{part}")
        if mask is not None and not mask[lane]:
            return None
        value = value[part]
    return value if isinstance(info, list) else value[lane]


def fill_info_(
    column: np.ndarray, path: Key, default: object, info: Info, lanes: np.ndarray, ended: np.ndarray
) -> None:
    """Copy an info to ``lanes`` of a column; where ``ended`` is True, ``"final_info"`` takes precedence."""
    for lane in lanes.nonzero()[0].tolist():
        value = info_of(info, ("final_info", *path), lane) if ended[lane] else None
        value = info_of(info, path, lane) if value is None else value
        fill_(column[lane, ...], default if value is None else value, ("next", *path))
