"""Rows that are tensorclasses, tensors, or lists of steps."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorClass, TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, RandomSampler
from torchrl.data.replay_buffers import ReplayBuffer as TorchRLBuffer
from torchrl.envs import RewardScaling

from rlbuf_td import (
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    RolloutBuffer,
    SchemaError,
    UniformSampler,
)
from rlbuf_td.checkpoint import open_checkpoint
from tests.storages.test_sharing import elsewhere


class Seen(TensorClass):
    image: torch.Tensor
    speed: torch.Tensor


class Step(TensorClass):
    seen: Seen
    reward: torch.Tensor
    more: TensorDict
    missing: torch.Tensor | None = None


def steps(start: int, *shape: int) -> Step:
    t = torch.arange(start, start + torch.Size(shape).numel()).view(shape)
    seen = Seen(
        image=t[..., None].expand(*shape, 3).to(torch.uint8),
        speed=t.float(),
        batch_size=shape,
    )
    return Step(
        seen=seen,
        reward=t[..., None].float(),
        more=TensorDict({"t": t}, shape),
        batch_size=shape,
    )


def check(found: Any, *shape: int) -> None:
    assert type(found) is Step
    assert type(found.seen) is Seen
    assert found.batch_size == torch.Size(shape)
    t = found.more["t"]
    assert found.missing is None
    assert (found.seen.image == t[..., None]).all()
    assert torch.equal(found.seen.speed, t.float())
    assert torch.equal(found.reward, t[..., None].float())


@pytest.mark.parametrize("cls", [ReplayBuffer, TorchRLBuffer])
@pytest.mark.parametrize("writer", [RingWriter, ReservoirWriter])
def test_tensorclasses_are_read_as_what_was_written(cls: Any, writer: Any) -> None:
    rb = cls(
        storage=PackedStorage(20),
        sampler=UniformSampler(),
        writer=writer(),
        batch_size=4,
    )
    rb.extend(steps(0, 10))
    rb.add(steps(10, 1)[0])
    rb.extend([*steps(11, 5).unbind(0)])
    for _ in range(3):
        check(rb.sample(), 4)
    batch, info = rb.sample(return_info=True)
    check(batch, 4)
    assert torch.equal(batch.more["t"], info["index"])
    check(rb[:], 16)
    check(rb[3], *())
    check(rb.storage.get([1, 2]), 2)
    assert rb.storage["seen", "speed"].shape == (16,)
    assert rb.storage.row_bytes == 24


@pytest.mark.parametrize("cls", [ReplayBuffer, TorchRLBuffer])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_tensors_are_read_as_tensors(cls: Any, shape: tuple[int, ...]) -> None:
    def rows(start: int, count: int) -> torch.Tensor:
        t = torch.arange(start, start + count)
        return t.view(count, *[1] * len(shape)).expand(count, *shape).clone()

    ours, theirs = (
        cls(storage=kind(8), batch_size=4)
        for kind in (PackedStorage, LazyTensorStorage)
    )
    if cls is ReplayBuffer:
        theirs = TorchRLBuffer(storage=LazyTensorStorage(8), batch_size=4)
    for rb in (ours, theirs):
        rb.extend(rows(0, 5))
        rb.add(rows(5, 1)[0])
        rb.extend([*rows(6, 4)])
    assert torch.equal(ours[:], theirs[:])
    for _ in range(3):
        batch = ours.sample()
        assert (type(batch), batch.shape) == (torch.Tensor, (4, *shape))
    ours.storage.set(torch.tensor([1, 2]), rows(50, 2), set_cursor=False)
    theirs.storage.set(torch.tensor([1, 2]), rows(50, 2), set_cursor=False)
    assert torch.equal(ours[:], theirs[:])


@pytest.mark.parametrize("ndim", [1, 2])
def test_lists_of_steps_are_written_in_order(ndim: int) -> None:
    t = torch.arange(20).view(10, 2) if ndim == 2 else torch.arange(10)
    data = [TensorDict({"t": each}, each.shape) for each in t]
    ours = ReplayBuffer(storage=PackedStorage(t.numel(), ndim=ndim), batch_size=4)
    ours.extend(data)
    assert torch.equal(ours.chronological()["t"], t)
    ours.extend(data[:3])
    assert torch.equal(ours.last(3)["t"], t[:3])
    ours.sample()
    theirs = TorchRLBuffer(storage=LazyTensorStorage(10), batch_size=4)
    if ndim == 1:
        theirs.extend(data)
        theirs.extend(data[:3])
        assert torch.equal(theirs[:]["t"], ours[:]["t"])


def test_priorities_and_transforms_and_torchrls_samplers() -> None:
    rb = ReplayBuffer(
        storage=PackedStorage(20), sampler=ProportionalSampler(20), batch_size=4
    )
    rb.extend(steps(0, 20))
    batch, info = rb.sample(return_info=True)
    check(batch, 4)
    rb.update_priority(info["index"], torch.full((4,), 9.0))
    assert float(rb.sampler.priority(info["index"]).min()) == 9
    rb.append_transform(RewardScaling(0.0, 2.0, in_keys=["reward"]))
    assert torch.equal(rb.sample().reward, rb.storage["reward"][:4] * 0) is False
    scaled = rb.sample()
    assert type(scaled) is Step
    assert torch.equal(scaled.reward, 2.0 * scaled.seen.speed[:, None])
    general = ReplayBuffer(
        storage=PackedStorage(20), sampler=RandomSampler(), batch_size=4
    )
    general.extend(steps(0, 20))
    check(general.sample(), 4)


def test_copies_and_dumps_keep_the_class(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    rb.extend(steps(0, 10))
    rb.dumps(tmp_path)
    loaded = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    loaded.loads(tmp_path)
    restored = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    restored.load_state_dict(rb.state_dict())
    for each in (
        copy.deepcopy(rb),
        pickle.loads(pickle.dumps(rb)),
        loaded,
        restored,
    ):
        check(each.sample(), 4)
        each.extend(steps(10, 3))
        check(each[:], 13)
    check(open_checkpoint(tmp_path).rows, 10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_learn_the_class_from_the_first_one_that_writes() -> None:
    for data, kind in ((steps(0, 5), Step), (torch.arange(5), torch.Tensor)):
        rb = ReplayBuffer(storage=PackedStorage(20, shared=True), batch_size=4)
        elsewhere(rb.extend, data)
        assert type(rb.sample()) is kind
        rb.extend(data)
        elsewhere(rb.sample)


def test_other_classes_are_refused_and_change_nothing() -> None:
    rb = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    rb.extend(steps(0, 5))
    for other, error in (
        (
            torch.arange(3),
            "cannot write Tensor: the rows of this storage are read as Step",
        ),
        (
            steps(0, 3).seen,
            "cannot write Seen: the rows of this storage are read as Step",
        ),
    ):
        with pytest.raises(SchemaError, match=error):
            rb.extend(other)
    rb.extend(steps(5, 3).to_tensordict())  # has the fields
    check(rb[:], 8)
    plain = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    plain.extend(TensorDict({"data": torch.arange(3)}, [3]))
    with pytest.raises(
        SchemaError,
        match="cannot write Tensor: the rows of this storage are read as TensorDict",
    ):
        plain.extend(torch.arange(3))
    rb.empty()
    with pytest.raises(SchemaError, match="unknown key 'data'"):
        rb.extend(torch.arange(3))  # the schema stays
    rb.extend(steps(5, 3).to_tensordict())
    assert type(rb.sample()) is TensorDict


def test_a_class_without_fields_for_all_entries_of_the_rows_is_refused() -> None:
    schema = steps(0, 1)[0].to_tensordict().set("other", torch.zeros(1))
    for shared in (False, True):
        rb = ReplayBuffer.from_schema(schema, 20, shared=shared, batch_size=4)
        with pytest.raises(SchemaError, match="'other' is missing"):
            rb.extend(steps(0, 5))
        rb.extend(schema.expand(5))
        assert type(rb.sample()) is TensorDict
    rb = ReplayBuffer.from_schema(steps(0, 1)[0], 20, batch_size=4)
    rb.extend(steps(0, 5))
    check(rb.sample(), 4)
    with pytest.raises(TypeError, match="extend takes a TensorDict, got Step"):
        RolloutBuffer(5, gamma=0.9, lmbda=0.9, batch_size=5).extend(steps(0, 2, 5))
