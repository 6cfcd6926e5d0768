"""Large batches give the same results with any number of threads."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rlbuf_td.functional import generalized_advantage_estimate
from rlbuf_td.kernels.threads import openmp

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


CALLS: dict[str, Callable[[], Call]] = {
    "GAE": lambda: advantages(4097, 1, torch.float32),
    "GAE of float64": lambda: advantages(4099, 1, torch.float64),
    "GAE of several features": lambda: advantages(512, 9, torch.float32),
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
    assert openmp() is not None


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
@pytest.mark.parametrize("name", CALLS)
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
