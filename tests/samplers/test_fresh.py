"""New rows first: each exactly once, oldest first, whatever is written, saved or replaced; the rest as before."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import TensorDict

from rlbuf_td import (
    FreshRowsSampler,
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    UniformSampler,
)
from rlbuf_td.samplers.priorities import Law
from tests.catalogue import SAMPLERS, buffer_of
from tests.statistics import assert_follows, power

STEPS, BATCH = 15, 8
INNER = {name: SAMPLERS[name] for name in ("uniform", "proportional", "rank", "minibatch", "recency")}
INNER["whole minibatches"] = lambda rows: MinibatchSampler(drop_last=True)


def rows(first: int, count: int) -> TensorDict:
    return TensorDict({"number": torch.arange(first, first + count)}, [count])


class Numbered:
    """A buffer of numbered rows, with the numbers that no batch has had yet, by definition."""

    def __init__(self, inner: str, fresh: int, lanes: int = 0, **parts: Any) -> None:
        self.lanes, self.written = lanes, 0
        self.undrawn: list[int] = []
        sampler = FreshRowsSampler(INNER[inner](4 * STEPS), fresh)
        self.rb = buffer_of(STEPS, sampler, lanes, batch_size=BATCH, **parts)

    def write(self, count: int) -> None:
        lanes = max(1, self.lanes)
        number = torch.arange(self.written, self.written + count * lanes).view(count, lanes)
        number = number.t().contiguous() if self.lanes else number[:, 0]
        self.rb.extend(TensorDict({"number": number}, number.shape))
        self.undrawn += range(self.written, self.written + count * lanes)
        self.written += count * lanes
        self.undrawn = [number for number in self.undrawn if number >= self.written - STEPS * lanes]

    def check_sample(self) -> None:
        batch = self.rb.sample()
        count = min(self.rb.sampler.fresh, len(batch), len(self.undrawn))  # the last batch of an epoch is short
        assert batch["number"][:count].tolist() == self.undrawn[:count]
        del self.undrawn[:count]
        index = batch["index"] if self.lanes == 0 else batch["index"] @ torch.tensor([self.lanes, 1])
        assert torch.equal(self.rb.storage[:]["number"].reshape(-1)[index], batch["number"])


ACTIONS = st.lists(st.one_of(st.integers(1, 40), st.sampled_from(["sample", "sample", "empty", "reload"])), max_size=25)


@given(st.sampled_from([*INNER]), st.integers(1, 12), st.sampled_from([0, 1, 3]), ACTIONS)
@example("minibatch", 2, 0, ["sample", "sample"])
def test_each_row_comes_first_once(inner, fresh, lanes, actions):
    made = Numbered(inner, fresh, lanes)
    made.write(9)
    for action in actions:
        if action == "sample":
            made.check_sample()
        elif action == "empty":
            made.rb.empty()
            made.undrawn = []
            made.write(8)
        elif action == "reload":
            made.rb.load_state_dict(made.rb.state_dict())
        else:
            made.write(action)


@pytest.mark.parametrize("inner", ["uniform", "proportional"])
def test_the_rest_of_a_batch_follows_the_wrapped_law(inner):
    made = Numbered(inner, 3)
    made.write(STEPS)
    sampler: Any = made.rb.sampler
    error = torch.linspace(0.2, 3.0, STEPS)
    made.rb.update_priority(torch.arange(STEPS), error)
    counts, draws, batch = torch.zeros(STEPS), 1_000, 203
    made.check_sample()
    for _ in range(draws):
        sampler.queue.begin(np.array([3]))
        flat, _ = sampler._draw(made.rb.storage, batch)
        assert flat[:3].tolist() == [12, 13, 14]
        counts += torch.bincount(flat[3:], minlength=STEPS)
    weight = error.double() ** 0.6 if inner == "proportional" else torch.ones(STEPS).double()
    assert power((weight / weight.sum()).numpy(), draws * (batch - 3), bias=0.02) > 0.97
    assert_follows(counts, weight / weight.sum())


@pytest.mark.parametrize("norm", ["buffer", "batch", None])
@pytest.mark.parametrize("cls", [ProportionalSampler, RankSampler])
def test_fresh_rows_have_the_weights_of_the_wrapped_law(cls, norm):
    inner = cls(STEPS, alpha=0.7, beta=0.5, weight_norm=norm)
    rb = ReplayBuffer(storage=PackedStorage(STEPS), sampler=FreshRowsSampler(inner, 5), batch_size=BATCH)
    rb.extend(TensorDict({"x": torch.arange(STEPS)}, [STEPS]))
    rb.update_priority(torch.arange(STEPS), torch.linspace(4, 0.1, STEPS))  # fresh rows have the largest weights
    batch = rb.sample()
    every = (STEPS * inner.probability(torch.arange(STEPS))) ** -0.5
    largest = {"buffer": every.max(), "batch": every[batch["index"]].max(), None: torch.tensor(1.0)}
    scale = 1 / largest[norm].double()
    torch.testing.assert_close(batch["priority_weight"].double(), every[batch["index"]] * scale, rtol=1e-5, atol=0)
    batch["td_error"] = torch.full((BATCH,), 7.0)
    rb.update_tensordict_priority(batch)
    assert (inner.priority(batch["index"]) == 7).all()


@pytest.mark.parametrize("norm", ["buffer", "batch", None])
def test_weights_stay_finite_if_a_fresh_row_is_almost_never_drawn(norm):
    inner = ProportionalSampler(4, alpha=1.0, beta=2.0, weight_norm=norm)
    rb = ReplayBuffer(storage=PackedStorage(4), sampler=FreshRowsSampler(inner, 1), batch_size=BATCH)
    index = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    rb.update_priority(index, torch.tensor([0.0, 1e30, 1e30, 1e30]))
    assert rb.sample()["priority_weight"].isfinite().all()
    compiled, reference = torch.zeros(2), torch.zeros(2)
    for weigh_, weight in ((inner.law.weigh_beside_, compiled), (partial(Law.weigh_beside_, inner.law), reference)):
        for scale in (0.0, 0.25):
            weight[0] = scale
            weigh_(index[:1], index[1:2], weight)
            assert weight.isfinite().all()
    assert torch.equal(compiled, reference)


@pytest.mark.parametrize("capacity", [STEPS, 6, 40])
def test_rows_stay_fresh_across_a_dump_also_into_another_capacity(capacity, tmp_path: Path):
    made = Numbered("uniform", 4)
    made.write(9)
    made.check_sample()
    made.write(2)
    made.rb.dumps(tmp_path)
    other = Numbered("uniform", 1)
    sampler = FreshRowsSampler(UniformSampler())
    other.rb = ReplayBuffer(storage=PackedStorage(capacity), sampler=sampler, batch_size=BATCH)
    if capacity < 9:
        with pytest.warns(UserWarning, match="oldest time steps"):
            other.rb.loads(tmp_path)
    else:
        other.rb.loads(tmp_path)
    assert "fresh=4" in repr(other.rb.sampler)
    other.written, other.undrawn = made.written, [number for number in made.undrawn if number >= 11 - capacity]
    for _ in range(4):
        other.check_sample()
    assert not other.undrawn


def test_fresh_rows_beside_unique_rows_are_not_repeated():
    sampler = FreshRowsSampler(UniformSampler(unique=True), 5)
    rb = ReplayBuffer(storage=PackedStorage(STEPS), sampler=sampler, batch_size=STEPS - 2)
    for first in range(0, 5 * STEPS, 5):
        rb.extend(rows(first, 5))
        if len(rb) == STEPS:
            assert len(set(rb.sample()["index"].tolist())) == STEPS - 2


def test_replaced_rows_are_not_fresh_again():
    made = Numbered("uniform", 2)
    made.write(STEPS)
    for _ in range(STEPS):
        made.check_sample()
    made.rb[3:5] = made.rb[3:5].clone()
    made.write(3)
    assert made.rb.sample()["number"][:2].tolist() == [15, 16]
    assert made.rb.sample()["number"][0] == 17


def test_a_copy_may_reach_the_storage_before_its_buffer():
    rb = ReplayBuffer(storage=PackedStorage(10), sampler=FreshRowsSampler(UniformSampler(), 2), batch_size=4)
    rb.extend(rows(0, 9))
    pickle.loads(pickle.dumps(rb.writer))
    storage, other = copy.deepcopy((rb.storage, rb))
    assert other.storage is storage is not rb.storage
    assert other.sample()["number"][:2].tolist() == [0, 1]


def test_the_storage_of_fresh_rows_can_be_replaced():
    rb = ReplayBuffer(storage=PackedStorage(10), sampler=FreshRowsSampler(UniformSampler(), 2), batch_size=2)
    rb.extend(rows(0, 5))
    rb.sample()
    rb.set_storage(PackedStorage(20))
    rb.extend(rows(7, 2))
    assert rb.sample()["number"].tolist() == [7, 8]


@pytest.mark.parametrize("line", range(1, 60))
def test_an_interrupt_in_the_bookkeeping_leaves_whole_rows(line):
    rb = buffer_of(STEPS, FreshRowsSampler(UniformSampler(), 2), 3, partial(PackedStorage, lanes=3), batch_size=4)
    rb.extend(rows(0, 5), lanes=0)
    left = line

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.endswith("samplers/fresh.py"):
            return None
        left -= event == "line"
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            rb.sample()
    finally:
        sys.settrace(before)
    for first in range(5, 35, 3):
        rb.extend(rows(first, 3), lanes=torch.tensor([0, 1, 2]))
        batch = rb.sample()
        step, lane = batch["index"].unbind(1)
        assert torch.equal(rb.storage["number"][step, lane], batch["number"])
