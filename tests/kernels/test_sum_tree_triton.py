"""The sum tree's GPU twin in lockstep with its specification: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.dispatch import forced
from rlbuf_td.kernels.sum_tree import SumTree
from rlbuf_td.kernels.sum_tree import reference as specification
from tests.statistics import assert_follows, power

#: One block, one group, a ragged one of each level that a launch covers, and levels beyond them.
CAPACITIES = [1, 9, 64, 65, 513, 4_103]


def batches(capacity: int, count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make updates with repeated rows, skipped rows, zeros, and sizes of all orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in [1, 7, 40, 64][:count]:
        index = torch.randint(-1, capacity, (size,), generator=generator)
        index[size // 2 :] = torch.randint(-1, min(capacity, 5), (size - size // 2,), generator=generator)
        td_error = torch.randn(size, generator=generator, dtype=torch.float64).mul_(20).exp_()
        td_error *= torch.randint(-1, 2, (size,), generator=generator)
        made.append((index, td_error if size % 2 else td_error.to(torch.float32)))
    return made


def assert_same(tree: SumTree, expected: SumTree) -> None:
    for name, tensor in tree.tensors().items():
        torch.testing.assert_close(tensor.cpu(), expected.tensors()[name], rtol=1e-13, atol=0.0, msg=name)


def filled(capacity: int, device: torch.device) -> SumTree:
    """Return a tree in which some rows have no priority."""
    tree = SumTree.empty(capacity, device)
    with forced("torch"):
        for index, td_error in batches(capacity, 4, seed=3):
            sum_tree.update_(tree, index.to(device), td_error.to(device), capacity, 0.6, 1e-6)
    return tree


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(("alpha", "eps"), [(0.6, 1e-6), (0.0, 0.0), (2.0, 0.0)])
def test_updates_leave_what_the_specification_leaves(gpu, capacity, alpha, eps):
    tree, expected = SumTree.empty(capacity, gpu), SumTree.empty(capacity)
    so_far = -1.0
    for index, td_error in batches(capacity, 4 if alpha == 0.6 else 2, seed=capacity):
        with forced("triton"):
            largest = sum_tree.update_(tree, index.to(gpu), td_error.to(gpu), capacity, alpha, eps)
        so_far = max(so_far, float(specification.update(expected, index, td_error, capacity, alpha, eps)[0]))
        assert float(largest) == so_far
        assert_same(tree, expected)
        assert (tree.on_device.claims == -1).all()
    sum_tree.check(tree, alpha, eps)


def test_one_program_and_many_set_the_same_priorities(gpu, monkeypatch):
    index = torch.randint(-1, 40, (600,), generator=torch.Generator().manual_seed(0)).to(gpu)
    td_error = torch.linspace(0.1, 9.0, 600, dtype=torch.float64).to(gpu)
    trees = []
    for one_program in (1024, 16):
        monkeypatch.setattr("rlbuf_td.kernels.sum_tree.duplicates_cuda.ONE_PROGRAM", one_program)
        trees.append(SumTree.empty(700, gpu))
        with forced("triton"):
            sum_tree.update_(trees[-1], index, td_error, 700, 0.6, 1e-6)
    for name, tensor in trees[0].tensors().items():
        assert torch.equal(tensor, trees[1].tensors()[name]), name
    assert trees[0].magnitude[5] == td_error[(index == 5).nonzero()[-1, 0]]


def test_bad_errors_and_rows_out_of_range_are_skipped_and_errors_counted(gpu):
    tree = SumTree.empty(20, gpu)
    with forced("triton"):
        sum_tree.update_(tree, torch.arange(20, device=gpu), torch.ones(20, device=gpu), 20, 1.0, 0.0)
        index = torch.tensor([0, 1, 2, 12, -1, 3, 0, 500], device=gpu)
        td_error = torch.tensor([5.0, torch.nan, torch.inf, 7.0, torch.nan, -torch.inf, 4.0, torch.nan], device=gpu)
        largest = sum_tree.update_(tree, index, td_error, 10, 1.0, 0.0)
    assert tree.magnitude[:4].tolist() == [4.0, 1.0, 1.0, 1.0]
    assert tree.magnitude[12] == 1.0
    assert int(tree.refused) == 3
    assert float(largest) == 5.0
    sum_tree.check(tree, 1.0, 0.0)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 700), (511, 2), (1_000, 203)])
def test_filling_equals_updating(gpu, start, count):
    tree, expected = filled(1_203, gpu), filled(1_203, gpu)
    index, value = torch.arange(start, start + count, device=gpu), torch.full((count,), 3.0, device=gpu)
    with forced("triton"):
        sum_tree.fill_(tree, start, count, 3.0, 0.6, 1e-6)
        sum_tree.update_(expected, index, value, 1_203, 0.6, 1e-6)
    for name, tensor in tree.tensors().items():
        assert torch.equal(tensor, expected.tensors()[name]), name


def test_rebuilding_gives_the_bits_that_updates_gave(gpu):
    tree = filled(4_103, gpu)  # four levels above the blocks
    again = SumTree.empty(4_103, gpu)
    again.magnitude.copy_(tree.magnitude)
    again.weight.copy_(tree.weight)
    with forced("triton"):
        sum_tree.rebuild_(again)
    for name, tensor in again.tensors().items():
        assert torch.equal(tensor, tree.tensors()[name]), name


def test_a_launch_that_was_broken_off_does_not_upset_the_next(gpu):
    tree = SumTree.empty(4_103, gpu)
    index, td_error = torch.tensor([5, 4_000, 700]), torch.tensor([3.0, 1.0, 2.0])
    with forced("triton"):
        for change in (
            lambda: sum_tree.update_(tree, index.to(gpu), td_error.to(gpu), 4_103, 0.6, 0.0),
            lambda: sum_tree.fill_(tree, 1_000, 900, 1.0, 0.6, 0.0),
            lambda: sum_tree.rebuild_(tree),
        ):
            tree.on_device.ended.fill_(1)  # programs that were counted, and no last one
            tree.sums[tree.starts[-1]] = -1.0
            change()
            assert_same(tree, SumTree.over(tree.magnitude.cpu(), tree.weight.cpu()))


@pytest.mark.parametrize("capacity", [8, 513, 4_103])
@pytest.mark.parametrize("norm", ["buffer", "batch", None])
@pytest.mark.parametrize("stratified", [True, False])
def test_draws_are_those_of_the_specification(gpu, capacity, norm, stratified):
    tree = filled(capacity, gpu)
    uniform = torch.rand(70, dtype=torch.float64, generator=torch.Generator().manual_seed(capacity))
    uniform[0], uniform[-1] = 0.0, 1.0 - 2**-53
    with forced("triton"):
        drawn = sum_tree.draw(tree, uniform.to(gpu), stratified, capacity, 0.4, norm)
    assert drawn is not None
    rows, importance = specification.draw(tree, uniform.to(gpu), stratified, capacity, 0.4, norm)
    assert torch.equal(drawn[0], rows)
    torch.testing.assert_close(drawn[1], importance)
    assert (tree.weight[rows] > 0).all()


def test_draws_follow_the_law(gpu):
    capacity, draws = 100, 12_800
    tree = SumTree.empty(capacity, gpu)
    generator = torch.Generator().manual_seed(1)
    td_error = torch.rand(capacity, generator=generator).add_(0.1)
    uniform = torch.rand(draws, dtype=torch.float64, generator=generator).to(gpu)
    with forced("triton"):
        sum_tree.update_(tree, torch.arange(capacity, device=gpu), td_error.to(gpu), capacity, 0.6, 0.0)
        rows, _ = sum_tree.draw(tree, uniform, False, capacity, 0.4, "buffer") or pytest.fail("nothing to draw")
    probability = (tree.weight[:capacity] / tree.total).cpu().numpy()
    assert power(probability, draws, bias=0.1) > 0.99
    assert_follows(torch.bincount(rows.cpu(), minlength=capacity), probability)


def test_a_change_of_numbers_reaches_the_same_memory(gpu):
    tree = filled(65, gpu)
    memory = tree.on_device.numbers.tensor.data_ptr()
    uniform = torch.full((1,), 0.5, dtype=torch.float64, device=gpu)
    with forced("triton"):
        _, first = sum_tree.draw(tree, uniform, True, 65, 0.4, None) or pytest.fail("nothing to draw")
        _, second = sum_tree.draw(tree, uniform, True, 65, 0.8, None) or pytest.fail("nothing to draw")
    torch.testing.assert_close(second, first**2)
    assert tree.on_device.numbers.tensor.data_ptr() == memory
