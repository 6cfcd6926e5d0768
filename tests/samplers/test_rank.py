"""RankSampler: its law, and its place in buffers; its statistics are in test_rank_statistics.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, RankSampler, ReplayBuffer


def buffer(n: int, batch_size: int = 32, rows: int | None = None, **settings: Any) -> ReplayBuffer:
    """Return a buffer of capacity ``n`` with ``rows`` rows (default: full) whose field ``x`` is the row's number."""
    rb = ReplayBuffer(storage=PackedStorage(n), sampler=RankSampler(n, **settings), batch_size=batch_size)
    rb.extend(TensorDict({"x": torch.arange(rows or n)}, [rows or n]))
    return rb


def sampler_of(td_error: torch.Tensor, **settings: Any) -> RankSampler:
    sampler = RankSampler(len(td_error), **settings)
    sampler.update_priority(torch.arange(len(td_error)), td_error)
    return sampler


def law_of(alpha: float, n: int) -> np.ndarray:
    weight = np.arange(1, n + 1, dtype=np.float64) ** -alpha
    return weight / weight.sum()


def test_golden_values_of_seven_rows_and_three_segments() -> None:
    sampler = sampler_of(torch.tensor([7.0, 6, 5, 4, 3, 2, 1]), alpha=0.5)
    expected = torch.tensor([1, 1.707, 2.284, 2.784, 3.232, 3.640, 4.018], dtype=torch.float64)
    torch.testing.assert_close(sampler.cumulative(7), expected, rtol=0.0, atol=5e-4)
    # A third of 4.018 is 1.339, in the mass of rank 2; two thirds are 2.679, in that of rank 4.
    assert sampler.segments(3).tolist() == [[1, 2], [2, 4], [4, 7]]
    assert sampler.segments(1).tolist() == [[1, 7]]


def test_a_segment_that_ends_where_a_rank_ends_does_not_reach_the_next() -> None:
    assert sampler_of(torch.ones(4), alpha=0.0).segments(2).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 1.0, 1.5])
def test_segments_follow_the_number_of_rows_and_cover_every_rank(alpha: float) -> None:
    sampler = RankSampler(5_000, alpha=alpha)
    for rows in (1, 5, 100, 5_000):
        sampler.mark_update(torch.arange(rows))
        for k in (1, 2, 7, 256):
            segments = sampler.segments(k)
            assert segments.shape == (k, 2)
            assert segments[0, 0] == 1
            assert segments[-1, 1] == rows
            gap = segments[1:, 0] - segments[:-1, 1]
            assert ((gap == 0) | (gap == 1)).all()
            total = law_of(alpha, rows).cumsum()
            inside = total[segments[:, 1].numpy() - 1] >= (np.arange(k) + 1) / k - 1e-9
            assert inside.all()


def test_segments_need_rows() -> None:
    with pytest.raises(RuntimeError, match="no row has a priority"):
        RankSampler(4).segments(2)
    with pytest.raises(ValueError, match="at least 1 segment, got k=0"):
        sampler_of(torch.ones(4)).segments(0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("n", [1, 2, 1_000, 3_000])
def test_probability_is_the_power_of_the_rank(alpha: float, n: int) -> None:
    torch.manual_seed(0)
    td_error = torch.randn(n)
    sampler = sampler_of(td_error, alpha=alpha)
    order = torch.sort(td_error.abs(), descending=True, stable=True).indices
    assert torch.equal(sampler.rank(order), torch.arange(1, n + 1))
    expected = torch.from_numpy(law_of(alpha, n))
    torch.testing.assert_close(sampler.probability(order), expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(sampler.priority(order), td_error.abs()[order].double(), rtol=0.0, atol=0.0)


def test_rows_without_a_priority_have_rank_and_probability_zero() -> None:
    sampler = RankSampler(5)
    sampler.update_priority(torch.tensor([3, 1]), torch.tensor([1.0, 2.0]))
    assert sampler.rank(torch.arange(5)).tolist() == [0, 1, 0, 2, 0]
    assert (sampler.probability(torch.arange(5)) > 0).tolist() == [False, True, False, True, False]
    assert sampler.priority(torch.arange(5)).tolist() == [-1.0, 2.0, -1.0, 1.0, -1.0]


def test_alpha_zero_is_uniform_with_weights_of_one() -> None:
    rb = buffer(50, alpha=0.0)
    rb.update_priority(torch.arange(50), torch.arange(50.0))
    torch.testing.assert_close(rb.sampler.probability(torch.arange(50)), torch.full((50,), 0.02, dtype=torch.float64))
    assert (rb.sample()["priority_weight"] == 1.0).all()


def test_scaling_all_td_errors_changes_nothing() -> None:
    torch.manual_seed(0)
    td_error = torch.randn(500)
    batches = []
    for scale in (1.0, -1.0, 2.0**-20, 2.0**40):
        rb = buffer(500, batch_size=64)
        rb.update_priority(torch.arange(500), scale * td_error)
        torch.manual_seed(1)
        batches.append(rb.sample())
    for batch in batches[1:]:
        assert (batch == batches[0]).all()


def test_one_outlier_changes_nothing_but_its_own_rank() -> None:
    torch.manual_seed(0)
    sampler = sampler_of(torch.randn(500))
    before = sampler.rank(torch.arange(500))
    sampler.update_priority(123, 1e30)
    after = sampler.rank(torch.arange(500))
    assert after[123] == 1
    others = torch.arange(500) != 123
    assert torch.equal(after[others], before[others] + (before[others] < before[123]))


def test_new_rows_enter_with_the_highest_magnitude_seen() -> None:
    rb = buffer(6, rows=2)
    assert rb.sampler.priority([0, 1]).tolist() == [1.0, 1.0]
    rb.update_priority(torch.tensor([0, 1]), torch.tensor([-5.0, 2.0]))
    rb.update_priority(torch.tensor([0]), torch.tensor([0.1]))
    rb.add(TensorDict({"x": torch.tensor(2)}, []))
    rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
    assert rb.sampler.priority(torch.arange(6)).tolist() == pytest.approx([0.1, 2.0, 5.0, 5.0, 5.0, 5.0])
    assert rb.sampler.rank(torch.arange(6)).tolist() == [6, 5, 1, 2, 3, 4]
    rb.extend(TensorDict({"x": torch.arange(1)}, [1]))  # overwrites row 0
    assert rb.sampler.rank(torch.arange(6)).tolist() == [1, 6, 2, 3, 4, 5]


def test_setting_alpha_changes_the_law_at_once() -> None:
    sampler = sampler_of(torch.tensor([3.0, 2.0, 1.0]), alpha=1.0)
    sampler.alpha = np.float32(2.0)
    expected = torch.tensor([1.0, 1 / 4, 1 / 9], dtype=torch.float64) / (49 / 36)
    torch.testing.assert_close(sampler.probability(torch.arange(3)), expected)


def test_rows_that_the_sampler_was_never_told_of_are_an_error() -> None:
    storage = PackedStorage(4)
    storage.set(torch.arange(4), TensorDict({"x": torch.arange(4)}, [4]))
    with pytest.raises(RuntimeError, match="no row has a priority"):
        RankSampler(4).sample(storage, 2)
