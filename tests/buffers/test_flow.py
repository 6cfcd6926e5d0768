"""Flow control of a plain buffer: in one thread, in several, and in several processes;
batches that wait."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
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
from tests.storages.test_sharing import elsewhere


def buffer(rows: int = 0, **parts: Any) -> ReplayBuffer:
    options = {"storage": PackedStorage(1_000), "batch_size": 8} | parts
    rb = ReplayBuffer(**options)
    if rows:
        rb.extend(numbered_rows(rows))
    return rb


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


def until_waits(rb: ReplayBuffer, kind: str, count: float) -> None:
    """Return when the buffer has counted so many waits."""
    deadline = time.monotonic() + 60
    while rb.health()[kind] < count:
        assert time.monotonic() < deadline, f"no call waits: {rb.health()}"
        time.sleep(0.001)


def unique_buffer(**options: Any) -> ReplayBuffer:
    return buffer(4, sampler=UniformSampler(unique=True), **options)


#: Buffers that cannot give a batch yet, and what they say.
WAITING: dict[str, tuple[Callable[[], ReplayBuffer], str]] = {
    "no rows": (buffer, "waited for 0.01 seconds: the buffer is empty"),
    "no shared rows": (partial(buffer, shared=True), "the buffer is empty"),
    "fewer than min_size": (
        partial(buffer, 9, samples_per_insert=1.0, min_size=10, tolerance=20),
        "9 of min_size=10 rows have been written",
    ),
    "too few distinct ones": (
        unique_buffer,
        "UniformSampler cannot draw a batch of 8 rows from the 4 stored ones yet",
    ),
    "no finished episode": (
        lambda: buffer(
            5, sampler=EpisodeSampler(), samples_per_insert=9.0, tolerance=1e3
        ),
        "EpisodeSampler cannot draw a batch of 8",
    ),
}


@pytest.mark.parametrize("how", ["sample", "wait_until_sampleable"])
@pytest.mark.parametrize("rows", WAITING)
def test_a_batch_waits_for_rows_and_for_permission(rows, how):
    make, said = WAITING[rows]
    rb = make()
    assert not rb.can_sample()
    assert not rb.wait_until_sampleable(timeout=0.01)
    with pytest.raises(TimeoutError, match=said):
        rb.sample(wait=True, timeout=0.01)
    writer = threading.Timer(0.02, rb.extend, (numbered_rows(14),))
    writer.start()
    if how == "wait_until_sampleable":
        assert rb.wait_until_sampleable(timeout=10)
    assert len(rb.sample(wait=how == "sample", timeout=10)) == 8
    writer.join()
    assert rb.health().get("samples", 8) == 8


def test_can_sample_says_whether_flow_control_admits_a_batch():
    rb = buffer(8, samples_per_insert=1.0, tolerance=16)
    for is_admitted in (True, True, True, False):
        assert rb.can_sample() is is_admitted
        assert rb.wait_until_sampleable(timeout=0) is is_admitted
        if is_admitted:
            rb.sample()
    health = rb.health()
    assert (health["samples"], health["sample_waits"]) == (24, 0)


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


@pytest.mark.parametrize("flow", [{}, {"samples_per_insert": 9.0}])
def test_batches_and_their_rows_are_counted(flow):
    rb = buffer(shared=True, **flow)
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.extend(numbered_rows(20))
    sizes: list[dict[str, Any]] = [{}, {"batch_size": 5}, {"batch_size": 0}]
    for how in (*sizes, {"return_info": True}, {"include_info": False}, {"wait": True}):
        rb.sample(**how)
    next(iter(rb))
    elsewhere(rb.sample)
    stats = rb.stats()
    assert (stats["sample_calls"], stats["samples_returned"]) == (8, 6 * 8 + 5)
    assert rb.health().get("samples", 53) == 53


@pytest.mark.parametrize(
    "parts",
    [{"sampler": RandomSampler()}, {"collate_fn": lambda x: x}, {"prefetch": 2}],
)
def test_batches_that_other_code_draws_are_counted_once(parts):
    rb = buffer(20, **parts)
    for _ in range(3):
        rb.sample()
    stats = rb.stats()
    assert (stats["sample_calls"], stats["samples_returned"]) == (3, 24)
    assert stats["size"] == 20


def test_a_write_waits_until_enough_has_been_sampled():
    rb = buffer(16, samples_per_insert=1.0, tolerance=16)
    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(rb.add, numbered_rows(1)[0])
        until_waits(rb, "insert_waits", 1)
        assert not write.done()
        rb.sample()
        write.result(10)
    assert (len(rb), rb.health()["insert_waits"]) == (17, 1)


def test_shutdown_wakes_whoever_waits():
    rb = buffer(16, samples_per_insert=1.0, tolerance=16)
    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(rb.extend, numbered_rows(16))
        until_waits(rb, "insert_waits", 1)
        rb.shutdown()
        with pytest.raises(ShutDown, match="the buffer has been shut down"):
            write.result(10)


def test_a_write_that_waits_long_says_what_for(monkeypatch):
    monkeypatch.setattr("rlbuf_td.buffers.waiting.PATIENCE", 0.02)
    rb = buffer(1, batch_size=32, samples_per_insert=4)
    stop = threading.Timer(0.1, rb.shutdown)
    stop.start()
    counts = "1 rows were written and 0 sampled, with samples_per_insert=4, min_size=0, tolerance=4"
    with (
        pytest.warns(UserWarning, match=f"a write has waited.*{counts}.*4 more rows"),
        pytest.raises(ShutDown),
    ):
        rb.add(numbered_rows(1)[0])
    stop.join()


@pytest.mark.parametrize(("min_size", "tolerance"), [(0, None), (50, None), (0, 40)])
def test_a_loop_that_draws_whatever_is_admitted_keeps_the_ratio(min_size, tolerance):
    flow = {"samples_per_insert": 4, "min_size": min_size, "tolerance": tolerance}
    rb, drawn = buffer(batch_size=32, **flow), 0
    for _ in range(200):
        rb.add(numbered_rows(1)[0])
        while rb.can_sample():
            drawn += len(rb.sample())
    assert abs(drawn - 4 * (200 - min_size)) <= 40


def test_a_batch_waits_for_as_many_rows_as_the_error_says():
    rb = buffer(60, samples_per_insert=1.0, min_size=50, tolerance=64)
    while rb.can_sample():
        rb.sample()
    for missing in (6, 5):
        said = f"72 sampled, with samples_per_insert=1, min_size=50, tolerance=64; .* {missing} more rows are written"
        with pytest.raises(TimeoutError, match=said):
            rb.sample(wait=True, timeout=0)
        rb.add(numbered_rows(1)[0])
    rb.extend(numbered_rows(4))
    rb.sample()
    assert rb.health()["sample_waits"] == 2


#: Of buffers to which rows are brought.
FLOW: dict[str, Any] = {"samples_per_insert": 1.0, "tolerance": 40, "min_size": 10}


def loaded_dump(rb: ReplayBuffer, path: Path, **how: Any) -> ReplayBuffer:
    rb.dumps(path)
    other = buffer(3, **FLOW)
    other.loads(path, **how)
    return other


def with_storage(rb: ReplayBuffer, path: Path) -> ReplayBuffer:
    other = buffer(3, **FLOW)
    other.set_storage(rb.storage)
    return other


BROUGHT: dict[str, Callable[[ReplayBuffer, Path], ReplayBuffer]] = {
    "a dump without flow control": loaded_dump,
    "the rows of a dump": partial(loaded_dump, rows_only=True),
    "a storage that holds rows": lambda rb, path: buffer(storage=rb.storage, **FLOW),
    "another storage": with_storage,
    "TorchRL's buffer": lambda rb, path: ReplayBuffer.from_torchrl(rb, **FLOW),
}


@pytest.mark.parametrize("bring", BROUGHT)
def test_rows_that_are_brought_count_as_written_and_as_sampled_often_enough(
    bring, tmp_path
):
    rb = BROUGHT[bring](buffer(200), tmp_path)
    for _ in range(5):
        assert rb.sample().shape == (8,)
    with pytest.raises(RuntimeError, match="200 rows were written and 230 sampled"):
        rb.sample()
    assert (rb.health()["inserts"], rb.health()["samples"]) == (200, 190 + 40)


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("writer", [RingWriter, ReservoirWriter])
def test_rows_that_another_buffer_writes_count_as_written(writer, is_used):
    storage = PackedStorage(16)
    rb = buffer(storage=storage, samples_per_insert=1.0, tolerance=8)
    other = ReplayBuffer(storage=storage, writer=writer())
    if is_used:
        with pytest.raises(RuntimeError, match="the buffer is empty"):
            rb.sample()
    for count in (10, 20, 3, 7):
        other.extend(numbered_rows(count))
    assert (rb.health()["inserts"], rb.health()["samples"]) == (40, 0)
    assert other.write_count == 40
    for _ in range(6):  # as many rows as were written, and the tolerance
        rb.sample()
    assert not rb.can_sample()


@pytest.mark.parametrize("removes", [True, False])
def test_a_batch_that_fails_after_the_rows_were_removed_does_not_count_below_zero(
    removes,
):
    def fail(data: TensorDict) -> None:
        if removes:
            rb.empty()
        raise ZeroDivisionError

    rb = buffer(8, samples_per_insert=9.0, transform=fail)
    for wait in (False, True)[: 1 + (not removes)]:
        with pytest.raises(ZeroDivisionError):
            rb.sample(wait=wait)
    health = rb.health()
    assert (health["inserts"], health["samples"]) == (0 if removes else 8, 0)


@pytest.mark.parametrize("processes", [False, True])
def test_racing_writers_and_learners_stay_within_the_tolerance(processes):
    rb = buffer(samples_per_insert=2.0, min_size=20, tolerance=40)
    start = threading.Thread
    if processes:
        start = multiprocessing.get_context("fork").Process
        rb.share()

    def write() -> None:
        for _ in range(100):
            rb.extend(numbered_rows(4))

    writers = [start(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    worst = 0.0
    while any(writer.is_alive() for writer in writers):
        with suppress(TimeoutError):
            rb.sample(wait=True, timeout=0.2)
            with rb._locked():
                flow = rb.health()
            worst = max(worst, abs(flow["samples"] - 2.0 * (flow["inserts"] - 20)))
    assert 0 < worst <= 40
    assert rb.health()["inserts"] == 800


# -- batches that wait, beside threads that remove rows


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


KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "proportional": {"sampler": ProportionalSampler(1_000)},
    "n-step": {"sampler": NStepSampler(UniformSampler(), 3, 0.9)},
    "minibatches": {"sampler": MinibatchSampler()},
    "flow control": {"samples_per_insert": 1e3, "min_size": 1},
    "drawn ahead": {"prefetch": 2, "transform": Slow()},
}


@pytest.mark.parametrize(
    ("kind", "remove"),
    [
        *((kind, empty) for kind in KINDS),
        ("uniform", empty_through_another_buffer),
        ("flow control", load_no_rows),
    ],
)
def test_rows_that_a_batch_has_waited_for_stay_until_it_is_drawn(kind, remove):
    rb = buffer(**KINDS[kind])
    state = rb.state_dict()  # without rows
    rb.extend(numbered_rows(8))
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
    assert batch["x"].shape == (8,)
    assert removed == [0]
    with pytest.raises(TimeoutError, match=r"the buffer is empty|of min_size=1 rows"):
        rb.sample(wait=True, timeout=0.01)


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
    rb = buffer(storage=PackedStorage(8), sampler=make(), batch_size=size)
    said = f"a storage of 8 rows never has 9 .*: use a smaller batch, a larger storage, {remedy}"
    for _ in range(2):  # empty, then full
        for call in (
            lambda: rb.sample(wait=True, timeout=0.01),
            rb.can_sample,
            lambda: rb.wait_until_sampleable(timeout=0.01),
        ):
            with pytest.raises(ValueError, match=said):
                call()
        rb.extend(numbered_rows(8))
    assert len(rb.sample(2, wait=True))


def test_a_queue_refuses_writes_once_its_storage_is_too_small_for_its_batches():
    rb = ExperienceQueue(storage=PackedStorage(8), batch_size=4)
    rb.set_storage(PackedStorage(2))
    for write in (
        partial(rb.extend, numbered_rows(1)),
        partial(rb.add, numbered_rows(1)[0]),
    ):
        with pytest.raises(ValueError, match="a queue of 2 rows never holds a batch"):
            write()
    assert len(rb) == 0


def test_a_queue_refuses_writes_that_its_waiting_rows_would_block_forever():
    rb = ExperienceQueue(storage=PackedStorage(4), batch_size=4, timeout=0.05)
    rb.extend(numbered_rows(2))
    assert len(rb.sample(1)) == 1
    # 3 rows would wait: too few for a batch, and too many for a write of 2
    with pytest.raises(ValueError, match="can wait for each other forever"):
        rb.extend(numbered_rows(2))
    assert rb.waiting == 1


def test_a_queue_that_is_refused_leaves_its_storage_to_others(tmp_path: Path):
    storage = PackedStorage(1)
    with pytest.raises(ValueError, match="never holds"):
        ExperienceQueue(storage=storage, batch_size=2)
    assert ReplayBuffer(storage=storage, batch_size=2).extend(
        numbered_rows(1)
    ).tolist() == [0]


@pytest.mark.parametrize("ratio", [1.0, 2.0])
@pytest.mark.parametrize("how", ["load_state_dict", "loads", "loads, rows_only"])
def test_a_load_goes_on_with_the_counts_of_equal_settings_alone(how, ratio, tmp_path):
    settings: dict[str, Any] = {"batch_size": 4, "tolerance": 64}
    one, other = (
        ReplayBuffer(storage=PackedStorage(8), samples_per_insert=samples, **settings)
        for samples in (1.0, ratio)
    )
    one.extend(numbered_rows(8))
    one.extend(numbered_rows(3))
    one.sample()
    other.extend(numbered_rows(5))
    one.dumps(tmp_path)
    if how == "load_state_dict":
        other.load_state_dict(one.state_dict())
    else:
        other.loads(tmp_path, rows_only="rows_only" in how)
    is_continued = ratio == 1.0 and "rows_only" not in how
    health = other.health()
    counts = health["inserts"], health["samples"]
    assert counts == ((11, 4) if is_continued else (8, 8 * ratio))
