"""Recent rows more often: the law, on every path; settings, health and state."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from rlbuf_td import PackedStorage, RecencySampler, ReplayBuffer, ReservoirWriter, RingWriter, SchemaError
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
@pytest.mark.parametrize("age_key", [None, "time"])
def test_the_shortest_half_life_draws_the_newest_step(age_key, path):
    with forced(path):
        rb = buffer(RecencySampler(5e-324, age_key=age_key), 2, 14, batch=8)
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
    assert (
        repr(other.sampler) == repr(rb.sampler) == "RecencySampler(half_life=1.0, window=2, max_age=None, age_key=None)"
    )
    assert torch.equal(other.sample()["time"], rb.sample()["time"])
    other.load_state_dict(rb.state_dict())
    assert rb.health()["top_mass"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"half_life": 0.0}, "half_life must be a positive number of time steps, or infinite, got 0.0"),
        ({"half_life": float("nan")}, "half_life must be"),
        ({"window": 0}, "window must be a whole number, at least 1"),
        ({"window": 0.5}, "window must be a whole number, at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        RecencySampler(**settings)
    sampler = RecencySampler(3.0, 4)
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict(sampler.state_dict() | settings)
    assert (sampler.half_life, sampler.window) == (3.0, 4)


@pytest.mark.parametrize("path", ["numba", "torch"])
@pytest.mark.parametrize(("half_life", "window", "lanes"), [(2.0, None, 2), (inf, 3, 0), (1.5, 4, 0)])
def test_draws_follow_the_law_of_policy_age_whatever_the_order_of_rows(half_life, window, lanes, path):
    versions = torch.randint(8, (STEPS, max(1, lanes)), generator=torch.Generator().manual_seed(1))
    with forced(path):
        rb = buffer(RecencySampler(half_life, window, age_key="policy_version"), lanes, 0)
        for version in versions.split(1):  # each write changes the law, and is followed by a draw
            version = version.t() if lanes else version[0]
            rb.extend(TensorDict({"policy_version": version.clone()}, version.shape))
            drawn = rb.sample()["policy_version"]
            assert window is None or int(drawn.min()) > int(rb.storage[:]["policy_version"].max()) - window
        index = torch.cat([rb.sample()["index"] for _ in range(50)])
    flat = index if not lanes else index @ torch.tensor([lanes, 1])
    age = (versions.max() - versions).flatten().double()
    weight = torch.where(age < (window or inf), 0.5 ** (age / half_life), 0.0)
    law = weight / weight.sum()
    assert power(law[law > 0].numpy(), 50 * 8_000, bias=0.02) > 0.97
    assert_follows(torch.bincount(flat, minlength=len(law)), law)
    torch.testing.assert_close(rb.sampler.probability(torch.arange(len(rb)), storage=rb.storage), law)


def test_policy_ages_that_are_written_back_count():
    rb = ReplayBuffer(storage=PackedStorage(4), sampler=RecencySampler(window=1, age_key="version"), batch_size=8)
    rb.extend(TensorDict({"version": torch.tensor([0, 0, 0, 5])}, [4]))
    now = rb.storage.clock.now
    assert set(rb.sample()["index"].tolist()) == {3}
    update = TensorDict({"version": torch.tensor([9]), "index": torch.tensor([1])}, [1])
    assert rb.write_back(update, ["version"], sampled_at=now) == 1
    assert set(rb.sample()["index"].tolist()) == {1}


def test_policy_age_needs_no_order_but_one_number_per_row():
    versions = TensorDict(
        {"policy_version": torch.arange(30), "x": torch.zeros(30, 2), "next": {"x": torch.zeros(30, 2)}}, [30]
    )
    rb = buffer(RecencySampler(window=1, age_key="policy_version"), 0, 0, 8)
    rb.set_writer(ReservoirWriter())
    rb.extend(versions)
    assert (rb.sample()["policy_version"] == rb.storage[:]["policy_version"].max()).all()
    rb.set_sampler(RecencySampler(age_key="x"))
    with pytest.raises(SchemaError, match=r"age_key='x' must name one number per row, .*: torch.float32 of shape \(2"):
        rb.sample()
    for key in (("collector", "policy_version"), "next"):
        rb.set_sampler(RecencySampler(age_key=key))
        with pytest.raises(SchemaError, match="must name one number per row, stored in the row: no such entry"):
            rb.sample()


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("settings", [{"window": 1}, {"half_life": 2.0}], ids=str)
def test_policy_ages_that_are_no_numbers_are_refused(bad, settings):
    rb = ReplayBuffer(storage=PackedStorage(3), sampler=RecencySampler(**settings, age_key="age"), batch_size=2)
    rb.extend(TensorDict({"age": torch.tensor([1.0, bad, 2.0])}, [3]))
    with pytest.raises(SchemaError, match="age_key='age' holds NaN or infinite numbers"):
        rb.sample()


def test_an_empty_buffer_is_refused():
    with pytest.raises(RuntimeError, match="empty storage: extend the buffer first"):
        buffer(RecencySampler(), 0, 0).sample()
