"""Permission to draw a batch, which is asked for in the locked step that draws it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlbuf_td.buffers.flow import not_now
from rlbuf_td.storages.indexing import row_count
from rlbuf_td.storages.lock import defer_sigint

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer


class NotAdmitted(Exception):
    """The buffer cannot draw this batch now."""


class Permission:
    """Lets a buffer draw one batch of ``rows`` rows, as soon as flow control admits it.

    Whoever draws holds the buffer's lock from :meth:`ask` to the end of the draw, so
    that no other thread or process can remove the rows in between.

    Args:
        buffer: draws the batch.
        rows: the number of its rows.
        waits: whether the caller waits until the sampler can draw the rows. If it does
            not, a sampler that cannot draw them raises its own error.
    """

    def __init__(self, buffer: ReplayBuffer, rows: int, *, waits: bool) -> None:
        self.buffer, self.rows, self.waits = buffer, rows, waits
        self._counted_in: int | None = None  # the epoch of the counts, once counted
        self._has_waited = False

    def ask(self) -> None:
        """Count the rows if the batch is admitted now; otherwise raise
        :class:`NotAdmitted`. The caller holds the lock."""
        flow = self.buffer.flow
        self.buffer._refuse_shut_down()
        if flow is None:
            if not self._is_possible():
                raise NotAdmitted
            return
        flow.agree(row_count(self.buffer.storage))
        epoch = flow.epoch
        is_possible = self._is_possible()
        with defer_sigint:  # who has counted the rows must know it
            if is_possible and flow.admit_sample(self.rows):
                self._counted_in = epoch
                return
        if self.waits and not self._has_waited:
            flow.count_wait(of_sample=True)
        self._has_waited = True
        raise NotAdmitted

    def _is_possible(self) -> bool:
        """Whether there are rows that could be drawn."""
        buffer = self.buffer
        if self.waits:
            return buffer.sampler.can_sample(buffer.storage, self.rows)
        return len(buffer) > 0

    def refusal(self) -> RuntimeError:
        """Return the error of a batch that does not wait."""
        return RuntimeError(not_now(self.rows, self.why_not()))

    def why_not(self) -> str:
        """Return in one sentence why the batch is not admitted now."""
        return self.buffer._why_no_batch(self.rows)

    def take_back(self) -> None:
        """Take back the count of the rows, because the batch was not returned."""
        flow = self.buffer.flow
        epoch = self._counted_in
        if flow is None or epoch is None:
            return
        with self.buffer._replay_lock:
            self._counted_in = None
            flow.take_back(epoch, sampled=self.rows)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the rows, which the ``with`` block draws; raise a RuntimeError if they
        are not admitted now, and take the count back if the block raises an error."""
        try:
            with self.buffer._replay_lock:
                self.ask()
            yield
        except NotAdmitted:
            raise self.refusal() from None
        except BaseException:
            self.take_back()
            raise
