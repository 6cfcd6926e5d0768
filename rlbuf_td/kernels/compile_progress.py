"""Tells the user that loops are being compiled: a progress bar on a terminal, otherwise one log message per process.

A call compiles its loops when it first runs, so the number of loops that a program needs is not known in advance. The
bar shows one loop at a time: its number, and how many of the functions that it calls are compiled. The bar disappears
when the loop is compiled. Numba's events drive the bar; only compilation raises them, so later calls take no longer.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

from numba.core import event
from numba.core.dispatcher import Dispatcher

_ROOM = __name__.rpartition(".")[0]
_logger = logging.getLogger("rlbuf_td")


def announce(folder: object) -> None:
    """Say, once per process, that loops are being compiled and stored in ``folder``."""
    if not progress.announced and not _shows_bar():
        _logger.warning(
            "rlbuf_td is compiling its loops for this processor: the first call of each kind takes some seconds, once "
            "per installation (the compiled code is stored in %s)",
            folder,
        )
    progress.announced = True


def _shows_bar() -> bool:
    """Whether the bar takes the place of the log message: that would be printed on a terminal, and by no handler."""
    is_terminal = sys.stderr is sys.__stderr__ and sys.stderr is not None and sys.stderr.isatty()
    prints = _logger.isEnabledFor(logging.WARNING) and not _logger.hasHandlers()
    return is_terminal and prints and os.environ.get("TERM") != "dumb"


def functions_of(loop: Dispatcher) -> list[Dispatcher]:
    """Return the loop and the compiled functions that it calls, directly or not."""
    found = {id(loop): loop}
    waiting = [loop]
    while waiting:
        function = waiting.pop().py_func
        for name in function.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, Dispatcher) and id(called) not in found:
                found[id(called)] = called
                waiting.append(called)
    return list(found.values())


class _Progress(event.Listener):
    """The progress bar, and the number of loops of this process."""

    def __init__(self) -> None:
        self.announced = False
        self._loops = 0
        self._open: list[Dispatcher] = []  # the loop that is being compiled, and the functions within it
        self._missing: list[Dispatcher] = []  # the loop's functions that were not compiled when it began
        self._began = 0.0

    def on_start(self, happened: event.Event) -> None:
        started = happened.data["dispatcher"]
        if not self._open:  # not within another function
            if not str(started.py_func.__module__).startswith(_ROOM):
                return
            self._loops, self._began = self._loops + 1, time.perf_counter()
            self._missing = [each for each in functions_of(started) if not each.overloads]
        self._open.append(started)
        self._draw()

    def on_end(self, happened: event.Event) -> None:
        if self._open:
            self._open.pop()
            self._draw()

    def _draw(self) -> None:
        if not _shows_bar():
            return
        line = "".join(self._words()) if self._open else ""
        with suppress(OSError, ValueError):  # the terminal is gone
            sys.stderr.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")  # the codes clear the line
            sys.stderr.flush()

    def _words(self) -> Iterator[str]:
        loop, total = self._open[0].py_func, max(1, len(self._missing))
        done = min(sum(bool(each.overloads) for each in self._missing), total)
        room = loop.__module__.removeprefix(f"{_ROOM}.").partition(".")[0].replace("_", " ")
        yield f"|{'#' * (10 * done // total):<10}| {done}/{total}, {time.perf_counter() - self._began:.0f} s, "
        yield f"first-time compilation {self._loops}: {room}, {loop.__name__.strip('_').replace('_', ' ')}"


progress = _Progress()
event.register("numba:compile", progress)
