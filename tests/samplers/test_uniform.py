"""Uniform, unique, young and recent rows, and epochs: their laws on every path and in every form of
a ring, and settings."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from rlbuf_td import (
    ExperienceQueue,
    NStepSampler,
    PackedStorage,
    RecencySampler,
    ReplayBuffer,
    RingWriter,
    UniformSampler,
)
from rlbuf_td.samplers import MinibatchSampler
from tests import model as m
from tests.backends import forced
from tests.catalogue import buffer_of, numbered_rows
from tests.model import World
from tests.statistics import assert_follows, power
from tests.test_composition import counts_of


def recent(half_life: float, window: int | None = None, max_age: int | None = None):
    limits = [inf if limit is None else limit for limit in (window, max_age)]
    return RecencySampler(half_life, window, max_age=max_age), lambda model: m.recency(
        model, half_life, *limits
    )


def young(max_age: int):
    return UniformSampler(max_age=max_age), lambda model: m.uniform(model, max_age)


KINDS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: (UniformSampler(), m.uniform),
    **{f"at most {age} old": lambda age=age: young(age) for age in (0, 6, 99)},
    "half-life": lambda: recent(4.0),
    "window": lambda: recent(inf, 6),
    "half-life and window": lambda: recent(30.0, 13),
    "recent and at most 6 old": lambda: recent(3.0, max_age=6),
    "shortest half-life": lambda: recent(5e-324),
}
RINGS: dict[str, Any] = {
    "filling": (0, 0.7, {}),
    "wrapped": (3, 2.1, {"storage": LazyTensorStorage}),
    "full": (2, 1.0, {"buffer": TensorDictReplayBuffer, "writer": RingWriter}),
    "lanes apart": (3, 0.2, {}),
}


@pytest.mark.parametrize(
    ("kind", "ring", "path"),
    [
        (kind, ring, ["numba", "torch"][(j + k) % 2])
        for j, kind in enumerate(KINDS)
        for k, ring in enumerate(RINGS)
    ],
)
def test_draws_follow_the_law(kind, ring, path):
    (sampler, law), (lanes, fill, parts) = KINDS[kind](), RINGS[ring]
    parts = {name: make() if name == "writer" else make for name, make in parts.items()}
    with forced(path):
        world = World.of(sampler, 20, lanes, fill, ids=False, **parts)
        if ring == "lanes apart":
            world.append([0] * 24 + [1] * 6 + [2] * 17 + [0] * 4)
        model = world.model
        expected = np.array(law(model))
        assert_follows(counts_of(world, draws=200_000), expected)
        index = m.index_of(model, model.rows())
        probability = sampler.probability(index, storage=world.rb.storage)
    np.testing.assert_allclose(probability.numpy(), expected, rtol=1e-6)
    if kind == "at most 6 old":
        assert power(expected[expected > 0], 200_000, bias=0.02) > 0.9
    if "old" in kind and ring in ("filling", "lanes apart"):
        assert world.rb.health()["too_old"] == (expected == 0).sum()


# -- unique rows


def first_distinct(rows: int, batch: int, generator: torch.Generator) -> list[int]:
    if 8 * batch > rows:
        return torch.randperm(rows, generator=generator).tolist()[:batch]
    found: dict[int, None] = {}
    while len(found) < batch:
        numbers = torch.randint(rows, (batch,), generator=generator)
        found |= dict.fromkeys(numbers.tolist())
    return [*found][:batch]


@given(
    st.sampled_from([0, 2]),
    st.integers(1, 150),
    st.integers(1, 150),
    st.integers(0, 1_000),
)
def test_a_unique_batch_is_the_first_distinct_rows_of_the_random_numbers(
    lanes, steps, batch, seed
):
    count = steps * max(lanes, 1)
    batch = min(batch, count)
    rows, sampler = numbered_rows(steps, lanes=lanes), UniformSampler(unique=True)
    rb = buffer_of(steps, sampler, lanes, rows=rows, batch_size=batch, seed=seed)
    wanted = torch.Generator().manual_seed(seed)
    for _ in range(4):  # the first draw is not bound
        index = rb.sample()["index"]
        flat = index @ torch.tensor([lanes, 1]) if lanes else index
        assert flat.tolist() == first_distinct(count, batch, wanted)


def numbered(sampler, written: int = 33, batch_size: int = 7) -> ReplayBuffer:
    rb = ReplayBuffer(storage=PackedStorage(20), sampler=sampler, batch_size=batch_size)
    for first in range(written):
        rb.add(TensorDict({"time": torch.tensor(first)}))
    return rb


def test_unique_rows_are_among_the_young_ones():
    rb = numbered(UniformSampler(unique=True, max_age=6))
    for _ in range(3):
        assert sorted(rb.sample()["time"].tolist()) == [*range(26, 33)]
    assert not numbered(UniformSampler(unique=True, max_age=5)).can_sample()


# -- settings, queues


def test_settings_of_recency_change_by_schedulers():
    rb = numbered(RecencySampler(8.0, 20), batch_size=500)
    for name, value in (("window", 2.9), ("half_life", 1.0)):
        LinearScheduler(rb, name, value, 1).step()  # fractions are rounded down
    assert set(rb.sample()["time"].tolist()) == {31, 32}
    assert repr(rb.sampler) == "RecencySampler(half_life=1.0, window=2, max_age=None)"
    assert rb.health()["top_mass"] == pytest.approx(2 / 3)


@given(st.data())
def test_a_queue_of_young_rows_in_lockstep_with_a_list(data):
    max_age = data.draw(st.integers(1, 6))
    queue = ExperienceQueue(
        storage=PackedStorage(7), batch_size=2, timeout=0.01, max_age=max_age
    )
    expected: list[int] = []
    written = discarded = 0
    for _ in range(data.draw(st.integers(1, 25))):
        count = data.draw(st.integers(0, 3))
        if count and len(expected) + count <= 7:
            queue.extend(
                TensorDict({"time": torch.arange(written, written + count)}, [count])
            )
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


# -- the statistical test itself can fail


def test_a_right_sampler_passes_and_one_two_percent_off_fails():
    rng = np.random.default_rng(0)
    probability = rng.random(100) + 0.5
    probability /= probability.sum()
    biased = probability * np.where(np.arange(100) % 2 == 0, 1.02, 0.98)
    biased /= biased.sum()
    draws = 1_000_000
    assert power(probability, draws, bias=0.02) > 0.999
    assert_follows(rng.multinomial(draws, probability), probability)
    with pytest.raises(AssertionError, match="do not follow the law"):
        assert_follows(rng.multinomial(draws, biased), probability)
    with pytest.raises(AssertionError, match="probability 0"):
        assert_follows(np.array([999, 1]), np.array([1.0, 0.0]))


def test_cells_without_rows_have_no_probability():
    rb = ReplayBuffer(storage=PackedStorage(8, ndim=2, lanes=2), batch_size=4)
    rb.extend(TensorDict({"x": torch.arange(3)}, [3]), lanes=torch.tensor([0, 0, 1]))
    found = rb.sampler.probability(torch.arange(4), storage=rb.storage)
    assert found.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])


def test_a_subclass_may_draw_into_given_memory():
    class Newest(UniformSampler):
        def draw_into(self, storage, live, flat, report, scratch) -> None:
            flat.fill_(live.rows - 1)

    rb = buffer_of(5, Newest(), rows=numbered_rows(4), batch_size=3)
    assert rb.sample()["x"].tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "move",
    [
        lambda flat: flat.share_memory_(),
        lambda flat: flat.resize_(1_000),
        lambda flat: flat.untyped_storage().resize_(0),
    ],
)
def test_a_subclass_may_not_move_the_memory_that_it_draws_into(move):
    class Moving(UniformSampler):
        def draw_into(self, storage, live, flat, report, scratch) -> None:
            super().draw_into(storage, live, flat, report, scratch)
            move(flat)

    rb = buffer_of(5, Moving(), rows=numbered_rows(4), batch_size=3)
    with pytest.raises(RuntimeError, match="draw_into has moved"):
        rb.sample()


# -- epochs of minibatches


@pytest.mark.parametrize(
    ("cls", "storage"),
    [(ReplayBuffer, PackedStorage), (TensorDictReplayBuffer, LazyTensorStorage)],
)
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 15),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_row_exactly_once_an_epoch(
    cls, storage, rows, size, epochs, shuffle, drop_last
):
    assume(rows >= size or not drop_last)
    sampler = MinibatchSampler(epochs, shuffle=shuffle, drop_last=drop_last)
    data = numbered_rows(rows)
    rb = buffer_of(rows, sampler, 0, storage, cls, rows=data, batch_size=size)
    full, rest = divmod(rows, size)
    sizes = [size] * full + [rest] * (rest > 0 and not drop_last)
    every = range(sum(sizes))
    for _ in range(2):  # again: the same loop runs all epochs once more
        batches = [batch["x"].tolist() for batch in rb]
        assert [len(batch) for batch in batches] == sizes * epochs
        drawn = torch.tensor([x for batch in batches for x in batch]).view(epochs, -1)
        for epoch in drawn.tolist():
            assert len({*epoch}) == len(every)
            assert shuffle or epoch == [*every]


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
    rb = buffer_of(5, MinibatchSampler(2), rows=numbered_rows(5), batch_size=2)
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


def write_elsewhere(rb) -> None:
    """Write in another process that shares the rows."""
    process = torch.multiprocessing.get_context("fork").Process(
        target=rb.extend, args=(numbered_rows(3, 10),)
    )
    process.start()
    process.join()
    assert process.exitcode == 0


WRITES: dict[str, Callable[[Any], Any]] = {
    "extend": lambda rb: rb.extend(numbered_rows(3, 10)),
    "add": lambda rb: [rb.add(row) for row in numbered_rows(3, 10)],
    "another buffer": lambda rb: ReplayBuffer(storage=rb.storage).extend(
        numbered_rows(3, 10)
    ),
    "the storage": lambda rb: rb.storage.set(range(3), numbered_rows(3, 10)),
    "another process": write_elsewhere,
}


@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, lambda s: NStepSampler(s, 1, 0.9)]
)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_by_whomever_restarts_the_epochs(write, wrap):
    sampler = wrap(MinibatchSampler(2, shuffle=False))
    rb = buffer_of(6, sampler, rows=numbered_rows(6), batch_size=2)
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
