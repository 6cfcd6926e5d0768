"""Importance weights that stay small are reported once."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
)
from rlbuf_td.samplers import weight_watch
from rlbuf_td.samplers.weight_watch import WeightWatch

ROWS = 1_000


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Look at every second batch, so that 20 batches do for 1,000."""
    monkeypatch.setattr(weight_watch, "EVERY", 2)


def buffer(sampler, smallest: float) -> ReplayBuffer:
    """Return a buffer whose TD errors are 1, but for the smallest one of one row."""
    rb = ReplayBuffer(storage=PackedStorage(ROWS), sampler=sampler, batch_size=8)
    done = torch.zeros(ROWS, 1, dtype=torch.bool)
    outcome = {"reward": torch.ones(ROWS, 1), "done": done}
    index = rb.extend(TensorDict({"next": outcome}, [ROWS]))
    td_error = torch.ones(ROWS)
    td_error[0] = smallest
    rb.update_priority(index, td_error)
    return rb


def draw(rb: ReplayBuffer, batches: int) -> int:
    """Draw batches, and return how many warnings there were."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(batches):
            rb.sample()
    return len(caught)


def test_a_row_with_a_tiny_error_is_reported_once_after_a_thousand_batches(device):
    rb = buffer(ProportionalSampler(ROWS), 0.0)
    assert rb.sample()["priority_weight"].mean() < 0.1
    assert draw(rb, 18) == 0
    with pytest.warns(RuntimeWarning, match='weight_norm="batch"'):
        rb.sample()
    assert draw(rb, 100) == 0


def test_draws_within_wrappers_count(device):
    rb = buffer(NStepSampler(ProportionalSampler(ROWS), 3, 0.99), 0.0)
    assert draw(rb, 40) == 1


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: ProportionalSampler(ROWS, weight_norm="batch"),
        lambda: ProportionalSampler(ROWS, weight_norm=None),
        lambda: ProportionalSampler(ROWS, beta=0.0),
        lambda: RankSampler(ROWS),
    ],
)
def test_other_weights_are_not_reported(sampler, device):
    assert draw(buffer(sampler(), 0.0), 100) == 0


def test_usual_errors_are_not_reported(device):
    assert draw(buffer(ProportionalSampler(ROWS), 0.5), 100) == 0


def test_one_mean_of_another_size_begins_the_count_anew():
    watch = WeightWatch()
    small, usual = torch.full([8], 0.05), torch.full([8], 0.5)
    for weight in [small] * 19 + [usual] * 2 + [small] * 18:
        watch.see(weight)
    assert watch.small_means == 9


def test_a_copy_starts_anew():
    watch = WeightWatch()
    watch.see(torch.full([8], 0.05))
    assert copy.deepcopy(watch).batches == 0
