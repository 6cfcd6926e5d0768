"""First-in-first-out sampling: each row is in exactly one batch."""

from __future__ import annotations

from queue import Empty
from typing import Protocol

import torch
from torchrl.data.replay_buffers import Storage

from rlbuf_td.samplers.row_sampler import RowSampler
from rlbuf_td.storages.checks import optional, whole
from rlbuf_td.storages.numbers import SharedCounter


class Queue(Protocol):
    """The methods of :class:`QueueWriter` that :class:`QueueSampler` calls."""

    @property
    def waiting(self) -> int: ...
    def take(self, count: int) -> torch.Tensor: ...


class QueueSampler(RowSampler):
    """Draws each row exactly once, in the order in which the rows were written.

    Args:
        writer: the :class:`QueueWriter` of the same buffer.
        max_age: the largest age of a row that may be drawn, at least 0, in rows (0: the
            newest); ``None``: any age. A draw discards older rows first.

    Raises:
        queue.Empty: (when sampling) there are fewer undrawn rows than a batch has; no
            row is drawn.
        ValueError: (when sampling) a batch has more rows than the storage can hold, or
            than are young enough.

    Cost: O(B).

    In contrast, TorchRL's ``ConsumingSampler`` draws rows in random order, and writes
    may replace undrawn rows.

    Example:
        >>> from rlbuf_td import PackedStorage, QueueWriter, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> writer = QueueWriter()
        >>> rb = ReplayBuffer(storage=PackedStorage(4), sampler=QueueSampler(writer), writer=writer, batch_size=2)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
        >>> rb.sample()["x"]
        tensor([0, 1])
        >>> rb.sample()
        Traceback (most recent call last):
        _queue.Empty: a batch has 2 rows, and 1 waits
    """

    # a drawn row must be in a batch, because no other batch will have it
    draws_once = True

    def __init__(self, writer: Queue, *, max_age: int | None = None) -> None:
        self.writer = writer
        self.max_age = optional(whole(0))("max_age", max_age)
        self.discarded = SharedCounter()  # how many rows were too old

    def draw(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See :class:`~rlbuf_td.samplers.row_sampler.RowSampler`."""
        waiting = self.writer.waiting
        self.refuse_size(storage, batch_size)
        if waiting < batch_size:
            raise Empty(
                f"a batch has {batch_size} rows, and {waiting} {'waits' if waiting == 1 else 'wait'}"
            )
        too_old = 0 if self.max_age is None else waiting - self.max_age - 1
        if too_old > 0:
            self.writer.take(too_old)
            self.discarded.add(too_old)
        return self.writer.take(batch_size), {}

    def refuse_size(self, storage: Storage, batch_size: int) -> None:
        """Raise a ValueError if the queue can never provide a batch of this size."""
        if batch_size < 1:
            raise ValueError(
                f"a batch must have at least one row, got batch_size={batch_size}"
            )
        if batch_size > storage.max_size:
            raise ValueError(
                f"a queue of {storage.max_size} rows never holds a batch of {batch_size}: enlarge it"
            )
        if self.max_age is not None and batch_size > self.max_age + 1:
            few = f"only {self.max_age + 1} rows are never older than max_age={self.max_age}"
            raise ValueError(
                f"{few}, a batch has {batch_size}: use a larger max_age, or smaller batches"
            )

    def share_memory_(self) -> None:
        """Share the count of discarded rows with processes that start later."""
        self.discarded.share_memory_()

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether there are enough undrawn rows for a batch; raise a ValueError
        if there never will be."""
        self.refuse_size(storage, batch_size)
        return self.writer.waiting >= batch_size
