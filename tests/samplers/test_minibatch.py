"""MinibatchSampler: every row once an epoch, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement

from rlbuf_td import NStepSampler, PackedStorage, ReplayBuffer, RingWriter
from rlbuf_td.samplers import MinibatchSampler


def buffer(
    rows: int,
    sampler: MinibatchSampler,
    batch_size: int,
    kind=ReplayBuffer,
    storage=PackedStorage,
):
    rb = kind(
        storage=storage(max(rows, 1)),
        sampler=sampler,
        batch_size=batch_size,
        generator=torch.Generator(),
    )
    rb.extend(TensorDict({"x": torch.arange(rows)}, [rows]))
    return rb


@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 15),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_row_exactly_once_an_epoch(rows, size, epochs, shuffle, drop_last):
    if drop_last and rows < size:
        return
    for kind, storage in (
        (ReplayBuffer, PackedStorage),
        (TensorDictReplayBuffer, LazyTensorStorage),
    ):
        sampler = MinibatchSampler(epochs, shuffle=shuffle, drop_last=drop_last)
        rb = buffer(rows, sampler, size, kind, storage)
        for _ in range(2):  # again: the same loop runs all epochs once more
            batches = [batch["x"].tolist() for batch in rb]
            full, rest = divmod(rows, size)
            per_epoch = full + (rest > 0 and not drop_last)
            assert len(batches) == epochs * per_epoch
            for epoch in range(epochs):
                part = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
                assert [len(x) for x in part] == [size] * full + [rest] * (
                    rest > 0 and not drop_last
                )
                drawn = [x for batch in part for x in batch]
                assert len(set(drawn)) == len(drawn)
                if not drop_last:
                    assert sorted(drawn) == list(range(rows))
                if not shuffle:
                    assert drawn == list(range(rows))[: len(drawn)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_equal_seeds_give_torchrls_rows_and_later_random_numbers(drop_last):
    seen = []
    for sampler in (
        MinibatchSampler(drop_last=drop_last),
        SamplerWithoutReplacement(drop_last=drop_last),
    ):
        rb = ReplayBuffer(storage=PackedStorage(12), sampler=sampler, batch_size=5)
        torch.manual_seed(3)
        found = []
        for rows in (9, 12, 12, 12):
            rb.extend(TensorDict({"x": torch.arange(rows) + torch.rand(rows)}, [rows]))
            found += [batch["x"].tolist() for _ in range(2) for batch in rb]
        rb.empty()
        rb.extend(TensorDict({"x": torch.rand(12)}, [12]))
        seen.append((found, rb.sample()["x"].tolist(), torch.rand(3).tolist()))
    assert seen[0] == seen[1]


def test_the_epoch_and_the_position_can_be_watched():
    rb = buffer(5, MinibatchSampler(2), 2)
    seen = []
    for _ in range(6):
        rb.sample()
        seen.append((rb.sampler.epoch, rb.sampler.position, rb.sampler.ran_out))
    assert seen == [
        (0, 2, False),
        (0, 4, False),
        (1, 0, False),
        (1, 2, False),
        (1, 4, False),
        (0, 0, True),
    ]
    assert (
        repr(rb.sampler)
        == "MinibatchSampler(epochs=2, shuffle=True, drop_last=False, epoch=0)"
    )


@pytest.mark.parametrize("drop_last", [False, True])
def test_threads_of_torchrls_buffer_draw_every_row_as_often_as_asked(drop_last):
    rb = TensorDictReplayBuffer(
        storage=PackedStorage(10),
        sampler=MinibatchSampler(3, drop_last=drop_last),
        writer=RingWriter(),
        batch_size=4,
        prefetch=3,
    )
    rb.extend(TensorDict({"x": torch.arange(10)}, [10]))
    for _ in range(30):  # a race would not show every time
        sizes = [len(batch) for batch in rb]
        assert sorted(sizes) == ([4] * 6 if drop_last else [2] * 3 + [4] * 6)
    rb.shutdown()


def rows_from(first: int, n: int = 6) -> TensorDict:
    done = torch.zeros(n, 1, dtype=torch.bool)
    x = torch.arange(first, first + n)
    return TensorDict(
        {"x": x, "next": {"done": done, "reward": x[:, None].float()}}, [n]
    )


def write_elsewhere(rb) -> None:
    """Write in another process that shares the rows."""
    process = torch.multiprocessing.get_context("fork").Process(
        target=rb.extend, args=(rows_from(10, 3),)
    )
    process.start()
    process.join()
    assert process.exitcode == 0


WRITES: dict[str, Callable[[Any], Any]] = {
    "extend": lambda rb: rb.extend(rows_from(10, 3)),
    "add": lambda rb: [rb.add(row) for row in rows_from(10, 3)],
    "another buffer": lambda rb: ReplayBuffer(storage=rb.storage).extend(
        rows_from(10, 3)
    ),
    "the storage": lambda rb: rb.storage.set(range(3), rows_from(10, 3)),
    "another process": write_elsewhere,
}


@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, lambda s: NStepSampler(s, 1, 0.9)]
)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_by_whomever_restarts_the_epochs(write, wrap):
    sampler = MinibatchSampler(2, shuffle=False)
    rb = ReplayBuffer(
        storage=PackedStorage(6),
        sampler=wrap(sampler),
        batch_size=2,
    )
    rb.extend(rows_from(0))
    if write == "another process":
        rb.share()
    rb.sample()
    WRITES[write](rb)
    assert [rb.sample()["x"].tolist() for _ in range(4)] == [
        [10, 11],
        [12, 3],
        [4, 5],
        [10, 11],
    ]
    rb.set_at_("x", torch.tensor([7]), [0])  # an edit does not
    assert rb.sample()["x"].tolist() == [12, 3]
    rb.shutdown()
