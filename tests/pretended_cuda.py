"""A pretended CUDA device: tensors that say ``cuda:0`` and lie in the memory of the CPU.

As a plugin of pytest it lets the tests that need a CUDA device run without one::

    python -m pytest -p tests.pretended_cuda -m cuda

It checks what the *host* does. Like CUDA it refuses operations on tensors of both devices, generators of the other
device, ``numpy()`` of a tensor of the device, and tensors of the CPU as arguments of Triton's kernels (which run in
Triton's interpreter). Under ``torch.cuda.set_sync_debug_mode("error")`` and during a capture it refuses what waits for
the device. Graphs are recorded and repeated operation by operation: :class:`tests.graphs.RecordedGraph`.

It does not check the device: operations run at once, so no stream or event can be missing. There are no timings, no
limit of memory, no compiled kernels, no second device, no backward pass and no Dynamo. Random numbers are the CPU's.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.graphs import RecordedGraph, Recorder, waits
from tests.interpreter import why_not as why_no_interpreter

CUDA = torch.device("cuda", 0)
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_TENSOR = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}
_GENERATOR = torch.Generator


class _Thread(threading.local):
    recorder: Recorder | None = None


_THREAD = _Thread()
_SYNC = SimpleNamespace(mode="default")
_LAUNCHING = threading.Lock()  # the interpreter runs one kernel at a time


def why_not() -> str | None:
    """Return why no device can be pretended here, if so."""
    if torch.cuda.is_available():
        return "there is a CUDA device, or a pretended one"
    if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        return "this torch has no stand-in for the driver (torch._C._ensureCUDADeviceGuardSet)"
    return why_no_interpreter()


class CudaTensor(torch.Tensor):
    """A tensor that says ``cuda:0``, and holds another one, on the CPU."""

    on_cpu: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> CudaTensor:
        place = {"strides": real.stride(), "storage_offset": real.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, real.size(), **place, dtype=real.dtype, device=CUDA)
        made.on_cpu = real
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"CudaTensor({self.on_cpu!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaTensor:
        if id(self) not in memo:
            memo[id(self)] = CudaTensor(copy.deepcopy(self.on_cpu, memo))  # tensors over one memory stay so
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return CudaTensor, (self.on_cpu,)

    # What torch asks the memory itself, and what it makes of lists without asking a mode.

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def tolist(self) -> Any:
        _wait("tolist")
        return self.on_cpu.tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, (bool, int, float)):  # which of its operations torch takes differs between versions
            value = CudaTensor(torch.tensor(value, dtype=self.dtype))
        super().__setitem__(_index(index), value)

    def record_stream(self, stream: Any) -> None:
        pass


class _Mode(TorchDispatchMode):
    """Do what names the device by an argument (``torch.zeros(3, device="cuda")``) as the tensors themselves do it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})


def _done(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do one operation on the memory of the CPU, or refuse it as CUDA does."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, CudaTensor)]
    named = kwargs.get("device")
    to_cuda = bool(ours) if named is None else _is_cuda(named)
    _check_generators((*args, *kwargs.values()), to_cuda)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if not ours and not to_cuda:
        return func(*args, **kwargs)
    if ours:
        to_cuda = _check(func, args, kwargs, len(ours) < len(tensors), to_cuda)
    elif tensors and func.overloadpacket.__name__ == "_to_copy":
        _wait_unless(kwargs.get("non_blocking"))
    if to_cuda and named is not None:
        kwargs["device"] = torch.device("cpu")
    func = func if _THREAD.recorder is None else _recorded_by(_THREAD.recorder, func)
    wrappers = {id(x.on_cpu): x for x in ours}
    found = func(*_real(args), **_real(kwargs))
    if not to_cuda:
        return found
    return tree_map_only(torch.Tensor, lambda x: _same(wrappers[id(x)]) if id(x) in wrappers else CudaTensor(x), found)


def _check(func: Any, args: Any, kwargs: dict[str, Any], mixed: bool, to_cuda: bool) -> bool:
    """Refuse what CUDA refuses where a tensor lies on the device; return whether the result does."""
    name = func.overloadpacket.__name__
    others = [x for x in tree_leaves((args, kwargs)) if _is_cpu(x)]
    if name == "_to_copy":
        if not to_cuda:
            _wait_unless(kwargs.get("non_blocking"))
        return to_cuda
    if name in ("copy_", "_foreach_copy_"):
        if mixed:
            _wait_unless(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return not any(map(_is_cpu, tree_leaves(args[0])))
    if waits(func, args, kwargs):
        _wait(name)
    if name in _INDEXING:
        if _is_cpu(args[0]) or any(x.dim() for x in args[2:] if _is_cpu(x)):
            _refuse_mix(name)
        if mixed:
            _wait(f"{name} by what lies on the CPU")
    # A kernel takes a number from the CPU, where it goes element by element; it never writes there.
    elif any(x.dim() or torch.Tag.pointwise not in func.tags for x in others) or (
        others and func._schema.is_mutable and _is_cpu(args[0])
    ):
        _refuse_mix(name)
    return to_cuda


def _check_generators(given: Iterable[Any], to_cuda: bool) -> None:
    ours = {generator._cdata for generator in _GENERATORS}  # as torch hands one on, it does not say where it is
    if any(isinstance(one, _GENERATOR) and (one._cdata in ours) != to_cuda for one in given):
        raise RuntimeError(f"Expected a {'cuda' if to_cuda else 'cpu'} device type for generator")


def _refuse_mix(name: str) -> None:
    raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, in {name}")


def _wait(what: str) -> None:
    if _THREAD.recorder is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
    if _SYNC.mode == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


def _wait_unless(non_blocking: Any) -> None:
    if not non_blocking:
        _wait("copy between devices")


def _same(tensor: CudaTensor) -> CudaTensor:
    if (tensor.shape, tensor.stride()) != (tensor.on_cpu.shape, tensor.on_cpu.stride()):
        raise NotImplementedError("a pretended CUDA tensor cannot change its shape in place")
    return tensor


def _recorded_by(recorder: Recorder, func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: recorder.__torch_dispatch__(func, (), args, kwargs)


def _real(values: Any) -> Any:
    return tree_map_only(CudaTensor, lambda x: x.on_cpu, values)


def _is_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _is_cuda(device: Any) -> bool:
    device = torch.device(device)
    if device.type == "cuda" and device.index not in (None, 0):
        raise RuntimeError(f"invalid device ordinal: there is no {device}")
    return device.type == "cuda"


def _index(given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(map(_index, given))
    is_list = isinstance(given, (list, range))
    return torch.tensor(list(given), dtype=None if len(given) else torch.int64) if is_list else given


# -- torch's own functions, where they ask the driver before anyone else


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _GENERATOR)


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """A generator that says where it is."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        if not _is_cuda(device):
            return _GENERATOR()
        made = _GENERATOR.__new__(cls)
        _GENERATORS.add(made)
        return made

    @property
    def device(self) -> torch.device:
        return CUDA


_GENERATORS: weakref.WeakSet[_Generator] = weakref.WeakSet()


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
    if device is None or not _is_cuda(device):
        return _TENSOR["tensor"](data, dtype=dtype, device=device, **kwargs)
    return _TENSOR["tensor"](data, dtype=dtype, **kwargs).to(CUDA)


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, CudaTensor) or device is None or not _is_cuda(device):
        given = _TENSOR["as_tensor"](data, dtype=dtype) if not isinstance(data, CudaTensor) else data
        return given.to(device=device, dtype=dtype)
    if hasattr(data, "__cuda_array_interface__"):
        memory = SimpleNamespace(__array_interface__=data.__cuda_array_interface__, owner=data)
        return CudaTensor(torch.from_numpy(np.asarray(memory)))
    return _TENSOR["as_tensor"](data, dtype=dtype).to(CUDA)


class _Stream:
    """A stream, or an event: what it stands for has been done already."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CUDA

    def query(self) -> bool:
        return True

    def synchronize(self, *args: Any) -> None:
        if _THREAD.recorder is not None:
            _wait("synchronize")

    def record(self, *args: Any) -> None:
        pass

    wait = wait_stream = wait_event = record

    def record_event(self) -> _Stream:
        return self


class _Graph(RecordedGraph):
    """Listens to what is done on the device alone: what the host does meanwhile on the CPU is no part of a graph."""

    @contextmanager
    def listening(self, recorder: Recorder) -> Iterator[None]:
        _THREAD.recorder = recorder
        try:
            yield
        finally:
            _THREAD.recorder = None

    def replay(self) -> None:
        with _disable_current_modes():  # what was recorded names the memory of the CPU
            super().replay()

    def register_generator_state(self, generator: torch.Generator) -> None:
        if not _is_cuda(generator.device):
            raise RuntimeError(f"a graph draws from a generator on the device, got one on {generator.device}")


class _Runtime:
    """What is used of ``torch.cuda.cudart()``."""

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        found = 712 if address in self.locked else 0
        self.locked.add(address)
        return found

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.locked:
            return 713
        self.locked.remove(address)
        return 0


def _functions() -> dict[str, Any]:
    nothing, runtime = nullcontext(), _Runtime()
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _is_cuda,
        "device": lambda device: nothing,
        "stream": lambda stream: nothing,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "synchronize": _Stream().synchronize,
        "set_sync_debug_mode": lambda mode: setattr(_SYNC, "mode", mode),
        "is_current_stream_capturing": lambda: _THREAD.recorder is not None,
        "CUDAGraph": _Graph,
        "graph": _Graph.recording,
        "mem_get_info": lambda device=None: (1 << 37, 1 << 37),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "manual_seed_all": lambda seed: None,  # the CPU's generator has got it
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "cudart": lambda: runtime,
    }


@contextmanager
def _device() -> Iterator[None]:
    """Let there be a device; tensors are made there while :class:`_Mode` is on."""
    from triton.runtime.interpreter import InterpretedFunction

    to, as_subclass = torch.Tensor.to, torch.Tensor.as_subclass
    run_kernel, run_thread = InterpretedFunction.run, threading.Thread.run

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Name the device by its number, which torch asks the driver for."""

        def numbered(given: Any) -> Any:
            return CUDA if isinstance(given, (str, torch.device)) and _is_cuda(given) else given

        return to(self, *map(numbered, args), **{key: numbered(value) for key, value in kwargs.items()})

    def seen_as(self: torch.Tensor, cls: type) -> torch.Tensor:
        with _disable_current_modes():  # it needs a tensor that Python has not seen
            return as_subclass(self, cls)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        for position, value in enumerate((*args, *kwargs.values())):
            if _is_cpu(value):
                raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")
        with _LAUNCHING, _disable_current_modes():
            return run_kernel(self, *_real(args), **_real(kwargs))

    def run_in_mode(self: threading.Thread) -> None:
        with _Mode():
            run_thread(self)

    torch._C._ensureCUDADeviceGuardSet()
    with pytest.MonkeyPatch.context() as patch:
        for name, function in _functions().items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch, "tensor", _tensor)
        patch.setattr(torch, "as_tensor", _as_tensor)
        patch.setattr(torch.Tensor, "to", moved)
        patch.setattr(torch.Tensor, "cuda", lambda self, device=CUDA, **kwargs: moved(self, device, **kwargs))
        patch.setattr(torch.Tensor, "as_subclass", seen_as)
        patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        patch.setattr(InterpretedFunction, "run", launch)
        patch.setattr(threading.Thread, "run", run_in_mode)
        yield


@contextmanager
def pretended_cuda() -> Iterator[torch.device]:
    """Let there be a CUDA device, and yield it; skip the test where that is not possible."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with _device(), _Mode():
        yield CUDA


# -- as a plugin

#: Tests of a CUDA device that say nothing about a pretended one, by how their names begin, and why.
CANNOT = {
    "tests/test_compile.py": "Dynamo follows no pretended tensor",
    "tests/storages/test_offload.py::TestOnADevice::test_rows_take_ram_and_none_of_the_device": "counts no memory",
}


def pytest_configure(config: pytest.Config) -> None:
    """Let there be a device before tests are collected, which ask for one."""
    if (reason := why_not()) is not None:
        raise pytest.UsageError(f"cannot pretend a CUDA device: {reason}")
    device = _device()
    device.__enter__()
    config.add_cleanup(partial(_leave, device))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reasons = [why for name, why in CANNOT.items() if item.nodeid.startswith(name)]
        if reasons:
            item.add_marker(pytest.mark.skip(reason=f"not on a pretended CUDA device: {reasons[0]}"))


def _leave(device: AbstractContextManager[None]) -> None:
    device.__exit__(None, None, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let every test make tensors there."""
    with _Mode():
        return (yield)
