"""New rows first, each once, the oldest first: the law of the other rows, weights, and
windows of fresh rows.

Which rows are fresh after writes, loads, copies and in other processes is in
``test_lockstep.py``.
"""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    FreshRowsSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.catalogue import SAMPLERS
from tests.statistics import assert_follows, power

STEPS, BATCH = 15, 8


def rows(first: int, count: int) -> TensorDict:
    return TensorDict({"number": torch.arange(first, first + count)}, [count])


def buffer(
    inner: Any,
    fresh: Any = 2,
    *,
    size: int = STEPS,
    written: int = 0,
    batch_size: int = BATCH,
) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=PackedStorage(size),
        sampler=FreshRowsSampler(inner, fresh),
        batch_size=batch_size,
    )
    for first in range(0, written, 5):
        rb.extend(rows(first, 5))
    return rb


@pytest.mark.parametrize("inner", ["uniform", "proportional"])
def test_the_rest_of_a_batch_follows_the_wrapped_law(inner):
    draws, batch = 250, 803
    rb = buffer(SAMPLERS[inner](STEPS), 3, written=STEPS, batch_size=batch)
    error = torch.linspace(0.2, 3.0, STEPS)
    rb.update_priority(torch.arange(STEPS), error)
    for _ in range(4):
        rb.sample()
    state = copy.deepcopy(rb.sampler.state_dict())  # rows 12 to 14 are fresh
    counts = torch.zeros(STEPS)
    for _ in range(draws):
        rb.sampler.load_state_dict(state)
        number = rb.sample()["number"]
        assert number[:3].tolist() == [12, 13, 14]
        counts += torch.bincount(number[3:], minlength=STEPS)
    weight = (
        error.double() ** 0.6 if inner == "proportional" else torch.ones(STEPS).double()
    )
    assert power((weight / weight.sum()).numpy(), draws * (batch - 3), bias=0.02) > 0.97
    assert_follows(counts, weight / weight.sum())


@pytest.mark.parametrize("norm", ["buffer", "batch", None])
@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_fresh_rows_have_the_weights_of_the_wrapped_law(cls, norm):
    inner = cls(STEPS, alpha=0.7, beta=0.5, weight_norm=norm)
    rb = buffer(inner, 5, written=STEPS)
    # fresh rows have the largest weights
    rb.update_priority(torch.arange(STEPS), torch.linspace(4, 0.1, STEPS))
    batch = rb.sample()
    every = (STEPS * inner.probability(torch.arange(STEPS))) ** -0.5
    largest = {
        "buffer": every.max(),
        "batch": every[batch["index"]].max(),
        None: torch.tensor(1.0),
    }
    weight = every[batch["index"]] / largest[norm].double()
    torch.testing.assert_close(
        batch["priority_weight"].double(), weight, rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("norm", ["buffer", "batch", None])
def test_weights_stay_finite_if_a_fresh_row_is_almost_never_drawn(norm):
    rb = buffer(
        ProportionalSampler(5, alpha=1.0, beta=2.0, weight_norm=norm),
        1,
        size=5,
        written=5,
    )
    rb.update_priority(torch.arange(5), torch.tensor([0.0, 1e30, 1e30, 1e30, 1e30]))
    assert rb.sample()["priority_weight"].isfinite().all()


def test_fresh_rows_beside_unique_rows_are_not_repeated():
    rb = buffer(UniformSampler(unique=True), 5, batch_size=STEPS - 2)
    for first in range(0, 5 * STEPS, 5):
        rb.extend(rows(first, 5))
        if len(rb) == STEPS:
            assert len(set(rb.sample()["index"].tolist())) == STEPS - 2


def test_replaced_rows_are_not_fresh_again():
    rb = buffer(UniformSampler(), written=STEPS)
    for _ in range(STEPS):
        rb.sample()
    rb[3:5] = rb[3:5].clone()
    rb.extend(rows(STEPS, 3))
    assert rb.sample()["number"][:2].tolist() == [15, 16]
    assert rb.sample()["number"][0] == 17


def test_a_copy_may_reach_the_storage_before_its_buffer():
    rb = buffer(UniformSampler(), written=5)
    pickle.loads(pickle.dumps(rb.writer))
    storage, other = copy.deepcopy((rb.storage, rb))
    assert other.storage is storage is not rb.storage
    assert other.sample()["number"][:2].tolist() == [0, 1]


def test_the_storage_of_fresh_rows_can_be_replaced():
    rb = buffer(UniformSampler(), written=5, batch_size=2)
    rb.sample()
    rb.set_storage(PackedStorage(20))
    rb.extend(rows(7, 2))
    assert rb.sample()["number"].tolist() == [7, 8]


# -- fresh windows, the online queue of DreamerV3: each step once, in order, in windows
# that do not overlap

LENGTH, WINDOWS, SIZE = 4, 3, 40


class Waiting:
    """A buffer whose rows know their number in their lane, and the steps (number, done)
    of each lane that wait."""

    def __init__(self, inner: Any, lanes: int, across: bool, seed: int) -> None:
        sampler = SequenceSampler(
            FreshRowsSampler(inner, fresh="windows"), LENGTH, across_episodes=across
        )
        storage = PackedStorage(SIZE * lanes, ndim=2, lanes=lanes)
        self.rb = ReplayBuffer(
            storage=storage, sampler=sampler, batch_size=WINDOWS * LENGTH
        )
        self.across, self.rng, self.count = across, random.Random(seed), [0] * lanes
        self.steps: list[list[tuple[int, bool]]] = [[] for _ in range(lanes)]

    def write(self, lanes: list[int]) -> None:
        number = torch.tensor([self.count[lane] for lane in lanes])
        done = torch.tensor([self.rng.random() < 0.15 for _ in lanes])
        for lane, over in zip(lanes, done.tolist(), strict=True):
            self.steps[lane].append((self.count[lane], over))
            self.count[lane] += 1
            self.steps[lane] = [
                row for row in self.steps[lane] if row[0] >= self.count[lane] - SIZE
            ]
        self.rb.extend(
            TensorDict({"number": number, "next": {"done": done}}, [len(lanes)]),
            lanes=torch.tensor(lanes),
        )

    def take(self) -> list[list[int]]:
        """Take the fresh windows of a batch: one per lane and turn."""
        found: list[list[int]] = []
        while len(found) < WINDOWS:
            before = len(found)
            for waiting in self.steps:
                end = next(
                    (
                        k + 1
                        for k, (_, done) in enumerate(waiting)
                        if done and not self.across
                    ),
                    SIZE,
                )
                length = min(end, LENGTH)
                if len(found) < WINDOWS and length <= len(waiting):
                    found.append([number for number, _ in waiting[:length]])
                    del waiting[:length]
            if len(found) == before:
                break
        return found


@pytest.mark.parametrize(
    ("alone", "lanes", "kind", "across"),
    [
        (True, 3, "uniform", False),
        (True, 3, "proportional", True),
        (False, 3, "uniform", True),
        (False, 1, "rank", False),
    ],
)
def test_each_step_comes_once_in_windows_that_do_not_overlap(
    alone, lanes, kind, across
):
    seen = 0
    for seed in range(3):
        made = Waiting(SAMPLERS[kind](SIZE * lanes), lanes, across, seed)
        torch.manual_seed(seed)
        for _ in range(40):
            for lane in (
                made.rng.choices(range(lanes), k=made.rng.choice([0, 1, 5]))
                if alone
                else []
            ):
                made.write([lane])
            for _ in range(0 if alone else made.rng.choice([1, 2, 7])):
                made.write([*range(lanes)])
            if not len(made.rb):
                continue
            batch = made.rb.sample().view(WINDOWS, LENGTH)
            numbers = [window["number"][window["mask"]].tolist() for window in batch]
            expected = made.take()
            assert numbers[: len(expected)] == expected
            seen += sum(map(len, expected))
        assert seen > 20 * (seed + 1)


def test_rows_stay_distinct_if_unique_is_set_later():
    rb = buffer(UniformSampler(), written=STEPS)
    rb.sample()
    rb.sampler.sampler.unique = True
    for number in range(20):
        rb.extend(rows(number, 1))
        assert len(rb.sample().get("index").unique()) == BATCH


class Own(ProportionalSampler):
    """Draws one row, with one weight that all rows share, in float64."""

    row = 0

    def draw(
        self, storage: Any, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        _, info = super().draw(storage, batch_size)
        weight = info["priority_weight"][:1].double().expand(batch_size)
        return torch.full((batch_size,), self.row), info | {"priority_weight": weight}


def test_a_users_draw_beside_fresh_rows_may_share_weights_but_not_name_a_row_that_is_missing() -> (
    None
):
    rb = buffer(Own(STEPS), 3, written=6)
    for _ in range(2):
        assert rb.sample()["priority_weight"].tolist() == pytest.approx([1.0] * BATCH)
    rb.extend(rows(6, 2))
    rb.sampler.sampler.row = 1 << 40
    with pytest.raises(IndexError, match="out of range"):
        rb.sample()
