"""The ring: new transitions replace the oldest."""

from __future__ import annotations

from rlbuf_td.writers.common import TimeWriter


class RingWriter(TimeWriter):
    """Write along time, from the oldest rows on once the storage is full.

    A write may be longer than the storage: its newest rows stay. Unlike with TorchRL's writers, an ``"index"`` in the
    data is not stored, the counters have 64 bits, and a refused write moves none. Works over TorchRL's storages, too.

    Args:
        compilable: for TorchRL's sake: writes break the graph of ``torch.compile`` either way.
        track_generations: as in TorchRL: count how often each slot was written, for ``update_if_present``.

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
