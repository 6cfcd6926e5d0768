"""What a plan says is what a buffer takes, byte for byte; and it says where there is
room."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictReplayBuffer,
)
from torchrl.envs import GymEnv, SerialEnv

import rlbuf_td as td
from rlbuf_td.diagnostics import memory_plan as planning
from rlbuf_td.diagnostics.memory_plan import MemoryPlan, priority_bytes
from rlbuf_td.storages.memory_budget import Room
from rlbuf_td.storages.schema import show_key
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.catalogue import SCHEMAS, transitions

GIB = 1 << 30


def taken(tensors) -> int:
    blocks = {
        block.data_ptr(): block.nbytes()
        for block in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(blocks.values())


def state_of(sampler) -> int:
    if isinstance(sampler, td.ProportionalSampler):
        return taken(sampler.tree.tensors().values())
    if isinstance(sampler, td.RankSampler):
        return taken(sampler.order.tensors.values())
    return 0


@pytest.mark.parametrize(
    "schema", [each for each in SCHEMAS.values() if not each.element], ids=str
)
def test_rows_are_planned_byte_for_byte(schema):
    needed = td.plan(transitions(schema, None, (3,)), 100)
    storage = td.PackedStorage(100, ndim=2)
    storage.set([0], transitions(schema, 1, (3,)))
    assert (needed.capacity, needed.row_bytes) == (storage.max_size, storage.row_bytes)
    rows = taken([storage.rows.matrix])  # pyrefly: ignore [missing-attribute]
    assert needed.rows == storage.nbytes == rows
    leaves = storage.all_rows().view().flatten_keys(".")
    sizes = {name: leaf.nbytes for name, leaf in leaves.items()}
    expected = {show_key(tuple(name.split("."))): size for name, size in sizes.items()}
    assert needed.keys == expected
    assert list(needed.keys.values()) == sorted(needed.keys.values(), reverse=True)


@pytest.mark.parametrize("capacity", [1, 9, 4_097])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("proportional", td.ProportionalSampler), ("rank", td.RankSampler)],
)
def test_priorities_are_planned_byte_for_byte(name, kind, capacity):
    sampler = kind(capacity)
    assert {priority_bytes(way, capacity) for way in (kind, sampler, name)} == {
        state_of(sampler)
    }


def test_samplers_of_others_are_planned_too():
    assert (
        priority_bytes(td.UniformSampler(), 1_000) == priority_bytes(None, 1_000) == 0
    )
    assert priority_bytes(td.MinibatchSampler(), 1_000) == 8_000
    assert priority_bytes(
        td.NStepSampler(td.ProportionalSampler(10), 2, 0.9), 10
    ) == td.ProportionalSampler.nbytes_for(10)
    # two trees of float32
    assert priority_bytes(PrioritizedSampler, 1_000) == 2 * 2 * 1024 * 4


@pytest.mark.parametrize(("ndim", "lanes"), [(1, ()), (2, (3,))])
def test_the_trajectory_index_is_planned_byte_for_byte(ndim, lanes):
    rb = td.ReplayBuffer(storage=td.PackedStorage(10_000, ndim=ndim), dim_extend=0)
    index = TrajectoryIndex(rb.storage)
    rb.extend(transitions(SCHEMAS["halfcheetah"], 5, lanes))
    index.steps_back(torch.zeros(1, dtype=torch.int64))
    needed = td.plan(rb)
    assert needed.trajectories == index.nbytes > 0
    assert needed.total == needed.rows + needed.priorities + needed.trajectories
    assert td.plan(TensorDict({"x": torch.zeros(3)}), 100).trajectories == 0
    # whole time steps
    assert td.plan(transitions(SCHEMAS["vector"], None, (3,)), 100).capacity == 102


def test_a_buffer_is_planned_with_its_capacity_its_sampler_and_its_place(
    tmp_path,
):
    storage = td.PackedStorage(1_000, scratch_dir=tmp_path / "rows")
    rb = td.ReplayBuffer(storage=storage, sampler=td.RankSampler(1_000))
    rb.extend(transitions(SCHEMAS["vector"], 3))
    needed = td.plan(rb)
    assert (needed.capacity, needed.rows) == (1_000, storage.nbytes)
    assert needed.priorities == td.RankSampler.nbytes_for(1_000)
    assert needed.place.location.startswith(f"disk ({tmp_path}")
    assert td.plan(rb, 2_000, sampler="uniform").priorities == 0
    assert td.plan(storage, 2_000).rows == 2 * storage.nbytes
    # as if it were packed
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    theirs.extend(transitions(SCHEMAS["vector"], 3))
    assert {*td.plan(transitions(SCHEMAS["vector"], None), 100).keys} <= {
        *td.plan(theirs).keys
    }


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torchrl", "ignore::UserWarning:torchrl"
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")),
        lambda: gymnasium.make("CartPole-v1"),
    ],
    ids=["torchrl", "gymnasium"],
)
def test_an_environment_is_planned_as_the_buffer_made_from_it(make):
    env = make()
    needed = td.plan(env, 1_000, sampler="proportional")
    rb = td.ReplayBuffer.from_env(env, 1_000, sampler=td.ProportionalSampler(1_002))
    assert (needed.capacity, needed.rows) == (rb.storage.max_size, rb.storage.nbytes)
    assert needed.priorities == td.ProportionalSampler.nbytes_for(needed.capacity)


def planned(
    monkeypatch: pytest.MonkeyPatch,
    capacity: int = 1_000_000,
    *,
    memory,
    disk,
    **settings,
) -> MemoryPlan:
    """Plan 1,000,000 rows of about 11.7 GiB on a machine with so much room."""
    rooms = Room("RAM", memory, memory and 2 * memory), Room("disk (here)", disk, disk)
    monkeypatch.setattr(
        planning,
        "room_for",
        lambda _, folder=None: rooms[folder is not None],
    )
    example = TensorDict({"small": torch.zeros(1), "pixels": torch.zeros(3, 32, 32)})
    return td.plan(example, capacity, **settings)


def test_what_fits_needs_no_remedy_and_every_part_has_a_line(
    monkeypatch,
):
    needed = planned(monkeypatch, memory=20 * GIB, disk=0, sampler="rank")
    text = str(needed)
    assert (needed.fits, needed.remedy) == (True, "")
    assert "\n20.0 GiB of RAM are free (40.0 GiB in all): fits" in text
    for name in (
        "'pixels'",
        "'small'",
        "padding",
        "rows",
        "priorities",
        "trajectory index",
        "total",
    ):
        assert f"\n  {name}" in text
    unknown = planned(monkeypatch, memory=None, disk=None)
    assert (unknown.fits, unknown.most_rows) == (True, None)
    assert "RAM of unknown size: fits" in str(unknown)


def test_what_does_not_fit_is_told_with_every_way_out(monkeypatch):
    def fits(**settings) -> bool:
        return planned(monkeypatch, **settings).fits

    needed = planned(monkeypatch, memory=GIB, disk=20 * GIB, sampler="proportional")
    assert not needed.fits
    smaller, elsewhere, images = needed.remedy.splitlines()
    assert smaller == f"use a capacity of at most {needed.most_rows:,}"
    assert "scratch_dir=" in elsewhere
    assert "'pixels' is 99% of them; images stored as uint8 take 25%" in images
    # priorities of rows on a disk are in memory
    on_disk = {"disk": 20 * GIB, "scratch_dir": "x", "sampler": "rank"}
    assert fits(memory=GIB, **on_disk)
    assert not fits(memory=1 << 20, **on_disk)
    assert needed.most_rows is not None
    in_memory = {"memory": GIB, "disk": 0, "sampler": "proportional"}
    assert fits(capacity=needed.most_rows - 64, **in_memory)
    assert not fits(capacity=int(1.1 * needed.most_rows), **in_memory)
