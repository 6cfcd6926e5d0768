"""New rows of lanes that advance alone come first, each once, the oldest first: brute force against a list."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    FreshRowsSampler,
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    ReplayBufferMixture,
    UniformSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
BATCH = 6
INNER: dict[str, Any] = {
    "uniform": lambda rows: UniformSampler(),
    "proportional": ProportionalSampler,
    "rank": RankSampler,
    "minibatch": lambda rows: MinibatchSampler(),
    "recency": lambda rows: RecencySampler(half_life=3.0),
}


class Written:
    """A buffer ``[T, E]`` of numbered rows, and all rows that no batch has begun with, in the order of writing."""

    def __init__(self, seed: int, inner: str, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.steps, self.lanes = self.rng.choice([1, 2, 5, 17]), self.rng.choice([1, 2, 3, 6])
        self.count = [0] * self.lanes
        self.undrawn: list[tuple[int, int]] = []  # lane and number of each row
        fresh = self.rng.choice([1, 2, 5, BATCH])
        self.rb = self.buffer(FreshRowsSampler(INNER[inner](self.steps * self.lanes), fresh), **options)

    def buffer(self, sampler: Any, shared: bool = False, **options: Any) -> ReplayBuffer:
        storage = PackedStorage(self.steps * self.lanes, ndim=2, lanes=self.lanes, shared=shared)
        return ReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH, **options)

    def rows(self, lanes: list[int]) -> TensorDict:
        numbers = []
        for lane in lanes:
            numbers.append(self.count[lane])
            self.undrawn.append((lane, self.count[lane]))
            self.count[lane] += 1
        self.undrawn = [(e, k) for e, k in self.undrawn if k >= self.count[e] - self.steps]
        lane, number = torch.tensor(lanes), torch.tensor(numbers)
        return TensorDict({"lane": lane, "number": number, "action": number}, [len(lanes)])

    def write(self) -> None:
        rng, every = self.rng, [*range(self.lanes)]
        way = rng.choice(["lanes", "lanes", "one", "handle", "step", "steps", "edit"])
        if way == "lanes":
            lanes = rng.choices(every, k=rng.randint(1, 3 * self.steps))
            self.rb.extend(self.rows(lanes), lanes=torch.tensor(lanes))
        elif way == "one":
            lane = rng.choice(every)
            self.rb.extend(self.rows([lane] * rng.randint(1, 3 * self.steps)), lanes=lane)
        elif way == "handle":
            lane = rng.choice(every)
            self.rb.lane(lane).add(self.rows([lane])[0])
        elif way == "step":
            self.rb.add(self.rows(every))
        elif way == "steps":
            count = rng.randint(1, self.steps + 2)
            self.rb.extend(self.rows(every * count).view(count, self.lanes).transpose(0, 1))
        elif self.rb.storage.numbers[0] and (lane := rng.choice(every)) >= 0 and len(self.rb.lane(lane)):
            at = torch.tensor([rng.randrange(len(self.rb.lane(lane)))]), torch.tensor([lane])
            self.rb.set_at_("action", torch.tensor([-1]), at)

    def take(self, count: int) -> list[tuple[int, int]]:
        """Remove rows one by one: the oldest of the lane that has most of them, or of the first such lane."""
        taken = []
        for _ in range(count):
            waiting = [sum(lane == e for lane, _ in self.undrawn) for e in range(self.lanes)]
            taken.append(next(row for row in self.undrawn if row[0] == waiting.index(max(waiting))))
            self.undrawn.remove(taken[-1])
        return taken

    def check_batch(self, batch: Any) -> None:
        count = min(self.rb.sampler.fresh, len(batch), len(self.undrawn))
        found = [*zip(batch["lane"].tolist(), batch["number"].tolist(), strict=True)]
        assert found[:count] == self.take(count)
        for (lane, number), index in zip(found, batch["index"].tolist(), strict=True):
            assert self.count[lane] - self.steps <= number < self.count[lane]
            assert index == [number % self.steps, lane]

    def move(self, folder: Path) -> None:
        way = self.rng.choice(["copy", "pickle", "state", "dump", "empty", "resample"])
        rb: Any = self.rb
        if way == "copy":
            self.rb = copy.deepcopy(rb)
        elif way == "pickle":
            self.rb = pickle.loads(pickle.dumps(rb))
        elif way == "state":
            rb.load_state_dict(rb.state_dict())
        elif way == "dump":
            rb.dumps(folder)
            other = self.buffer(type(rb.sampler)(type(rb.sampler.sampler)(*self.size_of(rb.sampler.sampler))))
            other.loads(folder)
            self.rb = other
        elif way == "empty":
            rb.empty()
            self.undrawn, self.count = [], [0] * self.lanes
        else:
            rb.sampler.fresh = self.rng.choice([1, 3, BATCH])

    def size_of(self, sampler: Any) -> tuple[int, ...]:
        return (self.steps * self.lanes,) if hasattr(sampler, "law") else ()


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    "options", [{}, {"shared": True}, {"device": "cpu", "prefetch": 2}], ids=["", "shared", "ahead"]
)
def test_each_new_row_of_each_lane_comes_first_once(inner: str, options: dict[str, Any], tmp_path: Path) -> None:
    drawn = 0
    for seed in range(12):
        written = Written(seed, inner, **options)
        written.write()
        for turn in range(40):
            for _ in range(written.rng.choice([0, 1, 1, 3])):
                written.write()
            if not options and written.rng.random() < 0.2:
                written.move(tmp_path / f"{seed} {turn}")
            if not len(written.rb):
                continue
            if written.rb.prefetcher is not None:  # batches drawn ahead are dropped, and their rows are fresh again
                written.rb.prefetcher.take_back()
            before = len(written.undrawn)
            written.check_batch(written.rb.sample())
            drawn += before - len(written.undrawn)
    assert drawn > 300


def apart(sampler: Any, steps: int = 17, **options: Any) -> Written:
    """Return a buffer of three lanes with 4, 17 (of 25) and 9 rows, written in turns."""
    written = Written(0, "uniform")
    written.steps, written.lanes, written.count, written.undrawn = steps, 3, [0] * 3, []
    written.rb = written.buffer(sampler, **options)
    lanes = [0] * 4 + [1] * 25 + [2] * 9
    written.rng.shuffle(lanes)
    for lane in lanes:
        written.rb.extend(written.rows([lane]), lanes=[lane])
    return written


@pytest.mark.parametrize("inner", ["uniform", "proportional"])
def test_compiled_draws_begin_with_fresh_rows_of_lanes(inner: str) -> None:
    written = apart(FreshRowsSampler(INNER[inner](51), 2))
    for _ in range(4):
        written.check_batch(written.rb.sample())
        written.rb.extend(written.rows([2]), lanes=2)
    assert written.rb.compiled.startswith("add, extend, sample")


@pytest.mark.parametrize("steps", [5, 12, 40])
def test_a_dump_into_another_capacity_keeps_the_order_of_fresh_rows(steps: int, tmp_path: Path) -> None:
    written = apart(FreshRowsSampler(UniformSampler(), BATCH))
    written.check_batch(written.rb.sample())
    other = apart(FreshRowsSampler(UniformSampler()), steps)
    written.rb.dumps(tmp_path)
    if steps < 17:
        with pytest.warns(UserWarning, match="oldest time steps of the dump were dropped"):
            other.rb.loads(tmp_path)
    else:
        other.rb.loads(tmp_path)
    written.undrawn = [(e, k) for e, k in written.undrawn if k >= written.count[e] - steps]
    expected = written.take(len(written.undrawn))
    found: list[tuple[int, int]] = []
    while len(found) < len(expected):
        batch = other.rb.sample()
        found += zip(batch["lane"].tolist(), batch["number"].tolist(), strict=True)
    assert found[: len(expected)] == expected
    assert not other.rb.sampler.queue.waiting().any()


def test_processes_find_the_rows_that_others_write_to_lanes() -> None:
    written = apart(FreshRowsSampler(ProportionalSampler(51), 2), shared=True)
    for _ in range(8):
        written.check_batch(written.rb.sample())
        lanes = written.rng.choices(range(3), k=5)
        rows = written.rows(lanes)
        write = partial(written.rb.extend, rows, lanes=lanes)
        process = multiprocessing.get_context("fork").Process(target=write)
        process.start()
        process.join()
        assert process.exitcode == 0


def test_members_of_a_mixture_begin_with_fresh_rows_of_lanes() -> None:
    one = apart(FreshRowsSampler(UniformSampler(), 2))
    other = apart(UniformSampler())
    mixture = ReplayBufferMixture({"one": one.rb, "other": other.rb}, {"one": 0.5, "other": 0.5}, batch_size=2 * BATCH)
    for _ in range(6):
        batch = mixture.sample()
        one.check_batch(batch[batch["source"] == 0])
        one.rb.lane(1).add(one.rows([1])[0])
