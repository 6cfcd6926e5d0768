"""The chunked order against sorting everything, and its invariants after every
change."""

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

from rlbuf_td.kernels.rank_order import (
    USED,
    ChunkedOrder,
    SortedOrder,
    cpu,
    order_bytes,
)
from rlbuf_td.kernels.strata import stratification_of
from rlbuf_td.kernels.sum_tree import LARGEST_MAGNITUDE
from rlbuf_td.samplers.rank import RankRule
from rlbuf_td.storages.numbers import SharedNumbers


def empty(capacity: int) -> torch.Tensor:
    return torch.full((capacity,), -1.0)


def fill(order: ChunkedOrder, start: int, count: int, magnitude: float) -> None:
    """Set the magnitude of consecutive rows, as writes do."""
    with order.lock:
        cpu.fill(
            order.addresses,
            np.arange(start, start + count),
            int(np.float32(magnitude).view(np.int32)),
        )


class Pair:
    def __init__(self, magnitude: torch.Tensor) -> None:
        self.order, self.reference = (
            ChunkedOrder(magnitude),
            SortedOrder(magnitude.clone()),
        )
        self.every = torch.arange(len(magnitude))

    def update(self, index: np.ndarray, values: np.ndarray) -> None:
        rows, td_error = (
            torch.from_numpy(index),
            torch.from_numpy(values.astype(np.float32)),
        )
        self.reference.update_(rows, td_error, len(self.every))
        largest = self.order.update_(rows, td_error, len(self.every))
        assert largest == float(torch.where(rows < 0, -1.0, td_error.abs()).max())

    def fill(self, start: int, count: int, magnitude: float) -> None:
        fill(self.order, start, count, magnitude)
        self.reference.update_(
            self.every[start : start + count],
            torch.full((count,), magnitude),
            len(self.every),
        )

    def check(self) -> None:
        self.order.check()
        assert torch.equal(
            self.order.ranks_of(self.every), self.reference.ranks_of(self.every)
        )
        assert int(self.order.count()) == int(self.reference.count())


VALUES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "continuous": lambda rng, n: rng.standard_normal(n),
    "few": lambda rng, n: rng.integers(-2, 3, n).astype(float),
    "equal": lambda rng, n: np.full(n, float(rng.integers(3))),
    "rising": lambda rng, n: 1.0 + np.sort(rng.random(n)),
    "falling": lambda rng, n: 1.0 - np.sort(rng.random(n)),
    "neighbours": lambda rng, n: 0.5 + 1e-6 * rng.integers(0, 50, n),
    "outliers": lambda rng, n: np.where(rng.random(n) < 0.1, 1e30, rng.random(n)),
}


class LockstepWithSorting(RuleBasedStateMachine):
    """Random histories: after every step all ranks equal the naive ones, and every
    invariant holds."""

    @initialize(capacity=st.sampled_from([1, 2, 127, 128, 129, 1_000, 3_000]))
    def start(self, capacity: int) -> None:
        self.capacity, self.pair = capacity, Pair(empty(capacity))
        self.naive: dict[int, float] = {}

    @rule(
        seed=st.integers(0, 2**32),
        share=st.floats(0, 1.2),
        kind=st.sampled_from(sorted(VALUES)),
    )
    def update(self, seed: int, share: float, kind: str) -> None:
        rng = np.random.default_rng(seed)
        n = 1 + int(share * self.capacity)
        index, values = rng.integers(-1, self.capacity, n), VALUES[kind](rng, n)
        self.pair.update(index, values)
        self.naive.update(
            zip(index.tolist(), np.abs(values.astype(np.float32)).tolist(), strict=True)
        )

    @rule(
        seed=st.integers(0, 2**32),
        share=st.floats(0, 1),
        magnitude=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    )
    def fill(self, seed: int, share: float, magnitude: float) -> None:
        start = int(np.random.default_rng(seed).integers(self.capacity))
        count = min(self.capacity - start, 1 + int(share * self.capacity))
        self.pair.fill(start, count, magnitude)
        self.naive.update(dict.fromkeys(range(start, start + count), magnitude))

    @rule()
    def restore(self) -> None:
        self.pair.order = pickle.loads(pickle.dumps(self.pair.order))

    @invariant()
    def ranks_are_those_of_sorting(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()
            self.naive.pop(-1, None)
            rows = sorted(self.naive, key=lambda row: (-self.naive[row], row))
            expected = torch.zeros(self.capacity, dtype=torch.int64)
            expected[rows] = torch.arange(1, len(rows) + 1)
            assert torch.equal(self.pair.order.ranks_of(self.pair.every), expected)


TestLockstepWithSorting = LockstepWithSorting.TestCase
TestLockstepWithSorting.settings = settings(
    stateful_step_count=20, suppress_health_check=list(HealthCheck)
)


def _rising(step: int, batch: int) -> np.ndarray:
    return 10.0 + step + np.arange(batch) / batch


ADVERSARIES: dict[str, Callable[[int, int], np.ndarray]] = {
    "rising": _rising,
    "falling": lambda step, batch: 1.0 / _rising(step, batch),
    "one_place": lambda step, batch: 0.5 + 1e-6 * np.arange(batch),
    "gather_and_scatter": lambda step, batch: (
        np.full(batch, 0.6) if step % 2 else np.random.default_rng(step).random(batch)
    ),
    "zigzag": lambda step, batch: (
        np.where(np.arange(batch) % 2, 1.0, -1.0) * _rising(step, batch)
    ),
}


@pytest.mark.parametrize("rows", ["same", "random", "in_order"])
@pytest.mark.parametrize("adversary", sorted(ADVERSARIES))
def test_adversarial_orders_stay_valid_and_exact(adversary, rows):
    capacity, batch = 20_000, 512
    rng = np.random.default_rng(0)
    pair, arranged, chunks = (
        Pair(torch.from_numpy(rng.random(capacity).astype(np.float32))),
        0,
        0,
    )
    for step in range(120):
        index = {
            "same": np.arange(batch) * 7,
            "random": rng.integers(0, capacity, batch),
            "in_order": (step * batch + np.arange(batch)) % capacity,
        }[rows]
        pair.update(index, ADVERSARIES[adversary](step, batch))
        before, chunks = chunks, chunks_in_use(pair.order)
        arranged += chunks < before
        if step % 20 == 19:
            pair.check()
    assert arranged <= 120 * batch / (capacity / 3)
    # no chunk was left
    assert (
        arranged or rows == "same" or adversary not in ("rising", "falling", "zigzag")
    )


def chunks_in_use(order: ChunkedOrder) -> int:
    return int(order.tensors["head"][USED])


def test_the_reference_skips_bad_errors_and_counts_them():
    order = SortedOrder(torch.tensor([0.1, 0.2, -1.0, 0.3, -1.0]))
    index = torch.tensor([0, 1, 4, -1, 3, 2])
    td_error = torch.tensor([1.0, torch.nan, 9.0, torch.nan, -torch.inf, -0.5])
    assert order.update_(index, td_error, rows=4) == 1.0
    assert order.magnitude[:5].tolist() == pytest.approx([1.0, 0.2, 0.5, 0.3, -1.0])
    assert order.update_(index[1:2], td_error[1:2], rows=4) == -1.0
    assert int(order.refused) == 3
    for each in (order, ChunkedOrder(order.magnitude[:5])):  # beyond float32
        assert (
            each.update_(index[:1], torch.tensor([-1e300], dtype=torch.float64), rows=4)
            == LARGEST_MAGNITUDE
        )


@pytest.mark.parametrize(
    ("row", "words"),
    [(3, "row 3 is out of range: rows are 0 to 2"), (-1, "row -1 is out")],
)
def test_a_row_out_of_range_has_no_rank(row, words):
    with pytest.raises(IndexError, match=words):
        ChunkedOrder(torch.ones(3)).ranks_of(torch.tensor([0, row]))


def test_threads_may_draw_update_and_fill_at_the_same_time():
    capacity = 5_000
    order = ChunkedOrder(torch.rand(capacity))
    rule = RankRule(SharedNumbers("d", [0.7, 0.5, -1.0, 0.7]))
    rule.table = order
    law = stratification_of(64, True, 0.5, "buffer")

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(150):
            uniform = torch.rand(64, dtype=torch.float64, generator=generator)
            rows, _ = rule.draw(uniform, capacity, law)
            order.update_(rows, torch.randn(64, generator=generator), capacity)
            fill(
                order,
                int(torch.randint(capacity - 400, (1,), generator=generator)),
                400,
                1.0,
            )

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    order.check()
    assert int(order.count()) == capacity


def test_memory_is_at_most_28_bytes_a_row():
    for capacity in (100_000, 1_000_000, 10_000_000):
        assert order_bytes(capacity, torch.device("cpu")) <= 28 * capacity
