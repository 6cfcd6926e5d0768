"""Entries of rows that are there, set in place: as in TorchRL, whatever the rows share and wherever they lie."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, ReservoirWriter, SchemaError

STORAGES = {
    "plain": PackedStorage,
    "shared observations": partial(PackedStorage, share_next=True),
    "frames": partial(PackedStorage, frames={"observation": (3, -1)}),
}
over_storages = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


def transitions(n: int) -> TensorDict:
    seen = torch.arange(n + 3.0).unfold(0, 3, 1)  # [n + 1, 3], a stack of frames each
    after = {"observation": seen[1:], "reward": torch.arange(n)[:, None].float()}
    return TensorDict({"observation": seen[:-1], "hidden": torch.zeros(n, 2), "next": after}, [n])


def pair(storage: Any, lanes: int = 1, dim_extend: int | None = None) -> tuple[ReplayBuffer, TensorDictReplayBuffer]:
    ndim, buffers = 1 + (lanes > 1), []
    for cls, place in ((ReplayBuffer, storage), (TensorDictReplayBuffer, LazyTensorStorage)):
        buffers.append(cls(storage=place(20, ndim=ndim), dim_extend=dim_extend))
        data = transitions(12) if lanes == 1 else transitions(12).reshape(lanes, -1)
        buffers[-1].extend(data.transpose(0, 1) if lanes > 1 and dim_extend == 0 else data)
    return buffers[0], buffers[1]


def assert_same(ours: Any, theirs: Any) -> None:
    assert (ours[:] == theirs[:].exclude("index")).all()
    batch = ours.sample(64)
    index = batch.pop("index")
    assert (batch == ours.storage.get(index.unbind(-1) if index.ndim > 1 else index)).all()


ROWS = [3, -1, slice(2, 9, 3), [1, 5], torch.tensor([[0, 1]]), torch.arange(12) > 8]
CELLS = [2, (1, 1), (slice(None), 0), (torch.tensor([0, 3]), torch.tensor([1, 0]))]


@over_storages
@pytest.mark.parametrize(("lanes", "indices"), [(1, ROWS), (2, CELLS)])
def test_one_entry_of_rows_that_are_named_as_those_of_a_tensor_is_set(storage: Any, lanes: int, indices: list[Any]):
    for index in indices:
        ours, theirs = pair(storage, lanes, dim_extend=0)
        for key in ("hidden", *(("observation", ("next", "observation")) if storage is PackedStorage else ())):
            value = -1 - torch.rand_like(theirs.storage[:][key][index])
            for rb in (ours, theirs):
                assert rb.set_at_(key, value, index) is rb
            assert_same(ours, theirs)


@over_storages
@pytest.mark.parametrize("lanes", [2, 3])
def test_edits_take_rows_as_they_are_read_or_refuse_by_name(storage: Any, lanes: int):
    """Rows [T, E] are read as [E, T]; with three lanes, T is E, and no shape tells the two apart."""
    rb = ReplayBuffer(storage=storage(20, ndim=2))
    rb.extend(transitions(lanes * 3).reshape(lanes, 3))
    relabeled = rb[:]["next", "reward"] + 100.0 * torch.arange(lanes)[:, None, None]
    before = rb[:].clone()
    edits: list[Any] = [
        (lambda: rb.set_(("next", "reward"), relabeled), r"rb\[key\] = value, .* or rb.storage\[key\] = value, which"),
        (lambda: rb.update_({("next", "reward"): relabeled}), r"update_ takes \[T, E\].*rb.storage.edit"),
    ]
    edits += [
        (lambda index=index: rb.set_at_(("next", "reward"), 1.0, index), "set_at_ takes coordinates")
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
    for key, value in (("hidden", torch.full((2,), -1.0)), (("next", "reward"), torch.tensor([-2.0]))):
        rb.set_at_(key, value, (2, 0))
        assert torch.equal(rb.storage[2, 0][key], value)
    assert (rb.lane(1).chronological() == transitions(5)).all()
    with pytest.raises(IndexError, match="lane"):
        rb.set_at_("hidden", torch.zeros(2), (5, 1))


@pytest.mark.parametrize("storage", [each for each in STORAGES.values() if each is not PackedStorage])
def test_deduplicated_keys_are_neither_edited_nor_written_out_of_order(storage: Any):
    rb = pair(storage)[0]
    batch, before = rb.sample(4), rb[:].clone()
    calls = [
        lambda: rb.set_at_("observation", torch.ones(3), 3),
        lambda: rb.set_at_(("next", "observation"), torch.ones(2, 3), [0, 4]),
        lambda: rb.set_("observation", -before["observation"]),
        lambda: rb.update_({"observation": -before["observation"]}),
        lambda: rb.__setitem__("observation", -before["observation"]),
        lambda: rb.write_back(batch, "observation", sampled_at=rb.storage.clock.now),
    ]
    for call in calls:
        with pytest.raises(
            SchemaError, match=r"cannot edit .*'observation'\)?, which is deduplicated: leave it out of"
        ):
            call()
        assert (rb[:] == before).all()
    with pytest.raises(ValueError, match="in time order, a ReservoirWriter keeps none: use a RingWriter"):
        rb.set_writer(ReservoirWriter())
    with pytest.raises(ValueError, match="a ReservoirWriter keeps none"):
        ReplayBuffer(storage=storage(20), writer=ReservoirWriter())


def test_entries_of_all_rows_are_set():
    ours, theirs = pair(PackedStorage)
    for rb in (ours, theirs):
        rb.set_("observation", -torch.arange(36.0).view(12, 3))
        rb.update_({"hidden": torch.ones(12, 2), "next": {"observation": torch.full((12, 3), -5.0)}})
    assert_same(ours, theirs)


@over_storages
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("key", ["hidden", "observation", ("next", "reward")])
def test_a_key_of_a_buffer_or_a_storage_is_set_by_item_assignment(storage: Any, lanes: int, key: Any):
    """In the shape that reading it gives; TorchRL's buffers drop the value unless they are full."""
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
    if lanes == 1:
        ours[3] = ours[:][5].clone()
        assert (ours[:][3] == ours[:][5]).all()


@over_storages
@pytest.mark.parametrize("index", [-1, slice(-2, None), torch.tensor([-3, -1]), [-12]])
def test_rows_are_replaced_at_negative_positions_from_the_newest_back(storage: Any, index: Any):
    rb = ReplayBuffer(storage=storage(20))
    rb.extend(transitions(12))
    expected, new = transitions(12).clone(), transitions(30)[20:]
    new = new[0] if isinstance(index, int) else new[: len(expected[index])]
    expected[index] = new
    rb[index] = new
    assert (rb[:] == expected).all()
    assert (rb[:] == expected).all()


@over_storages
@pytest.mark.parametrize("how", ["set_at_", "set_", "update_"])
def test_a_dump_in_the_folder_of_the_rows_stays_what_it_was(storage: Any, how: str, tmp_path):
    rb = ReplayBuffer(storage=storage(20, scratch_dir=tmp_path))
    rb.extend(transitions(12))
    rb.dumps(tmp_path)
    key, new = "hidden", torch.full((12, 2), -1.0)
    arguments = {"set_at_": (key, new[:2], [4, 5]), "set_": (key, new), "update_": ({key: new},)}
    getattr(rb, how)(*arguments[how])
    assert (rb[:]["hidden"] == -1).any()
    again = ReplayBuffer(storage=storage(20))
    again.loads(tmp_path)
    assert (again[:] == transitions(12)).all()


@over_storages
def test_rows_whose_entries_were_set_take_td_errors_of_earlier_batches(storage: Any):
    rb = ReplayBuffer(storage=storage(20), sampler=ProportionalSampler(20), batch_size=4)
    rb.extend(transitions(12))
    batch = rb.sample()
    rb.set_at_("hidden", torch.ones(4, 2), batch["index"])
    batch["td_error"] = torch.full((4,), 9.0)
    rb.update_tensordict_priority(batch)
    assert (rb.sampler.priority(batch["index"]) == 9).all()


@over_storages
def test_rows_in_shared_memory_are_set_and_then_written_as_before(storage: Any):
    rb = ReplayBuffer(storage=storage(20, shared=True))
    rb.extend(transitions(12))
    rb.set_("hidden", torch.ones(12, 2))
    rb.set_at_("hidden", torch.full((2,), -2.0), 5)
    rb.extend(transitions(3))
    assert rb[:]["hidden"][:12, 0].tolist() == [1.0] * 5 + [-2.0] + [1.0] * 6
