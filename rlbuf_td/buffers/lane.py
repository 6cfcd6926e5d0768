"""A handle for one lane of a buffer ``[T, E]``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers import writing
from rlbuf_td.envs.transition import GymnasiumStep
from rlbuf_td.storages.checks import whole
from rlbuf_td.storages.writes import TakenLane

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer


class Lane:
    """One lane of a buffer ``[T, E]``, for one actor in a thread or, after
    ``rb.share()``, in a process.

    ``rb.lane(e)`` makes it. Lanes advance alone: an actor that is ahead waits for no
    other, and steps that actors write at the same time do not end each other's
    trajectories. A process that is killed while it writes loses at most that write.

    The first write of a handle begins an episode, because its environment does not go
    on where that of an earlier actor stopped. So does the first write of each process
    that inherits or receives a handle. Make one handle per actor, and keep it.
    ``GymnasiumRecorder(rb.lane(e), env)`` records a Gymnasium environment, and
    ``PettingZooRecorder`` one of several agents; a loop of one's own writes with
    :meth:`add_step`.

    Cost: that of ``rb.extend(..., lanes=e)``, or of :meth:`~rlbuf_td.ReplayBuffer.add_step`.

    Example:
        >>> import torch
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(20, ndim=2, lanes=2), batch_size=4)
        >>> step = TensorDict({"x": torch.zeros(()), "next": {"done": torch.zeros(1, dtype=torch.bool)}})
        >>> first, second = rb.lane(0), rb.lane(1)
        >>> _ = first.add(step), first.add(step), second.add(step)
        >>> len(first), len(second), len(rb)
        (2, 1, 3)
        >>> first.last(2).batch_size
        torch.Size([2])
    """

    def __init__(self, buffer: ReplayBuffer, lane: int) -> None:
        storage = buffer.storage
        if storage.ndim != 2:
            raise ValueError(
                f"lanes are those of a PackedStorage(max_size, ndim=2), this one has ndim={storage.ndim}"
            )
        lanes = storage.lane_count
        if lanes is None:
            reason = "the number of lanes is not known before the first write"
            raise ValueError(
                f"{reason}: give it, PackedStorage(max_size, ndim=2, lanes=E)"
            )
        self.buffer = buffer
        self.number = whole(0)("lane", lane)
        # the id of the process in which this handle has written; 0: none
        self._process = 0
        if self.number >= lanes:
            raise IndexError(f"lane {lane} is out of range: lanes are 0 to {lanes - 1}")

    def add(self, data: TensorDictBase, *columns: object) -> int | None:
        """Write one transition, ``[]``; return its time step, or None if a transform
        holds it back. Errors: those of :meth:`~rlbuf_td.ReplayBuffer.add`."""
        if columns:
            writing.refuse_columns(data, *columns, buffer="rb.lane(e)")
        index = self.extend(data.unsqueeze(0))
        return int(index[0, 0]) if len(index) else None

    def extend(self, data: TensorDictBase) -> torch.Tensor:
        """Write ``[n]`` transitions in time order; return their index, ``[n, 2]``."""
        has_written = self._process == os.getpid()
        lane = self.number if has_written else TakenLane(self.number)
        index = self.buffer.extend(data, lanes=lane)
        self._process = os.getpid()
        return index

    def add_step(
        self,
        *,
        observation: Any,
        action: Any,
        reward: Any,
        next_observation: Any,
        terminated: Any,
        truncated: Any,
        **extras: Any,
    ) -> None:
        """Write one step of a Gymnasium environment.

        Arguments and errors: those of :meth:`~rlbuf_td.ReplayBuffer.add_step`.
        """
        outcome = reward, next_observation, terminated, truncated
        step = GymnasiumStep(observation, action, *outcome, extras)
        begins = self._process != os.getpid()
        self.buffer.write_loop_step(step, self.number, begins)
        self._process = os.getpid()

    def __len__(self) -> int:
        """Return the number of stored transitions of this lane."""
        storage = self.buffer.storage
        return int(storage.ring.count[self.number]) if len(storage) else 0

    def chronological(self) -> TensorDictBase:
        """Return a copy of the lane's transitions, transformed and oldest first,
        ``[n]``. Errors: see :meth:`last`."""
        return self.last(None)

    def last(self, n: int | None) -> TensorDictBase:
        """Return a copy of the newest ``n`` transitions of this lane, transformed and
        oldest first, ``[n]``.

        Raises:
            ValueError: ``n`` is below 1, or above the number of stored transitions.
            RuntimeError: the lane is empty.
        """
        return self.buffer._newest(n, self.number)

    def __repr__(self) -> str:
        return f"Lane({self.number}, rows={len(self)})"
