"""Flow control: keeps the ratio of sampled to written rows near a target."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf, isfinite
from typing import Any

from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.storages.shared.memory import SharedNumbers

_INSERTED, _SAMPLED, _BATCH, _WRITE, _SAMPLE_WAITS, _INSERT_WAITS, _CLOSED = range(7)
_POLL = 0.001  # polling interval in seconds; unlike a notification, polling still works if another process dies


class FlowControl:
    r"""Admits a batch or a write only if the ratio of sampled to written rows stays near a target.

    .. math:: |\text{samples} - \sigma \, (\text{inserts} - \text{min\_size})| \le \text{tolerance}

    Here :math:`\sigma` is ``samples_per_insert``; samples and inserts are the numbers of rows sampled and written,
    including this batch or write. Until ``min_size`` rows are written, all writes and no batches are admitted.

    The tolerance must be at least the batch size, and at least ``samples_per_insert`` times the rows of a write;
    otherwise batches and writes could wait for each other forever. ``None`` chooses the smallest such tolerance
    for the largest batch and the largest write so far.

    Source: Cassirer et al., Reverb, 2021, section 3.4.
    """

    def __init__(
        self, samples_per_insert: float | None = None, min_size: int = 0, tolerance: float | None = None
    ) -> None:
        ratio = inf if samples_per_insert is None else float(samples_per_insert)
        if samples_per_insert is not None and not (isfinite(ratio) and ratio > 0):
            raise ValueError(f"samples_per_insert must be a positive number, got {samples_per_insert}")
        if isinstance(min_size, bool) or int(min_size) != min_size or min_size < 0:
            raise ValueError(f"min_size must be a whole number of rows, at least 0, got {min_size}")
        if tolerance is not None and (samples_per_insert is None or not tolerance >= max(1.0, ratio)):
            least = "needs samples_per_insert" if samples_per_insert is None else f"must be at least {max(1.0, ratio)}"
            raise ValueError(f"tolerance {least}, got {tolerance}: neither batches nor writes could pass")
        self.samples_per_insert, self.min_size, self.given_tolerance = samples_per_insert, int(min_size), tolerance
        self._numbers = SharedNumbers("q", [0] * 7)

    @property
    def tolerance(self) -> float:
        if self.given_tolerance is not None:
            return float(self.given_tolerance)
        return max(1.0, self._numbers[_BATCH], (self.samples_per_insert or 0.0) * self._numbers[_WRITE])

    # In a buffer, callers of ``admit_sample``, ``admit_insert`` and ``take_back`` hold the buffer's lock.

    def admit_sample(self, rows: int) -> bool:
        """Return whether a batch is admitted; if it is, count its rows."""
        self._note(_BATCH, rows, rows, "a batch")
        numbers = self._numbers
        inserted = numbers[_INSERTED]
        if inserted < max(1, self.min_size) or self._excess(numbers[_SAMPLED] + rows, inserted) > self.tolerance:
            return False
        numbers[_SAMPLED] += rows
        return True

    def admit_insert(self, rows: int) -> bool:
        """Return whether a write is admitted; if it is, count its rows."""
        self._note(_WRITE, rows, rows * (self.samples_per_insert or 0.0), "a write")
        numbers = self._numbers
        inserted = numbers[_INSERTED] + rows
        if inserted > self.min_size and -self._excess(numbers[_SAMPLED], inserted) > self.tolerance:
            return False
        numbers[_INSERTED] = inserted
        return True

    def _excess(self, sampled: int, inserted: int) -> float:
        if self.samples_per_insert is None:
            return 0.0
        return sampled - self.samples_per_insert * (inserted - self.min_size)

    def _note(self, which: int, rows: int, weight: float, what: str) -> None:
        """Record the size of a batch or write; refuse a size that the given tolerance never admits."""
        if self._numbers[_CLOSED]:
            raise RuntimeError("the buffer has been shut down")
        if self.given_tolerance is not None and weight > self.given_tolerance:
            room = f"a tolerance of {self.given_tolerance} sampled rows"
            raise ValueError(f"{what} of {rows} rows could block forever with {room}: make it at least {weight:g}")
        if rows > self._numbers[which]:
            self._numbers[which] = rows

    def count_imported(self, rows: int) -> None:
        """Count imported rows as written; raise the count of sampled rows until it meets the target ratio."""
        numbers = self._numbers
        numbers[_INSERTED] += rows
        surplus = (self.samples_per_insert or 0.0) * (numbers[_INSERTED] - self.min_size)
        numbers[_SAMPLED] = max(numbers[_SAMPLED], int(surplus))

    def take_back(self, *, sampled: int = 0, inserted: int = 0) -> None:
        """Subtract the rows of a failed batch or write from the counters."""
        self._numbers[_SAMPLED] -= sampled
        self._numbers[_INSERTED] -= inserted

    def count_wait(self, *, of_sample: bool) -> None:
        self._numbers[_SAMPLE_WAITS if of_sample else _INSERT_WAITS] += 1

    def shutdown(self) -> None:
        """Make waiting and later calls raise a RuntimeError."""
        self._numbers[_CLOSED] = 1

    def share_memory_(self) -> None:
        self._numbers.share_memory_()

    def report(self) -> dict[str, float]:
        inserted, sampled, _, _, sample_waits, insert_waits, _ = map(float, self._numbers)
        counts = {"inserts": inserted, "samples": sampled, "samples_per_insert": sampled / max(1.0, inserted)}
        return counts | {"sample_waits": sample_waits, "insert_waits": insert_waits}

    @contextmanager
    def inserting(self, rows: int, lock: AbstractContextManager[Any]) -> Iterator[None]:
        """Wait until a write is admitted, and count its rows; undo the count if the ``with`` block raises an error."""
        wait_until(partial(self.admit_insert, rows), lock, None, partial(self.count_wait, of_sample=False))
        try:
            yield
        except BaseException:
            with lock:
                self.take_back(inserted=rows)
            raise

    @contextmanager
    def sampling(
        self, rows: int, ready: Callable[[], bool], lock: AbstractContextManager[Any], wait: bool, timeout: float | None
    ) -> Iterator[None]:
        """Wait until a batch is admitted, and count its rows; undo the count if the ``with`` block raises an error."""

        def admit() -> bool:
            return ready() and self.admit_sample(rows)

        if wait:
            wait_until(admit, lock, timeout, partial(self.count_wait, of_sample=True))
        else:
            with lock:
                if not admit():
                    raise RuntimeError(f"flow control does not admit a batch of {rows} rows now: {NOT_YET}")
        try:
            yield
        except BaseException:
            with lock:
                self.take_back(sampled=rows)
            raise


NOT_YET = "there are too few rows, or samples per insert are at their limit; sample with wait=True to wait"


def wait_until(
    admit: Callable[[], bool],
    lock: AbstractContextManager[Any],
    timeout: float | None,
    count_wait: Callable[[], None] | None = None,
) -> None:
    """Call ``admit``, with ``lock`` held, until it returns True; raise a TimeoutError after ``timeout`` seconds."""
    deadline = inf if timeout is None else time.monotonic() + timeout
    while True:
        with lock:
            if admit():
                return
            if count_wait is not None:
                count_wait()
        count_wait = None
        if time.monotonic() >= deadline:
            raise TimeoutError(f"flow control admitted nothing, or there was no row, within {timeout} seconds")
        time.sleep(_POLL)


def make_flow(
    samples_per_insert: float | None, min_size: int, tolerance: float | None, prefetch: int
) -> FlowControl | None:
    """Return a :class:`FlowControl`, or None if the arguments set no limit."""
    if samples_per_insert is None and tolerance is None and min_size == 0:
        return None
    if prefetch:
        raise ValueError("flow control counts batches when they are sampled: use prefetch=0")
    return FlowControl(samples_per_insert, min_size, tolerance)


def count_imported(rb: Any, flow: FlowControl | None) -> None:
    """Attach ``flow`` to a buffer of imported rows, and count these rows as written."""
    rb.flow = flow
    if flow is not None:
        flow.count_imported(len(rb))
        rb.connect()  # drops a write plan, which would bypass flow control


@contextmanager
def permission(rb: Any, rows: int | None, wait: bool, timeout: float | None) -> Iterator[None]:
    """Enter the ``with`` block once the buffer has rows and its flow control, if any, admits a batch."""

    def ready() -> bool:
        if rb.is_shut_down:
            raise RuntimeError("the buffer has been shut down")
        return len(rb) > 0

    if rb.flow is not None and rows is not None:
        with rb.flow.sampling(rows, ready, rb.replay_lock, wait, timeout):
            yield
    else:
        wait_until(ready, rb.replay_lock, timeout)
        yield


def shutdown(rb: Any, timeout: float | None = None) -> None:
    """Stop the buffer's threads; calls that wait for flow control raise a RuntimeError, in all processes."""
    if rb.flow is not None:
        rb.flow.shutdown()
    TensorDictReplayBuffer.shutdown(rb, timeout)
