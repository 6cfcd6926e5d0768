"""Triton kernels in lockstep with their reference: on a GPU, else in Triton's interpreter; and when they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlbuf_td.kernels import dispatch, sum_tree
from rlbuf_td.kernels.dispatch import backend_of, enable_triton
from rlbuf_td.kernels.episodes import FlagBoundaries
from rlbuf_td.kernels.sum_tree import SumTree
from tests.backends import forced
from tests.kernels.invariants import check_tree

ROOT = Path(__file__).parents[2]
#: One block, one group, a ragged one of each level that a launch covers, and levels beyond them.
CAPACITIES = [1, 9, 65, 513, 4_103]


def batches(capacity: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make updates with duplicate rows, skipped rows, bad errors, zeros, and sizes of all orders of magnitude."""
    generator = torch.Generator().manual_seed(capacity)
    made = []
    for size in (1, 40, 7, 64):
        index = torch.randint(-1, capacity, (size,), generator=generator)
        index[size // 2 :] = torch.randint(-1, min(capacity, 5), (size - size // 2,), generator=generator)
        td_error = torch.randn(size, generator=generator, dtype=torch.float64).mul_(20).exp_()
        td_error *= torch.randint(-1, 2, (size,), generator=generator)
        td_error[::9] = torch.nan if size > 7 else 1.0
        made.append((index, td_error if size % 2 else td_error.to(torch.float32)))
    return made


def assert_same(tree: SumTree, expected: SumTree) -> None:
    for name, tensor in tree.tensors().items():
        torch.testing.assert_close(tensor, expected.tensors()[name], rtol=1e-13, atol=0.0, msg=name)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(("alpha", "eps"), [(0.6, 1e-6), (0.0, 0.0)])
def test_updates_fills_and_rebuilds_leave_what_the_reference_leaves(gpu, capacity, alpha, eps):
    tree, expected = SumTree.empty(capacity, gpu), SumTree.empty(capacity, gpu)
    updates = batches(capacity)
    changes: list[Any] = [(sum_tree.update_, index.to(gpu), error.to(gpu), capacity) for index, error in updates]
    changes += [(sum_tree.fill_, capacity // 3, capacity // 2 or 1, 3.0), (sum_tree.fill_, capacity - 1, 1, 0.0)]
    for change, *given in changes:
        found = []
        for backend, one in (("triton", tree), ("torch", expected)):
            with forced(cast(Any, backend)):
                found.append(change(one, *given, alpha, eps))
        assert found[0] == found[1]
        assert_same(tree, expected)
    assert int(tree.refused) == int(expected.refused)
    check_tree(tree, alpha, eps)
    rebuilt = SumTree(**{name: tensor.clone() for name, tensor in tree.tensors().items()})
    rebuilt.sums.zero_()
    with forced("triton"):
        sum_tree.rebuild_(rebuilt)
    assert_same(rebuilt, tree)


@pytest.mark.parametrize("capacity", [8, 513, 4_103])
@pytest.mark.parametrize("norm", ["buffer", "batch", None])
@pytest.mark.parametrize("stratified", [True, False])
def test_draws_are_those_of_the_reference_at_every_beta(gpu, capacity, norm, stratified):
    tree = SumTree.empty(capacity, gpu)
    uniform = torch.rand(70, dtype=torch.float64)
    uniform[0], uniform[-1] = 0.0, 1.0 - 2**-53
    with forced("torch"):
        for index, td_error in batches(capacity):
            sum_tree.update_(tree, index.to(gpu), td_error.to(gpu), capacity, 0.6, 0.0)
    for beta in (0.4, 0.8):
        found = []
        for backend in ("triton", "torch"):
            with forced(cast(Any, backend)):
                drawn = sum_tree.draw(tree, uniform.to(gpu), stratified, capacity, beta, norm)
                found.append(drawn or pytest.fail("nothing to draw"))
        assert torch.equal(found[0][0], found[1][0])
        torch.testing.assert_close(found[0][1], found[1][1])
        assert (tree.weight[found[0][0]] > 0).all()


RINGS = [(1, 1, 0.5, 1.0), (7, 1, 0.3, 0.5), (40, 3, 0.1, 2.5), (600, 1, 0.0, 1.3), (600, 2, 0.004, 1.3)]


@pytest.mark.parametrize(("steps", "lanes", "often", "fill"), RINGS)
@pytest.mark.parametrize("within", [None, 0, 5, 64, 10_000])
def test_trajectories_reach_as_far_as_the_reference_says(gpu, monkeypatch, steps, lanes, often, fill, within):
    monkeypatch.setattr("rlbuf_td.kernels.episodes.cuda.STRETCH", 64)
    boundaries, end = FlagBoundaries(steps, lanes, gpu), torch.zeros(steps, lanes, dtype=torch.bool, device=gpu)
    written, start = 0, 0
    while written < fill * steps:
        count = min(max(1, steps // 3), steps - start)
        end[start : start + count] = (torch.rand(count, lanes) < often).to(gpu)
        boundaries.write(start, count, end, None)
        written, start = written + count, (start + count) % steps
    live = min(steps, int(fill * steps)) * lanes
    cells = torch.linspace(0, live - 1, min(live, 40), dtype=torch.float64).long().to(gpu)
    with forced("triton"):
        found, every_other = boundaries.reach(cells, within), boundaries.reach(cells[::2], within)
    with forced("torch"):
        expected = boundaries.reach(cells, within)
    for mine, some, theirs in zip(found, every_other, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(some, theirs[::2])


@pytest.mark.parametrize("words", ["AssertionError", "unsupported architecture"])
def test_a_wrong_kernel_is_replaced_by_the_reference_with_one_warning(gpu, monkeypatch, words):
    from rlbuf_td.kernels.sum_tree import cuda

    def draw(*given: Any, right: Any = cuda.draw) -> Any:
        if words != "AssertionError":
            raise NotImplementedError(words)
        index, weight = right(*given)
        return index.flip(0), weight

    monkeypatch.setattr(dispatch, "_agrees", {})
    monkeypatch.setattr(cuda, "draw", draw)
    tree, uniform = SumTree.empty(100, gpu), torch.rand(50, dtype=torch.float64, device=gpu)

    def draw_twice() -> Any:
        for _ in range(2):
            sum_tree.fill_(tree, 0, 100, 1.0, 0.6, 0.0)
            drawn = sum_tree.draw(tree, uniform.clone(), True, 100, 0.4, None)
        return drawn

    with (
        forced("triton"),
        pytest.warns(RuntimeWarning, match=f"kernel of the sum tree does not work .*{words}") as seen,
    ):
        drawn = draw_twice()
    with forced("torch"):
        expected = draw_twice()
    torch.testing.assert_close(drawn, expected)
    assert len(seen) == 1


def test_a_wrong_look_up_of_trajectories_is_replaced_by_the_reference(gpu, monkeypatch):
    from rlbuf_td.kernels.episodes import cuda

    monkeypatch.setattr(dispatch, "_agrees", {})
    monkeypatch.setattr(cuda, "reach", lambda boundaries, cells, within: (cells, cells, cells > 0))
    boundaries = FlagBoundaries(5, 1, gpu)
    boundaries.write(0, 5, torch.zeros(5, 1, dtype=torch.bool, device=gpu), None)
    with forced("triton"), pytest.warns(RuntimeWarning, match="kernel of the reach of trajectories") as seen:
        ahead = [boundaries.reach(torch.tensor([1], device=gpu))[1].tolist() for _ in range(2)]
    assert ahead == [[3], [3]]
    assert len(seen) == 1


def test_triton_serves_cuda_unless_it_is_turned_off(monkeypatch):
    memory = cast(torch.Tensor, SimpleNamespace(is_cpu=False, is_cuda=True))
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "_triton_is_enabled", True)
    assert backend_of(memory) == "triton"
    enable_triton(False)
    assert backend_of(memory) == "torch"
    asked = "from rlbuf_td.kernels import dispatch; print(dispatch._triton_is_enabled)"
    environment = os.environ | {"RLBUF_TD_TRITON": "0"}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_every_kernel_compiles_to_machine_code():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compile_triton"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_draw", "_finish", "_reach", "_repair"]
    assert "Warning" not in done.stderr, done.stderr
