"""A stand-in for CUDA graphs, on the CPU: what is captured is repeated as it was, on the same memory, and nothing else.

:class:`RecordedGraph` writes down every torch operation with the arguments that it had. A replay does these again and
puts the results where they were put: the host decides nothing, numbers that it gave stay as they were, random numbers
go on. As on a GPU, a capture itself does nothing: whatever it has changed is put back, and the memory that it made is
full of rubbish until the first replay. Whoever waits for the device is refused, and so is who brings numbers from the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from rlbuf_td.buffers import graph as capture
from rlbuf_td.kernels.dispatch import Backend
from tests.backends import forced

#: Operations whose result the host needs, as a value or as a shape.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero"}
_WAITS |= {"unique_consecutive", "bincount"}
_RUBBISH = 0x7F  # a byte: large numbers, which name no row


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation waits for the device that its tensors are on."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
        return any(index is not None and index.dtype is torch.bool for index in args[1])
    if name == "repeat_interleave":
        return func._overloadname == "Tensor" and kwargs.get("output_size") is None
    return name in _WAITS


class RefuseWaiting(TorchDispatchMode):
    """Raise where an operation would wait for the device that its tensors are on, as torch's own mode does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args, kwargs or {}):
            raise RuntimeError(f"{func.overloadpacket.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


class Recorder(RefuseWaiting):
    """Write down operations: how to do them again, what they change, and the memory that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "lift_fresh":
            raise RuntimeError("a tensor of numbers from the host cannot be captured")
        given = tree_flatten((args, kwargs))[0]
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
                self.keep(tree_flatten(value)[0])
        found = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = [x for x in tree_flatten(found)[0] if isinstance(x, torch.Tensor)]
        inputs = {_address(x) for x in given if isinstance(x, torch.Tensor)}
        self.made += [x for x in outputs if _address(x) not in inputs]
        if "empty" not in func.overloadpacket.__name__:
            self.calls.append(partial(_again, func, args, kwargs or {}, outputs))
        return found

    def keep(self, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and _address(value) not in self.before:
                storage = value.untyped_storage()
                self.before[_address(value)] = storage, storage.clone()

    def undo(self) -> None:
        for storage, copy in self.before.values():
            storage.copy_(copy)
        for tensor in self.made:
            tensor.untyped_storage().fill_(_RUBBISH)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
    found = [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, torch.Tensor)]
    for mine, new in zip(outputs, found, strict=True):
        if _address(mine) != _address(new):
            mine.copy_(new)


class RecordedGraph:
    """See the module; offers what is used of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.replays = 0
        self._calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for call in self._calls:
                call()

    @contextmanager
    def recording(self, *, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        recorder, random = Recorder(), torch.get_rng_state()
        try:
            with recorder:
                yield
        finally:
            recorder.undo()
            torch.set_rng_state(random)
        self._calls = recorder.calls


@contextmanager
def graphs_by(path: Backend) -> Iterator[None]:
    """Let buffers on the CPU go the way of CUDA, graphs included, by the kernels of one device path."""
    nothing, stream = nullcontext(), SimpleNamespace(wait_stream=lambda other: None)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
        patch.setattr(torch.cuda, "graph", RecordedGraph.recording)
        for name in ("Stream", "current_stream"):
            patch.setattr(torch.cuda, name, lambda: stream)
        for name in ("stream", "device"):
            patch.setattr(torch.cuda, name, lambda given: nothing)
        patch.setattr(capture, "device_of", lambda storage: torch.device("cuda"))
        stack.enter_context(forced(path))
        yield
