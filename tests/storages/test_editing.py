"""Entries of stored rows set in place, as in TorchRL, and those of sampled batches, in
rows that are still there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import (
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    ReservoirWriter,
    SchemaError,
    SequenceSampler,
    TrajectoryIndex,
    UniformSampler,
)
from tests.catalogue import assert_same, numbered_rows
from tests.model import World, assert_holds

STORAGES = {
    "plain": PackedStorage,
    "shared observations": partial(PackedStorage, share_next=True),
    "frames": partial(PackedStorage, frames={"observation": (3, -1)}),
}
over_storages = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
REWARD = ("next", "reward")


def transitions(n: int) -> TensorDict:
    seen = torch.arange(n + 3.0).unfold(0, 3, 1)  # [n + 1, 3], a stack of frames each
    after = {"observation": seen[1:], "reward": torch.arange(n)[:, None].float()}
    return TensorDict(
        {"observation": seen[:-1], "hidden": torch.zeros(n, 2), "next": after}, [n]
    )


def pair(storage: Any, lanes: int = 1) -> list[Any]:
    """Return a buffer and one of TorchRL's, with the same 12 rows, ``[T, E]`` if there
    are lanes."""
    rows = transitions(12)
    if lanes > 1:
        rows = rows.reshape(lanes, -1).transpose(0, 1)
    buffers: list[Any] = [
        cls(storage=place(20, ndim=rows.ndim), dim_extend=0)
        for cls, place in (
            (ReplayBuffer, storage),
            (TensorDictReplayBuffer, LazyTensorStorage),
        )
    ]
    for rb in buffers:
        rb.extend(rows)
    return buffers


def check_pair(ours: Any, theirs: Any) -> None:
    """Compare all rows, and a batch with the rows at its index."""
    assert_same(ours[:], theirs[:].exclude("index"))
    batch = ours.sample(64)
    index = batch.pop("index")
    assert_same(batch, ours.storage.get(index if index.ndim == 1 else index.unbind(-1)))


# -- rows


ROWS = [3, -1, slice(2, 9, 3), [1, 5], torch.tensor([[0, 1]]), torch.arange(12) > 8]
CELLS = [2, (1, 1), (slice(None), 0), (torch.tensor([0, 3]), torch.tensor([1, 0]))]


@over_storages
@pytest.mark.parametrize(("lanes", "indices"), [(1, ROWS), (2, CELLS)])
def test_one_entry_of_rows_that_are_named_as_those_of_a_tensor_is_set(
    storage: Any, lanes: int, indices: list[Any]
):
    for index in indices:
        buffers = pair(storage, lanes)
        keys: list[Any] = ["hidden", REWARD]
        if storage is PackedStorage:  # others hold these once
            keys += ["observation", ("next", "observation")]
        for key in keys:
            value = -1 - torch.rand_like(buffers[1].storage[:][key][index])
            for rb in buffers:
                assert rb.set_at_(key, value, index) is rb
        check_pair(*buffers)


@pytest.mark.parametrize("lanes", [2, 3])
def test_edits_take_rows_as_they_are_read_or_refuse_by_name(lanes: int):
    """Rows [T, E] are read as [E, T]; with three lanes, T is E, and no shape tells the
    two apart."""
    rb: Any = ReplayBuffer(storage=PackedStorage(20, ndim=2))
    rb.extend(transitions(lanes * 3).reshape(lanes, 3))
    relabeled = rb[:][REWARD] + 100.0 * torch.arange(lanes)[:, None, None]
    before = rb[:].clone()
    words = r"use rb\[key\] = value, which takes what rb\[key\] gives"
    edits: list[tuple[Any, str]] = [
        (lambda: rb.set_(REWARD, relabeled), words),
        (lambda: rb.update_({REWARD: relabeled}), r"use rb\[key\] = value"),
    ]
    for index in (1, slice(None), [0, 1], relabeled[..., 0] > 100, (slice(None), 0)):
        edit = partial(rb.set_at_, REWARD, 1.0, index)
        edits.append((edit, "set_at_ takes coordinates"))
    for edit, words in edits:
        with pytest.raises(NotImplementedError, match=words):
            edit()
        assert (rb[:] == before).all()
    rb[REWARD] = relabeled
    assert torch.equal(rb[:][REWARD], relabeled)
    step, lane = rb.sample(5)["index"].unbind(-1)
    rb.set_at_(REWARD, torch.full((5, 1), -1.0), (step, lane))
    assert (rb[:][REWARD][lane, step] == -1).all()


@pytest.mark.parametrize("first", [5, slice(5, 6), torch.tensor([5])], ids=str)
def test_holes_are_zeros_in_whole_steps_and_refused_by_lane(first: Any) -> None:
    rb = ReplayBuffer(storage=PackedStorage(20, ndim=2, lanes=2))
    for lane, count in enumerate((6, 5)):
        rb.extend(TensorDict({"x": torch.ones(count)}, [count]), lanes=lane)
    for index in (first, (first,), (first, slice(None)), (first, ...)):
        assert rb.storage.get(index)["x"].flatten().tolist() == [1.0, 0.0]
    for lane in (1, torch.tensor([1])):
        with pytest.raises(IndexError, match="step 5 of lane 1"):
            rb.storage.get((torch.tensor([5]), lane))


def test_an_index_of_uint8_is_refused_because_torch_takes_it_for_a_mask() -> None:
    storage, rows = PackedStorage(5), numbered_rows(5)
    with pytest.raises(IndexError, match="none have been written"):
        storage[0] = rows[0]
    storage.set(range(5), rows)
    index = torch.tensor([1, 0, 1, 0, 0], dtype=torch.uint8)
    for call in (
        lambda: storage[index],
        lambda: storage.set(index, rows, set_cursor=False),
        lambda: storage.edit(lambda data: data.zero_(), index),
    ):
        with pytest.raises(IndexError, match=r"index\.bool\(\) or index\.long"):
            call()
    assert_same(storage[:], rows)


@pytest.mark.parametrize("name", ["shared observations", "frames"])
def test_deduplicated_keys_are_not_edited(name: str):
    rb: Any = pair(STORAGES[name])[0]
    before = rb[:].clone()
    batch = rb.sample(4)
    stamps = rb.storage.stamps(batch["index"])
    for call in (
        lambda: rb.set_at_("observation", torch.ones(3), 3),
        lambda: rb.set_at_(("next", "observation"), torch.ones(2, 3), [0, 4]),
        lambda: rb.__setitem__("observation", -before["observation"]),
        lambda: rb.write_back(batch, "observation", sampled_at=stamps),
        lambda: rb.__setitem__(3, before[5]),
        lambda: rb.__setitem__(torch.arange(len(before)) == 3, before[5:6]),
        lambda: rb.storage.set([len(before), 0], before[:2]),
    ):
        with pytest.raises(SchemaError, match="is deduplicated: leave it out of"):
            call()
        assert_same(rb[:], before)
    with pytest.raises(ValueError, match="a ReservoirWriter keeps none: use a RingWri"):
        rb.set_writer(ReservoirWriter())


def test_a_function_that_fails_edits_nothing():
    storage, rows = PackedStorage(12), transitions(5)
    storage.set(range(5), rows)

    def change(rows: TensorDict) -> None:
        rows["hidden"].fill_(7)
        raise RuntimeError("half done")

    for region in (None, [1, 3]):
        with pytest.raises(RuntimeError, match="half done"):
            storage.edit(change, region)
        assert_same(storage[:], rows)
    with pytest.raises(KeyError, match="no entry 'gone'"):
        storage.edit(lambda rows: rows.zero_(), key="gone")
    sevens = torch.full((2, 2), 7.0)
    storage.edit(lambda rows: rows.set_("hidden", sevens), [1, 3], key="hidden")
    rows["hidden"][[1, 3]] = 7
    assert_same(storage[:], rows)


@over_storages
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_key_of_a_buffer_or_a_storage_is_set_by_item_assignment(
    storage: Any, lanes: int
):
    """In the shape that reading it gives; TorchRL's buffers drop the value unless they
    are full."""
    ours, theirs = pair(storage, lanes)
    for place in (ours, ours.storage):
        for key in ("hidden", REWARD):
            value = -1 - torch.rand_like(place[key])
            revision = ours.storage.revision
            place[key] = value
            assert ours.storage.revision == revision + 1
            assert torch.equal(place[key], value)
            theirs.storage[:][key].copy_(ours.storage[key])
    check_pair(ours, theirs)


# -- batches


STEPS = 12


@pytest.mark.parametrize("is_stamped", [False, True])
@pytest.mark.parametrize("lanes", [0, 2])
def test_only_rows_that_are_still_there_are_written(lanes, is_stamped):
    sampler = ProportionalSampler(24) if is_stamped else UniformSampler()
    world = World.of(sampler, STEPS, lanes, 0.6)
    for written in (1, 3, 5, 7, 11, 12, 15):
        batch = world.rb.sample(20)
        rows = world.rows_at(batch["index"])
        stamps = None if is_stamped else world.rb.storage.stamps(batch["index"])
        world.extend(written)
        new = torch.rand(20, 3)
        batch["hidden"] = new
        count = world.rb.write_back(batch, "hidden", sampled_at=stamps)
        fields: Any = [{("hidden",): state} for state in new.tolist()]
        assert count == world.model.write_back(rows, fields)
        assert_holds(world.rb, world.model, episodes=False)


@pytest.mark.parametrize("lanes", [0, 2])
def test_stamps_of_windows_have_their_shape(lanes: int) -> None:
    windows = SequenceSampler(UniformSampler(), 2, output_layout="batch_time")
    world = World.of(windows, STEPS, lanes, 0.6)
    batch = world.rb.sample(20)
    stamps = world.rb.storage.stamps(batch["index"])
    assert stamps.shape == batch.shape == (10, 2)
    step = batch["index"][..., 0] if lanes else batch["index"]
    assert torch.equal(stamps, step)  # no row has been replaced
    batch["hidden"] = batch["observation"][..., :1].expand(10, 2, 3).clone()
    assert world.rb.write_back(batch, ["hidden"], sampled_at=stamps) > 0
    stored = world.rb.storage[:].flatten()
    is_written = torch.isin(stored["observation"][:, 0], batch["observation"][..., 0])
    expected = stored["observation"][:, :1] * torch.ones(3)
    assert torch.equal(stored["hidden"][is_written], expected[is_written])


def test_what_a_sequence_repeats_is_not_written():
    sampler = SequenceSampler(ProportionalSampler(STEPS), 4, burn_in=2)
    rb = ReplayBuffer(storage=PackedStorage(STEPS), sampler=sampler)
    rb.extend(numbered_rows(9, every=4).set("state", torch.zeros(9)))
    for _ in range(5):
        batch = rb.sample(24)
        batch["state"] = torch.where(batch["mask"], batch["x"], -1).float()
        assert rb.write_back(batch, ["state"]) == int(batch["mask"].sum())
    assert torch.equal(rb.storage["state"], torch.arange(9.0))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_next_entries_are_written_back_unless_steps_are_joined(is_wrapped):
    inner = NStepSampler(ProportionalSampler(STEPS), 3, 0.9)
    sampler = SequenceSampler(inner, 2) if is_wrapped else inner
    rb = ReplayBuffer(storage=PackedStorage(STEPS), sampler=sampler)
    rb.extend(numbered_rows(9))
    assert rb.write_back(rb.sample(4), ["x"])  # refused: tests/refusals/buffers.py
    inner.n_steps = 1
    assert rb.write_back(rb.sample(4), [("next", "achieved_goal")])
    assert_same(rb.storage[:], numbered_rows(9))


def test_done_flags_that_are_written_back_end_episodes():
    rb = ReplayBuffer(storage=PackedStorage(8))
    rb.extend(numbered_rows(6))
    episodes = TrajectoryIndex(rb.storage)
    assert episodes.steps_ahead(torch.arange(6)).tolist() == [5, 4, 3, 2, 1, 0]
    index = torch.tensor([2])
    batch = numbered_rows(1).set("index", index)
    batch["next", "done"][:] = True
    stamps = rb.storage.stamps(index)
    assert rb.write_back(batch, [("next", "done")], sampled_at=stamps) == 1
    assert episodes.steps_ahead(torch.arange(6)).tolist() == [2, 1, 0, 2, 1, 0]
