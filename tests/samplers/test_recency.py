"""Recent rows more often: the law, on every path; settings, health and state."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from rlbuf_td import PackedStorage, RecencySampler, ReplayBuffer, RingWriter
from tests.backends import forced
from tests.catalogue import buffer_of
from tests.statistics import assert_follows, power

STEPS = 20


def buffer(sampler: Any, lanes: int, written: int, batch: int = 8_000, **kinds: Any) -> Any:
    rb = buffer_of(STEPS, sampler, lanes, writer=RingWriter(), batch_size=batch, **kinds)
    for first in range(0, written, 3):
        count = min(3, written - first)
        time = torch.arange(first, first + count)
        lead = [lanes, count] if lanes else [count]
        rb.extend(TensorDict({"time": time.expand(lead).clone()}, lead))
    return rb


def law(half_life: float, window: int | None, steps: int, lanes: int) -> torch.Tensor:
    """Return the probability of each (age, lane), by definition."""
    age = torch.arange(steps, dtype=torch.float64)
    weight = torch.where(age < (steps if window is None else window), 0.5 ** (age / half_life), 0.0)
    return (weight / weight.sum() / max(1, lanes)).repeat_interleave(max(1, lanes))


@pytest.mark.parametrize("path", ["numba", "torch"])
def test_the_shortest_half_life_draws_the_newest_step(path):
    with forced(path):
        rb = buffer(RecencySampler(5e-324), 2, 14, batch=8)
        assert (rb.sample()["time"] == 13).all()
        law = rb.sampler.probability(torch.arange(28), storage=rb.storage)
    assert law.tolist() == [0.0] * 26 + [0.5] * 2


@pytest.mark.parametrize("path", ["numba", "torch"])
@pytest.mark.parametrize(
    ("half_life", "window", "lanes", "written"),
    [(4.0, None, 3, 41), (inf, 6, 0, 57), (30.0, 13, 2, 14), (inf, None, 2, 20)],
)
def test_draws_follow_the_law_of_their_age(half_life, window, lanes, written, path):
    with forced(path):
        rb = buffer(RecencySampler(half_life, window), lanes, written)
        steps, cells, draws = min(written, STEPS), max(1, lanes), 50
        counts = torch.zeros(steps * cells)
        for batch in (rb.sample() for _ in range(draws)):
            lane = batch["index"][:, 1] if lanes else 0
            counts += torch.bincount((written - 1 - batch["time"]) * cells + lane, minlength=len(counts))
    wanted = law(half_life, window, steps, lanes)
    assert power(wanted[wanted > 0].numpy(), draws * 8_000, bias=0.02) > 0.97
    assert_follows(counts, wanted)
    by_row = rb.sampler.probability(torch.arange(len(rb)), storage=rb.storage)
    age = written - 1 - rb.storage[:]["time"].reshape(-1)
    lane = torch.arange(len(rb)) % cells
    torch.testing.assert_close(by_row, wanted[age * cells + lane])


@pytest.mark.parametrize(
    ("storage", "cls"), [(LazyTensorStorage, ReplayBuffer), (PackedStorage, TensorDictReplayBuffer)]
)
def test_in_torchrls_buffer_and_over_its_storage(storage, cls):
    rb = buffer(RecencySampler(window=4), 0, 33, 500, storage=storage, cls=cls)
    assert set(rb.sample()["time"].tolist()) == {29, 30, 31, 32}


def test_settings_change_by_schedulers_and_are_saved(tmp_path: Path):
    rb, other = buffer(RecencySampler(8.0, 20), 0, 33), buffer(RecencySampler(), 0, 5)
    schedulers = [LinearScheduler(rb, "window", 2.9, 9), LinearScheduler(rb, "half_life", 1.0, 7)]
    for k in range(9):
        for scheduler in schedulers:
            scheduler.step()
        assert rb.sampler.window == 18 - 2 * k  # fractions are rounded down
    assert set(rb.sample()["time"].tolist()) == {31, 32}
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    assert repr(other.sampler) == repr(rb.sampler) == "RecencySampler(half_life=1.0, window=2, max_age=None)"
    assert torch.equal(other.sample()["time"], rb.sample()["time"])
    other.load_state_dict(rb.state_dict())
    assert rb.health()["top_mass"] == pytest.approx(2 / 3)
