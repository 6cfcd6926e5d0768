"""Copies that bypass the processor's caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import MinibatchSampler, PackedStorage, ReplayBuffer
from rlbuf_td.kernels.batch import cpu
from rlbuf_td.kernels.compiled import stream_bytes

CELLS = 700


@pytest.mark.parametrize("offset", [0, 1, 31, 32, 63])
def test_streams_copy_exactly_the_given_bytes(offset):
    source, target = torch.randint(1, 256, (2, 400), dtype=torch.uint8)
    for count in [*range(70), 127, 128, 129, 200]:
        before, left = target.clone(), -target.data_ptr() % 64
        stream_bytes(target.data_ptr() + left + offset, source.data_ptr() + 3, count)
        before[left + offset :][:count] = source[3:][:count]
        assert target.equal(before)
        target.random_()


def images(start: int, count: int) -> TensorDict:
    values = torch.arange(start, start + count).view(-1, 1)
    leaves = {
        f"{width}": (values * 7 + torch.arange(width)).to(torch.uint8)
        for width in (1, 1_023, 1_024, 1_030, 30_000)
    }
    return TensorDict({"row": values, **leaves}, [count])


def test_batches_and_writes_beyond_the_caches_keep_every_byte():
    rb = ReplayBuffer(
        storage=PackedStorage(CELLS), sampler=MinibatchSampler(), batch_size=600
    )
    for start in range(0, 1_200, 120):  # 3.6 MiB each; the ring wraps around
        rb.extend(images(start, 120))
    rows, width = rb.storage.rows, rb.storage.rows.matrix.shape[-1]
    # batches, and writes to a storage of this size, are streamed
    assert 600 * width > cpu._STREAMED
    assert rows.layout.extents[:, 1].max() == 30_000
    batch = rb.sample()
    for row, index in zip(batch["row"], batch["index"], strict=True):
        assert index == row % CELLS
        assert row >= 500
    written: Any = torch.cat([images(int(row), 1) for row in batch["row"]])
    for key, leaf in written.items():
        assert leaf.equal(batch[key]), key
    assert rb[:].get("30000").equal(images(0, 1_200)["30000"][rb[:]["row"][:, 0]])
