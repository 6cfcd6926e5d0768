"""``SequenceSampler(output_layout="batch_time")``: the same windows as in flat batches, in the shape ``[B, L]``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, SequenceSampler, UniformSampler
from rlbuf_td.storages.tensordict_fast import folded
from tests.catalogue import SCHEMAS, assert_same, transitions
from tests.features import needs

STEPS = 40
FLAGS = ("next", "done"), ("next", "truncated")


def steps(lanes: int) -> TensorDict:
    t = torch.arange(STEPS).expand(*[lanes] * (lanes > 1), STEPS)
    done = (t % 7 == 6)[..., None]
    after = {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
    data = {"t": t.clone(), "x": torch.rand(*t.shape, 3), "is_init": (t % 7 == 0)[..., None], "next": after}
    return TensorDict(data, t.shape)


def buffer(cls: Any, lanes: int, sampler: Any = None, **layout: Any) -> Any:
    torch.manual_seed(0)
    sequences = SequenceSampler(sampler or UniformSampler(), 3, burn_in=1, **layout)
    storage = PackedStorage(STEPS * lanes, ndim=1 + (lanes > 1))
    rb = cls(storage=storage, sampler=sequences, batch_size=24)
    rb.extend(steps(lanes))
    return rb


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("boundary", ["pad", "shift", "strict"])
def test_batches_have_the_windows_of_flat_batches(cls: Any, lanes: int, boundary: Any, device: Any) -> None:
    flat, other = (buffer(cls, lanes, boundary=boundary, **kwargs) for kwargs in ({}, {"output_layout": "batch_time"}))
    for _ in range(3):
        torch.manual_seed(5)
        one, flat_info = flat.sample(return_info=True)
        torch.manual_seed(5)
        batch, info = other.sample(return_info=True)
        assert batch.shape == (6, 4)
        names = {*one.keys(True, True)}
        assert {*batch.keys(True, True)} == names | {("collector", "slice_end")}
        for key in names - {*FLAGS}:
            assert torch.equal(batch[key].reshape(one[key].shape), one[key]), key
        for key in FLAGS:
            assert torch.equal(
                batch[key],
                other.storage[key][tuple(batch["index"].unbind(-1))]
                if lanes > 1
                else other.storage[key][batch["index"].reshape(6, 4)],
            )
        end, mask = batch["collector", "slice_end"][..., 0], batch["mask"]
        assert (end.sum(1) == 1).all()
        assert torch.equal(end, mask & ~torch.cat([mask[:, 1:], torch.zeros(6, 1, dtype=torch.bool)], 1))
        assert torch.equal(info["mask"], mask)
        first, flat_first = (found["index"][0] if lanes > 1 else found["index"] for found in (info, flat_info))
        assert torch.equal(first.reshape(-1), flat_first.reshape(-1))
        if cls is ReplayBuffer:
            assert batch.names == [None, "time"]


@pytest.mark.parametrize("lanes", [1, 2])
def test_priorities_are_those_of_flat_batches(lanes: int) -> None:
    found = []
    for layout in ("flat", "batch_time"):
        rb = buffer(ReplayBuffer, lanes, ProportionalSampler(STEPS * lanes), output_layout=layout)
        for turn in range(4):
            torch.manual_seed(turn)
            batch = rb.sample()
            torch.manual_seed(turn)
            batch["td_error"] = torch.rand(24).view(batch.shape)
            rb.update_tensordict_priority(batch)
        found.append(rb.sampler.priority(torch.arange(STEPS * lanes)))
    assert torch.equal(*found)
    assert len(found[0].unique()) > 10


def test_states_are_written_back_from_windows() -> None:
    rb = buffer(ReplayBuffer, 1, output_layout="batch_time")
    now, batch = rb.storage.clock.now, rb.sample()
    batch["x"] += 10
    written = rb.write_back(batch, ["x"], sampled_at=now)
    assert 0 < written <= 24
    assert int((rb.storage["x"] >= 10).all(1).sum()) == len(batch["index"][batch["mask"]].unique())


def test_recurrent_networks_take_the_batches() -> None:
    rb = buffer(ReplayBuffer, 1, output_layout="batch_time", time_dim_name=None, slice_end_key="last")
    batch = rb.sample()
    out, _ = torch.nn.GRU(3, 5, batch_first=True)(batch["x"])
    assert out.shape == (6, 4, 5)
    assert batch["last"].shape == (6, 4, 1)
    assert batch.names == [None, None]
    assert rb.stats()["samples_returned"] == 24


@needs("output layouts")
def test_torchrls_slices_have_the_same_shape_and_ends() -> None:
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(STEPS),
        sampler=SliceSampler(
            slice_len=4, end_key=("next", "done"), strict_length=False, output_layout="batch_time", init_key="is_init"
        ),
        batch_size=24,
    )
    theirs.extend(steps(1))
    ours = buffer(ReplayBuffer, 1, output_layout="batch_time")
    left, right = theirs.sample(), ours.sample()
    assert left.shape == right.shape
    assert left.names == right.names
    for key in [("collector", "slice_end"), "is_init", ("next", "done")]:
        assert (left[key].shape, left[key].dtype) == (right[key].shape, right[key].dtype)
    mask = left["collector", "mask"]
    assert torch.equal(
        left["collector", "slice_end"][..., 0], mask & ~torch.cat([mask[:, 1:], torch.zeros(6, 1, dtype=torch.bool)], 1)
    )
    assert torch.equal(left["next", "done"], theirs.storage[:]["next", "done"][left["index"].reshape(6, 4)])
    assert (left["is_init"][:, 0].all(), right["is_init"][:, 0].all()) == (True, True)


@pytest.mark.parametrize("name", [None, "time"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
def test_rows_of_any_kind_are_folded_as_torch_reshapes_them(schema: Any, name: str | None) -> None:
    rows = transitions(schema, 12)
    for count in (12, 3, 0):
        found, wanted = folded(rows[:count], 3, name), rows[:count].reshape(count // 3, 3, *schema.element)
        assert_same(found, wanted)
        assert found.names == [None, name, *[None] * len(schema.element)]
        for key, leaf in found.items(True, True):
            assert count == 0 or leaf.data_ptr() == rows.get(key).data_ptr()
