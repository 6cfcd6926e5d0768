"""Every sampler, within every wrapper, over every kind of buffer, with every backend:
what its batches hold, and how often rows are drawn.

The test of the law finds a bias of 5 % with a probability of more than 0.9. What
happens between batches (writes, updates, loads, ...) is in ``test_lockstep.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data.replay_buffers import Sampler, TensorDictReplayBuffer

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReplayBufferMixture,
    RingWriter,
    SequenceSampler,
)
from tests import catalogue
from tests import model as m
from tests.backends import needs, running
from tests.catalogue import SAMPLERS
from tests.model import Model, Recipe, World, index_of
from tests.statistics import assert_follows, power

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
PLAIN = RECIPES["plain"]
FILLS = {"filling": 0.6, "full": 1.0, "wrapped": 2.4}
BUFFERS: dict[str, Any] = {
    "ours": (ReplayBuffer, PackedStorage, RingWriter),
    "TorchRL's": (TensorDictReplayBuffer, PackedStorage, RingWriter),
    "ours, observations once": (
        ReplayBuffer,
        partial(PackedStorage, share_next=["achieved_goal"]),
        RingWriter,
    ),
    "TorchRL's, observations once": (
        TensorDictReplayBuffer,
        partial(PackedStorage, share_next=True),
        RingWriter,
    ),
}


class ReadsFromGPU(ReplayBuffer):
    """A buffer with rows on a GPU, whose batches are copied to the CPU, where the tests
    look at them."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().sample(*args, **kwargs)
        assert all(leaf.is_cuda for leaf in batch.values(True, True))
        return batch.cpu()

    def update_tensordict_priority(self, data: Any) -> None:
        super().update_tensordict_priority(data.to("cuda"))


ON_GPU = {"on a GPU": (ReadsFromGPU, partial(PackedStorage, device="cuda"), RingWriter)}
ANCHORS = 32  # drawn at once
DRAWS, BIAS, SURE = 34_000, 0.05, 0.9  # the test of a law finds this bias so surely

# Weights relative to the whole buffer; draws independent of each other, as the test of
# their law expects.
GIVEN: dict[str, Any] = {"alpha": 0.7, "beta": 0.5, "stratified": False}
INNER: dict[str, Callable[[int], Any]] = {
    name: SAMPLERS[name] for name in catalogue.LAWS
} | {
    "proportional": lambda rows: ProportionalSampler(rows, **GIVEN),
    "rank": lambda rows: RankSampler(rows, **GIVEN),
    "floored": lambda rows: ProportionalSampler(rows, **GIVEN, min_priority=1.0),
    "stratified": lambda rows: ProportionalSampler(rows, 0.7, 0.5),
    "stratified rank": lambda rows: RankSampler(rows, 0.7, 0.5),
}
LAWS = catalogue.LAWS | dict.fromkeys(
    ("rank", "stratified rank"), lambda model: m.by_rank(model, 0.7)
)


def law_of(kind: str, model: Model) -> np.ndarray:
    return np.array(LAWS.get(kind, lambda model: m.proportional(model, 0.7))(model))


def wrapped(sampler: Sampler, recipe: Recipe) -> Sampler:
    given: dict[str, Any]
    if recipe.hindsight:
        given = {
            "strategy": recipe.strategy,
            "future_gamma": recipe.future_gamma,
            "her_ratio": recipe.her_ratio,
        }
        sampler = HindsightSampler(
            sampler, m.reward_fn, **given, terminated_fn=m.terminated_fn
        )
    if recipe.n_step:
        sampler = NStepSampler(sampler, recipe.n, recipe.gamma)
    if recipe.sequence:
        given = {
            "burn_in": recipe.burn_in,
            "boundary": recipe.boundary,
            "across_episodes": recipe.across,
        }
        sampler = SequenceSampler(sampler, recipe.length, **given)
    return sampler


def make(
    kind: str, recipe: Recipe, ndim: int, fill: str, buffer: str, seed: int = 0
) -> tuple[World, Any]:
    """Return a filled world, and the sampler that draws its rows; prioritized rows have
    distinct priorities."""
    steps, lanes = (59, 0) if ndim == 1 else (21, 3)
    cls, storage, writer = (BUFFERS | ON_GPU)[buffer]
    parts = {
        "buffer": cls,
        "storage": storage,
        "writer": writer(),
        "batch_size": ANCHORS * recipe.window,
    }
    sampler = wrapped(INNER[kind](steps * max(1, lanes)), recipe)
    world = World.of(sampler, steps, lanes, FILLS.get(fill, 0.0), seed=seed, **parts)
    if fill == "unlike lanes":
        world.add()
        world.append([0] * 5 + [1] * 13 + [2] * 50)
    world.model.floor = 1.0 if kind == "floored" else 0.0
    inner = getattr(sampler, "innermost", sampler)
    if hasattr(inner, "priority"):
        rows = world.model.rows()
        errors = [(-1) ** at * (0.125 + at * 37 % 101 / 64) for at in range(len(rows))]
        inner.update_priority(
            index_of(world.model, rows), torch.tensor(errors), storage=world.rb.storage
        )
        world.model.update(rows, errors)
    return world, inner


def anchor_errors(batch: Any, recipe: Recipe) -> list[float]:
    """Return the error of each anchor, of the errors in a batch."""
    errors = batch["td_error"].view(-1, recipe.window).tolist()
    if not recipe.sequence:
        return [error for (error,) in errors]
    counted = (batch["mask"] & ~batch["burn_in_mask"]).view(-1, recipe.window)
    return [m.combined(*each) for each in zip(errors, counted.tolist(), strict=True)]


def check(kind: str, recipe: Recipe, ndim: int, fill: str, buffer: str) -> World:
    """Draw batches, and compare each with brute force; then priorities that come
    back."""
    world, sampler = make(kind, recipe, ndim, fill, buffer)
    torch.manual_seed(0)
    model, rows, law = world.model, world.model.rows(), law_of(kind, world.model)
    place = {row.number: at for at, row in enumerate(rows)}
    for _ in range(2):
        batch = world.rb.sample()
        goals = world.drawn(batch, recipe)[1]
        anchors = world.check_batch(batch, recipe)
        if hasattr(sampler, "priority"):
            drawn = [place[row.number] for row in anchors]
            weight = torch.tensor(
                m.importance(law.tolist(), drawn, 0.5)
            ).repeat_interleave(recipe.window)
            torch.testing.assert_close(
                batch["priority_weight"], weight, rtol=1e-5, atol=1e-5
            )
        assert not recipe.hindsight or 0 < sum(
            goal is not None for goal in goals
        ) < len(goals)
    if hasattr(sampler, "priority"):
        errors = torch.arange(len(batch)) % 61 / 16 - 1.5
        world.rb.update_tensordict_priority(batch.set("td_error", errors.unsqueeze(-1)))
        model.update(anchors, anchor_errors(batch, recipe))
        m.assert_holds(world.rb, model)
    return world


def counts_of(world: World, recipe: Recipe = PLAIN, draws: int = DRAWS) -> np.ndarray:
    """Return how often each row of ``world.model.rows()`` is the anchor of at least
    ``draws`` draws."""
    model = world.model
    rows = model.rows()
    place = {model.flat(row): at for at, row in enumerate(rows)}
    cells = np.zeros(model.steps * len(model.rows_of))
    while cells.sum() < draws:
        batch = world.rb.sample(2_000 * recipe.window)
        index = batch["anchor_index" if recipe.sequence else "index"]
        cell = index.reshape(len(batch), -1)[:: recipe.window].numpy()
        flat = cell @ [model.lanes, 1] if model.lanes else cell[:, 0]
        np.add.at(cells, flat, 1)
    assert set(cells.nonzero()[0]) <= place.keys(), "a cell without a row was drawn"
    return cells[[*place]]


def check_law(world: World, kind: str, recipe: Recipe) -> None:
    law = law_of(kind, world.model)
    assert power(law, DRAWS, BIAS) > SURE
    assert_follows(counts_of(world, recipe), law)


PLACES = [*product((1, 2), FILLS)]
PRIORITIES = "uniform", "proportional", "rank"
#: Few, of each kind of kernel: a batch takes seconds.
INTERPRETED = [
    ("uniform", "plain", 1, "wrapped"),
    ("uniform", "n-step", 2, "wrapped"),
    ("uniform", "sequence over n-step", 1, "filling"),
    ("rank", "n-step over hindsight", 2, "full"),
    ("proportional", "n-step", 2, "wrapped"),
    ("floored", "plain", 1, "full"),
    ("proportional", "sequence", 2, "wrapped"),
    ("uniform", "hindsight", 2, "wrapped"),
    ("proportional", "sequence over hindsight", 2, "unlike lanes"),
    ("uniform", "all", 2, "unlike lanes"),
]


def cells() -> Iterator[Any]:
    """Yield every wrapper over every buffer and sampler with the compiled loops, and
    over every sampler with the reference, the dims and fills in turn; foreign storages
    over one sampler.

    A third is in the fast part: each wrapper with some of the others, which all occur.
    """
    rows = [("compiled", *row) for row in product([*BUFFERS][:2], PRIORITIES)]
    rows += [("compiled", buffer, "proportional") for buffer in [*BUFFERS][2:]]
    rows += [("compiled", "ours", kind) for kind in INNER if kind not in PRIORITIES]
    rows += [("reference", "ours", kind) for kind in INNER]
    rows += [("GPU", "on a GPU", kind) for kind in PRIORITIES]
    for (i, (backend, buffer, kind)), (j, recipe) in product(
        enumerate(rows), enumerate(RECIPES)
    ):
        marks = needs(backend)
        if backend != "GPU" and (i + j) % 3:
            marks = [*marks, pytest.mark.slow]
        places = PLACES if buffer != "ours" else [*PLACES, (2, "unlike lanes")]
        place = places[(i + j // 3 + i // 3) % len(places)]
        yield pytest.param(backend, kind, recipe, buffer, *place, marks=marks)
    for kind, recipe, *place in INTERPRETED:
        marks = [*needs("interpreter"), pytest.mark.slow]
        yield pytest.param("interpreter", kind, recipe, "ours", *place, marks=marks)


@pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes")
@pytest.mark.parametrize(
    ("backend", "kind", "recipe", "buffer", "ndim", "fill"), [*cells()]
)
def test_every_combination_is_what_brute_force_says(
    backend, kind, recipe, ndim, fill, buffer
):
    with running(backend):
        world = check(kind, RECIPES[recipe], ndim, fill, buffer)
        if backend != "interpreter":  # it draws too slowly
            check_law(world, kind, RECIPES[recipe])


PAIRS = [("uniform", "recency"), ("rank", "proportional"), ("floored", "rank")]


@pytest.mark.parametrize(
    ("kinds", "recipe"), [*zip(PAIRS * 3, RECIPES, strict=False)], ids=str
)
def test_each_part_of_a_mixture_is_what_brute_force_says(kinds, recipe):
    given = RECIPES[recipe]
    worlds = {
        kind: make(kind, given, 1, "wrapped", "ours", seed)[0]
        for seed, kind in enumerate(kinds)
    }
    size = ANCHORS * given.window
    shares = dict(zip(kinds, (0.25, 0.75), strict=True))
    mixed = ReplayBufferMixture(
        {kind: world.rb for kind, world in worlds.items()}, shares, batch_size=size
    )
    for _ in range(2):
        batch = mixed.sample()
        assert batch.get("source").bincount().tolist() == [size // 4, 3 * size // 4]
        for place, world in enumerate(worlds.values()):
            world.check_batch(batch.exclude("source")[batch["source"] == place], given)


OTHERS = {
    **{
        name: replace(RECIPES["n-step over hindsight"], strategy=name)
        for name in ("final", "episode", "random")
    },
    "near goals": replace(RECIPES["all"], future_gamma=0.6),
    **{
        f"{n} steps": replace(RECIPES["n-step"], n=n, gamma=gamma)
        for n, gamma in ((1, 0.5), (30, 0.97), (5, 0.0))
    },
    **{
        f"{boundary} {burn_in}+{length}": replace(
            RECIPES["all"], length=length, burn_in=burn_in, boundary=boundary
        )
        for boundary in ("pad", "shift")
        for length, burn_in in ((1, 0), (1, 3), (12, 12))
    },
    "across episodes, pad": replace(RECIPES["sequence over n-step"], across=True),
    "across episodes, shift": replace(
        RECIPES["sequence over n-step"], across=True, boundary="shift"
    ),
}


@pytest.mark.parametrize(
    ("backend", "fill"), [("compiled", "wrapped"), ("reference", "unlike lanes")]
)
@pytest.mark.parametrize("name", OTHERS)
def test_limits_of_what_the_wrappers_are_given(name, backend, fill):
    with running(backend):
        check("uniform", OTHERS[name], 2, fill, "ours")
