"""A bounded queue between actors and a learner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from queue import Empty, Full
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.parts import Parts
from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.buffers.waiting import Cancels, ShutDown, attempts, seconds
from rlbuf_td.samplers import QueueSampler
from rlbuf_td.storages.checks import whole
from rlbuf_td.writers import QueueWriter

Result = TypeVar("Result")


def _refuse(*names: str) -> None:
    if names:
        reason = "it writes in order, takes each row once, on request, and its capacity controls the flow"
        raise ValueError(
            f"an ExperienceQueue has no {' and no '.join(names)} of its own choice: {reason}"
        )


class ExperienceQueue(ReplayBuffer):
    """A first-in-first-out queue for asynchronous actors (IMPALA, APPO): each row is
    sampled once.

    A row is a transition, or a trajectory of L steps with entries ``[L, ...]``. A write
    waits until its rows fit into the queue, and warns after 5 seconds; :meth:`sample`
    waits until the queue has ``batch_size`` rows. A write is stored completely or not
    at all, and rows from the same thread keep their order. Several threads, and after
    :meth:`share` several processes, may use a queue. If a process dies, the rows of its
    unfinished write are missing, and those of its unfinished sample stay in the queue.
    If a transform raises an error in :meth:`sample`, the rows of the batch are lost.
    Waiting calls are not served in order: use batches and writes of similar sizes,
    because calls with few rows can delay a call with many rows. The capacity should be
    at least ``batch_size`` plus the rows of a write, less 1; in a smaller queue, writes
    and batches of sizes without a large common divisor can wait for each other forever.

    Args:
        timeout: longest wait in seconds; ``None`` waits forever.
        max_age: the largest age of a sampled row, at least 0, in rows (0: the newest);
            ``None``: any age. Older rows are discarded instead of being sampled;
            ``health()["too_old"]`` counts them.
        **kwargs: keywords of :class:`ReplayBuffer`. ``storage`` must be a
            :class:`PackedStorage` with ``ndim=1``; its capacity (default: 1,000) limits
            the number of waiting rows.

    Raises:
        TimeoutError: a write or a sample has waited for ``timeout`` seconds; nothing
            has changed.
        ValueError: ``sampler``, ``writer``, ``samples_per_insert``, ``min_size`` or
            ``prefetch`` is given, ``timeout`` is negative or NaN, or no batch of
            ``batch_size`` rows fits into the queue or its ``max_age``. A write of no rows raises
            a ValueError, and so does a write or a batch that is larger than the
            capacity, or that could wait forever; nothing has changed.
        ShutDown: the queue has been shut down, in any process.

    Cost: as for a uniform sample and a write in a :class:`ReplayBuffer`; a waiting call
    polls every millisecond.

    Example: a learner that corrects for the lag of its actors with V-trace

        >>> from rlbuf_td import PackedStorage
        >>> from rlbuf_td.functional import vtrace_advantage_estimate
        >>> from tensordict import TensorDict
        >>> queue = ExperienceQueue(storage=PackedStorage(64), batch_size=2, timeout=10.0)
        >>> names = "state_value", "next_state_value", "reward", "log_prob"
        >>> unroll = dict.fromkeys(names, torch.zeros(1, 5, 1)) | {"done": torch.zeros(1, 5, 1, dtype=torch.bool)}
        >>> for _ in range(2):  # actors, in threads or processes of their own
        ...     index = queue.extend(TensorDict(unroll, [1]))
        >>> batch = queue.sample()  # the learner
        >>> log_prob = torch.full((2, 5, 1), -0.1)  # by the newest policy
        >>> values = batch["state_value"], batch["next_state_value"], batch["reward"], batch["done"]
        >>> advantage, value_target = vtrace_advantage_estimate(0.9, log_prob, batch["log_prob"], *values)
        >>> value_target.shape, queue.waiting
        (torch.Size([2, 5, 1]), 0)
    """

    makes_parts = frozenset({"sampler", "writer"})

    def __init__(
        self, *, timeout: float | None = None, max_age: int | None = None, **kwargs: Any
    ) -> None:
        refused = "min_size", "prefetch", "sampler", "samples_per_insert", "writer"
        _refuse(*(name for name in refused if kwargs.get(name)))
        self.timeout = seconds(timeout)
        writer = QueueWriter()
        sampler = QueueSampler(writer, max_age=max_age)
        super().__init__(**kwargs | {"writer": writer, "sampler": sampler})

    def _begin(self) -> Parts:
        """Connect the components; a batch size that never fits is refused before."""
        self._refuse_batch_size()
        return super()._begin()

    def _refuse_batch_size(self) -> None:
        """Raise a ValueError if no batch of :attr:`batch_size` rows can ever be taken,
        so that writes would wait forever."""
        if self._batch_size is not None:
            sampler = cast("QueueSampler", self._sampler)
            sampler.refuse_size(self._storage, whole(0)("batch_size", self._batch_size))

    def set_sampler(self, part: object) -> Any:
        """Raise a ValueError, because a queue has a sampler and a writer of its own."""
        _refuse("sampler", "writer")

    set_writer: Any = set_sampler

    @property
    def waiting(self) -> int:
        """The number of rows that have not been sampled yet."""
        writer = self._initialize().writer
        with self._replay_lock:  # two numbers, which a write or a sample changes
            return writer.waiting

    def add(self, data: TensorDictBase, *columns: object) -> int | torch.Tensor:
        """Wait for free space, write one row, and return its index. For errors, see
        :class:`ExperienceQueue`."""
        self._refuse_blocking(self._batch_size, 1)
        return self._once_possible(  # pyrefly: ignore [bad-return]
            partial(super().add, data, *columns), self.timeout, slow_write=4
        )

    def extend(
        self,
        tensordicts: TensorDictBase,
        *,
        update_priority: bool | None = None,
        lanes: None = None,
    ) -> torch.Tensor:
        """Wait until all ``[n]`` rows fit, then write them in order;
        ``update_priority`` has no effect.

        A queue has no ``lanes``.
        """
        write = partial(
            super().extend, tensordicts, update_priority=update_priority, lanes=lanes
        )
        if isinstance(tensordicts, TensorDictBase) and tensordicts.ndim:
            self._refuse_blocking(self._batch_size, len(tensordicts))
        return self._once_possible(write, self.timeout, slow_write=4)

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        wait: bool = True,
        timeout: float | None = None,
        cancel_event: Cancels | None = None,
    ) -> Any:
        """Return the oldest ``batch_size`` rows and remove them from the queue; see
        :meth:`ReplayBuffer.sample`.

        ``wait=False`` raises a TimeoutError if there are too few rows. ``timeout``
        defaults to the queue's ``timeout``.
        """
        limit = (self.timeout if timeout is None else timeout) if wait else 0.0
        draw = partial(super().sample, batch_size, return_info, include_info)
        return self._once_possible(draw, limit, batch_size, cancel_event)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the threads of the queue within ``timeout`` seconds; waiting calls raise
        :class:`ShutDown`."""
        self._initialize().writer.close()
        super().shutdown(timeout)

    def _refuse_blocking(self, batch: int | None, write: int) -> None:
        """Raise a ValueError if batches and writes of these sizes can wait for each
        other forever."""
        rows = self._initialize().storage.max_size
        self._refuse_batch_size()  # the storage may have been replaced
        # too large ones are refused anyway
        if batch is None or batch + write - 1 <= rows or max(batch, write) > rows:
            return
        with self._replay_lock:
            # The number of waiting rows changes by the two sizes, so that it stays a
            # multiple of their divisor.
            divisor = gcd(batch, write, self.waiting)
        if batch + write - divisor > rows:
            sizes = f"writes of {write} rows and batches of {batch} can wait for each other forever"
            remedy = f"make the storage of at least {batch + write - 1} rows, or use smaller writes or batches"
            raise ValueError(f"{sizes} in a queue of {rows} rows: {remedy}")

    def _once_possible(
        self,
        call: Callable[[], Result],
        timeout: float | None,
        own_size: int | None = None,
        cancel_event: Cancels | None = None,
        slow_write: int = 0,
    ) -> Result:
        """Repeat ``call`` while it raises Full or Empty, as :func:`attempts` does;
        return its result.

        ``own_size`` is the size of a batch that is not :attr:`batch_size`, against
        which writes are not checked.
        """
        reason = ""
        again = attempts(timeout, lambda: reason, cancel_event, slow_write=slow_write)
        next(again)
        while True:
            if self._initialize().writer.is_closed:
                raise ShutDown("the queue has been shut down")
            try:
                return call()
            except (Full, Empty) as error:
                reason = str(error)
            next(again)
            self._refuse_blocking(own_size, self.parts.writer.largest_write)
