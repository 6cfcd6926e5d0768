"""Flow control: keeps the number of samples per written row within a tolerance."""

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
    r"""Admits batches and writes while the number of samples per insert stays within a tolerance.

    .. math:: |\text{samples} - \sigma \, (\text{inserts} - \text{min\_size})| \le \text{tolerance}

    where :math:`\sigma` is ``samples_per_insert``, and samples and inserts are the numbers of rows sampled and written
    so far. Until ``min_size`` rows are written, every write and no batch is admitted. :meth:`share_memory_` shares the
    counters with other processes.

    Args:
        samples_per_insert: rows sampled per row written; ``None``: only ``min_size`` is enforced.
        min_size: rows that must be written before the first batch.
        tolerance: in sampled rows; at least the size of a batch, and at least ``samples_per_insert`` times the size of
            a write, since otherwise batches and writes could wait for each other forever. ``None``: the smallest
            tolerance that the batches and writes so far allow.

    Raises:
        ValueError: an argument is out of range; (on a call) a batch or a write is too large for the tolerance.

    Source: Cassirer et al., Reverb, 2021, section 3.4. The names are those of TorchRL's ``RateLimitedReplayBuffer``,
    which limits sampling only.
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
        """The current tolerance, in sampled rows."""
        if self.given_tolerance is not None:
            return float(self.given_tolerance)
        return max(1.0, self._numbers[_BATCH], (self.samples_per_insert or 0.0) * self._numbers[_WRITE])

    def admit_sample(self, rows: int) -> bool:
        """Count a batch and return True if it is admitted, else return False; the caller holds the lock."""
        self._note(_BATCH, rows, rows, "a batch")
        numbers = self._numbers
        if numbers[_INSERTED] < max(1, self.min_size) or self._excess(numbers[_SAMPLED] + rows) > self.tolerance:
            return False
        numbers[_SAMPLED] += rows
        return True

    def admit_insert(self, rows: int) -> bool:
        """Count a write and return True if it is admitted, else return False; the caller holds the lock."""
        self._note(_WRITE, rows, rows * (self.samples_per_insert or 0.0), "a write")
        numbers = self._numbers
        inserted = numbers[_INSERTED] + rows
        if inserted > self.min_size and -self._excess(numbers[_SAMPLED], inserted) > self.tolerance:
            return False
        numbers[_INSERTED] = inserted
        return True

    def _excess(self, sampled: int, inserted: int | None = None) -> float:
        if self.samples_per_insert is None:
            return 0.0
        inserted = self._numbers[_INSERTED] if inserted is None else inserted
        return sampled - self.samples_per_insert * (inserted - self.min_size)

    def _note(self, which: int, rows: int, weight: float, what: str) -> None:
        """Record the largest batch and write so far; refuse one that the tolerance could never admit."""
        self._refuse_closed()
        if self.given_tolerance is not None and weight > self.given_tolerance:
            room = f"a tolerance of {self.given_tolerance} sampled rows"
            raise ValueError(f"{what} of {rows} rows could block forever with {room}: make it at least {weight:g}")
        if rows > self._numbers[which]:
            self._numbers[which] = rows

    def _refuse_closed(self) -> None:
        if self._numbers[_CLOSED]:
            raise RuntimeError("the buffer has been shut down")

    def count_imported(self, rows: int) -> None:
        """Count rows that were imported: they count for ``min_size``, and cause neither batches nor writes to wait."""
        numbers = self._numbers
        numbers[_INSERTED] += rows
        surplus = (self.samples_per_insert or 0.0) * (numbers[_INSERTED] - self.min_size)
        numbers[_SAMPLED] = max(numbers[_SAMPLED], int(surplus))

    def take_back(self, *, sampled: int = 0, inserted: int = 0) -> None:
        """Subtract a batch or a write that has failed from the counters; the caller holds the lock."""
        self._numbers[_SAMPLED] -= sampled
        self._numbers[_INSERTED] -= inserted

    def count_wait(self, *, of_sample: bool) -> None:
        self._numbers[_SAMPLE_WAITS if of_sample else _INSERT_WAITS] += 1

    def shutdown(self) -> None:
        """Wake all waiting calls with a RuntimeError."""
        self._numbers[_CLOSED] = 1

    def share_memory_(self) -> None:
        """Share the counters with processes that are later forked, or spawned with this object."""
        self._numbers.share_memory_()

    def report(self) -> dict[str, float]:
        """Return the counters, as a flat dict for loggers."""
        inserted, sampled, _, _, sample_waits, insert_waits, _ = map(float, self._numbers)
        counts = {"inserts": inserted, "samples": sampled, "samples_per_insert": sampled / max(1.0, inserted)}
        return counts | {"sample_waits": sample_waits, "insert_waits": insert_waits}

    @contextmanager
    def inserting(self, rows: int, lock: AbstractContextManager[Any]) -> Iterator[None]:
        """Wait until a write is admitted, and count it; if the ``with`` block fails, uncount it."""
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
        """Wait until rows are ``ready`` and a batch is admitted, and count it; if the ``with`` block fails, uncount it.

        Raises:
            RuntimeError: the batch is not admitted and ``wait`` is False, or the buffer has been shut down.
            TimeoutError: the batch was not admitted in time.
        """

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
    """Call ``admit``, with the lock held, until it returns True; raise TimeoutError after ``timeout`` seconds."""
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


# -- functions of a ReplayBuffer


def make_flow(
    samples_per_insert: float | None, min_size: int, tolerance: float | None, prefetch: int
) -> FlowControl | None:
    """Return the flow control that a buffer's arguments ask for, if any; raises as :class:`FlowControl`."""
    if samples_per_insert is None and tolerance is None and min_size == 0:
        return None
    if prefetch:
        raise ValueError("flow control counts batches when they are sampled: use prefetch=0")
    return FlowControl(samples_per_insert, min_size, tolerance)


def count_imported(rb: Any, flow: FlowControl | None) -> None:
    """Give a buffer its flow control, now that its rows have been imported."""
    rb.flow = flow
    if flow is not None:
        flow.count_imported(len(rb))
        rb._connect()  # a plan for writes may have been made


@contextmanager
def permission(rb: Any, rows: int | None, wait: bool, timeout: float | None) -> Iterator[None]:
    """Wait until a buffer has rows and its flow control admits a batch; raises as :meth:`FlowControl.sampling`."""

    def ready() -> bool:
        if rb._service_shutdown:
            raise RuntimeError("the buffer has been shut down")
        return len(rb) > 0

    if rb.flow is not None and rows is not None:
        with rb.flow.sampling(rows, ready, rb._replay_lock, wait, timeout):
            yield
    else:
        wait_until(ready, rb._replay_lock, timeout)
        yield


def shutdown(rb: Any, timeout: float | None = None) -> None:
    """Stop the buffer's threads, and wake all calls that wait for flow control, in any process, with a RuntimeError."""
    if rb.flow is not None:
        rb.flow.shutdown()
    TensorDictReplayBuffer.shutdown(rb, timeout)
