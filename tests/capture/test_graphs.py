"""When graphs are recorded again, and what cannot be captured."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import RandomSampler

from rlbuf_td import (
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.capture.rows import buffer, counted, data
from tests.graphs import graphs_by
from tests.statistics import assert_follows
from tests.waiting import waiting_is_an_error


@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_graphs_are_recorded_again_only_after_changes_they_cannot_read(cls):
    with graphs_by("torch"):
        rb, runs = buffer(cls(20), torch.device("cpu"), batch_size=8, count_replays=True), []
        captured = rb.capture(lambda batch: runs.append(batch), ring=3, warmup=2)
        for _ in range(7):
            captured()
            rb.extend(data(1))
        assert len(runs) == 2 + 3
        assert captured.is_captured
        assert [captured.graph.replays for captured in captured._graphs] == [3, 2, 2]
        for change, again in (
            (lambda: setattr(rb.sampler, "weight_norm", None), True),
            (lambda: setattr(rb.sampler, "reduction", "min"), True),
            (lambda: [rb.sampler.load_state_dict(rb.sampler.state_dict()) for _ in range(2)], True),
            (lambda: rb.update_priority(torch.arange(20), torch.rand(20)), False),
            (lambda: rb.append_transform(lambda batch: batch), True),
            (lambda: rb.set_sampler(cls(20)), True),
            (lambda: rb.empty(), False),
        ):
            runs.clear()
            change()
            rb.extend(data(5))
            captured()
            assert len(runs) == 5 * again


def test_rows_that_share_observations_are_read_where_they_are_now(device, monkeypatch):
    for name in ("rows.dedup", "allocate"):  # as on other devices than the CPU
        monkeypatch.setattr(f"rlbuf_td.storages.{name}.grows", lambda device: True)
    storage = PackedStorage(60, device=device, share_next=True)
    rb, numbers, captured = ReplayBuffer(storage=storage, batch_size=50), torch.arange(61.0, device=device), None
    for start in (0, 30):
        seen = numbers[start : start + 31, None] + torch.rand(31, 8, device=device) / 2
        rb.extend(TensorDict({"observation": seen[:-1], "next": {"observation": seen[1:]}}, [30]))
        captured = captured or rb.capture(warmup=1)
        batch = captured()
        for key, more in (("observation", 0), (("next", "observation"), 1)):
            assert torch.equal(batch[key][:, 0].floor(), batch["index"].float() + more)
    assert (batch["index"] >= 30).any()


def test_a_capture_that_failed_changes_no_draw_and_is_repeated(recorded):
    rb, runs = buffer(RankSampler(20, stratified=False), torch.device("cpu")), []

    def step(batch: TensorDictBase) -> TensorDictBase:
        runs.append(batch)
        if len(runs) in (2, 7):  # of three runs for each successful capture
            raise ZeroDivisionError
        return batch

    x = rb.sample()["x"]
    captured = rb.capture(step, warmup=1)
    for weight_norm in ("buffer", "batch"):
        rb.sampler.weight_norm = weight_norm
        with pytest.raises(ZeroDivisionError):
            captured()
        assert not captured.is_captured
        assert rb.health()["age_max"] == float(19 - x.min())
        rb.sampler.weight_norm = "buffer"  # what the graphs were made with that are gone now
        x = captured()["x"].clone()
    assert_follows(counted(rb.sample, 20, 40), rb.sampler.probability(torch.arange(20)))


def test_a_generator_elsewhere_is_refused_and_nothing_changes(recorded):
    rb = buffer(UniformSampler(), torch.device("cpu"))
    captured = rb.capture(warmup=1)
    captured()
    graphs, generator = [*captured._graphs], torch.Generator().manual_seed(0)
    rb.set_rng(generator)
    before = generator.get_state()
    with pytest.raises(ValueError, match="generator is on cpu"):
        captured()
    assert torch.equal(generator.get_state(), before)
    rb.set_rng(None)
    captured()
    assert all(mine is theirs for mine, theirs in zip(captured._graphs, graphs, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("unique", [False, True])
def test_a_generator_of_the_device_decides_what_graphs_draw(unique):
    rb = buffer(UniformSampler(unique=unique), torch.device("cuda"), batch_size=16)
    captured = rb.capture()
    captured()
    generator, drawn = torch.Generator("cuda"), []
    rb.set_rng(generator)
    captured()
    for _ in range(2):
        generator.manual_seed(3)
        drawn.append([captured()["x"].clone(), captured()["x"].clone(), rb.sample()["x"]])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    assert not torch.equal(drawn[0][0], drawn[0][1])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_outputs_hold_for_a_ring_of_calls_and_nothing_waits_for_the_device():
    rb = buffer(ProportionalSampler(20, stratified=False), torch.device("cuda"))
    captured = rb.capture(ring=3)
    first = captured()["x"]
    kept = first.clone()
    with waiting_is_an_error(torch.device("cuda")):
        others = [captured()["x"] for _ in range(2)]
        again = captured()["x"]
    assert again.data_ptr() == first.data_ptr()
    assert len({first.data_ptr(), *(other.data_ptr() for other in others)}) == 3
    assert not torch.equal(again, kept)


@pytest.mark.parametrize(
    ("sampler", "kwargs", "error", "words"),
    [
        (UniformSampler(), {"ring": 1}, ValueError, "ring must be a whole number, at least 2, got 1"),
        (UniformSampler(), {"ring": 2.5}, ValueError, "ring must be a whole number, at least 2, got 2.5"),
        (UniformSampler(), {"warmup": 0}, ValueError, "warmup must be a whole number, at least 1, got 0"),
        (UniformSampler(), {"batch_size": 0}, ValueError, "batch_size must be a whole number, at least 1, got 0"),
        (UniformSampler(), {"step": 3}, TypeError, "step must be a function of a batch, or None, got int"),
        (UniformSampler(unique=True), {}, ValueError, "cannot draw 500 distinct rows of 20"),
        (SequenceSampler(UniformSampler(), 7), {}, ValueError, "must be a multiple of burn_in"),
        (MinibatchSampler(), {}, TypeError, "PackedStorage and MinibatchSampler: this needs"),
        (NStepSampler(MinibatchSampler(), 2, 0.9), {}, TypeError, "PackedStorage and NStepSampler: this needs"),
        (RandomSampler(), {}, TypeError, "PackedStorage and RandomSampler"),
        (SequenceSampler(RandomSampler(), 5), {}, TypeError, "PackedStorage and SequenceSampler"),
    ],
)
def test_what_cannot_be_captured_is_refused_and_nothing_changes(device, sampler, kwargs, error, words):
    rb = buffer(sampler, device)
    before = torch.get_rng_state()
    with pytest.raises(error, match=words):
        rb.capture(**kwargs)()
    assert torch.equal(torch.get_rng_state(), before)
    assert rb.last_draw is None


def test_buffers_that_cannot_be_captured_are_refused():
    with pytest.raises(RuntimeError, match="empty storage"):
        ReplayBuffer(storage=PackedStorage(5), batch_size=3).capture()()
    with pytest.raises(ValueError, match="number of rows"):
        ReplayBuffer(storage=PackedStorage(5)).capture()
    with pytest.raises(TypeError, match="LazyTensorStorage"):
        ReplayBuffer(storage=LazyTensorStorage(5), batch_size=3).capture()()
