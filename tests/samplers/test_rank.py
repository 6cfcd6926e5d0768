"""RankSampler: its law, and that its draws have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, RankSampler
from tests.statistics import assert_follows, power


def sampler_of(td_error: torch.Tensor, **settings: Any) -> RankSampler:
    sampler = RankSampler(len(td_error), **settings)
    sampler.update_priority(torch.arange(len(td_error)), td_error)
    return sampler


def filled(n: int) -> PackedStorage:
    storage = PackedStorage(n)
    storage.set(torch.arange(n), TensorDict({"x": torch.arange(n)}, [n]))
    return storage


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
    # A segment that ends where a rank ends does not reach the next one.
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


def test_ties_are_ranked_by_row(device: torch.device) -> None:
    sampler = sampler_of(torch.tensor([1.0, 3.0, -1.0, -3.0, 2.0]), alpha=0.7)
    assert sampler.rank(torch.arange(5)).tolist() == [4, 1, 5, 2, 3]


def test_rows_without_a_priority_have_rank_and_probability_zero() -> None:
    sampler = RankSampler(5)
    sampler.update_priority(torch.tensor([3, 1]), torch.tensor([1.0, 2.0]))
    assert sampler.rank(torch.arange(5)).tolist() == [0, 1, 0, 2, 0]
    assert (sampler.probability(torch.arange(5)) > 0).tolist() == [False, True, False, True, False]
    assert sampler.priority(torch.arange(5)).tolist() == [-1.0, 2.0, -1.0, 1.0, -1.0]


DRAWS = 600_000
CELLS = 48


def cells_of(alpha: float, n: int) -> np.ndarray:
    """Return a cell for each rank, all of about equal mass."""
    law = law_of(alpha, n)
    return np.minimum(((law.cumsum() - law / 2) * CELLS).astype(int), CELLS - 1)


def expected_in_segments(alpha: float, n: int, k: int) -> np.ndarray:
    """``[k, CELLS]``: the probability that the draw from segment ``j`` falls into a cell."""
    edges = np.append(0.0, law_of(alpha, n).cumsum())
    expected = np.zeros((k, CELLS))
    cells = cells_of(alpha, n)
    for j in range(k):
        inside = np.diff(edges.clip(j / k, (j + 1) / k)) * k
        np.add.at(expected[j], cells, inside)
    return expected


#: Rows and exponents: one row, fewer rows than a batch, the table of the law and beyond it, and where alpha is special.
@pytest.mark.parametrize(("n", "alpha"), [(1, 0.7), (13, 0.5), (1000, 0), (1025, 1.0), (100_000, 0.7), (100_000, 1.5)])
@pytest.mark.parametrize("k", [24, None], ids=["stratified", "independent"])
def test_draws_have_the_law(n: int, alpha: float, k: int | None) -> None:
    """Stratified draws have that of their segment."""
    torch.manual_seed(0)
    batch, storage = k or 20_000, filled(n)
    sampler = sampler_of(torch.randn(n), alpha=alpha, stratified=k is not None)
    rows = torch.stack([sampler.draw(storage, batch)[0] for _ in range(DRAWS // batch)])
    ranks = sampler.rank(rows.flatten()).view(rows.shape).sort(1).values  # by segment, if each row is of another one
    cells = cells_of(alpha, n)[ranks.numpy() - 1]
    columns = cells.T if k else [cells.flatten()]
    observed = np.concatenate([np.bincount(column, minlength=CELLS) for column in columns])
    expected = expected_in_segments(alpha, n, k or 1).flatten() / len(columns)
    assert n < 1_000 or power(expected[expected > 0], DRAWS, bias=0.02) > 0.99
    assert_follows(observed, expected)
