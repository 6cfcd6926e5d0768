"""Prefetching: the ``prefetch`` and ``device`` arguments of a
:class:`~rlbuf_td.ReplayBuffer`."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from functools import partial
from operator import is_
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.parts import Parts
from rlbuf_td.buffers.permission import NotAdmitted, Permission
from rlbuf_td.storages.indexing import Info, device_of
from rlbuf_td.storages.listeners import WeakReference
from rlbuf_td.storages.lock import defer_sigint
from rlbuf_td.storages.torchrl_parts import generator_of

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import Sampler

    from rlbuf_td.buffers.replay import ReplayBuffer

Sample: TypeAlias = tuple[TensorDictBase, Info]  # a batch and the sampler's report

# transforms that take more seconds per batch run in threads; handing over a batch costs
# half of this
_SLOW = 1e-3


class _Batch(NamedTuple):
    """A batch drawn ahead."""

    sample: Sample | Future[Sample]  # a Future if a thread transforms the batch
    # the number of rows ever written to each lane at the draw, ``[E]``
    written: np.ndarray
    progress: Any  # the sampler's before the draw, if it hands out each row once

    def result(self) -> Sample:
        return self.sample.result() if isinstance(self.sample, Future) else self.sample


class Prefetcher:
    """Draws ``ahead`` batches before they are requested, in the requesting thread:
    equal seeds give equal batches.

    Slow transforms, with the copy to ``device`` before them, run in threads. Callers
    hold the buffer's ``_futures_lock``.
    """

    def __init__(self, buffer: ReplayBuffer, ahead: int) -> None:
        if ahead < 0:
            raise ValueError(f"prefetch must be at least 0, got {ahead}")
        self.ahead = ahead
        self._owner = WeakReference(buffer)
        self._batches: deque[_Batch] = deque()
        # the parts from which the batches were drawn
        self._drawn_from: tuple[Any, ...] = ()
        # duration of the last transforms; whether the last two were slow
        self._seconds, self._is_slow = 0.0, False

    def __reduce__(self) -> Any:
        """Pickle the settings only: a copy draws anew."""
        return type(self), (self._buffer, self.ahead)

    @property
    def _buffer(self) -> Any:
        return self._owner()

    def take(self, batch_size: int, permission: Permission | None) -> Sample:
        """Return the oldest batch that was drawn ahead, and draw until there are
        ``ahead`` others, as long as each has a ``permission``."""
        self._drop_outdated()
        while len(self._batches) <= self.ahead and not (
            self._batches and self._buffer.sampler.ran_out
        ):
            try:
                self._batches.append(self._draw(batch_size, permission))
            except NotAdmitted:
                if not self._batches:
                    raise
                break
        return self._batches.popleft().result()

    def _draw(self, batch_size: int, permission: Permission | None) -> _Batch:
        """Draw a batch, and transform it or let a thread transform it."""
        buffer, storage = self._buffer, self._buffer.storage
        with buffer._locked():
            progress = getattr(buffer.sampler, "progress", None)
            written = storage.ring.written.copy()
            batch, report = buffer._drawn(batch_size, permission)
            self._drop_outdated(is_drawn=True)  # a draw may start new epochs
        finish = partial(self._finish, buffer, batch, report)
        sample = buffer._prefetch_executor.submit(finish) if self._is_slow else finish()
        return _Batch(sample, written, progress)

    def _finish(
        self, buffer: ReplayBuffer, batch: TensorDictBase, report: Info
    ) -> Sample:
        start = perf_counter()
        sample = buffer._finish(batch, report)
        before, self._seconds = self._seconds, perf_counter() - start
        self._is_slow = min(before, self._seconds) > _SLOW
        return sample

    @property
    def has_batches(self) -> bool:
        with self._buffer._futures_lock:
            self._drop_outdated()
            return bool(self._batches)

    def drop(self) -> None:
        """Drop all batches at the next call, because rows or parts of the buffer are
        replaced."""
        self._drawn_from = ()

    @defer_sigint
    def take_back(self) -> None:
        """Drop all batches; a sampler that hands out each row once hands out their rows
        again."""
        if self._batches and self._batches[0].progress is not None:
            self._buffer.sampler.progress = self._batches[0].progress
        self._batches.clear()

    def _drop_outdated(self, is_drawn: bool = False) -> None:
        """Drop batches that must not be served; ``is_drawn``: after a draw whose batch
        is kept."""
        storage, sampler = self._buffer.storage, self._buffer.sampler
        transforms = self._buffer.parts.transforms
        now = (
            getattr(sampler, "begun", None),
            storage,
            storage.rows,
            sampler,
            generator_of(sampler),
            *transforms,
        )
        is_same = len(now) == len(self._drawn_from) and all(
            map(is_, now[1:], self._drawn_from[1:])
        )
        if not is_same or now[0] is not self._drawn_from[0]:
            if is_same and not is_drawn:
                self.take_back()  # the batches are of older epochs
            self._batches.clear()
            self._drawn_from = now
        # all its rows are overwritten
        while self._batches and (storage.ring.tail >= self._batches[0].written).all():
            self._batches.popleft()


def copied(sample: Sample, device: torch.device | None) -> Sample:
    """Return a batch and its report on another device."""
    batch, report = sample
    return batch.to(device), {  # pyrefly: ignore [bad-return]
        key: tuple(part.to(device) for part in value)
        if isinstance(value, tuple)
        else value.to(device)
        for key, value in report.items()
    }


def refuse_copies(parts: Parts) -> None:
    """Raise a TypeError if the storage and the sampler do not support copying batches
    to a ``device``."""
    if parts.is_general or device_of(parts.storage).type != "cpu":
        raise TypeError(
            "device= needs a PackedStorage on the CPU and a sampler of this package or one with draw(), got "
            f"{type(parts.storage).__name__} on {device_of(parts.storage)} and {type(parts.sampler).__name__} "
            f"(and no collate_fn or sample unit)"
        )


def refuse_max_age(sampler: Sampler, ahead: int) -> None:
    """Raise a ValueError if batches are drawn ahead and rows have a largest age, which
    they would exceed."""
    max_age = getattr(getattr(sampler, "innermost", sampler), "max_age", None)
    if ahead and max_age is not None:
        remedy = "use prefetch=0, or a RecencySampler without max_age"
        raise ValueError(
            f"with prefetch={ahead}, batches are drawn too early to keep max_age={max_age}: {remedy}"
        )
