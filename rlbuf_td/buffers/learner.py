"""What a buffer offers to a learner on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from rlbuf_td.buffers.device.graph import CapturedStep
from rlbuf_td.buffers.device.held import held_of, unfed
from rlbuf_td.buffers.device.prefetch import DeviceFeed, fed_storage
from rlbuf_td.storages.indexing import device_of

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import TensorDictReplayBuffer as _Base
else:
    _Base = object  # a mixin: the buffer's own bases come behind it


class FeedsLearner(_Base):
    """Sampling for a GPU: as one graph where the rows are there, ahead and beside where they are on the host."""

    _learner_device: torch.device | None = None  # where batches are wanted
    _feed: DeviceFeed | None = None

    def capture(
        self,
        step: Callable[[TensorDictBase], Any] | None = None,
        batch_size: int | None = None,
        *,
        ring: int = 2,
        warmup: int = 3,
    ) -> CapturedStep:
        """Return a call that samples, does ``step(batch)`` and updates priorities, on CUDA as one graph.

        The graph stays right while the buffer fills and wraps and while alpha and beta change; each call draws anew.
        Write between calls, with :meth:`extend`, on the same stream; another thread waits while a graph is launched.
        On the CPU the same is done without a graph, and the lock is held to draw and to update, not during the step:
        rows that are replaced meanwhile are left out, as by :meth:`update_tensordict_priority`.

        **Aliasing:** outputs lie in memory that is used again: what call ``k`` returns holds until call ``k + ring``.

        Args:
            step: takes a batch, and may return tensors. The TD errors that the batch then has in ``priority_key``
                become the priorities of its rows, or of the anchors of its sequences; without that key they stay. It
                must be what a CUDA graph can hold: no host synchronisation, optimizers with ``capturable=True``.
                ``None``: return the batch, and update nothing.
            batch_size: default: the buffer's.
            ring: so many outputs, at least 2.
            warmup: everything is done so often, for real, before it is captured.

        Raises:
            ValueError: an argument is out of range, or there is no batch size; (when called) the buffer's generator is
                not on the device of its rows, or the sampler draws no such batches: nothing has changed.
            TypeError: ``step`` cannot be called; (when called) the storage is no :class:`PackedStorage`, or the sampler
                cannot be captured (a :class:`MinibatchSampler`, one of TorchRL's).
            RuntimeError: (when called) the buffer is empty.
        """
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("say how many rows a batch has: batch_size")
        return CapturedStep(self, step, size, ring, warmup)

    def feed(self, device: torch.device | str, batch_size: int | None = None, *, ahead: int = 1) -> DeviceFeed:
        """Return batches of a buffer on the host, on a device: see :class:`DeviceFeed`.

        A buffer with ``device=`` has one of its own, which its :meth:`sample` takes batches from.

        Args:
            device: where they are wanted.
            batch_size: default: the buffer's.
            ahead: how many batches are on their way while one is used.

        Raises:
            ValueError: there is no batch size, or ``ahead`` is negative.
            TypeError: the rows are not those of a :class:`PackedStorage` on the CPU, or a sampler is one of TorchRL's.
        """
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("say how many rows a batch has: batch_size")
        return DeviceFeed(self, torch.device(device), size, ahead)

    # -- with ``device=``

    @property
    def _is_fed(self) -> bool:
        """Whether batches come by the feed: they are wanted on a device, and no GPU on which the rows are already."""
        device = self._learner_device
        if device is None:
            return False
        rows = device_of(self._storage)
        is_there = device.type == rows.type and (device.index is None or device.index == rows.index)
        return device.type == "cpu" or not is_there

    def _refuse_unfed(self) -> None:
        """Refuse parts that no feed takes.

        Raises:
            TypeError: there are such.
        """
        if self._is_fed:
            fed_storage(self)

    def _own_feed(self) -> DeviceFeed:
        if self._feed is None:
            with self._futures_lock:
                device = self._learner_device or torch.device("cpu")
                self._feed = self._feed or DeviceFeed(self, device, self._batch_size or 0, self._prefetch_cap)
        return self._feed

    def _takes_back(self, batch: TensorDictBase) -> bool:
        """Take TD errors of a batch of the own feed; if it is another's, put what is on the way in place."""
        return self._feed is not None and self._feed.takes_back(batch)

    def _settle_errors(self) -> None:
        """Put TD errors in place that are on the way."""
        if self._feed is not None:
            self._feed.flush()

    @property
    def _has_ahead(self) -> bool:
        """Whether batches have been drawn ahead."""
        return self._feed is not None and self._feed.has_ahead

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until the sampler has run out (of an epoch, say), and those drawn ahead with it."""
        if not self._initialized:
            self._init()
        if not self._is_fed or self._batch_size is None:
            yield from super().__iter__()
            return
        if self._sampler.ran_out and not self._has_ahead:
            self._sampler.ran_out = False
        while not self._sampler.ran_out or self._has_ahead:
            yield self.sample()

    def synchronize(self) -> None:
        """Wait for what is on its way: asynchronous updates, and TD errors that come from a device."""
        super().synchronize()
        self._settle_errors()

    # -- state: TorchRL asks here for what it has fetched ahead, whenever it saves, loads or pickles

    @contextmanager
    def _capture_prefetch_state(self, *, clone_queue: bool = True) -> Iterator[dict[str, Any]]:
        """Hold the buffer's locks, and give batches drawn ahead, untransformed, and TD errors that are on the way."""
        feed = self._feed
        with nullcontext() if feed is None else feed.lock:
            held = None if feed is None else feed.held()  # waits for the device, before the locks are taken
            with super()._capture_prefetch_state(clone_queue=clone_queue) as state:
                yield state if held is None else state | held.state(self._storage.clock.now)

    def _validate_prefetch_state(self, prefetch_state: dict[str, Any] | None) -> None:
        """Refuse state of another form than is taken; what was drawn ahead with ``device=`` needs that, and without."""
        if isinstance(prefetch_state, dict):
            drawn = len(held_of(prefetch_state, 0).drawn)
            prefetch_state = unfed(prefetch_state)
            if self._learner_device is not None:
                if drawn > self._prefetch_cap:
                    raise ValueError(f"{drawn} batches were drawn ahead, this buffer has prefetch={self._prefetch_cap}")
                prefetch_state = prefetch_state | {"queue": ()}
        super()._validate_prefetch_state(prefetch_state)

    def _clear_prefetch_queue_locked(self) -> None:
        super()._clear_prefetch_queue_locked()
        self._feed = None

    def _restore_prefetch_queue_locked(
        self, prefetch_state: dict[str, Any] | None, *, clone_queue: bool = True
    ) -> None:
        self._validate_prefetch_state(prefetch_state)
        if prefetch_state is not None and self._learner_device is not None:
            self._feed = None
            if any(held := held_of(prefetch_state, self._storage.clock.now)):
                self._own_feed().resume(held)
        elif prefetch_state is not None:
            super()._restore_prefetch_queue_locked(unfed(prefetch_state), clone_queue=clone_queue)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_feed"}
