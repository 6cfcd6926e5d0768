"""Rows that are tensorclasses, tensors, lists of steps, or nested Dicts."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorClass, TensorDict
from torchrl.collectors import Collector
from torchrl.data.replay_buffers import LazyTensorStorage, RandomSampler
from torchrl.data.replay_buffers import ReplayBuffer as TorchRLBuffer
from torchrl.envs import EnvBase, GymWrapper, RewardScaling, SerialEnv

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
from tests.catalogue import assert_same
from tests.environments import Nested
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


def test_rows_of_another_class_are_sampled_as_what_was_written() -> None:
    rb: Any = ReplayBuffer(storage=PackedStorage(20), batch_size=4)
    rb.extend(steps(0, 10).to_tensordict())
    assert type(rb.sample()) is TensorDict
    rb.empty()
    rb.extend(steps(0, 10))
    for _ in range(2):
        check(rb.sample(), 4)


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_learn_the_class_of_rows_that_are_loaded() -> None:
    saved = ReplayBuffer(storage=PackedStorage(20))
    saved.extend(steps(0, 5))
    rb = ReplayBuffer(storage=PackedStorage(20, shared=True), batch_size=4)
    elsewhere(rb.storage.load_state_dict, saved.storage.state_dict())
    assert type(rb.sample()) is Step


def test_reopened_rows_have_the_class_of_before(tmp_path: Path) -> None:
    kept = {"scratch_dir": tmp_path, "reopen": True}
    with ReplayBuffer(storage=PackedStorage(20, **kept), batch_size=4) as rb:
        rb.extend(steps(0, 5))
        rb.empty()
        rb.extend(steps(0, 5))
        plain = steps(0, 5).to_tensordict()
        rb.empty()
        rb.extend(plain)  # has the fields
        assert type(rb.sample()) is Step
    with ReplayBuffer(storage=PackedStorage(20, **kept), batch_size=4) as rb:
        assert type(rb.sample()) is Step


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


# -- nested Dict observations

pytestmark = pytest.mark.filterwarnings(
    *(
        f"ignore::{kind}:torchrl"
        for kind in ("DeprecationWarning", "UserWarning", "FutureWarning")
    ),
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
)
PARTS = {
    "observation": torch.float32,
    ("camera", "image"): torch.uint8,
    ("body", "vector"): torch.float32,
    ("body", "mode"): torch.int64,
    ("body", "mask"): torch.bool,
}


def test_a_recorded_nested_dict_comes_back_part_by_part():
    env = gymnasium.vector.SyncVectorEnv(
        [lambda: Nested(gymnasium.make("CartPole-v1"))] * 2
    )
    rb = ReplayBuffer.from_env(env, 1_000, batch_size=64)
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    for _ in range(100):
        recorder.step(env.action_space.sample())
    batch = rb.sample()
    for rows in (batch, batch["next"]):
        for key, dtype in PARTS.items():
            assert rows[key].dtype == dtype, key
        # each part is that of its own row
        image, observation = rows["camera", "image"], rows["observation"]
        number = (observation[..., 0].abs() * 1_000).long() % 256
        assert torch.equal(image[..., 0, 0, 0].long(), number)


class Goals(gymnasium.ObservationWrapper):
    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        place = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        parts: Any = dict(vars(env.observation_space)["spaces"])
        self.observation_space = gymnasium.spaces.Dict(
            parts | {"desired_goal": place, "achieved_goal": place}
        )

    def observation(self, observation: Any) -> Any:
        goals = {
            "desired_goal": np.ones(1, np.float32),
            "achieved_goal": observation["observation"][:1],
        }
        return observation | goals

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -np.abs(achieved - desired)[:, 0]


@pytest.mark.parametrize("lanes", [1, 3])
def test_hindsight_relabels_only_the_goals_of_a_nested_dict(lanes):
    def make() -> EnvBase:
        return GymWrapper(
            Goals(Nested(gymnasium.make("CartPole-v1"))),
            categorical_action_encoding=True,
        )

    env = SerialEnv(lanes, make) if lanes > 1 else make()
    reward_fn = gymnasium_reward_fn(Goals(Nested(gymnasium.make("CartPole-v1"))))
    sampler = HindsightSampler(ProportionalSampler(600), reward_fn, her_ratio=0.5)
    rb = ReplayBuffer.from_env(
        env, 600, sampler=sampler, batch_size=64, dim_extend=int(lanes > 1)
    )
    for data in Collector(env, frames_per_batch=60, total_frames=300):
        rb.extend(data)
    batch = rb.sample()
    stored = rb.storage.get(
        tuple(batch.get("index").T) if lanes > 1 else batch["index"]
    )
    new = batch["relabeled"]
    assert new.any()
    assert not new.all()
    assert (batch["desired_goal"][~new] == 1).all()
    reached = rb.chronological(flat=True)["next", "achieved_goal"]
    assert torch.isin(batch["desired_goal"][new], reached).all()
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).abs()
    assert torch.equal(batch["next", "reward"][new], -distance[new])
    untouched = [
        "observation",
        "camera",
        "body",
        ("next", "observation"),
        ("next", "camera"),
        ("next", "body"),
    ]
    assert_same(batch.select(*untouched), stored.select(*untouched))
    for key, dtype in PARTS.items():
        assert batch[key].dtype == batch["next"][key].dtype == dtype, key


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
    elsewhere(read_nested, tmp_path, method="spawn")
