"""The compiled and the torch form of wrapped samplers in lockstep: equal batches, reports and priorities."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rlbuf_td import (
    FreshRowsSampler,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)
from tests.catalogue import assert_same
from tests.worlds import World, reward_fn, terminated_fn


def hindsight(inner: Any, **given: Any) -> HindsightSampler:
    return HindsightSampler(inner, reward_fn, **given)


def per() -> ProportionalSampler:
    return ProportionalSampler(120)


KINDS: dict[str, Any] = {
    "uniform": UniformSampler,
    "unique": lambda: UniformSampler(unique=True),
    "young": lambda: UniformSampler(max_age=40),
    "proportional": per,
    "weights by batch": lambda: ProportionalSampler(120, weight_norm="batch"),
    "plain weights": lambda: ProportionalSampler(120, weight_norm=None, stratified=False),
    "rank": lambda: RankSampler(120),
    "recency": lambda: RecencySampler(30),
    "fresh": lambda: FreshRowsSampler(per()),
    "n-step": lambda: NStepSampler(per(), 3, 0.9),
    "n-step of fresh": lambda: NStepSampler(FreshRowsSampler(per()), 2, 0.9),
    "hindsight": lambda: hindsight(per(), terminated_fn=terminated_fn),
    "random goals": lambda: hindsight(FreshRowsSampler(UniformSampler()), strategy={"episode": 0.5, "random": 0.5}),
    "n-step of hindsight": lambda: NStepSampler(hindsight(per(), terminated_fn=terminated_fn), 4, 0.9),
    "n-step of goals by rank": lambda: NStepSampler(hindsight(RankSampler(120), strategy="final"), 2, 1.0),
    "one step of random goals": lambda: NStepSampler(hindsight(UniformSampler(), strategy="random"), 1, 0.9),
}
WINDOWS: list[dict[str, Any]] = [
    {"boundary": "strict"},
    {"boundary": "strict", "burn_in": 2},
    {"boundary": "strict", "burn_in": 1, "output_layout": "batch_time"},
    {"boundary": "shift", "burn_in": 2, "priority": "mix"},
    {"boundary": "pad"},
    {},  # no sequences
]


def make(kind: Any, given: dict[str, Any], lanes: int) -> World:
    inner = kind()
    sampler = SequenceSampler(inner, 3, **given) if given else inner
    has_goals = isinstance(getattr(inner, "sampler", inner), HindsightSampler) or isinstance(inner, HindsightSampler)
    storage = partial(PackedStorage, share_next=lanes == 2 and given.get("burn_in") == 2 and not has_goals)
    made = World.of(sampler, 120 // lanes, lanes, 1.7, ReplayBuffer, storage=storage)
    made.rb.sampler._rng = torch.Generator().manual_seed(3)
    return made


@pytest.mark.parametrize(("given", "lanes"), [*zip(WINDOWS, [1, 2, 2, 1, 2, 1], strict=True)], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_compiled_form_equals_the_torch_form(kind: Any, given: dict[str, Any], lanes: int) -> None:
    compiled, reference = make(kind, given, lanes), make(kind, given, lanes)
    outermost: Any = reference.rb.sampler
    method = "draw_batch" if isinstance(outermost, NStepSampler | SequenceSampler | HindsightSampler) else "draw"
    setattr(outermost, method, getattr(outermost, method))  # whatever is overridden has no compiled form
    rounds = 0
    for number in range(14):
        ours, theirs = (made.rb.sample((3 + given.get("burn_in", 0)) * 16) for made in (compiled, reference))
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        assert_same(ours, theirs)
        rounds += ", sample" in compiled.rb.compiled.partition("; not")[0]
        for made, batch in ((compiled, ours), (reference, theirs)):
            if "priority_weight" in batch.keys():
                error = torch.rand(batch.batch_size, generator=torch.Generator().manual_seed(number))
                made.rb.update_tensordict_priority(batch.set("td_error", error))
            if number % 4 == 0:
                made.write(3)
            if number == 10 and hasattr(made.rb.sampler, "n_steps"):
                made.rb.sampler.n_steps = 3
    assert rounds > 10
    assert "not sample" in reference.rb.compiled


def test_a_number_of_steps_without_memory_for_them_leaves_the_buffer_usable() -> None:
    made = make(KINDS["n-step of hindsight"], {}, 1)
    for _ in range(3):
        made.rb.sample(16)
    sampler: Any = made.rb.sampler
    sampler.n_steps = 1 << 50
    for _ in range(3):
        with pytest.raises((RuntimeError, MemoryError)):
            made.rb.sample(16)
    sampler.n_steps = 3
    for _ in range(3):
        assert made.rb.sample(16)["steps_to_next_obs"].max() <= 3


def freed(batch: Any) -> None:
    for leaf in batch.values(True, True):
        leaf.untyped_storage().resize_(0)


def moved(batch: Any) -> None:
    for leaf in batch.values(True, True):
        leaf.share_memory_()


@pytest.mark.parametrize("outer", [lambda h: NStepSampler(h, 3, 0.9), lambda h: SequenceSampler(h, 3)])
def test_a_reward_function_may_move_its_batch_but_not_free_it(outer: Any) -> None:
    change: list[Any] = []

    def reward(batch: Any) -> torch.Tensor:
        found = reward_fn(batch)
        for each in change:
            each(batch)
        return found

    rb, plain = (
        World.of(outer(HindsightSampler(UniformSampler(), fn)), 120, 1, 1.7, ReplayBuffer).rb
        for fn in (reward, reward_fn)
    )
    for each in (rb, plain):
        each.sampler._rng = torch.Generator().manual_seed(3)
        each.sample(96)
        each.sample(96)
    change[:] = [moved]
    for _ in range(5):
        assert_same(rb.sample(96), plain.sample(96))
    assert ", sample" in rb.compiled
    change[:] = [freed]
    with pytest.raises(RuntimeError, match=r"no memory|resized or freed"):
        rb.sample(96)
    change.clear()
    assert len(rb.sample(96)) == 96
