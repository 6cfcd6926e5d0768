"""The only module that uses TensorDict's private attributes, which are 10 times as fast
as the public API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase


def _assemble(
    entries: Mapping[str, object], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    data = TensorDict.__new__(TensorDict)
    data._device = device
    data._batch_size = batch_size
    data._td_dim_names = None
    data._tensordict = _Entries(entries)
    return data


def _knows_tensordict() -> bool:
    example: Any = (
        {"x": torch.zeros(2, dtype=torch.float32, device="cpu")},
        torch.Size([2]),
        torch.device("cpu"),
    )
    try:
        return (
            _assemble(*example).__dict__.keys() == TensorDict(*example).__dict__.keys()
        )
    except (AttributeError, TypeError):
        return False


_Entries = type(getattr(TensorDict({}), "_tensordict", {}))
_HAS_DICT = issubclass(_Entries, dict) and _knows_tensordict()
new_tensordict: Callable[
    [Mapping[str, object], torch.Size, torch.device | None], TensorDict
]
new_tensordict = _assemble if _HAS_DICT else cast("Any", TensorDict)


def entries_of(data: TensorDictBase) -> Mapping[str, Any]:
    """Return the entries of one level of ``data`` as a mapping, which callers must not
    change."""
    return data._tensordict if type(data) is TensorDict and _HAS_DICT else _Level(data)


#: :func:`entries_of` a TensorDict itself, of no subclass, without a Python frame.
plain_entries: Callable[[TensorDict], Mapping[str, Any]] = (
    attrgetter("_tensordict") if _HAS_DICT else entries_of
)


class _Level(Mapping[str, Any]):
    """The entries of one level of a TensorDict, read one by one: those of a stack of
    ragged rows may not stack."""

    def __init__(self, data: TensorDictBase) -> None:
        self._data = data

    def __getitem__(self, name: str) -> Any:
        if name not in [*self._data.keys()]:
            raise KeyError(name)
        return self._data.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._data.keys())

    def __len__(self) -> int:
        return len(self._data.keys())


def set_entries_(data: TensorDictBase, entries: Mapping[str, torch.Tensor]) -> None:
    """Set entries without checking their batch size and device; ``data`` must not be
    locked."""
    if type(data) is TensorDict and _HAS_DICT:
        dict.update(data._tensordict, entries)
    else:
        data.update(dict(entries))


def folded(data: TensorDictBase, window: int, name: str | None) -> TensorDictBase:
    """Return ``data``, ``[B * window, ...]``, as ``[B, window, ...]``, without copying;
    ``name`` is that of dim 1."""
    batch_size = torch.Size([len(data) // window, window, *data.batch_size[1:]])
    if type(data) is not TensorDict or not _HAS_DICT:
        data = data.reshape(batch_size)
        if name is not None:
            data.names = [*data.names[:1], name, *data.names[2:]]
        return data
    lead = batch_size[:2]
    entries = {
        key: entry.view(*lead, *entry.shape[1:])
        if type(entry) is torch.Tensor
        else folded(entry, window, name)
        for key, entry in data._tensordict.items()
    }
    windows = new_tensordict(entries, batch_size, data.device)
    if name is not None:
        windows._td_dim_names = [None, name, *[None] * (len(batch_size) - 2)]
    return windows


def leaf_of(data: TensorDictBase, key: tuple[str, ...]) -> Any:
    node: Any = data
    for name in key:
        node = None if node is None else entries_of(node).get(name)
    return node
