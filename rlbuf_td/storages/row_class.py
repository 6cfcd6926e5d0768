"""The class of the rows that users write and read, if they are not TensorDicts: a
tensorclass, or a tensor."""

from __future__ import annotations

import sys
import warnings
from functools import reduce
from typing import Any, NamedTuple

import torch
from tensordict import (
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)

from rlbuf_td.storages.schema import SchemaError

_TENSOR = "data"  # the key of rows that are tensors
_Place = tuple[tuple[str, ...], type]  # the path of a nested level, and its class


class RowClass(NamedTuple):
    """The tensorclasses of a row and of its nested levels, inner levels first. A row
    without any is a tensor."""

    places: tuple[_Place, ...]

    @property
    def name(self) -> str:
        return self.places[-1][1].__qualname__ if self.places else "Tensor"

    def wrap(self, rows: object) -> Any:
        """Return a TensorDict of rows as an object of this class, without a copy; other
        objects stay the same."""
        if not isinstance(rows, TensorDictBase):
            return rows
        if not self.places:
            return rows.get(_TENSOR)
        for path, cls in self.places[:-1]:
            rows = rows.set(path, cls.from_tensordict(rows.get(path)))
        return self.places[-1][1].from_tensordict(rows)

    def refuse_other(self, data: TensorDictBase) -> None:
        """Raise a SchemaError if an entry of the rows is not a field of this class."""
        fault = (
            ""
            if self.places or [*data.keys()] == [_TENSOR]
            else f"they have the entries {sorted(data.keys())}"
        )
        try:
            self.wrap(data.copy())
        except (KeyError, ValueError) as error:
            fault = str(error.args[0])
        if fault:
            raise SchemaError(f"the rows cannot be read as {self.name}: {fault}")

    def state(self) -> list[Any]:
        return [
            [[*path], cls.__module__, cls.__qualname__] for path, cls in self.places
        ]

    @staticmethod
    def refuse_state(state: object) -> None:
        """Raise a ValueError unless ``state`` is None, or has the form of a
        :meth:`state`."""
        for place in (
            () if state is None else state if isinstance(state, list) else [state]
        ):
            is_place = isinstance(place, list) and [*map(type, place)] == [
                list,
                str,
                str,
            ]
            if not is_place or not all(type(name) is str for name in place[0]):
                expected = "a path, a module and a name per level"
                raise ValueError(
                    f"the saved class of rows is {state!r}, expected {expected}"
                )

    @classmethod
    def of_state(cls, state: list[Any] | None) -> RowClass | None:
        """Return the class that :meth:`state` describes, or None, with a warning, if
        its module is not imported."""
        places: list[_Place] = []
        for path, module, name in state or ():
            found = reduce(
                lambda part, each: getattr(part, each, None),
                name.split("."),
                sys.modules.get(module),
            )
            if not (isinstance(found, type) and is_tensorclass(found)):
                what = f"rows were saved as {module}.{name}, which is not imported"
                warnings.warn(f"{what}: they are read as TensorDicts", stacklevel=2)
                return None
            places.append((tuple(path), found))
        return None if state is None else cls(tuple(places))


def unwrap(data: object, lead_dims: int) -> tuple[Any, RowClass | None]:
    """Return rows of a tensorclass or a tensor as a TensorDict, without a copy, and
    their class.

    The first ``lead_dims`` dims of a tensor number the rows. Other data stay the same,
    and have no class.
    """
    if isinstance(data, torch.Tensor):
        if data.ndim < lead_dims:
            raise SchemaError(
                f"a tensor of shape {[*data.shape]} has fewer dims than the {lead_dims} that number rows"
            )
        return TensorDict({_TENSOR: data}, data.shape[:lead_dims]), RowClass(())
    if not is_tensorclass(data) or is_non_tensor(data):
        return data, None
    places: list[_Place] = []
    return _unwrap(data, (), places), RowClass(tuple(places))


def _unwrap(data: Any, path: tuple[str, ...], places: list[_Place]) -> Any:
    if not is_tensor_collection(data) or is_non_tensor(data):
        return data
    entries = {
        name: _unwrap(value, (*path, name), places) for name, value in data.items()
    }
    if is_tensorclass(data):
        places.append((path, type(data)))
    return TensorDict(entries, data.batch_size, device=data.device)
