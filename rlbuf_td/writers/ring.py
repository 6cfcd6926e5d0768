"""The default writer, a ring: new transitions replace the oldest."""

from __future__ import annotations

from rlbuf_td.writers.common import NO_GENERATIONS, TimeWriter


class RingWriter(TimeWriter):
    """Writes transitions in order; once the storage is full, new rows replace the
    oldest ones.

    If a write is longer than the storage, its last rows are stored. Unlike TorchRL's
    writers, this writer does not store an ``"index"`` with the data, has 64-bit
    counters, and does not move its cursor if a write fails.

    Args:
        compilable: has no effect; accepted for compatibility with TorchRL.
        track_generations: must be False; :meth:`ReplayBuffer.write_back` takes the
            place of TorchRL's ``update_if_present``.

    Raises:
        NotImplementedError: ``track_generations`` is ``True``.

    Cost: proportional to the number of rows written.

    Example:
        >>> import torch
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=PackedStorage(4), writer=RingWriter())
        >>> rb.extend(TensorDict({"x": torch.arange(6)}, [6]))
        tensor([0, 1, 2, 3, 0, 1])
        >>> rb.storage["x"], rb.write_count
        (tensor([4, 5, 2, 3]), 6)
    """

    def __init__(
        self, compilable: bool = False, *, track_generations: bool = False
    ) -> None:
        if track_generations:
            raise NotImplementedError(NO_GENERATIONS)
        super().__init__()
