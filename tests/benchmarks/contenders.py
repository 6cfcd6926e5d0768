"""The buffers that the benchmark compares: those of this package, of TorchRL, and of
libraries without TorchRL."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle as in_turn
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictReplayBuffer,
)

from rlbuf_td import (
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    RingWriter,
    UniformSampler,
)
from tests.benchmarks.timing import OURS, Calls

ALPHA, BETA, EPS = 0.6, 0.4, 1e-6
CHUNK_BYTES = 1 << 26
# numbers of batches and of TD error tensors that updates cycle through
SAMPLED, ERRORS = 64, 3


def small_rows(count: int) -> TensorDict:
    """Return transitions like HalfCheetah's: 7 leaves, 167 bytes."""
    return TensorDict(
        {
            "observation": torch.randn(count, 17),
            "action": torch.randn(count, 6),
            "next": {
                "observation": torch.randn(count, 17),
                "reward": torch.randn(count, 1),
                "done": torch.zeros(count, 1, dtype=torch.bool),
                "terminated": torch.zeros(count, 1, dtype=torch.bool),
                "truncated": torch.zeros(count, 1, dtype=torch.bool),
            },
        },
        [count],
    )


def image_rows(count: int) -> TensorDict:
    """Return transitions like Atari's: two stacks of four 84 x 84 frames, uint8."""

    def stack() -> torch.Tensor:
        return torch.randint(256, (count, 4, 84, 84), dtype=torch.uint8)

    rows = small_rows(count)
    rows["observation"], rows["next", "observation"] = stack(), stack()
    rows["action"] = torch.randint(4, (count, 1))
    return rows


class Contender(ABC):
    """Full buffers of a library: a uniform one and, if the library has it, a
    prioritized one."""

    name: str
    sampled: Iterator[Any]
    td_errors: Iterator[Any]

    def __init__(
        self, rows: int, batch: int, make_rows: Callable[[int], TensorDict]
    ) -> None:
        self.rows, self.batch = rows, batch
        self.new_rows, self.new_row = make_rows(batch), make_rows(1)
        self.build()
        chunk = max(1, CHUNK_BYTES // self.new_row.bytes())
        for start in range(0, rows, chunk):
            self.fill(make_rows(min(chunk, rows - start)))
        self.prioritize(torch.rand(rows))

    @abstractmethod
    def build(self) -> None: ...

    @abstractmethod
    def fill(self, data: TensorDict) -> None: ...

    @abstractmethod
    def operations(self) -> Calls:
        """Return the timed operations that the library has, by name."""

    def prioritize(self, td_error: torch.Tensor) -> None:  # noqa: B027  uniform buffers have no priorities
        """Set the TD error of every row."""

    def take_turns(self, batches: Sequence[Any], errors: Sequence[Any]) -> None:
        """Make updates cycle through many batches: a single batch would stay in the
        processor's caches."""
        self.sampled = in_turn(
            [(batch, error) for error in errors for batch in batches]
        )
        self.td_errors = in_turn(errors)


class _TorchRLStyle(Contender):
    """The timed operations for buffers with the interface of
    ``TensorDictReplayBuffer``."""

    plain: TensorDictReplayBuffer
    prioritized: TensorDictReplayBuffer

    def fill(self, data: TensorDict) -> None:
        self.plain.extend(data.clone())
        self.prioritized.extend(data)

    def prioritize(self, td_error: torch.Tensor) -> None:
        self.prioritized.update_priority(torch.arange(self.rows), td_error)
        errors = [torch.rand(self.batch) for _ in range(ERRORS)]
        report = [
            self.prioritized.sample().select("index", "sampled_at", strict=False)
            for _ in range(SAMPLED)
        ]
        self.td_errors = in_turn(errors)
        self.sampled = in_turn(
            [
                batch.copy().set("td_error", error)
                for error in errors
                for batch in report
            ]
        )

    def cycle(self) -> None:
        batch = self.prioritized.sample()
        batch.set("td_error", next(self.td_errors))
        self.prioritized.update_tensordict_priority(batch)

    def operations(self) -> Calls:
        plain, prioritized, row = self.plain, self.prioritized, self.new_row[0]
        return {
            "uniform": plain.sample,
            "proportional": prioritized.sample,
            "update": lambda: prioritized.update_tensordict_priority(
                next(self.sampled)
            ),
            "cycle": self.cycle,
            "extend": partial(plain.extend, self.new_rows),
            "add": partial(plain.add, row),
            "extend_proportional": partial(prioritized.extend, self.new_rows),
            "add_proportional": partial(prioritized.add, row),
        }


class Ours(_TorchRLStyle):
    """The buffers of this package."""

    name = OURS

    def build(self) -> None:
        samplers = (
            UniformSampler(),
            ProportionalSampler(self.rows, ALPHA, BETA, EPS),
            RankSampler(self.rows),
        )
        self.plain, self.prioritized, self.ranked = (
            ReplayBuffer(
                storage=PackedStorage(self.rows), sampler=each, batch_size=self.batch
            )
            for each in samplers
        )

    def fill(self, data: TensorDict) -> None:
        super().fill(data)
        self.ranked.extend(data)

    def prioritize(self, td_error: torch.Tensor) -> None:
        super().prioritize(td_error)
        self.ranked.update_priority(torch.arange(self.rows), td_error)

    def operations(self) -> Calls:
        update = self.ranked.update_tensordict_priority
        return super().operations() | {
            "rank": self.ranked.sample,
            "rank_update": lambda: update(next(self.sampled)),
        }


class TorchRL(_TorchRLStyle):
    """TorchRL's own storages and samplers; its prioritized sampler uses C++ trees."""

    name = "TorchRL"

    def build(self) -> None:
        self.plain = TensorDictReplayBuffer(
            storage=LazyTensorStorage(self.rows), batch_size=self.batch
        )
        sampler = PrioritizedSampler(self.rows, ALPHA, BETA, EPS)
        storage = LazyTensorStorage(self.rows)
        self.prioritized = TensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=self.batch
        )

    def operations(self) -> Calls:
        found = super().operations()
        # TorchRL has no ranks; its proportional sampler is the closest alternative.
        return found | {"rank": found["proportional"], "rank_update": found["update"]}


class Mixed(_TorchRLStyle):
    """TorchRL's buffer class with the storages, samplers and writers of this
    package."""

    name = "Mixed"

    def build(self) -> None:
        parts = {
            "storage": PackedStorage(self.rows),
            "sampler": UniformSampler(),
            "writer": RingWriter(),
        }
        self.plain = TensorDictReplayBuffer(batch_size=self.batch, **parts)
        parts = {
            "storage": PackedStorage(self.rows),
            "sampler": ProportionalSampler(self.rows),
            "writer": RingWriter(),
        }
        self.prioritized = TensorDictReplayBuffer(batch_size=self.batch, **parts)


class BareGather(Contender):
    """A lower bound for uniform sampling in torch: one ``torch.randint`` and one
    ``index_select``."""

    name = "bare"

    def build(self) -> None:
        self.matrix = torch.empty(self.rows, self.new_row.bytes(), dtype=torch.uint8)

    def fill(self, data: TensorDict) -> None:
        self.matrix.fill_(1)  # touches the memory

    def operations(self) -> Calls:
        return {
            "uniform": lambda: self.matrix.index_select(
                0, torch.randint(self.rows, (self.batch,))
            )
        }


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

        shape, dtype = (
            self.new_rows["observation"].shape[1:],
            self.new_rows["observation"].numpy().dtype,
        )
        low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
        observation = Box(low, high, shape, dtype.type)
        action = Box(-1.0, 1.0, self.new_rows["action"].shape[1:], np.float32)
        self.buffer = Buffer(self.rows, observation, action, device="cpu")
        row, names = (
            arrays_of(self.new_row),
            ("observation", "next_observation", "action"),
        )
        self.step: list[Any] = [
            *(row[name] for name in names),
            row["reward"][0],
            row["done"][0],
            [{}],
        ]

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

    def operations(self) -> Calls:
        return {
            "uniform": partial(self.buffer.sample, self.batch),
            "add": partial(self.buffer.add, *self.step),
        }


class Cpprb(Contender):
    """cpprb: uniform and proportional replay in C++."""

    name = "cpprb"

    def build(self) -> None:
        import cpprb

        self.batch_columns, self.row = arrays_of(self.new_rows), arrays_of(self.new_row)
        fields = {
            name: {"shape": x.shape[1:], "dtype": x.dtype}
            for name, x in self.batch_columns.items()
        }
        self.plain = cpprb.ReplayBuffer(self.rows, fields)
        self.prioritized = cpprb.PrioritizedReplayBuffer(
            self.rows, fields, alpha=ALPHA, eps=EPS
        )

    def fill(self, data: TensorDict) -> None:
        columns = arrays_of(data)
        self.plain.add(**columns)
        self.prioritized.add(**columns)

    def prioritize(self, td_error: torch.Tensor) -> None:
        self.prioritized.update_priorities(np.arange(self.rows), td_error.numpy())
        rows = [
            self.prioritized.sample(self.batch, BETA)["indexes"] for _ in range(SAMPLED)
        ]
        self.take_turns(rows, [*np.random.default_rng(0).random((ERRORS, self.batch))])

    def cycle(self) -> None:
        batch = self.prioritized.sample(self.batch, BETA)
        self.prioritized.update_priorities(batch["indexes"], next(self.td_errors))

    def operations(self) -> Calls:
        plain, prioritized = self.plain, self.prioritized
        return {
            "uniform": partial(plain.sample, self.batch),
            "proportional": partial(prioritized.sample, self.batch, BETA),
            "update": lambda: prioritized.update_priorities(*next(self.sampled)),
            "cycle": self.cycle,
            "extend": partial(plain.add, **self.batch_columns),
            "add": partial(plain.add, **self.row),
            "extend_proportional": partial(prioritized.add, **self.batch_columns),
            "add_proportional": partial(prioritized.add, **self.row),
        }


class Flashbax(Contender):
    """Flashbax: uniform and prioritized item buffers, jitted by JAX; writes update the
    donated state in place."""

    name = "Flashbax"

    def __init__(
        self, rows: int, batch: int, make_rows: Callable[[int], TensorDict]
    ) -> None:
        os.environ.setdefault(
            "XLA_FLAGS",
            "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        )
        import jax

        self.jax, self._done = jax, jax.block_until_ready
        with jax.default_device(jax.devices("cpu")[0]):
            super().__init__(rows, batch, make_rows)

    def build(self) -> None:
        import flashbax

        jax, jnp = self.jax, self.jax.numpy
        # a batch must not be larger than the capacity
        given = (max(self.rows, self.batch), 1, self.batch, True)
        uniform = flashbax.make_item_buffer(*given)
        ranked = flashbax.make_prioritised_item_buffer(
            *given, priority_exponent=ALPHA, device="cpu"
        )

        def draw_uniform(state, key):
            key, now = jax.random.split(key)
            return key, uniform.sample(state, now).experience

        def draw(state, key):
            key, now = jax.random.split(key)
            drawn = ranked.sample(state, now)
            weight = (self.rows * drawn.probabilities) ** -BETA
            return key, (drawn, weight / jnp.max(weight))

        def update(state, index, td_error):
            return ranked.set_priorities(state, index, jnp.abs(td_error) + EPS)

        compiled = partial(jax.jit, donate_argnums=0)
        self._draw_uniform, self._draw = jax.jit(draw_uniform), jax.jit(draw)
        self._update, self._add, self._add_ranked = (
            compiled(update),
            compiled(uniform.add),
            compiled(ranked.add),
        )
        single = {
            name: column[0] for name, column in self._on_device(self.new_row).items()
        }
        self.plain, self.prioritized = uniform.init(single), ranked.init(single)
        self.key = jax.random.PRNGKey(0)
        self.many, self.one = (
            self._on_device(self.new_rows),
            self._on_device(self.new_row),
        )

    def fill(self, data: TensorDict) -> None:
        columns = self._on_device(data)
        self.plain, self.prioritized = (
            self._add(self.plain, columns),
            self._add_ranked(self.prioritized, columns),
        )

    def prioritize(self, td_error: torch.Tensor) -> None:
        jnp = self.jax.numpy
        self.prioritized = self._update(
            self.prioritized, jnp.arange(self.rows), jnp.asarray(td_error.numpy())
        )
        errors = [jnp.asarray(torch.rand(self.batch).numpy()) for _ in range(ERRORS)]
        self.take_turns([self.proportional()[0].indices for _ in range(16)], errors)

    def _on_device(self, data: TensorDict) -> dict[str, Any]:
        return {
            name: self.jax.numpy.asarray(column)
            for name, column in arrays_of(data).items()
        }

    def uniform(self):
        self.key, batch = self._draw_uniform(self.plain, self.key)
        return self._done(batch)

    def proportional(self):
        self.key, batch = self._draw(self.prioritized, self.key)
        return self._done(batch)

    def update(self) -> None:
        self.prioritized = self._update(self.prioritized, *next(self.sampled))
        self._done(self.prioritized)

    def cycle(self) -> None:
        drawn, _ = self.proportional()
        self.prioritized = self._update(
            self.prioritized, drawn.indices, next(self.td_errors)
        )
        self._done(self.prioritized)

    def write(self, rows: dict[str, Any]) -> None:
        self.plain = self._done(self._add(self.plain, rows))

    def write_prioritized(self, rows: dict[str, Any]) -> None:
        self.prioritized = self._done(self._add_ranked(self.prioritized, rows))

    def operations(self) -> Calls:
        return {
            "uniform": self.uniform,
            "proportional": self.proportional,
            "update": self.update,
            "cycle": self.cycle,
            "extend": partial(self.write, self.many),
            "add": partial(self.write, self.one),
            "extend_proportional": partial(self.write_prioritized, self.many),
            "add_proportional": partial(self.write_prioritized, self.one),
        }


def available() -> list[type[Contender]]:
    others = {
        "stable_baselines3": StableBaselines3,
        "cpprb": Cpprb,
        "flashbax": Flashbax,
    }
    return [
        Ours,
        TorchRL,
        Mixed,
        BareGather,
        *(cls for name, cls in others.items() if importlib.util.find_spec(name)),
    ]
