"""The rank order's GPU twins in lockstep with its specification: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rlbuf_td.kernels.dispatch import forced
from rlbuf_td.kernels.rank_order.law import rank_law
from rlbuf_td.kernels.rank_order.sorted import SortedOrder
from tests.kernels.orders import empty
from tests.statistics import assert_follows, power


@pytest.mark.parametrize("one_program", [16, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_leave_what_the_specification_leaves(gpu, monkeypatch, one_program, dtype):
    monkeypatch.setattr("rlbuf_td.kernels.sum_tree.duplicates_cuda.ONE_PROGRAM", one_program)
    order, expected = SortedOrder(empty(40, gpu)), SortedOrder(empty(40))
    generator = torch.Generator().manual_seed(0)
    for size in (1, 9, 300):
        index = torch.randint(-1, 41, (size,), generator=generator)
        td_error = torch.randn(size, generator=generator, dtype=torch.float64).mul_(60).exp_()
        td_error[torch.rand(size, generator=generator) < 0.1] = torch.nan
        td_error = (td_error * torch.randint(-1, 2, (size,), generator=generator)).to(dtype)
        with forced("triton"):
            largest = order.update_(index.to(gpu), td_error.to(gpu), 40)
        with forced("torch"):
            expected_largest = expected.update_(index, td_error, 40)
        assert torch.equal(order.magnitude.cpu(), expected.magnitude)
        assert largest is not None
        assert largest == expected_largest
        assert int(order.refused) == int(expected.refused)
        assert (order.on_device.claims == -1).all()
    assert int(order.refused) > 0


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 1.0 + 1e-9, 2.5])
@pytest.mark.parametrize("norm", ["buffer", "batch", None])
@pytest.mark.parametrize(("rows", "stratified"), [(1, True), (700, False), (5_000, True), (5_000, False)])
def test_draws_are_those_of_the_specification(gpu, alpha, norm, rows, stratified):
    generator = torch.Generator().manual_seed(rows)
    magnitude = torch.rand(rows + 3, generator=generator)
    magnitude[:3] = -1.0
    order, expected = SortedOrder(magnitude.to(gpu)), SortedOrder(magnitude)
    uniform = torch.rand(100, dtype=torch.float64, generator=generator)
    uniform[0], uniform[-1] = 0.0, 1.0 - 2**-53
    given = {"stratified": stratified, "beta": 0.4, "norm": norm}
    with forced("triton"):
        index, weight = order.draw(rank_law(alpha, gpu), uniform.to(gpu), **given) or pytest.fail("nothing to draw")
    with forced("torch"):
        want = expected.draw(rank_law(alpha), uniform, **given) or pytest.fail("nothing to draw")
    assert torch.equal(index.cpu(), want[0])
    torch.testing.assert_close(weight.cpu(), want[1])


def test_draws_follow_the_law(gpu):
    rows, draws = 60, 12_800
    order, law = SortedOrder(torch.rand(rows).to(gpu)), rank_law(0.7, gpu)
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(gpu)
    with forced("triton"):
        index, _ = order.draw(law, uniform, stratified=False, beta=0.4, norm=None) or pytest.fail("nothing to draw")
        ranks = order.ranks_of(index).cpu()
    probability = torch.arange(1, rows + 1, dtype=torch.float64).pow(-0.7)
    probability = (probability / probability.sum()).numpy()
    assert power(probability, draws, bias=0.1) > 0.99
    assert_follows(torch.bincount(ranks - 1, minlength=rows), probability)


def test_a_change_of_the_law_reaches_the_same_memory(gpu):
    order = SortedOrder(torch.rand(50).to(gpu))
    uniform = torch.full((8,), 0.5, dtype=torch.float64, device=gpu)
    memory = order.on_device.head.data_ptr(), order.on_device.numbers.tensor.data_ptr()
    drawn = []
    with forced("triton"):
        for alpha in (0.0, 0.7):
            index, _ = order.draw(rank_law(alpha, gpu), uniform, stratified=False, beta=0.4, norm=None) or (None, None)
            drawn.append(int(order.ranks_of(index)[0]))
    assert drawn[0] == 26  # half of the rows are before it
    assert drawn[1] < 20
    assert memory == (order.on_device.head.data_ptr(), order.on_device.numbers.tensor.data_ptr())
