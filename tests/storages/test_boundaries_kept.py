"""Boundaries of episodes and identities of rows outlast loads, edits, kills, full rings and new rollouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    EpisodeSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    RolloutBuffer,
    SchemaError,
    TrajectoryIndex,
    UniformSampler,
)
from tests.storages.test_kill import call_within_a_write, die

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def rows(first: int, ids: list[int], done: Iterable[int] = (), with_ids: bool = True) -> TensorDict:
    """Rows that know their number ``x``; those whose number is in ``done`` end an episode."""
    x = torch.arange(first, first + len(ids))
    ends = torch.tensor([number in {*done} for number in x.tolist()])[:, None]
    after = {"reward": x[:, None].float(), "done": ends, "terminated": ends, "state_value": torch.zeros(len(x), 1)}
    data = TensorDict({"x": x, "note": torch.zeros(len(x), 1), "state_value": torch.zeros(len(x), 1)}, [len(x)])
    data["next"] = TensorDict(after, [len(x)])
    return data.set(("collector", "traj_ids"), torch.tensor(ids)) if with_ids else data


def in_child(work: Callable[[], object]) -> None:
    if not (child := os.fork()):
        work()
        os._exit(0)
    os.waitpid(child, 0)


def test_an_edit_after_a_load_joins_no_episodes(tmp_path: Path) -> None:
    def made() -> ReplayBuffer:
        return ReplayBuffer(storage=PackedStorage(10), sampler=NStepSampler(UniformSampler(), 10, 1.0), batch_size=64)

    before, rb = made(), made()
    before.extend(rows(0, [0] * 3))
    before.dumps(tmp_path)
    rb.loads(tmp_path)
    rb.extend(rows(100, [0] * 2))  # new collectors count their episodes from 0 again
    rb.set_at_("note", torch.ones(1, 1), slice(0, 1))
    batch = rb.sample()
    assert set(batch["next", "reward"][batch["x"] == 0].flatten().tolist()) == {3.0}


def test_a_load_and_another_restart_join_no_episodes(tmp_path: Path) -> None:
    def run(first: int, count: int) -> ReplayBuffer:
        rb = ReplayBuffer(storage=PackedStorage(20, scratch_dir=tmp_path / "rows", reopen=True))
        rb.extend(rows(first, [0] * count))
        return rb

    run(0, 3).close()
    with run(100, 3) as rb:
        rb.dumps(tmp_path / "dump")
        rb.loads(tmp_path / "dump")
    with run(200, 1) as rb:
        assert TrajectoryIndex.of(rb.storage).length(torch.arange(6)).tolist() == [3] * 6


@needs_fork
def test_a_killed_write_joins_no_episodes(tmp_path: Path) -> None:
    def opened() -> ReplayBuffer:
        return ReplayBuffer(storage=PackedStorage(8, ndim=2, lanes=2, scratch_dir=tmp_path, reopen=True))

    def killed() -> None:
        rb = opened()
        call_within_a_write(rb, "write_entries", die)
        rb.extend(rows(300, [0]), lanes=0)

    for first in (0, 100):
        in_child(lambda first=first: opened().extend(rows(first, [0] * 2), lanes=0))  # type: ignore[misc]
    in_child(killed)
    with opened() as rb:
        lane = rb.lane(0).chronological()
        at = torch.stack([(rb[:]["x"] == x).nonzero()[0] for x in lane["x"]])
        lengths = TrajectoryIndex.of(rb.storage).length((at[:, 1], at[:, 0]))
        assert dict(zip(lane["x"].tolist(), lengths.tolist(), strict=True)) == {1: 1, 100: 2, 101: 2}


def test_a_refused_first_write_of_a_handle_ends_no_episode() -> None:
    rb = ReplayBuffer(storage=PackedStorage(20, ndim=2, lanes=2))
    handle = rb.lane(0)
    for first in (0, 2, 4):  # the last ones are compiled
        handle.extend(rows(first, [0] * 2))
        with pytest.raises(SchemaError):
            rb.lane(0).extend(rows(9, [0]).exclude("note"))
    assert TrajectoryIndex.of(rb.storage).length((torch.arange(6), torch.zeros(6).long())).tolist() == [6] * 6
    rb.lane(0).extend(rows(6, [0]))
    assert TrajectoryIndex.of(rb.storage).length((torch.arange(7), torch.zeros(7).long())).tolist() == [6] * 6 + [1]


@needs_fork
def test_rows_of_a_killed_write_take_late_priorities() -> None:
    storage = PackedStorage(80, ndim=2, lanes=2)
    rb = ReplayBuffer(storage=storage, sampler=ProportionalSampler(80), batch_size=64).share()
    for lane, count in enumerate((40, 20)):
        rb.extend(rows(100 * lane, [0] * count, with_ids=False), lanes=lane)

    def killed() -> None:
        call_within_a_write(rb, "write_entries", die)
        rb.storage.advance(rows(300, [0] * 30, with_ids=False), lanes=0, tells=False)

    in_child(killed)
    for _ in range(2):
        batch = rb.sample()
        batch["td_error"] = torch.full((64,), 9.0)
        rb.update_tensordict_priority(batch)
    assert (rb.sampler.priority(batch["index"], storage=rb.storage) == 9.0).all()


def test_an_episode_cut_by_a_whole_ring_is_not_whole() -> None:
    sampler = EpisodeSampler(by="episode")
    rb = ReplayBuffer(storage=PackedStorage(8, ndim=2, lanes=2), sampler=sampler, batch_size=8)
    rb.extend(rows(0, [7, 7]), lanes=0)
    TrajectoryIndex.of(rb.storage).whole()
    rb.extend(rows(2, [7, 7, 8, 8]), lanes=0)  # as many rows as a lane has
    with pytest.raises(RuntimeError):
        rb.sample()


def test_an_episode_cut_after_empty_is_not_whole() -> None:
    sampler = EpisodeSampler(finished_only=False)
    rb = ReplayBuffer(storage=PackedStorage(6, ndim=2, lanes=2), sampler=sampler, batch_size=2)
    rb.extend(rows(0, [0] * 2, with_ids=False), lanes=0)
    rb.sample()
    rb.empty()
    rb.extend(rows(0, [0] * 5, with_ids=False), lanes=0)  # a lane has 3
    with pytest.raises(RuntimeError):
        rb.sample()


def test_an_episode_cut_by_a_new_rollout_is_not_whole() -> None:
    rb = RolloutBuffer(6, sampler=EpisodeSampler(by="episode"), batch_size=4, partial=True)
    rb.extend(rows(0, [0] * 6))
    rb.sampler.can_sample(rb.storage, 4)
    TrajectoryIndex.of(rb.storage).whole()
    rb.extend(rows(6, [0] * 3, done=[7]))
    with pytest.raises(RuntimeError):
        rb.sample()


def test_an_episode_cut_before_a_load_is_not_whole(tmp_path: Path) -> None:
    def made(capacity: int) -> ReplayBuffer:
        return ReplayBuffer(storage=PackedStorage(capacity), sampler=EpisodeSampler(by="episode"), batch_size=16)

    rb, larger = made(5), made(20)
    for number in range(8):
        rb.extend(rows(number, [0], done=[6, 7], with_ids=False))
    rb.dumps(tmp_path)
    larger.loads(tmp_path)
    assert [each.sample()["x"].unique().tolist() for each in (rb, larger)] == [[7], [7]]


@needs_fork
def test_processes_share_the_episodes_of_keys_of_ones_own() -> None:
    storage = PackedStorage(20, shared=True)
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(0, [0] * 3, with_ids=False).set("end", torch.tensor([False, False, True])))
    index = TrajectoryIndex.of(storage, done_key="end", traj_key=None)
    assert index.length(torch.arange(3)).tolist() == [3] * 3
    in_child(lambda: rb.extend(rows(3, [0] * 4, with_ids=False).set("end", torch.tensor([False, True, False, False]))))
    assert index.length(torch.arange(7)).tolist() == [3, 3, 3, 2, 2, 2, 2]


def test_breaks_of_keys_of_ones_own_outlast_reopenings(tmp_path: Path) -> None:
    for first in (0, 3, 6):
        with ReplayBuffer(storage=PackedStorage(20, scratch_dir=tmp_path, reopen=True)) as rb:
            index = TrajectoryIndex.of(rb.storage, done_key="end", traj_key=None)
            rb.extend(rows(first, [0] * 3, with_ids=False).set("end", torch.zeros(3, dtype=torch.bool)))
            assert index.length(torch.arange(first + 3)).tolist() == [3] * (first + 3)
