"""What draws are made of: segments of a batch, ordered samples without replacement, the
law of ranks."""

from __future__ import annotations

from functools import cache
from math import gcd

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbuf_td.kernels.draws import distinct_rows
from rlbuf_td.kernels.rank_order import HEAD, mass, rank_distribution, ranks_of_mass
from rlbuf_td.kernels.strata import masses, step_of
from tests.statistics import assert_follows

ONE = torch.ones((), dtype=torch.float64)


def segments(uniform: torch.Tensor) -> torch.Tensor:
    """Return the segment of each draw, found by brute force: which of the equal parts
    its mass lies in."""
    batch = len(uniform)
    positions = masses(uniform, ONE, step_of(batch, stratified=True))
    return (positions[:, None] >= torch.arange(1, batch) / batch).sum(1)


@pytest.mark.parametrize("batch", [*range(1, 20), 64, 100, 255, 256, 1_000])
def test_each_segment_is_drawn_from_once_where_its_uniform_number_says(batch):
    uniform = torch.rand(batch, dtype=torch.float64)
    step = step_of(batch, stratified=True)
    drawn = masses(uniform, 3 * ONE, step)
    assert (segments(uniform).sort().values == torch.arange(batch)).all()
    torch.testing.assert_close(
        drawn * batch / 3 - segments(uniform), uniform, rtol=0.0, atol=1e-9
    )
    assert gcd(step, batch) == 1


@pytest.mark.parametrize("batch", [2, 6, 16])
def test_every_place_of_a_batch_is_in_every_segment_equally_often(batch):
    drawn = torch.stack(
        [segments(torch.rand(batch, dtype=torch.float64)) for _ in range(4_000)]
    )
    for place in range(batch):
        assert_follows(
            drawn[:, place].bincount(minlength=batch), np.full(batch, 1 / batch)
        )


@pytest.mark.parametrize("batch", [32, 60, 64, 256, 1_000])
def test_a_part_of_a_batch_has_draws_from_everywhere(batch):
    uniform = torch.rand(batch, dtype=torch.float64)
    for parts in (2, 4):
        for part in segments(uniform).split(batch // parts):
            counts = (part * 4 // batch).bincount(minlength=4)
            assert (counts - len(part) / 4).abs().max() <= 3 + len(part) // 100


def shuffled(uniform: list[float], rows: int) -> list[int]:
    """Return the same by a shuffle that moves rows."""
    places = list(range(rows))
    for k, number in enumerate(uniform):
        other = k + int(number * (rows - k))
        places[k], places[other] = places[other], places[k]
    return places[: len(uniform)]


@given(st.integers(0, 80), st.integers(0, 2_000), st.integers(0, 2**16), st.booleans())
def test_rows_are_those_of_a_shuffle_that_moves_them(batch, more, seed, whole):
    rows = batch + more * (not whole)
    uniform = torch.rand(
        batch, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    uniform[::5] = 1 - 2**-53  # the largest number there is
    uniform[1::5] = 0.0
    expected = shuffled(uniform.tolist(), rows)
    assert distinct_rows(uniform, rows).tolist() == expected
    assert (
        distinct_rows(uniform, torch.tensor(float(rows), dtype=torch.float64)).tolist()
        == expected
    )


ALPHAS = [0.0, 0.3, 0.5, 0.7, 1.0 - 1e-9, 1.0, 1.0 + 1e-6, 1.5]
ROWS = 200_000


@cache
def exact(alpha: float) -> np.ndarray:
    """``H_1, H_2, ...`` in extended precision."""
    return np.cumsum(
        np.arange(1, ROWS + 1, dtype=np.longdouble) ** -np.longdouble(alpha)
    )


@pytest.mark.parametrize("alpha", ALPHAS)
def test_mass_is_the_sum_of_powers(alpha):
    ranks = torch.tensor(
        [1, 2, 7, HEAD - 1, HEAD, HEAD + 1, HEAD + 2, HEAD + 50, 5_000, 100_000, ROWS]
    )
    expected = exact(alpha)[ranks.numpy() - 1]
    np.testing.assert_allclose(
        mass(rank_distribution(alpha), ranks).numpy(),
        expected.astype(float),
        rtol=2e-14,
    )


@pytest.mark.parametrize("alpha", ALPHAS)
def test_ranks_of_mass_inverts_the_sum(alpha):
    law, rows = rank_distribution(alpha), torch.tensor(ROWS)
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(200_000, generator=generator, dtype=torch.float64) * mass(
        law, rows
    )
    expected = (
        np.searchsorted(exact(alpha).astype(np.float64), value.numpy(), side="right")
        + 1
    )
    different = int((ranks_of_mass(law, value, rows).numpy() != expected).sum())
    assert different <= 1  # a value may lie within rounding of an edge


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 1.5, 5.0])
@pytest.mark.parametrize("n", [1, 2, HEAD, HEAD + 1, ROWS])
def test_mass_at_either_end_gives_the_first_and_the_last_rank(alpha, n):
    law, rows = rank_distribution(alpha), torch.tensor(n)
    value = torch.stack(
        [torch.zeros((), dtype=torch.float64), mass(law, rows), 2 * mass(law, rows)]
    )
    first, *others = ranks_of_mass(law, value, rows).tolist()
    assert first == 1
    assert others == [n, n]
