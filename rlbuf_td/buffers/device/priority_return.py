"""TD errors on their way from a device to the priorities of rows in host memory."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import torch


class WritePriorities(Protocol):
    """Updates the priorities of a buffer, except of rows that have been replaced since ``sampled_at``."""

    def __call__(self, index: torch.Tensor, td_error: torch.Tensor, sampled_at: torch.Tensor | None, dims: int) -> None:
        """Update priorities; ``dims`` is the number of batch dims of ``sampled_at``."""


class _Copied(NamedTuple):
    """The TD errors of one update, in host memory once ``arrived`` has happened."""

    tensors: tuple[torch.Tensor, ...]  # the index, the errors, and perhaps when the rows were sampled
    dims: int
    arrived: torch.cuda.Event | None


class PriorityReturn:
    """A queue of priority updates, each copied from a device without waiting for it.

    Args:
        device: where TD errors come from.
        write: updates the priorities.
    """

    def __init__(self, device: torch.device, write: WritePriorities) -> None:
        self._device, self._write = device, write
        # Made with the first copy. A stream apart from that of the batches, which would wait for the errors otherwise.
        self._stream: torch.cuda.Stream | None = None
        self._queue: deque[_Copied] = deque()

    def start(self, index: torch.Tensor, td_error: torch.Tensor, sampled_at: torch.Tensor | None, dims: int) -> None:
        """Begin to copy one update to the host."""
        tensors = (index, td_error) if sampled_at is None else (index, td_error, sampled_at)
        if self._device.type != "cuda":
            self._queue.append(_Copied(tuple(each.to("cpu", copy=True) for each in tensors), dims, None))
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            hosts = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors)
            for host, each in zip(hosts, tensors, strict=True):
                host.copy_(each, non_blocking=True)
                if each.is_cuda:
                    each.record_stream(self._stream)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        self._queue.append(_Copied(hosts, dims, arrived))

    def finish(self, left: int = 0) -> None:
        """Wait for updates and write their priorities, oldest first, until ``left`` are on their way.

        Raises:
            ValueError: an error is NaN or infinite; this update is left out.
        """
        while len(self._queue) > left:
            (index, td_error, *sampled_at), dims, arrived = self._queue.popleft()
            if arrived is not None:
                arrived.synchronize()
            self._write(index, td_error, sampled_at[0] if sampled_at else None, dims)
