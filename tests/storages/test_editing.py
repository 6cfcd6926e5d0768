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
from tests.catalogue import buffer_of

STORAGES = {
    "plain": PackedStorage,
    "shared observations": partial(PackedStorage, share_next=True),
    "frames": partial(PackedStorage, frames={"observation": (3, -1)}),
}
over_storages = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


def transitions(n: int) -> TensorDict:
    seen = torch.arange(n + 3.0).unfold(0, 3, 1)  # [n + 1, 3], a stack of frames each
    after = {"observation": seen[1:], "reward": torch.arange(n)[:, None].float()}
    return TensorDict(
        {"observation": seen[:-1], "hidden": torch.zeros(n, 2), "next": after}, [n]
    )


def pair(
    storage: Any, lanes: int = 1, dim_extend: int | None = None
) -> tuple[ReplayBuffer, TensorDictReplayBuffer]:
    ndim, buffers = 1 + (lanes > 1), []
    for cls, place in (
        (ReplayBuffer, storage),
        (TensorDictReplayBuffer, LazyTensorStorage),
    ):
        buffers.append(cls(storage=place(20, ndim=ndim), dim_extend=dim_extend))
        data = transitions(12) if lanes == 1 else transitions(12).reshape(lanes, -1)
        buffers[-1].extend(
            data.transpose(0, 1) if lanes > 1 and dim_extend == 0 else data
        )
    return buffers[0], buffers[1]


def assert_same(ours: Any, theirs: Any) -> None:
    assert (ours[:] == theirs[:].exclude("index")).all()
    batch = ours.sample(64)
    index = batch.pop("index")
    assert (
        batch == ours.storage.get(index.unbind(-1) if index.ndim > 1 else index)
    ).all()


ROWS = [3, -1, slice(2, 9, 3), [1, 5], torch.tensor([[0, 1]]), torch.arange(12) > 8]
CELLS = [2, (1, 1), (slice(None), 0), (torch.tensor([0, 3]), torch.tensor([1, 0]))]


@over_storages
@pytest.mark.parametrize(("lanes", "indices"), [(1, ROWS), (2, CELLS)])
def test_one_entry_of_rows_that_are_named_as_those_of_a_tensor_is_set(
    storage: Any, lanes: int, indices: list[Any]
):
    for index in indices:
        ours, theirs = pair(storage, lanes, dim_extend=0)
        for key in (
            "hidden",
            *(
                ("observation", ("next", "observation"))
                if storage is PackedStorage
                else ()
            ),
        ):
            value = -1 - torch.rand_like(theirs.storage[:][key][index])
            for rb in (ours, theirs):
                assert rb.set_at_(key, value, index) is rb
            assert_same(ours, theirs)


@over_storages
@pytest.mark.parametrize("lanes", [2, 3])
def test_edits_take_rows_as_they_are_read_or_refuse_by_name(storage: Any, lanes: int):
    """Rows [T, E] are read as [E, T]; with three lanes, T is E, and no shape tells the
    two apart."""
    rb = ReplayBuffer(storage=storage(20, ndim=2))
    rb.extend(transitions(lanes * 3).reshape(lanes, 3))
    relabeled = rb[:]["next", "reward"] + 100.0 * torch.arange(lanes)[:, None, None]
    before = rb[:].clone()
    edits: list[Any] = [
        (
            lambda: rb.set_(("next", "reward"), relabeled),
            r"use rb\[key\] = value, which takes what rb\[key\] gives",
        ),
        (lambda: rb.update_({("next", "reward"): relabeled}), r"use rb\[key\] = value"),
    ]
    edits += [
        (
            lambda index=index: rb.set_at_(("next", "reward"), 1.0, index),
            "set_at_ takes coordinates",
        )
        for index in (1, slice(None), [0, 1], relabeled[..., 0] > 100, (slice(None), 0))
    ]
    for edit, words in edits:
        with pytest.raises(NotImplementedError, match=words):
            edit()
        assert (rb[:] == before).all()
    rb["next", "reward"] = relabeled
    assert torch.equal(rb[:]["next", "reward"], relabeled)
    index = rb.sample(5)["index"]
    rb.set_at_(("next", "reward"), torch.full((5, 1), -1.0), index.unbind(-1))
    assert (rb[:]["next", "reward"][index[:, 1], index[:, 0]] == -1).all()
    rb.set_at_(("next", "reward"), torch.tensor([-2.0]), (2, 0))
    assert rb[0, 2]["next", "reward"] == -2


@over_storages
def test_one_row_is_set_while_lanes_have_unlike_lengths(storage: Any):
    rb = ReplayBuffer(storage=storage(20, ndim=2, lanes=2))
    rb.extend(transitions(6), lanes=0)
    rb.extend(transitions(5), lanes=1)
    for key, value in (
        ("hidden", torch.full((2,), -1.0)),
        (("next", "reward"), torch.tensor([-2.0])),
    ):
        rb.set_at_(key, value, (2, 0))
        assert torch.equal(rb.storage[2, 0][key], value)
    assert (rb.lane(1).chronological() == transitions(5)).all()
    with pytest.raises(IndexError, match="lane"):
        rb.set_at_("hidden", torch.zeros(2), (5, 1))


@pytest.mark.parametrize("first", [5, slice(5, 6), torch.tensor([5])], ids=str)
def test_holes_are_zeros_in_whole_steps_and_refused_by_lane(first: Any) -> None:
    rb = ReplayBuffer(storage=PackedStorage(20, ndim=2, lanes=2))
    rb.extend(TensorDict({"x": torch.ones(6)}, [6]), lanes=0)
    rb.extend(TensorDict({"x": torch.ones(5)}, [5]), lanes=1)
    for index in (first, (first,), (first, slice(None)), (first, ...)):
        assert rb.storage.get(index)["x"].flatten().tolist() == [1.0, 0.0]
    for lane in (1, torch.tensor([1])):
        with pytest.raises(IndexError, match="step 5 of lane 1"):
            rb.storage.get((torch.tensor([5]), lane))


def test_an_index_of_uint8_is_refused_because_torch_takes_it_for_a_mask() -> None:
    storage = PackedStorage(5)
    rows = TensorDict({"x": torch.arange(5)}, [5])
    storage.set(range(5), rows)
    index = torch.tensor([1, 0, 1, 0, 0], dtype=torch.uint8)
    for call in (
        lambda: storage[index],
        lambda: storage.set(index, rows, set_cursor=False),
        lambda: storage.edit(lambda data: data.zero_(), index),
    ):
        with pytest.raises(IndexError, match=r"index\.bool\(\) or index\.long"):
            call()
    assert torch.equal(storage["x"], torch.arange(5))


def test_an_edit_before_the_first_write_is_refused() -> None:
    storage = PackedStorage(5)
    with pytest.raises(IndexError, match="none have been written"):
        storage[0] = TensorDict({"x": torch.tensor(1)}, [])


@pytest.mark.parametrize(
    "storage", [each for each in STORAGES.values() if each is not PackedStorage]
)
def test_deduplicated_keys_are_not_edited(storage: Any):
    rb = pair(storage)[0]
    batch, before = rb.sample(4), rb[:].clone()
    calls = [
        lambda: rb.set_at_("observation", torch.ones(3), 3),
        lambda: rb.set_at_(("next", "observation"), torch.ones(2, 3), [0, 4]),
        lambda: rb.__setitem__("observation", -before["observation"]),
        lambda: rb.write_back(
            batch, "observation", sampled_at=rb.storage.stamps(batch["index"])
        ),
        lambda: rb.__setitem__(3, before[5]),
        lambda: rb.__setitem__(torch.tensor([3, 5]), before[:2]),
        lambda: rb.__setitem__(torch.arange(len(before)) == 3, before[5:6]),
    ]
    for call in calls:
        with pytest.raises(
            SchemaError,
            match=r"cannot edit .*'observation'\)?, which is deduplicated: leave it out of",
        ):
            call()
        assert (rb[:] == before).all()
    for steps in ([0], [len(before), 0]):
        with pytest.raises(SchemaError, match="which is deduplicated: leave it out of"):
            rb.storage.set(steps, before[: len(steps)])
        assert (rb[:] == before).all()
    with pytest.raises(
        ValueError,
        match="in time order, a ReservoirWriter keeps none: use a RingWriter",
    ):
        rb.set_writer(ReservoirWriter())
    with pytest.raises(ValueError, match="a ReservoirWriter keeps none"):
        ReplayBuffer(storage=storage(20), writer=ReservoirWriter())


def test_a_function_that_fails_edits_nothing():
    rb = ReplayBuffer(storage=PackedStorage(12))
    rb.extend(transitions(5))
    before = rb[:].clone()

    def change(rows: TensorDict) -> None:
        rows["hidden"].fill_(7)
        raise RuntimeError("half done")

    for region in (None, [1, 3]):
        with pytest.raises(RuntimeError, match="half done"):
            rb.storage.edit(change, region)
        assert (rb[:] == before).all()
    with pytest.raises(KeyError, match="no entry 'gone'"):
        rb.storage.edit(lambda rows: rows.zero_(), key="gone")
    rb.storage.edit(lambda rows: rows["hidden"].fill_(7), [1, 3], key="hidden")
    assert (rb[:].exclude("hidden") == before.exclude("hidden")).all()
    is_edited = (rb[:]["hidden"] == 7).all(-1)
    assert is_edited.nonzero()[:, 0].tolist() == [1, 3]


@over_storages
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("key", ["hidden", "observation", ("next", "reward")])
def test_a_key_of_a_buffer_or_a_storage_is_set_by_item_assignment(
    storage: Any, lanes: int, key: Any
):
    """In the shape that reading it gives; TorchRL's buffers drop the value unless they
    are full."""
    if key == "observation" and storage is not PackedStorage:
        return  # refused
    ours, theirs = pair(storage, lanes)
    for place in (ours, ours.storage):
        value = -1 - torch.rand_like(place[key])
        revision = ours.storage._mutation_revision
        place[key] = value
        assert ours.storage._mutation_revision == revision + 1
        assert torch.equal(place[key], value)
        assert torch.equal(place[key], value)
    theirs.set_(key, value)
    assert_same(ours, theirs)
    if lanes == 1 and storage is PackedStorage:
        ours[3] = ours[:][5].clone()
        assert (ours[:][3] == ours[:][5]).all()


CAPACITY = 12
PLACES: dict[str, Any] = {
    "plain": PackedStorage,
    "shared": partial(PackedStorage, shared=True),
}


class Numbered:
    """A buffer in which no two rows that were ever written have the same ``x``;
    ``state`` is ``[3]`` zeros at first."""

    def __init__(
        self,
        lanes: int = 0,
        storage: Any = PackedStorage,
        sampler: Any = None,
        batch: int = 20,
    ) -> None:
        cells = CAPACITY * max(lanes, 1)
        self.lanes, self.next = lanes, 1
        self.rb = buffer_of(
            CAPACITY,
            sampler or ProportionalSampler(cells),
            lanes,
            storage,
            batch_size=batch,
        )

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
        return dict(
            zip(
                rows["x"].flatten().tolist(),
                rows["state"].reshape(-1, 3).tolist(),
                strict=True,
            )
        )


@pytest.mark.parametrize(
    ("storage", "lanes", "stamped"),
    [("plain", 0, False), ("shared", 2, False), ("shared", 0, True)],
)
def test_only_rows_that_are_still_there_are_written(storage, lanes, stamped):
    sampler = None if stamped else UniformSampler()
    made = Numbered(lanes, PLACES[storage], sampler)
    made.write(7)
    for written in (0, 1, 3, 5, 7, 11, 12, 15):
        batch = made.rb.sample()
        stamps = made.rb.storage.stamps(batch["index"])
        assert ("sampled_at" in batch.keys()) == stamped
        batch["state"] = torch.rand(len(batch), 3)
        if written:
            made.write(written)
        before = made.states()
        count = made.rb.write_back(
            batch, ["state"], sampled_at=None if stamped else stamps
        )
        new = {
            x: state
            for x, state in zip(
                batch["x"].tolist(), batch["state"].tolist(), strict=True
            )
            if x in before
        }
        assert made.states() == before | new
        assert count == sum(x in before for x in batch["x"].tolist())
        assert made.rb.storage["x"].sum() == sum(before)


@pytest.mark.parametrize("lanes", [0, 2])
def test_stamps_of_windows_have_their_shape(lanes: int) -> None:
    made = Numbered(
        lanes,
        PLACES["plain"],
        SequenceSampler(UniformSampler(), 2, output_layout="batch_time"),
    )
    made.write(7)
    batch = made.rb.sample()
    storage, dims = made.rb.storage, 1 + bool(lanes)
    stamps = storage.stamps(batch["index"])
    assert stamps.shape == batch.shape == (10, 2)
    assert (stamps.flatten() == storage.stamps(batch["index"].flatten(0, 1))).all()
    batch["state"] = batch["x"].float()[..., None].expand(10, 2, 3).clone()
    assert batch["index"].ndim == 1 + dims
    assert made.rb.write_back(batch, ["state"], sampled_at=stamps) > 0
    written = {
        x: state
        for x, state in made.states().items()
        if x in batch["x"].flatten().tolist()
    }
    assert all(state == [x] * 3 for x, state in written.items())


def test_what_a_sequence_repeats_is_not_written():
    made = Numbered(
        0,
        sampler=SequenceSampler(ProportionalSampler(CAPACITY), 4, burn_in=2),
        batch=24,
    )
    rows = made.rows(9)
    rows["next", "done"][[2, 6]] = True
    made.rb.extend(rows)
    for _ in range(5):
        batch = made.rb.sample()
        batch["state"] = (
            torch.where(batch["mask"], batch["x"], -1.0)[:, None].expand(-1, 3).clone()
        )
        assert made.rb.write_back(batch, ["state"]) == int(batch["mask"].sum())
    assert made.states() == {x: [x] * 3 for x in made.states()}


@pytest.mark.parametrize("outer", [None, lambda inner: SequenceSampler(inner, 2)])
def test_next_entries_of_joined_steps_are_refused(outer):
    inner = NStepSampler(
        ProportionalSampler(CAPACITY), 3, 0.9, reward_key=("next", "reward")
    )
    rb = ReplayBuffer(
        storage=PackedStorage(CAPACITY),
        sampler=outer(inner) if outer else inner,
        batch_size=4,
    )
    following = {
        "state": torch.arange(9.0),
        "reward": torch.zeros(9),
        "done": torch.zeros(9, dtype=torch.bool),
    }
    rb.extend(TensorDict({"state": torch.arange(9.0), "next": following}, [9]))
    batch = rb.sample()
    assert rb.write_back(batch, ["state"])
    inner.n_steps = 1
    assert rb.write_back(rb.sample(), [("next", "state")])
    assert rb.storage["next", "state"].tolist() == list(range(9))


def test_done_flags_that_are_written_back_end_episodes():
    rb = ReplayBuffer(storage=PackedStorage(8))
    done = torch.zeros(6, 1, dtype=torch.bool)
    rb.extend(TensorDict({"next": {"done": done}}, [6]))
    episodes = TrajectoryIndex(rb.storage)
    assert episodes.steps_ahead(torch.arange(6)).tolist() == [5, 4, 3, 2, 1, 0]
    index = torch.tensor([2])
    batch = TensorDict({"index": index, "next": {"done": ~done[:1]}}, [1])
    stamps = rb.storage.stamps(index)
    assert rb.write_back(batch, [("next", "done")], sampled_at=stamps) == 1
    assert episodes.steps_ahead(torch.arange(6)).tolist() == [2, 1, 0, 2, 1, 0]
