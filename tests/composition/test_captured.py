"""Captured steps over every sampler within every wrapper, against brute force, while the buffer fills and wraps.

The graphs are recorded ones: see :mod:`tests.graphs`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from rlbuf_td.kernels.dispatch import Backend
from tests.composition.test_cells import RECIPES, assert_rows, decided, make
from tests.graphs import graphs_by
from tests.worlds import REWARD, Recipe, World, expected, window

WRITES = (0, 3, 30, 60)  # time steps between calls; with the third the buffer is full


def with_errors(batch: TensorDictBase) -> TensorDictBase:
    """Return the batch, each row with an error of its own."""
    return batch.set("td_error", batch[REWARD] * 10)


def assert_batch(world: World, batch: TensorDictBase, recipe: Recipe) -> None:
    anchors, goals = decided(world, batch, recipe)
    assert_rows(batch.exclude("priority_weight", "td_error"), expected(world, anchors, goals, recipe))


def assert_priorities(world: World, batch: TensorDictBase, recipe: Recipe, sampler: Any) -> None:
    """Compare the priorities of the anchors with the errors of the rows that they stand for."""
    wanted, errors = {}, batch["td_error"].abs().view(-1, recipe.window)
    for anchor, error in zip(decided(world, batch, recipe)[0], errors.tolist(), strict=True):
        real = window(world, anchor, recipe)[1] if recipe.sequence else [True]
        learned = [e for j, e in enumerate(error) if real[j] and j >= recipe.burn_in * recipe.sequence]
        wanted[world.flat(anchor)] = max(learned)
    found = sampler.priority(torch.tensor([*wanted]))
    torch.testing.assert_close(found, torch.tensor([*wanted.values()], dtype=torch.float64), rtol=1e-6, atol=1e-9)


def check(kind: str, recipe: Recipe, ndim: int, path: Backend) -> None:
    """Compare replays with brute force; nothing is captured again as the buffer fills and wraps."""
    torch.manual_seed(0)
    with graphs_by(path):
        world, sampler = make(kind, recipe, ndim, "filling", "ours")
        captured, made = world.rb.capture(with_errors, (12 if path == "torch" else 5) * recipe.window, warmup=1), []
        for steps in WRITES:
            world.fill(world.time + steps)
            batch = captured().clone()
            assert_batch(world, batch, recipe)
            if kind != "uniform":
                assert_priorities(world, batch, recipe, sampler)
            made.append(captured._graphs[0].graph)
        assert made[3] is made[2] is made[1] is made[0]


SHIFTED = replace(RECIPES["sequence"], boundary="shift", length=3, burn_in=4)
CASES: dict[str, tuple[str, Recipe, int, Backend]] = {
    **{name: ("proportional", recipe, 1 + j % 2, "torch") for j, (name, recipe) in enumerate(RECIPES.items())},
    "uniform": ("uniform", SHIFTED, 2, "torch"),
    "rank": ("rank", replace(SHIFTED, boundary="pad"), 2, "torch"),
    "Triton": ("proportional", RECIPES["all"], 2, "triton"),
}


@pytest.mark.parametrize("case", CASES)
def test_replays_are_what_brute_force_says(case):
    check(*CASES[case])
