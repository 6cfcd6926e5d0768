"""Handles, trajectories, losses, dumps and refusals, with shards in this process."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from importlib import import_module
from inspect import iscoroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rlbuf_td as td
from rlbuf_td.buffers.flow import FlowControl
from rlbuf_td.checkpoint import CheckpointError
from rlbuf_td.distributed.links import PATIENCE
from rlbuf_td.distributed.shard import Spec
from rlbuf_td.distributed.sharded import Limiter, Manifest, newest_dump
from tests import model
from tests.catalogue import assert_same
from tests.checkpoint.test_damage import resign
from tests.distributed.local import World
from tests.distributed.test_law import (
    begun,
    fill,
    ids_of,
    magnitudes,
    proportional,
    rows,
)
from tests.test_composition import OTHERS, RECIPES, anchor_errors, wrapped


def world_of(
    shards: int, sampler: Callable[[], Any], capacity: int = 200, ndim: int = 1
) -> World:
    def make_buffer() -> td.ReplayBuffer:
        return td.ReplayBuffer(
            storage=td.PackedStorage(capacity, ndim=ndim),
            sampler=sampler(),
            batch_size=64,
        )

    return World(shards, make_buffer)


def updated(client, batch, error=7.0):
    batch["td_error"] = torch.full(batch.shape, error)
    client.update_tensordict_priority(batch)
    client.synchronize()


def stale(world, client):
    return client.stale + sum(shard.report().stale_updates for shard in world.shards)


def test_one_shard_holds_the_rows_and_priorities_of_a_buffer():
    data = rows(0, 40)
    data["td_error"] = torch.rand(40)
    faults = (
        data[:1].exclude("id"),
        data[:1].clone().set("id", data["id"][:1].double()),
        data[:1].clone().set("td_error", torch.tensor([torch.nan])),
        data[:1].clone().set("index", torch.zeros(1)),
        data[:0],
    )
    for way in ("add", "extend"):
        world = world_of(1, lambda: td.ProportionalSampler(30), 30)
        alone = td.ReplayBuffer(
            storage=td.PackedStorage(30), sampler=td.ProportionalSampler(30)
        )
        client, shard = world.client(), world.shards[0]
        for each in (client, alone):
            for part in data.split(4):
                if way == "add":
                    for row in part:
                        each.add(row.clone())
                else:
                    each.extend(part.clone())
            for fault in faults:
                with pytest.raises((td.SchemaError, ValueError)):
                    each.extend(fault.clone())
        client.sample(8)
        assert_same(shard.storage[:], alone.storage[:])
        found, expected = (
            rb.sampler.priority(torch.arange(30)) for rb in (shard.buffer, alone)
        )
        assert torch.equal(found, expected)
        assert client.write_count == len(client) + 10 == alone.write_count == 40


def test_columns_of_a_step_are_refused_with_a_way_that_works():
    client = World(1, proportional).client()
    with pytest.raises(TypeError, match="got 3 arguments: make_transition"):
        client.add(torch.zeros(3), 0, 1.0)


def draw(client, times):
    for _ in range(times):
        client.sample(8)


def test_small_weights_are_reported_once(monkeypatch):
    monkeypatch.setattr("rlbuf_td.samplers.weight_watch.EVERY", 1)
    world = world_of(2, lambda: td.ProportionalSampler(200, 1.0, 1.0))
    fill(world, 60)
    client = world.client()
    batch = client.sample()
    batch["td_error"] = torch.where(batch["id"] == batch["id"][0], 1e-6, 1.0)
    client.update_tensordict_priority(batch)
    with pytest.warns(RuntimeWarning, match='weight_norm="batch"') as caught:
        draw(client, 15)
    assert len(caught) == 1


def replace_rows(world, learner):
    world.client(home=0).extend(rows(100, 400))
    learner.synchronize()
    learner.sample()


def restart(world, learner):
    world.handles[0].restart()
    world.client(home=0).extend(rows(100, 50))


def lose(world, learner):
    world.handles[0].is_lost = True
    learner.links.lose(0)


@pytest.mark.parametrize("change", [replace_rows, restart, lose])
def test_updates_of_rows_that_are_gone_are_skipped_and_counted(change):
    world, learner = begun(2, 60)
    batch = learner.sample()
    change(world, learner)
    updated(learner, batch)
    if change is restart:
        learner.sample()
    assert stale(world, learner) == int((batch["index"][:, 0] == 0).sum()) > 0
    assert not (magnitudes(world, 500)[100:] == 7).any()


def test_a_lost_shard_costs_its_rows_and_one_retry():
    world, learner = begun(3, 90)
    learner.sample()
    world.handles[2].is_lost = True
    batch = learner.sample()
    assert (learner.retries, learner.links.losses) == (1, 1)
    assert set(batch["index"][:, 0].tolist()) == {0, 1}
    writer = world.client(home=2)
    writer.extend(rows(500, 5))
    assert writer._home == 0
    world.handles[2].restart()
    for _ in range(3):
        learner.sample()
    assert learner.links.live == [0, 1, 2]
    assert learner.links.lost_rows[2] > 0
    assert learner.links.patience == PATIENCE


def test_a_shard_that_has_only_been_slow_is_given_more_time():
    _, learner = begun(2, 60)
    learner.links.lose(1)
    learner.sample()
    assert (learner.links.live, learner.links.patience) == ([0, 1], 2 * PATIENCE)
    assert learner.links.lost_rows == [0, 0]


def test_without_a_positive_priority_the_error_names_priorities():
    world = world_of(2, lambda: td.ProportionalSampler(400, eps=0.0), 400)
    fill(world, 30)
    learner = world.client()
    for shard in world.shards:
        shard.buffer.update_priority(torch.arange(len(shard.storage)), 0.0)
    for wait in (False, True):
        with pytest.raises(RuntimeError, match="no row has a positive priority"):
            learner.sample(wait=wait, timeout=5.0)


def flowing(world: World, seconds: float = 20.0) -> threading.Timer:
    """Stop flow control after some time, so that calls that would wait forever raise an
    error."""
    timer = threading.Timer(seconds, world.flow.limiter.shutdown)
    timer.daemon = True
    timer.start()
    return timer


@pytest.mark.parametrize(
    "how", ["the only shard restarts without a dump", "the buffer is emptied"]
)
def test_when_all_rows_are_gone_batches_are_refused_and_writes_admitted(
    how, monkeypatch
):
    monkeypatch.setattr("rlbuf_td.distributed.client._ARRIVAL", 0.05)
    world = World(1, proportional, flow=FlowControl(1.0, 10, 64))
    timer, client = flowing(world), world.client()
    client.extend(rows(0, 10))
    client.extend(rows(10, 64))
    client.sample()
    if how == "the buffer is emptied":
        world.buffer().empty()
        match = "the buffer is empty, and min_size=10"
    else:
        world.handles[0].restart()
        match = "empty storage"
    with pytest.raises(RuntimeError, match=match):
        client.sample()
    with pytest.raises(TimeoutError):
        client.sample(wait=True, timeout=0.2)
    assert (
        world.flow.report.remote()["inserts"],
        world.flow.report.remote()["samples"],
    ) == (0, 0)
    client.extend(rows(74, 9))
    # min_size holds again
    with pytest.raises(RuntimeError, match="9 of min_size=10 rows have been written"):
        client.sample()
    client.extend(rows(83, 55))
    assert client.sample().shape == (64,)
    timer.cancel()


def test_a_shard_that_is_lost_for_a_while_keeps_the_counts_of_its_rows(monkeypatch):
    monkeypatch.setattr("rlbuf_td.distributed.client._ARRIVAL", 0.05)
    world = World(2, proportional, flow=FlowControl(4.0, 0, 400))
    client = world.client(home=1)
    client.extend(rows(0, 50))
    world.handles[1].is_lost = True
    with pytest.raises(RuntimeError, match="empty storage"):
        client.sample()
    world.handles[1].is_lost = False
    assert (
        world.flow.report.remote()["inserts"],
        world.flow.report.remote()["samples"],
    ) == (50, 0)
    assert client.sample(wait=True, timeout=10.0).shape == (64,)


def test_td_errors_arrive_as_the_nearest_float32():
    world, learner = begun(2, 60)
    batch = learner.sample()
    errors = torch.tensor([1e-50, 1e300, 1 / 3, -2.0], dtype=torch.float64)
    learner.update_tensordict_priority(batch.set("td_error", errors.repeat(16)))
    learner.synchronize()
    largest = torch.finfo(torch.float32).max
    stored = errors.abs().clamp(max=largest).float().repeat(16).tolist()
    latest = dict(zip(batch["id"].tolist(), stored, strict=True))
    found = magnitudes(world, 60)
    assert {row: found[row].item() for row in latest} == latest


def test_bad_updates_are_refused_and_queued_errors_are_kept():
    _, learner = begun(2, 60)
    batch = learner.sample()
    with pytest.raises(KeyError, match="no 'td_error'"):
        learner.update_tensordict_priority(batch)
    learner.update_tensordict_priority(batch.set("td_error", torch.rand(64)))
    other = torch.tensor([[7, 0, 0, 0]]).expand(64, 4)
    no_errors = torch.full((64,), torch.nan)
    for changed, said in (
        ({"index": torch.zeros(64).long()}, r"\[64, 4\], got int64 of shape \(64,"),
        ({"index": torch.zeros(64, 4)}, r"is int64 \[64, 4\], got float32"),
        ({"index": other}, "names rows that are not in the 2 shards"),
        ({"index": other - 7}, "names rows that are not in the 2 shards"),
        ({"td_error": no_errors}, "NaN or infinite"),
    ):
        with pytest.raises(ValueError, match=said):
            learner.update_tensordict_priority(batch.clone().update(changed))
    with pytest.raises(KeyError, match="no 'index'"):
        learner.update_tensordict_priority(batch.exclude("index"))
    assert len(learner._errors) == 1


def test_a_shard_that_was_emptied_meanwhile_is_drawn_from_no_more():
    world, learner = begun(2, 60)
    learner.sample()
    world.shards[1].empty()
    assert set(learner.sample()["index"][:, 0].tolist()) == {0}
    world.shards[0].empty()
    with pytest.raises(TimeoutError, match="no rows within"):
        learner.sample(wait=True, timeout=0.05)


# -- one schema for all shards


def wide(first: int, count: int) -> TensorDict:
    """Return rows of another schema than those of :func:`rows`."""
    return rows(first, count).set("id", torch.zeros(count, 2))


def test_the_first_rows_of_a_shard_fix_the_schema_of_all_shards():
    world = World(3, proportional)
    world.client(home=1).extend(rows(0, 5))
    for place in range(3):
        client = world.client(home=place)
        for _ in range(2):
            with pytest.raises(td.SchemaError, match="'id' came as float32"):
                client.extend(wide(0, 5))
        client.extend(rows(10 * place + 10, 5))  # the client can go on
    assert [len(shard.storage) for shard in world.shards] == [5, 10, 5]
    assert len(set(world.client().sample(512)["index"][:, 0].tolist())) == 3


def test_the_order_of_keys_does_not_matter():
    world = World(2, proportional)
    for home, keys in enumerate((["id", "again"], ["again", "id"])):
        number = torch.arange(50) + 50 * home
        data = TensorDict(dict.fromkeys(keys, number), [50])
        world.client(home=home).extend(data)
    batch = world.client().sample(512)
    assert torch.equal(batch["id"], batch["again"])
    assert batch["id"].min() < 50 <= batch["id"].max()


def test_of_two_shards_that_store_their_first_rows_at_once_one_begins_again(
    monkeypatch,
):
    world = World(2, proportional)
    world.client(home=0).extend(rows(0, 5))
    client = world.client(home=1)
    with monkeypatch.context() as patch:
        # as the other shard's offer has not arrived yet
        patch.setattr(world.agreed, "find", lambda: None)
        with pytest.raises(td.SchemaError, match="'id' came as float32"):
            client.extend(wide(0, 5))
    assert len(world.shards[1].storage) == 0
    client.extend(rows(5, 5))
    assert stored(world) == [[*range(5)], [*range(5, 10)]]


def test_rows_that_the_buffer_of_a_shard_refuses_fix_no_schema():
    def make_buffer() -> td.ReplayBuffer:
        storage = td.PackedStorage(100, share_next=["observation"])
        return td.ReplayBuffer(storage=storage, batch_size=4)

    def observed(count: int) -> TensorDict:
        observation = torch.rand(count + 1, 30)
        outcome = {"observation": observation[1:], "done": torch.zeros(count, 1) > 0}
        return TensorDict({"observation": observation[:-1], "next": outcome}, [count])

    world = World(2, make_buffer)
    client = world.client(home=0)
    with pytest.raises(td.SchemaError, match="share_next names 'observation'"):
        client.extend(rows(0, 5))
    world.client(home=1).extend(observed(5))
    client.extend(observed(5))
    assert [len(shard.storage) for shard in world.shards] == [5, 5]


def test_after_a_load_of_other_rows_learners_and_writers_go_on_with_them(tmp_path):
    dump = World(2, proportional)
    dump.client(home=0).extend(wide(0, 30))
    dump.client(home=1).extend(wide(30, 30))
    dump.buffer().dumps(tmp_path)
    world, learner = begun(2, 60)
    writer = world.client(home=0)
    writer.extend(rows(100, 5))
    learner.sample()
    world.buffer().loads(tmp_path)
    assert learner.sample(64)["id"].shape == (64, 2)
    writer.extend(rows(105, 5))
    with pytest.raises(td.SchemaError, match="'id' came as int64"):
        writer.synchronize()
    writer.extend(wide(60, 5))
    with pytest.raises(td.SchemaError, match="'id' came as int64"):
        world.client(home=1).extend(rows(110, 5))
    assert [shard.report().rows for shard in world.shards] == [30, 30]
    assert [shard.report().waiting for shard in world.shards] == [5, 0]
    world.handles[1].restart()
    with pytest.raises(td.SchemaError, match="'id' came as int64"):
        world.client(home=1).extend(rows(110, 5))


def test_rows_that_are_lost_fix_no_schema():
    world = World(2, proportional)
    client = world.client(home=0)
    world.handles[0].is_lost = True
    client.extend(wide(0, 5))
    client.extend(rows(0, 5))
    assert stored(world) == [[], [*range(5)]]


def test_sequences_are_drawn_after_a_load_of_other_rows(tmp_path):
    def sequences() -> td.SequenceSampler:
        return td.SequenceSampler(td.UniformSampler(), 4)

    dump = world_of(1, sequences)
    dump.client().extend(episode(0, 20).set("id", torch.zeros(20, 2)))
    dump.buffer().dumps(tmp_path)
    world = world_of(1, sequences)
    world.client().extend(episode(0, 20))
    learner = world.client()
    learner.sample()
    world.buffer().loads(tmp_path)
    assert learner.sample()["id"].shape == (64, 2)


def test_a_restarted_shard_takes_no_dump_of_another_schema(tmp_path):
    dump = World(1, proportional)
    dump.client().extend(wide(0, 30))
    dump.shards[0].dump(str(tmp_path))
    world, learner = begun(2, 60)
    world.handles[0].restart(str(tmp_path))
    assert len(world.shards[0].storage) == 0
    world.client(home=0).extend(rows(60, 5))
    assert learner.sample().shape == (64,)


# -- writes that are refused or lost


def counted(world: World) -> tuple[int, int]:
    """Return how many rows flow control counts, and how many the shards have."""
    shards = sum(shard.report().inserts for shard in world.shards)
    return counts(world)["inserts"], shards


def fails(world: World, monkeypatch: pytest.MonkeyPatch, place: int = 0) -> None:
    """Let the disk of a shard be full for rows from 100 on."""
    buffer = world.shards[place].buffer
    extend = buffer.extend

    def full(data: TensorDict):
        if int(data["id"].max()) >= 100:
            raise OSError(28, "No space left on device")
        return extend(data)

    monkeypatch.setattr(buffer, "extend", full)


def flowing_world() -> World:
    return World(2, proportional, flow=FlowControl(1.0, 0, 10_000))


def test_flow_control_counts_no_rows_of_another_schema():
    world = flowing_world()
    world.client(home=0).extend(rows(0, 20))
    for place in range(2):
        with pytest.raises(td.SchemaError):
            world.client(home=place).extend(wide(0, 30))
    assert counted(world) == (20, 20)


def test_flow_control_counts_no_rows_of_a_lost_shard():
    world = flowing_world()
    client = world.client(home=0)
    client.extend(rows(0, 20))
    world.handles[0].is_lost = True
    client.extend(rows(20, 30))  # before the client knows
    client.extend(rows(50, 7))
    client.synchronize()
    assert client._home == 1
    assert counted(world) == (27, 27)
    assert client.links.lost_rows == [30, 0]


def test_flow_control_counts_no_rows_that_a_full_disk_refuses(monkeypatch):
    world = flowing_world()
    client = world.client(home=0)
    client.extend(rows(0, 20))
    fails(world, monkeypatch)
    client.extend(rows(100, 30))
    world.client().synchronize()  # does not concern another client
    for _ in range(2):
        world.shards[0]._enter()
    # the rows of this call are not sent
    with pytest.raises(OSError, match="No space left on device"):
        client.extend(rows(20, 7))
    assert counted(world) == (20, 20)
    client.extend(rows(20, 7))
    client.synchronize()
    assert counted(world) == (27, 27)


def test_rows_beside_refused_ones_are_stored_and_only_their_writer_has_the_error(
    monkeypatch,
):
    world, learner = begun(1, 30)
    first, second = world.client(home=0), world.client(home=0)
    first.extend(rows(30, 5))
    second.extend(rows(35, 5))
    learner.sample()
    fails(world, monkeypatch)
    first.extend(rows(40, 5))
    second.extend(rows(100, 5))
    first.extend(rows(45, 5))
    for _ in range(3):
        learner.sample()
    assert stored(world) == [[*range(50)]]
    first.synchronize()
    with pytest.raises(OSError, match="No space left on device"):
        second.synchronize()
    second.synchronize()  # said once


# -- time limits, which the caller keeps


def test_a_batch_waits_no_longer_than_its_timeout_for_a_frozen_flow_control():
    world = flowing_world()
    client = world.client(home=0)
    client.extend(rows(0, 100))
    world.flow.process.is_frozen = True
    for timeout in (0.0, 0.05):
        with pytest.raises(TimeoutError, match="flow control has not answered"):
            client.sample(wait=True, timeout=timeout)
    for call in (client.sample, world.buffer().health):
        with pytest.raises(TimeoutError, match="flow control has not answered"):
            call()
    with (
        pytest.warns(UserWarning, match="flow control does not answer"),
        pytest.raises(AssertionError, match="would wait forever"),
    ):
        client.extend(rows(100, 9))
    # what flow control has admitted meanwhile is not counted
    world.flow.process.thaw()
    client.sample()
    assert counts(world) == {"inserts": 100, "samples": 64}


def test_a_batch_waits_no_longer_than_its_timeout_for_a_frozen_shard():
    world = flowing_world()
    client = world.client(home=0)
    client.extend(rows(0, 100))
    client.sample()
    world.handles[0].process.is_frozen = True
    begin = time.monotonic()
    for timeout in (0.0, 0.05):
        with pytest.raises(TimeoutError, match="a shard has not answered"):
            client.sample(wait=True, timeout=timeout)
    assert time.monotonic() - begin < 2.0
    asked = world.handles[0].calls.count("answer")
    world.handles[0].process.thaw()
    assert client.sample(wait=True, timeout=5.0).shape == (64,)
    assert world.handles[0].calls.count("answer") == asked
    assert counts(world)["samples"] == 128
    assert client.links.losses == 0


def test_a_batch_waits_no_longer_than_its_timeout_if_all_shards_are_lost():
    world, learner = begun(1, 60)
    world.handles[0].is_lost = True
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="no shard has answered"):
        learner.sample(wait=True, timeout=0.1)
    assert time.monotonic() - begin < 5.0


def test_a_timeout_of_0_takes_a_batch_that_is_there():
    world = flowing_world()
    client = world.client(home=0)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="the buffer is empty"):
        client.sample(wait=True, timeout=0)
    client.extend(rows(0, 100))
    assert client.sample(wait=True, timeout=0).shape == (64,)
    assert time.monotonic() - begin < 2.0


def test_showing_the_buffer_asks_no_shard():
    world, _ = begun(2, 60)
    buffer = world.buffer()
    for handle in world.handles:
        handle.calls.clear()
        handle.process.is_frozen = True
    assert "0: 20 rows, mass" in repr(buffer)
    assert [handle.calls for handle in world.handles] == [[], []]


def test_flow_control_in_a_new_process_goes_on_from_the_rows_of_the_shards():
    first = Limiter(lambda: None, 4.0, 10, 400)
    first.restart(0)
    first.admit_insert(7)
    second = Limiter(lambda: 50, 4.0, 10, 400)
    # what the first process has counted
    second.take_back(first.epoch, inserted=7)
    report = second.report()
    assert (report["inserts"], report["samples"]) == (50, 160)


async def _begun(call: Coroutine) -> asyncio.Task:
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    assert not task.done()
    return task


@pytest.mark.parametrize(
    "change",
    [
        lambda limiter: limiter.insert(50),
        lambda limiter: limiter.take_back(limiter.epoch, sampled=100),
        lambda limiter: limiter.restart(20),
        lambda limiter: limiter.restore(None, 20),
    ],
    ids=["insert", "take_back", "restart", "restore"],
)
def test_a_batch_that_waits_is_admitted_when_the_counts_change(change):
    async def run() -> None:
        limiter = Limiter(lambda: None, 4.0, 10, 400)
        limiter.restart(100)
        while limiter.admits_sample(8):
            await limiter.sample(8, False, None)
        sampled = limiter.report()["samples"]
        waiting = await _begun(limiter.sample(8, True, None))
        result = change(limiter)
        if iscoroutine(result):
            await result
        await asyncio.wait_for(waiting, 20.0)
        assert limiter.admits_sample(8)
        assert limiter.report()["sample_waits"] == 1
        assert sampled == 760

    asyncio.run(run())


def test_a_write_that_waits_is_admitted_by_a_batch():
    async def run() -> None:
        limiter = Limiter(lambda: None, 1.0, 0, None)
        await limiter.insert(10)
        waiting = await _begun(limiter.insert(10))
        await limiter.sample(16, True, None)
        assert (await asyncio.wait_for(waiting, 20.0)).inserted == 20

    asyncio.run(run())


def test_a_batch_that_waits_misses_no_change():
    """Two writes change the counts before the batch begins to wait; the second one
    itself begins to wait."""

    async def run() -> None:
        limiter = Limiter(lambda: None, 1.0, 4, 4.0)
        calls = limiter.sample(1, True, 20.0), *map(limiter.insert, (4, 4, 1))
        await asyncio.wait_for(asyncio.gather(*calls), 10.0)

    asyncio.run(run())


# -- which buffers


@pytest.mark.parametrize(
    ("make_buffer", "name"),
    [
        (lambda: td.ReplayBuffer(sampler=td.RankSampler(1_000)), "RankSampler"),
        (lambda: td.ReplayBuffer(sampler=td.EpisodeSampler()), "EpisodeSampler"),
        (
            lambda: td.ReplayBuffer(sampler=td.UniformSampler(unique=True)),
            "unique=True",
        ),
        (
            lambda: td.ReplayBuffer(sampler=td.UniformSampler(replacement=False)),
            "MinibatchSampler",
        ),
        (
            lambda: td.ReplayBuffer(
                sampler=td.SequenceSampler(td.UniformSampler(), 3, boundary="strict")
            ),
            "strict",
        ),
        (lambda: td.ReplayBuffer(writer=td.RolloutWriter()), "RolloutWriter"),
        (lambda: td.ReplayBuffer(transform=lambda data: data), "a transform"),
        (lambda: td.ReplayBuffer(prefetch=2), "prefetch"),
        (lambda: td.ReplayBuffer(samples_per_insert=2.0), "flow control"),
    ],
)
def test_buffers_whose_law_cannot_be_sharded_are_refused_by_name(make_buffer, name):
    with pytest.raises(ValueError, match=name):
        Spec.of(make_buffer())


def episode(first: int, count: int, ends: bool = True) -> TensorDict:
    number = torch.arange(first, first + count)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[-1] = ends
    outcome = {"id": number + 1, "reward": torch.ones(count, 1), "done": done}
    return TensorDict({"id": number, "next": outcome}, [count])


def test_n_step_returns_stop_where_another_writer_follows():
    world = world_of(2, lambda: td.NStepSampler(td.ProportionalSampler(200), 3, 1.0))
    one, other = world.client(home=0), world.client(home=0)
    one.extend(episode(0, 5, ends=False))
    other.extend(episode(100, 5, ends=False))
    world.client(home=1).extend(episode(200, 10, ends=False))
    batch = world.client().sample(512)
    first = batch["id"]
    last = torch.where(first < 100, 4, torch.where(first < 200, 104, 209))
    steps = (last - first + 1).clamp(max=3)
    assert torch.equal(batch["steps_to_next_obs"].flatten(), steps)
    assert torch.equal(batch["next", "id"], first + steps)
    assert set(first.tolist()) == {*range(5), *range(100, 105), *range(200, 210)}


@pytest.mark.parametrize("name", [*RECIPES, "across episodes, pad"])
def test_wrappers_inside_shards_are_what_brute_force_says(name):
    recipe = (RECIPES | OTHERS)[name]
    world = world_of(2, lambda: wrapped(td.ProportionalSampler(40), recipe), 40)
    parts = []
    for place in range(2):
        part = model.World(world.client(home=place), model.Model(40), seed=place)
        for steps in (30, 25):
            part.extend(steps)
        part.rb.synchronize()
        part.rb = world.shards[place].buffer
        parts.append(part)
    learner = world.client()
    batch = learner.sample(40 * recipe.window)
    errors = torch.arange(len(batch)) % 61 / 16 - 1.5
    learner.update_tensordict_priority(batch.set("td_error", errors))
    learner.synchronize()
    for place, part in enumerate(parts):
        mine: Any = batch[batch["index"][:, 0] == place]
        for key in {"index", "anchor_index"} & set(mine.keys()):
            mine[key] = mine[key][:, 2]
        anchors = part.check_batch(mine.exclude("td_error"), recipe)
        part.model.update(anchors, anchor_errors(mine, recipe))
        model.assert_holds(part.rb, part.model)


def test_lanes_are_written_as_collectors_give_them():
    world = world_of(2, lambda: td.ProportionalSampler(60), 60, ndim=2)
    client, number = world.client(home=0), torch.arange(12).view(3, 4)
    client.extend(TensorDict({"id": number}, [3, 4]))
    client.add(TensorDict({"id": torch.arange(12, 15)}, [3]))
    written = world.shards[0].storage[:]["id"]
    assert torch.equal(written, torch.cat([number.T, torch.arange(12, 15)[None]]))
    learner = world.client()
    batch = learner.sample()
    assert torch.equal(written.flatten()[batch["index"][:, 2]], batch["id"])
    updated(learner, batch)
    assert (magnitudes(world, 15)[batch["id"]] == 7).all()


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_dump_of_4_shards_is_loaded_into_3(tmp_path, ndim):
    world, other = (
        world_of(shards, lambda: td.ProportionalSampler(80, alpha=0.7), 80, ndim)
        for shards in (4, 3)
    )
    count = 0
    for place, steps in enumerate((40, 20, 12, 50)):  # the last ring has wrapped
        shape = [*[2] * (ndim - 1), steps]
        number = torch.arange(count, count + math.prod(shape)).view(shape)
        after = {"done": torch.zeros(*shape, 1, dtype=torch.bool)}
        client, shard = world.client(home=place), world.shards[place]
        client.extend(TensorDict({"id": number, "next": after}, shape))
        client.synchronize()
        flat = torch.arange(len(shard.storage))
        shard.buffer.update_priority(flat, torch.rand(len(flat)))
        count += number.numel()
    world.buffer().dumps(tmp_path)
    other.buffer().loads(tmp_path)
    kept, loaded = (
        [shard.buffer.chronological()["id"].flatten() for shard in each.shards]
        for each in (world, other)
    )
    assert torch.equal(torch.cat(loaded), torch.cat(kept))
    assert max(map(len, loaded)) - min(map(len, loaded)) <= ndim
    assert torch.equal(magnitudes(world, count), magnitudes(other, count))
    masses = [
        sum(shard.report().mass for shard in each.shards) for each in (world, other)
    ]
    assert masses[0] == pytest.approx(masses[1])
    batch = other.client().sample()
    assert {*batch["id"].tolist()} <= {*torch.cat(kept).tolist()}


def test_without_ray_the_room_names_its_extra(monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith("rlbuf_td.distributed")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'rlbuf_td\[ray\]'"):
        import_module("rlbuf_td.distributed")


# -- dumps: complete, interrupted, damaged


def stored(world: World) -> list[list[int]]:
    return [sorted(ids_of(shard).tolist()) for shard in world.shards]


def loaded(path: Path, shards: int = 2) -> World:
    world = World(shards, proportional)
    world.buffer().loads(path)
    return world


def dumped(path: Path) -> tuple[World, list[list[int]]]:
    world = World(2, proportional)
    fill(world, 60)
    world.buffer().dumps(path)
    return world, stored(world)


def test_an_interrupted_dump_leaves_the_previous_one_as_it_was(tmp_path):
    world, before = dumped(tmp_path)
    priorities = magnitudes(world, 60)
    world.client(home=0).extend(rows(60, 20))
    world.handles[1].is_lost = True
    with pytest.raises(
        CheckpointError, match=r"shards \[1\] are lost: the dump is not complete"
    ):
        world.buffer().dumps(tmp_path)
    other = loaded(tmp_path)
    assert stored(other) == before
    assert torch.equal(magnitudes(other, 60), priorities)
    complete = Manifest.read(tmp_path).dump
    assert newest_dump(tmp_path, 0, 2) == str(tmp_path / complete / "shard-0000")
    world.handles[1].is_lost = False
    world.buffer().dumps(tmp_path)
    assert stored(loaded(tmp_path)) == stored(world) != before
    assert {file.name for file in tmp_path.iterdir()} == {
        "shards",
        Manifest.read(tmp_path).dump,
    }


def test_a_shard_restarts_from_a_dump_of_as_many_shards_or_empty(tmp_path):
    world, before = dumped(tmp_path)
    priorities = magnitudes(world, 60)
    for place in range(2):
        incarnation = world.shards[place].incarnation
        world.handles[place].restart(newest_dump(tmp_path, place, 2))
        assert world.shards[place].incarnation > incarnation
    assert stored(world) == before
    assert torch.equal(magnitudes(world, 60), priorities)
    assert newest_dump(tmp_path, 0, 3) is None
    assert newest_dump(tmp_path / "elsewhere", 0, 2) is None


def test_a_shard_that_restarts_while_its_dump_is_replaced_takes_the_new_one(tmp_path):
    world, before = dumped(tmp_path)
    found = iter(
        [str(tmp_path / "shards-0" / "shard-0000"), newest_dump(tmp_path, 0, 2)]
    )
    world.handles[0].restart_from(lambda: next(found))
    assert stored(world) == before


def test_a_damaged_dump_changes_no_shard(tmp_path):
    dumped(tmp_path)
    world = World(2, proportional)
    fill(world, 30)
    before = stored(world)
    for file in tmp_path.glob("shards-*/shard-0001/data/*"):
        file.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="shard-0001"):
        world.buffer().loads(tmp_path)
    world.handles[1].is_lost = True
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        world.buffer().loads(tmp_path)
    assert stored(world) == before
    assert world.shards[0]._prepared is None


def test_unchanged_data_is_not_written_again(tmp_path):
    world, _ = dumped(tmp_path)
    files = {file.stat().st_ino for file in tmp_path.glob("*/*/data/*")}
    world.client(home=1).extend(rows(60, 1))
    world.buffer().dumps(tmp_path)
    again = [
        file
        for file in tmp_path.glob("*/shard-0000/data/*")
        if file.stat().st_ino in files
    ]
    assert sum(file.stat().st_size for file in again) > 0


WRONG = {"steps": [1.5]}, {"steps": 1}, {"lanes": -1}, {"dump": "../x"}, {"x": 1}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_manifest_that_names_no_dump_is_refused(wrong, tmp_path):
    with pytest.raises(CheckpointError, match="holds no dump"):
        loaded(tmp_path)
    dumped(tmp_path)
    change_manifest(tmp_path, wrong)
    with pytest.raises(
        CheckpointError, match="does not say which dumps of shards belong together"
    ):
        loaded(tmp_path)


def change_manifest(path: Path, entries: dict[str, Any]) -> None:
    resign(
        path / "shards",
        lambda document: document | {"state": document["state"] | entries},
    )


def counts(world: World):
    return {
        name: int(count)
        for name, count in world.flow.limiter.report().items()
        if name in ("inserts", "samples")
    }


def test_flow_control_goes_on_from_the_counts_of_the_dump(tmp_path):
    world = World(2, proportional, flow=FlowControl(4.0, 10, 400))
    client = world.client(home=0)
    client.extend(rows(0, 50))
    for _ in range(3):
        client.sample()
    world.buffer().dumps(tmp_path)
    for flow, expected in (
        (FlowControl(4.0, 10, 400), (50, 192)),
        (FlowControl(2.0, 10, 400), (50, 80)),
    ):
        other = World(1, proportional, flow=flow)
        other.buffer().loads(tmp_path)
        assert tuple(counts(other).values()) == expected
        assert other.client().sample().shape == (64,)
    change_manifest(
        tmp_path, {"flow": (Manifest.read(tmp_path).flow or {}) | {"counts": "none"}}
    )
    with pytest.raises(CheckpointError, match="flow control needs 6 whole numbers"):
        other.buffer().loads(tmp_path)


@pytest.mark.parametrize("way", ["empty", "load"])
def test_rows_that_wait_in_a_shard_are_removed_with_the_others(way, tmp_path):
    world, learner = begun(1, 60)
    whole, writer = world.buffer(), world.client(home=0)
    whole.dumps(tmp_path)
    learner.sample()
    writer.extend(rows(500, 4))
    assert world.shards[0].report().waiting == 4
    if way == "load":
        whole.loads(tmp_path)
        kept = {*range(60)}
    else:
        whole.empty()
        kept = set()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="from an empty storage"):
                whole.sample(8)
    writer.extend(rows(600, 8))
    learner.sample()
    learner.synchronize()
    assert {*stored(world)[0]} == kept | {*range(600, 608)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 0}, "num_shards must be a whole number"),
        ({"samples_per_insert": -1}, "samples_per_insert must be a positive number"),
        ({"prefetch": -1}, "prefetch must be a whole number"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    settings: dict[str, Any] = {"num_shards": 2, "make_buffer": td.ReplayBuffer}
    with pytest.raises(ValueError, match=message):
        td.distributed.ShardedReplayBuffer(**settings | arguments)
