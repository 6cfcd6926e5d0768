"""Large batches give the same results with any number of threads."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    UniformSampler,
)
from rlbuf_td.functional import generalized_advantage_estimate
from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.threads import COST, openmp
from rlbuf_td.kernels.threads_cpu import note_alone, note_threads, takes_threads

Call = Callable[[], list[Tensor]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def advantages(lanes: int, features: int, dtype: torch.dtype) -> Call:
    shape = lanes, 32, features
    numbers = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    done, terminated = torch.rand(shape) < 0.1, torch.rand(shape) < 0.05
    value, next_value, reward = numbers
    return lambda: [*generalized_advantage_estimate(0.99, 0.95, value, next_value, reward, done, terminated)]


def transitions(count: int) -> TensorDict:
    done = torch.rand(count, 1) < 0.05
    leaves = {"reward": torch.rand(count, 1), "done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    goals = {"desired_goal": torch.rand(count, 3), "achieved_goal": torch.rand(count, 3)}
    later = TensorDict({"x": torch.rand(count, 70), **goals, **leaves}, [count])
    return TensorDict({"x": torch.rand(count, 70), "flag": done.clone(), **goals, "next": later}, [count])


def batches(sampler: Callable[[], Any]) -> Call:
    """Sample twice, after writes that end in the middle of the ring, and read rows by their indices."""
    rb = ReplayBuffer(storage=PackedStorage(20_000), sampler=sampler(), batch_size=12_345)
    torch.manual_seed(0)
    rb.extend(transitions(15_000))
    rb.extend(transitions(15_000))

    def call() -> list[Tensor]:
        rb.set_rng(torch.Generator().manual_seed(0))
        found = [leaf for _ in range(2) for leaf in rb.sample().values(True, True)]
        index = torch.randint(0, 20_000, (9_876,))
        found += [leaf for _ in range(3) for leaf in rb[index].values(True, True)]
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    return call


def first_goal(rows: TensorDict) -> Tensor:
    return rows["desired_goal"][:, :1]


def writes() -> Call:
    data = transitions(9_000)

    def call() -> list[Tensor]:
        rb = ReplayBuffer(storage=PackedStorage(20_000), sampler=ProportionalSampler(20_000), batch_size=10)
        for _ in range(3):
            rb.extend(data)
        return [leaf.clone() for leaf in rb[:].values(True, True)] + [rb.sample()["index"]]

    return call


def draws(norm: str | None) -> Call:
    tree = sum_tree.SumTree.empty(30_000)
    sum_tree.update_(tree, torch.arange(30_000), torch.rand(30_000), 30_000, 0.6, 1e-3)

    def call() -> list[Tensor]:
        uniform = torch.rand(20_000, dtype=torch.float64)
        return [*(sum_tree.draw(tree, uniform, True, 30_000, 0.4, norm) or ())]

    return call


CALLS: dict[str, Callable[[], Call]] = {
    "GAE": lambda: advantages(4097, 1, torch.float32),
    "GAE of float64": lambda: advantages(4099, 1, torch.float64),
    "GAE of several features": lambda: advantages(512, 9, torch.float32),
    "draws, divided by the buffer's largest weight": lambda: draws("buffer"),
    "draws, divided by the batch's largest weight": lambda: draws("batch"),
    "uniform samples": lambda: batches(UniformSampler),
    "recent samples": lambda: batches(RecencySampler),
    "prioritized samples": lambda: batches(lambda: ProportionalSampler(20_000)),
    "ranked samples": lambda: batches(lambda: RankSampler(20_000)),
    "hindsight samples": lambda: batches(lambda: HindsightSampler(UniformSampler(), first_goal)),
    "n-step samples": lambda: batches(lambda: NStepSampler(ProportionalSampler(20_000), 3, 0.9)),
    "writes": writes,
}


def is_equal(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


def with_threads(count: int, call: Call) -> list[Tensor]:
    torch.set_num_threads(count)
    torch.manual_seed(0)
    return call()


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_the_number_of_threads(name: str) -> None:
    call = CALLS[name]()
    expected = with_threads(1, call)
    assert is_equal(with_threads(2, call), expected)
    assert is_equal(with_threads(5, call), expected)
    assert is_equal(with_threads(1, call), expected)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch's OpenMP differs")
def test_the_threads_of_torch_are_found() -> None:
    assert all(openmp())


def calls(costs: Iterator[float]) -> list[tuple[bool, float]]:
    """Simulate calls: 1 second with one thread, ``costs`` with threads; for each, whether in threads, and its time."""
    cost: Any = np.zeros(1, COST).view(np.recarray)[0]
    found = []
    for threaded in costs:
        is_threaded = bool(takes_threads.py_func(cost))
        (note_threads if is_threaded else note_alone).py_func(cost, threaded if is_threaded else 1.0)
        found.append((is_threaded, threaded if is_threaded else 1.0))
    return found


def test_threads_are_used_while_they_save_time() -> None:
    share = sum(threaded for threaded, _ in calls(repeat(0.5, 1_000))) / 1_000
    assert share > 0.95


@pytest.mark.parametrize("slow", [1.3, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("often", [0.05, 0.5, 1.0])
def test_a_busy_machine_makes_calls_at_most_a_fifth_slower_than_one_thread(slow: float, often: float) -> None:
    numbers = random.Random(0)
    found = calls(slow if numbers.random() < often else 0.6 for _ in range(3_000))
    assert sum(time for _, time in found) < 1.2 * len(found)


def test_threads_are_used_again_when_the_machine_is_idle_again() -> None:
    found = calls(chain(repeat(40.0, 100), repeat(0.5, 1_000)))
    assert sum(threaded for threaded, _ in found[-400:]) > 350


def test_several_python_threads_at_a_time_get_the_same_results() -> None:
    call = advantages(4097, 1, torch.float32)
    found: list[bool] = []
    expected = with_threads(1, call)

    def work() -> None:
        found.extend(is_equal(call(), expected) for _ in range(20))

    torch.set_num_threads(3)
    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [True] * 60


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("name", ["GAE", "uniform samples", "writes"])
def test_forked_children_and_their_parent_get_the_same_results(name: str) -> None:
    call = CALLS[name]()
    expected = with_threads(2, call)

    def child() -> None:
        os._exit(0 if is_equal(with_threads(2, call), expected) else 1)

    process = mp.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0
    assert is_equal(with_threads(2, call), expected)
