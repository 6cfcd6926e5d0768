"""Sharing a buffer: each of its parts, in the order in which they depend on each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from threading import RLock
from typing import TYPE_CHECKING, Any

from torchrl.data.replay_buffers import Sampler, Writer

from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import TensorDictReplayBuffer as _Base
    from typing_extensions import Self
else:
    _Base = object  # a mixin: the buffer's own bases come behind it

_COUNTERS = ("_cursor_value", "_write_count_value")


def share_buffer(storage: PackedStorage, sampler: Sampler, writer: Writer) -> None:
    """Move rows, what is attached to them, and priorities into shared memory; undo the writer's counters with a write.

    Raises:
        ValueError: rows on a CUDA device.
    """
    storage.share_memory_()
    if storage.shared_rows is not None:
        storage.shared_rows.journal.watch(*(getattr(writer, name) for name in _COUNTERS if hasattr(writer, name)))
    samplers = list(_wrapped(sampler))
    for each in samplers:
        if "traj_key" in vars(each):  # it will ask for trajectories: better one index of all than one of each process
            TrajectoryIndex.of(storage, done_key=each.done_key, traj_key=each.traj_key)
    for part in (*samplers, *storage._attached_entities):
        share = getattr(part, "share_memory_", None)
        if share is not None:
            share()


def _wrapped(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the one that it wraps, and so on."""
    while isinstance(sampler, Sampler):
        yield sampler
        sampler = getattr(sampler, "sampler", None)


class SharedBuffer(_Base):
    """The lock of a buffer, and what it takes to let several processes use it."""

    @property
    def _replay_lock(self) -> Any:
        """The storage's lock: buffers over one storage exclude each other, whichever of them writes."""
        lock = getattr(self.__dict__.get("_storage"), "lock", None)
        return self._own_lock if lock is None else lock

    @_replay_lock.setter
    def _replay_lock(self, lock: Any) -> None:
        self._own_lock = lock  # TorchRL's, for storages without one

    def share(self, shared: bool = True) -> Self:
        """Let several processes use this buffer: those forked from now on, or spawned and sent it.

        Rows, counters and priorities move to shared memory. Each process may write, sample and update priorities; it
        waits for the others, and one that is killed in the middle of a write has written nothing and blocks nobody.
        TorchRL's collectors with several workers call this themselves. What samplers keep beside priorities (the place
        in an epoch, generators) each process has for itself.

        Parts cannot be replaced any more, for other processes would go on with the old ones. A storage of TorchRL's is
        shared as TorchRL does.

        Args:
            shared: ``False`` is for TorchRL's constructor: what is shared stays so.

        Cost: some 5 us more for each call, and a copy of the rows that a write replaces; O(N) for the first call after
        a process has died at work.

        Raises:
            ValueError: rows on a CUDA device.
            RuntimeError: this system has no locks that outlive processes (Windows).
        """
        storage = self.__dict__.get("_storage")
        if not shared or not isinstance(storage, PackedStorage):
            return super().share(shared)
        with self._replay_lock:
            share_buffer(storage, self._sampler, self._writer)
            super().share(True)
            self._write_lock = nullcontext()  # the storage's lock does for processes, too
        return self

    def repair(self) -> None:
        """Put priorities right after a process has died while it held the lock."""
        if self._prioritized is not None:
            self._prioritized.repair(self._storage)

    def _refuse_if_shared(self, part: str) -> None:
        if getattr(self._storage, "shared_rows", None) is not None:
            raise RuntimeError(
                f"cannot set the {part} of a shared buffer: other processes would go on with the old one. "
                "Set it before you share the buffer"
            )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_own_lock")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._own_lock = RLock()
        super().__setstate__(state)
