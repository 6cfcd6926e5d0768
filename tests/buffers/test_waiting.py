"""Batches that wait: beside threads that remove rows, and for what can never come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rlbuf_td import (
    EpisodeSampler,
    ExperienceQueue,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)

END = {
    "next": {"done": torch.zeros(8, 1, dtype=torch.bool), "reward": torch.ones(8, 1)}
}
ROWS = TensorDict({"x": torch.arange(8)} | END, [8])


def buffer(sampler: Any = None, size: int = 64, **settings: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=PackedStorage(size), sampler=sampler, batch_size=4, **settings
    )


class Slow(nn.Module):
    """A transform that takes long enough to run in a thread."""

    def forward(self, batch: TensorDict) -> TensorDict:
        time.sleep(2e-3)
        return batch


def empty(rb: ReplayBuffer, state: Any) -> None:
    rb.empty()


def empty_through_another_buffer(rb: ReplayBuffer, state: Any) -> None:
    ReplayBuffer(storage=rb.storage).empty()


def load_no_rows(rb: ReplayBuffer, state: Any) -> None:
    rb.load_state_dict(state)


REMOVALS = [empty, empty_through_another_buffer, load_no_rows]
KINDS: dict[str, Callable[[], ReplayBuffer]] = {
    "uniform": buffer,
    "proportional": lambda: buffer(ProportionalSampler(64)),
    "n-step": lambda: buffer(NStepSampler(UniformSampler(), 3, 0.9)),
    "minibatches": lambda: buffer(MinibatchSampler()),
    "flow control": lambda: buffer(samples_per_insert=1e3, min_size=1),
    "drawn ahead": lambda: buffer(prefetch=2, transform=Slow()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remove", REMOVALS)
def test_rows_that_a_batch_has_waited_for_stay_until_it_is_drawn(kind, remove):
    rb = KINDS[kind]()
    state = rb.state_dict()  # without rows
    rb.extend(ROWS)
    can_sample, found, removed = rb.sampler.can_sample, threading.Event(), []

    def find(storage: Any, batch_size: int) -> bool:
        """Let the other thread remove the rows once they have been found."""
        can = can_sample(storage, batch_size)
        found.set()
        other.join(0.02)  # it needs the lock, which the draw keeps
        return can

    def remove_rows() -> None:
        found.wait(10)
        remove(rb, state)
        removed.append(len(rb))

    rb.sampler.can_sample = find
    other = threading.Thread(target=remove_rows)
    other.start()
    batch = rb.sample(wait=True, timeout=5)
    other.join(10)
    assert batch["x"].shape == (4,)
    assert removed == [0]
    with pytest.raises(TimeoutError, match=r"the buffer is empty|of min_size=1 rows"):
        rb.sample(wait=True, timeout=0.01)


def test_with_flow_control_a_batch_also_waits_for_the_sampler():
    rb = buffer(EpisodeSampler(), samples_per_insert=10.0, tolerance=1000)
    rb.extend(ROWS)
    with pytest.raises(TimeoutError, match="EpisodeSampler cannot draw a batch of 4"):
        rb.sample(wait=True, timeout=0.01)
    assert rb.health()["samples"] == 0
    ended = ROWS.clone()
    ended["next", "done"][-1] = True
    rb.extend(ended)
    assert len(rb.sample(wait=True, timeout=10)) == 4
    assert rb.health()["samples"] == 4


def test_a_batch_whose_transform_fails_is_not_counted_as_sampled():
    class Broken(nn.Module):
        def forward(self, batch: TensorDict) -> TensorDict:
            raise ArithmeticError

    rb = buffer(samples_per_insert=10.0, transform=Broken())
    rb.extend(ROWS)
    for wait in (False, True):
        with pytest.raises(ArithmeticError):
            rb.sample(wait=wait)
    assert rb.health()["samples"] == 0


NEVER = {
    "unique": (partial(UniformSampler, unique=True), 9, "or unique=False"),
    "drop_last": (partial(MinibatchSampler, drop_last=True), 9, "or drop_last=False"),
    "n-step": (
        lambda: NStepSampler(UniformSampler(unique=True), 2, 0.9),
        9,
        "or unique=False",
    ),
    "windows": (
        lambda: SequenceSampler(UniformSampler(unique=True), 2),
        18,
        "or unique=False",
    ),
}


@pytest.mark.parametrize(("make", "size", "remedy"), NEVER.values(), ids=NEVER)
def test_a_batch_that_no_rows_suffice_for_is_refused_instead_of_waited_for(
    make, size, remedy
):
    rb = buffer(make(), size=8)
    said = f"a storage of 8 rows never has 9 .*: use a smaller batch, a larger storage, {remedy}"
    for _ in range(2):  # empty, then full
        for call in (
            lambda: rb.sample(size, wait=True, timeout=0.01),
            lambda: rb.can_sample(size),
            lambda: rb.wait_until_sampleable(size, 0.01),
        ):
            with pytest.raises(ValueError, match=said):
                call()
        rb.extend(ROWS)
    assert len(rb.sample(2, wait=True))


SMALL = {
    "its capacity": ({"size": 1}, "a queue of 1 rows never holds a batch of 2"),
    "its max_age": ({"size": 4, "max_age": 0}, "only 1 rows are never older"),
}


@pytest.mark.parametrize(("settings", "said"), SMALL.values(), ids=SMALL)
def test_a_queue_refuses_a_batch_size_beyond(settings, said):
    def queue(batch_size: int | None, size: int, **settings: Any) -> ExperienceQueue:
        return ExperienceQueue(
            storage=PackedStorage(size), batch_size=batch_size, **settings
        )

    with pytest.raises(ValueError, match=said):
        queue(2, **settings)
    rb = queue(None, **settings)
    rb.extend(ROWS[:1])
    with pytest.raises(ValueError, match=said):
        rb.can_sample(2)
    assert rb.sample(1)["x"].tolist() == [0]


def test_a_queue_refuses_writes_once_its_storage_is_too_small_for_its_batches():
    rb = ExperienceQueue(storage=PackedStorage(8), batch_size=4)
    rb.set_storage(PackedStorage(2))
    for write in (partial(rb.extend, ROWS[:1]), partial(rb.add, ROWS[0])):
        with pytest.raises(ValueError, match="a queue of 2 rows never holds a batch"):
            write()
    assert len(rb) == 0


def test_a_queue_that_is_refused_leaves_its_storage_to_others(tmp_path: Path):
    storage = PackedStorage(1)
    with pytest.raises(ValueError, match="never holds"):
        ExperienceQueue(storage=storage, batch_size=2)
    assert ReplayBuffer(storage=storage, batch_size=2).extend(ROWS[:1]).tolist() == [0]
