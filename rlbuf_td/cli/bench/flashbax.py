"""Flashbax (JAX) as a contender: everything that it does is compiled, and its state is donated to each call."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from rlbuf_td.cli.bench.contenders import ALPHA, BETA, EPS, Contender, arrays_of

_THREADS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


class Flashbax(Contender):
    """Flashbax's item buffers, uniform and prioritized.

    Args:
        rows: capacity.
        batch: rows a batch.
        make_rows: makes transitions.
        platform: ``"cpu"``, where each call waits for its result, or ``"gpu"``, where :meth:`wait` does.
    """

    name = "Flashbax"

    def __init__(self, rows: int, batch: int, make_rows: Callable[[int], TensorDict], platform: str = "cpu") -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch is to have memory, too
        os.environ.setdefault("XLA_FLAGS", _THREADS)
        import jax

        self.jax, self.platform, self.result = jax, platform, None
        with jax.default_device(jax.devices(platform)[0]):
            super().__init__(rows, batch, make_rows)

    def build(self) -> None:
        import flashbax

        jax, jnp = self.jax, self.jax.numpy
        given = (max(self.rows, self.batch), 1, self.batch, True)  # a batch must not be larger than the capacity
        uniform = flashbax.make_item_buffer(*given)
        ranked = flashbax.make_prioritised_item_buffer(*given, priority_exponent=ALPHA, device=self.platform)

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

        def draw_and_update(state: Any, key: Any, td_error: Any) -> Any:
            key, result = draw(state, key)
            return update(state, result[0].indices, td_error), key, result

        compiled = partial(jax.jit, donate_argnums=0)
        self._draw_uniform, self._draw = jax.jit(draw_uniform), jax.jit(draw)
        self._update, self._draw_and_update = compiled(update), compiled(draw_and_update)
        self._add, self._add_ranked = compiled(uniform.add), compiled(ranked.add)
        single = {name: column[0] for name, column in self._on_device(self.new_row).items()}
        self.plain, self.prioritized = uniform.init(single), ranked.init(single)
        self.key = jax.random.PRNGKey(0)
        self.many, self.one = self._on_device(self.new_rows), self._on_device(self.new_row)
        self.td_error = jnp.asarray(torch.rand(self.batch).numpy())

    def fill(self, data: TensorDict) -> None:
        columns = self._on_device(data)
        self.plain, self.prioritized = self._add(self.plain, columns), self._add_ranked(self.prioritized, columns)

    def prioritize(self, td_error: torch.Tensor) -> None:
        jnp = self.jax.numpy
        self.prioritized = self._update(self.prioritized, jnp.arange(self.rows), jnp.asarray(td_error.numpy()))
        self.sampled = [self.proportional()[0].indices for _ in range(16)]

    def _on_device(self, data: TensorDict) -> dict[str, Any]:
        return {name: self.jax.numpy.asarray(column) for name, column in arrays_of(data).items()}

    def _done(self, result: Any) -> Any:
        self.result = result
        if self.platform == "cpu":
            self.wait()
        return result

    def wait(self) -> None:
        """Wait for what was asked for last."""
        self.jax.block_until_ready(self.result)

    def uniform(self) -> Any:
        self.key, batch = self._draw_uniform(self.plain, self.key)
        return self._done(batch)

    def proportional(self) -> Any:
        self.key, batch = self._draw(self.prioritized, self.key)
        return self._done(batch)

    def update(self) -> None:
        self.prioritized = self._update(self.prioritized, self.next_sampled(), self.td_error)
        self._done(self.prioritized)

    def cycle(self) -> None:
        drawn, _ = self.proportional()
        self.prioritized = self._update(self.prioritized, drawn.indices, self.td_error)
        self._done(self.prioritized)

    def cycle_at_once(self) -> None:
        """Sample and update in one program, which on a CPU copies the tree."""
        given = self.prioritized, self.key, self.td_error
        self.prioritized, self.key, batch = self._draw_and_update(*given)
        self._done((batch, self.prioritized))

    def extend(self) -> None:
        self.plain = self._done(self._add(self.plain, self.many))

    def add(self) -> None:
        self.plain = self._done(self._add(self.plain, self.one))
