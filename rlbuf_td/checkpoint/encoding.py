"""Plain state (numbers, strings, lists, dicts, tensors) to JSON and a list of tensors, and back. No pickle.

Values that JSON lacks become an object with one key that begins with ``$``: ``{"$tensor": 3}`` (index into the list),
``{"$float": "nan"}``, ``{"$tuple": [...]}``, ``{"$size": [2, 3]}``, ``{"$dtype": "float32"}``, ``{"$device": "cpu"}``,
``{"$tensordict": ...}``, ``{"$dict": [[key, value], ...]}`` for keys other than plain strings, and ``{"$ordered":
...}`` for a module's state dict with the ``_metadata`` that torch attaches.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase


class CheckpointError(ValueError):
    """A dump cannot be written or read. The message names the file and the problem. Nothing has changed.

    Example:
        >>> import tempfile
        >>> from rlbuf_td import ReplayBuffer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ReplayBuffer().loads(folder)
        Traceback (most recent call last):
        rlbuf_td.checkpoint.encoding.CheckpointError: ...
    """


#: What decoding or loading a state of the wrong form raises. A manifest with a valid checksum may hold anything.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def encode(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """Return ``value``, which errors call ``where``, in JSON's types; append its tensors, uncopied, to ``tensors``."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, np.ndarray | np.bool_):
        value = torch.as_tensor(value, device="cpu")
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(f"{where} is a nested, sparse or quantized tensor, which a dump cannot hold")
        tensors.append(value.detach())
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if type(value) is TensorDict:
        entries = {name: value.get(name) for name in value.keys()}
        parts = [list(value.batch_size), None if value.device is None else str(value.device)]
        return {"$tensordict": [*parts, encode(entries, tensors, where)]}
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, f"{where}[{j}]") for j, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
        return {"$ordered": [encode(dict(value), tensors, where), encode(value._metadata or {}, tensors, where)]}
    if isinstance(value, Mapping) and not isinstance(value, TensorDictBase):
        encoded = [(key, encode(item, tensors, f"{where}.{key}")) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key, _ in encoded):
            return dict(encoded)
        return {"$dict": [[encode(key, tensors, where), item] for key, item in encoded]}
    content = "numbers, strings, lists, dicts and tensors, and nothing that loading would have to execute"
    raise CheckpointError(f"{where} is a {type(value).__name__}, which a dump cannot hold: it holds {content}")


def decode(value: Any, tensor: Callable[[int], Any]) -> Any:
    """Invert :func:`encode`; ``tensor(j)`` returns the j-th tensor. Other JSON raises one of ``MALFORMED``."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag, *others = value or ("",)
    if tag.startswith("$") and not others:
        return _KINDS[tag](value[tag], tensor)
    return {key: decode(item, tensor) for key, item in value.items()}


def dtype_of(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the manifest names an unknown dtype {name!r}")
    return dtype


def _tensordict(content: Any, tensor: Callable[[int], Any]) -> TensorDict:
    batch_size, device, entries = content
    return TensorDict(decode(entries, tensor), batch_size=batch_size, device=device)


def _ordered(content: Any, tensor: Callable[[int], Any]) -> OrderedDict[str, Any]:
    entries, metadata = content
    state = OrderedDict(decode(entries, tensor))
    state._metadata = OrderedDict(decode(metadata, tensor))  # type: ignore[attr-defined]
    return state


_KINDS: dict[str, Callable[[Any, Callable[[int], Any]], Any]] = {
    "$tensor": lambda content, tensor: tensor(content),
    "$float": lambda content, tensor: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content],
    "$tuple": lambda content, tensor: tuple(decode(content, tensor)),
    "$size": lambda content, tensor: torch.Size(content),
    "$dtype": lambda content, tensor: dtype_of(content),
    "$device": lambda content, tensor: torch.device(content),
    "$tensordict": _tensordict,
    "$ordered": _ordered,
    "$dict": lambda content, tensor: {decode(key, tensor): decode(item, tensor) for key, item in content},
}
