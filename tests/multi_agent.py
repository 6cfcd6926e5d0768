"""Environments whose agents die, some while others act, and that keep their own
history."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from gymnasium.spaces import Box, Dict, Discrete

AGENTS = ["wolf_0", "wolf_1", "wolf_2", "sheep"]


class Meadow(pettingzoo.ParallelEnv):
    """Wolves die, some of truncation, and return a few steps later; every observation
    occurs once."""

    metadata: dict[str, Any] = {"name": "meadow"}  # noqa: RUF012  as PettingZoo declares it

    def __init__(
        self, longest: int = 14, kind: str = "box", rewards: int | None = None
    ) -> None:
        self.possible_agents, self.agents = [*AGENTS], list[str]()
        self.longest, self.kind, self.rewards = longest, kind, rewards
        # (episode, living, observations, actions, result, living after)
        self.history: list[tuple[Any, ...]] = []
        self.episode = self.time = 0
        self.random = np.random.default_rng(0)

    def observation_space(self, agent: str) -> gymnasium.Space:
        place = Box(
            -np.inf, np.inf, (2,), np.float64 if agent == "sheep" else np.float32
        )
        return (
            Dict(place=place, action_mask=Box(0, 1, (3,), np.int8))
            if self.kind == "dict"
            else place
        )

    def action_space(self, agent: str) -> gymnasium.Space:
        return Box(-1, 1, (2,), np.float32) if agent == "sheep" else Discrete(3)

    def observe(self, agent: str) -> Any:
        number = AGENTS.index(agent)
        place = np.array(
            [self.episode + number / 10, self.time],
            np.float64 if agent == "sheep" else np.float32,
        )
        if self.kind == "dict":
            return {
                "place": place,
                "action_mask": np.array([1, self.time % 2, number % 2], np.int8),
            }
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
        ends = {
            agent: self.random.integers(4) if agent != "sheep" else 3 for agent in acted
        }
        truncated = {
            agent: bool(ends[agent] == 1 or (over and ends[agent] > 1))
            for agent in acted
        }
        terminated = {agent: bool(ends[agent] == 0) for agent in acted}
        rewards = {
            agent: self.random.normal() if self.rewards is None else self.rewards
            for agent in acted
        }
        back = [
            agent
            for agent in AGENTS
            if agent not in acted and self.random.random() < 0.5
        ]
        going = [
            agent for agent in acted if not (terminated[agent] or truncated[agent])
        ]
        self.agents = (
            []
            if over or not going
            else [agent for agent in AGENTS if agent in (*going, *back)]
        )
        # a terminated wolf has no last observation
        seen = [
            agent for agent in AGENTS if agent in self.agents or truncated.get(agent)
        ]
        self.seen = {agent: self.observe(agent) for agent in seen}
        result: Any = (
            self.seen,
            rewards,
            terminated,
            truncated,
            {agent: {} for agent in seen},
        )
        kept = {agent: actions[agent] for agent in acted}
        self.history.append((self.episode, acted, before, kept, result, [*self.agents]))
        return result


def act(env: Any) -> dict[str, Any]:
    return {agent: env.action_space(agent).sample() for agent in env.agents}


class Council(pettingzoo.AECEnv):
    """Three members speak in turn. Each turn rewards all of them; any may die in it, of
    either reason."""

    metadata: dict[str, Any] = {"name": "council"}  # noqa: RUF012  as PettingZoo declares it

    def __init__(self, longest: int = 20, unlike: bool = False) -> None:
        super().__init__()
        self.possible_agents, self.agents = ["ann", "bob", "cy"], list[str]()
        self.longest, self.unlike = longest, unlike
        self.time, self.random = 0, np.random.default_rng(0)

    def observation_space(self, agent: str) -> gymnasium.Space:
        parts = {
            "time": Box(-np.inf, np.inf, (2,), np.float32),
            "action_mask": Box(0, 1, (3,), np.int8),
        }
        return Dict(
            parts | ({"notes": Discrete(100)} if self.unlike and agent == "cy" else {})
        )

    def action_space(self, agent: str) -> gymnasium.Space:
        return Discrete(3)

    def observe(self, agent: str) -> Any:
        time = np.array([self.time, self.possible_agents.index(agent)], np.float32)
        mask = np.array(
            [1, self.time % 2, 1] if agent == self.agent_selection else [0, 0, 0],
            np.int8,
        )
        notes = (
            {"notes": np.int64(self.time % 100)}
            if self.unlike and agent == "cy"
            else {}
        )
        return {"time": time, "action_mask": mask} | notes

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.ends = [*self.possible_agents], self.time + self.longest
        self.rewards, self._cumulative_rewards = (
            dict.fromkeys(self.agents, 0.0) for _ in range(2)
        )
        self.terminations, self.truncations = (
            dict.fromkeys(self.agents, False) for _ in range(2)
        )
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def step(self, action: Any) -> None:
        speaker = self.agent_selection
        if self.terminations[speaker] or self.truncations[speaker]:
            return self._was_dead_step(action)
        self.time += 1
        self._cumulative_rewards[speaker] = 0.0
        self.rewards = {agent: self.random.normal() for agent in self.agents}
        self._accumulate_rewards()
        for agent in self.agents:
            death = self.random.integers(30)
            self.terminations[agent] = death == 0
            self.truncations[agent] = (
                death == 1 or (death == 0 and action == 0) or self.time >= self.ends
            )
        alive = [
            agent
            for agent in self.agents
            if not (self.terminations[agent] or self.truncations[agent])
        ]
        after = self.possible_agents.index(speaker)
        later = [agent for agent in alive if self.possible_agents.index(agent) > after]
        self.agent_selection = (later or alive or [speaker])[0]
        self._deads_step_first()
