"""Parallel environments whose agents die and return, and that keep their own history."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from gymnasium.spaces import Box, Dict, Discrete

AGENTS = ["wolf_0", "wolf_1", "wolf_2", "sheep"]


class Meadow(pettingzoo.ParallelEnv):
    """Wolves die, some of truncation, and return a few steps later; every observation occurs once."""

    metadata: dict[str, Any] = {"name": "meadow"}  # noqa: RUF012  as PettingZoo declares it

    def __init__(self, longest: int = 14, kind: str = "box", rewards: int | None = None) -> None:
        self.possible_agents, self.agents = [*AGENTS], list[str]()
        self.longest, self.kind, self.rewards = longest, kind, rewards
        self.history: list[tuple[Any, ...]] = []  # (episode, living, observations, actions, result, living after)
        self.episode = self.time = 0
        self.random = np.random.default_rng(0)

    def observation_space(self, agent: str) -> gymnasium.Space:
        place = Box(-np.inf, np.inf, (2,), np.float64 if agent == "sheep" else np.float32)
        return Dict(place=place, action_mask=Box(0, 1, (3,), np.int8)) if self.kind == "dict" else place

    def action_space(self, agent: str) -> gymnasium.Space:
        return Box(-1, 1, (2,), np.float32) if agent == "sheep" else Discrete(3)

    def observe(self, agent: str) -> Any:
        number = AGENTS.index(agent)
        place = np.array([self.episode + number / 10, self.time], np.float64 if agent == "sheep" else np.float32)
        if self.kind == "dict":
            return {"place": place, "action_mask": np.array([1, self.time % 2, number % 2], np.int8)}
        return place

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.episode, self.time, self.agents = self.episode + 1, 0, [*AGENTS]
        self.seen = {agent: self.observe(agent) for agent in self.agents}
        return self.seen, {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        acted, before, self.time = [*self.agents], self.seen, self.time + 1
        over = self.time >= self.longest or self.random.random() < 0.05
        ends = {agent: self.random.integers(4) if agent != "sheep" else 3 for agent in acted}
        truncated = {agent: bool(ends[agent] == 1 or (over and ends[agent] > 1)) for agent in acted}
        terminated = {agent: bool(ends[agent] == 0) for agent in acted}
        rewards = {agent: self.random.normal() if self.rewards is None else self.rewards for agent in acted}
        back = [agent for agent in AGENTS if agent not in acted and self.random.random() < 0.5]
        going = [agent for agent in acted if not (terminated[agent] or truncated[agent])]
        self.agents = [] if over or not going else [agent for agent in AGENTS if agent in (*going, *back)]
        # a terminated wolf has no last observation
        seen = [agent for agent in AGENTS if agent in self.agents or truncated.get(agent)]
        self.seen = {agent: self.observe(agent) for agent in seen}
        result: Any = self.seen, rewards, terminated, truncated, {agent: {} for agent in seen}
        kept = {agent: actions[agent] for agent in acted}
        self.history.append((self.episode, acted, before, kept, result, [*self.agents]))
        return result


def act(env: Any) -> dict[str, Any]:
    return {agent: env.action_space(agent).sample() for agent in env.agents}
