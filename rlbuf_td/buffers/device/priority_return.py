"""TD errors on their way from a device to the priorities of a buffer on the host."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch
from tensordict import TensorDictBase

from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.batch_rows import by_row
from rlbuf_td.storages.indexing import flat_rows

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer


class Origin(NamedTuple):
    """Where a batch comes from.

    Attributes:
        storage: its rows lie here.
        sampler: the prioritized one among those that drew it, if there is one.
        flat: its rows, ``[B]`` int64, on the host.
        sampled_at: the storage's clock when it was drawn.
    """

    storage: PackedStorage
    sampler: Prioritized | None
    flat: torch.Tensor
    sampled_at: int


class _Learned(NamedTuple):
    """TD errors on their way back, or there already."""

    origin: Origin
    index: torch.Tensor
    td_error: torch.Tensor
    arrived: torch.cuda.Event | None


class ReturningErrors:
    """TD errors in the order in which a learner gave them, each copied to the host without waiting for it.

    Args:
        buffer: whose priorities they become.
        device: where they come from.
    """

    def __init__(self, buffer: ReplayBuffer, device: torch.device) -> None:
        self._buffer, self._device = buffer, device
        # Made with the first copy. Not the stream of the batches, which would wait for the errors of the step before.
        self._stream: torch.cuda.Stream | None = None
        self._learned: deque[_Learned] = deque()

    def begin(self, origin: Origin, batch: TensorDictBase, td_error: torch.Tensor, index: torch.Tensor) -> None:
        """Begin to copy the errors of a batch, and, where they stand for other rows (windows do), which these are.

        Raises:
            TypeError: the errors are no real tensor.
            ValueError: they are not those of the batch.
        """
        sampler, wrapper = self._buffer._prioritized, self._buffer._wrapper
        if sampler is None or origin.storage is not self._buffer._storage:
            return
        td_error, index = by_row(td_error, index, batch.ndim, origin.storage, sampler.reduction)
        anchors = index
        if wrapper is not None:
            anchors, td_error = wrapper.anchored(batch, index, td_error)
        tensors = [td_error] if anchors is index else [td_error, anchors]
        (td_error, *others), arrived = self._copied(tensors)
        index = others[0] if others else origin.flat
        self._learned.append(_Learned(origin._replace(sampler=sampler), index, td_error, arrived))

    def _copied(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        if self._device.type != "cuda":
            return [each.to("cpu", copy=True) for each in tensors], None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            hosts = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
            for host, each in zip(hosts, tensors, strict=True):
                host.copy_(each, non_blocking=True)
                if each.is_cuda:
                    each.record_stream(self._stream)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        return hosts, arrived

    def settle(self, left: int = 0) -> None:
        """Wait for errors and make them priorities, the oldest first, until those of so many updates are ``left``.

        Raises:
            ValueError: one is NaN or infinite; those of this update are left out.
        """
        buffer = self._buffer
        while len(self._learned) > left:
            origin, index, td_error, arrived = self._learned.popleft()
            if arrived is not None:
                arrived.synchronize()
            storage, sampler = origin.storage, buffer._prioritized
            if storage is not buffer._storage or sampler is None or sampler is not origin.sampler:
                continue  # nobody draws from these priorities any more
            with buffer._replay_lock, buffer._write_lock:
                flat = flat_rows(index, storage, storage.device)
                flat, stale = storage.skip_rewritten(flat, torch.full_like(flat, origin.sampled_at))
                sampler.update_priority(flat, td_error, storage=storage)
                buffer._stale_updates.add(stale)

    def held(self) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Return copies of what is not in place: flat rows, errors, when they were drawn; waits for the errors."""
        held = []
        for origin, index, td_error, arrived in self._learned:
            if arrived is not None:
                arrived.synchronize()
            flat = flat_rows(index, origin.storage, origin.storage.device)
            held.append((flat.clone(), td_error.clone(), origin.sampled_at))
        return held

    def resume(self, held: list[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        """Go on with what another one has :meth:`held`, of a buffer like this one."""
        storage, sampler = self._buffer._storage, self._buffer._prioritized
        for flat, td_error, sampled_at in held:
            self._learned.append(_Learned(Origin(storage, sampler, flat, sampled_at), flat, td_error, None))
