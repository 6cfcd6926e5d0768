"""``SequenceSampler(MinibatchSampler(), L, stride=S)``: each window of divided trajectories once per epoch."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import (
    MinibatchSampler,
    PackedStorage,
    ReplayBuffer,
    ReplayBufferMixture,
    RingWriter,
    SequenceSampler,
    UniformSampler,
)
from tests.model import Model, Recipe, Row, World
from tests.storages.test_sharing import elsewhere
from tests.test_composition import BUFFERS, wrapped


class Divided(SequenceSampler):
    """A subclass that changes nothing."""


def sampler_of(recipe: Recipe, stride: int, **epochs: Any) -> SequenceSampler:
    inner = wrapped(MinibatchSampler(**epochs), replace(recipe, sequence=False))
    return Divided(inner, recipe.length, burn_in=recipe.burn_in, stride=stride)


OFTEN = [(0.0, 0.0, 0.0), (0.1, 0.05, 0.05), (0.5, 0.2, 0.2), (1.0, 0.0, 0.0)]


def anchors_of(world: World, stride: int) -> list[Row]:
    """Return, from the definition, each ``stride``-th row of each trajectory."""
    return [row for row in world.model.rows() if world.model.reach(row)[0] % stride == 0]


def check_epoch(world: World, recipe: Recipe, stride: int, size: int, drop_last: bool, shuffle: bool) -> None:
    wanted, drawn = anchors_of(world, stride), cast("list[Row]", [])
    learned: Counter[Row] = Counter()
    full, rest = divmod(len(wanted), size)
    for number, batch in enumerate(world.rb):
        anchors = world.check_batch(batch, recipe)
        assert len(anchors) == (size if number < full else rest)
        drawn += anchors
        for row in batch[batch["mask"] & ~batch["burn_in_mask"]]["index"].tolist():
            learned[world.model.row(*(row if isinstance(row, list) else [row]))] += 1
    assert len(drawn) == (full * size if drop_last else len(wanted))
    assert len({*drawn}) == len(drawn)
    assert {*drawn} <= {*wanted}
    if not shuffle:
        assert drawn == wanted[: len(drawn)]
    if stride == recipe.length:
        assert set(learned.values()) <= {1}
        if not drop_last:
            assert {*learned} == {*world.model.rows()}


@given(
    buffer=st.sampled_from([*BUFFERS]),
    often=st.sampled_from(OFTEN),
    steps=st.integers(1, 12),
    lanes=st.sampled_from([1, 2, 3]),
    writes=st.lists(st.integers(2, 30), min_size=1, max_size=4),
    length=st.integers(1, 6),
    less=st.sampled_from([0, 0, 0, 1, 3]),
    burn_in=st.sampled_from([0, 0, 1, 3]),
    inner=st.sampled_from(["plain", "plain", "n_step", "hindsight"]),
    size=st.integers(1, 7),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 999),
)
def test_an_epoch_has_every_window_once(
    buffer, often, steps, lanes, writes, length, less, burn_in, inner, size, drop_last, shuffle, seed
):
    within = {"n_step": inner == "n_step", "hindsight": inner == "hindsight"}
    recipe = Recipe(sequence=True, length=length, burn_in=burn_in, **within)
    cls, storage, writer = BUFFERS[buffer]
    stride = max(1, length - less)
    rb = cls(
        storage=storage(steps * lanes, ndim=2 if lanes > 1 else 1),
        sampler=sampler_of(recipe, stride, shuffle=shuffle, drop_last=drop_last),
        writer=writer(),
        batch_size=size * recipe.window,
    )
    world = World(rb, Model(steps, lanes if lanes > 1 else 0), seed, often)
    for count in writes:
        world.extend(count)
        if drop_last and len(anchors_of(world, stride)) < size:
            assert not rb.can_sample(size * recipe.window)
            with pytest.raises(
                ValueError, match=f"drop_last leaves no batch: .* windows are fewer than .* size {size}"
            ):
                rb.sample()
            continue
        assert rb.can_sample(size * recipe.window)
        for _ in range(2):
            check_epoch(world, recipe, stride, size, drop_last, shuffle)


@pytest.mark.usefixtures("boundaries")
@pytest.mark.parametrize("lanes", [1, 3])
def test_large_rings_are_divided_alike_on_every_device(lanes, device):
    world = World.of(
        sampler_of(Recipe(length=7, burn_in=0), 7),
        400,
        lanes if lanes > 1 else 0,
        2.3,
        batch_size=70,
        often=(0.03, 0.01, 0.01),
    )
    check_epoch(world, Recipe(sequence=True, length=7, burn_in=0), 7, 10, False, True)


def buffer(sampler: Any = None, cls: Any = ReplayBuffer, storage: Any = PackedStorage, **parts: Any) -> Any:
    sampler = SequenceSampler(MinibatchSampler(3), 3, stride=3) if sampler is None else sampler
    rb = cls(storage=storage(20, ndim=2), sampler=sampler, batch_size=6, generator=torch.Generator(), **parts)
    rb.extend(rows(10))
    return rb


def rows(steps: int, every: int = 4) -> TensorDict:
    x = torch.arange(2 * steps).view(2, steps)
    return TensorDict({"x": x, "next": {"done": (x % every == every - 1)[..., None]}}, [2, steps])


@given(
    writes=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=5),
    length=st.integers(1, 4),
    size=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_lanes_of_unlike_lengths_are_divided_each_for_itself(writes, length, size, seed):
    torch.manual_seed(seed)
    sampler, steps = SequenceSampler(MinibatchSampler(), length, stride=length), 13
    rb = ReplayBuffer(storage=PackedStorage(3 * steps, ndim=2, lanes=3), sampler=sampler, batch_size=size * length)
    stored: list[list[tuple[int, bool]]] = [[], [], []]
    written = 0
    for lanes in writes:
        x, done = torch.arange(written, written + len(lanes)), torch.rand(len(lanes), 1) < 0.2
        written += len(lanes)
        rb.extend(TensorDict({"x": x, "next": {"done": done}}, [len(lanes)]), lanes=torch.tensor(lanes))
        for lane, *row in zip(lanes, x.tolist(), done.flatten().tolist(), strict=True):
            stored[lane] = [*stored[lane], tuple(row)][-steps:]
        wanted = []
        for lane_rows in stored:
            chunk: list[int] = []
            for place, (number, ends) in enumerate(lane_rows):
                chunk.append(number)
                if ends or len(chunk) == length or place + 1 == len(lane_rows):
                    wanted.append(chunk)
                    chunk = []
        for _ in range(2):
            windows = [each for batch in rb for each in batch.view(-1, length)]
            assert sorted(each["x"][each["mask"]].tolist() for each in windows) == sorted(wanted)


@pytest.mark.parametrize("capacity", [26, 14])
def test_a_dump_for_another_capacity_has_whole_epochs(capacity, tmp_path):
    rb = buffer()
    rb.extend(rows(3))  # the ring has wrapped
    rb.sample()
    rb.dumps(tmp_path)
    other = ReplayBuffer(
        storage=PackedStorage(capacity, ndim=2), sampler=rb.sampler.__class__(MinibatchSampler(), 3, stride=3)
    )
    if capacity < 20:
        with pytest.warns(UserWarning, match="oldest"):
            other.loads(tmp_path)
    else:
        other.loads(tmp_path)
    other.sampler.epochs = 1
    other.sampler.restart()
    found = torch.cat([batch["index"][batch["mask"]] for batch in other])
    assert len(found) == len(found.unique(dim=0)) == len(other)


def test_writes_and_edits_of_done_flags_begin_new_epochs():
    rb = buffer()
    for change in (
        lambda: rb.extend(rows(10)),
        lambda: rb.extend(rows(2)),
        lambda: rb.set_at_(("next", "done"), True, (4, 0)),
        lambda: rb.storage.set(range(10), rows(10, 5).transpose(0, 1).contiguous()),
    ):
        rb.sample()
        change()
        epoch = [rb.sample() for _ in range(4)]
        found = torch.cat([batch["index"][batch["mask"]] for batch in epoch])[: len(rb)]
        assert len(found.unique(dim=0)) == len(found)
    rb.sample()
    position = rb.sampler.position
    rb.set_at_("x", 7, (4, 0))  # the same trajectories
    rb.sample()
    assert rb.sampler.position == position + 2


def in_another_process(rb: ReplayBuffer) -> None:
    rb.sampler.restart()
    found = torch.cat([batch["index"][batch["mask"]] for batch in rb])
    assert len(found) == 3 * len(rb)
    assert (found.unique(dim=0, return_counts=True)[1] == 3).all()
    rb.extend(rows(7, 5))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_share_the_rows_and_have_epochs_of_their_own():
    rb, alone = buffer(), buffer()
    rb.sample(), alone.sample()
    rb.share()
    for _ in range(5):
        assert (rb.sample() == alone.sample()).all()
    elsewhere(in_another_process, rb)
    alone.extend(rows(7, 5))  # as the other process has: both begin new epochs
    for one, other in zip(rb, alone, strict=True):
        assert torch.equal(one["index"], other["index"])
        assert torch.equal(one["x"], other["x"])
    in_another_process(rb)


@pytest.mark.parametrize("prefetch", [2, 3])
def test_batches_drawn_ahead_are_the_same(prefetch):
    ahead, plain = buffer(prefetch=prefetch, device="cpu"), buffer()
    for change in (None, rows(4)):
        if change is not None:
            ahead.extend(change), plain.extend(change)
        for one, other in zip(ahead, plain, strict=True):
            assert (one == other).all()


@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_threads_that_fetch_ahead_draw_every_row_as_often_as_asked(storage):
    sampler = SequenceSampler(MinibatchSampler(3), 3, stride=3)
    rb = buffer(sampler, TensorDictReplayBuffer, storage, writer=RingWriter(), prefetch=3)
    for _ in range(20):  # a race would not show every time
        counts = Counter(x for batch in rb for x in batch["x"][batch["mask"]].tolist())
        assert counts == dict.fromkeys(range(20), 3)
    rb.shutdown()


def test_windows_of_an_epoch_can_be_mixed_with_others():
    once, often = buffer(), buffer(SequenceSampler(UniformSampler(), 3))
    mixed = ReplayBufferMixture({"once": once, "often": often}, {"once": 0.5, "often": 0.5}, batch_size=12)
    batches = []
    while once.sampler.epoch == 0:
        batches.append(mixed.sample())
    rows_of_once = torch.cat([batch["x"][(batch["source"] == 0) & batch["mask"]] for batch in batches])
    assert sorted(rows_of_once.tolist()) == [*range(20)]


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_batches_of_windows_have_two_dims_on_request(cls):
    storage = PackedStorage if cls is ReplayBuffer else LazyTensorStorage
    sampler = SequenceSampler(MinibatchSampler(), 3, stride=3, output_layout="batch_time")
    rb = buffer(sampler, cls, storage)
    batches = [*rb]
    assert [batch.shape for batch in batches] == [(2, 3)] * 5
    assert sorted(torch.cat([batch["x"][batch["mask"]] for batch in batches]).tolist()) == [*range(20)]


def test_batches_are_drawn_by_compiled_code():
    rb = buffer(SequenceSampler(MinibatchSampler(), 3, stride=3))
    rb.sample(), rb.sample()
    bound = rb.bound[6]
    rb.extend(rows(7))
    assert len([*rb][-1]) == 3  # which torch draws
    rb.sample()
    assert rb.bound[6] is bound
    assert "sample" in rb.compiled.partition("; not")[0]
