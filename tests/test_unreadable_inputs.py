"""Tensors without the memory that they need are refused, and nothing is read or changed.

Each scenario runs in a process of its own, because a fault here ends the process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rlbuf_td import NStepSampler, PackedStorage, ProportionalSampler, ReplayBuffer, TrajectoryIndex, UniformSampler
from rlbuf_td.functional import generalized_advantage_estimate
from tests.processes.test_sharing import elsewhere

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
ROWS = 64


def steps(count: int) -> TensorDict:
    after = {"reward": torch.ones(count, 1), "done": torch.zeros(count, 1, dtype=torch.bool)}
    return TensorDict({"x": torch.ones(count, 300), "next": after}, [count])


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_behind_an_offset(tensor: Tensor) -> Tensor:
    tensor = torch.cat((tensor[:1], tensor))[1:]
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes - 8)
    return tensor


def nested(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: nested tensors are a prototype
        return torch.nested.nested_tensor([*tensor])


def fake(tensor: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(tensor)


SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "freed": freed,
    "freed behind an offset": freed_behind_an_offset,
    "shrunk": shrunk,
    "nested": nested,
    "fake": fake,
}


def made(sampler: Any = None) -> ReplayBuffer:
    """Return a buffer whose calls are compiled already."""
    rb = ReplayBuffer(storage=PackedStorage(ROWS), sampler=sampler or ProportionalSampler(ROWS), batch_size=8)
    for _ in range(3):
        rb.extend(steps(4))
        rb.update_tensordict_priority(rb.sample().set("td_error", torch.ones(8)))
    return rb


def write(how: str, spoil: Callable[[Tensor], Tensor]) -> None:
    rb, data = made(), steps(4)
    data = data if how == "extend" else data[0]
    state = rb.state_dict()
    with pytest.raises((ValueError, RuntimeError), match=r"no memory|nested"):
        getattr(rb, how)(data.set("x", spoil(data["x"])))
    assert rb.write_count == 12
    before, after = (each["_storage"]["rows"].view(torch.uint8) for each in (state, rb.state_dict()))
    assert after.equal(before)  # as bytes: what pads a row may be NaN


def update(spoil: Callable[[Tensor], Tensor], entry: str) -> None:
    rb = made()
    batch = rb.sample().set("td_error", torch.full((8,), 5.0))
    batch._tensordict[entry] = spoil(batch[entry])  # ``set`` would read it
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"no memory|nested"):
        rb.update_tensordict_priority(batch)
    assert rb.sampler.priority(torch.arange(12)).eq(1.0).all()


def look_up(spoil: Callable[[Tensor], Tensor]) -> None:
    rb = made()
    for call in (TrajectoryIndex.of(rb.storage).length, rb.sampler.priority, rb.storage.get):
        with pytest.raises((RuntimeError, TypeError, ValueError, IndexError), match=r"no memory|nested|not allocated"):
            call(spoil(torch.arange(10)))


def estimate(spoil: Callable[[Tensor], Tensor]) -> None:
    value, done = torch.ones(2, 500, 1), torch.zeros(2, 500, 1, dtype=torch.bool)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        generalized_advantage_estimate(0.9, 0.9, spoil(value), value, value, done, done)


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("how", ["extend", "add"])
def test_writes_refuse_tensors_without_memory(how: str, spoil: Callable[[Tensor], Tensor]) -> None:
    elsewhere(write, how, spoil)


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("entry", ["td_error", "index", "sampled_at"])
def test_updates_refuse_tensors_without_memory(spoil: Callable[[Tensor], Tensor], entry: str) -> None:
    elsewhere(update, spoil, entry)


@pytest.mark.parametrize("spoil", [freed, shrunk, nested])
def test_look_ups_refuse_an_index_without_memory(spoil: Callable[[Tensor], Tensor]) -> None:
    elsewhere(look_up, spoil)


@pytest.mark.parametrize("spoil", [freed, shrunk, nested])
def test_advantages_refuse_values_without_memory(spoil: Callable[[Tensor], Tensor]) -> None:
    elsewhere(estimate, spoil)


def in_fake_mode(sampler: Callable[[], Any], calls: int) -> None:
    rb = made(sampler())
    for _ in range(calls):
        rb.sample()
    warnings.simplefilter("ignore")  # torch: a fake tensor has no address
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="FakeTensorMode"):
        rb.sample()
    batch = rb.sample()
    assert batch["x"].eq(1.0).all()


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize(
    "sampler",
    [UniformSampler, lambda: ProportionalSampler(ROWS), lambda: NStepSampler(UniformSampler(), 3, 0.9)],
    ids=["uniform", "proportional", "n-step"],
)
def test_nothing_is_drawn_in_fake_tensor_mode(sampler: Callable[[], Any], calls: int) -> None:
    elsewhere(in_fake_mode, sampler, calls)


def functionalized(work: Callable[[ReplayBuffer, Tensor], object]) -> None:
    rb = made()

    def step(x: Tensor) -> Tensor:
        work(rb, x)
        return x

    with pytest.raises((RuntimeError, ValueError), match="no memory"):
        torch.func.functionalize(step)(torch.ones(8))
    assert rb.write_count == 12
    assert rb.sampler.priority(torch.arange(12)).eq(1.0).all()


def test_writes_and_updates_are_refused_in_functionalize() -> None:
    elsewhere(functionalized, lambda rb, x: rb.extend(steps(8).set("x", x[:, None].expand(8, 300) * 2)))
    elsewhere(functionalized, lambda rb, x: rb.update_tensordict_priority(rb.sample().set("td_error", x * 2)))
