"""What captured steps learn: priorities, counts, and what other threads do meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest
import torch
from tensordict import TensorDictBase

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer, UniformSampler
from rlbuf_td.diagnostics.health import ReplayCount
from rlbuf_td.storages.indexing import attached_or_new
from tests.capture.rows import buffer, data
from tests.catalogue import SAMPLERS
from tests.graphs import RecordedGraph


@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_a_step_learns_and_updates_the_priorities_of_what_it_saw(device, captures, cls):
    rb = buffer(cls(20), device)
    seen = torch.zeros(20, dtype=torch.int64, device=device)

    def step(batch: TensorDictBase) -> torch.Tensor:
        seen.index_add_(0, batch["x"], torch.ones_like(batch["x"]))
        batch["td_error"] = batch["x"] + 1.0
        return batch["x"].float().mean()

    captured = rb.capture(step, batch_size=64, warmup=1)
    assert len({float(captured()) for _ in range(4)}) > 1
    assert int(seen.sum()) == 64 * (4 + captures)
    priority = rb.sampler.priority(torch.arange(20, device=device)).cpu()
    drawn = (seen > 0).cpu()
    assert torch.equal(priority[drawn], torch.arange(1.0, 21.0, dtype=torch.float64)[drawn])
    assert (priority[~drawn] == 1.0).all()
    if cls is ProportionalSampler:
        assert float(rb.sampler.default_priority) == float(priority.max())


@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_a_buffer_that_is_emptied_begins_anew(device, cls):
    rb, errors = buffer(cls(20), device), torch.empty(50, device=device)
    captured = rb.capture(lambda batch: batch.set("td_error", errors), batch_size=50)
    for error in (9.0, 0.5):
        errors.fill_(error)
        captured()
        assert float(rb.sampler.default_priority) == error
        rb.empty()
        rb.extend(data(20).to(device))


def test_a_batch_without_a_step_may_update_priorities_later(device):
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


@pytest.mark.parametrize("name", ["uniform", "unique", "proportional", "rank"])
def test_replays_are_counted_and_health_looks_at_the_last_one(device, captures, name):
    rb = buffer(SAMPLERS[name](20), device, batch_size=16, count_replays=True)
    captured = rb.capture(warmup=2)
    first = captured()["x"].clone()
    counts = attached_or_new(rb.storage, ReplayCount).counts()
    assert int(counts.sum()) == 16 * (1 + 2 * captures)
    assert (counts[first] > 0).all()
    for calls in (1, 2, 3):
        before = counts.clone()
        x = captured()["x"].clone()
        assert torch.equal(counts - before, (x % 20).bincount(minlength=20))
        report = rb.health()
        assert report["age_max"] == float((19 + calls - 1 - x).max())
        assert ("effective_share" in report) == (name in ("proportional", "rank"))
        rb.extend(data(1, 19 + calls).to(device))
        assert int(counts[calls - 1]) == 0


def test_errors_that_cannot_be_given_back_are_refused(device):
    rb = buffer(ProportionalSampler(20), device, batch_size=8)
    with pytest.raises(KeyError, match="no 'index'"):
        rb.capture(lambda batch: batch.set("td_error", batch["x"] + 1.0).pop("index"), warmup=1)()
    assert (rb.sampler.priority(torch.arange(20, device=device)) == 1.0).all()


def test_on_the_cpu_rows_replaced_during_a_step_keep_their_priority():
    rb = buffer(ProportionalSampler(20), torch.device("cpu"), batch_size=200)
    begun, written = Event(), Event()

    def write() -> None:
        assert begun.wait(180)
        rb.extend(data(5, 20))
        written.set()

    def step(batch: TensorDictBase) -> torch.Tensor:
        begun.set()
        assert written.wait(180), "the writer waits for the step"
        batch["td_error"] = torch.full((200,), 3.0)
        return batch["x"].clone()

    writer = Thread(target=write)
    writer.start()
    x = rb.capture(step)()
    writer.join()
    replaced = torch.arange(20) < 5
    assert torch.equal(rb.sampler.priority(torch.arange(20)), torch.where(replaced, 1.0, 3.0).double())
    assert rb.health()["stale_updates"] == int((x < 5).sum()) > 0


def test_other_threads_wait_only_while_a_graph_is_launched(recorded, monkeypatch):
    rb = buffer(UniformSampler(), torch.device("cpu"), batch_size=4)
    replay, free = RecordedGraph.replay, []

    def look() -> None:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(rb.storage.lock.acquire, blocking=False).result())

    def look_and_replay(graph: RecordedGraph) -> None:
        look()
        replay(graph)

    monkeypatch.setattr(RecordedGraph, "replay", look_and_replay)
    rb.capture(lambda batch: look(), warmup=1)()
    look()
    assert free == [False] * 4 + [True]  # warm-up, two captures, the replay, and then
