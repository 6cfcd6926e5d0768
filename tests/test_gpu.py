"""Rows on a GPU are what brute force says, as those on the CPU are, and a call does not
wait for the GPU.

Skipped where torch finds no GPU: elsewhere, the same torch operations run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    RolloutBuffer,
    SchemaError,
    UniformSampler,
    functional,
)
from rlbuf_td.kernels.dispatch import why_not_triton
from tests.catalogue import SAMPLERS, SCHEMAS, Schema, assert_same, copied, transitions
from tests.catalogue import numbered_rows as data
from tests.samplers.test_compiled import NEVER_WAIT, loop

GPU = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU"
)
on_gpu = partial(PackedStorage, device=GPU)


def test_kernels_are_right_and_run():
    assert why_not_triton(GPU) == ""
    rb = ReplayBuffer(
        storage=on_gpu(60), sampler=ProportionalSampler(60), batch_size=32
    )
    rb.extend(data(60).to(GPU))
    rb.sample()
    assert rb.compiled == "add, extend, sample, update_tensordict_priority"


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sampler", NEVER_WAIT.values(), ids=NEVER_WAIT)
def test_a_training_loop_never_waits(sampler):
    rb = ReplayBuffer(storage=on_gpu(60), sampler=sampler(60), batch_size=32)
    rows, td_error = (
        [data(35, 35 * k).to(GPU) for k in range(4)],
        torch.rand(32, device=GPU),
    )
    loop(rb, rows, td_error)
    with no_waiting():
        loop(rb, rows, td_error)
    assert rb.full


def prioritized_buffer() -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=on_gpu(60), sampler=ProportionalSampler(60), batch_size=32
    )
    rb.extend(data(60).to(GPU))
    rb.sample()
    return rb


@pytest.mark.parametrize("call", ["sample", "update", "extend"])
def test_a_call_within_a_cuda_graph_is_refused(call):
    rb, rows = prioritized_buffer(), data(8).to(GPU)
    index, td_error = torch.arange(8, device=GPU), torch.ones(8, device=GPU)
    rb.update_priority(index, td_error)
    calls = {
        "sample": rb.sample,
        "update": partial(rb.update_priority, index, td_error),
        "extend": partial(rb.extend, rows),
    }
    refused = pytest.raises(RuntimeError, match="capture the learner's step alone")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        calls[call]()


def test_a_captured_learner_learns_from_each_batch():
    """The recipe of notebook 09, by hand and with ``torch.compile``."""
    rb = prioritized_buffer()
    static = rb.sample().select("x", "priority_weight").clone()
    td_error = torch.zeros(32, device=GPU)

    def learn() -> None:
        td_error.copy_(static["x"] * static["priority_weight"])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        learn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        learn()
    compiled = torch.compile(
        lambda x, weight: x * weight, mode="reduce-overhead", dynamic=False
    )
    drawn = []
    for _ in range(4):
        batch = rb.sample()
        static.update_(batch.select(*static.keys()))
        graph.replay()
        wanted = (batch["x"] * batch["priority_weight"]).float()
        torch.testing.assert_close(td_error, wanted)
        found = compiled(batch["x"], batch["priority_weight"])
        torch.testing.assert_close(found, batch["x"] * batch["priority_weight"])
        rb.update_tensordict_priority(batch.set("td_error", td_error))
        drawn.append(batch["index"])
    assert not all(torch.equal(drawn[0], index) for index in drawn[1:])


@pytest.mark.parametrize("name", SAMPLERS)
def test_rows_come_from_the_cpu_or_the_gpu_and_from_a_dump(name, tmp_path):
    rb = ReplayBuffer(storage=on_gpu(60), sampler=SAMPLERS[name](60), batch_size=32)
    for k in range(2):
        rb.extend(data(35, 35 * k))
        rb.extend(data(35, 35 * k).to(GPU))
        rb.add(data(1)[0])
    batch = rb.sample()
    assert all(leaf.is_cuda for leaf in batch.values(True, True))
    rb.dumps(tmp_path / "dump")
    state = rb.state_dict()
    for place in (on_gpu, PackedStorage):
        for load in (
            lambda rb: rb.loads(tmp_path / "dump"),
            lambda rb: rb.load_state_dict(state),
        ):
            other = ReplayBuffer(
                storage=place(60), sampler=SAMPLERS[name](60), batch_size=32
            )
            load(other)
            assert_same(other[:].cpu(), rb[:].cpu())
            batch = other.sample()
            batch["td_error"] = torch.rand(len(batch), device=other.storage.device)
            other.update_tensordict_priority(batch)
            other.extend(data(5))
            other.sample()


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
def test_every_schema_is_stored_byte_for_byte(schema: Schema) -> None:
    storage = on_gpu(4)
    rows = transitions(schema, 4)
    storage.set(range(4), rows)
    assert_same(storage[:].cpu(), rows)
    storage.set(torch.tensor([2, 0], device=GPU), rows[:2].to(GPU))
    storage.set(torch.tensor([2, 0]), rows[:2].to(GPU))
    assert_same(storage[torch.tensor([2, 0])].cpu(), rows[:2])
    assert_same(storage[torch.tensor([2, 0], device=GPU)].cpu(), rows[:2])


LAWS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda n: UniformSampler(),
    "unique": lambda n: UniformSampler(unique=True),
    "minibatch": lambda n: MinibatchSampler(),
    "proportional": lambda n: ProportionalSampler(n),
    "rank": lambda n: RankSampler(n),
}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        (name, where)
        for name in LAWS
        for where in ("rows on the GPU", "batches on the GPU", "batches drawn ahead")
        if (name, where) != ("minibatch", "batches drawn ahead")
    ],
)
def test_a_mixture_and_its_members_learn_on_a_gpu(name, where):
    options: dict[str, Any] = {} if where == "rows on the GPU" else {"device": GPU}
    if where == "batches drawn ahead":
        options["prefetch"] = 2
    storage = on_gpu if where == "rows on the GPU" else PackedStorage

    def buffer() -> ReplayBuffer:
        rb = ReplayBuffer(
            storage=storage(200), sampler=LAWS[name](200), batch_size=32, **options
        )
        rb.extend(data(200))
        return rb

    one, other = buffer(), buffer()
    for rb in (
        one,
        ReplayBufferMixture(
            {"one": buffer(), "other": other}, {"one": 0.5, "other": 0.5}, batch_size=32
        ),
    ):
        for _ in range(4):
            batch = rb.sample()
            assert all(leaf.is_cuda for leaf in batch.values(True, True))
            batch["td_error"] = torch.rand(len(batch), device=GPU)
            rb.update_tensordict_priority(batch)
            other.extend(data(7))


@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_a_sampler_serves_rows_on_the_cpu_after_those_on_a_gpu(sampler):
    one = sampler(16)
    for storage in (on_gpu(16), PackedStorage(16)):
        rb = ReplayBuffer(storage=storage, sampler=one, batch_size=4)
        rb.extend(data(16))
        assert one.device == storage.device
        assert one.priority(torch.arange(16)).tolist() == [1.0] * 16
        rb.empty()


def test_bad_rows_are_refused_on_a_gpu_and_change_nothing():
    rb = ReplayBuffer(
        storage=on_gpu(60), sampler=ProportionalSampler(60), batch_size=32
    )
    rb.extend(data(60))
    before = copied(rb[:])
    for bad in (data(3).exclude("x"), data(3).double()):
        with pytest.raises(SchemaError):
            rb.extend(bad.to(GPU))
    rb.update_priority(
        torch.tensor([0, 1], device=GPU), torch.tensor([float("nan"), 2.0], device=GPU)
    )
    rb.update_priority(
        torch.tensor([600, -700], device=GPU), torch.tensor([3.0, 2.0], device=GPU)
    )
    with pytest.raises(IndexError):
        rb[100]
    assert_same(rb[:], before)
    assert rb.sampler.priority(torch.tensor([1])).tolist() == [2.0]
    assert rb.health()["refused_priorities"] == 1
    batch = rb.sample()
    assert torch.isfinite(batch["priority_weight"]).all()


@pytest.mark.parametrize("shape", [(7, 3, 1), (1, 128, 1), (300, 2, 1)])
def test_advantages_and_returns_are_those_of_the_cpu(shape):
    def given(device: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        value = [torch.randn(shape, generator=generator) for _ in range(3)]
        done = torch.rand(shape, generator=generator) < 0.1
        return [leaf.to(device) for leaf in (*value, done)]

    for function, order in (
        (partial(functional.generalized_advantage_estimate, 0.9, 0.8), (0, 1, 2, 3)),
        (partial(functional.td_lambda_return_estimate, 0.9, 0.8), (1, 2, 3)),
        (partial(functional.vtrace_advantage_estimate, 0.9), (0, 1, 0, 1, 2, 3)),
    ):
        found, wanted = (
            function(*[given(where)[at] for at in order]) for where in (GPU, "cpu")
        )
        torch.testing.assert_close(
            found, wanted, rtol=1e-4, atol=1e-5, check_device=False
        )


def test_rollouts_are_those_of_the_cpu():
    def batches(device: Any) -> TensorDict:
        rb = RolloutBuffer(
            16, 4, batch_size=32, epochs=1, gamma=0.99, lmbda=0.95, device=device
        )
        rows = transitions(SCHEMAS["halfcheetah"], 4, (16,))
        rows["state_value"] = rows["observation"][..., :1].clone()
        rows["next", "state_value"] = rows["next", "observation"][..., :1].clone()
        rb.extend(rows)
        found = torch.cat([batch.cpu() for batch in rb])
        return found[found["observation"][:, 0].argsort()]

    torch.testing.assert_close(
        batches(GPU)["advantage"], batches(None)["advantage"], rtol=1e-4, atol=1e-4
    )


def test_a_dump_of_the_cpu_is_read_on_a_gpu(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=PackedStorage(60), sampler=RankSampler(60), batch_size=32)
    rb.extend(data(70))
    rb.update_priority(torch.arange(60), torch.rand(60))
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=on_gpu(60), sampler=RankSampler(60), batch_size=32)
    other.loads(tmp_path)
    assert_same(other[:].cpu(), rb[:])
    every = torch.arange(60)
    assert torch.equal(other.sampler.priority(every).cpu(), rb.sampler.priority(every))
