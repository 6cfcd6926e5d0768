"""Lanes that advance alone, against the model; ``test_lockstep.py`` writes to them in
every order."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)

from rlbuf_td import (
    HindsightSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    TrajectoryIndex,
    UniformSampler,
    make_transition,
)
from rlbuf_td.diagnostics.doctor import check as examine
from tests import model as m
from tests.model import Model, World
from tests.statistics import assert_follows
from tests.test_lockstep import forked


def unlike(
    sampler: Any = None,
    seed: int = 0,
    steps: int = 12,
    often: float = 0.1,
    **options: Any,
) -> World:
    """Return a buffer whose lanes hold 1, 5 and 12 rows, the last of a lane that was
    written 30 times."""
    storage = PackedStorage(3 * steps, ndim=2, lanes=3)
    rb = ReplayBuffer(storage=storage, sampler=sampler or UniformSampler(), **options)
    world = World(rb, Model(steps, 3), seed, (often, 0.05, 0.0), ids=False)
    for lane, count in ((0, 1), (1, 5), (2, 30)):
        world.append([lane] * count)
    return world


def test_random_goals_come_from_all_written_rows_alike() -> None:
    world = unlike(
        HindsightSampler(
            UniformSampler(), m.reward_fn, her_ratio=1.0, strategy="random"
        )
    )
    goals = torch.cat([world.rb.sample(1_000)["desired_goal"][:, 0] for _ in range(50)])
    outcomes = torch.tensor([row.fields[m.OUTCOME][0] for row in world.model.rows()])
    counts = (goals[:, None] == outcomes).sum(0)
    assert int(counts.sum()) == len(goals)
    assert_follows(
        counts, torch.full((len(outcomes),), 1 / len(outcomes), dtype=torch.float64)
    )


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_a_second_buffer_gives_priorities_to_written_rows_only(sampler: Any) -> None:
    world = unlike()
    other = ReplayBuffer(storage=world.rb.storage, sampler=sampler(36))
    written = [world.model.flat(row) for row in world.model.rows()]
    assert (
        other.sampler.priority(torch.arange(36)) >= 0
    ).nonzero().flatten().tolist() == written
    assert len(other.sample(16)) == 16


def test_health_and_doctor_see_only_written_rows() -> None:
    rb = unlike(ProportionalSampler(36)).rb
    rb.sample(16)
    report = rb.health()
    assert (report["rows"], report["fill"], report["priority_p50"]) == (18.0, 0.5, 1.0)
    assert 0 <= report["age_p50"] < 12
    assert not rb.full
    assert examine(rb).rows == 18


@pytest.mark.parametrize("shared", [False, True])
def test_lanes_may_be_an_entry_of_the_data(shared: bool) -> None:
    rb = ReplayBuffer(
        storage=PackedStorage(80, ndim=2, lanes=4, shared=shared), lane_key="env_id"
    )
    world = World(rb, Model(20, 4))

    def write(*lanes: int, shape: tuple[int, ...] = (-1,)) -> Any:
        rows = [world.make(lane) for lane in lanes]
        data = m.as_tensordict(rows).set("env_id", torch.tensor(lanes)).view(*shape)
        index = rb.add(data) if len(shape) == 0 else rb.extend(data)
        for lane, row in zip(lanes, rows, strict=True):
            world.model.append(lane, row)
        return index

    assert write(3, 1, 3).tolist() == [[0, 3], [0, 1], [1, 3]]
    write(0, 0, 0, 2, 2, 2, shape=(2, 3))  # [E, T], of a collector with two lanes
    write(1, shape=())
    m.assert_holds(rb, world.model, extra=["env_id"])


def test_torchrls_random_sampler_draws_only_written_rows() -> None:
    world = unlike()
    theirs = TensorDictReplayBuffer(
        storage=world.rb.storage, sampler=RandomSampler(), batch_size=2_000
    )
    seen, counts = theirs.sample()["observation"][:, 0].unique(return_counts=True)
    assert seen.tolist() == sorted(
        row.fields["observation",][0] for row in world.model.rows()
    )
    assert_follows(counts, torch.full((18,), 1 / 18, dtype=torch.float64))


def test_torchrls_samplers_that_draw_holes_are_refused() -> None:
    strict = SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False)
    for sampler in (
        SamplerWithoutReplacement(),
        PrioritizedSampler(36, 0.6, 0.4),
        strict,
    ):
        theirs = TensorDictReplayBuffer(
            storage=unlike().rb.storage, sampler=sampler, batch_size=4_000
        )
        with pytest.raises(
            IndexError,
            match=r"has not been written.*all but RandomSampler draw such rows: use",
        ):
            theirs.sample()


def test_a_mixture_writes_to_lanes_of_a_member() -> None:
    world = unlike()
    mixture = ReplayBufferMixture(
        {"one": world.rb}, {"one": 1.0}, writes_to="one", batch_size=4
    )
    rows = [world.make(lane) for lane in (0, 1, 0)]
    mixture.extend(m.as_tensordict(rows), lanes=[0, 1, 0])
    world.tell(
        [*zip((0, 1, 0), rows, strict=True)], torch.tensor([[1, 0], [5, 1], [2, 0]])
    )
    m.assert_holds(world.rb, world.model, episodes=False)


@pytest.mark.parametrize("how", ["add", "add_step"])
def test_a_new_handle_begins_an_episode_in_its_lane_alone(how: str) -> None:
    rb = ReplayBuffer(storage=PackedStorage(10, ndim=2, lanes=2))
    seen = torch.zeros(1)
    step = {"observation": seen, "action": 0, "reward": 0.0, "next_observation": seen}
    step |= {"terminated": False, "truncated": False}

    def write(lane: Any, count: int) -> None:
        for _ in range(count):
            if how == "add":
                lane.add(make_transition(*step.values()))
            else:
                lane.add_step(**step)

    first, other = rb.lane(0), rb.lane(1)
    write(first, 3)
    write(other, 3)
    write(rb.lane(0), 2)
    write(other, 2)
    ahead = TrajectoryIndex(rb.storage).steps_ahead(torch.arange(10)).view(5, 2)
    assert ahead[:, 0].tolist() == [2, 1, 0, 1, 0]
    assert ahead[:, 1].tolist() == [4, 3, 2, 1, 0]


def test_an_age_counts_the_rows_that_the_lane_has_got_since() -> None:
    world = unlike(batch_size=64, steps=40)
    index = world.rb.sample()["index"].tolist()
    ages = [m.age(world.model, world.model.row(*cell)) for cell in index]
    assert world.rb.health()["age_max"] == max(ages)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_actor_that_inherits_a_lane_begins_an_episode() -> None:
    storage = PackedStorage(20, ndim=2, lanes=2, shared=True)
    lane = ReplayBuffer(storage=storage).lane(0)

    def act() -> None:
        for _ in range(2):
            lane.add_step(
                observation=0.0,
                action=0.0,
                reward=0.0,
                next_observation=0.0,
                terminated=False,
                truncated=False,
            )

    act()
    assert forked(act) == 0
    lengths = TrajectoryIndex(storage).length(torch.arange(4) * 2)
    assert lengths.tolist() == [2] * 4
