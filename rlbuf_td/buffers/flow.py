"""Flow control: keeps the ratio of sampled to written rows near a target."""

from __future__ import annotations

from math import ceil, inf, isfinite
from typing import TYPE_CHECKING

from rlbuf_td.buffers.waiting import ShutDown
from rlbuf_td.storages.checks import State, is_count, number, whole
from rlbuf_td.storages.numbers import SharedNumbers

if TYPE_CHECKING:
    from rlbuf_td.storages import PackedStorage

_INSERTED, _SAMPLED, _BATCH, _WRITE, _SAMPLE_WAITS, _INSERT_WAITS, _CLOSED, _EPOCH = (
    range(8)
)
_SAVED = 6  # the first numbers are saved with the buffer


class FlowControl:
    r"""Admits a batch or a write only if the ratio of sampled to written rows stays
    near a target.

    .. math:: |\text{samples} - \sigma \, (\text{inserts} - \text{min\_size})| \le \text{tolerance}

    Here :math:`\sigma` is ``samples_per_insert``; samples and inserts are the numbers
    of rows sampled and written, including this batch or write. Until ``min_size`` rows
    are written, all writes and no batches are admitted.

    The tolerance must be at least the batch size, and at least ``samples_per_insert``
    times the rows of a write; otherwise batches and writes could wait for each other
    forever. ``None`` chooses the smallest such tolerance for the largest batch and the
    largest write so far.

    The counts start again when the rows are removed or replaced: :meth:`restart`. Rows
    that another buffer writes to the same storage count as written.

    Source: Cassirer et al., Reverb, 2021, section 3.4.
    """

    def __init__(
        self,
        samples_per_insert: float | None = None,
        min_size: int = 0,
        tolerance: float | None = None,
    ) -> None:
        ratio = inf
        if samples_per_insert is not None:
            ratio = number("samples_per_insert", samples_per_insert)
        if samples_per_insert is not None and not (isfinite(ratio) and ratio > 0):
            raise ValueError(
                f"samples_per_insert must be a positive number, got {samples_per_insert}"
            )
        min_size = whole(0)("min_size", min_size)
        if tolerance is not None:
            tolerance = number("tolerance", tolerance)
        if tolerance is not None and not tolerance >= max(1.0, ratio):
            rule = f"must be at least {max(1.0, ratio)}"
            if samples_per_insert is None:
                rule = "needs samples_per_insert"
            raise ValueError(
                f"tolerance {rule}, got {tolerance}: neither batches nor writes could pass"
            )
        self.samples_per_insert = samples_per_insert
        self.min_size = min_size
        self.given_tolerance = tolerance
        #: The rows that it counts from when they are published; None: it counts only
        # what it is told.
        self.storage: PackedStorage | None = None
        # at `_INSERTED`: what to add to the number of rows written to the storage
        self._numbers = SharedNumbers("q", [0] * 8)

    @property
    def tolerance(self) -> float:
        return self._tolerance_for(0)

    def _tolerance_for(self, rows: int) -> float:
        """Return the tolerance after a batch of ``rows`` rows has been requested."""
        if self.given_tolerance is not None:
            return float(self.given_tolerance)
        return max(
            1.0,
            self._numbers[_BATCH],
            rows,
            (self.samples_per_insert or 0.0) * self._numbers[_WRITE],
        )

    # In a buffer, callers of the methods that change numbers hold the buffer's lock.

    def admit_sample(self, rows: int) -> bool:
        """Return whether a batch is admitted; if it is, count its rows."""
        self._note(_BATCH, rows, rows, "a batch")
        is_admitted = self.admits_sample(rows)
        if is_admitted:
            self._numbers[_SAMPLED] += rows
        return is_admitted

    def admits_sample(self, rows: int) -> bool:
        """Return whether a batch would be admitted, without counting it."""
        self.refuse_endless(rows, rows, "a batch")
        inserted = self.inserted
        sampled = self._numbers[_SAMPLED]
        if inserted < max(1, self.min_size):
            return False
        return self._excess(sampled + rows, inserted) <= self._tolerance_for(rows)

    def admit_insert(self, rows: int) -> bool:
        """Return whether a write is admitted; if it is, count its rows."""
        is_admitted = self.admits_insert(rows)
        if is_admitted:
            self.count_inserts(rows)
        return is_admitted

    def admits_insert(self, rows: int) -> bool:
        """Return whether a write is admitted, without counting it."""
        self._note(_WRITE, rows, rows * (self.samples_per_insert or 0.0), "a write")
        inserted = self.inserted + rows
        excess = -self._excess(self._numbers[_SAMPLED], inserted)
        return inserted <= self.min_size or excess <= self.tolerance

    def count_inserts(self, rows: int) -> None:
        """Count ``rows`` rows, which are not in the storage, as written."""
        self._numbers[_INSERTED] += rows

    def why_no_batch(self, rows: int) -> str:
        """Return in one sentence why a batch of ``rows`` rows is not admitted now."""
        inserted = self.inserted
        if not inserted:
            minimum = f", and min_size={self.min_size}" if self.min_size else ""
            return f"the buffer is empty{minimum}"
        if inserted < self.min_size:
            return f"{inserted} of min_size={self.min_size} rows have been written"
        excess = self._excess(self._numbers[_SAMPLED] + rows, inserted)
        surplus = excess - self._tolerance_for(rows)
        missing = max(1, ceil(surplus / (self.samples_per_insert or 1.0)))
        return (
            f"{self._counts()}; a batch of {rows} rows is admitted when {missing} more "
            "rows are written"
        )

    def why_no_write(self, rows: int) -> str:
        """Return in one sentence why a write of ``rows`` rows is not admitted now, and
        what to do."""
        excess = -self._excess(self._numbers[_SAMPLED], self.inserted + rows)
        missing = max(1, ceil(excess - self.tolerance))
        return (
            f"{self._counts()}; it is admitted when {missing} more rows are sampled. "
            "Sample in another thread or process; in one thread, after each write: "
            "`while rb.can_sample(): batch = rb.sample()`"
        )

    def _counts(self) -> str:
        return (
            f"{self.inserted} rows were written and {self._numbers[_SAMPLED]} sampled, "
            f"with samples_per_insert={self.samples_per_insert:g}, "
            f"min_size={self.min_size}, tolerance={self.tolerance:g}"
        )

    def _excess(self, sampled: int, inserted: int) -> float:
        if self.samples_per_insert is None:
            return 0.0
        return sampled - self.samples_per_insert * (inserted - self.min_size)

    def _note(self, which: int, rows: int, weight: float, what: str) -> None:
        """Record the size of a batch or write; refuse a size that the given tolerance
        never admits."""
        if self._numbers[_CLOSED]:
            raise ShutDown("the buffer has been shut down")
        self.refuse_endless(rows, weight, what)
        if rows > self._numbers[which]:
            self._numbers[which] = rows

    def refuse_endless(self, rows: int, weight: float, what: str) -> None:
        """Raise a ValueError if the given tolerance never admits a batch or write that
        counts as ``weight`` samples."""
        if self.given_tolerance is not None and weight > self.given_tolerance:
            raise ValueError(
                f"{what} of {rows} rows could block forever with a tolerance of "
                f"{self.given_tolerance} sampled rows: make it at least {weight:g}"
            )

    def restart(self, rows: int) -> None:
        """Count ``rows`` as all that was written so far, and sampled as often as the
        target ratio asks."""
        numbers = self._numbers
        numbers[_INSERTED] = rows - self._written
        numbers[_SAMPLED] = max(
            0, int((self.samples_per_insert or 0.0) * (rows - self.min_size))
        )
        numbers[_EPOCH] += 1

    def count_from(self, storage: PackedStorage) -> None:
        """Count the rows of a storage when they are published; rows that are there count
        as those of a :meth:`restart`, unless this object has counted before."""
        self.storage = storage
        if not self._numbers[_EPOCH]:
            self.restart(len(storage.ring))

    def agree(self, stored: int) -> None:
        """Begin again if another process has removed all rows; ``stored`` is the number
        of rows in the storage."""
        if self.inserted and not stored:
            self.restart(stored)

    @property
    def epoch(self) -> int:
        """The number of restarts and loads so far."""
        return self._numbers[_EPOCH]

    @property
    def inserted(self) -> int:
        """The number of rows written."""
        return self._written + self._numbers[_INSERTED]

    @property
    def _written(self) -> int:
        return 0 if self.storage is None else self.storage.ring.rows_written

    def take_back(self, epoch: int, *, sampled: int = 0, inserted: int = 0) -> None:
        """Subtract the rows of a failed batch or write, unless the counts have
        restarted since it was admitted."""
        if epoch == self.epoch:
            self._numbers[_SAMPLED] -= sampled
            self._numbers[_INSERTED] -= inserted

    def count_wait(self, *, of_sample: bool) -> None:
        self._numbers[_SAMPLE_WAITS if of_sample else _INSERT_WAITS] += 1

    def shutdown(self) -> None:
        """Make waiting and later calls raise :class:`ShutDown`."""
        self._numbers[_CLOSED] = 1

    def share_memory_(self) -> None:
        self._numbers.share_memory_()

    def report(self) -> dict[str, float]:
        """Return the counts of inserts, samples and waits, and the samples per
        insert."""
        _, sampled, _, _, sample_waits, insert_waits, *_ = map(float, self._numbers)
        inserted = float(self.inserted)
        return {
            "inserts": inserted,
            "samples": sampled,
            "samples_per_insert": sampled / max(1.0, inserted),
            "sample_waits": sample_waits,
            "insert_waits": insert_waits,
        }

    def state_dict(self) -> State:
        return {
            "samples_per_insert": self.samples_per_insert,
            "min_size": self.min_size,
            "counts": [self.inserted, *[*self._numbers][1:_SAVED]],
        }

    def refuse_state(self, state: object) -> None:
        """Raise a ValueError if ``state`` is neither None nor a result of
        :meth:`state_dict`."""
        if state is None:
            return
        is_like = isinstance(state, dict) and state.keys() == self.state_dict().keys()
        counts = state["counts"] if is_like else None
        is_list = isinstance(counts, list) and len(counts) == _SAVED
        if not (is_list and all(map(is_count, counts))):
            raise ValueError(
                f"the saved state of flow control needs {_SAVED} whole numbers as counts, got {state!r}"
            )

    def restore(self, state: State | None, rows: int) -> None:
        """Restore a state; without one, or with one of other settings, restart with
        ``rows`` rows."""
        if state is None or self.state_dict() | {"counts": state["counts"]} != state:
            return self.restart(rows)
        for position, count in enumerate(state["counts"]):
            self._numbers[position] = count
        self._numbers[_INSERTED] -= self._written
        self._numbers[_EPOCH] += 1


def make_flow(
    samples_per_insert: float | None,
    min_size: int,
    tolerance: float | None,
    batch_size: int | None = None,
) -> FlowControl | None:
    """Return a :class:`FlowControl`, or None if the arguments set no limit; refuse a
    batch size never admitted."""
    if samples_per_insert is None and tolerance is None and min_size == 0:
        return None
    flow = FlowControl(samples_per_insert, min_size, tolerance)
    if isinstance(batch_size, int):
        flow.refuse_endless(batch_size, batch_size, "a batch")
    return flow


def not_now(rows: int, reason: str) -> str:
    """Return the message of the error of a batch that does not wait."""
    return f"flow control does not admit a batch of {rows} rows now: {reason}. To wait, use sample(wait=True)"
