"""Limits on the age of drawn rows, against their definition: on every path, over every storage, in queues."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, StalenessAwareSampler, TensorDictReplayBuffer

from rlbuf_td import (
    EpisodeSampler,
    ExperienceQueue,
    FreshRowsSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    QueueSampler,
    RecencySampler,
    ReplayBuffer,
    ReplayBufferMixture,
    ReservoirWriter,
    SchemaError,
    UniformSampler,
)
from rlbuf_td.kernels import sum_tree
from rlbuf_td.samplers.age import AgeLimit
from tests.backends import forced
from tests.catalogue import buffer_of
from tests.statistics import assert_follows, power

STEPS, CAPACITY = 20, 60
SAMPLERS: dict[str, Any] = {
    "uniform": UniformSampler,
    "proportional": lambda **limit: ProportionalSampler(CAPACITY, **limit),
    "independent": lambda **limit: ProportionalSampler(CAPACITY, stratified=False, weight_norm="batch", **limit),
    "no norm": lambda **limit: ProportionalSampler(CAPACITY, weight_norm=None, beta=1.0, **limit),
    "recency": lambda **limit: RecencySampler(half_life=3.0, **limit),
}


def rows(first: int, count: int, lanes: int, version: Any = None) -> TensorDict:
    time = torch.arange(first, first + count)
    lead = [lanes, count] if lanes else [count]
    version = time // 3 if version is None else torch.as_tensor(version)
    return TensorDict({name: x.expand(lead).clone() for name, x in (("time", time), ("version", version))}, lead)


def buffer(sampler: Any, lanes: int = 0, written: int = 33, **parts: Any) -> Any:
    """Return a buffer of 20 time steps, of which 33 were written; prioritized rows have unlike priorities."""
    rb = buffer_of(STEPS, sampler, lanes, **parts)
    for first in range(0, written, 3):
        data = rows(first, min(3, written - first), lanes)
        rb.extend(data)
    if isinstance(sampler, ProportionalSampler):
        every = torch.arange(len(rb.storage))
        sampler.update_priority(every, (every * 7 % 5 + 1) / 3 * (every % 11 != 3), storage=rb.storage)
    return rb


def law(rb: Any, kind: str, max_age: int, age_key: Any, newest: int | None = None) -> np.ndarray:
    """Return the probability of each stored row, by definition."""
    number = rb.storage["time" if age_key is None else age_key].flatten()[: len(rb.storage)].numpy()
    age = (number.max() if newest is None else newest) - number
    weight = np.ones(len(number))
    if kind == "recency":
        weight = 0.5 ** (age / 3.0)
    elif kind != "uniform":
        weight = rb.sampler.tree.weight[: len(number)].numpy()
    weight = np.where(age <= max_age, weight, 0.0)
    return weight / weight.sum()


@pytest.mark.parametrize("path", ["numba", "torch"])
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
@pytest.mark.parametrize(("lanes", "written"), [(0, 33), (3, 12), (3, 41), (2, 40)])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_draws_follow_the_law_of_the_rows_that_are_young_enough(kind, lanes, written, storage, path):
    torch.manual_seed(0)
    with forced(path):
        for max_age, age_key in ((0, None), (6, None), (17, None), (99, None), (2, "version")):
            sampler = SAMPLERS[kind](max_age=max_age, age_key=age_key)
            rb = buffer(sampler, lanes, written, storage=storage, batch_size=20_000)
            expected = law(rb, kind, max_age, age_key)
            counts, draws = np.zeros(len(expected)), 10 if max_age == 6 else 2
            for _ in range(draws):
                batch = rb.sample()
                index = batch["index"] if lanes < 2 else batch["index"][:, 0] * lanes + batch["index"][:, 1]
                counts += index.bincount(minlength=len(expected)).numpy()
            assert max_age != 6 or power(expected[expected > 0], 20_000 * draws, 0.02) > 0.95
            assert_follows(counts, expected)
            every = torch.arange(len(expected))
            torch.testing.assert_close(
                sampler.probability(every, storage=rb.storage).numpy(), expected, rtol=1e-9, atol=0
            )
            time = rb.storage["time"]
            young = (
                time.max() - time <= max_age
                if age_key is None
                else rb.storage[age_key].max() - rb.storage[age_key] <= 2
            )
            if storage is PackedStorage:
                assert rb.health()["too_old"] == (~young.flatten()[: len(expected)]).sum()
            if "priority_weight" in batch.keys():
                assert_weights(batch["priority_weight"], index, expected, sampler, max_age, age_key, rb)


def assert_weights(found, index, probability, sampler, max_age, age_key, rb) -> None:
    """Compare importance weights with those of a buffer that holds only the young rows."""
    young = sampler.age_limit.count(rb.storage)
    weight = (young * probability[index.numpy()]) ** -sampler.beta
    drawable = probability[probability > 0]
    largest = {"buffer": ((young * drawable) ** -sampler.beta).max(), "batch": weight.max(), None: 1.0}
    np.testing.assert_allclose(found.numpy(), weight / largest[sampler.weight_norm], rtol=1e-4)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_compiled_draw_equals_the_torch_form(kind):
    for lanes in (0, 3):
        batches = []
        for compiled in (True, False):
            sampler = SAMPLERS[kind](max_age=4)
            rb = buffer(sampler, lanes, 40, batch_size=64, seed=3)
            for step in range(4):
                rb.extend(rows(40 + step, 1, lanes))
                if not compiled:
                    rb.bound = {}
                batches.append((compiled, rb.sample()))
            assert not compiled or "sample" in rb.compiled.split(";")[0]
        for (_, one), (_, other) in zip(batches[:4], batches[4:], strict=True):
            assert (one == other).all()
            assert (one["time"] >= one["time"].max() - 4).all()


@settings(max_examples=80, deadline=None)
@given(
    capacity=st.sampled_from([1, 7, 8, 9, 63, 64, 65, 512, 700, 4_200]),
    seed=st.integers(0, 999),
    zeros=st.sampled_from([0.0, 0.5, 0.95]),
    count=st.integers(1, 5),
)
def test_the_weights_of_ranges_are_exact_whatever_lies_outside(capacity, seed, zeros, count):
    rng = np.random.default_rng(seed)
    edges = np.unique(rng.integers(0, capacity + 1, 2 * count))
    edges = edges[: len(edges) // 2 * 2].reshape(-1, 2)
    if not len(edges):
        return
    ranges = np.column_stack((edges, (edges[:, 1] - edges[:, 0]).cumsum())).astype(np.int64)
    inside = np.zeros(capacity, bool)
    for first, past, _ in ranges:
        inside[first:past] = True
    weight = np.where(rng.random(capacity) < zeros, 0.0, rng.random(capacity))
    weight = np.where(inside, weight, 1e200)  # a difference of prefix sums would lose all other weights
    tree = sum_tree.SumTree.empty(capacity)
    sum_tree.update_(tree, torch.arange(capacity), torch.from_numpy(weight), capacity, 1.0, 0.0)
    total, smallest = sum_tree.measure_within(tree, ranges)
    own = weight[inside]
    assert total == pytest.approx(own.sum(), rel=1e-12)
    assert smallest == (own[own > 0].min() if (own > 0).any() else np.inf)
    for stratified in (True, False):
        drawn = sum_tree.draw_within(tree, torch.rand(257, dtype=torch.float64), stratified, 0.5, "buffer", ranges)
        if not (own > 0).any():
            assert drawn is None
            continue
        assert drawn is not None
        index, importance = drawn
        assert inside[index.numpy()].all()
        assert (weight[index.numpy()] > 0).all()
        expected = (weight[index.numpy()] / smallest) ** -0.5
        np.testing.assert_allclose(importance.numpy(), expected, rtol=1e-5)
    if (own > 0).any():
        assert_strata(tree, ranges, weight, inside)


def assert_strata(tree: Any, ranges: np.ndarray, weight: np.ndarray, inside: np.ndarray) -> None:
    """Each row is drawn about as often as its share of the segments: at most one segment more or less at each end."""
    draws = 4_096
    drawn = sum_tree.draw_within(tree, torch.rand(draws, dtype=torch.float64), True, 0.0, None, ranges)
    assert drawn is not None
    index, _ = drawn
    counts = np.bincount(index.numpy(), minlength=len(weight))[: len(weight)]
    share = np.where(inside, weight, 0.0)
    assert (abs(counts - draws * share / share.sum()) <= 2).all()


def test_the_rows_are_those_of_torchrls_staleness_aware_sampler():
    generator = torch.Generator().manual_seed(0)
    version = torch.randint(0, 9, (50,), generator=generator)
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=StalenessAwareSampler(3, torch.ones_like, "version"), batch_size=4_000
    )
    for consumer in (8, 10, 11, None):
        found = []
        samplers = UniformSampler(max_age=3, age_key="version"), ProportionalSampler(50, max_age=3, age_key="version")
        for sampler in (*samplers, RecencySampler(max_age=3, age_key="version")):
            rb = ReplayBuffer(storage=PackedStorage(50), sampler=sampler, batch_size=4_000)
            rb.extend(rows(0, 50, 0, version))
            sampler.consumer_version = consumer
            found.append({*rb.sample()["time"].tolist()})
        if not len(theirs):
            theirs.extend(rows(0, 50, 0, version))
        theirs.sampler.consumer_version = 8 if consumer is None else consumer
        assert found == [{*theirs.sample()["time"].tolist()}] * 3
    for each in (rb, theirs):
        each.sampler.consumer_version = 12
        with pytest.raises(RuntimeError, match=r"all rows are older than max_age=3|exceed max_staleness=3"):
            each.sample()


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_waiting_call_returns_when_a_row_is_young_enough(kind):
    sampler = SAMPLERS[kind](max_age=2, age_key="version")
    rb = buffer(sampler, batch_size=4)
    sampler.consumer_version = 99
    assert not rb.can_sample()
    assert not rb.wait_until_sampleable(timeout=0.01)
    with pytest.raises(TimeoutError):
        rb.sample(wait=True, timeout=0.01)
    with pytest.raises(RuntimeError, match=r"all rows are older than max_age=2 \('version'\): write newer rows"):
        rb.sample()
    assert rb.health()["too_old"] == 20
    writer = threading.Timer(0.05, lambda: rb.extend(rows(40, 1, 0, 97)))
    writer.start()
    assert (rb.sample(wait=True, timeout=20)["time"] == 40).all()
    writer.join()
    assert rb.can_sample()


@pytest.mark.parametrize("kind", SAMPLERS)
def test_ages_are_counted_in_each_lane_while_lanes_are_apart(kind):
    torch.manual_seed(0)
    for max_age, age_key in ((0, None), (3, None), (50, None), (6, "version")):
        sampler = SAMPLERS[kind](max_age=max_age, age_key=age_key)
        rb = ReplayBuffer(storage=PackedStorage(3 * STEPS, ndim=2, lanes=3), sampler=sampler, batch_size=30_000)
        for lane, count in ((0, 27), (1, 9), (2, 20), (0, 4)):
            rb.extend(rows(31 - count if lane else 0, count, 0), lanes=lane)
        weight = np.zeros(3 * STEPS)
        newest, count = rb.storage.heads.read(rb.storage)
        for lane in range(3):
            for age in range(count[lane]):
                row = (newest[lane] - age) % STEPS * 3 + lane
                key = age if age_key is None else 10 - int(rb.storage["version"].view(-1)[row])
                own = {"uniform": 1.0, "recency": 0.5 ** (key / 3.0)}
                weight[row] = own.get(kind, 1.0) * (key <= max_age)
        expected = weight / weight.sum()
        counts = np.zeros(3 * STEPS)
        for _ in range(3):
            index = rb.sample()["index"]
            counts += (index[:, 0] * 3 + index[:, 1]).bincount(minlength=3 * STEPS).numpy()
        assert_follows(counts, expected)
        written = (weight > 0).nonzero()[0]
        found = sampler.probability(torch.from_numpy(written), storage=rb.storage)
        torch.testing.assert_close(found.numpy(), expected[written], rtol=1e-9, atol=0)
        assert rb.health()["too_old"] == count.sum() - len(written)


def test_unique_rows_are_among_the_young_ones():
    rb = buffer(UniformSampler(unique=True, max_age=6), batch_size=7)
    for _ in range(3):
        assert sorted(rb.sample()["time"].tolist()) == [*range(26, 33)]
    rb = buffer(UniformSampler(unique=True, max_age=5), batch_size=7)
    assert not rb.can_sample()
    with pytest.raises(ValueError, match="cannot draw 7 distinct rows of 6"):
        rb.sample()


def test_rows_without_a_priority_are_not_drawn_even_if_they_are_young():
    sampler = ProportionalSampler(STEPS, max_age=1, eps=0.0)
    rb = buffer(sampler, batch_size=4)
    sampler.update_priority(torch.arange(STEPS), torch.ones(STEPS), storage=rb.storage)
    sampler.update_priority(torch.tensor([11, 12]), torch.zeros(2), storage=rb.storage)  # the newest two
    assert not rb.can_sample()
    with pytest.raises(RuntimeError, match="no row has a positive priority"):
        rb.sample()
    assert rb.sampler.least_probability() == float("inf")


def test_updates_of_rows_that_became_too_old_keep_their_priorities():
    sampler = ProportionalSampler(STEPS, max_age=3, alpha=1.0, eps=0.0)
    rb = buffer(sampler, batch_size=8)
    batch = rb.sample()
    rb.extend(rows(33, 6, 0))
    batch["td_error"] = torch.full((8,), 50.0)
    rb.update_tensordict_priority(batch)
    assert (sampler.priority(batch["index"]) == 50.0).all()
    assert (rb.sample()["time"] >= 35).all()


def test_wrappers_mixtures_and_copies(tmp_path):
    sampler = NStepSampler(ProportionalSampler(STEPS, max_age=4), 2, 0.9)
    done = TensorDict({"next": {"reward": torch.ones(30), "done": torch.zeros(30, dtype=torch.bool)}}, [30])
    rb = ReplayBuffer(storage=PackedStorage(STEPS), sampler=sampler, batch_size=50)
    rb.extend(rows(0, 30, 0).update(done))
    for _ in range(3):
        assert (rb.sample()["time"] >= 25).all()
    assert rb.health()["too_old"] == 15
    members = {name: buffer(ProportionalSampler(STEPS, max_age=age, beta=1.0)) for name, age in (("a", 3), ("b", None))}
    mixed = ReplayBufferMixture(members, {"a": 0.5, "b": 0.5}, batch_size=400)
    for _ in range(3):
        batch = mixed.sample()
        parts = [batch[batch["source"] == k] for k in (0, 1)]
        assert (parts[0]["time"] >= 29).all()
        weight = []
        for part, member in zip(parts, members.values(), strict=True):
            count = 4 if member.sampler.max_age else 20
            weight.append((count * member.sampler.probability(part["index"])) ** -1.0)
        largest = max(float(1 / (count * member.sampler.least_probability()))
                      for count, member in zip((4, 20), members.values(), strict=True))  # fmt: skip
        found = torch.cat([part["priority_weight"] for part in parts]).double()
        torch.testing.assert_close(found, torch.cat(weight) / largest, rtol=1e-4, atol=0)
    made: Any = {"max_age": 5, "age_key": "version"}
    for sampler in (UniformSampler(**made), ProportionalSampler(STEPS, **made), RecencySampler(**made)):
        rb = buffer(sampler, batch_size=30)
        sampler.consumer_version = 14
        for other in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
            assert other.sampler.consumer_version == 14
            assert {*other.sample()["time"].tolist()} <= {*range(27, 33)}
    assert ProportionalSampler(STEPS, **made).max_age == 5
    saved = buffer(ProportionalSampler(STEPS, **made))
    saved.sampler.consumer_version = 13.5
    saved.dumps(tmp_path)
    loaded = ReplayBuffer(storage=PackedStorage(STEPS), sampler=ProportionalSampler(STEPS, **made))
    loaded.loads(tmp_path)
    assert loaded.sampler.consumer_version == 13.5


def test_processes_share_what_is_young():
    rb = buffer(ProportionalSampler(STEPS, max_age=3), batch_size=9)
    rb.share()
    for first in range(33, 50, 2):
        rb.extend(rows(first, 2, 0))
        assert (rb.sample()["time"] >= first - 2).all()


def test_episodes_of_young_rows():
    sampler = EpisodeSampler(UniformSampler(max_age=8))
    rb = ReplayBuffer(storage=PackedStorage(STEPS), sampler=sampler, batch_size=300)
    done = (torch.arange(20) % 5 == 4).view(20)
    rb.extend(rows(0, 20, 0).set("next", TensorDict({"done": done}, [20])))
    assert rb.sample()["time"][:, 0].unique().tolist() == [10, 15]
    with pytest.raises(ValueError, match="by='episode' draws old episodes, too: leave max_age out"):
        EpisodeSampler(UniformSampler(max_age=8), by="episode")


def test_what_cannot_work_is_refused_by_name():
    for kind in ("uniform", "proportional", "recency"):
        for wrong in (-1, 2.5, True):
            with pytest.raises(ValueError, match="max_age must be a whole number, at least 0"):
                SAMPLERS[kind](max_age=wrong)
        with pytest.raises(ValueError, match="consumer_version needs max_age and age_key"):
            SAMPLERS[kind]().consumer_version = 3
        with pytest.raises(ValueError, match="consumer_version needs max_age and age_key: without age_key"):
            SAMPLERS[kind](max_age=1).consumer_version = 3
        with pytest.raises(ValueError, match="consumer_version must be a finite number or None"):
            SAMPLERS[kind](max_age=1, age_key="version").consumer_version = float("nan")
        rb = buffer(SAMPLERS[kind](max_age=1, age_key="missing"), batch_size=4)
        with pytest.raises(SchemaError, match="age_key='missing' must name one number per row"):
            rb.sample()
        with pytest.raises(ValueError, match="needs rows in time order, a ReservoirWriter keeps none"):
            ReplayBuffer(storage=PackedStorage(9), sampler=SAMPLERS[kind](max_age=1), writer=ReservoirWriter())
    for kind in ("uniform", "proportional"):
        with pytest.raises(ValueError, match="age_key='version' is the unit of max_age"):
            SAMPLERS[kind](age_key="version")
        with pytest.raises(ValueError, match=r"cannot wrap a .* with max_age"):
            FreshRowsSampler(SAMPLERS[kind](max_age=3))
    assert AgeLimit.of(None, None) is None


# -- queues


def queue(capacity: int = 8, batch_size: int = 2, **options: Any) -> ExperienceQueue:
    return ExperienceQueue(storage=PackedStorage(capacity), batch_size=batch_size, timeout=0.01, **options)


def put(queue: ExperienceQueue, first: int, versions: list[int]) -> None:
    queue.extend(rows(first, len(versions), 0, versions))


def test_a_queue_discards_rows_that_have_waited_too_long():
    waiting = queue(max_age=3)
    put(waiting, 0, [0] * 6)
    assert waiting.can_sample()
    assert waiting.sample()["time"].tolist() == [2, 3]
    assert waiting.health()["too_old"] == 2
    put(waiting, 6, [0] * 5)
    assert waiting.sample()["time"].tolist() == [7, 8]
    assert waiting.health()["too_old"] == 5
    waiting = queue(16, 5, max_age=3)
    put(waiting, 0, [0] * 5)
    with pytest.raises(ValueError, match="only 4 rows are never older than max_age=3, a batch has 5"):
        waiting.sample()


def test_a_queue_discards_rows_of_old_policies_and_frees_their_place():
    waiting = queue(max_age=1, age_key="version")
    put(waiting, 0, [3, 5, 3, 6, 3, 3, 3, 3])
    waiting.consumer_version = 6
    assert waiting.sample()["time"].tolist() == [1, 3]
    assert (waiting.waiting, waiting.health()["too_old"]) == (4, 2)
    with pytest.raises(TimeoutError, match="a batch has 2 rows, and 0 wait"):
        waiting.sample()
    assert (waiting.waiting, waiting.health()["too_old"]) == (0, 6)
    put(waiting, 10, [5, 6, 4, 5])
    waiting.consumer_version = 7
    put(waiting, 14, [4, 4, 4, 4])  # the queue is full
    assert not waiting.can_sample()
    with pytest.raises(TimeoutError, match="a batch has 2 rows, and 1 waits that is not older than max_age=1"):
        waiting.sample()
    put(waiting, 20, [7, 7, 7, 7, 7, 7, 7])  # the places of all old rows are free
    assert [waiting.sample()["time"].tolist() for _ in range(4)] == [[11, 20], [21, 22], [23, 24], [25, 26]]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_queue_in_lockstep_with_a_list(data):
    max_age, by_key = data.draw(st.integers(1, 6)), data.draw(st.booleans())
    waiting = queue(7, max_age=max_age, age_key="version" if by_key else None)
    expected: list[tuple[int, int]] = []
    version = written = discarded = 0
    if by_key:
        waiting.consumer_version = version
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            new = [version - data.draw(st.integers(0, 3)) for _ in range(data.draw(st.integers(1, 3)))]
            if len(expected) + len(new) > 7:
                continue
            put(waiting, written, new)
            expected += zip(range(written, written + len(new)), new, strict=True)
            written += len(new)
        elif by_key:
            version += data.draw(st.integers(0, 2))
            waiting.consumer_version = version
        if not written:
            continue
        young = [row for row in expected if (version - row[1] if by_key else written - 1 - row[0]) <= max_age]
        assert waiting.can_sample() == (len(young) >= 2)
        if len(young) < 2:
            with pytest.raises(TimeoutError):
                waiting.sample(wait=False)
            discarded += len(expected) - len(young)
            expected = young
        else:
            assert waiting.sample()["time"].tolist() == [row[0] for row in young[:2]]
            passed = expected.index(young[1]) + 1
            discarded += passed - 2
            expected = expected[passed:]
        assert waiting.waiting == len(expected)
        assert waiting.health()["too_old"] == discarded


def test_queues_of_trajectories_and_processes_and_their_errors():
    waiting = queue(max_age=2, age_key="version")
    waiting.share()
    steps = torch.tensor([[5, 6, 7], [3, 7, 7], [5, 5, 5]])
    waiting.extend(TensorDict({"version": steps, "time": torch.arange(3)}, [3]))
    waiting.consumer_version = 7
    assert waiting.sample()["time"].tolist() == [0, 2]
    assert waiting.health()["too_old"] == 1
    other = queue(max_age=2, age_key="missing")
    put(other, 0, [1, 1])
    with pytest.raises(SchemaError, match="age_key='missing'"):
        other.sample()
    with pytest.raises(ValueError, match="age_key='version' is the unit of max_age"):
        QueueSampler(waiting.writer, age_key="version")
