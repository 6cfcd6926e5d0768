"""Operations that would make the host wait for a device, refused on the CPU, so that no device is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose result the host needs, as a value or as a shape.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero"}
_WAITS |= {"unique_consecutive", "bincount"}


class RefuseWaiting(TorchDispatchMode):
    """Raise a RuntimeError where an operation would wait for the device that its tensors are on.

    On the CPU, values and shapes that the host asks for are refused; ``numpy()``, ``tolist()`` and ``cpu()`` are no
    operations there. The meta device refuses these itself, and copies between it and the CPU are refused here.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args, kwargs or {}):
            raise RuntimeError(f"{func.overloadpacket.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    name = func.overloadpacket.__name__
    if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
        return any(index is not None and index.dtype is torch.bool for index in args[1])
    if name == "repeat_interleave":
        return func._overloadname == "Tensor" and kwargs.get("output_size") is None
    if name in ("copy_", "_to_copy"):  # a copy between devices waits, unless it is asked not to
        source, target = (args[1].device, args[0].device) if name == "copy_" else (args[0].device, kwargs.get("device"))
        return target not in (None, source) and not (kwargs.get("non_blocking") or args[2:] == (True,))
    return name in _WAITS
