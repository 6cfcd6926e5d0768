"""The chunked order against sorting everything, and its invariants after every change."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rlbuf_td.kernels.rank_order import LARGEST, as_float32, make_order, order_bytes
from rlbuf_td.kernels.rank_order import chunks as _rank_chunks
from rlbuf_td.kernels.rank_order.chunked import ChunkedOrder
from rlbuf_td.kernels.rank_order.law import rank_law
from rlbuf_td.kernels.rank_order.reference import SortedOrder
from rlbuf_td.kernels.sum_tree import REFUSED
from tests.kernels.invariants import check_order
from tests.kernels.orders import VALUES, NaiveOrder, empty
from tests.waiting import waiting_is_an_error


class LockstepWithSorting(RuleBasedStateMachine):
    """Random histories: after every step all ranks equal the naive ones, and every invariant holds."""

    @initialize(capacity=st.sampled_from([1, 2, 127, 128, 129, 1_000, 3_000]))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.naive = NaiveOrder(capacity)
        self.order = ChunkedOrder(empty(capacity))
        self.reference = SortedOrder(empty(capacity))

    @rule(seed=st.integers(0, 2**32), share=st.floats(0, 1.2), kind=st.sampled_from(sorted(VALUES)))
    def update(self, seed: int, share: float, kind: str) -> None:
        rng = np.random.default_rng(seed)
        n = 1 + int(share * self.capacity)
        index = torch.from_numpy(rng.integers(-1, self.capacity, n))
        td_error = torch.from_numpy(VALUES[kind](rng, n).astype(np.float32))
        self.naive.update(index.tolist(), td_error.tolist())
        self.reference.update_(index, td_error, self.capacity)
        largest = self.order.update_(index, td_error, self.capacity)
        assert largest == float(torch.where(index < 0, -1.0, td_error.abs()).max())

    @rule(seed=st.integers(0, 2**32), share=st.floats(0, 1), magnitude=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def fill(self, seed: int, share: float, magnitude: float) -> None:
        start = int(np.random.default_rng(seed).integers(self.capacity))
        count = min(self.capacity - start, 1 + int(share * self.capacity))
        self.naive.update(list(range(start, start + count)), [magnitude] * count)
        self.order.fill_(start, count, magnitude)
        self.reference.fill_(start, count, magnitude)

    @rule()
    def restore(self) -> None:
        self.order = pickle.loads(pickle.dumps(self.order))

    @invariant()
    def ranks_are_those_of_sorting(self) -> None:
        if not hasattr(self, "order"):
            return
        check_order(self.order)
        every = torch.arange(self.capacity)
        expected = self.naive.ranks()
        assert self.order.ranks_of(every).tolist() == expected
        assert self.reference.ranks_of(every).tolist() == expected
        assert int(self.order.count()) == int(self.reference.count()) == max(expected)


TestLockstepWithSorting = LockstepWithSorting.TestCase
TestLockstepWithSorting.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def assert_same_ranks(order: ChunkedOrder, other: ChunkedOrder | SortedOrder) -> None:
    check_order(order)
    every = torch.arange(len(order.magnitude))
    assert torch.equal(order.ranks_of(every), other.ranks_of(every))


@pytest.mark.parametrize("seed", [0, 1])
def test_long_histories_that_split_and_merge_groups_stay_valid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = 40_000
    order, reference = ChunkedOrder(empty(capacity)), SortedOrder(empty(capacity))
    groups = set()
    for step in range(60):
        if step % 4 == 0:
            start = int(rng.integers(capacity))
            count = min(capacity - start, int(rng.integers(1, 30_000)))
            magnitude = float(rng.integers(4)) / 2
            order.fill_(start, count, magnitude)
            reference.fill_(start, count, magnitude)
        else:
            n = int(rng.integers(1, 8_000))
            index = torch.from_numpy(rng.integers(-1, capacity, n))
            values = VALUES[sorted(VALUES)[rng.integers(len(VALUES))]](rng, n)
            td_error = torch.from_numpy(values.astype(np.float32))
            order.update_(index, td_error, capacity)
            reference.update_(index, td_error, capacity)
        assert_same_ranks(order, reference)
        groups.add(int(order.chunks.head[_rank_chunks.GROUPS]))
    assert len(groups) > 3  # otherwise this test has not tested what it says


def _rising(step: int, batch: int) -> np.ndarray:
    return 10.0 + step + np.arange(batch) / batch


ADVERSARIES: dict[str, Callable[[int, int], np.ndarray]] = {
    "rising": _rising,
    "falling": lambda step, batch: 1.0 / _rising(step, batch),
    "all_equal": lambda step, batch: np.ones(batch),
    "two_values": lambda step, batch: np.full(batch, 0.5 + 0.1 * (step % 2)),
    "one_place": lambda step, batch: 0.5 + 1e-6 * np.arange(batch),
    "gather_and_scatter": lambda step, batch: (
        np.full(batch, 0.6) if step % 2 else np.random.default_rng(step).random(batch)
    ),
    "zigzag": lambda step, batch: np.where(np.arange(batch) % 2, 1.0, -1.0) * _rising(step, batch),
}


@pytest.mark.parametrize("rows", ["same", "random", "in_order"])
@pytest.mark.parametrize("adversary", sorted(ADVERSARIES))
def test_adversarial_orders_stay_valid_and_exact(adversary: str, rows: str) -> None:
    capacity, batch = 20_000, 512
    rng = np.random.default_rng(0)
    start = torch.from_numpy(rng.random(capacity).astype(np.float32))
    order, reference = ChunkedOrder(start), SortedOrder(start.clone())
    for step in range(60):
        index = {
            "same": np.arange(batch) * 7,
            "random": rng.integers(0, capacity, batch),
            "in_order": (step * batch + np.arange(batch)) % capacity,
        }[rows]
        td_error = torch.from_numpy(ADVERSARIES[adversary](step, batch).astype(np.float32))
        order.update_(torch.from_numpy(index), td_error, capacity)
        reference.update_(torch.from_numpy(index), td_error, capacity)
        if step % 10 == 9:
            assert_same_ranks(order, reference)


def chunks_in_use(order: ChunkedOrder) -> int:
    return int(order.chunks.head[_rank_chunks.CHUNKS])


def test_a_million_new_rows_at_the_maximum_rank_in_order_of_row_in_full_chunks() -> None:
    capacity = 1_000_000
    order = ChunkedOrder(empty(capacity))
    for start in range(0, capacity, 10_000):
        order.fill_(start, 10_000, 1.0)
    every = torch.arange(capacity)
    assert torch.equal(order.ranks_of(every), every + 1)
    assert chunks_in_use(order) <= capacity / 120
    order.fill_(0, capacity, 2.0)
    assert torch.equal(order.ranks_of(every[::999]), every[::999] + 1)


@pytest.mark.parametrize("adversary", ["rising", "falling"])
def test_monotone_insertions_leave_full_chunks_behind(adversary: str) -> None:
    capacity, batch = 51_200, 256
    order = ChunkedOrder(empty(capacity))
    for step in range(capacity // batch):
        td_error = torch.from_numpy(ADVERSARIES[adversary](step, batch).astype(np.float32))
        index = torch.arange(step * batch, (step + 1) * batch)
        # Updates insert backwards: this is ascending or descending by key in turn.
        order.update_(index, td_error if step % 2 else td_error.flip(0), capacity)
    check_order(order)
    assert chunks_in_use(order) <= capacity / 80  # half full ones would hold 64


def test_ties_are_ranked_by_row_and_the_sign_does_not_count() -> None:
    order = ChunkedOrder(empty(6))
    order.update_(torch.tensor([5, 0, 3, 1]), torch.tensor([-2.0, 2.0, -0.0, 0.0]), rows=6)
    assert order.ranks_of(torch.arange(6)).tolist() == [1, 3, 0, 4, 0, 2]


def test_the_last_error_of_a_duplicate_row_counts() -> None:
    for order in (ChunkedOrder(empty(3)), SortedOrder(empty(3))):
        order.update_(torch.tensor([0, 1, 0, -1, 2, 0]), torch.tensor([9.0, 2.0, 8.0, 7.0, 3.0, 1.0]), rows=3)
        assert order.magnitude.tolist() == [1.0, 2.0, 3.0]
        assert order.ranks_of(torch.arange(3)).tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("index", "td_error"),
    [([0, 1], [1.0, float("nan")]), ([0, 1], [float("-inf"), 1.0]), ([0, 4], [1.0, 1.0]), ([-2, 1], [1.0, 1.0])],
    ids=["nan", "infinite", "row_too_high", "row_too_low"],
)
def test_a_bad_batch_is_refused_and_changes_nothing(index: list[int], td_error: list[float]) -> None:
    order = ChunkedOrder(torch.tensor([0.1, 0.2, -1.0, 0.3, -1.0]))
    for dtype in (torch.float32, torch.float64):
        assert order.update_(torch.tensor(index), torch.tensor(td_error, dtype=dtype), rows=4) == REFUSED
    assert order.magnitude.tolist() == pytest.approx([0.1, 0.2, -1.0, 0.3, -1.0])
    assert order.ranks_of(torch.arange(5)).tolist() == [3, 2, 0, 1, 0]


def test_the_reference_skips_bad_errors_and_counts_them() -> None:
    order = SortedOrder(torch.tensor([0.1, 0.2, -1.0, 0.3, -1.0]))
    index = torch.tensor([0, 1, 4, -1, 3, 2])
    td_error = torch.tensor([1.0, torch.nan, 9.0, torch.nan, -torch.inf, -0.5])
    assert order.update_(index, td_error, rows=4) == 1.0
    assert order.magnitude.tolist() == pytest.approx([1.0, 0.2, 0.5, 0.3, -1.0])
    assert order.update_(index[:1], td_error[:1] / 2, rows=4) == 1.0  # the largest so far
    assert order.update_(index[:1], td_error[:1] * 2, rows=4, counts=False) == 2.0
    assert order.update_(index[:1], td_error[:1] / 2, rows=4) == 1.0
    assert int(order.refused) == 2


def test_errors_beyond_float32_count_as_the_largest_float32() -> None:
    for order in (ChunkedOrder(empty(2)), SortedOrder(empty(2))):
        assert order.update_(torch.tensor([0, 1]), torch.tensor([1.0, -1e300], dtype=torch.float64), rows=2) == LARGEST
        assert order.ranks_of(torch.arange(2)).tolist() == [2, 1]


def test_a_row_out_of_range_has_no_rank() -> None:
    order = ChunkedOrder(torch.ones(3))
    with pytest.raises(IndexError, match=r"row 3 is out of range: rows are 0 to 2"):
        order.ranks_of(torch.tensor([0, 3]))
    with pytest.raises(IndexError, match="row -1 is out of range"):
        order.ranks_of(torch.tensor([0, -1]))


@pytest.mark.parametrize("norm", ["buffer", "batch", None])
@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 1.5])
def test_draws_are_those_of_the_reference(alpha: float, stratified: bool, norm: str | None) -> None:
    law = rank_law(alpha)
    for n in (1, 2, 100, 1_024, 1_025, 30_000):
        torch.manual_seed(n)
        magnitude = torch.rand(n)
        order, reference = ChunkedOrder(magnitude), SortedOrder(magnitude)
        uniform = torch.rand(300, dtype=torch.float64)
        uniform[0], uniform[-1] = 0.0, 1.0 - 2.0**-53
        drawn = order.draw(law, uniform.clone(), stratified=stratified, beta=0.5, norm=norm)
        expected = reference.draw(law, uniform, stratified=stratified, beta=0.5, norm=norm)
        assert drawn is not None
        assert expected is not None
        assert torch.equal(drawn[0], expected[0])
        torch.testing.assert_close(drawn[1], expected[1], rtol=1e-6, atol=0.0)


def test_threads_may_draw_update_and_fill_at_the_same_time() -> None:
    capacity = 5_000
    order = ChunkedOrder(torch.rand(capacity))
    law = rank_law(0.7)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(150):
            uniform = torch.rand(64, dtype=torch.float64, generator=generator)
            drawn = order.draw(law, uniform, stratified=True, beta=0.5, norm="buffer")
            assert drawn is not None
            order.update_(drawn[0], torch.randn(64, generator=generator), capacity)
            order.fill_(int(torch.randint(capacity - 400, (1,), generator=generator)), 400, 1.0)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    check_order(order)
    assert int(order.count()) == capacity


def test_an_empty_order_draws_nothing() -> None:
    uniform, order = torch.rand(4, dtype=torch.float64), ChunkedOrder(empty(3))
    assert order.draw(rank_law(0.7), uniform, stratified=True, beta=0.5, norm=None) is None


def test_an_order_built_at_once_equals_one_built_by_updates() -> None:
    magnitude = torch.randn(30_000).abs()
    magnitude[::3] = -1.0
    at_once, stepwise = ChunkedOrder(magnitude), ChunkedOrder(empty(30_000))
    rows = (magnitude >= 0).nonzero().squeeze(1)
    stepwise.update_(rows, magnitude[rows], 30_000)
    assert_same_ranks(at_once, stepwise)


@pytest.mark.parametrize("capacity", [100_000, 1_000_000, 10_000_000])
def test_memory_is_at_most_28_bytes_a_row(capacity: int) -> None:
    assert order_bytes(capacity, torch.device("cpu")) <= 28 * capacity


def test_a_stale_order_is_sorted_again_after_the_updates_it_was_allowed() -> None:
    order = SortedOrder(torch.tensor([3.0, 2.0, 1.0, -1.0]), stale_updates=2)
    every, first = torch.arange(4), torch.tensor([0])
    assert order.ranks_of(every).tolist() == [1, 2, 3, 0]
    for td_error, expected in ((0.5, [1, 2, 3, 0]), (0.4, [1, 2, 3, 0]), (0.3, [3, 1, 2, 0])):
        order.update_(first, torch.tensor([td_error]), 4)
        assert order.ranks_of(every).tolist() == expected
    order.update_(first, torch.tensor([9.0]), 4)
    order.fill_(3, 1, 9.0)
    assert order.ranks_of(every).tolist() == [1, 3, 4, 2]  # a new row is known at once


def test_the_order_runs_on_the_device_without_waiting_for_it(device: torch.device) -> None:
    torch.manual_seed(0)
    order = make_order(torch.full((5_000,), -1.0, device=device))
    reference = SortedOrder(empty(5_000))
    index, td_error = torch.randint(-1, 5_000, (4_000,)), torch.randn(4_000)
    uniform = torch.rand(256, dtype=torch.float64)
    law, moved = rank_law(0.7), rank_law(0.7, device)
    arguments = (index.to(device), td_error.to(device), uniform.clone().to(device))
    with waiting_is_an_error(device):
        order.update_(arguments[0], arguments[1], 5_000)
        drawn = order.draw(moved, arguments[2], stratified=True, beta=0.5, norm="buffer")
    reference.update_(index, td_error, 5_000)
    expected = reference.draw(law, uniform, stratified=True, beta=0.5, norm="buffer")
    assert drawn is not None
    assert expected is not None
    assert torch.equal(drawn[0].cpu(), expected[0])
    torch.testing.assert_close(drawn[1].cpu(), expected[1], rtol=1e-5, atol=0.0)
    assert as_float32(td_error) is td_error
