"""Every sampler, within every wrapper, over every kind of buffer, against brute force."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import LazyTensorStorage, Sampler, TensorDictReplayBuffer, TensorDictRoundRobinWriter

from rlbuf_td import (
    FreshRowsSampler,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    ReplayBufferMixture,
    RingWriter,
    SequenceSampler,
    UniformSampler,
)
from rlbuf_td.kernels.episodes import FlagBoundaries
from tests.statistics import assert_follows
from tests.worlds import Cell, Fields, Recipe, World, expected, reward_fn, terminated_fn, window

SAMPLERS = "uniform", "proportional", "rank"
PRIORITIZED = *SAMPLERS[1:], "floored", "fresh over proportional"
RECIPES = {
    "plain": Recipe(),
    "hindsight": Recipe(hindsight=True),
    "n-step": Recipe(n_step=True),
    "n-step over hindsight": Recipe(n_step=True, hindsight=True),
    "sequence": Recipe(sequence=True),
    "sequence over hindsight": Recipe(sequence=True, hindsight=True),
    "sequence over n-step": Recipe(sequence=True, n_step=True),
    "all": Recipe(sequence=True, n_step=True, hindsight=True),
}
FILLS = {"filling": 0.6, "full": 1.0, "wrapped": 2.4}
POOLED = partial(PackedStorage, share_next=True)
POOLED_GOALS = partial(PackedStorage, share_next=["achieved_goal"])
BUFFERS: dict[str, Any] = {
    "ours": (ReplayBuffer, PackedStorage, RingWriter),
    "TorchRL's": (TensorDictReplayBuffer, PackedStorage, RingWriter),
    "ours, observations once": (ReplayBuffer, POOLED_GOALS, RingWriter),
    "TorchRL's, observations once": (TensorDictReplayBuffer, POOLED, RingWriter),
    "ours over TorchRL's storage": (ReplayBuffer, LazyTensorStorage, RingWriter),
    "TorchRL's throughout": (TensorDictReplayBuffer, LazyTensorStorage, TensorDictRoundRobinWriter),
}
ANCHORS = 40  # drawn at once


def innermost(kind: str, capacity: int) -> Any:
    if kind == "uniform":
        return UniformSampler()
    if kind == "recency":
        return RecencySampler(half_life=15.0, window=40)
    if kind == "fresh":
        return FreshRowsSampler(UniformSampler(), 5)
    # Weights relative to the whole buffer; draws independent of each other, as the test of their law expects.
    given: dict[str, Any] = {"alpha": 0.7, "beta": 0.5, "stratified": False}
    if kind == "rank":
        return RankSampler(capacity, **given)
    sampler = ProportionalSampler(capacity, **given, min_priority=1.0 if kind == "floored" else 0.0)
    return FreshRowsSampler(sampler, 5) if kind.startswith("fresh") else sampler


def wrapped(sampler: Sampler, recipe: Recipe) -> Sampler:
    if recipe.hindsight:
        sampler = HindsightSampler(
            sampler,
            reward_fn,
            her_ratio=recipe.her_ratio,
            strategy=recipe.strategy,  # type: ignore[arg-type]
            future_gamma=recipe.future_gamma,
            terminated_fn=terminated_fn,
        )
    if recipe.n_step:
        sampler = NStepSampler(sampler, recipe.n, recipe.gamma)
    if recipe.sequence:
        sampler = SequenceSampler(sampler, recipe.length, burn_in=recipe.burn_in, boundary=recipe.boundary)
    return sampler


def make(kind: str, recipe: Recipe, ndim: int, fill: str, buffer: str, seed: int = 0) -> tuple[World, Any]:
    """Return a filled world, and the sampler that draws its rows; prioritized rows have distinct priorities."""
    steps, lanes = (59, 1) if ndim == 1 else (21, 3)
    cls, storage, writer = BUFFERS[buffer]
    sampler = innermost(kind, steps * lanes)
    parts = {"storage": storage, "writer": writer(), "batch_size": ANCHORS * recipe.window}
    world = World.of(wrapped(sampler, recipe), steps, lanes, FILLS[fill], cls, seed, **parts)
    if kind in PRIORITIZED:
        rows = torch.arange(len(world.rb.storage))
        sampler.update_priority(rows, error_of(rows), storage=world.rb.storage)
    return world, getattr(sampler, "innermost", sampler)


def error_of(rows: torch.Tensor) -> torch.Tensor:
    return torch.where(rows % 2 == 0, 1.0, -1.0) * (0.1 + ((rows * 37) % 101) / 50.0)


def law(kind: str, rows: int, world: World | None = None) -> np.ndarray:
    if kind == "recency" and world is not None:
        age = (world.time - 1 - np.arange(rows) // world.lanes) % (world.history.steps)
        weight = np.where(age < 40, 0.5 ** (age / 15.0), 0.0)
        return weight / weight.sum()
    if kind == "uniform":
        return np.full(rows, 1 / rows)
    error = error_of(torch.arange(rows)).abs().double().numpy()
    if kind == "rank":
        rank = 1 + (error[None, :] > error[:, None]).sum(1)
        weight = rank**-0.7
    else:
        weight = (error.clip(min=1.0 if kind == "floored" else 0.0) + 1e-8) ** 0.7
    return weight / weight.sum()


def assert_rows(batch: TensorDictBase, rows: list[Fields]) -> None:
    """Compare keys and values of a batch with the rows that it must hold, but for when they were sampled."""
    batch = batch.exclude("sampled_at")
    keys = [key if isinstance(key, tuple) else (key,) for key in batch.keys(True, True)]
    assert set(keys) == set(rows[0])
    assert batch.batch_size == (len(rows),)
    for key in keys:
        found = batch[key]
        wanted = torch.tensor([row[key] for row in rows])
        if key in (("index",), ("anchor_index",)) and found.ndim == 1:
            wanted = wanted[:, 0]
        assert found.shape == wanted.shape, key
        close: Any = {"rtol": 1e-5, "atol": 1e-5, "msg": lambda m, key=key: f"{key}: {m}"}
        torch.testing.assert_close(found.double(), wanted.double(), **close)


def decided(world: World, batch: TensorDictBase, recipe: Recipe) -> tuple[list[Cell], list[list[float] | None]]:
    """Return what chance has decided about a batch: rows, and goals, each of which must be allowed."""
    starts = range(0, len(batch), recipe.window)
    key = "anchor_index" if recipe.sequence else "index"
    anchors = [world.cell(batch[key][j].tolist()) for j in starts]
    goals: list[list[float] | None] = [None] * len(anchors)
    if recipe.hindsight:
        for k, (j, anchor) in enumerate(zip(starts, anchors, strict=True)):
            if batch["relabeled"][j]:
                goal = batch["desired_goal"][j].tolist()
                assert world.reached_at(goal) in world.allowed(anchor, recipe.strategy)
                goals[k] = goal
    return anchors, goals


def weights(kind: str, world: World, anchors: list[Cell]) -> list[float]:
    probability = law(kind, len(world.history.written()))
    weight = probability**-0.5
    return [float(weight[world.flat(anchor)] / weight.max()) for anchor in anchors]


def check(kind: str, recipe: Recipe, ndim: int, fill: str, buffer: str) -> None:
    """Draw batches, and compare each with brute force; then their law, and priorities that come back."""
    world, sampler = make(kind, recipe, ndim, fill, buffer)
    torch.manual_seed(0)
    counts = np.zeros(len(world.rb.storage))
    for j in range(10):
        batch = world.rb.sample()
        anchors, goals = decided(world, batch, recipe)
        np.add.at(counts, [world.flat(anchor) for anchor in anchors], 1)
        if j < 2:
            rows = expected(world, anchors, goals, recipe)
            if kind in PRIORITIZED:
                for k, weight in enumerate(weights(kind, world, anchors)):
                    for row in rows[k * recipe.window : (k + 1) * recipe.window]:
                        row["priority_weight",] = weight
            assert_rows(batch, rows)
        if recipe.hindsight:
            share = sum(goal is not None for goal in goals) / len(goals)
            assert 0 < share < 1
    if not kind.startswith("fresh"):  # whose law is not that of independent draws
        assert_follows(counts, law(kind, len(counts), world))
    if kind in PRIORITIZED:
        batch["td_error"] = torch.linspace(-3, 3, len(batch)).unsqueeze(-1)
        world.rb.update_tensordict_priority(batch)
        wanted = {}
        for k, anchor in enumerate(anchors):
            errors = batch["td_error"][k * recipe.window : (k + 1) * recipe.window].abs().flatten().tolist()
            real = window(world, anchor, recipe)[1][recipe.burn_in :] if recipe.sequence else [True]
            largest = max(e for e, here in zip(errors[-len(real) :], real, strict=True) if here)
            wanted[world.flat(anchor)] = max(largest, sampler.min_priority if kind == "floored" else 0.0)
        found = sampler.priority(torch.tensor([*wanted]))
        torch.testing.assert_close(found, torch.tensor([*wanted.values()], dtype=torch.float64), rtol=1e-6, atol=0)


def cells() -> list[tuple[str, str, str, int, str]]:
    """Return every wrapper over every buffer and sampler, the dims and fills in turn; foreign storages over one."""
    places, rows = [*product((1, 2), FILLS)], [*product(BUFFERS, SAMPLERS)]
    rows = [row for row in rows if row[0] in [*BUFFERS][:2] or row[1] == "proportional"]
    turns = product(enumerate(rows), enumerate(RECIPES))
    made = [(kind, recipe, buffer, *places[(i + j) % 6]) for (i, (buffer, kind)), (j, recipe) in turns]
    more = product(enumerate(("recency", "fresh", "floored", "fresh over proportional")), enumerate(RECIPES))
    return made + [(kind, recipe, "ours", *places[(3 * i + j) % 6]) for (i, kind), (j, recipe) in more]


@pytest.mark.parametrize(("kind", "recipe", "buffer", "ndim", "fill"), cells())
def test_every_cell_is_what_brute_force_says(kind, recipe, ndim, fill, buffer):
    check(kind, RECIPES[recipe], ndim, fill, buffer)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kinds", [("uniform", "recency"), ("fresh", "proportional"), ("floored", "rank")], ids=str)
def test_each_part_of_a_mixture_is_what_brute_force_says(kinds, recipe):
    given = RECIPES[recipe]
    worlds = {kind: make(kind, given, 1, "wrapped", "ours", seed)[0] for seed, kind in enumerate(kinds)}
    shares = dict(zip(kinds, (0.25, 0.75), strict=True))
    size = ANCHORS * given.window
    mixed = ReplayBufferMixture({kind: world.rb for kind, world in worlds.items()}, shares, batch_size=size)
    for _ in range(2):
        batch = mixed.sample()
        assert batch["source"].bincount().tolist() == [size // 4, 3 * size // 4]
        for place, world in enumerate(worlds.values()):
            part = batch[batch["source"] == place].exclude("source", "priority_weight")
            assert_rows(part, expected(world, *decided(world, part, given), given))


@pytest.mark.parametrize(("fill", "ndim", "recipe"), [*zip([*FILLS] * 3, [1, 2] * 4, RECIPES, strict=False)])
def test_with_the_boundaries_of_other_devices(fill, ndim, recipe, monkeypatch):
    monkeypatch.setattr("rlbuf_td.storages.trajectory_index.make_boundaries", FlagBoundaries)
    check("uniform", RECIPES[recipe], ndim, fill, "ours")


OTHERS = {
    **{name: replace(RECIPES["n-step over hindsight"], strategy=name) for name in ("final", "episode", "random")},
    "near goals": replace(RECIPES["all"], future_gamma=0.6),
    **{f"{n} steps": replace(RECIPES["n-step"], n=n, gamma=gamma) for n, gamma in ((1, 0.5), (30, 0.97), (5, 0.0))},
    **{
        f"{boundary} {burn_in}+{length}": replace(RECIPES["all"], length=length, burn_in=burn_in, boundary=boundary)
        for boundary in ("pad", "shift")
        for length, burn_in in ((1, 0), (1, 3), (12, 12))
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_limits_of_what_the_wrappers_are_given(name):
    """What lies between is drawn at random in ``test_lockstep.py``."""
    check("uniform", OTHERS[name], 2, "wrapped", "ours")
