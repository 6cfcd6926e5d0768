"""Loss-adjusted prioritized replay: priorities with a floor, on every path, and the identity of its paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import huber_loss

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer
from tests.backends import forced
from tests.statistics import assert_follows, power

ROWS, ALPHA = 40, 0.4


def lap(rows: int = ROWS, **settings: Any) -> ReplayBuffer:
    given: dict[str, Any] = {"alpha": ALPHA, "beta": 0.0, "eps": 0.0, "min_priority": 1.0}
    sampler = ProportionalSampler(rows, **given | settings)
    rb = ReplayBuffer(storage=PackedStorage(rows), sampler=sampler, batch_size=1_000)
    rb.extend(TensorDict({"x": torch.arange(rows)}, [rows]))
    return rb


def errors() -> list[float]:
    """Return errors on both sides of 1, of both signs, and 0."""
    return [*torch.linspace(-4.0, 3.0, ROWS - 1).sinh().div(3).tolist(), 0.0]


def pal(error: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return the prioritized approximation loss for each error."""
    large = error.abs() ** (1 + ALPHA) / (1 + ALPHA)
    return torch.where(error.abs() <= 1, error**2 / 2, large) / mean


def test_lap_has_the_expected_gradient_of_pal():
    """For a value that is to meet noisy targets, exactly."""
    rb, error = lap(), torch.tensor(errors(), dtype=torch.float64)
    rb.update_priority(torch.arange(ROWS), error)
    probability = rb.sampler.probability(torch.arange(ROWS))
    weight = error.abs().clamp(min=1) ** ALPHA
    torch.testing.assert_close(probability, weight / weight.sum())
    assert 5 < (error.abs() < 1).sum() < ROWS - 5
    for shift in (0.0, 0.7, -2.0):
        value = torch.tensor(shift, dtype=torch.float64, requires_grad=True)
        delta = value - (shift - error)  # whose value is the error that the priority was set from
        huber = huber_loss(delta, torch.zeros_like(delta), reduction="none")
        by_lap = torch.autograd.grad((probability * huber).sum(), value, retain_graph=True)[0]
        by_pal = torch.autograd.grad(pal(delta, weight.mean()).mean(), value)[0]
        torch.testing.assert_close(by_lap, by_pal, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("path", ["numba", "torch"])
def test_draws_follow_the_floored_law_without_importance_weights(path):
    with forced(path):
        rb = lap()
        rb.sampler.stratified = False
        rb.update_priority(torch.arange(ROWS), torch.tensor(errors()))
        counts, law = torch.zeros(ROWS), torch.tensor(errors()).double().abs().clamp(min=1) ** ALPHA
        for _ in range(400):
            batch = rb.sample()
            assert (batch["priority_weight"] == 1).all()
            counts += torch.bincount(batch["x"], minlength=ROWS)
    assert power((law / law.sum()).numpy(), 400_000, bias=0.02) > 0.99
    assert_follows(counts, law / law.sum())


def test_planned_updates_and_writes_have_the_floor():
    rb = lap()
    for _ in range(4):
        batch = rb.sample()
        batch["td_error"] = 0.01 * torch.randn(1_000)
        rb.update_tensordict_priority(batch)
        rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
        assert (rb.sampler.priority(torch.arange(ROWS)) == 1).all()
    assert rb.compiled.startswith("add, extend, sample")
    batch["td_error"] = torch.full((1_000,), float("nan"))


def test_rows_enter_with_a_floor_above_one():
    rb = lap(min_priority=2.5)
    for _ in range(3):
        rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
    assert (rb.sampler.priority(torch.arange(ROWS)) == 2.5).all()
    assert rb.sampler.default_priority == 2.5
