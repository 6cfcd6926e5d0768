"""A lock for threads and processes that is released when the process that holds it
dies; the deferral of Ctrl-C."""

from __future__ import annotations

import os
import sys
import threading

# The functions of ``signal`` convert to enums: a call would take 18 us more.
from _signal import SIGINT, getsignal, signal
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, Protocol

from rlbuf_td.storages.memory import NamelessFile
from rlbuf_td.storages.numbers import SharedNumbers

if TYPE_CHECKING:
    from rlbuf_td.storages.memory import HeadFile

if sys.platform != "win32":
    import fcntl
else:
    fcntl = None


class Guarded(Protocol):
    """The object that a :class:`ProcessLock` protects; the lock calls these methods."""

    # another process may have changed what this process knows
    def follow(self) -> None: ...
    def is_whole(self) -> bool: ...  # whether no write is in progress
    # a process died with the lock, or left a write unfinished
    def recover(self) -> None: ...


class ProcessLock:
    """A reentrant lock for the threads of this process, of forked ones, and of spawned
    ones that receive the lock.

    If the holder dies, the system releases the lock, and the next holder calls
    ``guarded.recover``. Ctrl-C ends the wait for the lock; while the lock is held, it
    waits for the release: otherwise, it could come before the release, which other
    processes would then wait for.
    """

    def __init__(
        self, guarded: Guarded, thread_lock: threading.RLock | None = None
    ) -> None:
        if fcntl is None:
            raise RuntimeError(
                "processes cannot share a buffer on a system without POSIX record locks"
            )
        # never mapped: closing any descriptor of a file releases the process's lock on
        # it
        self._file = NamelessFile()
        # Id of the holder, living or dead (0: none), and how often the lock has been
        # taken.
        self._inside = SharedNumbers("q", [0, 0]).share_memory_()
        self._guarded = guarded
        self._begin(thread_lock or threading.RLock())

    def keep_in(self, file: HeadFile) -> None:
        """Keep the id of the holder in a file, from which a later process learns that
        the holder died."""
        file.keep(self._inside)

    def _begin(self, thread_lock: threading.RLock) -> None:
        self.threads = thread_lock
        self._process = os.getpid()
        self._depth = 0
        self._turn = -1  # the last turn of this process

    def __enter__(self) -> ProcessLock:
        # forked: the thread that held the lock is not in this process
        if self._process != os.getpid():
            self._begin(threading.RLock())
        with self.threads:  # until Ctrl-C is deferred, an interrupt releases it
            if self._depth:
                self._depth += 1
            else:
                self._take()
            self.threads.acquire()  # until `__exit__`
        return self

    def _take(self) -> None:
        """Take the lock from other processes; the caller holds that of the threads."""
        try:
            fcntl.lockf(self._file.descriptor, fcntl.LOCK_EX)
            defer_sigint.__enter__()
        except BaseException:
            fcntl.lockf(self._file.descriptor, fcntl.LOCK_UN)
            raise
        self._depth = 1
        inside = self._inside.values
        try:
            if inside[0]:
                self._guarded.recover()
                inside[0] = 0
            if inside[1] != self._turn:
                self._guarded.follow()
            inside[1] += 1
            self._turn = inside[1]
            # last: a process that dies earlier has changed nothing
            inside[0] = self._process
        except BaseException:
            self._let_go()  # keeps the id in shared memory, if there was one
            defer_sigint.__exit__()
            raise

    def __exit__(self, kind: object = None, *_: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            self.threads.release()
            return
        if kind is None or self._guarded.is_whole():
            self._inside.values[0] = 0
        self._let_go()
        self.threads.release()
        defer_sigint.__exit__()  # last: raises the KeyboardInterrupt that has come

    @property
    def turn(self) -> int:
        """How often a process has taken the lock; in :meth:`Guarded.recover`, until the
        holder that died took it."""
        return self._inside[1]

    def _let_go(self) -> None:
        self._depth = 0
        fcntl.lockf(self._file.descriptor, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, object]:
        return {"_file": self._file, "_inside": self._inside, "_guarded": self._guarded}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._begin(threading.RLock())


class _DeferSigint(ContextDecorator):
    """Delays Ctrl-C until the end of a call that changes several things: then all of
    them have changed, or none.

    A write needs no such delay, because it is published. What takes long, such as
    reading a dump, comes before.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._came: tuple[Any, ...] | None = None

    def _note(self, *signal_and_frame: object) -> None:
        self._came = signal_and_frame

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if not self._depth:
            self._came = None
            if callable(getsignal(SIGINT)):
                self._handler = signal(SIGINT, self._note)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, self._handler = self._handler, None
        # From here on, a signal raises at once, and `came` may stay: the next call
        # forgets it.
        signal(SIGINT, handler)
        came = self._came
        if came is not None:
            handler(*came)


defer_sigint = _DeferSigint()
