"""Batches of rows in host memory for a learner on another device: what ``ReplayBuffer(device=...)`` uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import is_
from threading import RLock
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import Sampler

from rlbuf_td.buffers.device.packet import Packet, pack
from rlbuf_td.buffers.parts import Parts
from rlbuf_td.buffers.priorities import write_priorities
from rlbuf_td.storages.indexing import coordinates, device_of, merge_
from rlbuf_td.storages.write_clock import SAMPLED_AT

#: Updates the priorities of rows that still hold what was sampled: (index, td_error, sampled_at, its batch dims).
WritePriorities: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], None]


class HostBuffer(Protocol):
    """What the prefetcher needs of a buffer: :class:`ReplayBuffer`."""

    _parts: Parts
    stale_updates: Any

    def _locked(self) -> AbstractContextManager[None]:
        """Hold the buffer's locks."""

    def _note_draw(self, index: Any, info: dict[str, Any]) -> None:
        """Remember a draw."""

    @property
    def storage(self) -> Any:
        """Where the rows are."""

    @property
    def sampler(self) -> Sampler:
        """What draws them."""


class _Sent(NamedTuple):
    """A batch on its way to the device."""

    block: torch.Tensor
    arrived: torch.cuda.Event | None
    packet: Packet
    drawn_at: int  # the storage's write clock
    place: Any  # of a sampler with epochs, before the draw


class _Copied(NamedTuple):
    """The TD errors of one update, in host memory once ``arrived`` has happened."""

    tensors: tuple[torch.Tensor, ...]  # the index, the errors, and perhaps when the rows were sampled
    dims: int
    arrived: torch.cuda.Event | None


class _PriorityReturn:
    """A queue of priority updates, each copied from ``device`` without waiting for it, and written with ``write``."""

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
            hosts = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True, device="cpu") for each in tensors)
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


class DevicePrefetcher:
    """Copies batches of a buffer in host memory to a device, ``ahead`` batches before they are asked for.

    The host gathers a batch into pinned memory: packed rows, followed by the sampler's report. One asynchronous copy on
    a stream of its own takes all of it to the device, where the batch is made of views. Batches of a
    :class:`~rlbuf_td.samplers.wrapper.SamplerWrapper` are revised on the host. If the device is the CPU, there are
    neither copies nor streams.

    Batches drawn ahead are dropped, and new ones drawn, after another sampler or storage has been set, a state has been
    loaded, the buffer has been emptied, or the ring has been rewritten as a whole. Threads may share a prefetcher: it
    holds the buffer's locks while it draws and gathers, but never while it waits for a copy.

    Args:
        buffer: has a :class:`PackedStorage` on the CPU.
        device: where batches are wanted.
        ahead: how many batches are drawn before they are asked for. With 0, batches and priorities equal those of a
            buffer without ``device``.

    Raises:
        ValueError: ``ahead`` is negative.
    """

    def __init__(self, buffer: HostBuffer, device: torch.device, ahead: int) -> None:
        if ahead < 0:
            raise ValueError(f"prefetch must be at least 0, got {ahead}")
        self.device, self.ahead = device, ahead
        self._buffer = buffer
        self._lock = RLock()
        self._queue: deque[_Sent] = deque()
        self._drawn_from: tuple[Any, ...] = ()
        self._last: Packet | None = None
        self._stream: torch.cuda.Stream | None = None  # made with the first copy: unpickling needs no GPU
        self._pinned: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # blocks, and when they may be overwritten
        self._returned = _PriorityReturn(device, partial(write_priorities, buffer))

    def __reduce__(self) -> Any:
        """Pickle the settings: batches drawn ahead are dropped by :meth:`paused` before."""
        return type(self), (self._buffer, self.device, self.ahead)

    def copies_from(self, storage: Any) -> bool:
        """Whether rows of a storage have to be copied: not if they are on the wanted GPU already."""
        rows = device_of(storage)
        is_there = self.device.type == rows.type and self.device.index in (None, rows.index)
        return self.device.type == "cpu" or not is_there

    def refuse_other_parts(self, parts: Parts) -> None:
        """Refuse parts whose batches cannot be copied to the device.

        Raises:
            TypeError: see above.
        """
        if self.copies_from(parts.storage) and not (parts.draws and device_of(parts.storage).type == "cpu"):
            raise TypeError(
                "device= needs a PackedStorage on the CPU and a sampler of this package or with a draw of its own, got "
                f"{type(parts.storage).__name__} on {device_of(parts.storage)} and {type(parts.sampler).__name__} "
                "(nor does it take a collate_fn, a sample unit or tracked generations)"
            )

    # -- batches

    def take(self, batch_size: int, prefetch: bool) -> tuple[TensorDictBase, dict[Any, Any]]:
        """Return a batch on the device, as fresh memory, and the sampler's report.

        Args:
            batch_size: number of rows.
            prefetch: take a batch drawn ahead, and draw others. ``False``: draw this one, leave those drawn ahead.
        """
        with self._lock:
            self._drop_outdated()
            if not prefetch:
                return self._receive(self._send(batch_size))
            if not self._queue:
                self._queue.append(self._send(batch_size))
            while len(self._queue) <= self.ahead and not self._buffer.sampler.ran_out:
                self._queue.append(self._send(batch_size))
            return self._receive(self._queue.popleft())

    @property
    def has_batches(self) -> bool:
        """Whether a batch has been drawn ahead."""
        with self._lock:
            self._drop_outdated()
            return bool(self._queue)

    def drop(self) -> None:
        """Drop what was drawn ahead, before the next draw."""
        self._drawn_from = ()

    def _drop_outdated(self) -> None:
        storage, sampler = self._buffer.storage, self._buffer.sampler
        now = storage, storage.rows, sampler, getattr(sampler, "begun", None)
        if len(now) != len(self._drawn_from) or not all(map(is_, now, self._drawn_from)):
            self._queue.clear()
            self._drawn_from, self._last = now, None
        while self._queue and storage.clock.since(self._queue[0].drawn_at) >= storage.all_rows().steps:
            self._queue.popleft()

    def _send(self, batch_size: int) -> _Sent:
        """Draw a batch, gather it into pinned memory and begin to copy it."""
        host, is_cuda, sampler = self._reusable(), self.device.type == "cuda", self._buffer.sampler
        place = None if getattr(sampler, "begun", None) is None else sampler.snapshot()
        with self._buffer._locked():
            parts = self._buffer._parts
            self.refuse_other_parts(parts)
            storage, rows = parts.storage, None
            drawn_at = storage.clock.now
            if parts.draws == "draw_batch":
                flat, report, rows = parts.sampler.draw_batch(storage, batch_size)
            else:
                flat, report = parts.sampler.draw(storage, batch_size)
            self._buffer._note_draw(coordinates(flat, storage), report)
            if parts.is_stamped:
                report[SAMPLED_AT] = storage.clock.stamp(drawn_at, flat.shape[0], flat.device)
            self._drop_outdated()  # a draw may begin new epochs
            packet, block = pack(
                flat, report, storage.written_rows() if rows is None else rows, self._last, host, is_cuda
            )
            self._last = packet
        if not is_cuda:
            return _Sent(block.to(self.device), None, packet, drawn_at, place)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
            self.device = self._stream.device
        with torch.cuda.stream(self._stream):
            copied = block[: packet.nbytes].to(self.device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        self._pinned.append((block, arrived))
        return _Sent(copied, arrived, packet, drawn_at, place)

    def _reusable(self) -> torch.Tensor | None:
        """Return pinned memory whose copy has finished, after waiting for the oldest one if ``ahead`` are in use."""
        if len(self._pinned) <= self.ahead:
            return None
        host, copied = self._pinned.popleft()
        copied.synchronize()
        return host

    def _receive(self, sent: _Sent) -> tuple[TensorDictBase, dict[Any, Any]]:
        """Make a batch of what has been sent, on the current stream."""
        if sent.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.arrived)
            sent.block.record_stream(current)
        batch, report = sent.packet.unpack(sent.block)
        report["index"] = coordinates(report["index"], self._buffer.storage)
        merge_(batch, report)
        return batch, report

    # -- priorities

    def return_errors(
        self, index: torch.Tensor, td_error: torch.Tensor, sampled_at: torch.Tensor | None, dims: int
    ) -> bool:
        """Queue TD errors that are on the device; if they are elsewhere, write the queued ones and return False.

        All but those of the last ``ahead`` updates are written when this returns.

        Raises:
            ValueError: an error that has arrived is NaN or infinite, perhaps one of an earlier update.
        """
        with self._lock:
            is_queued = index.device.type == self.device.type
            if is_queued:
                self._returned.start(index, td_error, sampled_at, dims)
            self._returned.finish(self.ahead if is_queued else 0)
        return is_queued

    def flush(self) -> None:
        """Wait for all TD errors on their way, and write the priorities."""
        with self._lock:
            self._returned.finish()

    # -- state

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Write all priorities, drop the batches drawn ahead, and draw no others meanwhile.

        A sampler with epochs goes back to where the dropped batches began: it draws those rows again.
        """
        with self._lock:
            self._returned.finish()
            self._drop_outdated()
            if self._queue and self._queue[0].place is not None:
                self._buffer.sampler.rewind(self._queue[0].place)
            self._queue.clear()
            yield
