"""Entries of sampled batches stored again: in the rows that were sampled, if they are still there, and nowhere else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    SchemaError,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.catalogue import buffer_of

CAPACITY = 12
STORAGES: dict[str, Any] = {"plain": PackedStorage, "shared": partial(PackedStorage, shared=True)}


class Numbered:
    """A buffer in which no two rows that were ever written have the same ``x``; ``state`` is ``[3]`` zeros at first."""

    def __init__(self, lanes: int = 0, storage: Any = PackedStorage, sampler: Any = None, batch: int = 20) -> None:
        cells = CAPACITY * max(lanes, 1)
        self.lanes, self.next = lanes, 1
        self.rb = buffer_of(CAPACITY, sampler or ProportionalSampler(cells), lanes, storage, batch_size=batch)

    def rows(self, count: int) -> TensorDict:
        lead = [self.lanes, count] if self.lanes else [count]
        first, self.next = self.next, self.next + count * max(1, self.lanes)
        zeros, done = torch.zeros(*lead, 3), torch.zeros(*lead, 1, dtype=torch.bool)
        x = torch.arange(first, self.next).view(lead)
        following = {"state": zeros.clone(), "done": done}
        return TensorDict({"x": x, "state": zeros, "next": following}, lead)

    def write(self, count: int) -> None:
        self.rb.extend(self.rows(count))

    def states(self) -> dict[int, list[float]]:
        rows = self.rb.storage[:]
        return dict(zip(rows["x"].flatten().tolist(), rows["state"].reshape(-1, 3).tolist(), strict=True))


@pytest.mark.parametrize(("storage", "lanes", "stamped"), [*product(STORAGES, (0, 2), (True, False))])
def test_only_rows_that_are_still_there_are_written(storage, lanes, stamped):
    sampler = None if stamped else UniformSampler()
    made = Numbered(lanes, STORAGES[storage], sampler)
    made.write(7)
    for written in (0, 1, 3, 5, 7, 11, 12, 15):
        now = made.rb.storage.clock.now
        batch = made.rb.sample()
        assert ("sampled_at" in batch.keys()) == stamped
        batch["state"] = torch.rand(len(batch), 3)
        if written:
            made.write(written)
        before = made.states()
        count = made.rb.write_back(batch, ["state"], sampled_at=None if stamped else now)
        new = {x: state for x, state in zip(batch["x"].tolist(), batch["state"].tolist(), strict=True) if x in before}
        assert made.states() == before | new
        assert count == sum(x in before for x in batch["x"].tolist())
        assert made.rb.storage["x"].sum() == sum(before)


def test_a_mapped_file_and_a_batch_in_another_shape(tmp_path: Path):
    made = Numbered(2, partial(PackedStorage, scratch_dir=tmp_path))
    made.write(7)
    batch = made.rb.sample().view(4, 5)
    batch["state"] = batch["x"].float()[..., None].expand(4, 5, 3).clone()
    batch["next", "state"] = -batch["state"]
    assert made.rb.write_back(batch, ["state", ("next", "state")]) == 20
    assert all(state in ([x] * 3, [0.0] * 3) for x, state in made.states().items())
    assert torch.equal(made.rb.storage["next", "state"], -made.rb.storage["state"])
    one = batch[0, 0]
    one["state"] = torch.full((3,), 9.0)
    assert made.rb.write_back(one, "state") == 1
    assert made.states()[int(one["x"])] == [9.0] * 3


def test_what_a_sequence_repeats_is_not_written():
    made = Numbered(0, sampler=SequenceSampler(ProportionalSampler(CAPACITY), 4, burn_in=2), batch=24)
    rows = made.rows(9)
    rows["next", "done"][[2, 6]] = True
    made.rb.extend(rows)
    for _ in range(5):
        batch = made.rb.sample()
        batch["state"] = torch.where(batch["mask"], batch["x"], -1.0)[:, None].expand(-1, 3).clone()
        assert made.rb.write_back(batch, ["state"]) == int(batch["mask"].sum())
    assert made.states() == {x: [x] * 3 for x in made.states()}


def test_trajectories_are_read_again_only_if_their_ends_are_written():
    made = Numbered()
    made.write(9)
    trajectories, storage = TrajectoryIndex.of(made.rb.storage), made.rb.storage
    assert trajectories.length(torch.tensor([0])).tolist() == [9]
    batch, revision = made.rb.sample(), storage._mutation_revision
    made.rb.write_back(batch, ["state"])
    assert storage._mutation_revision == revision
    batch["next", "done"] = batch["index"][:, None] == 3
    batch = batch[batch["index"] == 3]
    assert made.rb.write_back(batch, [("next", "done")]) == len(batch) > 0
    assert trajectories.length(torch.tensor([0])).tolist() == [4]


REFUSALS = [
    (["other"], {}, SchemaError, "cannot write back 'other': the rows have none"),
    (["state", "gone"], {"gone": torch.zeros(20)}, SchemaError, "cannot write back 'gone': the rows have none"),
    ([("next", "state")], {("next", "state"): None}, SchemaError, "the batch has none"),
    (["state"], {"state": torch.zeros(20, 3).double()}, SchemaError, r"'state': it is float64 of shape \(3,\) per row"),
    (["x", "state"], {"state": torch.zeros(20, 2)}, SchemaError, r"float32 of shape \(2,\) per row, the rows have"),
    (["state"], {"index": None}, KeyError, "the batch has no 'index'"),
    (["state"], {"sampled_at": None}, KeyError, "no 'sampled_at': .*pass it as sampled_at="),
    (["state"], {"index": torch.full((20,), 11)}, IndexError, "row 11"),
    ([3], {}, ValueError, r"keys must be a key or a sequence of keys, .* got \[3\]"),
    (None, {}, ValueError, "keys must be a key or a sequence of keys, .* got None"),
    ([], {}, ValueError, r"got \[\]"),
]


@pytest.mark.parametrize("outer", [None, lambda inner: SequenceSampler(inner, 2)])
def test_next_entries_of_joined_steps_are_refused(outer):
    inner = NStepSampler(ProportionalSampler(CAPACITY), 3, 0.9, reward_key=("next", "reward"))
    rb = ReplayBuffer(storage=PackedStorage(CAPACITY), sampler=outer(inner) if outer else inner, batch_size=4)
    following = {"state": torch.arange(9.0), "reward": torch.zeros(9), "done": torch.zeros(9, dtype=torch.bool)}
    rb.extend(TensorDict({"state": torch.arange(9.0), "next": following}, [9]))
    batch = rb.sample()
    assert rb.write_back(batch, ["state"])
    inner.n_steps = 1
    assert rb.write_back(rb.sample(), [("next", "state")])
    assert rb.storage["next", "state"].tolist() == list(range(9))


def test_threads_write_back_while_others_write():
    made, stop = Numbered(batch=8), threading.Event()
    made.write(CAPACITY)

    def learn() -> None:
        while not stop.is_set():
            batch = made.rb.sample()
            batch["state"] = batch["x"].float()[:, None].expand(-1, 3).clone()
            made.rb.write_back(batch, ["state"])

    with ThreadPoolExecutor(3) as threads:
        learners = [threads.submit(learn) for _ in range(3)]
        for count in (1, 5, 12, 3) * 60:
            made.write(count)
        stop.set()
    assert [learner.result() for learner in learners] == [None] * 3
    for x, state in made.states().items():
        assert state in ([x] * 3, [0.0] * 3)
