"""The joint law of batches over shards, and their weights, against one buffer with all
rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, UniformSampler
from rlbuf_td.checkpoint.buffer import innermost_of
from rlbuf_td.distributed.shard import Shard
from tests.distributed.local import World
from tests.statistics import assert_follows, power

ALPHA, BETA = 0.7, 0.5


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict(
        {"id": number, "next": {"reward": number[:, None].float()}}, [count]
    )


def buffer_of(sampler) -> ReplayBuffer:
    return ReplayBuffer(storage=PackedStorage(400), sampler=sampler, batch_size=64)


def uniform() -> ReplayBuffer:
    return buffer_of(UniformSampler())


def proportional(weight_norm="buffer", eps: float = 1e-8) -> ReplayBuffer:
    return buffer_of(
        ProportionalSampler(400, ALPHA, BETA, eps=eps, weight_norm=weight_norm)
    )


def fill(world: World, count: int) -> int:
    first = 0
    shares = torch.arange(1, len(world.handles) + 1)
    for place, share in enumerate(shares.tolist()):
        number = max(1, count * share // int(shares.sum()))
        world.client(home=place).extend(rows(first, number))
        shard = world.shards[place]
        if shard._prioritized is not None:
            errors = (1.0 + place) * torch.rand(number) ** 3
            shard.buffer.update_priority(torch.arange(number), errors)
        first += number
    return first


def begun(shards: int, count: int, **options) -> tuple[World, Any]:
    world = World(shards, proportional, **options)
    fill(world, count)
    return world, world.client()


def ids_of(shard: Shard) -> torch.Tensor:
    """Return the ids of the stored rows by their cells."""
    if not len(shard.storage):
        return torch.empty(0, dtype=torch.int64)
    return shard.storage[:]["id"].flatten()


def magnitudes(world: World, count: int) -> torch.Tensor:
    found = torch.zeros(count, dtype=torch.float64)
    for shard in world.shards:
        ids = ids_of(shard)
        sampler = innermost_of(shard.buffer.sampler)
        found[ids] = sampler.rule.table.magnitude[: len(ids)].double()
    return found


def law(world: World, count: int) -> torch.Tensor:
    weight = torch.zeros(count, dtype=torch.float64)
    for shard in world.shards:
        ids, prioritized = ids_of(shard), shard._prioritized
        if prioritized is None:
            weight[ids] = 1.0
        else:
            weight[ids] = prioritized.rule.table.weight[: len(ids)].double()
    return weight / weight.sum()


@pytest.mark.parametrize(("make_buffer", "shards"), [(proportional, 4), (uniform, 3)])
def test_rows_of_all_shards_follow_one_law(make_buffer, shards):
    world = World(shards, make_buffer)
    count, learner, draws, size = fill(world, 120), world.client(), 200, 4_096
    expected, counts = law(world, count), torch.zeros(count)
    for _ in range(draws):
        counts += torch.bincount(learner.sample(size)["id"], minlength=count)
    assert power(expected.numpy(), draws * size, bias=0.02) > 0.99
    assert_follows(counts, expected)


@pytest.mark.parametrize(("shards", "prefetch"), [(2, 0), (4, 3)])
def test_batches_follow_the_priorities_at_their_draw(shards, prefetch, monkeypatch):
    world = World(shards, proportional)
    fill(world, 120)
    learner = world.client(prefetch=prefetch)
    total, size, seen = 400, 2_048, 120
    expected, counts = torch.zeros(total, dtype=torch.float64), torch.zeros(total)
    # of each request: with prefetch one brings several batches
    laws = [law(world, total)]
    send = learner._send

    def noted(size: int, deadline: float):
        laws.append(law(world, total))
        return send(size, deadline)

    monkeypatch.setattr(learner, "_send", noted)
    served = 0
    for step in range(200):
        before = len(laws)
        batch = learner.sample(size)
        if len(laws) > before:
            # with prefetch, the batch was drawn by the request before the one under way
            served = before if prefetch == 0 else max(1, len(laws) - 2)
        expected += laws[served]
        counts += torch.bincount(batch["id"], minlength=total)
        if step % 20 == 0:
            world.client(home=step % shards).extend(rows(seen, 3))
            seen += 3
        part = batch[:32]
        part["td_error"] = torch.rand(32)
        learner.update_tensordict_priority(part)
    written = expected > 0
    expected = expected / expected.sum()
    assert power(expected[written].numpy(), 200 * size, bias=0.02) > 0.95
    assert_follows(counts, expected)
    assert int((counts[120:seen] > 0).sum()) > 20


def test_a_client_draws_by_old_masses_and_its_weights_match():
    world = World(2, proportional)
    count, learner = fill(world, 60), world.client()
    learner.sample()
    masses = torch.tensor(
        [report.mass for report in learner.links.known if report is not None]
    )
    other = world.client()
    batch = other.sample(512)
    batch["td_error"] = 5.0 * torch.rand(512)
    other.update_tensordict_priority(batch)
    other.synchronize()
    p = torch.zeros(count, dtype=torch.float64)
    for shard, share in zip(world.shards, masses / masses.sum(), strict=True):
        ids = ids_of(shard)
        p[ids] = share * shard.buffer.sampler.probability(torch.arange(len(ids)))
    batch = learner.sample(4_096)
    assert_weights(batch, (p[batch["id"]] / p.min()) ** -BETA)


@pytest.mark.parametrize("weight_norm", ["buffer", "batch", None])
def test_weights_are_those_of_one_buffer(weight_norm):
    world = World(3, lambda: proportional(weight_norm))
    count = fill(world, 100)
    single = proportional(weight_norm)
    single.extend(rows(0, count))
    single.update_priority(torch.arange(count), magnitudes(world, count))
    batch = world.client().sample(256)
    p = single.sampler.probability(batch["id"])
    unit = {
        "buffer": single.sampler.probability(torch.arange(count)).min(),
        "batch": p.min(),
        None: 1 / count,
    }
    assert_weights(batch, (p / unit[weight_norm]) ** -BETA)


def assert_weights(batch, expected: torch.Tensor) -> None:
    weight = batch["priority_weight"].double()
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)


def test_rows_of_a_shard_without_a_positive_priority_count_in_the_weights():
    world = World(2, lambda: proportional(None, eps=0.0))
    single = proportional(None, eps=0.0)
    errors = torch.cat([torch.rand(20) + 0.1, torch.zeros(30)])
    for place, (first, count) in enumerate([(0, 20), (20, 30)]):
        world.client(home=place).extend(rows(first, count))
        world.shards[place].buffer.update_priority(
            torch.arange(count), errors[first : first + count]
        )
    single.extend(rows(0, 50))
    single.update_priority(torch.arange(50), errors)
    batch = world.client().sample()
    p = single.sampler.probability(batch["id"])
    assert_weights(batch, (50 * p) ** -BETA)


def test_a_batch_is_stratified_over_all_shards():
    world = World(4, uniform)
    count = fill(world, 200)
    counts = torch.bincount(world.client().sample(count * 5)["id"], minlength=count)
    assert set(counts.tolist()) <= {4, 5, 6}
    first_half = world.client().sample(count)["id"][: count // 2]
    assert int((first_half >= count // 2).sum()) in range(
        count // 4 - 2, count // 4 + 3
    )


def test_new_rows_enter_with_the_largest_error_that_any_shard_has_seen():
    world, learner = begun(2, 30)
    batch = learner.sample()
    batch["td_error"] = torch.where(batch["index"][:, 0] == 1, 9.0, 0.1)
    learner.update_tensordict_priority(batch)
    learner.sample()  # brings the errors to shard 1
    world.client(home=0).extend(rows(300, 1))
    learner.sample()
    learner.sample()
    assert magnitudes(world, 301)[300] == 9


def test_td_errors_travel_with_the_next_request_one_to_each_shard():
    world, learner = begun(4, 200)
    learner.sample()
    for handle in world.handles:
        handle.calls.clear()
    for _ in range(10):
        batch = learner.sample()
        batch["td_error"] = torch.rand(64)
        learner.update_tensordict_priority(batch)
        learner.links.heard = [np.inf] * 4  # however slow this machine is
    touched = [handle.calls for handle in world.handles]
    assert all(set(calls) == {"answer"} and len(calls) <= 10 for calls in touched)
    assert touched[3] == ["answer"] * 10
