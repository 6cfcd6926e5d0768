"""A queue gives each row once, in order, to threads and processes, whoever of them is
killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    ExperienceQueue,
    PackedStorage,
    QueueWriter,
    ReplayBuffer,
    ShutDown,
)
from tests.storages.test_kill import die, killed, killed_at
from tests.storages.test_sharing import elsewhere

CAPACITY, BATCH = 16, 4
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def rows(first: int, count: int, writer: int = 0) -> TensorDict:
    return TensorDict(
        {
            "x": torch.arange(first, first + count),
            "writer": torch.full((count,), writer),
        },
        [count],
    )


def make(timeout: float | None = 60.0) -> ExperienceQueue:
    return ExperienceQueue(
        storage=PackedStorage(CAPACITY), batch_size=BATCH, timeout=timeout
    )


def test_it_waits_for_rows_and_for_room_no_longer_than_told():
    queue = make(timeout=0.05)
    with pytest.raises(
        TimeoutError, match=r"waited for 0.05 seconds: a batch has 4 rows, and 0 wait"
    ):
        queue.sample()
    queue.extend(rows(0, 13))
    queue.extend(rows(13, 2))
    with pytest.raises(
        TimeoutError,
        match=r"waited for 0.05 seconds: 2 rows do not fit, because 15 of 16 wait",
    ):
        queue.extend(rows(15, 2))
    with pytest.raises(
        TimeoutError, match=r"waited for 0 seconds: a batch has 16 rows, and 15 wait"
    ):
        queue.sample(16, wait=False)
    assert queue.sample(15)["x"].tolist() == list(range(15))
    queue.shutdown()
    for call in (queue.sample, partial(queue.extend, rows(0, 1))):
        with pytest.raises(RuntimeError, match="shut"):
            call()


def test_its_sampler_and_writer_stay_and_a_new_storage_has_no_waiting_rows():
    queue = make(timeout=0.05)
    queue.extend(rows(0, 6))
    queue.sample(3)
    assert (queue.sample(2)["x"].tolist(), queue.waiting) == ([3, 4], 1)
    other = PackedStorage(8)
    other.set(range(5), rows(50, 5))
    queue.set_storage(other)
    assert (len(queue), queue.waiting) == (5, 0)
    queue.extend(rows(9, 4))
    assert queue.sample()["x"].tolist() == [9, 10, 11, 12]


def test_rows_loaded_without_their_state_all_wait(tmp_path):
    rb, queue = ReplayBuffer(storage=PackedStorage(CAPACITY)), make(timeout=0.05)
    rb.extend(rows(50, 6))
    rb.dumps(tmp_path)
    for first in range(0, 40, 4):
        queue.extend(rows(first, 4))
        queue.sample()
    queue.loads(tmp_path, rows_only=True)
    queue.extend(rows(56, 2))
    assert [queue.sample()["x"].tolist() for _ in range(2)] == [
        [50, 51, 52, 53],
        [54, 55, 56, 57],
    ]


def check_streams(
    streams: list[list[tuple[int, int]]], writers: int, each: int, lost: int = 0
) -> None:
    """Each ``(writer, x)`` was taken once, in each stream in its writer's order; at
    most ``lost`` are missing."""
    taken = [item for stream in streams for item in stream]
    assert len(set(taken)) == len(taken)
    assert writers * each - lost <= len(taken) <= writers * each
    for stream in streams:
        for writer in range(writers):
            mine = [x for of, x in stream if of == writer]
            assert mine == sorted(mine)


def read(queue: ExperienceQueue, taken: list[tuple[int, int]], batches: int) -> None:
    for _ in range(batches):
        batch = queue.sample()
        taken += zip(batch["writer"].tolist(), batch["x"].tolist(), strict=True)


def write(queue: ExperienceQueue, writer: int, count: int) -> None:
    for first in range(0, count, 3):
        queue.extend(rows(first, 3, writer))


def test_threads_take_each_row_once():
    queue = make()
    streams: list[list[tuple[int, int]]] = [[], []]
    with ThreadPoolExecutor(5) as threads:
        calls = [threads.submit(write, queue, writer, 96) for writer in range(3)]
        calls += [threads.submit(read, queue, stream, 36) for stream in streams]
    assert [call.result() for call in calls] == [None] * 5
    check_streams(streams, 3, 96)


@needs_fork
def test_a_killed_write_is_taken_whole_or_never():
    queue, first = make(), 10
    queue.share()
    for line in count(1, 53):
        queue.extend(rows(0, 3))
        is_killed = killed_at(line, partial(queue.extend, rows(first, 9)))
        queue.extend(rows(3, 1))
        is_written = queue.waiting > 4
        expected = [0, 1, 2, *(range(first, first + 9) if is_written else ()), 3]
        assert queue.sample(len(expected))["x"].tolist() == expected
        assert queue.waiting == 0
        if not is_killed:
            assert is_written
            break


@needs_fork
def test_what_a_killed_process_was_taking_is_taken_by_another():
    queue, sizes = make(), list[int]()
    queue.share()
    for line in count(1, 31):
        queue.extend(rows(0, 8))
        is_killed = killed_at(line, queue.sample)
        taken = queue.sample()["x"].tolist()
        taken += queue.sample(queue.waiting)["x"].tolist() if queue.waiting else []
        assert taken == [*range(8 - len(taken), 8)]
        sizes.append(len(taken))
        if not is_killed:
            break
    # of a process that dies after its call they are lost with it
    assert sizes == sorted(sizes, reverse=True)
    assert {*sizes} == {4, 8}


@needs_fork
def test_rows_whose_taker_dies_before_it_has_read_them_wait_again(monkeypatch):
    take = QueueWriter.take

    def take_and_die(*arguments: Any) -> None:
        take(*arguments)
        die()

    queue = make()
    queue.share()
    queue.extend(rows(0, 8))
    assert queue.sample()["x"].tolist() == [0, 1, 2, 3]
    with monkeypatch.context() as patched:
        patched.setattr(QueueWriter, "take", take_and_die)
        killed(queue.sample)
    assert queue.sample()["x"].tolist() == [4, 5, 6, 7]


@needs_fork
def test_other_processes_write_and_take():
    queue = make()
    queue.share()
    elsewhere(queue.extend, rows(0, 10))
    assert queue.sample()["x"].tolist() == [0, 1, 2, 3]
    elsewhere(queue.sample)
    assert queue.waiting == 2
    assert queue.sample(2)["x"].tolist() == [8, 9]


def test_a_write_that_waits_long_for_room_says_so(monkeypatch):
    monkeypatch.setattr("rlbuf_td.buffers.waiting.PATIENCE", 0.02)
    queue = ExperienceQueue(
        storage=PackedStorage(CAPACITY), batch_size=BATCH, timeout=0.1
    )
    queue.extend(rows(0, CAPACITY))
    said = "a write has waited .*: 1 rows do not fit, because 16 of 16 .*: sample in another thread"
    with pytest.warns(UserWarning, match=said), pytest.raises(TimeoutError):
        queue.extend(rows(0, 1))


def wait_in_vain(queue: ExperienceQueue) -> None:
    with pytest.raises(ShutDown, match="the queue has been shut down"):
        queue.sample()


@needs_fork
def test_a_shutdown_wakes_calls_that_wait_in_other_processes():
    queue = make(timeout=600.0)
    queue.extend(rows(0, 3))
    queue.share()
    process = mp.get_context("fork").Process(target=wait_in_vain, args=(queue,))
    process.start()
    time.sleep(0.3)
    assert process.is_alive()
    elsewhere(queue.shutdown)
    process.join(60)
    assert process.exitcode == 0
    wait_in_vain(queue)


def report(queue: ExperienceQueue, pipe: int) -> None:
    """Take batches for ever, and tell of each by one write to a pipe, which is whole or
    not made."""
    torch.set_num_threads(1)
    while True:
        batch = queue.sample()
        taken = zip(batch["writer"].tolist(), batch["x"].tolist(), strict=True)
        os.write(pipe, b"".join(b"%d %d %d\n" % (os.getpid(), *item) for item in taken))


@needs_fork
def test_processes_take_each_row_once_while_some_are_killed():
    queue = make()
    queue.share()
    context = mp.get_context("fork")
    reading, writing = os.pipe()
    readers = [context.Process(target=report, args=(queue, writing)) for _ in range(3)]
    writers = [
        context.Process(target=write, args=(queue, writer, 300)) for writer in range(2)
    ]
    for process in (*readers, *writers):
        process.start()
    for reader in readers[:2]:
        time.sleep(0.3)
        os.kill(reader.pid or 0, signal.SIGKILL)
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    deadline = time.monotonic() + 60
    while queue.waiting >= BATCH and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    readers[2].kill()
    os.close(writing)
    with open(reading, "rb") as pipe:
        reports = [tuple(map(int, line.split())) for line in pipe]
    streams = [
        [(writer, x) for pid, writer, x in reports if pid == reader.pid]
        for reader in readers
    ]
    # a killed process may have taken a batch that it did not report
    check_streams(streams, 2, 300, lost=3 * BATCH)
    assert sum(map(len, streams)) > 0


def test_a_queue_says_when_it_has_a_batch() -> None:
    queue = ExperienceQueue(storage=PackedStorage(8), batch_size=2)
    queue.add(TensorDict({"x": torch.zeros(1)}))
    cancelled = threading.Event()
    cancelled.set()
    assert not queue.can_sample()
    with pytest.raises(RuntimeError, match="cancel_event of this call was set"):
        queue.sample(cancel_event=cancelled)
    queue.add(TensorDict({"x": torch.zeros(1)}))
    assert queue.wait_until_sampleable()
    assert not queue.wait_until_sampleable(cancel_event=cancelled)
    cancelled.clear()
    assert queue.sample(cancel_event=cancelled).shape == (2,)
