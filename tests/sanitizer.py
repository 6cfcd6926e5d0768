"""What NVIDIA's compute-sanitizer asks on a GPU, asked in Triton's interpreter: whose memory, and who else is there.

The interpreter runs the programs of a launch one after the other, each of them as if one thread did everything. On a
GPU they run at once, in no order, and the threads of a program wait for one another only at a barrier. A kernel may
therefore be right here and wrong there. While :func:`sanitized` is on, every launch is watched, and fails with
:class:`Unsound` where it

* *reads or writes outside* the memory of its arguments (memcheck);
* writes what *another program* of the launch reads or writes: unless all write the same, and it is what had been there
  or what the reader has written as well; or only by atomic operations; or one has released what it had done (a barrier,
  then an atomic operation that is not relaxed), and the other has acquired it (racecheck between programs);
* reads what *another thread of the program* may have written since the last barrier, writes what another has read or
  written, or writes different values to one place in one store (racecheck within programs; elements of one position in
  their blocks are taken to belong to one thread);
* depends on what a masked load returns where the mask is off: it is rubbish here, as it may be there (initcheck);
* depends on the order of programs: they run in a random one.

A race that is meant is named, with its reason, in :data:`MEANT`. What is not seen: memory that a launch reads before
anything has been written to it (``torch.empty``), and warps that are not in step where no memory is involved.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

#: Kernel and argument: why programs may be at the same places of it at once.
MEANT = {
    (
        "_assign",
        "claims",
    ): "while others look a winner gives its claim back: they find it or -1, neither of them theirs",
}
_RUBBISH = 0x7B  # a byte: large integers, which are no place in memory, and large floats


class Unsound(AssertionError):
    """A launch that a GPU need not run as the interpreter does."""


@dataclass
class _Access:
    """What one instruction of one program does, at the places where its mask is on."""

    kind: str  # load, store or atomic
    program: int
    at: int  # its position among all of the launch
    phase: int  # how many barriers its program had passed
    address: np.ndarray  # [n] int64
    value: np.ndarray  # [n] int64: the bits that are stored
    before: np.ndarray  # [n] int64: the bits that were there


@dataclass
class _Launch:
    """What has happened so far in one launch."""

    kernel: str
    memory: list[tuple[int, int, str]]  # first and last byte, and the argument's name
    order: list[tuple[int, int, int]] = field(default_factory=list)
    program: int = -1
    accesses: list[_Access] = field(default_factory=list)
    phase: int = 0
    # By program and address: the position of its first acquiring operation, and the phase that its last one released.
    acquired: dict[tuple[int, int], int] = field(default_factory=dict)
    released: dict[tuple[int, int], int] = field(default_factory=dict)
    # Of the program since its last barrier: what it has written, and what its threads have read.
    written: list[np.ndarray] = field(default_factory=list)
    read: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def name_of(self, address: int) -> str:
        for first, end, name in self.memory:
            if first <= address < end:
                return f"{name} + {address - first} bytes"
        return f"{address:#x}"

    def fail(self, what: str, address: int) -> None:
        raise Unsound(f"{self.kernel}, program {self.program}: {what} {self.name_of(address)}")

    # What the interpreter reports.

    def begin_program(self, program: int) -> None:
        self.program, self.phase = program, 0
        self.barrier()

    def barrier(self) -> None:
        self.written, self.read = [], []
        self.phase += 1

    def synchronise(self, pointers: Any) -> None:
        """Note an atomic operation that acquires what others have released there, and releases what came before."""
        for address in pointers.data.ravel().tolist():
            self.acquired.setdefault((self.program, address), len(self.accesses))
            self.released[self.program, address] = self.phase

    def touch(self, kind: str, pointers: Any, mask: Any, value: np.ndarray | None = None) -> None:
        """Note an access, before it takes place."""
        where = np.broadcast_to(mask, pointers.data.shape).ravel().astype(bool)
        address = pointers.data.ravel().astype(np.int64)[where]
        if not address.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        self._check_bounds(kind, address, size)
        # What is one element is loaded by all threads, and stored by one.
        thread = np.flatnonzero(where) if where.size > 1 else np.array([-1 if kind == "load" else 0])
        self._check_threads(kind, address, thread)
        bits = before = np.empty(0, np.int64)
        if kind == "store":
            assert value is not None
            bits = _bits(np.broadcast_to(value, pointers.data.shape).ravel()[where], size)
            before = _bits(_peek(pointers, mask, where), size)
            self._check_store(address, bits)
        self.accesses.append(_Access(kind, self.program, len(self.accesses), self.phase, address, bits, before))
        if kind != "load":
            self.written.append(address)

    # Within a program.

    def _check_bounds(self, kind: str, address: np.ndarray, size: int) -> None:
        first, last = int(address.min()), int(address.max()) + size
        if any(begin <= first and last <= end for begin, end, _ in self.memory):
            return
        inside = np.zeros(address.shape, bool)
        for begin, end, _ in self.memory:
            inside |= (address >= begin) & (address + size <= end)
        if not inside.all():
            self.fail(f"{kind} outside of all arguments, at", int(address[~inside][0]))

    def _check_threads(self, kind: str, address: np.ndarray, thread: np.ndarray) -> None:
        if self.written and kind != "atomic":
            again = np.isin(address, np.concatenate(self.written))
            if again.any() and not self._is_meant(int(address[again][0])):
                self.fail(f"{kind} where a thread has written since the last barrier:", int(address[again][0]))
        if kind == "load":
            self.read.append((address, thread))
            return
        for places, readers in self.read:
            if places.max() < address.min() or places.min() > address.max():
                continue
            both, mine, theirs = np.intersect1d(address, places, return_indices=True)
            other = thread[mine] != readers[theirs]
            if other.any() and not self._is_meant(int(both[other][0])):
                self.fail(f"{kind} where another thread has read since the last barrier:", int(both[other][0]))

    def _check_store(self, address: np.ndarray, bits: np.ndarray) -> None:
        order = np.argsort(address, kind="stable")
        same = address[order][1:] == address[order][:-1]
        torn = same & (bits[order][1:] != bits[order][:-1])
        if torn.any():
            self.fail("different values in one store at", int(address[order][1:][torn][0]))

    # Between programs.

    def end(self) -> None:
        """Compare what the programs have done."""
        changed = [access.address for access in self.accesses if access.kind != "load"]
        if not changed or len({access.program for access in self.accesses}) < 2:
            return
        places = np.unique(np.concatenate(changed))
        first = np.full(places.shape, np.iinfo(np.int64).max)
        last = np.full(places.shape, -1)
        only_atomic = np.ones(places.shape, bool)
        for access in self.accesses:
            at = np.searchsorted(places, access.address)
            at = np.minimum(at, len(places) - 1)
            at = at[places[at] == access.address]
            first[at] = np.minimum(first[at], access.program)
            last[at] = np.maximum(last[at], access.program)
            only_atomic[at] &= access.kind == "atomic"
        shared = set(places[(first != last) & ~only_atomic].tolist())
        shared = {place for place in shared if not self._is_meant(place)}
        if shared:
            self._compare(shared)

    def _compare(self, shared: set[int]) -> None:
        """Compare the accesses to these places, in the order in which they took place here."""
        seen: dict[int, list[tuple[_Access, int]]] = {}
        for access in self.accesses:
            for position, place in enumerate(access.address.tolist()):
                if place in shared:
                    seen.setdefault(place, []).append((access, position))
        for place, accesses in seen.items():
            self._compare_at(place, accesses)

    def _compare_at(self, place: int, accesses: list[tuple[_Access, int]]) -> None:
        there = next((int(access.before[at]) for access, at in accesses if access.kind == "store"), 0)
        for later, (second, at) in enumerate(accesses):
            self.program = second.program
            has_written = False
            for first, before in reversed(accesses[:later]):
                kinds = {first.kind, second.kind}
                if first.program == second.program:
                    has_written |= first.kind == "store"
                elif kinds in ({"load"}, {"atomic"}) or self._is_ordered(first, second):
                    continue
                elif "atomic" in kinds:
                    self.fail("an atomic operation where another program reads or writes:", place)
                elif kinds == {"store"}:
                    if int(first.value[before]) != int(second.value[at]):
                        self.fail("writes something else than another program at", place)
                elif second.kind == "load":
                    if int(first.value[before]) != there and not has_written:
                        self.fail("reads what another program writes at", place)
                elif int(second.value[at]) != there and not self._has_written(accesses[:later], first):
                    self.fail("writes what another program reads at", place)

    def _is_ordered(self, first: _Access, second: _Access) -> bool:
        """Return whether the program of the first had released it before that of the second acquired it."""
        return any(
            first.phase < released and self.acquired.get((second.program, address), second.at + 1) <= second.at
            for (program, address), released in self.released.items()
            if program == first.program
        )

    def _has_written(self, accesses: list[tuple[_Access, int]], reader: _Access) -> bool:
        """Return whether the program of a load has written the place before."""
        return any(x.kind == "store" and x.program == reader.program and x.at < reader.at for x, _ in accesses)

    def _is_meant(self, address: int) -> bool:
        name = self.name_of(address).partition(" ")[0]
        return (self.kernel, name) in MEANT


def _bits(values: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"i{size}").astype(np.int64)


def _peek(pointers: Any, mask: Any, where: np.ndarray) -> np.ndarray:
    from triton.runtime.interpreter import _get_np_dtype, _interpreter

    dtype = _get_np_dtype(pointers.get_element_ty())
    on = np.ascontiguousarray(np.broadcast_to(mask, pointers.data.shape))
    found = _interpreter.load(pointers.data, on, np.zeros(pointers.data.shape, dtype), dtype)
    return found.ravel()[where]


@contextmanager
def sanitized() -> Iterator[None]:
    """Watch every launch in Triton's interpreter; see the module."""
    from triton._C.libtriton.ir import MEM_SEMANTIC
    from triton.runtime.interpreter import GridExecutor, TensorHandle, _get_np_dtype
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    launches: list[_Launch] = []
    names = ["set_grid_idx", "create_barrier", "create_atomic_rmw", "create_atomic_cas"]
    names += ["create_masked_load", "create_masked_store"]
    plain = {name: getattr(Builder, name) for name in names}
    run = GridExecutor.__call__
    shuffle = random.Random(0).shuffle

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.getcallargs(self.fn, *args, **{k: v for k, v in kwargs.items() if k in self.arg_names})
        launch = _Launch(self.fn.__name__, list(_memory_of(bound)))
        launches.append(launch)
        try:
            run(self, *args, **kwargs)
        finally:
            launches.pop()
        launch.end()

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        launch, (nx, ny, nz) = launches[-1], self.grid_dim
        if not launch.order:
            launch.order = [(i, j, k) for i in range(nx) for j in range(ny) for k in range(nz)]
            shuffle(launch.order)
        i, j, k = launch.order[(x * ny + y) * nz + z]
        launch.begin_program((i * ny + j) * nz + k)
        plain["set_grid_idx"](self, i, j, k)

    def create_barrier(self: Any) -> None:
        launches[-1].barrier()

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        launches[-1].touch("load", ptrs, mask.data)
        if other is None:
            dtype = np.dtype(_get_np_dtype(ptrs.get_element_ty()))
            rubbish = np.full((*ptrs.data.shape, dtype.itemsize), _RUBBISH, np.uint8).view(dtype)[..., 0]
            other = TensorHandle(rubbish, ptrs.get_element_ty())
        return plain["create_masked_load"](self, ptrs, mask, other, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].touch("store", ptrs, mask.data, value.data)
        return plain["create_masked_store"](self, ptrs, value, mask, *rest)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, *rest: Any) -> Any:
        launches[-1].touch("atomic", ptr, mask.data)
        if sem == MEM_SEMANTIC.ACQUIRE_RELEASE:
            launches[-1].synchronise(ptr)
        return plain["create_atomic_rmw"](self, op, ptr, val, mask, sem, *rest)

    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, sem: Any, *rest: Any) -> Any:
        launches[-1].touch("atomic", ptr, np.ones(ptr.data.shape, bool))
        if sem == MEM_SEMANTIC.ACQUIRE_RELEASE:
            launches[-1].synchronise(ptr)
        return plain["create_atomic_cas"](self, ptr, cmp, val, sem, *rest)

    mine = [set_grid_idx, create_barrier, create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas]
    try:
        GridExecutor.__call__ = call
        for method in mine:
            setattr(Builder, method.__name__, method)
        yield
    finally:
        GridExecutor.__call__ = run
        for name, method in plain.items():
            setattr(Builder, name, method)


def _memory_of(arguments: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name
