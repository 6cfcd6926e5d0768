"""Flow control of a plain buffer: in one thread, in several, and in several processes."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ReplayBuffer, SchemaError
from rlbuf_td.buffers.flow import FlowControl


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count)}, [count])


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
def test_samples_stay_within_the_tolerance_and_somebody_can_always_go_on(ratio, min_size, batch, write, slack, turns):
    tolerance = slack * max(1.0, ratio, batch, ratio * write)
    flow = FlowControl(ratio, min_size, tolerance)
    inserts = samples = 0
    for is_sample in turns:
        allowed = flow.admit_sample(batch) if is_sample else flow.admit_insert(write)
        if not allowed:
            is_sample = not is_sample
            assert flow.admit_sample(batch) if is_sample else flow.admit_insert(write)
        inserts, samples = (inserts, samples + batch) if is_sample else (inserts + write, samples)
        assert (flow.report()["inserts"], flow.report()["samples"]) == (inserts, samples)
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


def waited(rb: ReplayBuffer) -> TensorDict:
    writer = threading.Timer(0.05, rb.extend, (rows(5),))
    writer.start()
    batch = rb.sample(wait=True, timeout=10)
    writer.join()
    return batch


def test_a_batch_waits_for_rows_and_for_permission():
    rb = buffer(samples_per_insert=1.0, min_size=10, tolerance=20)
    with pytest.raises(RuntimeError, match="does not admit a batch of 8 rows"):
        rb.sample()
    rb.extend(rows(9))
    with pytest.raises(TimeoutError, match="flow control admitted nothing"):
        rb.sample(wait=True, timeout=0.01)
    assert waited(rb).shape == (8,)
    health = rb.health()
    assert (health["inserts"], health["samples"], health["sample_waits"]) == (14, 8, 2)


def test_a_buffer_without_flow_control_waits_for_its_first_row():
    rb = buffer()
    with pytest.raises(TimeoutError, match="no row"):
        rb.sample(wait=True, timeout=0.01)
    assert waited(rb).shape == (8,)
    assert "inserts" not in rb.health()


def test_a_write_waits_until_enough_has_been_sampled():
    rb = buffer(samples_per_insert=1.0, tolerance=16)
    rb.extend(rows(16))
    writer = threading.Thread(target=rb.add, args=(rows(1)[0],))
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()
    rb.sample()
    writer.join(10)
    assert (len(rb), rb.health()["insert_waits"]) == (17, 1)


def test_shutdown_wakes_whoever_waits():
    rb = buffer(samples_per_insert=1.0, tolerance=16)
    rb.extend(rows(16))
    found: list[str] = []

    def write() -> None:
        try:
            rb.extend(rows(16))
        except RuntimeError as error:
            found.append(str(error))

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.02)
    rb.shutdown()
    writer.join(10)
    assert found == ["the buffer has been shut down"]


def test_what_fails_has_not_been_counted():
    rb = buffer(samples_per_insert=1.0, tolerance=64)
    rb.extend(rows(16))
    with pytest.raises(SchemaError):
        rb.extend(TensorDict({"x": torch.rand(3)}, [3]))
    with pytest.raises(TypeError, match="extend takes a TensorDict"):
        rb.extend([1])
    assert rb.health()["inserts"] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples_per_insert": 0}, "samples_per_insert must be a positive number"),
        ({"samples_per_insert": float("nan")}, "samples_per_insert must be a positive number"),
        ({"samples_per_insert": 4, "tolerance": 3}, "tolerance must be at least 4"),
        ({"tolerance": 3}, "tolerance needs samples_per_insert"),
        ({"min_size": 1.5}, "min_size must be a whole number"),
        ({"samples_per_insert": 1, "prefetch": 2}, "use prefetch=0"),
    ],
)
def test_arguments_that_would_block_forever_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        buffer(**arguments)


def test_batches_and_writes_that_would_block_forever_are_refused():
    rb = buffer(samples_per_insert=4.0, tolerance=16)
    with pytest.raises(ValueError, match="a write of 5 rows could block forever"):
        rb.extend(rows(5))
    rb.extend(rows(4))
    with pytest.raises(ValueError, match="a batch of 17 rows could block forever"):
        rb.sample(17)


def write_some(rb: ReplayBuffer, count: int) -> None:
    for _ in range(count):
        rb.extend(rows(4))


@pytest.mark.parametrize("processes", [False, True])
def test_racing_writers_and_learners_stay_within_the_tolerance(processes):
    rb = buffer(samples_per_insert=2.0, min_size=20, tolerance=40)
    start = multiprocessing.get_context("fork").Process if processes else threading.Thread
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
        with rb.locked():
            flow = rb.health()
        worst = max(worst, abs(flow["samples"] - 2.0 * (flow["inserts"] - 20)))
    assert 0 < worst <= 40
    assert rb.health()["inserts"] == 800
