"""Buffers to dump, and the steps that a run takes with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td import (
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SequenceSampler,
    UniformSampler,
)

SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda rows: UniformSampler(),
    "unique": lambda rows: UniformSampler(unique=True),
    "proportional": lambda rows: ProportionalSampler(rows),
    "within buffer": lambda rows: ProportionalSampler(rows, max_priority_within_buffer=True, weight_norm="batch"),
    "rank": lambda rows: RankSampler(rows),
}

#: Samplers that wrap one.
WRAPPERS: dict[str, Callable[[int], Any]] = {
    "hindsight": lambda rows: HindsightSampler(ProportionalSampler(rows), reward_fn),
    "n-step": lambda rows: NStepSampler(UniformSampler(), 3, 0.9),
    "n-step over hindsight": lambda rows: NStepSampler(HindsightSampler(RankSampler(rows), reward_fn), 3, 0.9),
    "sequence": lambda rows: SequenceSampler(ProportionalSampler(rows), 3, burn_in=1),
}


def reward_fn(batch: TensorDictBase) -> torch.Tensor:
    return -(batch["next", "achieved_goal"] - batch["desired_goal"]).abs().sum(-1)


def make(
    sampler: str = "proportional",
    steps: int = 20,
    lanes: int = 0,
    *,
    seed: int | None = 0,
    storage: Any = None,
    **kwargs: Any,
) -> ReplayBuffer:
    """Return an empty storage of ``steps`` time steps, with a generator of its own unless ``seed`` is ``None``."""
    rows = steps * max(1, lanes)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if storage is None:
        storage = PackedStorage(rows, ndim=1 + bool(lanes))
    made = (SAMPLERS | WRAPPERS)[sampler](rows)
    return ReplayBuffer(storage=storage, sampler=made, batch_size=8, generator=generator, **kwargs)


def transitions(n: int, lanes: int = 0, first: int = 0) -> TensorDict:
    """Return ``n`` steps whose numbers go up from ``first``: ``[n]``, or as collectors give them, ``[lanes, n]``."""
    lead = [lanes, n] if lanes else [n]
    number = torch.arange(first, first + n).expand(lead).clone()
    value, done = number.unsqueeze(-1).float(), (number % 7 == 6).unsqueeze(-1)
    after = {"reward": value, "done": done, "terminated": done.clone(), "achieved_goal": value.clone()}
    observation = {"observation": value + torch.rand(*lead, 3), "number": number, "desired_goal": value + 1}
    return TensorDict(observation | {"next": after}, lead)


def step(rb: ReplayBuffer, number: int, lanes: int = 0) -> TensorDictBase:
    """Write (more at first), sample and update priorities, as a run does; return the batch."""
    rb.extend(transitions(3 if number else 8, lanes, first=3 * number))
    batch = rb.sample()
    batch["td_error"] = torch.sin(batch["observation"].sum(-1)) * (1 + number % 5)
    rb.update_tensordict_priority(batch)
    return batch
