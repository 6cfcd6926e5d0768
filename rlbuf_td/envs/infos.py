"""Functions that copy Gymnasium's infos and final observations into the columns of rows.

``info`` is the dict of a vector environment, whose values are arrays ``[E]`` beside masks ``"_name"``, or a list of
dicts, one per environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from rlbuf_td.envs.columns import fill_, part_of, to_array
from rlbuf_td.envs.specs import Key, Paths, tensors_of
from rlbuf_td.storages.schema import SchemaError, show_key

_LOST = (
    "the episode of environment {} ended without 'final_obs' in the infos: this environment resets in the same step, "
    "and the final observation is lost. Write the steps with buffer.add(make_transition(...)) instead of the recorder. "
    "In a rollout, pass the critic's value of the final observation: next={{'state_value': ...}}. Otherwise, pass "
    "terminated=True at each end of an episode: then no value of the next observation is used"
)

Info: TypeAlias = Mapping[str, Any] | list[Mapping[str, Any]]


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


def fill_info_(column: np.ndarray, path: Key, default: Any, info: Info, lanes: np.ndarray, ended: np.ndarray) -> None:
    """Copy an info to ``lanes`` of a column; where ``ended`` is True, ``"final_info"`` takes precedence."""
    for lane in lanes.nonzero()[0].tolist():
        value = info_of(info, ("final_info", *path), lane) if ended[lane] else None
        value = info_of(info, path, lane) if value is None else value
        value = default if value is None else value
        if value is None:
            raise _missing(path)
        fill_(column[lane, ...], value, ("next", *path))


def info_example(path: Key, default: Any, info: Info, lanes: int) -> torch.Tensor:
    """Return the default of an info, or one that a lane has, for all lanes."""
    found = (info_of(info, path, lane) for lane in range(lanes))
    value = next((each for each in found if each is not None), None) if default is None else tensors_of(default, *path)
    if value is None:
        raise _missing(path)
    value = torch.as_tensor(to_array(value), device="cpu")
    return value.expand(lanes, *value.shape)


def _missing(path: Key) -> SchemaError:
    name = show_key(path)
    return SchemaError(f"the infos of a step have no {name}: give a default value, infos={{{name}: 0.0}}")
