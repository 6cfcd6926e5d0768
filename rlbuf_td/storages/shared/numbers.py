"""A few numbers that all processes see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any


class SharedNumbers:
    """Numbers of 64 bits in memory that a forked process, or one that it is sent to when spawned, sees as well.

    A copy, pickled or deep, has numbers of its own. Nothing is locked. Integers wrap at 2**63, as int64 tensors do.

    Args:
        kind: ``"q"`` for integers, ``"d"`` for floats.
        values: what they are at first.

    Attributes:
        values: the memory itself, for hot paths, which save a call each time.

    Example:
        >>> numbers = SharedNumbers("q", [1, 2])
        >>> numbers[1] += 5
        >>> list(numbers)
        [1, 7]
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
        """Return each number as an object with a ``value``."""
        return [NumberOf(self, position) for position in range(len(self))]


class NumberOf:
    """One of several shared numbers, as a ``value``."""

    __slots__ = ("_numbers", "_position")

    def __init__(self, numbers: SharedNumbers, position: int) -> None:
        self._numbers, self._position = numbers, position

    @property
    def value(self) -> Any:
        """The number."""
        return self._numbers[self._position]

    @value.setter
    def value(self, value: float) -> None:
        self._numbers[self._position] = value
