"""Draws of RankSampler against its law: by brute force over all uniform numbers, and by chi-square."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import RankSampler
from rlbuf_td.kernels.rank_order.law import rank_law
from tests.samplers.test_rank import buffer, law_of, sampler_of
from tests.statistics import assert_follows, power

DRAWS = 600_000
CELLS = 48
#: Rows and exponents: one row, fewer rows than a batch, the table of the law and beyond it, and where alpha is special.
LAWS = [(1, 0.7), (13, 0.5), (1_000, 0.0), (1_025, 1.0), (100_000, 0.7), (100_000, 1.5)]


def picked(sampler: RankSampler, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights that the sampler draws by given uniform numbers."""
    law = rank_law(sampler.alpha, torch.device("cpu"))
    drawn = sampler.order.draw(law, uniform, stratified=sampler.stratified, beta=sampler.beta, norm=sampler.weight_norm)
    assert drawn is not None
    return drawn


def drawn_by_grid(sampler: RankSampler, n: int, k: int, points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights of ``points`` batches of ``k``: each segment at the same ``points`` places, evenly spread."""
    rows, weights = [], []
    for u in (torch.arange(points, dtype=torch.float64) + 0.5) / points:
        row, weight = picked(sampler, u.expand(k).contiguous())
        rows.append(row)
        weights.append(weight)
    return torch.stack(rows), torch.stack(weights)


@pytest.mark.parametrize(("alpha", "k"), [(0.7, 1), (1.5, 3), (0.7, 7), (0.0, 64), (0.7, 64)])
def test_expected_count_of_every_row_in_a_stratified_batch_is_k_times_its_probability(alpha: float, k: int) -> None:
    n, points = 50, 4_000
    torch.manual_seed(0)
    sampler = sampler_of(torch.randn(n), alpha=alpha)
    rows, _ = drawn_by_grid(sampler, n, k, points)
    count = rows.reshape(-1).bincount(minlength=n).double() / points
    expected = k * sampler.probability(torch.arange(n))
    # A row's mass is an interval in each segment that it reaches, counted on the grid to within a point at either end.
    assert ((count - expected).abs() <= 2 * (expected.ceil() + 1) / points).all()


@pytest.mark.parametrize("stratified", [True, False])
def test_weighted_averages_are_unbiased(stratified: bool) -> None:
    n, k, points = 50, 7, 4_000
    torch.manual_seed(0)
    sampler = sampler_of(torch.randn(n), beta=1.0, weight_norm=None, stratified=stratified)
    rows, weights = drawn_by_grid(sampler, n, k, points)
    value = torch.randn(n, dtype=torch.float64)
    average = (weights * value[rows]).mean()
    torch.testing.assert_close(average, value.mean(), rtol=0.0, atol=2e-3)
    torch.testing.assert_close(weights.double().mean(), torch.ones((), dtype=torch.float64), rtol=0.0, atol=2e-3)


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


def observed_cells(sampler: RankSampler, alpha: float, n: int, k: int, seed: int) -> np.ndarray:
    """``[k, CELLS]`` counts of ``DRAWS`` draws in batches of ``k``, by the order of their ranks in the batch."""
    generator = torch.Generator().manual_seed(seed)
    cell_of_rank, rank_of_row = cells_of(alpha, n), sampler.rank(torch.arange(n)).numpy()
    batches = DRAWS // k
    uniform = torch.rand(batches, k, dtype=torch.float64, generator=generator)
    rows = torch.stack([picked(sampler, u)[0] for u in uniform]).numpy()
    ranks = np.sort(rank_of_row[rows], axis=1)  # by segment, if each row is from another one
    return np.stack([np.bincount(cell_of_rank[ranks[:, j] - 1], minlength=CELLS) for j in range(k)])


@pytest.mark.parametrize(("n", "alpha"), LAWS)
@pytest.mark.parametrize("stratified", [True, False])
def test_draws_have_the_law(n: int, alpha: float, stratified: bool) -> None:
    """Stratified ones have that of their segment."""
    k = 24 if stratified else 20_000
    torch.manual_seed(0)
    sampler = sampler_of(torch.randn(n), alpha=alpha, stratified=stratified)
    observed = observed_cells(sampler, alpha, n, k, seed=n)
    if not stratified:
        observed = observed.sum(0, keepdims=True)
    expected = expected_in_segments(alpha, n, k if stratified else 1).flatten() / len(observed)
    assert_follows(observed.flatten(), expected)


@pytest.mark.parametrize("stratified", [True, False])
def test_draws_keep_the_law_through_wraps_and_a_hundred_thousand_updates(stratified: bool) -> None:
    n, alpha = 1_000, 0.7
    rb = buffer(n, batch_size=100, alpha=alpha, stratified=stratified)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        index = torch.randint(n, (500,), generator=generator)
        rb.update_priority(index, torch.randn(500, generator=generator))
        rb.extend(TensorDict({"x": torch.arange(37)}, [37]))
    k = 24 if stratified else 20_000
    observed = observed_cells(rb.sampler, alpha, n, k, seed=1)
    if not stratified:
        observed = observed.sum(0, keepdims=True)
    expected = expected_in_segments(alpha, n, k if stratified else 1).flatten() / len(observed)
    assert power(expected[expected > 0], DRAWS, bias=0.02) > 0.99
    assert_follows(observed.flatten(), expected)
