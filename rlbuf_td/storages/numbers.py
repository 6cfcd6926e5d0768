"""64-bit numbers that processes can share."""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_byte
from multiprocessing.context import get_spawning_popen
from operator import index
from typing import Any

import torch

from rlbuf_td.storages.memory import NamelessFile, SharedFile


class SharedNumbers:
    """64-bit numbers that forked processes, and spawned ones that get this object,
    share after :meth:`share_memory_`.

    No lock protects the numbers. :meth:`share_memory_` and :meth:`keep_in` replace
    ``values``, the memory, which compiled code finds at ``address``.

    ``_place`` is the file of the numbers, and where they begin in it.

    Args:
        kind: ``"q"`` for integers, which wrap at 2**63, ``"d"`` for floats.
        values: the numbers.
    """

    __slots__ = ("_kind", "_place", "address", "values")

    def __init__(self, kind: str, values: Sequence[float]) -> None:
        self._kind = kind
        self._take(bytearray(array(kind, map(self._held, values))))

    def _take(
        self,
        memory: bytearray | memoryview,
        place: tuple[SharedFile, int] | None = None,
    ) -> None:
        # read and set in half the time of a ctypes array
        view: Any = memoryview(memory)
        values = view.cast(self._kind)
        address = addressof(c_byte.from_buffer(memory))
        # at once: an interrupt may come
        self.values, self.address, self._place = values, address, place

    def set(self, values: Sequence[float]) -> None:
        """Set all numbers at once: an interrupt leaves all or none of them changed."""
        self.values[:] = array(self._kind, map(self._held, values))

    def _held(self, number: Any) -> Any:
        """Return a number as 64 bits hold it."""
        if self._kind == "q":
            return (index(number) + 2**63) % 2**64 - 2**63
        return number

    def share_memory_(self) -> SharedNumbers:
        if self._place is None:
            file = NamelessFile()
            os.ftruncate(file.descriptor, 8 * len(self))
            self.keep_in(file, 0, exists=False)
        return self

    def keep_in(self, file: SharedFile, start: int, *, exists: bool) -> None:
        """Move the numbers to byte ``start`` of a file; if it ``exists``, replace them by
        those that are there."""
        end = start + 8 * len(self.values)
        memory = memoryview(mmap.mmap(file.descriptor, end))[start:]
        if not exists:
            memory[:] = self.values.cast("B")
        self._take(memory, (file, start))

    def __getitem__(self, position: int) -> Any:
        return self.values[position]

    def __setitem__(self, position: int, value: float) -> None:
        self.values[position] = self._held(value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values.tolist())

    def __len__(self) -> int:
        return len(self.values)

    def __getstate__(self) -> tuple[str, list[float], tuple[SharedFile, int] | None]:
        if get_spawning_popen() is not None:
            self.share_memory_()
            return self._kind, [0] * len(self), self._place
        return self._kind, self.values.tolist(), None

    def __setstate__(
        self, state: tuple[str, list[float], tuple[SharedFile, int] | None]
    ) -> None:
        kind, values, location = state
        self.__init__(kind, values)
        if location is not None:
            self.keep_in(*location, exists=True)


class SharedCounter:
    """A count that processes can share."""

    def __init__(self) -> None:
        self._numbers = SharedNumbers("q", [0])
        self._on_device: torch.Tensor | None = None

    def add(self, count: int | torch.Tensor) -> None:
        """Add an int, or a 0-dim tensor without waiting for its device."""
        if isinstance(count, torch.Tensor):
            self._on_device = (
                count if self._on_device is None else self._on_device + count
            )
        elif count:
            self._numbers[0] += count

    def share_memory_(self) -> None:
        self._numbers.share_memory_()

    def total(self) -> int:
        """Return the count; this call waits for the device, while :meth:`add` does
        not."""
        return self._numbers[0] + (
            0 if self._on_device is None else int(self._on_device)
        )
