"""What processes share, how they come by it, what cannot be shared; forks beside
threads that are inside a call."""

from __future__ import annotations

import copy
import multiprocessing as mp
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.sharedctypes import RawArray
from typing import Any

import gymnasium
import pytest
import torch
from numba.core.compiler_lock import global_compiler_lock
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from rlbuf_td import (
    GymnasiumRecorder,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    RolloutBuffer,
)
from tests.catalogue import SAMPLERS
from tests.storages.test_kill import check_priorities, rows

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SPAWN = pytest.param("spawn", marks=pytest.mark.slow)  # each process imports everything


def elsewhere(work: Callable[..., object], *args: object, method: str = "fork") -> None:
    all_elsewhere(work, [args], method)


def all_elsewhere(
    work: Callable[..., object],
    calls: Iterable[tuple[object, ...]],
    method: str = "fork",
) -> None:
    """Do something at the same time in a process for each tuple of arguments."""
    context: Any = mp.get_context(method)
    processes = [context.Process(target=_alone, args=(work, *args)) for args in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
        assert process.exitcode == 0


def _alone(work: Callable[..., object], *args: object) -> None:
    torch.set_num_threads(1)
    work(*args)


def make(sampler=ProportionalSampler, capacity: int = 30, **kwargs) -> ReplayBuffer:
    storage = PackedStorage(capacity, **kwargs)
    return ReplayBuffer(
        storage=storage, sampler=sampler(capacity), batch_size=8, priority_key="error"
    )


@pytest.mark.parametrize("method", [SPAWN, "fork"])
def test_workers_that_start_one_after_another_write_every_row(method):
    """The nightly of TorchRL of October 2026 makes new semaphores at each
    ``share()``."""
    rb = make()
    if method == "fork":
        rb.share()
    context: Any = mp.get_context(method)
    workers = [
        context.Process(target=_extend, args=(rb, 5 * k))
        for k in range(2 if method == "spawn" else 4)
    ]
    for worker in workers:
        worker.start()
        assert rb.share() is rb
    for worker in workers:
        worker.join(180)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)
    assert rb.write_count == 5 * len(workers)
    assert sorted(rb.storage["x"].tolist()) == list(range(5 * len(workers)))


def _extend(rb: ReplayBuffer, start: int) -> None:
    rb.extend(rows(start, 5))


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_priorities_and_settings_are_everybodys(sampler):
    rb = make(sampler)
    rb.share()
    rb.extend(rows(0, 20))

    def learn() -> None:
        rb.update_priority(torch.arange(20), torch.arange(20.0) - 30.0)
        rb.sampler.alpha, rb.sampler.beta = 1.0, 0.9

    elsewhere(learn)
    assert rb.sampler.priority(torch.arange(20)).tolist() == [
        30.0 - j for j in range(20)
    ]
    assert (rb.sampler.alpha, rb.sampler.beta, rb.sampler.default_priority) == (
        1.0,
        0.9,
        30.0,
    )
    weights = (
        torch.arange(30.0, 10, -1)
        if sampler is ProportionalSampler
        else 1 / torch.arange(1.0, 21)
    )
    expected = (weights / weights.sum()).double()
    assert torch.allclose(rb.sampler.probability(torch.arange(20)), expected, atol=1e-6)
    elsewhere(rb.extend, rows(20, 3))
    assert rb.sampler.priority(torch.arange(20, 23)).tolist() == [30.0] * 3
    check_priorities(rb)


def record(rb: ReplayBuffer, steps: int = 5) -> None:
    env = gymnasium.make("CartPole-v1")
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    for _ in range(steps):
        recorder.step(env.action_space.sample())


@pytest.mark.parametrize("how", ["rb.share()", "storage.share_memory_()"])
def test_recorders_of_all_processes_use_different_trajectory_numbers(how):
    rb = ReplayBuffer.from_env(gymnasium.make("CartPole-v1"), 30, batch_size=8)
    rb.share() if how == "rb.share()" else rb.storage.share_memory_()
    record(rb)
    for _ in range(2):
        elsewhere(record, rb)
    numbers = rb.storage["collector", "traj_ids"].view(3, 5)
    assert (numbers == numbers[:, :1]).all()
    assert numbers[:, 0].unique().numel() == 3
    record(rb)
    assert rb.storage["collector", "traj_ids"].unique().numel() == 4


def test_a_rollout_that_another_process_records_into_reserved_rows_is_read_here():
    env = gymnasium.make("CartPole-v1")
    critic = TensorDictModule(
        lambda observation: observation[..., :1], ["observation"], ["state_value"]
    )
    rollout = RolloutBuffer.from_env(env, 5, value_network=critic, shared=True)
    elsewhere(record, rollout)
    rows = rollout.storage[:]
    assert torch.equal(rows["observation"][1:], rows["next", "observation"][:-1])
    assert torch.equal(rows["state_value"], rows["observation"][:, :1])
    assert (rows["next", "reward"] == 1).all()


FACTORS = torch.arange(1, 20)


def numbered(worker: int, first: int, count: int) -> TensorDict:
    """Return rows of a worker whose entries all follow from their number."""
    x = worker * 1_000_000 + torch.arange(first, first + count)
    return TensorDict(
        {
            "x": x,
            "state": x[:, None] * FACTORS,
            "next": {"state": (x[:, None] + 1) * FACTORS},
        },
        [count],
    )


def size_of(serial: int) -> int:
    return 1 + serial % 37


def write_for_ever(rb: ReplayBuffer, worker: int, told: Any) -> None:
    torch.set_num_threads(1)
    while True:
        count = size_of(told[worker])
        data = numbered(worker, told[worker], count)
        rb.add(data[0]) if count == 1 else rb.extend(data)
        told[worker] += count


def check_rows(data: TensorDict) -> TensorDict:
    assert (data["state"] == data["x"][:, None] * FACTORS).all()
    assert (data["next", "state"] == (data["x"][:, None] + 1) * FACTORS).all()
    return data


@pytest.mark.parametrize(
    ("sampler", "share_next"), [("proportional", False), ("rank", True)]
)
def test_workers_killed_at_random_leave_no_torn_lost_or_repeated_row(
    sampler, share_next
):
    storage = PackedStorage(5_000, shared=True, share_next=share_next)
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](5_000), batch_size=256)
    rb.extend(numbered(20, 0, 256))
    told, running, chance = RawArray("q", 20), {}, random.Random(0)
    for worker in range(6):
        running[worker] = mp.get_context("fork").Process(
            target=write_for_ever, args=(rb, worker, told), daemon=True
        )
        running[worker].start()
        until = time.monotonic() + chance.uniform(0.02, 0.15)
        while time.monotonic() < until or not told[worker]:
            batch = check_rows(rb.sample())
            rb.update_tensordict_priority(batch.set("td_error", torch.rand(256)))
        if worker > 2:  # three at a time
            running.pop(chance.choice([*running])).kill()
        stored = check_rows(rb.chronological())
        for each in (stored["x"] // 1_000_000).unique().tolist():
            assert (stored["x"][stored["x"] // 1_000_000 == each].diff() == 1).all()
    for process in running.values():
        process.kill()
        process.join(60)
    stored = rb.chronological()["x"]
    for worker in set((stored // 1_000_000).tolist()) - {20}:
        last = int(stored[stored // 1_000_000 == worker].max()) % 1_000_000 + 1
        assert last - told[worker] in (0, size_of(told[worker]))
    # the last write that was killed leaves a gap
    assert 5_000 - 37 <= len(stored) <= 5_000 < rb.write_count
    check_priorities(rb)
    if share_next:
        rb.storage.rows.entries.check(rb.storage.ring.serials)


def test_priorities_that_are_not_shared_cannot_be_sent():
    process = mp.get_context("spawn").Process(
        target=len, args=(ProportionalSampler(10),)
    )
    with pytest.raises(RuntimeError, match=r"Share the buffer first: rb.share\(\)"):
        process.start()


def points(count: int) -> TensorDict:
    return TensorDict({"x": torch.rand(count, 3)}, [count])


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_the_first_write_of_a_child_warns_if_the_buffer_is_not_shared() -> None:
    def write_twice(rb: ReplayBuffer) -> None:
        with pytest.warns(
            UserWarning,
            match=r"forked from .* not shared: .* Call rb.share\(\) before forking",
        ):
            rb.extend(points(3))
        warnings.simplefilter("error")
        rb.extend(points(3))

    def write_to_a_copy(rb: ReplayBuffer) -> None:
        copy.deepcopy(rb).extend(points(3))

    for act, shared in (
        (write_twice, False),
        (write_to_a_copy, False),
        (lambda rb: rb.extend(points(3)), True),
    ):
        rb = ReplayBuffer(storage=PackedStorage(100), batch_size=8, shared=shared)
        for _ in range(3):
            rb.extend(points(3))  # bound
        child = mp.get_context("fork").Process(target=act, args=(rb,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert len(rb) == 9 + 3 * shared


def use_all(rb: ReplayBuffer) -> None:
    batch = rb.sample()
    rb.extend(points(3))
    rb.update_tensordict_priority(batch.set("td_error", torch.rand(8)))


def fork_beside(
    hold: Callable[[Any], AbstractContextManager[Any]], shared: bool
) -> None:
    """Fork while another thread holds a lock, and use the buffer in both processes."""
    os.setsid()  # the test kills this process and its child together
    torch.set_num_threads(1)
    rb = ReplayBuffer(
        storage=PackedStorage(100), sampler=RankSampler(100), batch_size=8
    )
    rb.extend(points(20))
    use_all(rb)
    if shared:
        rb.share()
    began = threading.Event()

    def work() -> None:
        with hold(rb):
            began.set()
            time.sleep(0.5)

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    child = mp.get_context("fork").Process(target=use_all, args=(rb,))
    child.start()
    use_all(rb)
    child.join(20)
    thread.join()
    if child.is_alive():
        child.kill()
    os._exit(0 if child.exitcode == 0 else 1)


@contextmanager
def inside_a_draw(rb: Any) -> Iterator[None]:
    with rb.storage.lock, rb.sampler.rule.table.lock:
        yield


HOLDS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "numba's compiler": lambda rb: global_compiler_lock,
    "the rows": lambda rb: rb.storage.lock,
    "the ranks": inside_a_draw,
}


@pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning", "ignore:this process was forked"
)
@pytest.mark.parametrize(
    ("what", "shared"),
    [("numba's compiler", False), ("the rows", True), ("the ranks", True)],
)
def test_a_fork_beside_a_thread_that_holds_a_lock_stops_no_process(
    what: str, shared: bool
) -> None:
    process = mp.get_context("fork").Process(
        target=fork_beside, args=(HOLDS[what], shared)
    )
    process.start()
    process.join(30)
    ended = process.exitcode
    if ended is None:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    assert ended == 0, (
        "a process waits for ever" if ended is None else f"exit status {ended}"
    )
