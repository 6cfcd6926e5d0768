"""The objects that a storage informs of each write, and how they refer to it.

A buffer owns its storage, and a storage owns what is attached to it besides buffers, such as a trajectory index. Those
below refer to those above weakly: without a reference cycle, ``del rb`` frees rows and files at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import ref

from torchrl.data.replay_buffers import ReplayBuffer, Storage


class WeakReference(ref):
    """A weak reference that is copied and pickled together with the object; calling it returns the object, or None."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _reference_to, (self(),)


def _reference_to(found: Any) -> Any:
    return _nothing if found is None else WeakReference(found)


def _nothing() -> None:
    """Stand in for a reference to an object that did not exist any more."""


class Listeners:
    """The objects that are attached to a storage, in this order; buffers are listed by weak references."""

    def __init__(self, listeners: Iterable[Any] = ()) -> None:
        self.changes = 0  # the number of objects that were added or removed
        self._listed: list[Any] = []
        for each in listeners:
            self.append(each)

    def append(self, listener: Any) -> None:
        self._listed = [*self._existing(), WeakReference(listener) if isinstance(listener, ReplayBuffer) else listener]
        self.changes += 1

    def remove(self, listener: Any) -> None:
        self._listed = [each for each in self._listed if _found(each) is not listener]
        self.changes += 1

    def __iter__(self) -> Iterator[Any]:
        return (found for each in self._listed if (found := _found(each)) is not None)

    def __len__(self) -> int:
        return len(self._existing())

    def _existing(self) -> list[Any]:
        return [each for each in self._listed if _found(each) is not None]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_listed": self._existing()}


def _found(each: Any) -> Any:
    return each() if type(each) is WeakReference else each


class Attached:
    """Abstract base of objects that a storage owns."""

    def __init__(self, storage: Storage) -> None:
        self._owner: Callable[[], Any] = WeakReference(storage)

    @property
    def storage(self) -> Any:
        """The storage; a ReferenceError if it has been deleted."""
        storage = self._owner()
        if storage is None:
            name = type(self).__name__
            raise ReferenceError(f"the storage of this {name} has been deleted: keep a reference to storage or buffer")
        return storage
