"""First-in-first-out sampling: each row is in exactly one batch."""

from __future__ import annotations

from queue import Empty
from typing import Any, Protocol

import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers import Storage

from rlbuf_td.samplers.age import AgeLimit, of_limit, set_consumer_version
from rlbuf_td.samplers.row_sampler import RowSampler
from rlbuf_td.storages.write_clock import Tally


class Queue(Protocol):
    """The methods of :class:`QueueWriter` that :class:`QueueSampler` calls."""

    @property
    def waiting(self) -> int: ...
    def take(self, count: int) -> torch.Tensor: ...
    def waiting_rows(self) -> torch.Tensor: ...


class QueueSampler(RowSampler):
    """Draws each row exactly once, in the order in which the rows were written.

    Args:
        writer: the :class:`QueueWriter` of the same buffer.
        max_age: the largest age of a row that may be drawn, at least 0: in rows (0: the newest), or in the unit of
            ``age_key``; ``None``: any age. Older rows are discarded when it is their turn, or when a batch lacks rows.
        age_key: the key of a stored number that increases over time, such as ``"policy_version"``. The age of a row is
            then :attr:`consumer_version` minus the row's number, the smallest one if a row has several.

    Raises:
        queue.Empty: (when sampling) there are fewer undrawn rows, not too old, than a batch has; no row is drawn.
        ValueError: (when sampling) a batch has more rows than the storage can hold.
        SchemaError: (when sampling) rows do not have a number at ``age_key``.

    Cost: O(B); with ``max_age``, O(waiting rows).

    In contrast, TorchRL's ``ConsumingSampler`` draws rows in random order, and writes may replace undrawn rows.

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

    draws_once = True  # a drawn row must be in a batch, because no other batch will have it

    def __init__(self, writer: Queue, *, max_age: int | None = None, age_key: NestedKey | None = None) -> None:
        self.writer, self.age_limit = writer, AgeLimit.of(max_age, age_key)
        self.discarded = Tally()  # how many rows were too old

    max_age = property(of_limit("max_age"), doc="The largest age of a drawn row; ``None``: any age.")
    age_key = property(of_limit("age_key"), doc="The key of the number from which ages are computed; ``None``: rows.")
    consumer_version = property(
        of_limit("consumer_version"),
        set_consumer_version,
        doc="The number from which ages are counted, with ``age_key``; ``None``: the largest stored number.",
    )

    def draw(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """See :class:`~rlbuf_td.samplers.row_sampler.RowSampler`."""
        waiting, steps = self.writer.waiting, storage.max_size
        if batch_size < 1:
            raise ValueError(f"a batch must have at least one row, got batch_size={batch_size}")
        if batch_size > steps:
            raise ValueError(f"a queue of {steps} rows never holds a batch of {batch_size}: enlarge it")
        if self.max_age is not None and self.age_key is None and batch_size > self.max_age + 1:
            few = f"only {self.max_age + 1} rows are never older than max_age={self.max_age}"
            raise ValueError(f"{few}, a batch has {batch_size}: use a larger max_age, or smaller batches")
        if self.age_limit is not None and waiting:
            return self._young(storage, batch_size, self.age_limit), {}
        if waiting < batch_size:
            raise Empty(f"a batch has {batch_size} rows, and {waiting} {'waits' if waiting == 1 else 'wait'}")
        return self.writer.take(batch_size), {}

    def _young(self, storage: Storage, batch_size: int, limit: AgeLimit) -> torch.Tensor:
        """Take the oldest rows that are not too old, and discard the older rows before them."""
        rows = self.writer.waiting_rows()
        place = limit.is_young(storage, rows).nonzero()[:, 0]
        if len(place) >= batch_size:
            past = int(place[batch_size - 1]) + 1 if batch_size else 0
            self.writer.take(past)
            self.discarded.add(past - batch_size)
            return rows[place[:batch_size]]
        old = len(rows) - len(place)
        if old:
            if (
                len(place) and int(place[0]) < old
            ):  # make the rows to keep the last ones, to free the place of the others
                kept = storage.get(rows[place])
                storage.edit(lambda data: data.copy_(kept), rows[old:])
            self.writer.take(old)
            self.discarded.add(old)
        few = f"{len(place)} {'waits' if len(place) == 1 else 'wait'} that {'is' if len(place) == 1 else 'are'}"
        raise Empty(f"a batch has {batch_size} rows, and {few} not older than max_age={limit.max_age}")

    def share_memory_(self) -> None:
        """Share the count of discarded rows with processes that start later."""
        self.discarded.share_memory_()

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether there are enough undrawn rows for a batch."""
        if self.age_limit is None or not self.writer.waiting:
            return self.writer.waiting >= batch_size
        return int(self.age_limit.is_young(storage, self.writer.waiting_rows()).sum()) >= batch_size
