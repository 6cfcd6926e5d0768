"""What a buffer offers to a learner on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from rlbuf_td.capture import CapturedStep
from rlbuf_td.feed import DeviceFeed

if TYPE_CHECKING:
    from torchrl.data.replay_buffers import TensorDictReplayBuffer as _Base
else:
    _Base = object  # a mixin: the buffer's own bases come behind it


class FeedsLearner(_Base):
    """Sampling for a GPU: as one graph where the rows are there, ahead and beside where they are on the host."""

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
        """Return batches of a buffer on the host, on a device: see :class:`~rlbuf_td.feed.DeviceFeed`.

        Args:
            device: where they are wanted.
            batch_size: default: the buffer's.
            ahead: how many batches are on their way while one is used.

        Raises:
            ValueError: there is no batch size, or ``ahead`` is negative.
            TypeError: the rows are not those of a :class:`PackedStorage` on the CPU, or a sampler wraps another.
        """
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("say how many rows a batch has: batch_size")
        return DeviceFeed(self, torch.device(device), size, ahead)
