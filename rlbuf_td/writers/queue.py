"""The writer of a first-in-first-out queue."""

from __future__ import annotations

from queue import Full
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data.replay_buffers import Storage

from rlbuf_td.storages.checks import State, saved_number
from rlbuf_td.storages.listeners import Recovers
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.torchrl_parts import capacity_in_steps
from rlbuf_td.writers.common import TimeWriter

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from rlbuf_td.storages import PackedStorage

# places in the numbers of a QueueWriter
_TAKEN, _CLOSED, _LARGEST, _BEFORE, _TURN = range(5)


class QueueWriter(TimeWriter, Recovers):
    """Writes the rows of a queue: no row is replaced before a :class:`QueueSampler` has
    taken the row.

    The storage's capacity limits the number of rows not yet taken. In an
    :class:`ExperienceQueue`, a write waits for free space instead of raising
    ``queue.Full``.

    Raises:
        queue.Full: (on writing) there is too little free space; nothing has changed.
        ValueError: (on writing) the data is empty, or longer than the capacity. Making
            a buffer raises this error if ``storage.ndim > 1``.
        SchemaError: (on writing) the data does not match the stored rows; nothing has
            changed.

    Cost: the same as for :class:`RingWriter`.

    Example:
        >>> from rlbuf_td import PackedStorage, QueueSampler, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> writer = QueueWriter()
        >>> rb = ReplayBuffer(storage=PackedStorage(4), sampler=QueueSampler(writer), writer=writer, batch_size=2)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
        >>> rb.sample()["x"], writer.waiting
        (tensor([0, 1]), 1)
    """

    def __init__(self) -> None:
        super().__init__()
        # Rows taken, 1 after a shutdown, rows of the largest write; rows taken before
        # the process that took the last ones got the lock, and when it got the lock,
        # see :attr:`ProcessLock.turn`.
        self.numbers = SharedNumbers("q", [0, 0, 0, 0, -1])

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to write to; rows that are already in the storage count as
        taken."""
        if storage.ndim > 1:
            raise ValueError(
                f"a queue holds rows [T], the storage has ndim={storage.ndim}: write a row per trajectory"
            )
        super().register_storage(storage)
        self.numbers[_TAKEN] = self._rows_written

    @property
    def _rows_written(self) -> int:
        """The number of rows ever written to the storage, which no call sets to 0."""
        return self._storage.ring.rows_written

    @property
    def is_closed(self) -> bool:
        """Whether the queue has been shut down, in any process."""
        return bool(self.numbers[_CLOSED])

    def close(self) -> None:
        """Mark the queue as shut down in all processes: calls of an
        :class:`ExperienceQueue` then raise an error."""
        self.numbers[_CLOSED] = 1

    @property
    def waiting(self) -> int:
        """The number of rows that have not been taken yet."""
        return min(self._rows_written - self.numbers[_TAKEN], len(self._storage))

    @property
    def largest_write(self) -> int:
        """The number of rows of the largest write so far, by any process."""
        return self.numbers[_LARGEST]

    def share_memory_(self) -> None:
        """Share the counts with processes that are forked later, or spawned with this
        writer as an argument."""
        self.numbers.share_memory_()

    def take(self, count: int) -> torch.Tensor:
        """Mark the oldest ``count`` waiting rows as taken; return their index. The
        caller holds the buffer's lock."""
        steps, numbers = capacity_in_steps(self._storage), self.numbers
        if self._storage.shared and numbers[_TURN] != self._storage.lock.turn:
            numbers[_BEFORE], numbers[_TURN] = numbers[_TAKEN], self._storage.lock.turn
        start = self._cursor - self.waiting
        # atomic: all rows are taken, or none
        numbers[_TAKEN] = self._rows_written - self.waiting + count
        return torch.arange(start, start + count, device=self._storage.device) % steps

    def recover(self, storage: PackedStorage, new: torch.Tensor) -> None:
        """Count as waiting what a process that died was taking; see
        :class:`~rlbuf_td.storages.listeners.Recovers`."""
        if storage.shared and self.numbers[_TURN] == storage.lock.turn:
            self.numbers[_TAKEN] = self.numbers[_BEFORE]

    def add(self, data: TensorDictBase) -> int | torch.Tensor:
        """Write one row and return its index; raise the errors that the class
        documents."""
        self._refuse_more_than_fits(
            1, capacity_in_steps(self._storage, single_data=data)
        )
        index = super().add(data)
        self._note_size(1)
        return index

    def extend(self, data: Any) -> torch.Tensor:
        """Write ``[n]`` rows in order and return their index; raise the errors that the
        class documents."""
        count = len(data)
        self._refuse_more_than_fits(
            count, capacity_in_steps(self._storage, batched_data=data)
        )
        index = super().extend(data)
        self._note_size(count)
        return index

    def _refuse_more_than_fits(self, count: int, steps: int) -> None:
        if count > steps:
            raise ValueError(
                f"{count} rows never fit into a queue of {steps}: write fewer at once, or enlarge it"
            )
        if count > steps - self.waiting:
            raise Full(
                f"{count} rows do not fit, because {self.waiting} of {steps} wait to "
                "be taken: sample in another thread or process, or make the storage "
                "larger"
            )

    def _note_size(self, count: int) -> None:
        if count > self.numbers[_LARGEST]:
            self.numbers[_LARGEST] = count

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count=empty_write_count)
        # rows that are there have replaced others: all are new
        self.numbers[_TAKEN] = self._rows_written - len(self._storage)

    def state_dict(self) -> State:
        """Return the cursor and the counters."""
        return super().state_dict() | {"waiting": self.waiting}

    def _refuse_state(self, state: State) -> None:
        super()._refuse_state(state)
        saved_number(
            "count of waiting rows", state["waiting"], 0, state["_write_count"]
        )

    @defer_sigint
    def load_state_dict(self, state_dict: State) -> None:
        """Restore a state that :meth:`state_dict` returned; ValueError, and no change,
        if it is invalid."""
        super().load_state_dict(state_dict)
        self.numbers[_TAKEN] = self._rows_written - state_dict["waiting"]
