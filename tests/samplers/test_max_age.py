"""Limits on the age of drawn rows, against their definition: on every path, over every storage, in queues."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage

from rlbuf_td import ExperienceQueue, NStepSampler, PackedStorage, RecencySampler, ReplayBuffer, UniformSampler
from tests.backends import forced
from tests.catalogue import buffer_of
from tests.statistics import assert_follows, power

STEPS = 20
SAMPLERS: dict[str, Any] = {"uniform": UniformSampler, "recency": lambda **limit: RecencySampler(3.0, **limit)}


def rows(first: int, count: int, lanes: int) -> TensorDict:
    lead = [lanes, count] if lanes else [count]
    return TensorDict({"time": torch.arange(first, first + count).expand(lead).clone()}, lead)


def buffer(sampler: Any, lanes: int = 0, written: int = 33, **parts: Any) -> Any:
    rb = buffer_of(STEPS, sampler, lanes, **parts)
    for first in range(0, written, 3):
        rb.extend(rows(first, min(3, written - first), lanes))
    return rb


def law(kind: str, age: torch.Tensor, max_age: int) -> torch.Tensor:
    """Return the probability of each row by definition; a negative age means that the row has not been written."""
    weight = torch.ones(len(age), dtype=torch.float64) if kind == "uniform" else 0.5 ** (age.double() / 3.0)
    weight = torch.where((age >= 0) & (age <= max_age), weight, 0.0)
    return weight / weight.sum()


@pytest.mark.parametrize("path", ["numba", "torch"])
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
@pytest.mark.parametrize(("lanes", "written"), [(0, 33), (3, 12), (3, 41)])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_draws_follow_the_law_of_the_rows_that_are_young_enough(kind, lanes, written, storage, path):
    with forced(path):
        for max_age in (0, 6, 17, 99):
            rb = buffer(SAMPLERS[kind](max_age=max_age), lanes, written, storage=storage, batch_size=40_000)
            time = rb.storage["time"].flatten()[: len(rb.storage)]
            expected = law(kind, written - 1 - time, max_age)
            assert max_age != 6 or power(expected[expected > 0].numpy(), 200_000, 0.02) > 0.95
            index = torch.cat([rb.sample()["index"] for _ in range(5)])
            flat = index if not lanes else index[:, 0] * lanes + index[:, 1]
            assert_follows(flat.bincount(minlength=len(expected)), expected)
            found = rb.sampler.probability(torch.arange(len(expected)), storage=rb.storage)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
            if storage is PackedStorage:
                assert rb.health()["too_old"] == (written - 1 - time > max_age).sum()


@pytest.mark.parametrize("path", ["numba", "torch"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_ages_are_counted_in_each_lane_while_lanes_are_apart(kind, path):
    with forced(path):
        for max_age in (0, 3, 50):
            rb = buffer_of(STEPS, SAMPLERS[kind](max_age=max_age), 3, batch_size=30_000)
            rb.extend(rows(0, 3, 3))
            for lane, count in ((0, 24), (1, 6), (2, 17), (0, 4)):
                rb.extend(rows(31 - count, count, 0), lanes=lane)
            newest, count = rb.storage.heads.read(rb.storage)
            step, lane = torch.arange(3 * STEPS) // 3, torch.arange(3 * STEPS) % 3
            age = (torch.from_numpy(newest)[lane] - step) % STEPS
            age = torch.where(age < torch.from_numpy(count)[lane], age, -1)
            expected = law(kind, age, max_age)
            index = torch.cat([rb.sample()["index"] for _ in range(3)])
            assert_follows((index[:, 0] * 3 + index[:, 1]).bincount(minlength=3 * STEPS), expected)
            written = (age >= 0).nonzero()[:, 0]
            found = rb.sampler.probability(written, storage=rb.storage)
            torch.testing.assert_close(found, expected[written], rtol=1e-9, atol=0)
            assert rb.health()["too_old"] == (age > max_age).sum()


def test_unique_rows_are_among_the_young_ones():
    rb = buffer(UniformSampler(unique=True, max_age=6), batch_size=7)
    for _ in range(3):
        assert sorted(rb.sample()["time"].tolist()) == [*range(26, 33)]
    rb = buffer(UniformSampler(unique=True, max_age=5), batch_size=7)
    assert not rb.can_sample()


def test_wrappers_copies_and_processes():
    sampler = NStepSampler(UniformSampler(max_age=4), 2, 0.9)
    done = TensorDict({"next": {"reward": torch.ones(30), "done": torch.zeros(30, dtype=torch.bool)}}, [30])
    rb = ReplayBuffer(storage=PackedStorage(STEPS), sampler=sampler, batch_size=50)
    rb.extend(rows(0, 30, 0).update(done))
    for each in (rb, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb)), rb.share() or rb):
        assert (each.sample()["time"] >= 25).all()
        assert each.health()["too_old"] == 15


@given(st.data())
def test_a_queue_in_lockstep_with_a_list(data):
    max_age = data.draw(st.integers(1, 6))
    queue = ExperienceQueue(storage=PackedStorage(7), batch_size=2, timeout=0.01, max_age=max_age)
    expected: list[int] = []
    written = discarded = 0
    for _ in range(data.draw(st.integers(1, 25))):
        count = data.draw(st.integers(0, 3))
        if count and len(expected) + count <= 7:
            queue.extend(rows(written, count, 0))
            expected += range(written, written + count)
            written += count
        if not written:
            continue
        assert queue.can_sample() == (len(expected) >= 2)
        if len(expected) < 2:
            with pytest.raises(TimeoutError):
                queue.sample(wait=False)
        else:
            old = sum(written - 1 - row > max_age for row in expected)
            assert queue.sample()["time"].tolist() == expected[old : old + 2]
            expected, discarded = expected[old + 2 :], discarded + old
        assert (queue.waiting, queue.health()["too_old"]) == (len(expected), discarded)


def test_a_queue_refuses_batches_that_never_are_young_enough():
    queue = ExperienceQueue(storage=PackedStorage(16), batch_size=5, timeout=0.01, max_age=3)
    queue.extend(rows(0, 5, 0))
    with pytest.raises(ValueError, match="only 4 rows are never older than max_age=3, a batch has 5"):
        queue.sample()
