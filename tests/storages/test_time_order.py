"""Samplers that need rows in time order refuse all others: by the writer, and by what
was written to the rows."""

from __future__ import annotations

import pickle
from pathlib import Path
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
    RowSampler,
    SequenceSampler,
    UniformSampler,
)

T = 16


class OwnSampler(RowSampler):
    needs_order = True

    def draw(self, storage: Any, batch_size: int) -> Any:
        return torch.randint(len(storage), (batch_size,), generator=self._rng), {}


REFUSED = "needs rows in time order, and some were written elsewhere than after the newest row"
SAMPLERS = {
    "recency": lambda: RecencySampler(2.0),
    "a user's": OwnSampler,
    "n-step": lambda: NStepSampler(UniformSampler(), 3, 0.9),
    "windows": lambda: SequenceSampler(UniformSampler(), 2),
    "hindsight": lambda: HindsightSampler(
        UniformSampler(), lambda batch: batch["next", "reward"]
    ),
}


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    goal = number[:, None].float()
    outcome = {
        "reward": -goal,
        "done": number[:, None] % 5 == 4,
        "achieved_goal": goal,
        "desired_goal": goal,
    }
    return TensorDict({"x": number, "desired_goal": goal, "next": outcome}, [count])


def buffer(storage: Any = None, sampler: Any = None, **parts: Any) -> ReplayBuffer:
    storage, sampler = (
        PackedStorage(T) if storage is None else storage,
        sampler or UniformSampler(),
    )
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=8, **parts)


def reservoir(storage: Any = None) -> ReplayBuffer:
    rb = buffer(storage, writer=ReservoirWriter())
    rb.extend(rows(0, 20 * T))
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
def test_a_writer_of_ones_own_is_judged_by_what_it_writes(sampler):
    ordered = buffer(sampler=sampler(), writer=Every(lambda count: count % T))
    for first in range(0, 3 * T, 4):
        ordered.extend(rows(first, 4))
        assert ordered.sample().shape == (8,)
    swapping = buffer(
        sampler=sampler(),
        writer=Every(lambda count: count if count < T else (5 * count) % T),
    )
    swapping.extend(rows(0, T))
    for _ in range(4):  # the fast path, too
        swapping.sample()
    swapping.extend(rows(T, 3))
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED):
            swapping.sample()
    with pytest.raises(ValueError, match=REFUSED):
        swapping.sampler.sample(swapping.storage, 4)
    with pytest.raises(
        ValueError, match="a Every may write in any order: use a PackedStorage"
    ):
        buffer(
            LazyTensorStorage(T),
            RecencySampler(),
            writer=Every(lambda count: count % T),
        )


def rows_only(of: ReplayBuffer, path: Path, sampler: Any = None) -> ReplayBuffer:
    of.dumps(path)
    rb = buffer(sampler=sampler)
    rb.loads(path, rows_only=True)
    return rb


def state(of: ReplayBuffer, path: Path) -> PackedStorage:
    storage = PackedStorage(T)
    storage.load_state_dict(of.storage.state_dict())
    return storage


def dumped_storage(of: ReplayBuffer, path: Path) -> PackedStorage:
    of.storage.dumps(path)
    storage = PackedStorage(T)
    storage.loads(path)
    return storage


def with_storage(storage: PackedStorage, sampler: Any) -> ReplayBuffer:
    rb = buffer(sampler=sampler)
    rb.set_storage(storage)
    return rb


def with_sampler(storage: PackedStorage, sampler: Any) -> ReplayBuffer:
    rb = buffer(storage)
    rb.set_sampler(sampler)
    return rb


WAYS = {
    "a second buffer": lambda of, path: of.storage,
    "state": state,
    "dump of the storage": dumped_storage,
    "rows_only": lambda of, path: rows_only(of, path).storage,
    "shared": lambda of, path: of.share().storage,
    "pickle": lambda of, path: pickle.loads(pickle.dumps(of.storage)),
    "imported first": lambda of, path: ReplayBuffer.from_torchrl(of).storage,
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_reservoir_stay_without_time_order(way, tmp_path):
    of = reservoir()
    assert not of.storage.in_time_order
    storage, sampler = WAYS[way](of, tmp_path), SAMPLERS["n-step"]
    for make in (
        (buffer, with_storage)
        if way == "shared"
        else (buffer, with_storage, with_sampler)
    ):
        with pytest.raises(ValueError, match="needs rows in time order"):
            make(storage, sampler()).sample()
    assert buffer(storage).sample().shape == (8,)


@pytest.mark.parametrize("count", [1, 5, T])
def test_a_ring_that_has_replaced_all_rows_is_in_time_order_again(count, tmp_path):
    with pytest.raises(ValueError, match="needs rows in time order"):
        rows_only(reservoir(), tmp_path, SAMPLERS["n-step"]())
    rb = rows_only(reservoir(), tmp_path)
    with pytest.raises(TypeError, match="keep no order of age"):
        rb.last(2)
    for first in range(0, T, count):
        assert not rb.storage.in_time_order
        rb.extend(rows(first, count))
        # replaced rows are no progress of the ring
        rb.storage.set(3, rb[3], set_cursor=False)
    rb.set_sampler(SAMPLERS["n-step"]())
    rb.sample()
    end = -(-T // count) * count
    assert rb.chronological()["x"].tolist() == [*range(end - T, end)]
    rb.storage.set(3, rb[3])
    assert not rb.storage.in_time_order
    rb.empty()
    assert rb.storage.in_time_order


def test_torchrls_buffers_of_the_largest_values_are_imported_without_order(tmp_path):
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(T), writer=TensorDictMaxValueWriter("x"), batch_size=4
    )
    theirs.extend(rows(0, 3 * T))
    theirs.dumps(tmp_path)
    for source in (theirs, tmp_path):
        with pytest.raises(ValueError, match="a TensorDictMaxValueWriter keeps none"):
            ReplayBuffer.from_torchrl(source, sampler=SAMPLERS["recency"]())
        assert not ReplayBuffer.from_torchrl(source).storage.in_time_order


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
        rb.extend(rows(100, 4))
    other.empty() if by_ours else rb.storage._empty()
    if refill:
        other.extend(rows(0, refill))
    new = rows(refill, 3)
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
    rb.extend(rows(100, 12))
    rb.sample()
    buffer(rb.storage).empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()
    rb.extend(rows(0, 8))
    for _ in range(5):
        assert (rb.sample()["x"] < 8).all()


def test_a_reservoir_begins_again_after_another_buffer_has_removed_its_rows():
    rb = reservoir()
    buffer(rb.storage).empty()
    rb.extend(rows(1_000, 3))
    assert (rb[:]["x"].tolist(), rb.write_count) == ([1_000, 1_001, 1_002], 3)


def test_two_rings_over_one_storage_write_one_after_the_other():
    one, two = (buffer(storage) for storage in [PackedStorage(T)] * 2)
    for first in range(0, 40, 5):
        one.extend(rows(first, 3))
        two.extend(rows(first + 3, 2))
        assert one.chronological()["x"].tolist() == [
            *range(max(0, first + 5 - T), first + 5)
        ]
    assert two.storage.in_time_order
