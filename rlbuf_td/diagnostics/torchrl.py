"""What diagnostics read and set of TorchRL's parts that has no public name."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import PrioritizedSampler, Storage, TensorStorage


def newest_step(storage: Storage) -> int:
    """Return the time step that was written last; -1 if the storage does not know."""
    cursor = storage._last_cursor_index
    return -1 if cursor is None else int(cursor)


def storage_of(rows: TensorDictBase, length: int, cursor: int | None = None) -> Storage:
    """Return a storage of rows ``[T, *lanes]``: ``length`` are written, and a ring would continue at ``cursor``."""
    storage = TensorStorage(rows, ndim=max(1, rows.ndim))
    storage._len = length  # TorchRL counts time steps until the storage is first used
    if cursor is not None:
        storage._set_last_cursor((cursor - 1) % len(rows))
    return storage


def weights_of(sampler: PrioritizedSampler, index: torch.Tensor) -> torch.Tensor:
    """Return what the probabilities of rows are proportional to, float64."""
    return torch.as_tensor(sampler._sum_tree[index.cpu()], device="cpu").double()
