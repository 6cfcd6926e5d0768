"""Groups of agents of PettingZoo's parallel environments, and the schema of their transitions.

The layout is that of TorchRL's ``PettingZooEnv``: the agents of a group are a dim of the tensors under its name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict

from rlbuf_td.envs.spaces import ACTION, OBSERVATION, RESERVED, Key, value_of_space
from rlbuf_td.storages.schema import SchemaError, walk

ACTION_MASK = "action_mask"
FLAGS = ("done", "terminated", "truncated")


def is_parallel(source: Any) -> bool:
    pettingzoo = sys.modules.get("pettingzoo")
    return pettingzoo is not None and isinstance(source, pettingzoo.ParallelEnv)


def parallel_envs(source: Any) -> list[Any] | None:
    """Return the environments in ``source``, a parallel environment or a sequence of them; None for anything else.

    Raises a TypeError if ``source`` is an environment in which agents take turns.
    """
    pettingzoo = sys.modules.get("pettingzoo")
    if pettingzoo is not None and isinstance(source, pettingzoo.AECEnv):
        remedy = "convert it with pettingzoo.utils.conversions.aec_to_parallel, or use TorchRL's PettingZooWrapper"
        raise TypeError(f"in a {type(source).__name__} agents take turns, which is not supported: {remedy}")
    if is_parallel(source):
        return [source]
    if isinstance(source, list | tuple) and source and all(map(is_parallel, source)):
        return [*source]
    return None


@dataclass(frozen=True)
class AgentGroup:
    """Agents with equal spaces, in the order of their rows in the tensors of the group."""

    name: str
    agents: tuple[str, ...]
    observation: Any  # the space of one agent
    action: Any

    def observed(self, lanes: tuple[int, ...]) -> dict[str, Any]:
        """Return the schema of what the environment gives, ``[*lanes, agents, ...]``, as a dict of meta tensors."""
        lead = (*lanes, len(self.agents))
        value = value_of_space(self.observation, lead, (self.name, OBSERVATION))
        found: dict[str, Any] = {OBSERVATION: value, "mask": _flag(lead)}
        if isinstance(value, TensorDict) and ACTION_MASK in value.keys():
            found[ACTION_MASK] = torch.empty_like(value.pop(ACTION_MASK), dtype=torch.bool)
        return found

    @cached_property
    def observation_paths(self) -> list[tuple[Key, Key]]:
        """Pairs ``(key in the group, path in an agent's observation)``."""
        keys = [key for key, _ in walk(self.observed(())) if key != ("mask",)]
        return [(key, key if key == (ACTION_MASK,) else key[1:]) for key in keys]

    @cached_property
    def action_paths(self) -> list[tuple[Key, Key]]:
        """Pairs ``(key in the group, path in an agent's action)``."""
        action = value_of_space(self.action, (), (self.name, ACTION))
        return [(key, key[1:]) for key, _ in walk({ACTION: action})]

    @property
    def has_action_mask(self) -> bool:
        return any(key == (ACTION_MASK,) for key, _ in self.observation_paths)


def groups_of(envs: list[Any], group_map: Any = None) -> list[AgentGroup]:
    """Return the groups of the agents of parallel environments, which must have equal agents and spaces.

    ``group_map`` is a dict from names to lists of agents, or a ``MarlGroupMapType`` of TorchRL. By default, the agents
    ``knight_0`` and ``knight_1`` are the group ``knight``, and other agents are groups of their own.
    """
    agents = [*envs[0].possible_agents]
    if group_map is None:
        group_map = _by_name(agents)
    elif hasattr(group_map, "get_group_map"):
        group_map = group_map.get_group_map(agents)
    if not isinstance(group_map, Mapping):
        raise TypeError(f"group_map must be a dict from names to lists of agents, got a {type(group_map).__name__}")
    named = [agent for group in group_map.values() for agent in group]
    if sorted(named) != sorted(agents) or not all(group_map.values()):
        raise ValueError(f"group_map must name each of the agents {agents} once, got {dict(group_map)}")
    for name in group_map:
        if not isinstance(name, str) or name in RESERVED:
            raise ValueError(f"a group must have a name that is not reserved for the transition, got {name!r}")
    found, *others = ([_group(env, name, tuple(group_map[name])) for name in group_map] for env in envs)
    for number, (env, other) in enumerate(zip(envs[1:], others, strict=True), 1):
        if [*env.possible_agents] != agents or other != found:
            raise SchemaError(f"environment {number} has other agents or spaces than environment 0")
    return found


def _by_name(agents: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for agent in agents:
        name, _, number = agent.rpartition("_")
        found.setdefault(name if name and number.lstrip("+-").isdecimal() else agent, []).append(agent)
    return found


def _group(env: Any, name: str, agents: tuple[str, ...]) -> AgentGroup:
    spaces = [(env.observation_space(agent), env.action_space(agent)) for agent in agents]
    for agent, other in zip(agents, spaces, strict=True):
        if other != spaces[0]:
            remedy = f"put them in groups of their own, group_map={{{agents[0]!r}: [...], {agent!r}: [...]}}"
            raise SchemaError(
                f"the agents {agents[0]!r} and {agent!r} of group {name!r} differ in their spaces: {remedy}"
            )
    return AgentGroup(name, agents, *spaces[0])


def agents_schema(groups: list[AgentGroup], lanes: tuple[int, ...]) -> TensorDict:
    """Return the schema, ``[*lanes]``, of the transitions of parallel environments with these groups."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {name: _flag((*lanes, 1)) for name in FLAGS}
    for group in groups:
        lead = (*lanes, len(group.agents))
        action = value_of_space(group.action, lead, (group.name, ACTION))
        before[group.name] = group.observed(lanes) | {ACTION: action}
        reward = torch.empty((*lead, 1), dtype=torch.float32, device="meta")
        after[group.name] = group.observed(lanes) | {"reward": reward} | {name: _flag((*lead, 1)) for name in FLAGS}
    return TensorDict({**before, "next": after}, lanes)


def _flag(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bool, device="meta")
