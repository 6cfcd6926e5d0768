"""Large batches that several threads copy."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
from rlbuf_td.kernels import threads

WIDTH = 4_000  # numbers per row: 16 kB, so that batches of 200 rows are large


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    threads._pool.cache_clear()
    monkeypatch.setattr(threads, "_records", {})
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    threads._pool.cache_clear()


def run(work: Callable[[int, int], bool], count: int) -> bool:
    return threads._work_together(work, 0, count, 3)


def filled(lanes: int = 0) -> ReplayBuffer:
    lead = [300] if not lanes else [lanes, 100]
    rows = torch.arange(300.0).view(*lead, 1).expand(*lead, WIDTH)
    rb = ReplayBuffer(
        storage=PackedStorage(300, ndim=1 + bool(lanes)),
        sampler=ProportionalSampler(300),
        batch_size=200,
    )
    rb.extend(TensorDict({"x": rows, "number": rows[..., :1].clone()}, lead))
    return rb


def assert_right(rb: ReplayBuffer) -> None:
    batch = rb.sample()
    step, lane = (
        batch["index"].unbind(-1) if batch["index"].ndim > 1 else (batch["index"], 0)
    )
    assert (batch["number"][:, 0] == lane * 100 + step).all()
    assert (
        batch.get("x").numpy() == batch.get("number").numpy()
    ).all()  # in a forked process, torch's own threads hang
    assert (batch.get("sampled_at") == step).all()


def test_several_threads_take_parts():
    meet = threading.Barrier(3, timeout=20)
    found = []

    def work(begin: int, end: int) -> bool:
        if begin < 300:  # the first part of each thread waits for the two others
            meet.wait()
        found.append((begin, end))
        return True

    assert run(work, 1_200)
    assert sorted(found) == [(100 * part, 100 * (part + 1)) for part in range(12)]


def test_a_call_does_not_wait_for_threads_that_have_not_begun():
    blocked, begun = threading.Event(), threading.Barrier(4, timeout=20)

    def block() -> None:
        begun.wait()
        blocked.wait(20)

    others = [threads._pool().submit(block) for _ in range(3)]
    begun.wait()  # all threads of the pool are busy
    assert run(
        lambda begin, end: threading.current_thread() is threading.main_thread(), 100
    )
    assert not any(each.done() for each in others)
    blocked.set()


def test_threads_are_used_only_while_they_save_time():
    used, slow = [], 0.1

    def work(begin: int, end: int) -> bool:
        if threading.current_thread() is not threading.main_thread():
            used.append(begin)
            time.sleep(slow)
        else:
            time.sleep((end - begin) / 1_000)
        return True

    def calls_in_threads(count: int) -> list[bool]:
        found = []
        for _ in range(count):
            before = len(used)
            assert threads.all_parts(work, 0, 12, threads.LARGE)
            found.append(len(used) > before)
        return found

    assert calls_in_threads(2 + 1 + 1 + 1 + 3 + 1) == [False] * 2 + [
        True,
        False,
        True,
    ] + [False] * 3 + [True]
    slow = 0.0
    assert calls_in_threads(7 + 4) == [False] * 7 + [True] * 4
    assert threads.all_parts(
        lambda begin, end: (begin, end) == (0, 12), 0, 12, threads.LARGE - 1
    )


def test_one_part_tells_for_all_and_an_error_ends_the_work():
    assert not run(lambda begin, end: begin != 0, 100)

    def fail(begin: int, end: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(fail, 100)


def test_after_ctrl_c_no_thread_works():
    main, works, ends = threading.main_thread(), threading.Event(), threading.Event()

    def work(begin: int, end: int) -> bool:
        if threading.current_thread() is main:
            return works.wait(20)
        works.set()
        time.sleep(0.1)  # the calling thread waits now
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        ends.set()
        return True

    with pytest.raises(KeyboardInterrupt):
        threads._work_together(work, 0, 2, 2)
    assert ends.is_set()


@pytest.mark.parametrize("lanes", [0, 3])
def test_batches_and_rows_by_index_are_right(lanes):
    rb = filled(lanes)
    for _ in range(5):
        assert_right(rb)
    everything = rb.storage.get(slice(None))
    assert (everything["x"] == everything["number"]).all()
    assert (everything["number"].flatten().sort().values == torch.arange(300.0)).all()


def _sample(rb: ReplayBuffer) -> None:
    assert_right(rb)


def test_a_forked_process_has_threads_of_its_own():
    rb = filled()
    assert_right(rb)
    child = get_context("fork").Process(target=_sample, args=(rb,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
