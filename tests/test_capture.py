"""Captured steps: one graph on CUDA; on the CPU, and on the device path that it can force, the same without a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
    capture,
)
from rlbuf_td.kernels.paths import forced
from tests.statistics import assert_follows, power


@pytest.fixture(params=["cpu", "device path", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Run the test on the CPU, on the CPU by the torch ops that serve devices, and on CUDA."""
    torch.manual_seed(0)
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "device path":
        with forced("torch"):
            yield torch.device("cpu")
    else:
        yield torch.device(request.param)


def data(n: int, first: int = 0) -> TensorDict:
    x = torch.arange(first, first + n)
    after = {"reward": x[:, None].float(), "done": (x % 7 == 6)[:, None], "achieved_goal": x[:, None].float()}
    return TensorDict({"x": x, "desired_goal": -x[:, None].float(), "next": after}, [n])


def buffer(sampler: Any, device: torch.device, capacity: int = 20, rows: int = 20) -> ReplayBuffer:
    rb = ReplayBuffer(storage=PackedStorage(capacity, device=device), sampler=sampler, batch_size=500)
    rb.extend(data(rows).to(device))
    return rb


def counted(captured: Any, rows: int, calls: int) -> np.ndarray:
    """Return how often each ``x`` comes."""
    counts = torch.zeros(rows, dtype=torch.int64)
    for _ in range(calls):
        counts += captured()["x"].cpu().bincount(minlength=rows)
    return counts.numpy()


def test_every_call_draws_anew_and_by_the_law_while_the_buffer_fills_and_wraps(device):
    rb = buffer(UniformSampler(), device, capacity=20, rows=5)
    captured, calls = rb.capture(), 20
    for first, rows in ((0, 5), (5, 11), (16, 14)):
        if first:
            rb.extend(data(rows, first).to(device))
        written = first + rows
        live = min(20, written)
        probability = np.full(live, 1 / live)
        counts = counted(captured, written, calls)
        assert power(probability, 500 * calls, bias=0.1) > 0.99
        assert_follows(counts[written - live :], probability)
        assert not counts[: written - live].any()
        assert captured.is_captured == (device.type == "cuda")
    assert not torch.equal(captured()["x"].clone(), captured()["x"])


@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_priorities_alpha_and_beta_reach_the_next_call(device, cls):
    sampler = cls(20, alpha=1.0, stratified=False)
    rb = buffer(sampler, device)
    captured = rb.capture()
    captured()
    for alpha, beta in ((1.0, 0.4), (0.5, 1.0)):
        td_error = torch.linspace(1.0, 6.0, 20).to(device)
        rb.update_priority(torch.arange(20, device=device), td_error)
        sampler.alpha, sampler.beta = alpha, beta
        probability = sampler.probability(torch.arange(20, device=device)).cpu()
        assert_follows(counted(captured, 20, 20), probability.numpy())
        batch = captured()
        expected = (probability[batch["x"].cpu()] / probability.min()) ** -beta
        torch.testing.assert_close(batch["priority_weight"].cpu().double(), expected, rtol=1e-5, atol=0.0)
    assert rb.health()["weight_max_over_median"] >= 1.0


@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_a_step_learns_and_updates_the_priorities_of_what_it_saw(device, cls):
    rb = buffer(cls(20), device)
    seen = torch.zeros(20, dtype=torch.int64, device=device)

    def step(batch: TensorDictBase) -> torch.Tensor:
        seen.index_add_(0, batch["x"], torch.ones_like(batch["x"]))
        batch["td_error"] = batch["x"] + 1.0
        return batch["x"].float().mean()

    captured = rb.capture(step, batch_size=64, warmup=1)
    means = [float(captured()) for _ in range(4)]
    assert len(set(means)) > 1
    assert int(seen.sum()) == 64 * (4 + (device.type == "cuda"))
    priority = rb.sampler.priority(torch.arange(20, device=device)).cpu()
    drawn = (seen > 0).cpu()
    assert torch.equal(priority[drawn], torch.arange(1.0, 21.0, dtype=torch.float64)[drawn])
    assert (priority[~drawn] == 1.0).all()
    if cls is ProportionalSampler:
        assert float(rb.sampler.default_priority) == float(priority.max())


@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_a_buffer_that_is_emptied_begins_anew(device, cls):
    rb = buffer(cls(20), device)
    errors = torch.full((500,), 9.0, device=device)
    captured = rb.capture(lambda batch: batch.set("td_error", errors))
    captured()
    assert float(rb.sampler.default_priority) == 9.0
    rb.empty()
    rb.extend(data(20).to(device))
    errors.fill_(0.5)
    captured()
    assert float(rb.sampler.default_priority) == 0.5


def test_a_loaded_state_reaches_the_next_call(device):
    rb = buffer(ProportionalSampler(20, stratified=False), device)
    captured = rb.capture()
    captured()
    state = rb.sampler.state_dict()
    state["priorities"]["magnitude"][3:] = 0.0
    state["priorities"]["weight"][3:] = 0.0
    rb.sampler.load_state_dict(state)
    assert int(captured()["x"].max()) == 2


def test_goals_and_n_steps_are_taken_along(device):
    def reward_fn(batch: TensorDictBase) -> torch.Tensor:
        return batch["desired_goal"][:, 0] * 10

    rb = buffer(HindsightSampler(ProportionalSampler(20), reward_fn, her_ratio=1.0), device)
    batch = rb.capture()()
    assert (batch["desired_goal"] >= batch["x"][:, None]).all()
    assert torch.equal(batch["next", "reward"], batch["desired_goal"] * 10)
    sampler = NStepSampler(UniformSampler(), 2, 0.5)
    rb = buffer(sampler, device)
    captured = rb.capture()
    for gamma, n in ((0.5, 2), (0.25, 2), (0.25, 1)):
        sampler.gamma, sampler.n_steps = gamma, n
        batch = captured()
        x = batch["x"].float()
        more = (batch["x"] % 7 != 6) & (batch["x"] < 19) & (n > 1)
        assert torch.equal(batch["next", "reward"][:, 0], x + torch.where(more, gamma * (x + 1), 0.0))


def test_a_batch_without_a_step_changes_no_priority_and_knows_when_it_was_sampled(device):
    rb = ReplayBuffer(storage=PackedStorage(20, device=device), sampler=ProportionalSampler(20), batch_size=500)
    rb.extend(data(20).set("td_error", torch.full((20,), 7.0)).to(device))
    rows = torch.arange(20, device=device)
    rb.update_priority(rows, torch.ones(20, device=device))
    captured = rb.capture()
    captured()
    rb.extend(data(5, 20).set("td_error", torch.full((5,), 1.0)).to(device))
    batch = captured().clone()
    assert (rb.sampler.priority(rows) == 1.0).all()
    rb.extend(data(5, 25).set("td_error", torch.full((5,), 1.0)).to(device))
    batch["td_error"] = torch.full((500,), 3.0, device=device)
    rb.update_tensordict_priority(batch)
    stale = (rows >= 5) & (rows < 10)
    assert torch.equal(rb.sampler.priority(rows).cpu(), torch.where(stale, 1.0, 3.0).double().cpu())


def test_capturing_on_the_cpu_leaves_the_stream_of_later_draws_as_it_was():
    plain, captured = (buffer(UniformSampler(), torch.device("cpu")) for _ in range(2))
    captured.capture()()
    for rb in (plain, captured):
        rb.set_rng(torch.Generator().manual_seed(3))
    assert torch.equal(plain.sample()["x"], captured.sample()["x"])


class Graph:
    """Stands in for a CUDA graph: counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def graphs_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a buffer on the CPU go the way of CUDA, up to what a GPU would do; the host's side can be followed so."""
    nothing, stream = nullcontext(), SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("stream", "graph", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda given: nothing)
    monkeypatch.setattr(capture, "device_of", lambda storage: torch.device("cuda"))
    with forced("torch"):
        yield


@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_graphs_are_made_anew_only_when_something_is_baked_in_them(graphs_that_do_nothing, cls):
    rb, runs = buffer(cls(20), torch.device("cpu")), []
    captured = rb.capture(lambda batch: runs.append(batch), ring=3, warmup=2)
    for _ in range(7):
        captured()
        rb.extend(data(1))
    assert len(runs) == 2 + 3
    assert captured.is_captured
    assert [graph.replays for graph, _, _ in captured._graphs] == [3, 2, 2]
    for change, again in (
        (lambda: setattr(rb.sampler, "weight_norm", None), True),
        (lambda: [rb.sampler.load_state_dict(rb.sampler.state_dict()) for _ in range(2)], True),
        (lambda: rb.update_priority(torch.arange(20), torch.rand(20)), False),
        (lambda: rb.set_sampler(cls(20)), True),
        (lambda: rb.empty(), False),
    ):
        runs.clear()
        change()
        rb.extend(data(5))
        captured()
        assert len(runs) == 5 * again


def test_a_capture_that_fails_is_made_anew(graphs_that_do_nothing):
    rb = buffer(ProportionalSampler(20), torch.device("cpu"))
    fails: list[bool] = []

    def step(batch: TensorDictBase) -> TensorDictBase:
        if fails:
            raise ZeroDivisionError
        return batch

    captured = rb.capture(step)
    captured()
    rb.sampler.stratified = False
    fails.append(True)
    with pytest.raises(ZeroDivisionError):
        captured()
    rb.sampler.stratified = True  # what the graphs were made with that are gone now
    fails.clear()
    assert captured().shape == (500,)


def test_a_generator_elsewhere_is_refused(graphs_that_do_nothing):
    rb = buffer(UniformSampler(), torch.device("cpu"))
    rb.set_rng(torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="generator is on cpu"):
        rb.capture()()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_outputs_hold_for_a_ring_of_calls_and_nothing_waits_for_the_device():
    rb = buffer(ProportionalSampler(20), torch.device("cuda"))
    captured = rb.capture(ring=3)
    first = captured()["x"]
    kept = first.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [captured()["x"] for _ in range(2)]
        again = captured()["x"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again.data_ptr() == first.data_ptr()
    assert len({first.data_ptr(), *(other.data_ptr() for other in others)}) == 3
    assert not torch.equal(again, kept)


@pytest.mark.parametrize(
    ("sampler", "kwargs", "error", "words"),
    [
        (UniformSampler(), {"ring": 1}, ValueError, "ring must be at least 2"),
        (UniformSampler(), {"warmup": 0}, ValueError, "warmup must be at least 1"),
        (UniformSampler(unique=True), {}, ValueError, "unique=True"),
        (SequenceSampler(UniformSampler(), 5), {}, TypeError, "SequenceSampler cannot be captured"),
    ],
)
def test_what_cannot_be_captured_is_refused(sampler, kwargs, error, words):
    rb = buffer(sampler, torch.device("cpu"))
    with pytest.raises(error, match=words):
        rb.capture(**kwargs)()


def test_buffers_that_cannot_be_captured_are_refused():
    with pytest.raises(RuntimeError, match="empty buffer"):
        ReplayBuffer(storage=PackedStorage(5), batch_size=3).capture()()
    with pytest.raises(ValueError, match="how many rows"):
        ReplayBuffer(storage=PackedStorage(5)).capture()
    with pytest.raises(TypeError, match="LazyTensorStorage"):
        ReplayBuffer(storage=LazyTensorStorage(5), batch_size=3).capture()()
