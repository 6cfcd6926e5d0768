"""From rows on the host to a learner on a device: what ``ReplayBuffer(device=...)`` and ``rb.feed`` are made of."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from operator import is_
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.device.held import Held
from rlbuf_td.buffers.device.packet import Drawn, Parcel, layout_of
from rlbuf_td.buffers.device.priority_return import Origin, ReturningErrors
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.batch_rows import merge_
from rlbuf_td.storages.indexing import coordinates, device_of
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.write_clock import SAMPLED_AT

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer


class _Sent(NamedTuple):
    """A batch on its way: its bytes on the device, and what the host knows of it."""

    block: torch.Tensor
    arrived: torch.cuda.Event | None
    parcel: Parcel
    origin: Origin


class DeviceFeed:
    """Batches of a buffer on the host, on a device; :meth:`ReplayBuffer.feed` makes it.

    A batch is gathered into pinned memory, rows packed as they are stored, with what the sampler reports behind them;
    one asynchronous copy takes all of it, and views are made anew on the device, where transforms then run. What a
    wrapping sampler revises is revised on the host and packed as a whole. Copies run on a stream of their own,
    ``ahead`` batches before they are asked for. On the CPU the same is done without copies and streams.

    Priorities come back the same way, on another stream. All but those of the last ``ahead`` updates are in place when
    an update returns. With ``ahead=0`` it waits, and batches and priorities are those of a plain buffer; else the
    device has ``ahead`` steps of time, and still the same program draws the same batches, however fast the device is.
    Rows that have been replaced meanwhile are left out.

    After another sampler or storage has been set, or a state loaded, batches are drawn anew, and likewise those of
    which no row is left. Threads may share a feed. The buffer's locks are held while rows are drawn and gathered, and
    never while a copy is waited for.

    Args:
        buffer: over a :class:`PackedStorage` on the CPU, and samplers of this package, or any with a ``draw``.
        device: where batches are wanted.
        batch_size: rows a batch.
        ahead: how many batches are drawn before they are asked for: their priorities are up to twice so many steps old.
    """

    def __init__(self, buffer: ReplayBuffer, device: torch.device, batch_size: int, ahead: int) -> None:
        if ahead < 0:
            raise ValueError(f"ahead must be at least 0, got {ahead}")
        self.device, self.batch_size, self.ahead = device, batch_size, ahead
        self.lock = RLock()
        self._buffer = buffer
        self._sent: deque[_Sent] = deque()
        self._resumed: list[Drawn] = []  # to be sent with the next batch
        self._parts: tuple[Any, ...] = (None,) * 4
        self._last: Parcel | None = None  # the next is mostly like it
        self._checked()
        self._stream: torch.cuda.Stream | None = None  # made with the first copy: a feed may wait where no GPU is
        self._slots: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._given: deque[tuple[weakref.ref[torch.Tensor], Origin]] = deque(maxlen=ahead + 8)
        self._returning = ReturningErrors(buffer, device)

    # -- batches

    def sample(self) -> TensorDictBase:
        """Return a batch on the device, as fresh memory; waits for a copy only if it was not asked for ahead."""
        return self.take(self.batch_size)[0]

    def take(self, batch_size: int) -> tuple[TensorDictBase, dict[Any, Any]]:
        """Return a batch of any size, with the sampler's report; one of another size than :attr:`batch_size` is new."""
        with self.lock:
            self._go_on()
            if batch_size != self.batch_size:
                sent = self._send(batch_size)
            else:
                if not self._sent:
                    self._sent.append(self._send(batch_size))
                while len(self._sent) <= self.ahead and not self._buffer._sampler.ran_out:
                    self._sent.append(self._send(batch_size))
                sent = self._sent.popleft()
            batch, info = self._unpacked(sent)
        return self._buffer._transformed(batch, info), info

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            yield self.sample()

    @property
    def has_ahead(self) -> bool:
        """Whether a batch has been drawn ahead."""
        with self.lock:
            self._go_on()
            return bool(self._sent)

    def _checked(self) -> PackedStorage:
        """Return the storage; forget what was drawn from other memory, by another sampler, or in epochs given up.

        Raises:
            TypeError: the buffer's parts are not such as a feed takes.
        """
        storage, sampler = fed_storage(self._buffer), self._buffer._sampler
        parts = storage, sampler, storage.rows, getattr(sampler, "begun", None)
        if not all(map(is_, parts, self._parts)):
            self._sent.clear()
            self._resumed.clear()
            self._parts, self._last = parts, None
        return storage

    def _go_on(self) -> None:
        """Send what was drawn before a load; forget batches of which no row can be left.

        They are gone when a ring has come round, or the buffer has been emptied.
        """
        storage = self._checked()
        for drawn in self._resumed:
            origin = Origin(storage, self._buffer._prioritized, drawn.flat, drawn.sampled_at)
            self._sent.append(self._copied(origin, *self._packed(drawn, self._idle())))
        self._resumed.clear()
        while self._sent and storage.clock.since(self._sent[0].origin.sampled_at) >= storage.all_rows().steps:
            self._sent.popleft()

    def _send(self, batch_size: int) -> _Sent:
        """Draw a batch, gather it into pinned memory and begin to copy it."""
        buffer, host = self._buffer, self._idle()
        with buffer._replay_lock, buffer._write_lock:
            storage, wrapper, now = fed_storage(buffer), buffer._wrapper, buffer._storage.clock.now
            rows: Any
            if wrapper is not None:
                flat, report, rows = wrapper.draw_batch(storage, batch_size)
            else:
                flat, report = buffer._sampler.draw(storage, batch_size)
                rows = storage.written_rows()
            self._checked()  # afterwards: a draw may begin new epochs
            buffer._note_draw(coordinates(flat, storage), report)
            drawn, origin = Drawn(flat, report, rows, now), Origin(storage, buffer._prioritized, flat, now)
            packed = self._packed(drawn, host) if wrapper is None else None
        return self._copied(origin, *(packed or self._packed(drawn, host)))

    def _packed(self, drawn: Drawn, host: torch.Tensor | None) -> tuple[Parcel, torch.Tensor]:
        """Pack what was drawn into ``host``, or if that is too small, into new memory."""
        rows, known = drawn.rows, None if self._last is None else self._last.layout
        layout, leaves = (rows.layout, []) if isinstance(rows, Rows) else layout_of(rows, known)
        self._last = parcel = Parcel.of(layout, drawn, self._last)
        if host is None or host.numel() < parcel.nbytes:
            host = torch.empty(parcel.nbytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        parcel.pack_(host[: parcel.nbytes], drawn, leaves)
        return parcel, host

    def _copied(self, origin: Origin, parcel: Parcel, host: torch.Tensor) -> _Sent:
        """Begin to copy a block to the device; on the CPU, where no memory is used again, it is there."""
        if not self._is_cuda:
            return _Sent(host.to(self.device), None, parcel, origin)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
            self.device = self._stream.device
        with torch.cuda.stream(self._stream):
            block = host[: parcel.nbytes].to(self.device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        self._slots.append((host, arrived))
        return _Sent(block, arrived, parcel, origin)

    def _idle(self) -> torch.Tensor | None:
        """Return pinned memory that nobody copies from any more; waits for the oldest copy."""
        if len(self._slots) <= self.ahead:
            return None
        host, copied = self._slots.popleft()
        copied.synchronize()
        return host

    def _unpacked(self, sent: _Sent) -> tuple[TensorDictBase, dict[Any, Any]]:
        """Make views of what has arrived, on the stream that asks."""
        self._await(sent)
        origin = sent.origin
        batch, flat, info = sent.parcel.unpack(sent.block)
        if origin.sampler is not None:
            info[SAMPLED_AT] = torch.full(flat.shape, origin.sampled_at, device=flat.device)
        info["index"] = coordinates(flat, origin.storage)
        merge_(batch, info)
        self._given.append((weakref.ref(entries_of(batch)["index"]), origin))
        return batch, info

    def _await(self, sent: _Sent) -> None:
        if sent.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.arrived)
            sent.block.record_stream(current)

    # -- priorities

    def update_tensordict_priority(self, batch: TensorDictBase) -> None:
        """Take the TD errors of a batch of this feed back to the host; it waits for those of ``ahead`` updates before.

        Raises:
            KeyError: there are no TD errors in the batch, or it is none of the last few of this feed.
            ValueError: an error that has arrived is NaN or infinite (with a later call, for it is seen then).
        """
        if not self.takes_back(batch):
            raise KeyError(
                "this batch is none of the last few of this feed: rb.update_tensordict_priority(batch) waits for it"
            )

    def takes_back(self, batch: TensorDictBase) -> bool:
        """Do so, or, if the batch is none of the last few of this feed, put all errors in place and return False."""
        buffer, index = self._buffer, entries_of(batch).get("index")
        with self.lock:
            origin = next((origin for given, origin in self._given if given() is index is not None), None)
            if origin is None:
                self._returning.settle()
                return False
            td_error = batch.get(buffer.priority_key, None)
            if td_error is None:
                raise KeyError(
                    f"the batch has no {buffer.priority_key!r}: give it the TD errors of the rows that were sampled"
                )
            self._returning.begin(origin, batch, td_error, index)
            self._returning.settle(self.ahead)
        return True

    def flush(self) -> None:
        """Wait for all priorities that are on their way, and put them in place."""
        with self.lock:
            self._returning.settle()

    # -- state

    def held(self) -> Held:
        """Return a copy of what has been drawn ahead, and of the errors that are not in place; waits for both."""
        drawn = list(self._resumed)
        for sent in self._sent:
            self._await(sent)
            rows, flat, report = sent.parcel.unpack(sent.block.to("cpu", copy=True))
            drawn.append(Drawn(flat, report, rows, sent.origin.sampled_at))
        return Held(drawn, self._returning.held())

    def resume(self, held: Held) -> None:
        """Go on with what another feed has :meth:`held`, of a buffer like this one; needs no GPU yet."""
        with self.lock:
            cells = self._checked().all_rows().cells  # what names others has not come from a feed
            self._resumed = [drawn for drawn in held.drawn if _are_among(drawn.flat, cells)]
            self._returning.resume([learned for learned in held.learned if _are_among(learned[0], cells)])


def _are_among(flat: torch.Tensor, cells: int) -> bool:
    return bool(((flat >= 0) & (flat < cells)).all())


def fed_storage(buffer: ReplayBuffer) -> PackedStorage:
    """Return the storage of a buffer whose parts are such as a feed takes.

    Raises:
        TypeError: they are not.
    """
    if not buffer._initialized:
        buffer._init()
    storage = buffer._storage
    if not buffer._is_direct or device_of(storage).type != "cpu":
        raise TypeError(
            "batches are fed to a device from a PackedStorage on the CPU, by samplers of this package or with a draw "
            f"of their own, got {type(storage).__name__} on {device_of(storage)} and {type(buffer._sampler).__name__} "
            "(nor with a collate_fn, a sample unit or tracked generations)"
        )
    return storage
