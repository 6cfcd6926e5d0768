"""Functions that copy the results of a Gymnasium step into the columns of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from rlbuf_td.envs.specs import Key, tensors_of
from rlbuf_td.storages.notebooks import TRANSITIONS
from rlbuf_td.storages.schema import SchemaError, refuse_rounding, show_key

_LOST = (
    "the episode of environment {} ended without 'final_obs' in the infos: this environment resets in the same step, "
    "and the final observation is lost. Write the steps with buffer.add(make_transition(...)) instead of the recorder. "
    "In a rollout, pass the critic's value of the final observation: next={{'state_value': ...}}. Otherwise, pass "
    "terminated=True at each end of an episode: then no value of the next observation is used"
)

_WIDER = "store it in float64, with from_env(env, ..., extras=...) and an example of {} in extras"
#: The largest number up to which a dtype holds every whole number; for other dtypes, at least 127.
_EXACT = {np.dtype(np.float32): 2**24, np.dtype(np.float64): 2**53}

Mask: TypeAlias = np.ndarray | None


def part_of(value: Any, path: Key) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, tuple) else value[part]
    return value


def to_array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def fill_(column: np.ndarray, value: Any, key: Key) -> None:
    """Copy a value into a column of equal shape. NumPy's "same_kind" casts (float64 to float32) are allowed.

    A cast that changes a whole number, such as 2**24 + 1 to float32, raises a SchemaError.
    """
    array = value if type(value) is np.ndarray else to_array(value)
    if array.shape != column.shape:
        raise SchemaError(f"{show_key(key)} came with shape {array.shape}, expected {column.shape}")
    if array.dtype is not column.dtype:
        if not np.can_cast(array.dtype, column.dtype, "same_kind"):
            raise SchemaError(f"{show_key(key)} came as {array.dtype}, expected {column.dtype}: cast it first")
        if not (np.abs(array) <= _EXACT.get(column.dtype, 127)).all():
            given, dtype = tensors_of(array.reshape(-1), *key), torch.from_numpy(np.empty(0, column.dtype)).dtype
            refuse_rounding(key, given, dtype, _WIDER.format(show_key(key)))
    column[...] = array


def fill_final_(columns: Mapping[Key, np.ndarray], paths: list[tuple[Key, Key]], info: Any, done: np.ndarray) -> None:
    """In lanes where ``done`` is True, replace the next observation by ``final_obs`` from the infos."""
    final = info.get("final_obs")
    is_each = isinstance(final, np.ndarray) and final.dtype == object
    for lane in done.nonzero()[0]:
        if final is None or (is_each and final[lane] is None):
            raise RuntimeError(_LOST.format(lane) + TRANSITIONS)
        for key, path in paths:
            value = part_of(final[lane], path) if is_each else part_of(final, path)[lane]
            fill_(columns[key][lane, ...], value, key)


def look_up(info: Mapping[str, Any], path: Key) -> tuple[Any, Any]:
    """Return the info at ``path`` and the mask of lanes that have a value; ``(None, False)`` if it is missing."""
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


def joined(infos: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge a list of info dicts, one per lane, into one dict in the format of Gymnasium's vector environments."""
    result: dict[str, Any] = {}
    for name in dict.fromkeys(name for info in infos for name in info):
        parts = [info.get(name) for info in infos]
        if name != "final_obs" and any(isinstance(part, Mapping) for part in parts):
            result[name] = joined([part or {} for part in parts])
        else:
            result[name] = np.empty(len(parts), object)
            for lane, part in enumerate(parts):
                result[name][lane] = part
        result[f"_{name}"] = np.array([name in info for info in infos])
    return result


def fill_infos_(column: np.ndarray, path: Key, default: Any, info: Mapping[str, Any], ended: Mask, lanes: Mask) -> None:
    """Copy an info to the ``lanes`` of a column; where ``ended`` is True, ``"final_info"`` takes precedence."""
    missing = np.ones(len(column), bool) if lanes is None else lanes.copy()
    sources: list[tuple[Any, Any]] = [] if ended is None else [(info.get("final_info") or {}, ended)]
    for source, wanted in (*sources, (info, True)):
        value, present = look_up(source, path)
        here = missing & wanted & present
        if value is not None and here.any():
            part = column[here]
            fill_(part, _converted(_stacked(to_array(value)[here]), column.dtype), ("next", *path))
            column[here] = part
            missing &= ~here
    if missing.any():
        if default is None:
            raise _missing_info(path)
        column[missing] = to_array(default)


def info_example(path: Key, default: Any, info: Mapping[str, Any], lanes: int) -> torch.Tensor:
    value = default if default is None else tensors_of(default, *path)
    if value is None:
        value, present = look_up(info, path)
        found = np.empty(0) if value is None else to_array(value)[np.broadcast_to(present, lanes)]
        if not len(found):
            raise _missing_info(path)
        value = _stacked(found)[0]
    value = torch.as_tensor(to_array(value), device="cpu")
    return value.expand(lanes, *value.shape)


def _missing_info(path: Key) -> SchemaError:
    name = show_key(path)
    return SchemaError(f"the infos of a step have no {name}: give a default value, infos={{{name}: 0.0}}")


def _stacked(values: np.ndarray) -> np.ndarray:
    return np.stack([to_array(each) for each in values]) if values.dtype == object else values


def _converted(value: Any, dtype: np.dtype) -> np.ndarray:
    """Convert to an array; cast between bools, ints and floats only if no number changes, as from 1.0 to True."""
    array = to_array(value)
    if array.dtype.kind not in "biuf" or np.can_cast(array.dtype, dtype, "same_kind"):
        return array
    with np.errstate(invalid="ignore"):  # NaN has no integer value
        converted = array.astype(dtype)
    return converted if np.array_equal(converted, array) else array
