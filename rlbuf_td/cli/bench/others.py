"""Benchmarked buffers of libraries that are not based on TorchRL."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.cli.bench.contenders import ALPHA, BETA, EPS, ERRORS, SAMPLED, BareGather, Contender, Mixed, Ours, TorchRL


def arrays_of(data: TensorDict) -> dict[str, np.ndarray]:
    return {
        "observation": data["observation"].numpy(),
        "action": data["action"].numpy(),
        "next_observation": data["next", "observation"].numpy(),
        "reward": data["next", "reward"].numpy(),
        "done": data["next", "done"].numpy(),
    }


class StableBaselines3(Contender):
    """Stable-Baselines3: uniform replay."""

    name = "SB3"

    def build(self) -> None:
        from gymnasium.spaces import Box
        from stable_baselines3.common.buffers import ReplayBuffer as Buffer

        shape, dtype = self.new_rows["observation"].shape[1:], self.new_rows["observation"].numpy().dtype
        low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
        observation = Box(low, high, shape, dtype.type)
        action = Box(-1.0, 1.0, self.new_rows["action"].shape[1:], np.float32)
        self.buffer = Buffer(self.rows, observation, action, device="cpu")
        row, names = arrays_of(self.new_row), ("observation", "next_observation", "action")
        self.step: list[Any] = [*(row[name] for name in names), row["reward"][0], row["done"][0], [{}]]

    def fill(self, data: TensorDict) -> None:
        # As ``add``, but without its loop over single transitions.
        columns, start = arrays_of(data), self.buffer.pos
        stop = start + len(data)
        self.buffer.observations[start:stop, 0] = columns["observation"]
        self.buffer.next_observations[start:stop, 0] = columns["next_observation"]
        self.buffer.actions[start:stop, 0] = columns["action"]
        self.buffer.rewards[start:stop] = columns["reward"]
        self.buffer.dones[start:stop] = columns["done"]
        self.buffer.pos, self.buffer.full = stop % self.rows, stop == self.rows

    def uniform(self) -> Any:
        return self.buffer.sample(self.batch)

    def add(self) -> None:
        self.buffer.add(*self.step)


class Cpprb(Contender):
    """cpprb: uniform and proportional replay in C++."""

    name = "cpprb"

    def build(self) -> None:
        import cpprb

        self.batch_columns, self.row = arrays_of(self.new_rows), arrays_of(self.new_row)
        fields = {name: {"shape": x.shape[1:], "dtype": x.dtype} for name, x in self.batch_columns.items()}
        self.plain = cpprb.ReplayBuffer(self.rows, fields)
        self.prioritized = cpprb.PrioritizedReplayBuffer(self.rows, fields, alpha=ALPHA, eps=EPS)

    def fill(self, data: TensorDict) -> None:
        columns = arrays_of(data)
        self.plain.add(**columns)
        self.prioritized.add(**columns)

    def prioritize(self, td_error: torch.Tensor) -> None:
        self.prioritized.update_priorities(np.arange(self.rows), td_error.numpy())
        rows = [self.prioritized.sample(self.batch, BETA)["indexes"] for _ in range(SAMPLED)]
        self.take_turns(rows, [*np.random.default_rng(0).random((ERRORS, self.batch))])

    def uniform(self) -> Any:
        return self.plain.sample(self.batch)

    def proportional(self) -> Any:
        return self.prioritized.sample(self.batch, BETA)

    def update(self) -> None:
        self.prioritized.update_priorities(*next(self.sampled))

    def cycle(self) -> None:
        batch = self.prioritized.sample(self.batch, BETA)
        self.prioritized.update_priorities(batch["indexes"], next(self.td_errors))

    def extend(self) -> None:
        self.plain.add(**self.batch_columns)

    def add(self) -> None:
        self.plain.add(**self.row)

    def extend_proportional(self) -> None:
        self.prioritized.add(**self.batch_columns)

    def add_proportional(self) -> None:
        self.prioritized.add(**self.row)


class Flashbax(Contender):
    """Flashbax: uniform and prioritized item buffers, jitted by JAX; writes update the donated state in place."""

    name = "Flashbax"

    def __init__(self, rows: int, batch: int, make_rows: Callable[[int], TensorDict]) -> None:
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
        import jax

        self.jax, self._done = jax, jax.block_until_ready
        with jax.default_device(jax.devices("cpu")[0]):
            super().__init__(rows, batch, make_rows)

    def build(self) -> None:
        import flashbax

        jax, jnp = self.jax, self.jax.numpy
        given = (max(self.rows, self.batch), 1, self.batch, True)  # a batch must not be larger than the capacity
        uniform = flashbax.make_item_buffer(*given)
        ranked = flashbax.make_prioritised_item_buffer(*given, priority_exponent=ALPHA, device="cpu")

        def draw_uniform(state: Any, key: Any) -> Any:
            key, now = jax.random.split(key)
            return key, uniform.sample(state, now).experience

        def draw(state: Any, key: Any) -> Any:
            key, now = jax.random.split(key)
            drawn = ranked.sample(state, now)
            weight = (self.rows * drawn.probabilities) ** -BETA
            return key, (drawn, weight / jnp.max(weight))

        def update(state: Any, index: Any, td_error: Any) -> Any:
            return ranked.set_priorities(state, index, jnp.abs(td_error) + EPS)

        compiled = partial(jax.jit, donate_argnums=0)
        self._draw_uniform, self._draw = jax.jit(draw_uniform), jax.jit(draw)
        self._update, self._add, self._add_ranked = compiled(update), compiled(uniform.add), compiled(ranked.add)
        single = {name: column[0] for name, column in self._on_device(self.new_row).items()}
        self.plain, self.prioritized = uniform.init(single), ranked.init(single)
        self.key = jax.random.PRNGKey(0)
        self.many, self.one = self._on_device(self.new_rows), self._on_device(self.new_row)

    def fill(self, data: TensorDict) -> None:
        columns = self._on_device(data)
        self.plain, self.prioritized = self._add(self.plain, columns), self._add_ranked(self.prioritized, columns)

    def prioritize(self, td_error: torch.Tensor) -> None:
        jnp = self.jax.numpy
        self.prioritized = self._update(self.prioritized, jnp.arange(self.rows), jnp.asarray(td_error.numpy()))
        errors = [jnp.asarray(torch.rand(self.batch).numpy()) for _ in range(ERRORS)]
        self.take_turns([self.proportional()[0].indices for _ in range(16)], errors)

    def _on_device(self, data: TensorDict) -> dict[str, Any]:
        return {name: self.jax.numpy.asarray(column) for name, column in arrays_of(data).items()}

    def uniform(self) -> Any:
        self.key, batch = self._draw_uniform(self.plain, self.key)
        return self._done(batch)

    def proportional(self) -> Any:
        self.key, batch = self._draw(self.prioritized, self.key)
        return self._done(batch)

    def update(self) -> None:
        self.prioritized = self._update(self.prioritized, *next(self.sampled))
        self._done(self.prioritized)

    def cycle(self) -> None:
        drawn, _ = self.proportional()
        self.prioritized = self._update(self.prioritized, drawn.indices, next(self.td_errors))
        self._done(self.prioritized)

    def extend(self) -> None:
        self.plain = self._done(self._add(self.plain, self.many))

    def add(self) -> None:
        self.plain = self._done(self._add(self.plain, self.one))

    def extend_proportional(self) -> None:
        self.prioritized = self._done(self._add_ranked(self.prioritized, self.many))

    def add_proportional(self) -> None:
        self.prioritized = self._done(self._add_ranked(self.prioritized, self.one))


def available() -> list[type[Contender]]:
    others = {"stable_baselines3": StableBaselines3, "cpprb": Cpprb, "flashbax": Flashbax}
    return [Ours, TorchRL, Mixed, BareGather, *(cls for name, cls in others.items() if importlib.util.find_spec(name))]
