"""Captured steps draw by the law, and what changes between calls reaches them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlbuf_td import HindsightSampler, NStepSampler, ProportionalSampler, RankSampler, SequenceSampler, UniformSampler
from tests.capture.rows import NAMES, buffer, counted, data, reward_fn
from tests.catalogue import SAMPLERS
from tests.statistics import assert_follows, power


def test_every_call_draws_by_the_law_while_the_buffer_fills_and_wraps(device, captures):
    rb, calls = buffer(UniformSampler(), device, rows=5), 20
    captured = rb.capture()
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
        assert captured.is_captured == captures
    assert not torch.equal(captured()["x"].clone(), captured()["x"])


def test_a_unique_batch_larger_than_the_buffer_is_refused(device):
    rb = buffer(UniformSampler(unique=True), device, rows=7, batch_size=7)
    captured = rb.capture(warmup=1)
    assert sorted(captured()["x"].tolist()) == [*range(7)]
    rb.empty()
    rb.extend(data(4).to(device))
    before, drawn = torch.get_rng_state(), rb.last_draw
    with pytest.raises(ValueError, match="cannot draw 7 distinct rows of 4"):
        captured()
    assert torch.equal(torch.get_rng_state(), before)
    assert rb.last_draw is drawn
    rb.extend(data(3, 4).to(device))
    assert sorted(captured()["x"].tolist()) == [*range(7)]


@pytest.mark.parametrize("name", NAMES)
def test_replays_draw_what_a_buffer_without_graphs_draws(recorded, name):
    plain, rb = (buffer(SAMPLERS[name](20), torch.device("cpu"), rows=16, batch_size=16) for _ in range(2))
    captured = rb.capture(warmup=1)
    captured()
    draws: list[Any] = [plain.sample, rb.sample]
    if name in ("unique", "proportional", "rank"):  # the others draw a graph's random numbers in another way
        draws += [captured]
    for first in (16, 19, 30):  # while the buffer fills and wraps
        for each in (plain, rb):
            each.extend(data(3, first))
        drawn = []
        for draw in draws:
            torch.manual_seed(3)
            drawn.append(draw()["x"].clone())
        assert all(torch.equal(x, drawn[0]) for x in drawn)


@pytest.mark.parametrize(
    ("cls", "device"),
    [
        *((cls, device) for cls in (ProportionalSampler, RankSampler) for device in ("cpu", "torch")),
        pytest.param(ProportionalSampler, "cuda", marks=pytest.mark.cuda),
    ],
    indirect=["device"],
)
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
        assert_follows(counted(captured, 20, 12), probability.numpy())
        batch = captured()
        expected = (probability[batch["x"].cpu()] / probability.min()) ** -beta
        torch.testing.assert_close(batch["priority_weight"].cpu().double(), expected, rtol=1e-5, atol=0.0)
    assert rb.health()["weight_max_over_median"] >= 1.0


def test_a_loaded_state_reaches_the_next_call(device):
    rb = buffer(ProportionalSampler(20, stratified=False), device)
    captured = rb.capture(batch_size=50)
    captured()
    state = rb.sampler.state_dict()
    state["priorities"]["magnitude"][3:] = 0.0
    state["priorities"]["weight"][3:] = 0.0
    rb.sampler.load_state_dict(state)
    assert int(captured()["x"].max()) == 2


def test_how_goals_are_given_may_change(device):
    sampler = HindsightSampler(ProportionalSampler(20), reward_fn, her_ratio=1.0)
    captured = buffer(sampler, device, batch_size=20).capture(warmup=1)
    batch = captured()
    assert batch["relabeled"].all()
    assert torch.equal(batch["next", "reward"], batch["desired_goal"] * 10)
    sampler.only_finished, sampler.reward_fn = True, lambda batch: batch["desired_goal"][:, 0] * 20
    batch = captured()
    again = batch["relabeled"]
    assert torch.equal(again, batch["x"] < 14)  # the last trajectory has not ended
    assert torch.equal(batch["next", "reward"][again], batch["desired_goal"][again] * 20)
    sampler.her_ratio = 0.0
    assert not captured()["relabeled"].any()


def test_the_number_of_steps_and_the_discount_may_change(device):
    sampler = NStepSampler(HindsightSampler(UniformSampler(), reward_fn, her_ratio=0.0), 2, 0.5)
    rb = buffer(sampler, device, batch_size=20)
    captured = rb.capture(warmup=1)
    for gamma, n in ((0.5, 2), (0.25, 2), (0.25, 1)):
        sampler.gamma, sampler.n_steps = gamma, n
        batch = captured()
        x = batch["x"].float()
        more = (batch["x"] % 7 != 6) & (batch["x"] < 19) & (n > 1)
        assert torch.equal(batch["next", "reward"][:, 0], x + torch.where(more, gamma * (x + 1), 0.0))


@pytest.mark.parametrize("device", ["cpu", "torch", pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_sequences_follow_writes_to_the_storage(device):
    """They follow writes to the buffer as well: ``tests/composition/test_captured.py``."""
    rb = buffer(SequenceSampler(UniformSampler(), 3, burn_in=1, boundary="pad"), device, batch_size=80)
    captured = rb.capture(warmup=1)
    captured()
    rb.storage.set(range(20), data(20, first=3).to(device))
    window = captured().view(-1, 4)
    ends = (window["x"] % 7 == 6) | (window["index"] == 19)
    assert torch.equal(ends[:, 1:-1], ~window["mask"][:, 2:])
    assert not (ends[:, :-1] & window["mask"][:, :-1] & window["mask"][:, 1:]).any()


def test_strict_sequences_are_whole_or_left_out(device):
    rb = buffer(SequenceSampler(UniformSampler(), 5, boundary="strict"), device, batch_size=25)
    captured = rb.capture(warmup=1)
    for written in (20, 29):
        rb.extend(data(written - 20, 20).to(device)) if written > 20 else None
        batch = captured().view(-1, 5)
        whole = batch["mask"].all(1)
        assert (whole == batch["mask"].any(1)).all()
        assert whole.float().mean() > 0.8
        assert (batch["x"].diff(dim=1) == 1)[whole].all()
        assert (batch["x"][whole][:, :1] // 7 == batch["x"][whole] // 7).all()
