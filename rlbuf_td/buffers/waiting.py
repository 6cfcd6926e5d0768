"""Waiting until a buffer admits a batch or a write, with a time limit, a cancellation or a shutdown."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import Protocol

POLL = 0.001  # polling interval in seconds; unlike a notification, polling still works if another process dies
PATIENCE = 5.0  # seconds after which a write that still waits warns


class ShutDown(RuntimeError):
    """A batch or a write was requested from a buffer that has been shut down.

    Calls that wait in other threads raise it, too. With flow control, and in an :class:`ExperienceQueue`, so do calls
    in all processes that share the buffer. An actor catches it to stop.

    Example:
        >>> import torch
        >>> from rlbuf_td import ReplayBuffer, ShutDown
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer()
        >>> rb.shutdown()
        >>> try:
        ...     rb.add(TensorDict({"observation": torch.zeros(3)}))
        ... except ShutDown:
        ...     print("the learner has finished")
        the learner has finished
    """


class Cancelled(RuntimeError):
    """The ``cancel_event`` of a call that waits was set."""


class Cancels(Protocol):
    """An event of :mod:`threading` or :mod:`multiprocessing`."""

    def is_set(self) -> bool: ...


def refuse_cancelled(event: Cancels | None) -> None:
    if event is not None and event.is_set():
        raise Cancelled("the cancel_event of this call was set")


class SlowWrite:
    """Warns once if a write waits for longer than ``PATIENCE`` seconds."""

    def __init__(self) -> None:
        self._due = time.monotonic() + PATIENCE

    def check(self, reason: Callable[[], str], stacklevel: int) -> None:
        """Warn with ``reason()``, which says what the write waits for and what to do, if it is time."""
        if time.monotonic() >= self._due:
            self._due = inf
            warn_of_slow_write(reason(), stacklevel + 1)


def warn_of_slow_write(reason: str, stacklevel: int) -> None:
    waited = f"a write has waited for {PATIENCE:g} seconds, and goes on waiting"
    warnings.warn(f"{waited}: {reason}", stacklevel=stacklevel + 1)


@contextmanager
def admitted(
    admit: Callable[[], bool],
    lock: AbstractContextManager[object],
    reason: Callable[[], str],
    timeout: float | None,
    *,
    count_wait: Callable[[], None] | None = None,
    cancel_event: Cancels | None = None,
    is_write: bool = False,
) -> Iterator[None]:
    """Hold ``lock`` in a ``with`` block, as soon as ``admit()`` returns True with the lock held.

    ``admit`` is called again every millisecond, for up to ``timeout`` seconds; then a TimeoutError with ``reason()`` is
    raised. If ``cancel_event.is_set()`` returns True before, a :class:`Cancelled` error is raised.
    """
    deadline = inf if timeout is None else time.monotonic() + timeout
    slow_write = SlowWrite() if is_write else None
    while True:
        refuse_cancelled(cancel_event)
        with lock:
            if admit():
                yield
                return
            if count_wait is not None:
                count_wait()
            why = reason() if time.monotonic() >= deadline else None
        count_wait = None
        if why is not None:
            raise TimeoutError(f"no batch within {timeout:.3g} seconds: {why}")
        if slow_write is not None:
            slow_write.check(reason, stacklevel=7)
        time.sleep(POLL)
