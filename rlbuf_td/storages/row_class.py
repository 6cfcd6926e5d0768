"""Rows that users write and read as tensorclasses or tensors, not as TensorDicts."""

import sys
import warnings
from typing import Any, TypeAlias

import torch
from tensordict import (
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)

#: Path, module and name of the class of each level, inner ones first; a tensor has none.
RowClass: TypeAlias = list[Any]
_KNOWN: dict[tuple[str, str], Any] = {}  # classes by module and name


def unwrap(data: Any, lead_dims: int) -> tuple[Any, RowClass | None]:
    """Return a tensorclass or a tensor, whose first ``lead_dims`` dims number rows, as
    a TensorDict, with its class; other data have none."""
    levels: RowClass = []
    if isinstance(data, torch.Tensor):
        return TensorDict({"data": data}, data.shape[:lead_dims]), levels
    return _unwrap(data, [], levels) if is_tensorclass(data) else data, levels or None


def _unwrap(data: Any, path: list[str], levels: RowClass) -> Any:
    if not is_tensor_collection(data) or is_non_tensor(data):
        return data
    entries = {key: _unwrap(data.get(key), [*path, key], levels) for key in data.keys()}
    if is_tensorclass(data):
        cls = type(data)
        _KNOWN[cls.__module__, cls.__qualname__] = cls
        levels.append([path, cls.__module__, cls.__qualname__])
    return TensorDict(entries, data.batch_size, device=data.device)


def wrap(rows: Any, row_class: RowClass | None) -> Any:
    """Return a TensorDict of rows as an object of a class, without a copy."""
    if row_class is None or not isinstance(rows, TensorDictBase):
        return rows
    for path, *names in row_class:
        cls, key = _KNOWN[tuple(names)], tuple(path)
        level = cls.from_tensordict(rows.get(key) if key else rows)
        rows = rows.set(key, level) if key else level
    return rows if row_class else rows.get("data")


def loaded(state: RowClass | None) -> RowClass | None:
    """Return a saved class, or None, with a warning, if its module is not imported."""
    for path, module, name in state or ():
        "".join(path)  # a TypeError unless the path is text
        cls: Any = sys.modules.get(module)
        for part in name.split("."):  # of a nested class
            cls = getattr(cls, part, None)
        cls = _KNOWN.get((module, name), cls)
        if not is_tensorclass(cls):
            what = f"rows were saved as {module}.{name}, which is not imported"
            warnings.warn(f"{what}: they are read as TensorDicts", stacklevel=2)
            return None
        _KNOWN[module, name] = cls
    return state
