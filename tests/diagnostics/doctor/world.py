"""A small world whose transitions are kept by hand: walks that end by falling off or by a time limit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict

Observe = Callable[[torch.Tensor], dict]


def vector(state: torch.Tensor) -> dict:
    return {"observation": state.clone()}


def nested(state: torch.Tensor) -> dict:
    image = (state.repeat(1, 48)[:, :144].view(-1, 1, 12, 12) * 40).round().clamp(-128, 127) + 128
    return {
        "camera": {"pixels": image.to(torch.uint8)},
        "body": {"speed": state.clone(), "cell": state[:, :1].round().long().clamp(-3, 3), "free": state > 0},
    }


def walk(steps: int, lanes: int = 1, *, observe: Observe = vector, seed: int = 0, limit: int = 25) -> TensorDict:
    """Return ``[T, E]`` transitions, with true final observations, and every flag that TorchRL has."""
    generator = torch.Generator().manual_seed(seed)
    state, age = torch.zeros(lanes, 3), torch.zeros(lanes, dtype=torch.int64)
    rows = []
    for _ in range(steps):
        action = torch.randint(2, (lanes, 1), generator=generator)
        drift = 0.15 * (2 * action - 1) + 0.1 * torch.randn(lanes, 3, generator=generator)
        reached = state + drift
        terminated = reached.abs().amax(1, keepdim=True) > 1.0
        truncated = (age[:, None] + 1 >= limit) & ~terminated
        done = terminated | truncated
        after = {"reward": torch.ones(lanes, 1), "done": done, "terminated": terminated, "truncated": truncated}
        row = {"action": action, "done": torch.zeros_like(done), "next": observe(reached) | after}
        rows.append(TensorDict(observe(state) | row, [lanes]))
        fresh = 0.1 * torch.randn(lanes, 3, generator=generator)
        state, age = torch.where(done, fresh, reached), torch.where(done[:, 0], 0, age + 1)
    return torch.stack(rows)
