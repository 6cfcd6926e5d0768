"""What processes share, how they come by it, and what cannot be shared."""

from __future__ import annotations

import copy
import multiprocessing as mp
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer

from rlbuf_td import (
    GymnasiumRecorder,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    RolloutBuffer,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.storages.shared.lock import ProcessLock
from rlbuf_td.storages.shared.memory import SharedNumbers
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.storages import soak
from tests.storages.test_kill import rows

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SPAWN = pytest.param("spawn", marks=pytest.mark.slow)  # each process imports everything


def elsewhere(work: Callable[..., object], *args: object, method: str = "fork") -> None:
    all_elsewhere(work, [args], method)


def all_elsewhere(work: Callable[..., object], calls: Iterable[tuple[object, ...]], method: str = "fork") -> None:
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
    return ReplayBuffer(storage=storage, sampler=sampler(capacity), batch_size=8, priority_key="error")


@pytest.mark.parametrize("place", ["shared=True", "share()", "in a file"])
@pytest.mark.parametrize("written", [0, 10])
def test_what_one_process_writes_the_others_read(place, written, tmp_path):
    rb = make(shared=place == "shared=True", scratch_dir=tmp_path / "rows" if place == "in a file" else None)
    if written:
        rb.extend(rows(0, written))
    if place != "shared=True":
        rb.share()
    elsewhere(rb.extend, rows(written, 15))
    assert (len(rb), rb.write_count) == (written + 15, written + 15)
    elsewhere(rb.add, rows(written + 15, 1)[0])
    rb.extend(rows(written + 16, 4))
    elsewhere(rb.extend, rows(written + 20, 30))
    assert rb.chronological()["x"].tolist() == list(range(written + 20, written + 50))
    assert rb.storage["x"].shape == (30,)
    elsewhere(rb.empty)
    assert len(rb) == 0


@pytest.mark.parametrize("method", [SPAWN, "fork"])
def test_workers_that_start_one_after_another_write_every_row(method):
    """The nightly of TorchRL of October 2026 makes new semaphores at each ``share()``."""
    rb = make()
    if method == "fork":
        rb.share()
    context: Any = mp.get_context(method)
    workers = [context.Process(target=_extend, args=(rb, 5 * k)) for k in range(2 if method == "spawn" else 4)]
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
    assert rb.sampler.priority(torch.arange(20)).tolist() == [30.0 - j for j in range(20)]
    assert (rb.sampler.alpha, rb.sampler.beta, rb.sampler.default_priority) == (1.0, 0.9, 30.0)
    weights = torch.arange(30.0, 10, -1) if sampler is ProportionalSampler else 1 / torch.arange(1.0, 21)
    expected = (weights / weights.sum()).double()
    assert torch.allclose(rb.sampler.probability(torch.arange(20)), expected, atol=1e-6)
    elsewhere(rb.extend, rows(20, 3))
    assert rb.sampler.priority(torch.arange(20, 23)).tolist() == [30.0] * 3
    soak.check_priorities(rb)


def test_updates_of_rows_that_another_process_has_replaced_are_left_out():
    rb = make()
    rb.share()
    rb.extend(rows(0, 30))
    batch = rb.sample()
    elsewhere(rb.extend, rows(30, 30))
    rb.update_tensordict_priority(batch.set("error", torch.full((8,), 9.0)))
    assert rb.health()["stale_updates"] == 8
    assert (rb.sampler.priority(torch.arange(30)) == 1).all()

    def update_late() -> None:
        late = rb.sample().set("error", torch.full((8,), 9.0))
        rb.storage.set(torch.arange(30), rows(60, 30), set_cursor=False)  # out of order
        rb.update_tensordict_priority(late)

    elsewhere(update_late)
    assert rb.health()["stale_updates"] == 16


def write_out_of_order(rb: ReplayBuffer) -> None:
    rb.storage.set(torch.arange(30), rows(60, 30), set_cursor=False)


@pytest.mark.parametrize("method", ["fork", SPAWN])
def test_memory_stays_shared_after_a_batch(method):
    rb = make()
    rb.extend(rows(0, 30))
    rb.share()
    for _ in range(2):  # the first batch makes a plan, or finds that there is none
        late = rb.sample().set("error", torch.full((8,), 9.0))
    where = [memory.data_ptr() for memory in (rb.storage.rows.flat, rb.storage.clock.times)]
    elsewhere(rb.extend, rows(30, 30), method=method)
    assert rb.storage["x"].tolist() == list(range(30, 60))
    elsewhere(write_out_of_order, rb, method=method)
    assert rb.storage["x"].tolist() == list(range(60, 90))
    rb.update_tensordict_priority(late)
    assert rb.health()["stale_updates"] == 8
    assert [memory.data_ptr() for memory in (rb.storage.rows.flat, rb.storage.clock.times)] == where


def test_a_wrapped_sampler_and_its_trajectories_are_shared(monkeypatch):
    sampler = SequenceSampler(ProportionalSampler(30), length=2)
    rb = ReplayBuffer(storage=PackedStorage(30), sampler=sampler, batch_size=8)
    rb.extend(rows(0, 4))
    rb.share()
    rb.sample()
    elsewhere(rb.extend, rows(4, 26))
    elsewhere(rb.update_priority, torch.arange(30), torch.arange(30.0))
    assert rb.sampler.priority(torch.arange(30)).tolist() == list(range(30))
    cells, index = torch.arange(30), TrajectoryIndex.of(rb.storage)
    monkeypatch.setattr(TrajectoryIndex, "rebuild", lambda self: pytest.fail("the rows were read again"))
    reach, batch = index.reach(cells), rb.sample()
    monkeypatch.undo()
    assert all(map(torch.equal, reach, TrajectoryIndex(rb.storage).reach(cells)))
    batch["td_error"] = torch.ones(8)
    elsewhere(rb.extend, rows(30, 30))
    rb.update_tensordict_priority(batch)
    assert rb.health()["stale_updates"] == 4  # of four windows of two rows, the anchors


def record(rb: ReplayBuffer, steps: int = 5) -> None:
    env = gymnasium.make("CartPole-v1")
    recorder = GymnasiumRecorder(rb, env)
    recorder.reset(seed=0)
    for _ in range(steps):
        recorder.step(env.action_space.sample())
    recorder.flush()


@pytest.mark.parametrize("method", ["fork", SPAWN])
def test_recorders_of_all_processes_use_different_trajectory_numbers(method):
    rb = ReplayBuffer.from_env(gymnasium.make("CartPole-v1"), 30, batch_size=8)
    rb.share()
    record(rb)
    for _ in range(2):
        elsewhere(record, rb, method=method)
    numbers = rb.storage["collector", "traj_ids"].view(3, 5)
    assert (numbers == numbers[:, :1]).all()
    assert numbers[:, 0].unique().numel() == 3
    record(rb)
    assert rb.storage["collector", "traj_ids"].unique().numel() == 4


def test_a_rollout_that_another_process_records_into_reserved_rows_is_read_here():
    env = gymnasium.make("CartPole-v1")
    critic = TensorDictModule(lambda observation: observation[..., :1], ["observation"], ["state_value"])
    rollout = RolloutBuffer.from_env(env, 5, value_network=critic, shared=True)
    elsewhere(record, rollout)
    rows = rollout.storage[:]
    assert torch.equal(rows["observation"][1:], rows["next", "observation"][:-1])
    assert torch.equal(rows["state_value"], rows["observation"][:, :1])
    assert (rows["next", "reward"] == 1).all()


@pytest.mark.slow
def test_spawned_workers_that_begin_before_anything_is_written_by_others():
    report, rb = soak.run(1.0, 2, method="spawn", capacity=2000)
    assert report.is_clean
    assert report.sampled > 0
    assert report.written == rb.write_count > 256


@pytest.mark.parametrize(("sampler", "share_next"), [("proportional", False), ("rank", False), ("uniform", True)])
def test_workers_killed_at_random_leave_no_torn_lost_or_repeated_row(sampler, share_next):
    report, rb = soak.run(2.5, 3, sampler=sampler, capacity=20_000, kill_every=0.15, kills=4, share_next=share_next)
    assert report.is_clean
    assert report.kills >= 4
    assert report.overruns == 0 or report.read > 20_000
    assert len(rb) == min(rb.write_count, 20_000)


def test_priorities_that_are_not_shared_cannot_be_sent():
    rb = TensorDictReplayBuffer(storage=PackedStorage(10), sampler=ProportionalSampler(10), batch_size=4)
    rb.extend(rows(0, 5))
    rb.share()  # TorchRL's buffer cannot share them
    for sent in (ProportionalSampler(10), rb):
        process = mp.get_context("spawn").Process(target=len, args=(sent,))
        with pytest.raises(RuntimeError, match=r"Share the buffer first: rb.share\(\)"):
            process.start()


def test_rows_on_a_device_cannot_be_shared():
    theirs = ReplayBuffer(storage=LazyTensorStorage(10), sampler=UniformSampler(), batch_size=4, shared=True)
    theirs.extend(rows(0, 5))
    assert theirs.shared
    assert theirs.sample()["x"].shape == (4,)
    rb = ReplayBuffer(storage=PackedStorage(10), batch_size=4)
    assert rb.share() is rb
    lock = rb.storage.lock
    assert rb.share().storage.lock is lock


def test_a_state_is_loaded_into_what_is_shared():
    rb, saved = make(), make()
    saved.extend(rows(100, 12))
    saved.update_priority(torch.arange(12), torch.arange(12.0))
    rb.extend(rows(0, 30))
    rb.share()
    elsewhere(rb.load_state_dict, saved.state_dict())
    assert rb.chronological()["x"].tolist() == list(range(100, 112))
    assert rb.sampler.priority(torch.arange(13)).tolist() == [*range(12), -1]


class Note:
    def __init__(self) -> None:
        self.told: list[str] = []

    def entered(self) -> None:
        self.told.append("entered")

    def leaving(self, failed: bool) -> bool:
        self.told.append("failed" if failed else "left")
        return not failed

    def recover(self) -> None:
        self.told.append("recover")


def test_the_lock_tells_who_comes_in_that_somebody_has_left_work_undone():
    lock = ProcessLock(note := Note())
    with lock, lock:
        pass
    assert note.told == ["entered", "left"]
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    with lock:
        pass
    assert note.told[2:] == ["entered", "failed", "recover", "entered", "left"]


def test_a_fork_while_a_thread_holds_the_lock_does_not_deadlock():
    lock, entered, leave = ProcessLock(Note()), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            entered.set()
            leave.wait(180)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(180)
    begun = mp.get_context("fork").Event()

    def come_in() -> None:
        begun.set()
        with lock:
            pass

    process = mp.get_context("fork").Process(target=come_in)
    process.start()
    assert begun.wait(180)
    process.join(0.3)
    assert process.is_alive()  # it waits for the other process,
    leave.set()
    thread.join()
    process.join(180)
    assert process.exitcode == 0  # but not for a thread that it does not have


def test_shared_numbers_copy_by_value_and_wrap_as_int64_does():
    numbers = SharedNumbers("q", [1, 2**63 - 1])
    other = copy.deepcopy(numbers)
    numbers[1] += 1
    assert (list(numbers), list(other)) == ([1, -(2**63)], [1, 2**63 - 1])
    numbers.counters()[0].value += 4
    assert numbers[0] == 5
