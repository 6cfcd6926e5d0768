"""Flow control of a plain buffer: in one thread, in several, and in several processes;
batches that wait."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from torchrl.data.replay_buffers import RandomSampler

from rlbuf_td import (
    EpisodeSampler,
    ExperienceQueue,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    SequenceSampler,
    ShutDown,
    UniformSampler,
)
from rlbuf_td.buffers.flow import FlowControl
from tests.catalogue import numbered_rows


def buffer(**flow) -> ReplayBuffer:
    return ReplayBuffer(storage=PackedStorage(1_000), batch_size=8, **flow)


@given(
    ratio=st.floats(0.1, 10),
    min_size=st.integers(0, 50),
    batch=st.integers(1, 64),
    write=st.integers(1, 64),
    slack=st.floats(1, 3),
    turns=st.lists(st.booleans(), min_size=100, max_size=100),
)
def test_samples_stay_within_the_tolerance_and_somebody_can_always_go_on(
    ratio, min_size, batch, write, slack, turns
):
    tolerance = slack * max(1.0, ratio, batch, ratio * write)
    flow = FlowControl(ratio, min_size, tolerance)
    inserts = samples = 0
    for is_sample in turns:
        allowed = flow.admit_sample(batch) if is_sample else flow.admit_insert(write)
        if not allowed:
            is_sample = not is_sample
            assert flow.admit_sample(batch) if is_sample else flow.admit_insert(write)
        inserts, samples = (
            (inserts, samples + batch) if is_sample else (inserts + write, samples)
        )
        assert (flow.report()["inserts"], flow.report()["samples"]) == (
            inserts,
            samples,
        )
        if inserts <= min_size:
            assert not (samples and inserts < min_size)
        else:
            assert abs(samples - ratio * (inserts - min_size)) <= tolerance + 1e-6


def test_without_a_tolerance_the_least_possible_one_is_taken():
    flow = FlowControl(2.0)
    assert flow.admit_insert(10)
    assert flow.tolerance == 20
    assert flow.admit_sample(32)
    assert flow.tolerance == 32


@pytest.mark.parametrize("size", [0, 3, None, -1, 2.5])
def test_a_batch_counts_as_many_rows_as_it_has(size):
    rb = buffer(samples_per_insert=1.0, tolerance=100.0)
    rb.extend(numbered_rows(20))
    count = 0
    if size in (-1, 2.5):
        with pytest.raises(ValueError, match="batch_size must be a whole number"):
            rb.sample(size)
    else:
        count = len(rb.sample(size))
        assert count == (8 if size is None else size)
    assert rb.health()["samples"] == count


def until_waits(rb: ReplayBuffer, kind: str, count: float) -> None:
    """Return when the buffer has counted so many waits."""
    deadline = time.monotonic() + 60
    while rb.health()[kind] < count:
        assert time.monotonic() < deadline, f"no call waits: {rb.health()}"
        time.sleep(0.001)


def waited(rb: ReplayBuffer) -> TensorDict:
    def write() -> None:
        if "sample_waits" in rb.health():
            until_waits(rb, "sample_waits", before + 1)
        rb.extend(numbered_rows(5))

    before = rb.health().get("sample_waits", 0)
    writer = threading.Timer(0.05, write)
    writer.start()
    batch = rb.sample(wait=True, timeout=10)
    writer.join()
    return batch


def test_a_batch_waits_for_rows_and_for_permission():
    rb = buffer(samples_per_insert=1.0, min_size=10, tolerance=20)
    with pytest.raises(RuntimeError, match="does not admit a batch of 8 rows"):
        rb.sample()
    rb.extend(numbered_rows(9))
    with pytest.raises(TimeoutError, match="9 of min_size=10 rows have been written"):
        rb.sample(wait=True, timeout=0.01)
    assert waited(rb).shape == (8,)
    health = rb.health()
    assert (health["inserts"], health["samples"], health["sample_waits"]) == (14, 8, 2)


def test_a_buffer_without_flow_control_waits_for_its_first_row():
    rb = buffer()
    with pytest.raises(
        TimeoutError, match=r"waited for 0.01 seconds: the buffer is empty"
    ):
        rb.sample(wait=True, timeout=0.01)
    assert waited(rb).shape == (8,)
    assert "inserts" not in rb.health()


def test_a_batch_of_distinct_rows_waits_until_there_are_enough():
    rb = ReplayBuffer(
        storage=PackedStorage(1_000), sampler=UniformSampler(unique=True), batch_size=8
    )
    rb.extend(numbered_rows(4))
    assert not rb.can_sample()
    assert rb.can_sample(4)
    with pytest.raises(
        TimeoutError,
        match="UniformSampler cannot draw a batch of 8 rows from the 4 stored ones yet",
    ):
        rb.sample(wait=True, timeout=0.01)
    assert waited(rb).shape == (8,)


def test_a_thread_waits_until_there_is_a_batch():
    for rb in (
        buffer(),
        buffer(samples_per_insert=1.0, min_size=3),
        buffer(shared=True),
    ):
        assert not rb.wait_until_sampleable(timeout=0.01)
        writer = threading.Timer(0.05, rb.extend, (numbered_rows(12),))
        writer.start()
        assert rb.wait_until_sampleable()
        writer.join()
        rb.sample()
    limited = buffer(samples_per_insert=1.0, tolerance=16)
    limited.extend(numbered_rows(8))
    for admitted in (True, True, True, False):
        assert (
            limited.can_sample() is limited.wait_until_sampleable(timeout=0) is admitted
        )
        if admitted:
            limited.sample()
    assert (limited.health()["samples"], limited.health()["sample_waits"]) == (24, 0)


@pytest.mark.parametrize("flow", [{}, {"samples_per_insert": 1.0}])
def test_a_wait_is_cancelled(flow):
    rb, cancelled = buffer(**flow), threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    with pytest.raises(RuntimeError, match="cancel_event of this call was set"):
        rb.sample(wait=True, cancel_event=cancelled)
    assert not rb.wait_until_sampleable(cancel_event=cancelled)
    rb.extend(numbered_rows(8))
    cancelled.clear()
    assert rb.sample(wait=True, cancel_event=cancelled).shape == (8,)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ndim", [1, 2])
def test_batches_and_their_rows_are_counted(shared, ndim):
    rb = ReplayBuffer(
        storage=PackedStorage(100, ndim=ndim), batch_size=8, shared=shared
    )
    data = numbered_rows(20) if ndim == 1 else numbered_rows(20).view(2, 10)
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.extend(data)
    for how in (
        {},
        {},
        {"return_info": True},
        {"include_info": False},
        {"batch_size": 5},
        {"wait": True},
    ):
        rb.sample(**how)
    for _ in zip(range(2), rb, strict=False):
        pass
    assert (rb.stats()["sample_calls"], rb.stats()["samples_returned"]) == (
        8,
        7 * 8 + 5,
    )
    if shared:
        process = multiprocessing.get_context("fork").Process(target=rb.sample)
        process.start()
        process.join()
        assert rb.stats()["sample_calls"] == 9


@pytest.mark.parametrize(
    "parts",
    [{"sampler": RandomSampler()}, {"collate_fn": lambda x: x}, {"prefetch": 2}],
)
def test_batches_that_other_code_draws_are_counted_once(parts):
    rb = ReplayBuffer(storage=PackedStorage(100), batch_size=8, **parts)
    rb.extend(numbered_rows(20))
    for _ in range(3):
        rb.sample()
    assert (rb.stats()["sample_calls"], rb.stats()["samples_returned"]) == (3, 24)
    assert rb.stats()["size"] == 20


def test_a_write_waits_until_enough_has_been_sampled():
    rb = buffer(samples_per_insert=1.0, tolerance=16)
    rb.extend(numbered_rows(16))
    writer = threading.Thread(target=rb.add, args=(numbered_rows(1)[0],))
    writer.start()
    until_waits(rb, "insert_waits", 1)
    assert writer.is_alive()
    rb.sample()
    writer.join(10)
    assert (len(rb), rb.health()["insert_waits"]) == (17, 1)


def test_shutdown_wakes_whoever_waits():
    rb = buffer(samples_per_insert=1.0, tolerance=16)
    rb.extend(numbered_rows(16))
    found: list[str] = []

    def write() -> None:
        try:
            rb.extend(numbered_rows(16))
        except ShutDown as error:
            found.append(str(error))

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.02)
    rb.shutdown()
    writer.join(10)
    assert found == ["the buffer has been shut down"]
    for call in (
        rb.sample,
        partial(rb.sample, 3, wait=True),
        partial(rb.add, numbered_rows(1)[0]),
        partial(rb.extend, numbered_rows(1)),
    ):
        with pytest.raises(ShutDown):
            call()


def test_a_write_that_waits_long_says_what_for_and_its_remedy_works(monkeypatch):
    monkeypatch.setattr("rlbuf_td.buffers.waiting.PATIENCE", 0.02)
    rb = ReplayBuffer(storage=PackedStorage(1_000), batch_size=32, samples_per_insert=4)
    rb.add(numbered_rows(1)[0])
    stop = threading.Timer(0.1, rb.shutdown)
    stop.start()
    counts = "1 rows were written and 0 sampled, with samples_per_insert=4, min_size=0, tolerance=4"
    with (
        pytest.warns(UserWarning, match=f"a write has waited.*{counts}.*4 more rows"),
        pytest.raises(ShutDown),
    ):
        rb.add(numbered_rows(1)[0])
    stop.join()
    for min_size, tolerance in ((0, None), (50, None), (0, 40)):
        flow: dict[str, Any] = {
            "samples_per_insert": 4,
            "min_size": min_size,
            "tolerance": tolerance,
        }
        rb, drawn = ReplayBuffer(storage=PackedStorage(1_000), batch_size=32, **flow), 0
        for _ in range(200):
            rb.add(numbered_rows(1)[0])
            while rb.can_sample():
                drawn += len(rb.sample())
        assert abs(drawn - 4 * (200 - min_size)) <= 40


def test_a_batch_waits_for_as_many_rows_as_the_error_says():
    rb = buffer(samples_per_insert=1.0, min_size=50, tolerance=64)
    rb.extend(numbered_rows(60))
    while rb.can_sample():
        rb.sample()
    for missing in (6, 5):
        said = f"72 sampled, with samples_per_insert=1, min_size=50, tolerance=64; .* {missing} more rows are written"
        with pytest.raises(TimeoutError, match=said):
            rb.sample(wait=True, timeout=0)
        rb.add(numbered_rows(1)[0])
    rb.extend(numbered_rows(4))
    rb.sample()


def filled(count: int, **flow) -> ReplayBuffer:
    rb = buffer(**flow)
    rb.extend(numbered_rows(count))
    return rb


def emptied_by_a_state(rb: ReplayBuffer, path: Path) -> None:
    rb.load_state_dict(buffer().state_dict())


def emptied_by_a_dump(rb: ReplayBuffer, path: Path) -> None:
    buffer(samples_per_insert=1.0, tolerance=16).dumps(path)
    rb.loads(path)


def replaced(rb: ReplayBuffer, path: Path) -> None:
    rb.set_storage(PackedStorage(50))


EMPTIED = [
    lambda rb, path: rb.empty(),
    lambda rb, path: rb.empty(empty_write_count=False),
]
EMPTIED += [emptied_by_a_state, emptied_by_a_dump, replaced]


def extended_in_time(rb: ReplayBuffer, count: int) -> None:
    stop = threading.Timer(10, rb.shutdown)
    stop.start()
    rb.extend(numbered_rows(count))
    stop.cancel()


@pytest.mark.parametrize("remove", EMPTIED)
def test_writes_and_batches_go_on_after_all_rows_are_removed(remove, tmp_path):
    rb = filled(16, samples_per_insert=1.0, tolerance=16, min_size=8)
    rb.extend(numbered_rows(8))
    remove(rb, tmp_path)
    extended_in_time(rb, 7)
    with pytest.raises(RuntimeError, match="7 of min_size=8 rows have been written"):
        rb.sample()  # min_size holds again
    rb.extend(numbered_rows(2))
    assert rb.sample().shape == (8,)
    assert (rb.health()["inserts"], rb.health()["samples"]) == (9, 8)


def loaded_dump(rb: ReplayBuffer, path: Path, **how) -> ReplayBuffer:
    rb.dumps(path)
    other = filled(3, samples_per_insert=1.0, tolerance=40, min_size=10)
    other.loads(path, **how)
    return other


def over(storage: PackedStorage) -> ReplayBuffer:
    return ReplayBuffer(
        storage=storage, batch_size=8, samples_per_insert=1.0, tolerance=40, min_size=10
    )


def with_storage(rb: ReplayBuffer, path: Path) -> ReplayBuffer:
    other = filled(3, samples_per_insert=1.0, tolerance=40, min_size=10)
    other.set_storage(rb.storage)
    return other


BROUGHT: dict[str, Callable[[ReplayBuffer, Path], ReplayBuffer]] = {
    "a dump without flow control": loaded_dump,
    "the rows of a dump": partial(loaded_dump, rows_only=True),
    "a storage that holds rows": lambda rb, path: over(rb.storage),
    "another storage": with_storage,
    "TorchRL's buffer": lambda rb, path: ReplayBuffer.from_torchrl(
        rb, samples_per_insert=1.0, tolerance=40, min_size=10
    ),
}


@pytest.mark.parametrize("bring", BROUGHT)
def test_rows_that_are_brought_count_as_written_and_as_sampled_often_enough(
    bring, tmp_path
):
    rb = BROUGHT[bring](filled(200), tmp_path)
    for _ in range(5):
        assert rb.sample().shape == (8,)
    with pytest.raises(RuntimeError, match="200 rows were written and 230 sampled"):
        rb.sample()
    assert (rb.health()["inserts"], rb.health()["samples"]) == (200, 190 + 40)


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("writer", [RingWriter, ReservoirWriter])
def test_rows_that_another_buffer_writes_count_as_written(writer, is_used):
    rb: ReplayBuffer = ReplayBuffer(
        storage=PackedStorage(16), batch_size=8, samples_per_insert=1.0, tolerance=8
    )
    other: ReplayBuffer = ReplayBuffer(storage=rb.storage, writer=writer())
    if is_used:
        with pytest.raises(RuntimeError, match="the buffer is empty"):
            rb.sample()
    for count in (10, 20, 3, 7):
        other.extend(numbered_rows(count))
    assert (rb.health()["inserts"], rb.health()["samples"]) == (40, 0)
    assert other.write_count == 40
    batches = 0
    while rb.can_sample():
        rb.sample()
        batches += 1
    assert batches == 6  # as many rows as were written, and the tolerance


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))]
)
def test_a_copy_goes_on_with_the_counts(copy_of):
    rb: ReplayBuffer = ReplayBuffer(
        storage=PackedStorage(16), batch_size=8, samples_per_insert=1.0, tolerance=30
    )
    queue = ExperienceQueue(storage=PackedStorage(16), batch_size=4)
    for each in (rb, queue):
        each.extend(numbered_rows(14))
        each.sample()
        each.extend(numbered_rows(6))
    queue.empty(empty_write_count=False)
    queue.extend(numbered_rows(5))
    rb, queue = copy_of(rb), copy_of(queue)
    for each in (rb, queue):
        each.extend(numbered_rows(2))
    assert (rb.health()["inserts"], rb.health()["samples"]) == (22, 8)
    assert queue.waiting == 7


def test_a_batch_that_fails_after_the_rows_were_removed_does_not_count_below_zero():
    def fail(data: TensorDict) -> None:
        rb.empty()
        raise ZeroDivisionError

    rb: ReplayBuffer = ReplayBuffer(
        batch_size=8, samples_per_insert=1.0, transform=fail
    )
    rb.extend(numbered_rows(8))
    with pytest.raises(ZeroDivisionError):
        rb.sample()
    assert (rb.health()["inserts"], rb.health()["samples"]) == (0, 0)


def write_some(rb: ReplayBuffer, count: int) -> None:
    for _ in range(count):
        rb.extend(numbered_rows(4))


@pytest.mark.parametrize("processes", [False, True])
def test_racing_writers_and_learners_stay_within_the_tolerance(processes):
    rb = buffer(samples_per_insert=2.0, min_size=20, tolerance=40)
    start = (
        multiprocessing.get_context("fork").Process if processes else threading.Thread
    )
    if processes:
        rb.share()
    writers = [start(target=write_some, args=(rb, 100)) for _ in range(2)]
    for writer in writers:
        writer.start()
    worst = 0.0
    while any(writer.is_alive() for writer in writers):
        try:
            rb.sample(wait=True, timeout=0.2)
        except TimeoutError:
            continue
        with rb._locked():
            flow = rb.health()
        worst = max(worst, abs(flow["samples"] - 2.0 * (flow["inserts"] - 20)))
    assert 0 < worst <= 40
    assert rb.health()["inserts"] == 800


# -- batches that wait, beside threads that remove rows

END = {
    "next": {"done": torch.zeros(8, 1, dtype=torch.bool), "reward": torch.ones(8, 1)}
}
ROWS = TensorDict({"x": torch.arange(8)} | END, [8])


def shared_buffer(sampler: Any = None, size: int = 64, **settings: Any) -> ReplayBuffer:
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
    "uniform": shared_buffer,
    "proportional": lambda: shared_buffer(ProportionalSampler(64)),
    "n-step": lambda: shared_buffer(NStepSampler(UniformSampler(), 3, 0.9)),
    "minibatches": lambda: shared_buffer(MinibatchSampler()),
    "flow control": lambda: shared_buffer(samples_per_insert=1e3, min_size=1),
    "drawn ahead": lambda: shared_buffer(prefetch=2, transform=Slow()),
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
    rb = shared_buffer(EpisodeSampler(), samples_per_insert=10.0, tolerance=1000)
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

    rb = shared_buffer(samples_per_insert=10.0, transform=Broken())
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
    rb = shared_buffer(make(), size=8)
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


def test_a_queue_refuses_writes_that_its_waiting_rows_would_block_forever():
    rb = ExperienceQueue(storage=PackedStorage(4), batch_size=4, timeout=0.05)
    rb.extend(ROWS[:2])
    assert len(rb.sample(1)) == 1
    # 3 rows would wait: too few for a batch, and too many for a write of 2
    with pytest.raises(ValueError, match="can wait for each other forever"):
        rb.extend(ROWS[:2])
    assert rb.waiting == 1


def test_a_load_restores_the_counts_of_flow_control():
    one, other = (
        ReplayBuffer(
            storage=PackedStorage(8), batch_size=4, samples_per_insert=1.0, tolerance=64
        )
        for _ in range(2)
    )
    one.extend(ROWS)
    one.extend(ROWS[:3])
    one.sample()
    other.extend(ROWS[:5])
    other.load_state_dict(one.state_dict())
    health = other.health()
    assert (health["inserts"], health["samples"]) == (11, 4)


def test_a_queue_that_is_refused_leaves_its_storage_to_others(tmp_path: Path):
    storage = PackedStorage(1)
    with pytest.raises(ValueError, match="never holds"):
        ExperienceQueue(storage=storage, batch_size=2)
    assert ReplayBuffer(storage=storage, batch_size=2).extend(ROWS[:1]).tolist() == [0]


@pytest.mark.parametrize("ratio", [1.0, 2.0])
@pytest.mark.parametrize("how", ["load_state_dict", "loads", "loads, rows_only"])
def test_a_load_goes_on_with_the_counts_of_equal_settings_alone(how, ratio, tmp_path):
    settings: dict[str, Any] = {"batch_size": 4, "tolerance": 64}
    one, other = (
        ReplayBuffer(storage=PackedStorage(8), samples_per_insert=each, **settings)
        for each in (1.0, ratio)
    )
    one.extend(ROWS)
    one.extend(ROWS[:3])
    one.sample()
    other.extend(ROWS[:5])
    one.dumps(tmp_path)
    if how == "load_state_dict":
        other.load_state_dict(one.state_dict())
    else:
        other.loads(tmp_path, rows_only="rows_only" in how)
    is_continued = ratio == 1.0 and "rows_only" not in how
    health = other.health()
    counts = health["inserts"], health["samples"]
    assert counts == ((11, 4) if is_continued else (8, 8 * ratio))
