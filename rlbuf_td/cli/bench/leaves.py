"""What it costs that an observation has many parts: the same bytes of a nested Dict in 12 leaves and in 3."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ReplayBuffer

OPERATIONS = {"leaves-12": "sample a Dict of 12 leaves [+]", "leaves-3": "sample the same bytes in 3 leaves [+]"}
ROWS = 100_000


def dict_rows(count: int, parts: int) -> TensorDict:
    """Return nested observations of 3 x ``parts`` leaves, uint8, float32 and int64, 336 bytes in all."""
    camera = torch.randint(256, (count, 48), dtype=torch.uint8)
    joints, counts = torch.randn(count, 40), torch.randint(9, (count, 16))

    def split(x: torch.Tensor) -> TensorDict:
        return TensorDict({f"part{i}": part for i, part in enumerate(x.chunk(parts, -1))}, [count])

    return TensorDict({"camera": split(camera), "body": {"joints": split(joints), "counts": split(counts)}}, [count])


def calls(batch: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Return for each operation a call for each side."""
    result: dict[str, dict[str, Callable[[], object]]] = {}
    for operation, parts in (("leaves-12", 4), ("leaves-3", 1)):
        ours = ReplayBuffer(storage=PackedStorage(ROWS), batch_size=batch)
        theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=batch)
        data = dict_rows(ROWS, parts)
        for buffer in (ours, theirs):
            buffer.extend(data)
        result[operation] = {"rlbuf_td": ours.sample, "TorchRL": theirs.sample}
    return result
