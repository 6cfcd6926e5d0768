"""Over a storage of TorchRL's, ReplayBuffer makes TorchRL's buffer, whose draws by our
samplers are those over ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    CompressedListStorage,
    LazyTensorStorage,
    ListStorage,
    TensorDictReplayBuffer,
)

from rlbuf_td import (
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    UniformSampler,
)

CAPACITY, LANES = 24, 3
STORAGES: dict[str, Any] = {
    "tensors": LazyTensorStorage,
    "lanes": partial(LazyTensorStorage, ndim=2),
    "list": ListStorage,
    "compressed": CompressedListStorage,
}
SAMPLERS: dict[str, Any] = {
    "uniform": UniformSampler,
    "proportional": partial(ProportionalSampler, CAPACITY, 1.0),
    "ranks": partial(RankSampler, CAPACITY),
    "recency": partial(RecencySampler, half_life=2.0),
    "epochs": MinibatchSampler,
}


# which TorchRL's buffer says
@pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes")
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_draws_are_those_over_a_packed_storage(storage: str, sampler: str):
    lanes = [LANES] if storage == "lanes" else []
    buffers = []
    for made in (
        STORAGES[storage](CAPACITY),
        PackedStorage(CAPACITY, ndim=1 + len(lanes)),
    ):
        rb = ReplayBuffer(storage=made, sampler=SAMPLERS[sampler](), batch_size=4)
        rb.set_rng(torch.Generator().manual_seed(3))
        buffers.append(rb)
    assert [type(rb) for rb in buffers] == [TensorDictReplayBuffer, ReplayBuffer]
    for call in range(4):
        k = torch.arange(9 * call, 9 * call + 9).expand(*lanes, 9)
        k = k * 10 + torch.arange(LANES)[:, None] if lanes else k
        for rb in buffers:
            rb.extend(TensorDict({"k": k}, k.shape))
        for size in (4, 6):
            theirs, ours = (rb.sample(size) for rb in buffers)
            assert torch.equal(theirs["k"].long(), ours["k"])
            for rb, batch in zip(buffers, (theirs, ours), strict=True):
                rb.update_tensordict_priority(
                    batch.set("td_error", batch["k"] % 7 + 1.0)
                )
