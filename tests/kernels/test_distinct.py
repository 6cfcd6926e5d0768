"""Ordered samples without replacement, of static shapes."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import perm

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbuf_td.kernels.distinct import append_distinct_, distinct_rows


def shuffled(uniform: list[float], rows: int) -> list[int]:
    """Return the same by a shuffle that moves rows."""
    places = list(range(rows))
    for k, number in enumerate(uniform):
        other = k + int(number * (rows - k))
        places[k], places[other] = places[other], places[k]
    return places[: len(uniform)]


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (4, 4), (5, 3), (6, 4), (6, 6), (9, 2)])
def test_each_ordered_selection_comes_from_exactly_one_choice_of_places(rows, batch, device):
    found: Counter[tuple[int, ...]] = Counter()
    for places in product(*(range(rows - k) for k in range(batch))):
        uniform = [(place + 0.5) / (rows - k) for k, place in enumerate(places)]
        found[tuple(distinct_rows(torch.tensor(uniform, dtype=torch.float64, device=device), rows).tolist())] += 1
    assert len(found) == perm(rows, batch)
    assert set(found.values()) == {1}


@given(st.integers(0, 80), st.integers(0, 2_000), st.integers(0, 2**16), st.booleans())
def test_rows_are_those_of_a_shuffle_that_moves_them(batch, more, seed, whole):
    rows = batch + more * (not whole)
    uniform = torch.rand(batch, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    uniform[::5] = 1 - 2**-53  # the largest number there is
    uniform[1::5] = 0.0
    expected = shuffled(uniform.tolist(), rows)
    assert distinct_rows(uniform, rows).tolist() == expected
    assert distinct_rows(uniform, torch.tensor(float(rows), dtype=torch.float64)).tolist() == expected


@pytest.mark.parametrize("number", [0.0, 0.999])
def test_the_longest_chains_are_followed_to_their_end(number):
    uniform = torch.full((1_000,), number, dtype=torch.float64)
    assert distinct_rows(uniform, 1_000).tolist() == shuffled(uniform.tolist(), 1_000)


VALUES = st.one_of(st.integers(0, 20), st.integers(0, 2**62), st.integers(0, 40).map(lambda k: k << 32))


@given(st.integers(0, 70), st.lists(st.lists(VALUES, max_size=80), min_size=1, max_size=4))
def test_values_are_appended_once_and_in_order_until_there_is_no_room(room, rounds):
    out, kept = torch.full((room + 1,), -7), 0
    wanted: list[int] = []
    for values in rounds:
        kept = append_distinct_(out[:room], kept, torch.tensor(values, dtype=torch.int64))
        wanted = [*dict.fromkeys([*wanted, *values])][:room]
        assert out[:kept].tolist() == wanted
        assert out[room] == -7
