"""MinibatchSampler: every row once an epoch, whatever happens in between."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement

from rlbuf_td import PackedStorage, ReplayBuffer, RingWriter
from rlbuf_td.samplers import MinibatchSampler
from tests.statistics import assert_follows


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


def test_each_epoch_has_an_order_of_its_own_and_the_generator_decides_it():
    orders = []
    for _ in range(2):
        rb = buffer(50, MinibatchSampler(3), 50)
        rb.set_rng(torch.Generator().manual_seed(1))
        orders.append([batch["x"].tolist() for batch in rb])
    assert orders[0] == orders[1]
    assert len({tuple(x) for x in orders[0]}) == 3


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


def test_the_kind_of_order_may_be_changed_between_epochs():
    rb = buffer(8, MinibatchSampler(), 8)
    assert sorted(rb.sample()["x"].tolist()) == list(range(8))
    rb.sampler.shuffle = False
    assert rb.sample()["x"].tolist() == list(range(8))


def test_all_orders_are_equally_likely():
    sampler, storage = MinibatchSampler(), PackedStorage(4)
    storage.set(range(4), TensorDict({"x": torch.arange(4)}, [4]))
    counts = Counter(tuple(sampler.draw(storage, 4)[0].tolist()) for _ in range(12_000))
    assert_follows([counts[order] for order in permutations(range(4))], [1 / 24] * 24)


def test_a_write_starts_the_epochs_anew_even_if_the_number_of_rows_stays():
    rb = buffer(6, MinibatchSampler(2, shuffle=False), 2)
    assert rb.sample()["x"].tolist() == [0, 1]
    rb.extend(TensorDict({"x": torch.arange(10, 16)}, [6]))
    assert rb.sample()["x"].tolist() == [10, 11]
    rb.add(TensorDict({"x": torch.tensor(7)}, []))
    assert rb.sample()["x"].tolist() == [7, 11]
    rb.empty()


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


@pytest.mark.parametrize(
    ("buffer", "drop_last"), [(ReplayBuffer, False), (TensorDictReplayBuffer, True)]
)
def test_threads_that_fetch_ahead_draw_every_row_as_often_as_asked(buffer, drop_last):
    rb = buffer(
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
