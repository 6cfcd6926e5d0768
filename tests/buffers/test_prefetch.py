"""Batches drawn ahead by ``prefetch=``: which rows they hold, who transforms them, and when they are dropped."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torchrl.data.replay_buffers import RandomSampler

from rlbuf_td import (
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    RolloutBuffer,
    UniformSampler,
)
from rlbuf_td.buffers import prefetch
from tests.buffers.test_learner_device import SIZE, STEPS, Reference, buffer, data, learn, run, saved_in_use, write
from tests.catalogue import SAMPLERS, assert_same
from tests.restoring import HOW, restored


def doubled(batch: Any, seen: set[str] | None = None) -> Any:
    if seen is not None:
        seen.add(threading.current_thread().name.partition("-")[0])
    return batch.set("twice", batch["action"] * 2)


@pytest.fixture(params=["asking", "threads"])
def who(request, monkeypatch) -> str:
    """Who transforms: transforms count as slow from a time on that none, or every one, takes."""
    monkeypatch.setattr(prefetch, "_SLOW", float("inf") if request.param == "asking" else -1.0)
    return request.param


@pytest.mark.parametrize(("name", "ndim"), [("uniform", 1), ("proportional", 2), ("windows", 1), ("n-step", 2)])
def test_a_transformed_batch_is_drawn_ahead_alike_for_equal_seeds(who, name, ndim):
    seen: set[str] = set()
    rb = buffer(SAMPLERS[name](200), ndim, prefetch=3, transform=partial(doubled, seen=seen))
    plain = Reference(buffer(SAMPLERS[name](200), ndim, transform=doubled), 3)
    for each in (rb, plain.rb):
        write(each, STEPS - 3, 0)
    for step in range(9):
        batch, expected = rb.sample(), plain.sample()
        assert_same(batch, expected)
        for each, own in ((rb, batch), (plain.rb, expected)):
            learn(own)
            each.update_tensordict_priority(own)
            write(each, 2, STEPS + 2 * step)
    assert seen == ({"MainThread"} if who == "asking" else {"MainThread", "ThreadPoolExecutor"})
    rb.append_transform(lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rb.sample()
    rb.shutdown()


@pytest.mark.parametrize(("name", "ndim"), [("uniform", 2), ("rank", 1), ("sequence", 1), ("minibatch", 1)])
def test_without_transforms_batches_are_those_of_a_buffer_without_prefetch(name, ndim):
    buffers = [buffer(SAMPLERS[name](200), ndim, prefetch=ahead) for ahead in (0, 3)]
    for rb in buffers:
        write(rb, STEPS, 0)
    for batch, expected in zip(*(run(rb, 0, 9) for rb in buffers), strict=True):
        assert_same(batch, expected)


@pytest.mark.parametrize("way", ["short", "general", "device"])
@pytest.mark.parametrize("change", ["sampler", "storage", "empty", "come round", "load", "transform"])
def test_no_batch_of_old_rows_is_served(who, way, change):
    def made(seed: int) -> Any:
        sampler = RandomSampler() if way == "general" else ProportionalSampler(STEPS)
        device = "cpu" if way == "device" else None
        return buffer(sampler, seed=seed, prefetch=3, transform=doubled, device=device)

    if way == "general" and change in ("come round", "transform"):
        pytest.skip("TorchRL's queue")
    rb, other = made(1), made(2)
    write(rb, STEPS, 0)
    write(other, STEPS, 1000)
    rb.sample(), rb.sample(), rb.sample()
    if change == "sampler":
        rb.set_sampler(UniformSampler())
    elif change == "storage":
        rb.set_storage(PackedStorage(STEPS))
    elif change == "empty":
        rb.empty()
        with pytest.raises(RuntimeError, match="empty"):
            rb.sample()
    elif change == "load":
        rb.load_state_dict(other.state_dict())
    elif change == "transform":
        rb.append_transform(lambda batch: batch.set("twice", batch["twice"] + 1))
    if change in ("storage", "empty", "come round"):
        write(rb, STEPS, 1000)
    for _ in range(5):
        batch = rb.sample()
        assert (batch["twice"] == batch["action"] * 2 + (change == "transform")).all()
        assert ("priority_weight" in batch) == (way != "general" and change != "sampler")
        assert (batch["action"] >= (0 if change in ("sampler", "transform") else 10_000)).all()
    rb.shutdown(), other.shutdown()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_saved_buffer_and_a_loaded_one_draw_the_same_batches_anew(who, how, device, tmp_path):
    def made(seed: int) -> Any:
        transform = partial(doubled, seen=set())
        return buffer(ProportionalSampler(STEPS), seed=seed, prefetch=3, transform=transform, device=device)

    rb, again, never_saved = saved_in_use(made, how, tmp_path)
    for mine, other in zip(*(run(each, 7, 14) for each in (again, rb)), strict=True):
        assert_same(mine.exclude("sampled_at"), other.exclude("sampled_at"))
    for each in (rb, again, never_saved):
        each.shutdown()


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, with the transform": {"transform": doubled},
    "fewer": {"prefetch": 1, "transform": doubled},
    "as many, without the transform": {"prefetch": 3},
    "fewer, to a device": {"prefetch": 1, "device": "cpu"},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("how", ["state_dict", "dumps", "rows_only"])
def test_a_saved_buffer_opens_with_any_prefetch_and_goes_on_with_its_epoch(how, name, tmp_path):
    rb = buffer(MinibatchSampler(), prefetch=3, transform=doubled)
    write(rb, STEPS, 0)
    first = rb.sample()
    again = buffer(MinibatchSampler(), **SETTINGS[name])
    if how == "rows_only":
        rb.dumps(tmp_path)
        again.loads(tmp_path, rows_only=True)
        first = again.sample()
    else:
        restored(rb, again, how, tmp_path)
    batches = [again.sample() for _ in range(3)]  # the rest of an epoch
    assert sorted(torch.cat([each["action"] for each in (first, *batches)]).tolist()) == [10 * i for i in range(STEPS)]
    assert ("twice" in batches[0]) == ("transform" in SETTINGS[name])
    assert sum(len(batch) for batch in again) == STEPS
    rb.shutdown(), again.shutdown()


def test_prefetch_refuses_a_largest_age():
    with pytest.raises(ValueError, match="with prefetch=3, batches are drawn too early to keep max_age=4: use "):
        buffer(UniformSampler(max_age=4), prefetch=3)
    rb = buffer(UniformSampler(), prefetch=3)
    with pytest.raises(ValueError, match="max_age=4: use prefetch=0"):
        rb.set_sampler(NStepSampler(UniformSampler(max_age=4), 2, 0.9))
    assert rb.sampler.max_age is None


def test_a_buffer_that_draws_more_ahead_draws_the_same(tmp_path):
    rb, again = (buffer(UniformSampler(), prefetch=ahead, transform=doubled) for ahead in (3, 5))
    write(rb, STEPS, 0)
    rb.sample()
    restored(rb, again, "state_dict", tmp_path)
    for _ in range(6):
        assert_same(again.sample(), rb.sample())
    rb.shutdown(), again.shutdown()


def test_iteration_gives_every_row_of_the_newest_rollout_once_an_epoch(who):
    rollout = RolloutBuffer(7, 3, batch_size=5, epochs=2, prefetch=3, transform=doubled)
    rb = ReplayBuffer(storage=PackedStorage(21), sampler=MinibatchSampler(2), batch_size=5, prefetch=3)
    rb.append_transform(doubled)
    for first in (0, 70):
        rollout.extend(data(7, first, (3,)).set("state_value", torch.zeros(3, 7, 1)))
        write(rb, 21, first)
        for each, rows in ((rb, [*range(first, first + 21)]), (rollout, sorted([*range(first, first + 7)] * 3))):
            for _ in range(2):
                found = torch.cat([batch["twice"] // 20 for batch in each])
                assert [sorted(part.tolist()) for part in found.split(21)] == [rows] * 2
            each.sample(), next(iter(each)), each.sample()  # given up
    rb.shutdown()
    rollout.shutdown()


def test_a_batch_of_another_size_leaves_those_drawn_ahead(who):
    rb = buffer(UniformSampler(), prefetch=2, transform=doubled)
    write(rb, STEPS, 0)
    assert [len(rb.sample(size)) for size in (None, 5, None, 30, None, None)] == [SIZE, 5, SIZE, 30, SIZE, SIZE]
    rb.shutdown()
