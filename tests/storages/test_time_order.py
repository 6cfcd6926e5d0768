"""Samplers that need rows in time order refuse writers that keep none; buffers over
one storage follow each other's rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import (
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

from rlbuf_td import (
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    RowSampler,
    SequenceSampler,
    UniformSampler,
)
from tests.catalogue import numbered_rows

T = 16


class OwnSampler(RowSampler):
    needs_order = True

    def draw(self, storage: Any, batch_size: int) -> Any:
        return torch.randint(len(storage), (batch_size,), generator=self._rng), {}


SAMPLERS = {
    "recency": lambda: RecencySampler(2.0),
    "a user's": OwnSampler,
    "n-step": lambda: NStepSampler(UniformSampler(), 3, 0.9),
    "windows": lambda: SequenceSampler(UniformSampler(), 2),
    "hindsight": lambda: HindsightSampler(
        UniformSampler(), lambda batch: batch["next", "reward"]
    ),
}


def buffer(storage: Any = None, sampler: Any = None, **parts: Any) -> ReplayBuffer:
    storage, sampler = (
        PackedStorage(T) if storage is None else storage,
        sampler or UniformSampler(),
    )
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=8, **parts)


def reservoir(storage: Any = None) -> ReplayBuffer:
    rb = buffer(storage, writer=ReservoirWriter())
    rb.extend(numbered_rows(20 * T, 0))
    return rb


class Every(Writer):
    """A writer of a user's own; ``order`` maps the number of a row to its place."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.order, self.count = order, 0

    def add(self, data: Any) -> int:
        index = self.order(self.count)
        self.count += 1
        self._storage.set(index, data)
        for each in self._storage._attached_entities:
            each.mark_update(index)
        return index

    def extend(self, data: Any) -> torch.Tensor:
        return torch.tensor([self.add(row) for row in data])

    def _empty(self, empty_write_count: bool = True) -> None:
        self.count = 0

    def dumps(self, path: Any) -> None: ...
    def loads(self, path: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_writer_of_ones_own_says_whether_it_keeps_order(sampler):
    class InOrder(Every):
        keeps_order = True

    for storage in (PackedStorage(T), LazyTensorStorage(T)):
        with pytest.raises(
            (ValueError, TypeError),
            match=r"a Every may write in any order: set keeps_order = True|a PackedStorage",
        ):
            buffer(storage, sampler(), writer=Every(lambda count: count % T))
    rb = buffer(sampler=sampler(), writer=InOrder(lambda count: count % T))
    for first in range(0, 3 * T, 4):
        rb.extend(numbered_rows(4, first))
        assert rb.sample().shape == (8,)
    ring = buffer(rb.storage)
    assert ring.chronological()["x"].tolist() == [*range(2 * T, 3 * T)]


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_samplers_refuse_the_writer_of_any_buffer_over_the_rows(sampler, cls):
    of = reservoir()
    with pytest.raises(ValueError, match="order, a ReservoirWriter keeps none: use"):
        cls(storage=of.storage, sampler=sampler(), batch_size=8).sample()
    assert buffer(of.storage).sample().shape == (8,)
    rb = buffer(sampler=sampler())
    with pytest.raises(ValueError, match="order, a ReservoirWriter keeps none: use"):
        reservoir(rb.storage)
    rb.extend(numbered_rows(4, 0))
    assert rb.sample().shape == (8,)


def test_torchrls_buffers_of_the_largest_values_are_imported_for_other_samplers(
    tmp_path,
):
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(T), writer=TensorDictMaxValueWriter("x"), batch_size=4
    )
    theirs.extend(numbered_rows(3 * T, 0))
    theirs.dumps(tmp_path)
    for source in (theirs, tmp_path):
        with pytest.raises(ValueError, match="a TensorDictMaxValueWriter keeps none"):
            ReplayBuffer.from_torchrl(source, sampler=SAMPLERS["recency"]())
        assert len(ReplayBuffer.from_torchrl(source)) == T


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_the_writer_of_the_largest_values_keeps_them_with_their_priorities(cls):
    rb = cls(
        storage=PackedStorage(T),
        sampler=ProportionalSampler(T),
        writer=TensorDictMaxValueWriter("rank"),
        batch_size=8,
    )
    rank = torch.randperm(150).float()
    for first in range(0, 150, 7):
        part = torch.arange(first, min(first + 7, 150))
        rb.extend(TensorDict({"x": part, "rank": rank[part]}, [len(part)]))
        rb.storage.check()
        stored, best = rb.storage[:], rank[: part[-1] + 1].sort(descending=True).values
        assert torch.equal(stored["rank"].sort(descending=True).values, best[:T])
        assert torch.equal(rank[stored["x"]], stored["rank"])
        priority = rb.sampler.priority(torch.arange(len(stored)))
        assert (priority[stored["x"] >= first] == 1.0).all()
        errors = torch.full((len(stored),), 0.5).index_fill_(0, torch.tensor(0), 1.0)
        rb.update_priority(torch.arange(len(stored)), errors)


# -- several buffers over one storage


EMPTIED = [
    (by_ours, refill, by_ours == (refill > 5))
    for by_ours in (True, False)
    for refill in (0, T + 3)
]


@pytest.mark.parametrize(("by_ours", "refill", "single"), EMPTIED)
def test_removed_rows_do_not_come_back_with_a_write_of_another_buffer(
    by_ours, refill, single
):
    rb = buffer(PackedStorage(T))
    theirs = TensorDictReplayBuffer(
        storage=rb.storage, writer=TensorDictRoundRobinWriter()
    )
    other = buffer(rb.storage) if by_ours else theirs
    for _ in range(3):  # the fast path, too
        rb.extend(numbered_rows(4, 100))
    other.empty() if by_ours else rb.storage._empty()
    if refill:
        other.extend(numbered_rows(refill, 0))
    new = numbered_rows(3, refill)
    for data in new if single else [new]:
        rb.add(data) if single else rb.extend(data)
    end = refill + 3
    assert rb.last(min(T, end))["x"].tolist() == [*range(max(0, end - T), end)]
    assert len(rb) == min(T, end)


@pytest.mark.parametrize(
    "sampler",
    [lambda: ProportionalSampler(T), lambda: RankSampler(T), MinibatchSampler],
)
def test_a_buffer_draws_none_of_the_rows_that_another_buffer_has_removed(sampler):
    rb = buffer(sampler=sampler())
    rb.extend(numbered_rows(12, 100))
    rb.sample()
    buffer(rb.storage).empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()
    rb.extend(numbered_rows(8, 0))
    for _ in range(5):
        assert (rb.sample()["x"] < 8).all()


def test_a_reservoir_begins_again_after_another_buffer_has_removed_its_rows():
    rb = reservoir()
    buffer(rb.storage).empty()
    rb.extend(numbered_rows(3, 1_000))
    assert (rb[:]["x"].tolist(), rb.write_count) == ([1_000, 1_001, 1_002], 3)


def test_two_rings_over_one_storage_write_one_after_the_other():
    one, two = (buffer(storage) for storage in [PackedStorage(T)] * 2)
    for first in range(0, 40, 5):
        one.extend(numbered_rows(3, first))
        two.extend(numbered_rows(2, first + 3))
        assert one.chronological()["x"].tolist() == [
            *range(max(0, first + 5 - T), first + 5)
        ]


def test_a_writer_without_order_that_comes_later_is_refused() -> None:
    storage = PackedStorage(16)
    steps = NStepSampler(UniformSampler(), 3, 1.0)
    rb = ReplayBuffer(storage=storage, sampler=steps, batch_size=6)
    flag = torch.zeros(5, 1, dtype=torch.bool)
    after = {"reward": torch.ones(5, 1), "done": flag, "terminated": flag}
    rb.extend(TensorDict({"x": torch.arange(5), "next": after}, [5]))
    rb.sample()
    other = TensorDictReplayBuffer(storage=storage, writer=ReservoirWriter())
    with pytest.raises(ValueError, match="a ReservoirWriter keeps none"):
        rb.sample()
    assert len(other) == 5


def test_the_largest_age_is_fixed_when_a_sampler_is_made() -> None:
    with pytest.raises(AttributeError, match="max_age is fixed"):
        UniformSampler().max_age = 3


def test_rows_without_order_are_not_continued_as_if_they_had_one() -> None:
    rb = ReplayBuffer(storage=PackedStorage(4), writer=ReservoirWriter(), batch_size=2)
    rb.extend(TensorDict({"x": torch.arange(9)}, [9]))
    with pytest.raises(ValueError, match=r"ReservoirWriter are in no time .*rb.empty"):
        rb.set_writer(RingWriter())
    rb.empty()
    rb.set_writer(RingWriter())
    rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
    assert rb.chronological()["x"].tolist() == [1, 2, 3, 4]
