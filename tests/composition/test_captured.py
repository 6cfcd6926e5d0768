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


def assert_priorities(world: World, batch: TensorDictBase, recipe: Recipe, sampler: Any) -> None:
    wanted, errors = {}, batch["td_error"].abs().view(-1, recipe.window)
    for anchor, error in zip(decided(world, batch, recipe)[0], errors.tolist(), strict=True):
        real = window(world, anchor, recipe)[1] if recipe.sequence else [True]
        learned = [e for j, e in enumerate(error) if real[j] and j >= recipe.burn_in * recipe.sequence]
        wanted[world.flat(anchor)] = max(learned)
    found = sampler.priority(torch.tensor([*wanted]))
    torch.testing.assert_close(found, torch.tensor([*wanted.values()], dtype=torch.float64), rtol=1e-6, atol=1e-9)


SHIFTED = replace(RECIPES["sequence"], boundary="shift", length=3, burn_in=4)
CASES: dict[str, tuple[str, Recipe, int, Backend]] = {
    **{name: ("proportional", recipe, 1 + j % 2, "torch") for j, (name, recipe) in enumerate(RECIPES.items())},
    "uniform": ("uniform", SHIFTED, 2, "torch"),
    "rank": ("rank", replace(SHIFTED, boundary="pad"), 2, "torch"),
}


@pytest.mark.parametrize("case", CASES)
def test_replays_of_one_graph_equal_brute_force_while_the_buffer_fills(case):
    kind, recipe, ndim, backend = CASES[case]
    with graphs_by(backend):
        world, sampler = make(kind, recipe, ndim, "filling", "ours")
        size, graphs = (12 if backend == "torch" else 5) * recipe.window, set()
        captured = world.rb.capture(lambda batch: batch.set("td_error", batch[REWARD] * 10), size, warmup=1)
        for steps in WRITES:
            world.fill(world.time + steps)
            batch = captured().clone()
            anchors, goals = decided(world, batch, recipe)
            assert_rows(batch.exclude("priority_weight", "td_error"), expected(world, anchors, goals, recipe))
            if kind != "uniform":
                assert_priorities(world, batch, recipe, sampler)
            graphs.add(captured._graphs[0].graph)
        assert len(graphs) == 1
