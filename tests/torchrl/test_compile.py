"""What can be compiled into one graph, and stays compiled while a buffer fills: estimates and samplers' cores."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer

from rlbuf_td import (
    FreshRowsSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    UniformSampler,
)
from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.episodes import Lanes, Spans, build_, spans
from rlbuf_td.kernels.rank_order import SortedOrder, rank_law
from rlbuf_td.kernels.sum_tree import SumTree
from rlbuf_td.kernels.wrappers import Law, choose_goals, n_step_sums, windows
from tests.catalogue import SAMPLERS
from tests.catalogue import numbered_rows as data
from tests.kernels.invariants import check_tree

CPU = torch.device("cpu")
SIZES = [100, 101, 350, 999, 1_000]  # of a buffer that fills


@pytest.fixture(autouse=True)
def compiled_once() -> Iterator[None]:
    """Begin without graphs, and fail a test that compiles a function twice."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def whole(function: Callable[..., Any], backend: str = "eager") -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("norm", ["buffer", "batch", None])
def test_proportional_draws_compile_once_while_the_buffer_fills(norm):
    def step(tree: SumTree, uniform: Tensor, error: Tensor, rows: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        drawn = sum_tree.draw(tree, uniform, True, rows, beta, norm)
        assert drawn is not None
        sum_tree.update_(tree, drawn[0], error, rows, 0.6, 1e-6)
        return drawn

    compiled, generator = whole(step), torch.Generator().manual_seed(0)
    tree = SumTree.empty(1_000)
    sum_tree.update_(tree, torch.arange(100), torch.ones(100), 1_000, 0.6, 1e-6)
    expected = copy.deepcopy(tree)
    for k, size in enumerate(SIZES):
        uniform = torch.rand(32, dtype=torch.float64, generator=generator)
        error = torch.rand(32, generator=generator)
        rows, beta = number(size), number(0.4 + 0.1 * k)
        index, weight = compiled(tree, uniform, error, rows, beta)
        again = step(expected, uniform, error, rows, beta)
        assert torch.equal(index, again[0])
        torch.testing.assert_close(weight, again[1])
        sum_tree.fill_(tree, size - 1, 1, 2.0, 0.6, 1e-6)
        sum_tree.fill_(expected, size - 1, 1, 2.0, 0.6, 1e-6)
    check_tree(tree, 0.6, 1e-6)
    torch.testing.assert_close(tree.weight, expected.weight)


def test_draws_by_rank_compile_once_while_the_buffer_fills():
    law = rank_law(0.7, CPU)

    def step(magnitude: Tensor, uniform: Tensor, index: Tensor, error: Tensor) -> Any:
        order = SortedOrder(magnitude)
        order.update_(index, error, 1_000)
        return order.draw(law, uniform, stratified=True, beta=0.4, norm="buffer")

    compiled = whole(step)
    magnitude = torch.full((1_000,), -1.0)
    for size in SIZES:
        magnitude[:size] = torch.rand(size)
        given = torch.rand(32, dtype=torch.float64), torch.arange(32)
        error, twin = torch.rand(32), magnitude.clone()
        index, weight = compiled(magnitude, *given, error)
        expected = step(twin, *given, error)
        assert torch.equal(index, expected[0])
        torch.testing.assert_close(weight, expected[1])
        assert int(index.max()) < size


class OneLane(NamedTuple):
    """Rows ``[1000]`` whose episodes are looked up with torch."""

    of: Lanes
    address: int = 0
    steps: int = 1_000
    lanes: int = 1

    def spans(self, cells: Tensor) -> Spans:
        return spans(self.of, cells)


def test_goals_and_n_step_sums_compile_once_while_the_buffer_fills():
    law = Law((0.3, 0.4, 0.5, 0.8), False, -0.1)

    def step(of: Lanes, rows: Tensor, uniform: Tensor, reward: Tensor, live: Any) -> Any:
        episodes = OneLane(of)
        window, ahead = windows(episodes, rows, 3)
        sums = n_step_sums(reward[window], torch.zeros_like(window, dtype=torch.bool), ahead, 0.9)
        return choose_goals(episodes, rows, uniform, law, live), sums

    compiled, generator = whole(step), torch.Generator().manual_seed(0)
    end = torch.rand(1_000, 1, generator=generator) < 0.1
    reward = torch.rand(1_000)
    for size in SIZES:
        of = Lanes(
            torch.zeros(1, 1_000, 2, dtype=torch.int32),
            torch.zeros(2, 1).long(),
            torch.zeros(2, 1).long(),
            torch.tensor([0]),
            torch.tensor([size]),
        )
        build_(of, end, torch.zeros_like(end).long())
        rows = torch.randint(size, (32,), generator=generator)
        uniform = torch.rand(32, dtype=torch.float64, generator=generator)
        live = torch.tensor(size)
        got = compiled(of, rows, uniform, reward, live)
        torch.testing.assert_close(got, step(of, rows, uniform, reward, live))


@pytest.mark.slow
def test_writes_and_batches_compile_no_more_once_the_ring_is_full():
    rb = ReplayBuffer(storage=PackedStorage(100), sampler=ProportionalSampler(100), batch_size=8)

    @torch.compile(backend="eager")
    def extend_and_sample(rows: TensorDict) -> Any:
        rb.extend(rows)
        return rb.sample()

    with torch._dynamo.config.patch(error_on_recompile=False):
        for k in range(6):
            extend_and_sample(TensorDict({"a": torch.full((20, 1), k)}, [20]))
    for k in range(6, 12):
        batch = extend_and_sample(TensorDict({"a": torch.full((20, 1), k)}, [20]))
        age = (k - batch["index"] // 20) % 5  # in writes
        assert torch.equal(batch["a"][:, 0], k - age)


def made_for_compiling(name: str) -> ReplayBuffer:
    sampler = FreshRowsSampler(ProportionalSampler(64)) if name == "fresh" else SAMPLERS.get(name, RankSampler)(64)
    rb = ReplayBuffer(storage=PackedStorage(64), sampler=sampler, batch_size=12)
    rb.extend(data(20))
    return rb


@pytest.mark.slow
@pytest.mark.parametrize("name", ["floored", "rank", "windows", "fresh", "mixture"])
def test_a_compiled_update_raises_the_priority_of_new_rows(name):
    one, other = made_for_compiling(name), made_for_compiling(name)
    rb: Any = ReplayBufferMixture({"a": one, "b": other}, {"a": 1, "b": 1}, batch_size=12) if name == "mixture" else one

    def update() -> None:
        batch = rb.sample()
        batch["td_error"] = torch.full(batch.batch_size, 50.0)
        rb.update_tensordict_priority(batch)

    with torch._dynamo.config.patch(error_on_recompile=False):
        torch.compile(update, backend="eager")()
        with pytest.raises(ValueError, match="NaN or infinite"):
            torch.compile(lambda: one.update_priority(torch.arange(1), torch.tensor([torch.nan])))()
    one.extend(data(1))
    priority = one.sampler.priority(torch.arange(21), storage=one.storage)
    assert priority[20] == 50 > priority.min()


def test_torchrls_buffer_with_our_sampler_is_compiled_once_while_it_fills():
    storage = LazyTensorStorage(100, compilable=True)
    rb = TorchRLReplayBuffer(storage=storage, sampler=UniformSampler(), batch_size=8, compilable=True)

    @torch.compile(backend="eager")
    def extend_and_sample(data: Tensor) -> Any:
        rb.extend(data)
        return rb.sample()

    with torch._dynamo.config.patch(error_on_recompile=False):
        for _ in range(3):
            extend_and_sample(torch.zeros(10, 1))
    for _ in range(5):
        assert extend_and_sample(torch.zeros(10, 1)).shape == (8, 1)


def learn(backend: str) -> tuple[ReplayBuffer, set[int]]:
    """Train a DQN by a compiled step that samples, learns and updates priorities, while the buffer fills and wraps."""
    sampler, eps = ProportionalSampler(400), 1e-8
    rb = ReplayBuffer(storage=PackedStorage(400), sampler=sampler, batch_size=32)
    network = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)

    def step(tree: SumTree, matrix: Tensor, layout: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        drawn = sum_tree.draw(tree, torch.rand(32, dtype=torch.float64), True, rows, 0.4, "buffer")
        assert drawn is not None
        index, weight = drawn
        leaves = layout.columns(matrix.index_select(0, index))
        row = dict(zip([leaf.key for leaf in layout.leaves], leaves, strict=True))
        with torch.no_grad():
            best = network(row["next", "observation"]).amax(1, keepdim=True)
            target = row["next", "reward"] + 0.9 * torch.where(row["next", "done"], 0.0, best)
        td_error = (network(row["observation",]).gather(1, row["action",]) - target)[:, 0]
        sum_tree.update_(tree, index, td_error.detach(), rows, 0.6, eps)
        return (weight * td_error**2).mean(), index

    compiled, rows = whole(step, backend), number(0)
    losses: list[float] = []
    seen: set[int] = set()
    for _ in range(40):
        # Rows end at once, and their reward is their action: a task that a few steps solve.
        action = torch.randint(2, (25, 1))
        after = {"observation": torch.randn(25, 4), "reward": action.float(), "done": torch.ones(25, 1) > 0}
        rb.extend(TensorDict({"observation": torch.randn(25, 4), "action": action, "next": after}, [25]))
        rows.fill_(len(rb))
        loss, index = compiled(sampler.tree, rb.storage.rows.flat, rb.storage.rows.layout, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seen |= set(index.tolist())
    check_tree(sampler.tree, 0.6, eps)
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    return rb, seen


def test_a_dqn_step_that_samples_is_one_graph_while_the_buffer_fills():
    rb, seen = learn("eager")
    assert max(seen) < len(rb) == 400
    assert len(seen) > 300


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_dqn_step_that_samples_can_be_compiled_to_machine_code():
    learn("inductor")
