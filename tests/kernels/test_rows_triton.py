"""Rows and parts of rows by the GPU's twins: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rlbuf_td.kernels.dispatch import forced
from rlbuf_td.kernels.rows import copy_rows_, gather_rows

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(len(shape)))
    return (values > 100) if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("width", [1, 3, 24, 300, 2_100])
def test_gathered_rows_are_those_of_index_select(gpu, dtype, width):
    matrix = numbers((50, width), dtype).to(gpu)
    rows = torch.tensor([49, 0, 7, 7, 3], device=gpu)
    with forced("triton"):
        got = gather_rows(matrix, rows)
        none, every_other = gather_rows(matrix, rows[:0]), gather_rows(matrix, rows[::2])
    assert got.dtype is dtype
    assert torch.equal(got, matrix.index_select(0, rows))
    assert none.shape == (0, width)
    assert torch.equal(every_other, got[::2])


def test_rows_of_a_part_of_a_matrix_are_gathered(gpu):
    part = numbers((50, 40), torch.float32).to(gpu)[10:40, 3:16]
    rows = torch.tensor([29, 0, 5], device=gpu)
    with forced("triton"):
        assert torch.equal(gather_rows(part, rows), part.index_select(0, rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 300)])
def test_copied_rows_are_those_of_the_specification(gpu, dtype, shape):
    source, target = numbers((30, *shape), dtype).to(gpu), numbers((9, *shape), dtype).to(gpu).clone()
    rows = torch.arange(9, device=gpu) * 3 + 2
    mask = torch.arange(9, device=gpu) % 3 != 1
    expected = target.clone()
    with forced("torch"):
        copy_rows_(expected, source, rows, mask)
    with forced("triton"):
        copy_rows_(target, source, rows, mask)
    assert torch.equal(target, expected)


def test_columns_of_packed_rows_are_copied_and_nothing_beside_them(gpu):
    source, target = (numbers((size, 24), torch.uint8).to(gpu) for size in (20, 6))
    before, rows = target.clone(), torch.tensor([3, 19, 0, 4, 4, 8], device=gpu)
    mask = torch.tensor([True, True, False, True, False, True], device=gpu)
    with forced("triton"):
        copy_rows_(target.view(torch.float32)[:, 1:4], source.view(torch.float32)[:, 2:5], rows, mask)
    before[mask, 4:16] = source[rows[mask], 8:20]
    assert torch.equal(target, before)
