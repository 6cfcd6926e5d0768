"""Prioritized buffers on other devices than the CPU: torch operations alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer
from tests.backends import forced
from tests.samplers.rows import data

both = pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])


@pytest.fixture
def torch_form() -> Iterator[None]:
    with forced("torch"):
        yield


def buffer(sampler, rows: int = 20) -> ReplayBuffer:
    rb = ReplayBuffer(storage=PackedStorage(rows), sampler=sampler, batch_size=64)
    rb.extend(data(rows))
    return rb


def update(rb: ReplayBuffer, rows: list[int], td_errors: list[float]) -> None:
    rb.update_priority(torch.tensor(rows), torch.tensor(td_errors))


@both
def test_rows_with_bad_errors_keep_their_priority_and_health_counts_them(torch_form, cls):
    rb = buffer(cls(20))
    update(rb, [0, 1, 2], [5.0, 3.0, 4.0])
    update(rb, [0, 1, 2, -1], [torch.nan, 7.0, -torch.inf, torch.nan])
    assert rb.sampler.priority(torch.arange(3)).tolist() == [5.0, 7.0, 4.0]
    assert rb.health()["refused_priorities"] == 2.0
    update(rb, [3], [torch.inf])
    assert rb.health()["refused_priorities"] == 3.0
    assert rb.sampler.law.table.refused == 3


@both
def test_new_rows_enter_with_the_highest_magnitude_of_all_updates(torch_form, cls):
    rb = buffer(cls(20))
    assert rb.sampler.priority(torch.arange(20)).tolist() == [1.0] * 20
    rb.sampler.mark_update(torch.arange(4))
    update(rb, [0, 1], [0.25, -0.5])  # what new rows have been given is no error that was seen
    rb.extend(data(2))
    assert rb.sampler.priority(torch.arange(2)).tolist() == [0.5, 0.5]
    update(rb, [0], [0.125])
    update(rb, [1], [torch.nan])
    rb.extend(data(1))
    assert rb.sampler.priority(torch.tensor([2])).tolist() == [0.5]


@both
def test_what_was_seen_survives_a_saved_state_and_not_a_clearing(torch_form, cls):
    rb = buffer(cls(20))
    update(rb, [0], [8.0])
    other = buffer(cls(20))
    update(other, [0], [9.0])
    other.sampler.load_state_dict(rb.sampler.state_dict())
    assert float(other.sampler.default_priority) == 8.0
    update(other, [1], [0.5])
    assert float(other.sampler.default_priority) == 8.0
    other.empty()
    other.extend(data(1))
    update(other, [0], [0.5])
    assert float(other.sampler.default_priority) == 0.5


@both
def test_a_device_gives_the_batches_of_the_cpu(cls):
    batches = []
    for form in ("numba", "torch"):
        with forced(form):
            rb = buffer(cls(20))
            rb.set_rng(torch.Generator().manual_seed(3))
            rb.extend(data(7, first=20))
            for _ in range(3):
                batch = rb.sample()
                batch["td_error"] = batch["x"].double() % 5 + 0.5
                rb.update_tensordict_priority(batch)
            batches.append(batch)
    assert torch.equal(batches[0]["x"], batches[1]["x"])
    torch.testing.assert_close(batches[0]["priority_weight"], batches[1]["priority_weight"])
