"""A bounded queue between actors and a learner: a buffer that waits for free space and for rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from math import inf
from queue import Empty, Full
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.samplers import QueueSampler
from rlbuf_td.writers import QueueWriter

_POLL = 0.001  # polling interval in seconds; unlike a notification, polling still works if another process dies
Result = TypeVar("Result")


class ExperienceQueue(ReplayBuffer):
    """A first-in-first-out queue of rows, each taken once, for asynchronous actors (IMPALA, APPO).

    A row is a transition, or a trajectory of L steps, with entries ``[L, ...]`` (in a batch ``[B, L, ...]``). Writes
    wait while the queue is full; samples wait until there are enough rows for a batch. A write is stored completely
    or not at all, and the rows of one writer keep their order.

    Threads share the object. After :meth:`share`, so do processes that are forked, or spawned with the queue as an
    argument. A process that dies does not block the others: its unfinished write is undone, and the rows of its
    unfinished sample stay in the queue. Only rows that :meth:`sample` has returned, or was transforming, are lost with
    the process; if a transform raises an error, its rows are lost, too.

    Args:
        timeout: seconds to wait at most, then TimeoutError; ``None``: forever.
        **kwargs: ``storage``, a :class:`PackedStorage` ``[T]`` whose capacity limits the waiting rows (default:
            1,000), ``batch_size``, ``transform`` and others of :class:`ReplayBuffer`.

    Raises:
        TimeoutError: (on writing or sampling) there was no free space, or too few rows, in time; nothing has changed.
        ValueError: ``sampler``, ``writer``, ``samples_per_insert``, ``min_size`` or ``prefetch`` is given (rows drawn
            ahead would be lost if a process died); (on writing) there are no rows, or more than the capacity.
        RuntimeError: (while waiting) the queue was shut down, in any process.

    Cost: that of a uniform sample and of a write; a waiting call polls every millisecond.

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

    def __init__(self, *, timeout: float | None = None, **kwargs: Any) -> None:
        given = {
            name for name in ("sampler", "writer", "prefetch", "samples_per_insert", "min_size") if kwargs.get(name)
        }
        if given:
            reason = "it writes in order, takes each row once, on request, and its capacity controls the flow"
            raise ValueError(f"an ExperienceQueue has no {' and no '.join(sorted(given))} of its own choice: {reason}")
        self.timeout = timeout
        writer = QueueWriter()
        super().__init__(writer=writer, sampler=QueueSampler(writer), **kwargs)

    @property
    def waiting(self) -> int:
        """The number of rows that wait to be taken."""
        return self._initialize().writer.waiting

    def add(self, data: TensorDictBase) -> int | torch.Tensor:
        """Write one row once there is free space; return its index. The class documents the errors."""
        return self._once_possible(partial(super().add, data), self.timeout)

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
        """Write ``[n]`` rows in order, once there is space for all; return their index. The class documents the errors.

        Args:
            tensordicts: ``[n]`` transitions or trajectories.
            update_priority: has no effect, because a queue has no priorities.
        """
        return self._once_possible(partial(super().extend, tensordicts, update_priority=update_priority), self.timeout)

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Take the oldest waiting rows, once there are enough; see :meth:`ReplayBuffer.sample`.

        Args:
            batch_size: default: the queue's.
            return_info: return ``(batch, info)``, with the sampler's report.
            include_info: ``False`` omits the report from the batch.
            wait: ``False``: raise TimeoutError at once if there are too few rows.
            timeout: seconds to wait at most; default: that of the queue.
        """
        seconds = (self.timeout if timeout is None else timeout) if wait else 0.0
        return self._once_possible(partial(super().sample, batch_size, return_info, include_info), seconds)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the buffer's threads, and wake all calls that wait, in any process, with a RuntimeError.

        Args:
            timeout: seconds to wait for threads.
        """
        self._initialize().writer.close()
        super().shutdown(timeout)

    def _once_possible(self, call: Callable[[], Result], timeout: float | None) -> Result:
        """Repeat ``call`` while it raises Full or Empty, then return its result; no lock is held between two calls."""
        deadline = inf if timeout is None else time.monotonic() + timeout
        while True:
            if self._initialize().writer.is_closed:
                raise RuntimeError("the queue has been shut down")
            try:
                return call()
            except (Full, Empty) as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{error}, for {timeout} seconds") from None
            time.sleep(_POLL)
