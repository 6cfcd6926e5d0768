"""Delays Ctrl-C until the end of a call that changes several parts of a buffer; a write needs no such delay."""

from __future__ import annotations

# The functions of ``signal`` convert to enums: a call would take 18 us more.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from contextlib import ContextDecorator
from threading import get_ident, main_thread
from typing import Any


class _HeldBack(ContextDecorator):
    # Not needed for a single kernel call, which Python cannot interrupt.

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._came: tuple[Any, ...] | None = None

    def _note(self, *signal_and_frame: Any) -> None:
        self._came = signal_and_frame

    def __enter__(self) -> None:
        if get_ident() != main_thread().ident:
            return
        if not self._depth and callable(getsignal(SIGINT)):
            self._handler = signal(SIGINT, self._note)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() != main_thread().ident:
            return
        self._depth -= 1
        if not self._depth and self._handler is not None:
            signal(SIGINT, self._handler)
            handler, came, self._handler, self._came = self._handler, self._came, None, None
            if came is not None:
                handler(*came)


held_back = _HeldBack()
