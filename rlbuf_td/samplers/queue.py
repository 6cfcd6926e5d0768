"""First in, first out: each row is in one batch."""

from __future__ import annotations

from queue import Empty
from typing import Any, Protocol

import torch
from torchrl.data.replay_buffers import Storage

from rlbuf_td.samplers.common import RowSampler


class Queue(Protocol):
    """The writer of a queue, which knows what waits in it."""

    @property
    def waiting(self) -> int: ...
    def take(self, count: int) -> torch.Tensor: ...


class QueueSampler(RowSampler):
    """Take the rows that have waited longest, in order, each once.

    Args:
        writer: the :class:`QueueWriter` of the same buffer.

    Raises:
        queue.Empty: (when sampling) fewer rows wait than a batch has; none has been taken.

    Cost: O(B). TorchRL's ``ConsumingSampler`` draws at random from the rows that are left, and does not bound them.

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

    def __init__(self, writer: Queue) -> None:
        self.writer = writer

    def draw(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """See :class:`~rlbuf_td.samplers.common.RowSampler`."""
        waiting = self.writer.waiting
        if waiting < batch_size:
            raise Empty(f"a batch has {batch_size} rows, and {waiting} {'waits' if waiting == 1 else 'wait'}")
        return self.writer.take(batch_size), {}

    def _empty(self) -> None:
        pass

    def snapshot(self) -> dict[str, Any]:
        """Return nothing: the writer counts the rows that have been taken."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the writer counts the rows that have been taken."""
