"""Rows that are tensorclasses, tensors or lists of steps, and nested entries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorClass, TensorDict
from torchrl.data.replay_buffers import RandomSampler
from torchrl.data.replay_buffers import ReplayBuffer as TorchRLBuffer
from torchrl.envs import RewardScaling

import rlbuf_td as td
from rlbuf_td import (
    GymnasiumRecorder,
    HindsightSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    RolloutBuffer,
    SchemaError,
    UniformSampler,
    gymnasium_reward_fn,
)
from rlbuf_td.checkpoint import open_checkpoint
from tests.catalogue import assert_same, buffer_of
from tests.environments import Walk
from tests.storages.test_sharing import all_elsewhere
from tests.test_lockstep import forked

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


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
    image = t[..., None].expand(*shape, 3).to(torch.uint8)
    return Step(
        seen=Seen(image=image, speed=t.float(), batch_size=shape),
        reward=t[..., None].float(),
        more=TensorDict({"t": t}, shape),
        batch_size=shape,
    )


def check(found: Any, *shape: int) -> None:
    assert (type(found), type(found.seen)) == (Step, Seen)
    assert found.batch_size == torch.Size(shape)
    t = found.more["t"]
    assert found.missing is None
    assert (found.seen.image == t[..., None]).all()
    assert torch.equal(found.seen.speed, t.float())
    assert torch.equal(found.reward, t[..., None].float())


def fresh(cls: Any = ReplayBuffer, **storage: Any) -> Any:
    return cls(storage=PackedStorage(20, **storage), batch_size=4)


@pytest.mark.parametrize("cls", [ReplayBuffer, TorchRLBuffer])
@pytest.mark.parametrize("writer", [RingWriter, ReservoirWriter])
def test_tensorclasses_are_read_as_what_was_written(cls: Any, writer: Any) -> None:
    rb = buffer_of(20, UniformSampler(), cls=cls, writer=writer(), batch_size=4)
    rb.extend(steps(0, 10))
    rb.add(steps(10, 1)[0])
    rb.extend([*steps(11, 5).unbind(0)])
    for _ in range(3):
        batch, info = rb.sample(return_info=True)
        check(batch, 4)
        assert torch.equal(batch.more["t"], info["index"])
    check(rb[:], 16)
    check(rb[3])
    check(rb.storage.get([1, 2]), 2)
    assert rb.storage["seen", "speed"].shape == (16,)
    assert rb.storage.row_bytes == 24


def test_rows_of_another_class_are_sampled_as_what_was_written() -> None:
    rb = fresh()
    rb.extend(steps(0, 10).to_tensordict())
    assert type(rb.sample()) is TensorDict
    rb.empty()
    rb.extend(steps(0, 10))
    for _ in range(2):
        check(rb.sample(), 4)


@pytest.mark.parametrize("cls", [ReplayBuffer, TorchRLBuffer])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_tensors_are_read_as_tensors(cls: Any, shape: tuple[int, ...]) -> None:
    def rows(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers).view(-1, *[1] * len(shape)).expand(-1, *shape)

    rb = cls(storage=PackedStorage(8), batch_size=4)
    rb.extend(rows(*range(5)))
    rb.add(rows(5)[0])
    rb.extend([*rows(6, 7, 8, 9)])
    rb.storage.set(torch.tensor([3, 4]), rows(50, 51), set_cursor=False)
    assert torch.equal(rb[:], rows(8, 9, 2, 50, 51, 5, 6, 7))
    for _ in range(3):
        batch = rb.sample()
        assert (type(batch), batch.shape) == (torch.Tensor, (4, *shape))


@pytest.mark.parametrize("ndim", [1, 2])
def test_lists_of_steps_are_written_in_order(ndim: int) -> None:
    t = torch.arange(20).view(10, 2) if ndim == 2 else torch.arange(10)
    data = [TensorDict({"t": each}, each.shape) for each in t]
    rb = ReplayBuffer(storage=PackedStorage(t.numel(), ndim=ndim), batch_size=4)
    for _ in range(2):  # the second one is compiled
        rb.extend(data)
        assert torch.equal(rb.chronological()["t"], t)
    rb.extend(data[:3])
    assert torch.equal(rb.last(3)["t"], t[:3])


@pytest.mark.parametrize("sampler", [lambda: ProportionalSampler(20), RandomSampler])
def test_transforms_and_torchrls_samplers_get_tensorclasses(sampler: Any) -> None:
    rb = buffer_of(20, sampler(), rows=steps(0, 20), batch_size=4)
    batch, info = rb.sample(return_info=True)
    check(batch, 4)
    assert torch.equal(info["index"], batch.more["t"])
    rb.append_transform(RewardScaling(0.0, 2.0, in_keys=["reward"]))
    scaled = rb.sample()
    assert type(scaled) is Step
    assert torch.equal(scaled.reward, 2.0 * scaled.seen.speed[:, None])


# -- the class of rows goes with them; copies are in ``tests/test_goes_on.py``


def test_a_dump_tells_the_class(tmp_path: Path) -> None:
    rb = fresh()
    rb.extend(steps(0, 10))
    rb.dumps(tmp_path)
    check(open_checkpoint(tmp_path).rows, 10)


def load(rb: Any, rows: Any) -> None:
    saved = fresh()
    saved.extend(rows)
    rb.storage.load_state_dict(saved.storage.state_dict())


@needs_fork
@pytest.mark.parametrize("write", [lambda rb, rows: rb.extend(rows), load])
@pytest.mark.parametrize(
    ("rows", "kind"), [(steps(0, 5), Step), (torch.arange(5), torch.Tensor)]
)
def test_processes_learn_the_class_from_the_first_one_that_writes(
    rows: Any, kind: type, write: Any
) -> None:
    rb = fresh(shared=True)
    assert forked(lambda: write(rb, rows)) == 0
    assert type(rb.sample()) is kind
    rb.extend(rows)
    assert forked(rb.sample) == 0


def test_reopened_rows_have_the_class_of_before(tmp_path: Path) -> None:
    kept = {"scratch_dir": tmp_path, "reopen": True}
    with fresh(**kept) as rb:
        rb.extend(steps(0, 5))
        rb.empty()
        rb.extend(steps(0, 5).to_tensordict())  # has the fields
        assert type(rb.sample()) is Step
    with fresh(**kept) as rb:
        assert type(rb.sample()) is Step


def test_other_classes_are_refused_and_change_nothing() -> None:
    rb, plain = fresh(), fresh()
    rb.extend(steps(0, 5))
    plain.extend(TensorDict({"data": torch.arange(3)}, [3]))
    words = "cannot write {}: the rows of this storage are read as {}"
    for buffer, other, error in (
        (rb, torch.arange(3), words.format("Tensor", "Step")),
        (rb, steps(0, 3).seen, words.format("Seen", "Step")),
        (plain, torch.arange(3), words.format("Tensor", "TensorDict")),
    ):
        with pytest.raises(SchemaError, match=error):
            buffer.extend(other)
    rb.extend(steps(5, 3).to_tensordict())  # has the fields
    check(rb[:], 8)
    rb.empty()
    with pytest.raises(SchemaError, match="unknown key 'data'"):
        rb.extend(torch.arange(3))  # the schema stays
    rb.extend(steps(5, 3).to_tensordict())
    assert type(rb.sample()) is TensorDict


def test_a_class_without_fields_for_all_entries_of_the_rows_is_refused() -> None:
    schema = steps(0, 1)[0].to_tensordict().set("other", torch.zeros(1))
    for shared, error in ((False, "'other' is missing"), (True, "read as TensorDict")):
        rb = ReplayBuffer.from_schema(schema, 20, shared=shared, batch_size=4)
        with pytest.raises(SchemaError, match=error):
            rb.extend(steps(0, 5))
        rb.extend(schema.expand(5))
        assert type(rb.sample()) is TensorDict
    rb = ReplayBuffer.from_schema(steps(0, 1)[0], 20, batch_size=4)
    rb.extend(steps(0, 5))
    check(rb.sample(), 4)
    with pytest.raises(TypeError, match="extend takes a TensorDict, got Step"):
        RolloutBuffer(5, gamma=0.9, lmbda=0.9, batch_size=5).extend(steps(0, 2, 5))


# -- nested entries


class Reach(Walk):
    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -np.abs(achieved - desired).sum(-1)


def test_hindsight_relabels_only_the_goals_of_a_nested_dict():
    env: Any = Reach("dict")
    goal, keys = (
        ("pair", "0"),
        {"goal_key": ("pair", "0"), "achieved_goal_key": "place"},
    )
    reward_fn = gymnasium_reward_fn(env, **keys)
    sampler = HindsightSampler(UniformSampler(), reward_fn, her_ratio=0.5, **keys)
    rb: Any = ReplayBuffer.from_env(env, 600, sampler=sampler, batch_size=64)
    recorder = GymnasiumRecorder(rb, env)
    is_over = True
    for _ in range(100):
        if is_over:
            recorder.reset()
        _, _, terminated, truncated, _ = recorder.step(0)
        is_over = terminated or truncated
    batch = rb.sample()
    is_new = batch["relabeled"]
    assert 0 < is_new.sum() < 64
    reached = rb[:]["next", "place"]
    assert all((reached == each).all(-1).any() for each in batch[goal][is_new])
    distance = (batch["next", "place"] - batch[goal]).abs().sum(-1, keepdim=True)
    assert torch.equal(batch["next", "reward"][is_new], -distance[is_new])
    stored = rb.storage.get(batch["index"])
    assert torch.equal(batch[goal][~is_new], stored[goal][~is_new])
    changed = [goal, ("next", *goal), ("next", "reward"), "index", "relabeled"]
    assert_same(batch.exclude(*changed), stored.exclude(*changed))


def keys_of(key: Callable[[str], Any]) -> list[Any]:
    """Return the keys that parts keep; ``key`` makes a key of names with dots."""
    plain = td.UniformSampler()
    hindsight: Any = {
        "goal_key": key("a.wanted"),
        "achieved_goal_key": key("a.goal"),
        "reward_key": key("next.r"),
    }
    relabel, index = (
        td.HindsightSampler(plain, torch.zeros_like, **hindsight),
        td.PackedStorage(4),
    )
    episodes = td.EpisodeSampler(reward_key=key("next.r"), init_key=key("a.is_init"))
    lanes = ReplayBuffer(
        storage=td.PackedStorage(4, ndim=2, lanes=2), lane_key=key("a.env")
    )
    writer = td.RolloutWriter(
        value_key=key("a.value"), advantage_key=key("a.advantage")
    )
    return [
        td.NStepSampler(plain, 3, 0.9, reward_key=key("next.r")).reward_key,
        td.SequenceSampler(plain, 2, init_key=key("a.is_init")).flag_keys,
        (
            episodes.reward_key,
            episodes.init_key,
            relabel.goal_key,
            relabel.achieved_goal_key,
            relabel.reward_key,
        ),
        (writer.value_key, lanes.lane_key),
        ReplayBuffer(
            sampler=ProportionalSampler(20), priority_key=key("td.error")
        ).priority_key,
        td.PackedStorage(
            20, share_next=[key("a.obs")], frames={"pixels": 4}
        ).dedup_options,
        td.TrajectoryIndex(index, done_key=key("a.end"), traj_key=key("a.id")).keys,
    ]


def test_a_list_of_strings_is_a_nested_key():
    expected = keys_of(lambda names: tuple(names.split(".")))
    for key in (
        lambda names: names.split("."),
        lambda names: OmegaConf.create(names.split(".")),
    ):
        assert keys_of(key) == expected


#: Reads of lanes of two, three and one rows, with the shape of what they return.
READS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "sample": (lambda rb: rb.sample(), (4,)),
    "last": (lambda rb: rb.last(1), (1, 3)),
    "last, flat": (lambda rb: rb.last(1, flat=True), (3,)),
    "chronological": (lambda rb: rb.chronological(flat=True), (6,)),
    "a lane": (lambda rb: rb.lane(1).chronological(), (3,)),
    "the newest of a lane": (lambda rb: rb.lane(1).last(2), (2,)),
    "a time step": (lambda rb: rb.storage[0], (3,)),
    "rows": (lambda rb: rb.storage.get(([0, 2], [0, 1])), (2,)),
}


@pytest.mark.parametrize("read", READS)
def test_every_read_of_unlike_lanes_gives_what_was_written(read: str) -> None:
    rb: Any = ReplayBuffer(storage=PackedStorage(12, ndim=2, lanes=3), batch_size=4)
    for lane, count in enumerate((2, 3, 1)):
        rb.extend(steps(10 * lane, count), lanes=lane)
    call, shape = READS[read]
    check(call(rb), *shape)


class Outer:
    class Inner(TensorClass):
        """Rows of a class within a class."""

        t: torch.Tensor


def read_nested(folder: Path) -> None:
    rb = ReplayBuffer(storage=PackedStorage(4))
    rb.loads(folder)
    assert type(rb.sample()) is Outer.Inner


@pytest.mark.slow  # each process imports everything
def test_a_process_that_wrote_no_rows_knows_the_class_of_saved_ones(
    tmp_path: Path,
) -> None:
    rb = ReplayBuffer(storage=PackedStorage(4), batch_size=2)
    cls: Any = Outer.Inner
    rb.extend(cls(t=torch.arange(3), batch_size=[3]))
    rb.dumps(tmp_path)
    all_elsewhere(read_nested, [(tmp_path,)], "spawn")
