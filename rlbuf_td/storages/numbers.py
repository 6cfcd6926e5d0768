"""64-bit numbers that processes can share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from ctypes import c_double, c_longlong
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from rlbuf_td.storages.memory import NamelessFile, SharedFile

# by kind: integers, which wrap at 2**63, or floats
_TYPES: dict[str, Any] = {"q": c_longlong, "d": c_double}


class SharedNumbers:
    """64-bit numbers that forked processes, and spawned ones that get this object,
    share after :meth:`share_memory_`.

    No lock protects the numbers. :meth:`share_memory_` and :meth:`keep_in` replace the
    array ``values``.
    """

    __slots__ = ("_kind", "_place", "values")

    def __init__(self, kind: str, values: Sequence[float]) -> None:
        self._kind = kind
        # the file of the numbers, and where they begin in it
        self._place: tuple[SharedFile, int] | None = None
        self.values: Any = (_TYPES[kind] * len(values))(*values)

    def share_memory_(self) -> SharedNumbers:
        if self._place is None:
            file = NamelessFile()
            os.ftruncate(file.descriptor, 8 * len(self))
            self.keep_in(file, 0, exists=False)
        return self

    def keep_in(self, file: SharedFile, start: int, *, exists: bool) -> None:
        """Move the numbers to byte ``start`` of a file; if it ``exists``, replace them by
        those that are there."""
        count = len(self.values)
        memory = mmap.mmap(file.descriptor, start + 8 * count)
        values = (_TYPES[self._kind] * count).from_buffer(memory, start)
        if not exists:
            values[:] = self.values[:]
        self.values, self._place = values, (file, start)

    def __getitem__(self, position: int) -> Any:
        return self.values[position]

    def __setitem__(self, position: int, value: float) -> None:
        self.values[position] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values[:])

    def __len__(self) -> int:
        return len(self.values)

    def __getstate__(self) -> tuple[str, list[float], tuple[SharedFile, int] | None]:
        if get_spawning_popen() is not None:
            self.share_memory_()
            return self._kind, [0] * len(self), self._place
        return self._kind, self.values[:], None

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
