"""The law of ranks against sums in extended precision."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from rlbuf_td.kernels.rank_order.law import HEAD, mass, rank_law, ranks_of_mass

ALPHAS = [0.0, 0.3, 0.5, 0.7, 1.0 - 1e-9, 1.0, 1.0 + 1e-6, 1.5]
ROWS = 1_000_000


@cache
def exact(alpha: float) -> np.ndarray:
    """``H_1, H_2, ...`` in extended precision."""
    return np.cumsum(np.arange(1, ROWS + 1, dtype=np.longdouble) ** -np.longdouble(alpha))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_mass_is_the_sum_of_powers(alpha: float) -> None:
    ranks = torch.tensor([1, 2, 7, HEAD - 1, HEAD, HEAD + 1, HEAD + 2, HEAD + 50, 5_000, 100_000, ROWS])
    expected = exact(alpha)[ranks.numpy() - 1]
    np.testing.assert_allclose(mass(rank_law(alpha), ranks).numpy(), expected.astype(float), rtol=2e-14)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_ranks_of_mass_inverts_the_sum(alpha: float) -> None:
    law, rows = rank_law(alpha), torch.tensor(ROWS)
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(200_000, generator=generator, dtype=torch.float64) * mass(law, rows)
    expected = np.searchsorted(exact(alpha).astype(np.float64), value.numpy(), side="right") + 1
    different = int((ranks_of_mass(law, value, rows).numpy() != expected).sum())
    assert different <= 1  # a value may lie within rounding of an edge


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 1.5, 5.0])
@pytest.mark.parametrize("n", [1, 2, HEAD, HEAD + 1, ROWS])
def test_mass_at_either_end_gives_the_first_and_the_last_rank(alpha: float, n: int) -> None:
    law, rows = rank_law(alpha), torch.tensor(n)
    value = torch.stack([torch.zeros((), dtype=torch.float64), mass(law, rows), 2 * mass(law, rows)])
    first, *others = ranks_of_mass(law, value, rows).tolist()
    assert first == 1
    assert others == [n, n]
