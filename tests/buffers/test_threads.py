"""Threads that write, sample, update and do everything else at once: no torn rows, no
lost rows, no deadlock."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import rlbuf_td.kernels
from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer
from tests.catalogue import SAMPLERS, buffer_of
from tests.storages.test_kill import check_priorities

CAPACITY = 500
SECONDS = 0.4


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict(
        {
            "x": number,
            "wide": number[:, None].expand(count, 40),
            "next": {"y": -number},
        },
        [count],
    )


def is_whole(data: TensorDict) -> bool:
    return torch.equal(data["next", "y"], -data["x"]) and bool(
        (data["wide"] == data["x"][:, None]).all()
    )


class Crowd:
    """Threads that each repeat one thing for a while; the first error of any of them is
    raised at the end."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.rounds: dict[str, int] = {}
        self.end = 0.0
        self.threads: list[threading.Thread] = []

    def repeat(self, name: str, work: Callable[[], object], pause: float = 0.0) -> None:
        def loop() -> None:
            try:
                # once, however late it begins
                while not self.rounds[name] or time.monotonic() < self.end:
                    work()
                    self.rounds[name] += 1
                    time.sleep(pause)
            except BaseException as error:  # noqa: BLE001
                self.errors.append(error)

        self.rounds[name] = 0
        self.threads.append(threading.Thread(target=loop, name=name, daemon=True))

    def run(self) -> None:
        self.end = time.monotonic() + SECONDS
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(180)
            assert not thread.is_alive(), f"{thread.name} is blocked"
        if self.errors:
            raise self.errors[0]


def make(sampler: str, **kwargs) -> ReplayBuffer:
    made = SAMPLERS[sampler](CAPACITY)
    return buffer_of(CAPACITY, made, rows=rows(0, 64), batch_size=32, **kwargs)


def usual(rb: ReplayBuffer, may_be_empty: bool = False) -> tuple[Crowd, list[int]]:
    crowd, written = Crowd(), [64]
    batches: list[Any] = []

    def write() -> None:
        count = 1 + written[0] % 37
        rb.extend(rows(written[0], count)) if count > 1 else rb.add(
            rows(written[0], 1)[0]
        )
        written[0] += count

    def sample() -> None:
        try:
            batch = rb.sample()
        except RuntimeError as error:
            if may_be_empty and "empty storage" in str(error):
                return
            raise
        assert is_whole(batch)
        batches.append(batch)

    def update() -> None:
        if not batches:
            return time.sleep(1e-4)
        batch = batches.pop()
        del batches[:-20]
        batch["td_error"] = torch.rand(32)
        rb.update_tensordict_priority(batch)

    crowd.repeat("writer", write)
    for number in range(4):
        crowd.repeat(f"sampler {number}", sample)
    crowd.repeat("priorities", update)
    return crowd, written


@pytest.mark.parametrize(
    ("sampler", "parts"),
    [
        ("proportional", {}),
        ("rank", {"prefetch": 3}),
        ("proportional", {"device": "cpu", "prefetch": 2}),
    ],
)
def test_one_writer_four_samplers_and_one_that_updates(sampler, parts):
    rb = make(sampler, **parts)
    crowd, written = usual(rb)
    crowd.run()
    kept = min(written[0], CAPACITY)
    stored = rb.chronological()
    assert torch.equal(stored["x"], torch.arange(written[0] - kept, written[0]))
    assert is_whole(stored)
    assert rb.write_count == written[0]
    check_priorities(rb)


@pytest.mark.parametrize("sampler", ["proportional", "rank"])
def test_everything_else_at_the_same_time(sampler):
    rb = make(sampler)
    crowd, _ = usual(rb, may_be_empty=True)
    saved = rb.state_dict()

    def look() -> None:
        with contextlib.suppress(RuntimeError):
            assert is_whole(rb.chronological())

    def mark() -> None:
        with rb._replay_lock:  # rows that are there
            rb.mark_update(torch.arange(len(rb)))

    crowd.repeat("empty", rb.empty, 0.05)
    crowd.repeat("mark_update", mark, 0.005)
    crowd.repeat(
        "set_sampler", lambda: rb.set_sampler(SAMPLERS[sampler](CAPACITY)), 0.02
    )
    crowd.repeat("load_state_dict", lambda: rb.load_state_dict(saved), 0.05)
    crowd.repeat("state_dict", rb.state_dict, 0.02)
    crowd.repeat(
        "alpha",
        lambda: setattr(rb.sampler, "alpha", 0.5 + 0.1 * (time.monotonic() % 1)),
        0.01,
    )
    crowd.repeat("chronological", look, 0.01)
    crowd.run()
    rb.extend(rows(0, 5))
    assert is_whole(rb.sample())
    assert is_whole(rb.chronological())
    check_priorities(rb)


def test_two_buffers_over_one_storage_exclude_each_other():
    first = make("proportional")
    second = ReplayBuffer(
        storage=first.storage,
        sampler=RankSampler(CAPACITY),
        writer=first.writer,
        batch_size=32,
    )
    crowd, written, turn = Crowd(), [64], threading.Lock()

    def write(rb: ReplayBuffer) -> None:
        with turn:  # for the numbers to be in order
            rb.extend(rows(written[0], 50))
            written[0] += 50

    def sample(rb: ReplayBuffer) -> None:
        batch = rb.sample()
        assert is_whole(batch)
        batch["td_error"] = torch.rand(32)
        rb.update_tensordict_priority(batch)

    for name, rb in (("first", first), ("second", second)):
        crowd.repeat(f"{name} writes", partial(write, rb))
        crowd.repeat(f"{name} samples", partial(sample, rb))
        crowd.repeat(f"{name} marks", partial(rb.mark_update, torch.arange(5)))
    crowd.run()
    for rb in (first, second):
        check_priorities(rb)
    assert first.chronological()["x"][-1] == written[0] - 1


def test_every_compiled_function_lets_go_of_the_interpreter():
    found = 0
    for module in pkgutil.walk_packages(rlbuf_td.kernels.__path__, "rlbuf_td.kernels."):
        for name, thing in vars(importlib.import_module(module.name)).items():
            # part of its caller
            if (
                hasattr(thing, "targetoptions")
                and thing.targetoptions.get("inline") != "always"
            ):
                assert thing.targetoptions.get("nogil"), f"{module.name}.{name}"
                found += 1
    assert found > 20


def test_a_thread_that_cannot_sample_does_not_keep_the_lock():
    rb = ReplayBuffer(
        storage=PackedStorage(10), sampler=ProportionalSampler(10), batch_size=4
    )
    with pytest.raises(RuntimeError, match="empty"):
        rb.sample()
    thread = threading.Thread(target=rb.extend, args=(rows(0, 5),))
    thread.start()
    thread.join(180)
    assert len(rb) == 5
    assert np.isin(rb.sample()["x"].numpy(), np.arange(5)).all()


def test_td_errors_go_to_the_storage_that_gets_their_rows():
    """Another thread replaces the storage while a write waits for the lock."""

    def data(count: int) -> TensorDict:
        number = torch.arange(1.0, count + 1)
        return TensorDict({"x": number, "td_error": number}, [count])

    old, new = PackedStorage(8), PackedStorage(8)
    rb = ReplayBuffer(storage=old, sampler=ProportionalSampler(8), batch_size=2)
    rb.extend(data(2))
    rb.empty()
    indices: list[Any] = []
    thread = threading.Thread(target=lambda: indices.append(rb.extend(data(3))))
    with old.lock:
        thread.start()
        time.sleep(0.5)
        rb.set_storage(new)
    thread.join()
    assert indices[0].tolist() == [0, 1, 2]
    assert len(new) == 3
    assert rb.sampler.priority(torch.arange(3)).tolist() == [1.0, 2.0, 3.0]
