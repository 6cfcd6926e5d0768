"""The only module that uses TensorDict's private attributes, each with a public fallback.

The constructor of TensorDict takes 25 microseconds for a batch of seven leaves, direct assembly less than 1. Reading
the leaves of a write takes 1 microsecond per key through ``get``, and 0.1 through the underlying dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase


def _assemble(entries: dict[str, Any], batch_size: torch.Size, device: torch.device) -> TensorDict:
    data = TensorDict.__new__(TensorDict)
    data._device = device
    data._batch_size = batch_size
    data._td_dim_names = None
    data._tensordict = _Entries(entries)
    return data


def _knows_tensordict() -> bool:
    """Return whether a TensorDict assembled here has the same attributes as one made by the constructor."""
    example = {"x": torch.zeros(2, dtype=torch.float32, device="cpu")}, torch.Size([2]), torch.device("cpu")
    try:
        return _assemble(*example).__dict__.keys() == TensorDict(*example).__dict__.keys()
    except (AttributeError, TypeError):
        return False


_Entries = type(getattr(TensorDict({}), "_tensordict", {}))
_HAS_DICT = issubclass(_Entries, dict) and _knows_tensordict()
new_tensordict: Callable[[dict[str, Any], torch.Size, torch.device], TensorDict]
new_tensordict = _assemble if _HAS_DICT else TensorDict


def entries_of(data: TensorDictBase) -> Mapping[str, Any]:
    """Return the entries of one level of ``data`` as a read-only mapping."""
    if type(data) is TensorDict and _HAS_DICT:
        return data._tensordict
    return dict(data.items())


def set_entries_(data: TensorDictBase, entries: Mapping[str, torch.Tensor]) -> None:
    """Set entries that fit the batch size and device of ``data``, unchecked; ``data`` must not be locked."""
    if type(data) is TensorDict and _HAS_DICT:
        dict.update(data._tensordict, entries)
    else:
        data.update(dict(entries))


def leaf_of(data: TensorDictBase, key: tuple[str, ...]) -> Any:
    """Return the entry at a key given as a tuple; None if there is none."""
    found: Any = data
    for name in key:
        if found is None:
            return None
        found = entries_of(found).get(name)
    return found
