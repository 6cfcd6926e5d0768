"""The objects that a storage informs of each write, and how they refer to it.

A buffer owns its storage, and a storage owns what is attached to it besides buffers,
such as a trajectory index. Those below refer to those above weakly: without a reference
cycle, ``del rb`` frees rows and files at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torch import Tensor
from torchrl.data.replay_buffers import ReplayBuffer, Storage

from rlbuf_td.storages.torchrl_parts import listeners_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from rlbuf_td.storages.layout import RowLayout
    from rlbuf_td.storages.packed import PackedStorage


class WeakReference(ref):
    """A weak reference that is copied and pickled together with the object; calling it
    returns the object, or None."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _reference_to, (self(),)


def _reference_to(target: object) -> Any:
    return _nothing if target is None else WeakReference(target)


def _nothing() -> None:
    """Stand in for a reference to an object that did not exist any more."""


class Recovers:
    """Base of samplers and writers that keep what follows from the rows of a
    storage."""

    def recover(self, storage: PackedStorage, new: Tensor) -> None:
        """Make it agree with the rows again, after a write that did not end.

        ``new``, ``[n]`` int64, holds the flat indices of rows that have been written,
        but not yet announced.
        """
        raise NotImplementedError


class Completes:
    """Base of writers that compute entries of rows when the rows are read."""

    def complete(self, key: tuple[str, ...] | None) -> None:
        """Compute what is missing before whole rows, or their entries at ``key``, are
        read; the caller holds the storage's lock."""
        raise NotImplementedError


class Stage(NamedTuple):
    """What a compiled write does for a listener."""

    is_told: bool = True  # unless `loop` does all, whether `mark_update` is called
    priorities: Any = None  # of new rows
    loop: Any = None  # the compiled function that sets them


class Listener:
    """Base of the objects of this package that are attached to a storage: what the
    storage calls.

    Other objects, such as TorchRL's buffers, are only told of new rows, with
    ``mark_update``.
    """

    def mark_update(self, index: object) -> None:
        """Take note of new rows at ``index``."""

    def _mark_run(self, index: object, first: int, count: int) -> None:
        """Take note of new rows at ``index``, in ``count`` cells from ``first`` on,
        which a kernel has written."""
        self.mark_update(index)

    def _stage_of_writes(self) -> Stage:
        """Return what a write does for this object."""
        return Stage(is_told=False)

    def _refuse_schema(self, layout: RowLayout) -> None:
        """Raise a SchemaError if rows of this layout, which have not been allocated
        yet, do not fit."""

    def _rows_replaced(self, *, are_loaded: bool) -> None:
        """Take note that the rows are others now: those of a state that has been loaded
        (``are_loaded``), or none.

        :meth:`PackedStorage.tell_replaced` calls this method.
        """

    def _complete_reserved(self) -> None:
        """Add the entries that will be written to the reserved rows, which are about to
        be shared."""

    def _begin_child(self) -> None:
        """In a process that was just forked, do without the threads of the other
        one."""

    def _rows_shared(self) -> None:
        """Share what follows from the rows, too, unless it is shared already."""

    def _rows_restored(self) -> None:
        """Connect to the restored storage, after a copy or unpickling."""


class Listeners:
    """The objects that are attached to a storage, in this order; buffers are listed by
    weak references."""

    def __init__(self, listeners: Iterable[Any] = ()) -> None:
        # the number of objects that were added, removed or deleted
        self.changes = 0
        self._listed: list[Any] = []
        for listener in listeners:
            self.append(listener)

    def append(self, listener: object) -> None:
        self._listed = [
            *self._existing(),
            self._weak(listener) if isinstance(listener, ReplayBuffer) else listener,
        ]
        self.changes += 1

    def _weak(self, buffer: object) -> WeakReference:
        return WeakReference(buffer, partial(_note_deleted, ref(self)))

    def remove(self, listener: object) -> None:
        self._listed = [
            entry for entry in self._listed if _referred(entry) is not listener
        ]
        self.changes += 1

    def __iter__(self) -> Iterator[Any]:
        for entry in self._listed:
            listener = _referred(entry)
            if listener is not None:
                yield listener

    def __len__(self) -> int:
        return len(self._existing())

    def own(self) -> Iterator[Listener]:
        """Yield those of this package."""
        return (listener for listener in self if isinstance(listener, Listener))

    def _existing(self) -> list[Any]:
        return [entry for entry in self._listed if _referred(entry) is not None]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_listed": self._existing()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._listed = [
            self._weak(_referred(entry)) if type(entry) is WeakReference else entry
            for entry in self._listed
        ]


def _note_deleted(listeners: Callable[[], Listeners | None], _: object) -> None:
    """Count the deletion of a listed buffer, so that plans of writes do without it."""
    existing = listeners()
    if existing is not None:
        existing.changes += 1


def _referred(entry: object) -> Any:
    """Return a listed object; None if it has been deleted."""
    return entry() if type(entry) is WeakReference else entry


class Attached:
    """Abstract base of objects that a storage owns."""

    def __init__(self, storage: Storage) -> None:
        self._owner: Callable[[], Any] = WeakReference(storage)

    @classmethod
    def of(cls, storage: Storage) -> Self:
        """Return the object of this class that a storage owns; attach one if there is
        none."""
        for listener in listeners_of(storage):
            if isinstance(listener, cls):
                return listener
        attached = cls(storage)
        storage.attach(attached)
        return attached

    def serves(self, storage: Storage) -> bool:
        """Whether this object belongs to ``storage``."""
        return self._owner() is storage

    @property
    def storage(self) -> Any:
        """The storage; a ReferenceError if it has been deleted."""
        storage = self._owner()
        if storage is None:
            name = type(self).__name__
            raise ReferenceError(
                f"the storage of this {name} has been deleted: keep a reference to storage or buffer"
            )
        return storage
