"""From rows on the host to a learner on a device: what :meth:`ReplayBuffer.feed` returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rlbuf_td._tensordict import entries_of
from rlbuf_td.batches import merge_, one_a_row
from rlbuf_td.indices import coordinates
from rlbuf_td.staleness import SAMPLED_AT
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.layout import RowLayout

if TYPE_CHECKING:
    from rlbuf_td.buffers import ReplayBuffer


class _Sent(NamedTuple):
    """A batch on its way: its bytes on the device, and what the host knows of it."""

    block: torch.Tensor
    arrived: torch.cuda.Event | None
    storage: PackedStorage
    layout: RowLayout
    flat: torch.Tensor
    sampled_at: int
    weighted: bool


class _Learned(NamedTuple):
    """TD errors on their way back."""

    sent: _Sent
    td_error: torch.Tensor
    arrived: torch.cuda.Event | None


class DeviceFeed:
    """Batches of a buffer on the host, on a device; :meth:`ReplayBuffer.feed` makes it.

    A batch is gathered into pinned memory, rows packed as they are stored, with indices and importance weights behind
    them; one asynchronous copy takes all of it, and views are made anew on the device. Copies run on a stream of their
    own, ``ahead`` batches before they are asked for. Priorities come back the same way: they are applied when they have
    arrived, and rows that have been replaced meanwhile are left out. After another sampler or storage has been set, or
    a state loaded, batches are drawn anew. One thread uses a feed; others may write.

    Args:
        buffer: over a :class:`PackedStorage` on the CPU, without a wrapping sampler.
        device: where batches are wanted.
        batch_size: rows a batch.
        ahead: how many batches are drawn before they are asked for: their priorities are so many steps old.
    """

    def __init__(self, buffer: ReplayBuffer, device: torch.device, batch_size: int, ahead: int) -> None:
        if ahead < 0:
            raise ValueError(f"ahead must be at least 0, got {ahead}")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self.batch_size, self.ahead = device, batch_size, ahead
        self._buffer = buffer
        self._sent: deque[_Sent] = deque()
        self._parts: tuple[Any, ...] = ()
        self._checked()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._given: deque[tuple[Any, _Sent]] = deque(maxlen=ahead + 8)
        self._learned: deque[_Learned] = deque()

    def sample(self) -> TensorDictBase:
        """Return a batch on the device, as fresh memory; waits for a copy only if it was not asked for ahead."""
        self._apply_what_has_arrived()
        self._checked()
        while len(self._sent) <= self.ahead:
            self._sent.append(self._send())
        return self._unpacked(self._sent.popleft())

    def _checked(self) -> PackedStorage:
        """Return the storage; forget what has been sent from other memory, or by another sampler.

        Raises:
            TypeError: the buffer's parts are not such as a feed takes.
        """
        buffer = self._buffer
        if not buffer._initialized:
            buffer._init()
        storage, sampler = buffer._storage, buffer._sampler
        if not buffer._is_direct or buffer._wrapper is not None or storage.device.type != "cpu":
            raise TypeError(
                f"a feed takes rows of a PackedStorage on the CPU and a sampler that wraps none, got {storage} "
                f"and {type(sampler).__name__}"
            )
        parts = storage, sampler, storage._rows
        if len(self._parts) != len(parts) or any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            self._sent.clear()
            self._parts = parts
        return storage

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            yield self.sample()

    def update_tensordict_priority(self, batch: TensorDictBase) -> None:
        """Take the TD errors of a batch of this feed back to the host; nobody waits for them.

        Raises:
            KeyError: there are no TD errors in the batch, or it is none of the last few of this feed.
            ValueError: an error that has arrived is NaN or infinite (with the next call, for it is seen then).
        """
        buffer = self._buffer
        td_error, index = batch.get(buffer.priority_key, None), entries_of(batch).get("index")
        if td_error is None:
            raise KeyError(
                f"the batch has no {buffer.priority_key!r}: give it the TD errors of the rows that were sampled"
            )
        sent = next((sent for given, sent in self._given if given is index), None)
        if sent is None:
            raise KeyError(
                "this batch is none of the last few of this feed: rb.update_tensordict_priority(batch) waits for it"
            )
        if buffer._prioritized is None:
            return
        td_error = one_a_row(td_error, 1, buffer._prioritized.reduction)
        if self._stream is None:
            self._learned.append(_Learned(sent, td_error.clone(), None))
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                host = torch.empty(td_error.shape, dtype=td_error.dtype, pin_memory=True)
                host.copy_(td_error, non_blocking=True)
                td_error.record_stream(self._stream)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
            self._learned.append(_Learned(sent, host, arrived))
        self._apply_what_has_arrived()

    def flush(self) -> None:
        """Wait for all priorities that are on their way, and apply them."""
        while self._learned:
            if self._learned[0].arrived is not None:
                self._learned[0].arrived.synchronize()
            self._apply_what_has_arrived()

    def _apply_what_has_arrived(self) -> None:
        buffer, sampler = self._buffer, self._buffer._prioritized
        while (
            sampler is not None
            and self._learned
            and (self._learned[0].arrived is None or self._learned[0].arrived.query())
        ):
            sent, td_error, _ = self._learned.popleft()
            if sent.storage is not buffer._storage:  # these rows are in another one
                continue
            with buffer._replay_lock, buffer._write_lock:
                stamp = torch.full_like(sent.flat, sent.sampled_at)
                flat, stale = sent.storage.skip_rewritten(sent.flat, stamp)
                sampler.update_priority(flat, td_error, storage=sent.storage)
                buffer._stale_updates.add(stale)

    def _send(self) -> _Sent:
        """Draw a batch, gather it into pinned memory and begin to copy it."""
        buffer = self._buffer
        with buffer._replay_lock, buffer._write_lock:
            storage = self._checked()
            now = storage.clock.now
            flat, info = buffer._sampler.draw(storage, self.batch_size)
            buffer._note_draw(coordinates(flat, storage), info)
            rows = storage._written()
            host = self._slot(rows.layout)
            packed, places, weights = _split(host, rows.layout, self.batch_size)
            rows.pack_(flat, packed)
        places.copy_(flat)
        weight = info.get("priority_weight")
        if weight is not None:
            weights.copy_(weight)
        with self._beside():
            block = host.to(self.device, non_blocking=self._stream is not None, copy=True)
            arrived = torch.cuda.Event() if self._stream is not None else None
            if arrived is not None:
                arrived.record(self._stream)
        self._slots.append((host, arrived))
        return _Sent(block, arrived, storage, rows.layout, flat, now, weight is not None)

    def _unpacked(self, sent: _Sent) -> TensorDictBase:
        """Make views of what has arrived, on the stream that asks."""
        if sent.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.arrived)
            sent.block.record_stream(current)
        packed, places, weights = _split(sent.block, sent.layout, sent.flat.shape[0])
        batch = sent.layout.unpack(packed)
        info: dict[str, Any] = {"index": coordinates(places, sent.storage)}
        if sent.weighted:
            info |= {"priority_weight": weights, SAMPLED_AT: torch.full_like(places, sent.sampled_at)}
        merge_(batch, info)
        self._given.append((entries_of(batch).get("index"), sent))
        return self._buffer._transformed(batch)

    def _slot(self, layout: RowLayout) -> torch.Tensor:
        """Return pinned memory that nobody copies from any more."""
        size = self.batch_size * (layout.row_bytes + 8 + 4)
        while len(self._slots) > self.ahead:
            host, copied = self._slots.popleft()
            if copied is not None:
                copied.synchronize()
            if host.numel() == size:
                return host
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _split(block: torch.Tensor, layout: RowLayout, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return packed rows, flat indices and importance weights, as views of the bytes of a batch."""
    packed, places, weights = block.split([count * layout.row_bytes, count * 8, count * 4])
    rows = packed.view(layout.carrier).view(count, layout.row_bytes // layout.carrier.itemsize)
    return rows, places.view(torch.int64), weights.view(torch.float32)
