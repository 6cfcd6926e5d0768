"""A replay buffer with the keywords of TorchRL's prioritized buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl.data.replay_buffers import Storage

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.samplers import ProportionalSampler
from rlbuf_td.samplers.prioritized import Reduction
from rlbuf_td.storages import PackedStorage


class PrioritizedReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` with a :class:`ProportionalSampler`, for code that uses TorchRL's prioritized buffers.

    Takes the keywords of TorchRL's ``TensorDictPrioritizedReplayBuffer``, with the same defaults.

    Args:
        alpha: exponent of the priorities, at least 0; with 0, sampling is uniform.
        beta: exponent of the importance weights, at least 0.
        eps: added to the magnitude of each TD error, default 1e-8.
        reduction: reduces several TD errors of a row to one: ``"max"``, ``"min"``, ``"mean"`` or ``"median"``.
        storage: a storage, or a function that creates one; default ``PackedStorage(1_000)``.
        sync: must be ``True``, because every write updates priorities.
        sampler_device: must be ``None``, because priorities are on the device of the rows.
        **kwargs: keywords of :class:`ReplayBuffer`.

    Raises:
        NotImplementedError: ``sync`` is ``False``, or a ``sampler_device`` is given.

    Cost: see :class:`ReplayBuffer` and :class:`ProportionalSampler`.

    Example:
        >>> rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=PackedStorage(100), batch_size=8)
        >>> rb.sampler.alpha, rb.sampler.eps
        (0.7, 1e-08)
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        reduction: Reduction = "max",
        storage: Storage | Callable[[], Storage] | None = None,
        sync: bool = True,
        sampler_device: Any = None,
        **kwargs: Any,
    ) -> None:
        if not sync or sampler_device is not None:
            reason = "every write updates priorities, on the device of the rows"
            raise NotImplementedError(f"sync=False and sampler_device= are not supported: {reason}")
        rows = PackedStorage(1_000) if storage is None else storage if isinstance(storage, Storage) else storage()
        sampler = ProportionalSampler(rows.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(storage=rows, sampler=sampler, **kwargs)
