"""What can be compiled into one graph, and stays compiled while a buffer fills."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer

from rlbuf_td import (
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    UniformSampler,
)
from rlbuf_td.kernels import sum_tree
from rlbuf_td.kernels.strata import stratification_of
from rlbuf_td.kernels.sum_tree import SumTree
from tests.catalogue import SAMPLERS
from tests.catalogue import numbered_rows as data


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


@pytest.mark.slow
def test_writes_and_batches_compile_no_more_once_the_ring_is_full():
    rb = ReplayBuffer(
        storage=PackedStorage(100), sampler=ProportionalSampler(100), batch_size=8
    )

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
    sampler = SAMPLERS.get(name, RankSampler)(64)
    rb = ReplayBuffer(storage=PackedStorage(64), sampler=sampler, batch_size=12)
    rb.extend(data(20))
    return rb


@pytest.mark.slow
@pytest.mark.parametrize("name", ["floored", "rank", "windows", "mixture"])
def test_a_compiled_update_raises_the_priority_of_new_rows(name):
    one, other = made_for_compiling(name), made_for_compiling(name)
    rb: Any = (
        ReplayBufferMixture({"a": one, "b": other}, {"a": 1, "b": 1}, batch_size=12)
        if name == "mixture"
        else one
    )

    def update() -> None:
        batch = rb.sample()
        batch["td_error"] = torch.full(batch.batch_size, 50.0)
        rb.update_tensordict_priority(batch)

    with torch._dynamo.config.patch(error_on_recompile=False):
        torch.compile(update, backend="eager")()
        with pytest.raises(ValueError, match="NaN or infinite"):
            torch.compile(
                lambda: one.update_priority(torch.arange(1), torch.tensor([torch.nan]))
            )()
    one.extend(data(1))
    sampler = getattr(one.sampler, "innermost", one.sampler)
    priority = sampler.priority(torch.arange(21), storage=one.storage)
    assert priority[20] == 50 > priority.min()


@pytest.mark.slow
def test_torchrls_buffer_with_our_sampler_is_compiled_once_while_it_fills():
    storage = LazyTensorStorage(100, compilable=True)
    rb = TorchRLReplayBuffer(
        storage=storage, sampler=UniformSampler(), batch_size=8, compilable=True
    )

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
    """Train a DQN by a compiled step that samples, learns and updates priorities, while
    the buffer fills and wraps."""
    sampler, eps = ProportionalSampler(400), 1e-8
    rb = ReplayBuffer(storage=PackedStorage(400), sampler=sampler, batch_size=32)
    network = torch.nn.Sequential(
        torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    law = stratification_of(32, True, 0.4, "buffer")

    def step(
        tree: SumTree, matrix: Tensor, layout: Any, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        uniform = torch.rand(32, dtype=torch.float64)
        index, weight = sum_tree.draw(tree, uniform, rows, law)
        leaves = layout.columns(matrix.index_select(0, index))
        row = dict(zip([leaf.key for leaf in layout.leaves], leaves, strict=True))
        with torch.no_grad():
            best = network(row["next", "observation"]).amax(1, keepdim=True)
            target = row["next", "reward"] + 0.9 * torch.where(
                row["next", "done"], 0.0, best
            )
        td_error = (network(row["observation",]).gather(1, row["action",]) - target)[
            :, 0
        ]
        sum_tree.update_(tree, index, td_error.detach(), rows, 0.6, eps)
        return (weight * td_error**2).mean(), index

    compiled, rows = whole(step, backend), number(0)
    losses: list[float] = []
    seen: set[int] = set()
    for _ in range(40):
        # Rows end at once, and their reward is their action: a task that a few steps
        # solve.
        action = torch.randint(2, (25, 1))
        after = {
            "observation": torch.randn(25, 4),
            "reward": action.float(),
            "done": torch.ones(25, 1) > 0,
        }
        rb.extend(
            TensorDict(
                {"observation": torch.randn(25, 4), "action": action, "next": after},
                [25],
            )
        )
        rows.fill_(len(rb))
        loss, index = compiled(
            sampler.tree, rb.storage.rows.flat, rb.storage.rows.layout, rows
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seen |= set(index.tolist())
    sampler.tree.check(0.6, eps)
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
