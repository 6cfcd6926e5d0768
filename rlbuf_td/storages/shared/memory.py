"""What several processes see: memory of a size that may be chosen after they have forked, and a few numbers."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch


class NamelessFile:
    """A file in memory without a name: forked processes have it, and spawned ones to which it is sent."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("rlbuf_td")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())

    def map(self, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` (at least 1), uint8, as every process sees them; zeros where none has written."""
        if os.fstat(self.descriptor).st_size < nbytes:
            os.ftruncate(self.descriptor, nbytes)
        return torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            raise RuntimeError("shared memory is sent to a spawned process, never copied")
        return {"descriptor": reduction.DupFd(self.descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.descriptor = state["descriptor"].detach()

    def __del__(self) -> None:
        descriptor = self.__dict__.pop("descriptor", None)
        if isinstance(descriptor, int):
            os.close(descriptor)


class SharedNumbers:
    """64-bit numbers that forked processes, and spawned ones to which they are sent, see as well; a copy has its own.

    Nothing is locked; integers (``kind="q"``; ``"d"``: floats) wrap at 2**63. Hot paths use ``values``, the memory.
    """

    __slots__ = ("_kind", "values")

    def __init__(self, kind: str, values: Iterable[float]) -> None:
        self._kind = kind
        self.values = RawArray(kind, list(values))

    def __getitem__(self, position: int) -> Any:
        return self.values[position]

    def __setitem__(self, position: int, value: float) -> None:
        self.values[position] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values[:])

    def __len__(self) -> int:
        return len(self.values)

    def __getstate__(self) -> tuple[str, Any]:
        return self._kind, list(self.values) if get_spawning_popen() is None else self.values

    def __setstate__(self, state: tuple[str, Any]) -> None:
        self._kind, values = state
        self.values = RawArray(self._kind, values) if isinstance(values, list) else values

    def counters(self) -> list[NumberOf]:
        return [NumberOf(self, position) for position in range(len(self))]


class NumberOf:
    """One of several shared numbers, as a ``value``."""

    __slots__ = ("_numbers", "_position")

    def __init__(self, numbers: SharedNumbers, position: int) -> None:
        self._numbers, self._position = numbers, position

    @property
    def value(self) -> Any:
        return self._numbers[self._position]

    @value.setter
    def value(self, value: float) -> None:
        self._numbers[self._position] = value
