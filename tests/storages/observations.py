"""Streams of transitions in which observations repeat, or do not: for tests of rows that share them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

FRAMES = 3


class Lanes:
    """Environments whose observations follow each other, but for breaks that nothing announces.

    Values are of a small alphabet, so that what does not follow is sometimes the same all the same.
    """

    def __init__(self, lanes: int, seed: int, alphabet: int = 3) -> None:
        self.lanes, self.alphabet = lanes, alphabet
        self.generator = torch.Generator().manual_seed(seed)
        self.state = self._new()

    def _draw(self, *shape: int, high: int | None = None) -> torch.Tensor:
        return torch.randint(high or self.alphabet, (self.lanes, *shape), generator=self.generator)

    def _new(self) -> dict[Any, torch.Tensor]:
        frame = self._draw(2, 2).to(torch.uint8)
        stack = frame[:, None].expand(-1, FRAMES, -1, -1).clone()
        goal = self._draw(2).double()
        goal[goal == 0] = float("nan")  # the same bytes, though not equal
        position = self._draw(3).float()
        position[position == 1] = -0.0  # equal to 0.0, though other bytes
        return {"observation": position, ("agent", "goal"): goal, "clock": self._draw(high=999), "pixels": stack}

    def step(self, broken: torch.Tensor | bool = False) -> TensorDict:
        """Return one time step, ``[lanes]``, after which the lanes of ``broken`` begin anew."""
        now, after = self.state, self._new()
        after["pixels"] = torch.cat([now["pixels"][:, 1:], after["pixels"][:, -1:]], 1)
        after["agent", "goal"] = now["agent", "goal"]
        where = torch.as_tensor(broken).expand(self.lanes)
        reset = self._new()
        self.state = {key: _where(where, reset[key], value) for key, value in after.items()}
        self.state["clock"] = self._draw(high=999)  # a key that does not repeat
        data = TensorDict({"action": self._draw(2, high=99).float()}, [self.lanes])
        for key, value in now.items():
            data.set(key, value)
        for key, value in after.items():
            data.set(("next", *([key] if isinstance(key, str) else key)), value)
        data["next", "done"] = where[:, None] & (self._draw(1, high=2) == 1)
        return data

    def steps(self, count: int, often: float) -> TensorDict:
        chance = torch.rand(count, self.lanes, generator=self.generator) < often
        return torch.stack([self.step(broken) for broken in chance]).contiguous()


def _where(mask: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.view(-1, *[1] * (left.ndim - 1)), left, right)
