"""Prefetching: the ``prefetch`` and ``device`` arguments of a :class:`~rlbuf_td.ReplayBuffer`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from operator import is_
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import SamplerWithoutReplacement, Storage

from rlbuf_td.buffers.parts import Parts
from rlbuf_td.storages.indexing import device_of, flat_rows
from rlbuf_td.storages.notebooks import GPU
from rlbuf_td.storages.torchrl_parts import empty_part, generator_of
from rlbuf_td.storages.write_clock import BY_ROW, SAMPLED_AT

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

Sample: TypeAlias = tuple[TensorDictBase, dict[Any, Any]]  # a batch and the sampler's report

_SLOW = 1e-3  # transforms that take more seconds per batch run in threads; handing over a batch costs half of this


class _Batch(NamedTuple):
    """A batch drawn ahead; ``sample`` is a Future if a thread transforms the batch."""

    sample: Sample | Future[Sample]
    arrived: torch.cuda.Event | None  # recorded after the copy to a GPU
    drawn_at: int  # the storage's write clock at the draw
    place: Any  # with ``device``: where the sampler stood before the draw, if it never draws a row twice
    index: Any  # of its rows

    def is_overwritten(self, storage: Any) -> bool:
        """Whether all its rows have been overwritten since the draw."""
        clock, rows = storage.clock, storage.all_rows()
        if clock.since(self.drawn_at) < rows.steps or not clock.numbers[BY_ROW]:
            return clock.since(self.drawn_at) >= rows.steps
        flat = flat_rows(self.index, storage, storage.device)
        return int(clock.skip_rewritten(flat, torch.full_like(flat, self.drawn_at), rows.shape)[1]) == len(flat)

    def result(self) -> Sample:
        return self.sample.result() if isinstance(self.sample, Future) else self.sample


class Prefetcher:
    """Draws ``ahead`` batches before they are requested, in the requesting thread: equal seeds give equal batches."""

    def __init__(self, buffer: ReplayBuffer, device: torch.device | None, ahead: int) -> None:
        if ahead < 0:
            raise ValueError(f"prefetch must be at least 0, got {ahead}")
        self.device, self.ahead = device, ahead
        self._buffer = buffer
        self._batches: deque[_Batch] = deque()
        #: Queued priority updates, each with the event after which its TD errors are on the host.
        self._errors: deque[tuple[Any, torch.cuda.Event | None]] = deque()
        self._drawn_from: tuple[Any, ...] = ()
        self._seconds, self._is_slow = 0.0, False  # duration of the last transforms; whether the last two were slow
        self._stream: torch.cuda.Stream | None = None  # created with the first copy, so that unpickling needs no GPU

    def __reduce__(self) -> Any:
        """Pickle the settings only, because the buffer saves the batches drawn ahead."""
        return type(self), (self._buffer, self.device, self.ahead)

    def copies_from(self, storage: Storage) -> bool:
        """Whether batches are copied to ``device``: not if ``device`` is None, or is the GPU that holds the rows."""
        if self.device is None:
            return False
        rows = device_of(storage)
        is_there = self.device.type == rows.type and self.device.index in (None, rows.index)
        return self.device.type == "cpu" or not is_there

    def refuse_other_parts(self, parts: Parts) -> None:
        """Raise a TypeError if the storage and the sampler do not support copying batches to ``device``."""
        if self.copies_from(parts.storage) and not (parts.draws and device_of(parts.storage).type == "cpu"):
            raise TypeError(
                "device= needs a PackedStorage on the CPU and a sampler of this package or one with draw(), got "
                f"{type(parts.storage).__name__} on {device_of(parts.storage)} and {type(parts.sampler).__name__} "
                f"(and no collate_fn, sample unit or tracked generations){GPU}"
            )

    def take(self, batch_size: int, prefetch: bool) -> Sample:
        """Return the oldest batch that was drawn ahead; without ``prefetch``, draw a new batch."""
        with self._buffer._futures_lock:
            self._drop_outdated()
            if not prefetch:
                return self.receive(self.send(batch_size))
            while len(self._batches) <= self.ahead and not (self._batches and self._buffer.sampler.ran_out):
                self._batches.append(self.send(batch_size))
            return self.receive(self._batches.popleft())

    @property
    def has_batches(self) -> bool:
        with self._buffer._futures_lock:
            self._drop_outdated()
            return bool(self._batches)

    def drop(self) -> None:
        self._drawn_from = ()

    def _drop_outdated(self, is_drawn: bool = False) -> None:
        """Drop batches that must not be served; ``is_drawn``: after a draw whose batch is kept."""
        storage, sampler = self._buffer.storage, self._buffer.sampler
        transforms = self._buffer.parts.transforms
        now = getattr(sampler, "begun", None), storage, storage.rows, sampler, generator_of(sampler), *transforms
        is_same = len(now) == len(self._drawn_from) and all(map(is_, now[1:], self._drawn_from[1:]))
        if not is_same or now[0] is not self._drawn_from[0]:
            if is_same and not is_drawn and self._batches and hasattr(sampler, "return_fresh"):  # of older epochs
                sampler.return_fresh(self._batches[0].place)
            self._batches.clear()
            self._drawn_from = now
        while self._batches and self._batches[0].is_overwritten(storage):
            self._batches.popleft()

    def send(self, batch_size: int) -> _Batch:  # the caller holds the buffer's ``_futures_lock``
        """Draw a batch, and start to copy or transform it."""
        buffer, device = self._buffer, self.device
        with buffer._locked():
            place_of = getattr(buffer.sampler, "place", None)
            place = None if device is None or place_of is None else place_of(buffer.storage)
            self.refuse_other_parts(buffer.parts)
            drawn_at = buffer.storage.clock.now
            batch, report = cast(Sample, buffer._draw(batch_size))  # not TorchRL's code, by `refuse_other_parts`
            index = report["index"]
            self._drop_outdated(is_drawn=True)  # a draw may start new epochs
        if device is None:
            work = partial(self._timed, batch, report)
            return _Batch(
                buffer._prefetch_executor.submit(work) if self._is_slow else work(), None, drawn_at, place, index
            )
        if device.type != "cuda":
            return _Batch((batch.to(device), report), None, drawn_at, place, index)
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            # torch reuses freed page-locked memory only after the copy from it is complete.
            there: Any = batch.apply(partial(_sent, device=self._stream.device), device=self._stream.device)
            return _Batch((there, report), self._stream.record_event(), drawn_at, place, index)

    def _timed(self, batch: TensorDictBase, report: dict[Any, Any]) -> Sample:
        start = perf_counter()
        sample = self._buffer._finish(batch, report)
        before, self._seconds = self._seconds, perf_counter() - start
        self._is_slow = min(before, self._seconds) > _SLOW
        return sample

    def receive(self, sent: _Batch) -> Sample:
        """Wait for a batch; if the buffer has a ``device``, transform the batch on the current CUDA stream."""
        batch, report = sent.result()
        if self.device is None:
            return batch, report
        if sent.arrived is not None:
            current = torch.cuda.current_stream(batch.device)
            current.wait_event(sent.arrived)
            for leaf in batch.values(True, True):
                leaf.record_stream(current)
            by_coordinates = isinstance(report["index"], tuple)
            report = {key: batch.get(key) for key in report}
            if by_coordinates:
                report["index"] = report["index"].unbind(-1)
        return self._buffer._finish(batch, report)

    def return_errors(
        self, index: torch.Tensor, td_error: torch.Tensor, sampled_at: torch.Tensor | None, dims: int
    ) -> bool:
        """Queue a priority update if its TD errors are on ``device``; return False if the caller must apply it."""
        with self._buffer._futures_lock:
            is_queued = self.device is not None and index.device.type == self.device.type
            if is_queued:
                given = index, td_error, sampled_at  # copied from a GPU to page-locked memory
                on_host = [None if x is None else x.to("cpu", non_blocking=True, copy=True) for x in given]
                arrived = torch.cuda.current_stream(index.device).record_event() if index.is_cuda else None
                self._errors.append(((*on_host, dims), arrived))
            self.flush(self.ahead if is_queued else 0)
        return is_queued

    def flush(self, left: int = 0) -> None:
        """Apply queued priority updates, oldest first, until ``left`` updates remain."""
        with self._buffer._futures_lock:
            while len(self._errors) > left:
                update, arrived = self._errors.popleft()
                if arrived is not None:
                    arrived.synchronize()
                self._buffer._write_priorities(*update)

    # -- state; the caller holds the buffer's ``_futures_lock``

    def settle(self) -> list[Sample]:
        """Apply all queued priority updates; return the batches drawn ahead or, with ``device``, drop them."""
        self.flush()
        self._drop_outdated()
        if self.device is not None:
            if self._batches and self._batches[0].place is not None:
                self._buffer.sampler.rewind(self._batches[0].place)
            self._batches.clear()
        return [batch.result() for batch in self._batches]

    def restore(self, samples: Iterable[Sample]) -> None:
        self.drop()
        self._drop_outdated()
        now = self._buffer.storage.clock.now
        self._batches.extend(_Batch(sample, None, now, None, sample[1]["index"]) for sample in samples)


def restamped(samples: Iterable[Sample], parts: Parts, sign: int) -> tuple[Sample, ...]:
    """Make ``"sampled_at"`` relative to the storage's clock with ``sign=-1``, and absolute again with ``sign=1``."""
    if not parts.is_stamped:
        return tuple(samples)
    return tuple(_restamped(*sample, sign * parts.storage.clock.now) for sample in samples)


def _restamped(batch: TensorDictBase, report: dict[Any, Any], by: int) -> Sample:
    report = report | {SAMPLED_AT: report[SAMPLED_AT] + by}
    return batch.copy().set(SAMPLED_AT, report[SAMPLED_AT]) if SAMPLED_AT in batch.keys() else batch, report


def _sent(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(leaf, pin_memory=True).copy_(leaf).to(device, non_blocking=True)


def forget_epochs(sampler: Any) -> None:
    """Begin new epochs, in which the rows of dropped batches are drawn again."""
    innermost = getattr(sampler, "innermost", sampler)
    if isinstance(innermost, SamplerWithoutReplacement):
        empty_part(innermost)
