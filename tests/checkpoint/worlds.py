"""Buffers to dump, and the steps that a run takes with one."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td import PackedStorage, ReplayBuffer
from tests.catalogue import SAMPLERS


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
    made = SAMPLERS[sampler](rows)
    return ReplayBuffer(storage=storage, sampler=made, batch_size=8, generator=generator, **kwargs)


def transitions(n: int, lanes: int = 0, first: int = 0) -> TensorDict:
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
