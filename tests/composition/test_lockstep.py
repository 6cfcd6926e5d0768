"""Any sampler within any wrappers in lockstep with brute force, over random writes, copies and checkpoints."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rlbuf_td import NStepSampler
from tests.composition.test_cells import BUFFERS, RECIPES, SAMPLERS, assert_rows, decided, innermost, wrapped
from tests.worlds import World, expected

OFTEN = [(0.0, 0.0, 0.0), (0.1, 0.05, 0.05), (0.5, 0.2, 0.2), (1.0, 0.0, 0.0)]


class Lockstep(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from(SAMPLERS),
        recipe=st.sampled_from([*RECIPES]),
        buffer=st.sampled_from([*BUFFERS]),
        steps=st.integers(1, 12),
        lanes=st.sampled_from([1, 2, 3]),
        often=st.sampled_from(OFTEN),
        strategy=st.sampled_from(["future", "final", "episode", "random"]),
        n=st.integers(1, 6),
        length=st.integers(1, 6),
        burn_in=st.integers(0, 3),
        boundary=st.sampled_from(["pad", "shift"]),
        seed=st.integers(0, 999),
    )
    def make(self, kind, recipe, buffer, steps, lanes, often, strategy, n, length, burn_in, boundary, seed) -> None:
        self.kind = kind
        given = {"strategy": strategy, "n": n, "length": length, "burn_in": burn_in, "boundary": boundary}
        self.recipe = replace(RECIPES[recipe], **given)
        cls, storage, writer = BUFFERS[buffer]

        def build() -> Any:
            return cls(
                storage=storage(steps * lanes, ndim=2 if lanes > 1 else 1),
                sampler=wrapped(innermost(kind, steps * lanes), self.recipe),
                writer=writer(),
            )

        self.build = build
        self.world = World(build(), steps, lanes, seed, often)
        self.world.write(2)
        torch.manual_seed(seed)

    @rule(n=st.one_of(st.integers(2, 4), st.integers(2, 30)))
    def write(self, n: int) -> None:
        self.world.write(n)

    @rule()
    def empty_and_write(self) -> None:
        self.world.empty()
        self.world.write(2)

    @rule(anchors=st.integers(1, 20))
    def sample(self, anchors: int) -> None:
        world, recipe = self.world, self.recipe
        batch = world.rb.sample(anchors * recipe.window)
        report = batch.select("priority_weight", strict=False)
        assert (self.kind == "uniform") == report.is_empty()
        rows, goals = decided(world, batch, recipe)
        assert_rows(batch.exclude("priority_weight"), expected(world, rows, goals, recipe))
        if self.kind != "uniform":
            batch["td_error"] = torch.rand(len(batch), 1)
            world.rb.update_tensordict_priority(batch)

    @precondition(lambda self: self.recipe.n_step)
    @rule(n=st.integers(1, 9), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]))
    def look_ahead_differently(self, n: int, gamma: float) -> None:
        sampler = self.world.rb.sampler
        while not isinstance(sampler, NStepSampler):
            sampler = sampler.sampler
        sampler.n_steps, sampler.gamma = n, gamma
        self.recipe = replace(self.recipe, n=n, gamma=gamma)

    @rule(how=st.sampled_from(["deepcopy", "pickle", "state_dict"]))
    def go_on_with_a_copy(self, how: str) -> None:
        """Which draws what the original draws."""
        original = self.world.rb
        if how == "state_dict":
            self.world.rb = self.build()
            self.world.rb.load_state_dict(original.state_dict())
            self.world.fresh = [True] * self.world.lanes  # a load ends the open trajectories
        else:
            self.world.rb = copy.deepcopy(original) if how == "deepcopy" else pickle.loads(pickle.dumps(original))
        batches = []
        for rb in (original, self.world.rb):
            torch.manual_seed(5)
            batches.append(rb.sample(3 * self.recipe.window))
        assert (batches[0] == batches[1]).all()


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(stateful_step_count=15)
