"""A small world in which everything about a rollout is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor


class AskedNetwork(torch.nn.Module):
    """V(s) = 2 s[0] - s[1] + 1, and a record of the observations that it was asked
    for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
        self.asked: list[Tensor] = []
        self.fails = False

    def forward(self, observation: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("the network failed")
        self.asked.append(observation.clone())
        return (observation * self.scale).sum(-1, keepdim=True) + 1


@dataclass
class World:
    """Lanes of a random walk with ends of every kind; ``steps(n)`` continues it, as a
    collector would, ``[E, n]``."""

    lanes: int
    network: AskedNetwork
    generator: torch.Generator
    observation: Tensor
    trajectory: Tensor

    def value(self, observation: Tensor) -> Tensor:
        return (observation * torch.tensor([2.0, -1.0])).sum(-1, keepdim=True) + 1

    def module(self) -> TensorDictModule:
        return TensorDictModule(
            self.network, in_keys=["observation"], out_keys=["state_value"]
        )

    def steps(
        self, n: int, p: float = 0.15, *, values: bool = True, **ends: Any
    ) -> TensorDict:
        """``[E, n]`` steps; ``terminated`` and ``truncated`` may be given, bool
        ``[E, n]``."""
        g = self.generator
        ended = torch.rand(self.lanes, n, generator=g) < p
        coin = torch.rand(self.lanes, n, generator=g) < 0.5
        terminated = ends.get("terminated", ended & coin)
        truncated = ends.get("truncated", ended & ~coin)
        rows = []
        for t in range(n):
            following = self.observation + torch.randn(self.lanes, 2, generator=g)
            flags = {
                "terminated": terminated[:, t, None],
                "truncated": truncated[:, t, None],
            }
            done = flags["terminated"] | flags["truncated"]
            after = {
                "observation": following,
                "reward": torch.randn(self.lanes, 1, generator=g),
                "done": done,
                **flags,
            }
            row = {
                "observation": self.observation,
                "next": after,
                "collector": {"traj_ids": self.trajectory.clone()},
            }
            if values:
                row["state_value"] = self.value(self.observation)
            rows.append(TensorDict(row, [self.lanes]))
            fresh = torch.randn(self.lanes, 2, generator=g)
            self.observation = torch.where(done, fresh, following)
            self.trajectory = torch.where(
                done[:, 0], self.trajectory + self.lanes, self.trajectory
            )
        return torch.stack(rows, 1)

    def estimates(
        self, data: TensorDict, gamma: float = 0.9, lmbda: float = 0.8
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and value targets by the definition (Schulman et al.,
        2016, equation 16), with the values of all true next observations,
        ``[E, n, 1]``."""
        after = data["next"]
        value, following = (
            self.value(rows["observation"]).double() for rows in (data, after)
        )
        advantage = torch.zeros_like(value)
        for lane in range(len(value)):
            later = 0.0
            for t in reversed(range(value.shape[1])):
                bootstrap = 0.0 if after["terminated"][lane, t] else following[lane, t]
                delta = after["reward"][lane, t] + gamma * bootstrap - value[lane, t]
                goes_on = not after["done"][lane, t]
                later = delta + gamma * lmbda * later * goes_on
                advantage[lane, t] = later
        return advantage.float(), (advantage + value).float()

    def rows_to_ask(self, data: TensorDict) -> int:
        after = data["next"]
        breaks = after["truncated"].clone()
        breaks[:, -1] = ~after["terminated"][:, -1]
        return int(breaks.sum())


def make_world(lanes: int = 3, seed: int = 0) -> World:
    g = torch.Generator().manual_seed(seed)
    return World(
        lanes,
        AskedNetwork(),
        g,
        torch.randn(lanes, 2, generator=g),
        torch.arange(lanes),
    )
