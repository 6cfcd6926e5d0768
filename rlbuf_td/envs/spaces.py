"""Shapes and dtypes of the values of Gymnasium spaces and TorchRL specs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorSpec

from rlbuf_td.storages.schema import SchemaError, refuse_unpackable, show_key, walk

Key = tuple[str, ...]
OBSERVATION, ACTION = "observation", "action"
# The keys of a transition besides the observation, at the root and under "next".
RESERVED = {ACTION, "next", "index", "collector", "reward", "done", "terminated", "truncated"}
_RAGGED = "has no fixed size in bytes: encode it as a Box or MultiDiscrete of fixed shape with a wrapper"


def is_space(source: Any) -> bool:
    gymnasium = sys.modules.get("gymnasium")
    return isinstance(source, TensorSpec) or (gymnasium is not None and isinstance(source, gymnasium.Space))


def entries(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping | TensorDictBase):
        for key in value.keys():
            if not isinstance(key, str):
                raise SchemaError(f"keys are strings, got {key!r} of type {type(key).__name__}")
        return dict(value.items())
    if isinstance(value, tuple):
        return {str(place): part for place, part in enumerate(value)}
    return None


def value_of_space(space: Any, lanes: tuple[int, ...], path: tuple[str, ...]) -> Any:
    if isinstance(space, TensorSpec):
        value = space.zero().to("meta")
        if isinstance(value, TensorDictBase):
            return without_memory(value.expand(*lanes, *value.shape) if lanes else value)
        return torch.empty((*lanes, *value.shape), dtype=value.dtype, device="meta")
    spaces = sys.modules["gymnasium"].spaces
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = entries(space.spaces) or {}
        return TensorDict({key: value_of_space(part, lanes, (*path, key)) for key, part in parts.items()}, lanes)
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise SchemaError(f"{show_key(path)} is a {type(space).__name__} space, which {_RAGGED}")
    try:
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    except TypeError as error:
        raise SchemaError(f"{show_key(path)} has dtype {space.dtype}, which torch does not have") from error
    return torch.empty((*lanes, *space.shape), dtype=dtype, device="meta")


def without_memory(data: TensorDictBase) -> TensorDict:
    for key, value in walk(data):
        refuse_unpackable(key, value)
    return data.apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), device=torch.device("meta"))
