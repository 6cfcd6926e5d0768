"""The buffers that the benchmark compares.

Each timed operation is a method without arguments; a class lacks the operations that its library does not support.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle as in_turn
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer, RingWriter, UniformSampler
from rlbuf_td.cli.bench.timing import OURS

ALPHA, BETA, EPS = 0.6, 0.4, 1e-6
CHUNK_BYTES = 1 << 26
SAMPLED, ERRORS = 64, 3  # numbers of batches and of TD error tensors that updates cycle through


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
    """Full buffers of a library: a uniform one and, if the library has it, a prioritized one."""

    name: str
    sampled: Iterator[Any]
    td_errors: Iterator[Any]

    def __init__(self, rows: int, batch: int, make_rows: Callable[[int], TensorDict]) -> None:
        self.rows, self.batch = rows, batch
        self.new_rows, self.new_row = make_rows(batch), make_rows(1)
        self.single = self.new_row[0]
        self.build()
        chunk = max(1, CHUNK_BYTES // self.new_row.bytes())
        for start in range(0, rows, chunk):
            self.fill(make_rows(min(chunk, rows - start)))
        self.prioritize(torch.rand(rows))

    @abstractmethod
    def build(self) -> None: ...

    @abstractmethod
    def fill(self, data: TensorDict) -> None: ...

    def prioritize(self, td_error: torch.Tensor) -> None:  # noqa: B027  uniform buffers have no priorities
        """Set the TD error of every row."""

    def take_turns(self, batches: Sequence[Any], errors: Sequence[Any]) -> None:
        """Make updates cycle through many batches: a single batch would stay in the processor's caches."""
        self.sampled = in_turn([(batch, error) for error in errors for batch in batches])
        self.td_errors = in_turn(errors)


class _TorchRLStyle(Contender):
    """The timed operations for buffers with the interface of ``TensorDictReplayBuffer``."""

    plain: TensorDictReplayBuffer
    prioritized: TensorDictReplayBuffer

    def fill(self, data: TensorDict) -> None:
        self.plain.extend(data.clone())
        self.prioritized.extend(data)

    def prioritize(self, td_error: torch.Tensor) -> None:
        self.prioritized.update_priority(torch.arange(self.rows), td_error)
        errors = [torch.rand(self.batch) for _ in range(ERRORS)]
        report = [self.prioritized.sample().select("index", "sampled_at", strict=False) for _ in range(SAMPLED)]
        self.td_errors = in_turn(errors)
        self.sampled = in_turn([batch.copy().set("td_error", error) for error in errors for batch in report])

    def uniform(self) -> Any:
        return self.plain.sample()

    def proportional(self) -> Any:
        return self.prioritized.sample()

    def update(self) -> None:
        self.prioritized.update_tensordict_priority(next(self.sampled))

    def cycle(self) -> None:
        batch = self.prioritized.sample()
        batch.set("td_error", next(self.td_errors))
        self.prioritized.update_tensordict_priority(batch)

    def extend(self) -> None:
        self.plain.extend(self.new_rows)

    def add(self) -> None:
        self.plain.add(self.single)

    def extend_proportional(self) -> None:
        self.prioritized.extend(self.new_rows)

    def add_proportional(self) -> None:
        self.prioritized.add(self.single)


class Ours(_TorchRLStyle):
    """The buffers of this package."""

    name = OURS

    def build(self) -> None:
        samplers = UniformSampler(), ProportionalSampler(self.rows, ALPHA, BETA, EPS), RankSampler(self.rows)
        self.plain, self.prioritized, self.ranked = (
            ReplayBuffer(storage=PackedStorage(self.rows), sampler=each, batch_size=self.batch) for each in samplers
        )

    def fill(self, data: TensorDict) -> None:
        super().fill(data)
        self.ranked.extend(data)

    def prioritize(self, td_error: torch.Tensor) -> None:
        super().prioritize(td_error)
        self.ranked.update_priority(torch.arange(self.rows), td_error)

    def rank(self) -> Any:
        return self.ranked.sample()

    def rank_update(self) -> None:
        self.ranked.update_tensordict_priority(next(self.sampled))


class TorchRL(_TorchRLStyle):
    """TorchRL's own storages and samplers; its prioritized sampler uses C++ trees."""

    name = "TorchRL"

    def build(self) -> None:
        self.plain = TensorDictReplayBuffer(storage=LazyTensorStorage(self.rows), batch_size=self.batch)
        sampler = PrioritizedSampler(self.rows, ALPHA, BETA, EPS)
        storage = LazyTensorStorage(self.rows)
        self.prioritized = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=self.batch)

    # TorchRL has no ranks; its proportional sampler is the closest alternative.
    rank = _TorchRLStyle.proportional
    rank_update = _TorchRLStyle.update


class Mixed(_TorchRLStyle):
    """TorchRL's buffer class with the storages, samplers and writers of this package."""

    name = "Mixed"

    def build(self) -> None:
        parts = {"storage": PackedStorage(self.rows), "sampler": UniformSampler(), "writer": RingWriter()}
        self.plain = TensorDictReplayBuffer(batch_size=self.batch, **parts)
        parts = {"storage": PackedStorage(self.rows), "sampler": ProportionalSampler(self.rows), "writer": RingWriter()}
        self.prioritized = TensorDictReplayBuffer(batch_size=self.batch, **parts)


class BareGather(Contender):
    """A lower bound for uniform sampling in torch: one ``torch.randint`` and one ``index_select``."""

    name = "bare"

    def build(self) -> None:
        self.matrix = torch.empty(self.rows, self.new_row.bytes(), dtype=torch.uint8)

    def fill(self, data: TensorDict) -> None:
        self.matrix.fill_(1)  # touches the memory

    def uniform(self) -> Any:
        return self.matrix.index_select(0, torch.randint(self.rows, (self.batch,)))
