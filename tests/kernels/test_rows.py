"""Copies of masked rows between columns, against torch's indexing."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from rlbuf_td.kernels.rows import put_rows_


@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "strided"])
def test_masked_rows_are_copied(is_dense):
    dtypes = torch.bool, torch.uint8, torch.float32, torch.float64
    for case in product([(), (1,), (3,), (2, 5)], dtypes, (0, 1, 64)):
        check(*case, is_dense)


def check(shape, dtype, size, is_dense):
    generator = torch.Generator().manual_seed(size)
    wide = torch.randint(2, (100, 2, *shape), generator=generator).to(dtype)
    column = wide[:, 0].clone() if is_dense else wide[:, 0]
    rows, mask = torch.randint(100, (size,), generator=generator), torch.rand(size, generator=generator) < 0.5
    target = torch.randint(2, (size, *shape), generator=generator).to(dtype)
    expected = target.clone()
    expected[mask] = column[rows[mask]]
    put_rows_(target, column, rows, mask)
    assert torch.equal(target, expected)
    strided = torch.zeros(size, 2, *shape, dtype=dtype)[:, 0]
    put_rows_(strided, column, rows, mask)
    assert torch.equal(strided[mask], column[rows[mask]])
