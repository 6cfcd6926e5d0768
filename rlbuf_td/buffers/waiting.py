"""Waiting until a buffer admits a batch or a write, with a time limit, a cancellation
or a shutdown."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import Protocol

from rlbuf_td.storages.checks import number

# polling interval in seconds; unlike a notification, polling still works if another
# process dies
POLL = 0.001
PATIENCE = 5.0  # seconds after which a write that still waits warns


class ShutDown(RuntimeError):
    """A batch or a write was requested from a buffer that has been shut down.

    Calls that wait in other threads raise it, too. With flow control, and in an
    :class:`ExperienceQueue`, so do calls in all processes that share the buffer. An
    actor catches it to stop.

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


def seconds(timeout: object) -> float | None:
    """Return a time limit in seconds; None: there is none.

    Raises a TypeError if it is no number, and a ValueError if it is negative or NaN.
    """
    if timeout is None:
        return None
    limit = number("timeout", timeout)
    if not limit >= 0:
        raise ValueError(
            f"timeout must be at least 0 seconds, or None, got {timeout!r}"
        )
    return limit


def warn_of_slow_write(reason: str, stacklevel: int) -> None:
    waited = f"a write has waited for {PATIENCE:g} seconds, and goes on waiting"
    warnings.warn(f"{waited}: {reason}", stacklevel=stacklevel + 1)


def attempts(
    timeout: float | None,
    reason: Callable[[], str],
    cancel_event: Cancels | None = None,
    *,
    slow_write: int = 0,
) -> Iterator[None]:
    """Yield at once, and then every millisecond, for up to ``timeout`` seconds, so that
    the caller tries again.

    Args:
        timeout: seconds after which a TimeoutError with ``reason()`` is raised; None:
            never.
        reason: says what the call waits for, and what to do.
        cancel_event: raise a :class:`Cancelled` error if its ``is_set()`` returns True.
        slow_write: the stack level of the user's write, which warns once if it waits
            for ``PATIENCE`` seconds; 0: none.
    """
    timeout = seconds(timeout)
    begin = time.monotonic()
    deadline = inf if timeout is None else begin + timeout
    warn_at = begin + PATIENCE if slow_write else inf
    while True:
        if cancel_event is not None and cancel_event.is_set():
            raise Cancelled("the cancel_event of this call was set")
        yield
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError(f"waited for {timeout:.3g} seconds: {reason()}")
        if now >= warn_at:
            warn_at = inf
            warn_of_slow_write(reason(), slow_write)
        time.sleep(POLL)


@contextmanager
def admitted(
    admit: Callable[[], bool],
    lock: AbstractContextManager[object],
    reason: Callable[[], str],
    timeout: float | None,
    *,
    count_wait: Callable[[], None] | None = None,
    cancel_event: Cancels | None = None,
    slow_write: int = 0,
) -> Iterator[None]:
    """Hold ``lock`` in a ``with`` block, as soon as ``admit()`` returns True with the
    lock held; see :func:`attempts`.

    ``count_wait`` is called if this is not at once.
    """
    for _ in attempts(timeout, reason, cancel_event, slow_write=slow_write):
        with lock:
            if admit():
                yield
                return
            if count_wait is not None:
                count_wait()
        count_wait = None
