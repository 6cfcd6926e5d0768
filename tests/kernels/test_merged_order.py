"""The merged order against sorting everything, and its invariants after every change: on a GPU, else interpreted."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlbuf_td.kernels.dispatch import forced
from rlbuf_td.kernels.rank_order import LARGEST, RankOrder, make_order, order_bytes
from rlbuf_td.kernels.rank_order import merged as merged_order
from rlbuf_td.kernels.rank_order.chunked import ChunkedOrder
from rlbuf_td.kernels.rank_order.law import rank_law
from rlbuf_td.kernels.rank_order.merged import COUNT, NONE, SIDE, MergedOrder, keys_of
from rlbuf_td.kernels.rank_order.sorted import SortedOrder
from tests.kernels.orders import VALUES, NaiveOrder, empty
from tests.statistics import assert_follows, power

NEVER, ALWAYS = 1e9, 0.0  # shares from which on everything is sorted


@pytest.fixture(autouse=True)
def on_the_gpus_path(gpu: torch.device) -> Iterator[None]:
    with forced("triton"):
        yield


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small orders and batches take several programs."""
    monkeypatch.setattr("rlbuf_td.kernels.rank_order.merge_cuda._SIZE", 64)
    monkeypatch.setattr("rlbuf_td.kernels.sum_tree.duplicates_cuda.ONE_PROGRAM", 64)


class LockstepWithSorting(RuleBasedStateMachine):
    """Random histories: after every step all ranks equal those of three other orders, and every invariant holds."""

    device = torch.device("cpu")

    @initialize(capacity=st.sampled_from([1, 2, 63, 65, 300]), share=st.sampled_from([NEVER, NEVER, 1 / 4]))
    def start(self, capacity: int, share: float) -> None:
        merged_order._SHARE = share
        self.capacity, self.naive = capacity, NaiveOrder(capacity)
        self.order = MergedOrder(empty(capacity, self.device))
        self.chunked, self.specification = ChunkedOrder(empty(capacity)), SortedOrder(empty(capacity))

    @rule(
        seed=st.integers(0, 2**32),
        share=st.sampled_from([0.0, 0.05, 0.2, 1.2]),
        kind=st.sampled_from(sorted(VALUES)),
        bad=st.booleans(),
    )
    def update(self, seed: int, share: float, kind: str, bad: bool) -> None:
        rng = np.random.default_rng(seed)
        n, rows = 1 + int(share * self.capacity), int(rng.integers(1, self.capacity + 1))
        index = torch.from_numpy(rng.integers(-1, self.capacity + 1, n))
        td_error = torch.from_numpy(VALUES[kind](rng, n).astype(np.float32 if seed % 2 else np.float64))
        if bad:
            td_error[torch.from_numpy(rng.random(n) < 0.2)] = float(rng.choice([np.nan, np.inf, -np.inf]))
        valid = (index >= 0) & (index < rows) & td_error.isfinite()
        self.naive.update(index[valid].tolist(), td_error[valid].float().tolist())
        self.chunked.update_(index[valid], td_error[valid], rows)
        largest = self.order.update_(index.to(self.device), td_error.to(self.device), rows)
        with forced("torch"):
            assert float(largest) == self.specification.update_(index, td_error, rows)

    @rule(seed=st.integers(0, 2**32), share=st.floats(0, 1), magnitude=st.sampled_from([0.0, -0.0, 0.5, 3.0, 1e300]))
    def fill(self, seed: int, share: float, magnitude: float) -> None:
        start = int(np.random.default_rng(seed).integers(self.capacity))
        count = min(self.capacity - start, 1 + int(share * self.capacity))
        self.naive.update(list(range(start, start + count)), [min(magnitude, LARGEST)] * count)
        self.chunked.fill_(start, count, magnitude)
        self.specification.fill_(start, count, magnitude)
        on_device = torch.tensor(magnitude, dtype=torch.float64, device=self.device)
        self.order.fill_(start, count, on_device if seed % 2 else magnitude)

    @rule(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(VALUES)))
    def assign(self, seed: int, kind: str) -> None:
        rng = np.random.default_rng(seed)
        magnitude = torch.from_numpy(np.abs(VALUES[kind](rng, self.capacity)).astype(np.float32))
        magnitude[torch.from_numpy(rng.random(self.capacity) < 0.3)] = -1.0
        self.naive.magnitude = [None if m < 0 else m for m in magnitude.tolist()]
        orders: list[RankOrder] = [self.order, self.chunked, self.specification]
        for order in orders:
            order.assign_(magnitude)

    @rule()
    def restore(self) -> None:
        self.order = pickle.loads(pickle.dumps(self.order))

    @precondition(lambda self: int(self.order.count()) > 0)
    @rule(seed=st.integers(0, 2**32), path=st.sampled_from(["triton", "torch"]))
    def draw(self, seed: int, path: str) -> None:
        uniform = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        with forced(path):  # type: ignore[arg-type]
            law = rank_law(0.7, self.device)
            drawn = self.order.draw(law, uniform.to(self.device), stratified=True, beta=0.4, norm="buffer")
        with forced("torch"):
            expected = self.specification.draw(rank_law(0.7), uniform, stratified=True, beta=0.4, norm="buffer")
        assert expected is not None
        assert torch.equal(drawn[0].cpu(), expected[0])
        torch.testing.assert_close(drawn[1].cpu(), expected[1])

    @invariant()
    def ranks_are_those_of_sorting(self) -> None:
        if not hasattr(self, "order"):
            return
        self.order.check_valid()
        every, expected = torch.arange(self.capacity), self.naive.ranks()
        assert self.order.ranks_of(every.to(self.device)).tolist() == expected
        assert self.chunked.ranks_of(every).tolist() == expected
        with forced("torch"):
            assert self.specification.ranks_of(every).tolist() == expected
        assert int(self.order.count()) == max(expected)
        assert torch.equal(self.order.magnitude.cpu(), self.specification.magnitude)
        assert int(self.order.refused) == int(self.specification.refused)
        assert (self.order.on_device.claims == -1).all()


def test_random_histories_leave_the_ranks_of_sorting(gpu, small_programs, monkeypatch):
    monkeypatch.setattr(merged_order, "_SHARE", NEVER)  # which the histories change
    monkeypatch.setattr(LockstepWithSorting, "device", gpu)
    few = settings(max_examples=15, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(LockstepWithSorting, settings=few)


def lockstep(order: MergedOrder, twin: SortedOrder, index: torch.Tensor, td_error: torch.Tensor) -> None:
    """Update both and compare."""
    device, every = order.magnitude.device, torch.arange(len(twin.magnitude))
    order.update_(index.to(device), td_error.to(device), len(every))
    order.check_valid()
    with forced("torch"):
        twin.update_(index, td_error, len(every))
        assert torch.equal(order.ranks_of(every.to(device)).cpu(), twin.ranks_of(every))


@pytest.mark.parametrize("where", ["everywhere", "one place", "first", "last"])
def test_a_batch_of_several_programs_finds_its_places_wherever_they_are(gpu, where):
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(5_000, generator=generator)
    order, twin = MergedOrder(start.to(gpu)), SortedOrder(start.clone())
    for _ in range(3):
        index = torch.randint(-1, 5_000, (1_200,), generator=generator)
        spread = torch.rand(1_200, generator=generator)
        td_error = {"everywhere": spread, "one place": 0.5 + 1e-6 * spread, "first": 2 + spread, "last": 0 * spread}
        before = int(order._state[SIDE])
        lockstep(order, twin, index, td_error[where])
        assert int(order._state[SIDE]) == 1 - before  # it has been merged, not sorted in


@pytest.mark.parametrize(("batch", "merged"), [(64, True), (65, False)])
def test_batches_of_more_than_a_quarter_are_sorted_in(gpu, batch, merged):
    start = torch.rand(256)
    order, twin = MergedOrder(start.to(gpu)), SortedOrder(start.clone())
    for times in (1, 2):
        lockstep(order, twin, torch.randint(256, (batch,)), torch.rand(batch))
        assert int(order._state[SIDE]) == (times % 2 if merged else 0)
    order.fill_(0, batch, 1.0)
    order.check_valid()
    assert int(order._state[SIDE]) == int(merged)


def test_an_update_that_names_no_row_changes_nothing(gpu):
    order = MergedOrder(torch.tensor([0.1, -1.0, 0.3] * 20, device=gpu))
    ranks = order.ranks_of(torch.arange(60, device=gpu))
    nothing = torch.tensor([], dtype=torch.int64, device=gpu)
    for index, error in ((nothing, 1.0), (nothing.new_tensor([-1, 60, 99]), 1.0), (nothing.new_tensor([4]), torch.nan)):
        order.update_(index, torch.full(index.shape, error, device=gpu), 60)
        order.check_valid()
        assert torch.equal(order.ranks_of(torch.arange(60, device=gpu)), ranks)
    order.fill_(5, 0, 1.0)
    assert torch.equal(order.ranks_of(torch.arange(60, device=gpu)), ranks)
    assert int(order.refused) == 1


def test_rows_grow_from_none_to_all_by_whichever_way(gpu, small_programs, monkeypatch):
    monkeypatch.setattr(merged_order, "_SHARE", NEVER)
    order, twin = MergedOrder(empty(200, gpu)), SortedOrder(empty(200))
    for step, start in enumerate(range(0, 200, 40)):
        order.fill_(start, 30, 1.0 + step)
        twin.fill_(start, 30, 1.0 + step)
        lockstep(order, twin, torch.arange(start + 25, start + 40), torch.rand(15))
        assert int(order.count()) == start + 40
    order.assign_(empty(200, gpu))
    order.check_valid()
    assert int(order.count()) == 0
    order.fill_(7, 2, 1.0)
    order.check_valid()
    assert order.ranks_of(torch.arange(6, 10, device=gpu)).tolist() == [0, 1, 2, 0]


def test_a_change_that_was_interrupted_is_mended_at_the_next_call(gpu, monkeypatch):
    start = torch.rand(100)
    order, twin = MergedOrder(start.to(gpu)), SortedOrder(start.clone())

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    index, td_error = torch.arange(10), torch.rand(10)
    with monkeypatch.context() as patch:
        patch.setattr(merged_order.merging(), "merge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            order.update_(index.to(gpu), td_error.to(gpu), 100)
    order.on_device.claims[3] = 5  # as if it had been between claims and writes
    with forced("torch"):
        twin.update_(index, td_error, 100)
        expected = twin.ranks_of(torch.arange(100))
    assert torch.equal(order.ranks_of(torch.arange(100, device=gpu)).cpu(), expected)
    lockstep(order, twin, index, td_error.flip(0))


@pytest.mark.parametrize("path", ["triton", "torch"])
def test_an_empty_order_draws_rows_that_there_are(gpu, path):
    uniform = torch.rand(5, dtype=torch.float64, device=gpu)
    with forced(path):
        order = MergedOrder(empty(3, gpu))
        index, _ = order.draw(rank_law(0.7, gpu), uniform, stratified=True, beta=0.4, norm=None)
    assert index.tolist() == [0] * 5


def test_draws_follow_the_law_after_every_change_of_sides(gpu):
    rows, draws = 60, 12_800
    order, law = MergedOrder(torch.rand(rows).to(gpu)), rank_law(0.7, gpu)
    generator = torch.Generator().manual_seed(0)
    probability = torch.arange(1, rows + 1, dtype=torch.float64).pow(-0.7)
    probability = (probability / probability.sum()).numpy()
    assert power(probability, draws, bias=0.1) > 0.99
    for side in (1, 0):
        order.update_(torch.arange(0, rows, 5, device=gpu), torch.rand(12).to(gpu), rows)
        assert int(order._state[SIDE]) == side
        uniform = torch.rand(draws, dtype=torch.float64, generator=generator).to(gpu)
        index, _ = order.draw(law, uniform, stratified=False, beta=0.4, norm=None)
        ranks = order.ranks_of(index).cpu()
        assert_follows(torch.bincount(ranks - 1, minlength=rows), probability)


def test_all_that_a_graph_has_baked_in_stays_in_its_memory(gpu):
    order = MergedOrder(empty(100, gpu))

    def memory() -> list[int]:
        state = order.on_device
        tensors = order._keys, order._state, order.magnitude, order.count(), state.claims, state.largest
        return [tensor.data_ptr() for tensor in tensors]

    before = memory()
    order.fill_(0, 100, 1.0)
    order.update_(torch.arange(9, device=gpu), torch.rand(9, device=gpu), 100)
    order.fill_(3, 4, 1.0)
    order.assign_(torch.rand(100, device=gpu))
    assert memory() == before


def test_keys_ascend_with_ranks_and_forget_the_sign_of_nothing():
    magnitude = torch.tensor([LARGEST, 1.0, 1e-45, 0.0, -0.0, -1.0])
    keys = keys_of(magnitude)
    assert keys.tolist() == sorted(set(keys.tolist()))
    assert (keys & 0xFFFFFFFF).tolist()[:5] == [0, 1, 2, 3, 4]
    assert keys[-1] == NONE
    assert keys[3] + 1 == keys[4]


def test_each_path_has_its_order_and_the_bytes_are_those_it_takes(gpu):
    order = make_order(empty(1_000, gpu))
    assert isinstance(order, MergedOrder)
    own = order._keys.nbytes + order.magnitude.nbytes + order.on_device.claims.nbytes
    assert order_bytes(1_000, torch.device("cuda")) == own
    with forced("torch"):
        assert isinstance(make_order(empty(3, gpu), 2), SortedOrder)
    with forced("numba"):
        assert isinstance(make_order(empty(3)), ChunkedOrder)
    with pytest.raises(ValueError, match="an order on a device cannot be shared by several processes"):
        order.share_memory_()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_and_calls_between_them_change_one_order(gpu):
    order, law = MergedOrder(torch.rand(4_000, device=gpu)), rank_law(0.7, gpu)
    index = torch.randint(4_000, (256,), device=gpu)
    td_error, uniform = torch.rand(256, device=gpu), torch.rand(256, dtype=torch.float64, device=gpu)
    order.update_(index, td_error, 4_000)
    order.draw(law, uniform, stratified=True, beta=0.4, norm="buffer")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order.update_(index, td_error, 4_000)
        drawn, _ = order.draw(law, uniform, stratified=True, beta=0.4, norm="buffer")
    for step in range(6):
        index.random_(0, 4_000)
        td_error.uniform_()
        uniform.uniform_()
        graph.replay()
        order.check_valid()
        expected, _ = order.draw(law, uniform, stratified=True, beta=0.4, norm="buffer")
        assert torch.equal(drawn, expected)
        order.fill_(100 * step, 37, 0.5)
        order.check_valid()
    assert int(order._state[COUNT]) == 4_000
