"""The ring writer: new transitions replace the oldest."""

from __future__ import annotations

from rlbuf_td.writers.common import TimeWriter


class RingWriter(TimeWriter):
    """Writes along time; once the storage is full, new rows replace the oldest ones.

    A write may be longer than the storage: its newest rows are kept. Unlike TorchRL's writers, it does not store an
    ``"index"`` in the data, and has 64-bit counters, which a refused write leaves unchanged. The storage may be a
    :class:`PackedStorage` or one of TorchRL's.

    Args:
        compilable: accepted for compatibility: writes break the graph of ``torch.compile`` in any case.
        track_generations: count how often each slot was written, as TorchRL's ``update_if_present`` needs.

    Cost: proportional to the rows written.

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

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        super().__init__(track_generations=track_generations)
