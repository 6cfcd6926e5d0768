"""A lock for threads and processes that outlives whoever holds it."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

from rlbuf_td.storages.shared.memory import NamelessFile, SharedNumbers

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class Guarded(Protocol):
    """What a :class:`ProcessLock` guards, and tells who comes in and leaves, perhaps with an error."""

    def entered(self) -> None: ...
    def leaving(self, failed: bool) -> bool: ...  # returns whether all work is finished
    def recover(self) -> None: ...  # somebody has died inside, or left work unfinished


class ProcessLock:
    """Let one thread of one process in at a time; reentrant; free again when a process dies inside.

    An ``RLock`` (or the ``thread_lock`` given), and between a process and those that it forks, or spawns and sends the
    lock to, a POSIX record lock on a nameless file, which the system takes back from a process that dies. Whoever dies
    inside leaves a mark, by which the next one calls ``guarded.recover``. Cost: two system calls, some 2 us.
    """

    def __init__(self, guarded: Guarded, thread_lock: Any = None) -> None:
        if fcntl is None:
            raise RuntimeError("several processes cannot share a buffer on this system: it has no POSIX record locks")
        self._file = NamelessFile()  # never mapped: closing any descriptor of a file gives up the process's lock on it
        self._inside = SharedNumbers("q", [0]).share_memory_()  # the process inside, or that died there; 0 for none
        self._guarded = guarded
        self._begin(thread_lock or threading.RLock())

    def _begin(self, thread_lock: Any) -> None:
        self._threads = thread_lock
        self._process = os.getpid()
        self._depth = 0

    def __enter__(self) -> ProcessLock:
        if self._process != os.getpid():  # forked: whichever thread was inside is not in this process
            self._begin(threading.RLock())
        self._threads.acquire()
        if self._depth:
            self._depth += 1
            return self
        try:
            fcntl.lockf(self._file.descriptor, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise
        self._depth = 1
        try:
            if self._inside[0]:
                self._guarded.recover()
                self._inside[0] = 0
            self._guarded.entered()
            self._inside[0] = self._process  # not before: who dies until now has changed nothing
        except BaseException:
            self._leave()  # with the mark, if there was one
            raise
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            self._threads.release()
            return
        if self._guarded.leaving(failed=kind is not None):
            self._inside[0] = 0
        self._leave()

    def _leave(self) -> None:
        self._depth = 0
        fcntl.lockf(self._file.descriptor, fcntl.LOCK_UN)
        self._threads.release()

    def __getstate__(self) -> dict[str, Any]:
        return {"_file": self._file, "_inside": self._inside, "_guarded": self._guarded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(threading.RLock())
