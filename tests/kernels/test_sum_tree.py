"""The sum tree: CPU backend against reference, invariants, edges."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.strata import stratification_of
from rlbuf_td.kernels.sum_tree import (
    LARGEST,
    LARGEST_MAGNITUDE,
    SMALLEST,
    SumTree,
    cpu,
    tree_bytes,
)
from rlbuf_td.samplers.proportional import ProportionalRule
from rlbuf_td.storages.numbers import SharedNumbers
from tests.backends import forced
from tests.statistics import assert_follows, power


def rule_over(tree: SumTree, alpha: float, beta: float) -> ProportionalRule:
    settings = SharedNumbers("d", [alpha, beta, -1.0, alpha])
    rule = ProportionalRule(settings, 0.0, 0.0)
    rule.table = tree
    return rule


def naive_weights(
    history: list[tuple[torch.Tensor, torch.Tensor]], alpha: float, eps: float
) -> dict[int, float]:
    weights: dict[int, float] = {}
    for index, td_error in history:
        for row, error in zip(index.tolist(), td_error.tolist(), strict=True):
            if row >= 0:
                with np.errstate(over="ignore", under="ignore"):
                    priority = (
                        np.float64(np.float32(min(abs(error), LARGEST_MAGNITUDE))) + eps
                    )
                    weight = float(priority**alpha)
                weights[row] = (
                    min(max(weight, SMALLEST), LARGEST)
                    if priority
                    else float(alpha == 0)
                )
    return weights


@st.composite
def histories(draw: st.DrawFn):
    capacity = draw(st.integers(1, 200))
    history = []
    for _ in range(draw(st.integers(1, 8))):
        batch = draw(st.integers(1, 40))
        rows = draw(
            st.lists(st.integers(-1, capacity - 1), min_size=batch, max_size=batch)
        )
        sizes = st.sampled_from(
            [0.0, 1e-300, 1e-30, 1e-6, 0.3, 1.0, 7.0, 1e6, 1e30, 1e300]
        )
        errors = draw(
            st.lists(
                st.tuples(sizes, st.sampled_from([-1.0, 1.0])),
                min_size=batch,
                max_size=batch,
            )
        )
        history.append(
            (
                torch.tensor(rows),
                torch.tensor([s * sign for s, sign in errors], dtype=torch.float64),
            )
        )
    return capacity, history


def flat(capacity: int) -> SumTree:
    """Return a tree as on other devices than the CPU: without nodes."""
    with forced("torch"):
        return SumTree.empty(capacity)


@given(
    histories(),
    st.sampled_from([0.0, 0.5, 0.6, 1.0, 2.0]),
    st.sampled_from([0.0, 1e-6]),
)
def test_cpu_and_reference_agree_bit_for_bit_after_every_update(case, alpha, eps):
    capacity, history = case
    tree, spec, scanned = (
        SumTree.empty(capacity),
        SumTree.empty(capacity),
        flat(capacity),
    )
    for step, (index, td_error) in enumerate(history):
        largest = sum_tree.update_(tree, index, td_error, capacity, alpha, eps)
        with forced("torch"):
            for other in (spec, scanned):
                assert largest == float(
                    sum_tree.update_(other, index, td_error, capacity, alpha, eps)
                )
        tree.check(alpha, eps)
        assert torch.equal(scanned.weight, spec.weight)
        for name, tensor in tree.tensors().items():
            torch.testing.assert_close(
                tensor, spec.tensors()[name], rtol=1e-14, atol=0.0
            )
        weights = naive_weights(history[: step + 1], alpha, eps)
        expected = torch.tensor(
            [weights.get(row, 0.0) for row in range(capacity)], dtype=torch.float64
        )
        stored = tree.weight.double()
        # weights are float32
        torch.testing.assert_close(stored[:capacity], expected, rtol=2.0**-23, atol=0.0)
        torch.testing.assert_close(tree.total, stored.sum(), rtol=1e-12, atol=0.0)
        assert float(tree.smallest) == min(stored[stored > 0].tolist(), default=np.inf)


@given(st.integers(1, 300), st.data())
def test_filling_a_range_equals_updating_every_row_of_it(capacity, data):
    start = data.draw(st.integers(0, capacity - 1))
    count = data.draw(st.integers(1, capacity - start))
    filled, updated = SumTree.empty(capacity), SumTree.empty(capacity)
    for tree in (filled, updated):
        sum_tree.update_(
            tree,
            torch.arange(capacity),
            torch.linspace(0, 2, capacity),
            capacity,
            0.7,
            1e-6,
        )
    cpu.fill(filled.addresses, start, count, np.float32(3.0), 0.7, 1e-6)
    index = torch.arange(start, start + count)
    sum_tree.update_(updated, index, torch.full((count,), 3.0), capacity, 0.7, 1e-6)
    for name, tensor in filled.tensors().items():
        assert torch.equal(tensor, updated.tensors()[name]), name


def test_sums_do_not_drift_over_a_hundred_thousand_random_updates():
    generator = torch.Generator().manual_seed(0)
    capacity = 4_096
    tree = SumTree.empty(capacity)
    for _ in range(400):
        index = torch.randint(capacity, (256,), generator=generator)
        td_error = torch.rand(256, generator=generator).log_().mul_(-3).exp_()
        sum_tree.update_(tree, index, td_error, capacity, 0.6, 1e-6)
    tree.check(0.6, 1e-6)
    rule = rule_over(tree, 0.6, 0.4)
    counts = torch.zeros(capacity)
    law = stratification_of(2_048, False, 0.4, "buffer")
    draws = 4_000
    for _ in range(draws // 8):
        uniform = torch.rand(2_048, dtype=torch.float64, generator=generator)
        rows, _ = rule.draw(uniform, capacity, law)
        counts += torch.bincount(rows, minlength=capacity)
    probability = (tree.weight[:capacity].double() / tree.total).numpy()
    assert power(probability, int(counts.sum()), bias=0.1) > 0.99
    assert_follows(counts, probability)


def test_a_tree_takes_less_than_ten_bytes_a_row():
    for capacity in (10_000, 131_073, 1_000_000):
        assert tree_bytes(capacity, torch.device("cpu")) < 10 * capacity
    for tree, device in ((SumTree.empty(1_000), "cpu"), (flat(1_000), "cuda")):
        assert sum(tensor.nbytes for tensor in tree.tensors().values()) == tree_bytes(
            1_000, torch.device(device)
        )


def test_a_draw_stays_in_its_block_if_the_weights_have_been_changed_behind_its_back():
    tree = SumTree.empty(100)
    sum_tree.update_(tree, torch.arange(100), torch.ones(100), 100, 1.0, 0.0)
    tree.weight.zero_()
    uniform = torch.rand(50, dtype=torch.float64)
    law = stratification_of(50, False, 0.4, None)
    rows, _ = rule_over(tree, 1.0, 0.4).draw(uniform, 100, law)
    assert (rows % 16 == 0).all()
    assert 0 <= int(rows.min()) <= int(rows.max()) < 112
