"""Copies large batches in several threads of this process.

The threads are those of a pool of this module, which take parts of a batch until none
is left, and so does the calling thread. A call waits only for parts that have begun. On
a busy machine even that can take longer than one thread takes for the whole batch. Each
size of a batch therefore has a :class:`_Record` of its calls.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from math import inf
from threading import Event
from time import perf_counter

import torch

# bytes of the smallest batch that several threads copy: one that sleeps takes 0.1 ms to
# wake up
LARGE = 2 << 20
_PARTS = 4  # per thread
_FIRST = 2
_MOST_ALONE = 127
_MOST_RECORDS = 64


class _Record:
    """Decides whether the next call uses threads: not while they take longer than one
    thread takes.

    After a call in threads that took longer, one call follows in one thread, after the
    next one 3, then 7, ..., 127.
    """

    def __init__(self) -> None:
        # seconds with one thread; calls in one thread
        self.alone = inf
        self.pause = 0
        self.left = _FIRST

    def note(self, seconds: float, in_threads: bool) -> None:
        """Learn how long a call took with or without threads; slow threads pause for
        twice as many calls."""
        if in_threads:
            self.pause = (
                min(2 * self.pause + 1, _MOST_ALONE) if seconds > self.alone else 0
            )
            self.left = self.pause
        else:
            self.alone = (
                seconds
                if self.alone == inf
                else min(seconds, (3 * self.alone + seconds) / 4)
            )
            self.left -= 1


_records: dict[int, _Record] = {}  # by bytes of a batch


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="rlbuf_td_copies")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads


def all_parts(
    work: Callable[[int, int], bool], begin: int, end: int, nbytes: int
) -> bool:
    """Call ``work(first, past)`` for parts of ``range(begin, end)``, in up to
    ``torch.get_num_threads()`` threads.

    Return whether all calls returned True. ``nbytes`` is the size of the batch. When an
    exception leaves this function, such as Ctrl-C, no thread works any more.
    """
    threads = 1 if nbytes < LARGE else min(torch.get_num_threads(), os.cpu_count() or 1)
    if threads == 1:
        return work(begin, end)
    if len(_records) > _MOST_RECORDS:
        _records.clear()
    record = _records.setdefault(nbytes, _Record())
    began = perf_counter()
    in_threads = record.left <= 0
    is_done = (
        _work_together(work, begin, end, threads) if in_threads else work(begin, end)
    )
    record.note(perf_counter() - began, in_threads)
    return is_done


def _work_together(
    work: Callable[[int, int], bool], begin: int, end: int, threads: int
) -> bool:
    """Let this thread and helpers do parts of ``begin .. end - 1``; return whether all
    parts succeeded."""
    size = -(-(end - begin) // (threads * _PARTS))
    parts = deque(range(begin, end, size))
    results = []
    helpers: list[Event] = []  # of the threads that have begun; set when they end
    errors: list[BaseException] = []

    def take() -> None:
        with suppress(IndexError):  # no part is left
            while True:
                first = parts.popleft()
                results.append(work(first, min(first + size, end)))

    def help_out() -> None:
        ended = Event()
        # before it takes a part: `_stop` waits for it, even if Ctrl-C ends `submit`
        helpers.append(ended)
        try:
            take()
        except BaseException as error:  # noqa: BLE001  the calling thread raises it
            errors.append(error)
        finally:
            ended.set()

    try:
        with suppress(RuntimeError):  # the interpreter is shutting down
            for _ in range(threads - 1):
                _pool().submit(help_out)
        take()
    finally:
        _stop(parts, helpers)
    if errors:
        raise errors[0]
    return all(results)


def _stop(parts: deque[int], helpers: list[Event]) -> None:
    """Wait until no thread works any more, also if Ctrl-C comes: the caller may then
    free the memory of the batch."""
    try:
        parts.clear()
        for ended in helpers:
            ended.wait()
    except BaseException:
        _stop(parts, helpers)
        raise
