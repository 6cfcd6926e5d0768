"""Batches of rows in host memory for a learner on another device: what ``ReplayBuffer(device=...)`` uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from threading import RLock
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.device.packet import Packet, pack
from rlbuf_td.buffers.parts import BufferOfParts, Parts
from rlbuf_td.buffers.priorities import write_priorities
from rlbuf_td.storages.indexing import coordinates, device_of, merge_
from rlbuf_td.storages.write_clock import SAMPLED_AT


class _Batch(NamedTuple):
    """A batch on its way to the device, there once ``arrived`` has happened."""

    block: torch.Tensor
    arrived: torch.cuda.Event | None
    packet: Packet
    drawn_at: int  # the storage's write clock
    place: Any  # of a sampler with epochs, before the draw


class DevicePrefetcher:
    """Copies batches of a buffer in host memory to a device, ``ahead`` batches before they are asked for.

    The host packs a batch, and the sampler's report, into page-locked memory; one asynchronous copy on a stream of its
    own takes it to the device, where the batch is made of views. If the device is the CPU, there are neither copies nor
    streams. With ``ahead=0``, batches and priorities equal those of a buffer without ``device``.

    Batches drawn ahead are dropped, and new ones drawn, after another sampler or storage has been set, a state has been
    loaded, the buffer has been emptied, or the ring has been rewritten as a whole. Threads may share a prefetcher: it
    holds the buffer's locks while it draws and packs, but never while it waits for a copy.
    """

    def __init__(self, buffer: BufferOfParts, device: torch.device, ahead: int) -> None:
        if ahead < 0:
            raise ValueError(f"prefetch must be at least 0, got {ahead}")
        self.device, self.ahead = device, ahead
        self._buffer = buffer
        self._lock = RLock()
        self._batches: deque[_Batch] = deque()
        self._errors: deque[tuple[Any, torch.cuda.Event | None]] = deque()  # updates, and their arrival
        self._drawn_from: tuple[Any, ...] = ()
        self._last: Packet | None = None
        self._stream: torch.cuda.Stream | None = None  # made with the first copy: unpickling needs no GPU

    def __reduce__(self) -> Any:
        """Pickle the settings: batches drawn ahead are dropped by :meth:`paused` before."""
        return type(self), (self._buffer, self.device, self.ahead)

    def copies_from(self, storage: Any) -> bool:
        """Whether rows of a storage have to be copied: not if they are on the wanted GPU already."""
        rows = device_of(storage)
        is_there = self.device.type == rows.type and self.device.index in (None, rows.index)
        return self.device.type == "cpu" or not is_there

    def refuse_other_parts(self, parts: Parts) -> None:
        """Refuse parts whose batches cannot be copied to the device (TypeError)."""
        if self.copies_from(parts.storage) and not (parts.draws and device_of(parts.storage).type == "cpu"):
            raise TypeError(
                "device= needs a PackedStorage on the CPU and a sampler of this package or with a draw of its own, got "
                f"{type(parts.storage).__name__} on {device_of(parts.storage)} and {type(parts.sampler).__name__} "
                "(nor does it take a collate_fn, a sample unit or tracked generations)"
            )

    # -- batches

    def take(self, batch_size: int, prefetch: bool) -> tuple[TensorDictBase, dict[Any, Any]]:
        """Return a batch on the device, as fresh memory, and the sampler's report.

        With ``prefetch`` it is one drawn ahead, and others are drawn; else it is drawn now, and those are left.
        """
        with self._lock:
            self._drop_outdated()
            if not prefetch:
                return self._receive(self._send(batch_size))
            if not self._batches:
                self._batches.append(self._send(batch_size))
            while len(self._batches) <= self.ahead and not self._buffer.sampler.ran_out:
                self._batches.append(self._send(batch_size))
            return self._receive(self._batches.popleft())

    @property
    def has_batches(self) -> bool:
        """Whether a batch has been drawn ahead."""
        with self._lock:
            self._drop_outdated()
            return bool(self._batches)

    def drop(self) -> None:
        """Drop what was drawn ahead, before the next draw."""
        self._drawn_from = ()

    def _drop_outdated(self) -> None:
        storage, sampler = self._buffer.storage, self._buffer.sampler
        now = storage, storage.rows, sampler, getattr(sampler, "begun", None)
        if len(now) != len(self._drawn_from) or not all(map(is_, now, self._drawn_from)):
            self._batches.clear()
            self._drawn_from, self._last = now, None
        while self._batches and storage.clock.since(self._batches[0].drawn_at) >= storage.all_rows().steps:
            self._batches.popleft()

    def _send(self, batch_size: int) -> _Batch:
        """Draw a batch, pack it in host memory and begin to copy it."""
        sampler, is_cuda = self._buffer.sampler, self.device.type == "cuda"
        place = None if getattr(sampler, "begun", None) is None else sampler.snapshot()
        with self._buffer._locked():
            parts = self._buffer._parts
            self.refuse_other_parts(parts)
            storage = parts.storage
            drawn_at = storage.clock.now
            flat, report, rows = parts.draw(batch_size, lambda _: storage.written_rows())
            self._buffer._note_draw(coordinates(flat, storage), report)
            if parts.is_stamped:
                report[SAMPLED_AT] = storage.clock.stamp(drawn_at, flat.shape[0], flat.device)
            self._drop_outdated()  # a draw may begin new epochs
            # Page-locked memory that is given up is used again once its copy is complete.
            packet, host = pack(flat, report, rows, self._last, pin_memory=is_cuda)
            self._last = packet
        if not is_cuda:
            return _Batch(host.to(self.device), None, packet, drawn_at, place)
        self._stream = self._stream or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            block = host.to(self._stream.device, non_blocking=True)
            return _Batch(block, self._stream.record_event(), packet, drawn_at, place)

    def _receive(self, sent: _Batch) -> tuple[TensorDictBase, dict[Any, Any]]:
        """Make a batch of what has been sent, on the current stream."""
        if sent.arrived is not None:
            current = torch.cuda.current_stream(sent.block.device)
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

        All but those of the last ``ahead`` updates are written when this returns, as by :meth:`flush`.
        """
        with self._lock:
            is_queued = index.device.type == self.device.type
            if is_queued:
                given = index, td_error, sampled_at  # from a GPU, into page-locked memory
                on_host = [None if x is None else x.to("cpu", non_blocking=True, copy=True) for x in given]
                arrived = torch.cuda.current_stream(index.device).record_event() if index.is_cuda else None
                self._errors.append(((*on_host, dims), arrived))
            self.flush(self.ahead if is_queued else 0)
        return is_queued

    def flush(self, left: int = 0) -> None:
        """Wait for TD errors and write their priorities, oldest first, but for the last ``left`` updates.

        Raises:
            ValueError: an error is NaN or infinite; this update is left out.
        """
        with self._lock:
            while len(self._errors) > left:
                update, arrived = self._errors.popleft()
                if arrived is not None:
                    arrived.synchronize()
                write_priorities(self._buffer, *update)

    # -- state

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Write all priorities, drop the batches drawn ahead, and draw no others meanwhile.

        A sampler with epochs goes back to where the dropped batches began: it draws those rows again.
        """
        with self._lock:
            self.flush()
            self._drop_outdated()
            if self._batches and self._batches[0].place is not None:
                self._buffer.sampler.rewind(self._batches[0].place)
            self._batches.clear()
            yield
