"""Lets a fork wait for the calls of other threads, because a child inherits their locks as held, and rows half written.

``os.fork`` copies the memory of a process, but only the thread that forks. While a process forks, this module therefore
holds the lock of each storage, so that no other thread is inside a write, a draw or an update, and the lock of numba's
compiler.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from rlbuf_td.storages.torchrl_parts import listeners_of

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage

_LONGEST = 10.0  # seconds; otherwise, a thread that waits for the forking thread would stop both for ever
_storages: WeakSet[Any] = WeakSet()
_fork = threading.local()  # ``held``: the locks that the fork of this thread holds


def watch(storage: PackedStorage) -> None:
    """Let later forks of this process wait for the calls that use ``storage``."""
    _storages.add(storage)


def _hold() -> None:
    _fork.held = held = []
    for storage in list(_storages):
        lock = getattr(storage.lock, "threads", storage.lock)  # the part of a ProcessLock that other processes ignore
        if lock.acquire(timeout=_LONGEST):
            held.append(lock)
    numba = sys.modules.get("numba.core.compiler_lock")
    if numba is not None:  # last: calls compile while they hold the lock of a storage
        numba.global_compiler_lock.acquire()
        held.append(numba.global_compiler_lock)


def _release() -> None:
    while _fork.held:
        _fork.held.pop().release()


def _begin_child() -> None:
    """Release the locks; bound writes, which do not look for a fork, are bound again by the first write."""
    _release()
    for storage in list(_storages):
        if storage.shared_rows is None:
            for listener in listeners_of(storage):
                if hasattr(listener, "bound_write"):
                    listener.bound_write = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_begin_child)
