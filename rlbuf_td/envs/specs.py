"""Schemas of Gymnasium spaces, TorchRL specs and environments: the keys, dtypes and
shapes of a transition.

A schema is a TensorDict on the ``"meta"`` device, which uses no memory. Schemas have
batch size ``[]``, or ``[E]`` for ``E`` environments. Gymnasium and PettingZoo are
optional: this module never imports them, but looks them up in ``sys.modules``. The
agents of PettingZoo's parallel environments form groups, as in TorchRL's
``PettingZooEnv``: the agents of a group are a dim of the tensors under its name. In its
turn-based environments, each agent is a lane.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data import Composite, TensorSpec

from rlbuf_td.storages.schema import SchemaError, refuse_unpackable, show_key, walk

if TYPE_CHECKING:
    from gymnasium import Env, Space
    from gymnasium.vector import VectorEnv
    from pettingzoo import AECEnv, ParallelEnv
    from torchrl.envs import MarlGroupMapType  # noqa: TID251

    Shape: TypeAlias = tuple[int, ...]
    AnySpace: TypeAlias = Space | TensorSpec
    Extras: TypeAlias = Mapping[str, object] | TensorDictBase | None
    Groups: TypeAlias = Mapping[str, Sequence[str]] | MarlGroupMapType | None

Key: TypeAlias = tuple[str, ...]
#: Pairs ``(key in the rows, path in what an environment gives or takes)``.
Paths: TypeAlias = list[tuple[Key, Key]]
OBSERVATION = "observation"
ACTION = "action"
ACTION_MASK = "action_mask"
FLAGS = ("done", "terminated", "truncated")
# The keys of a transition besides the observation, at the root and under "next".
RESERVED = {ACTION, "next", "index", "collector", "reward", *FLAGS}
_RESULTS = {("next", name) for name in ("reward", *FLAGS)}
_RAGGED = "has no fixed size in bytes: encode it as a Box or MultiDiscrete of fixed shape with a wrapper"


def schema_of(
    source: Any, *, extras: Extras = None, group_map: Groups = None
) -> TensorDict:
    """Return the keys, dtypes and shapes of a transition as a TensorDict of meta
    tensors.

    Args:
        source: a TorchRL environment; a Gymnasium environment, single or vectorised; an
            environment of PettingZoo, or a list of parallel ones; a TensorDict with an
            example of a transition; or only an observation space: a Gymnasium space or
            a TorchRL spec.
        extras: examples of further entries, such as a policy's outputs, in a TensorDict
            or a nested dict. An extra replaces an entry with the same key.
        group_map: the groups of a PettingZoo environment's agents, see
            :class:`PettingZooRecorder`.

    Returns:
        The schema, with batch size ``[]``, or ``[E]`` for ``E`` environments, or agents
        that take turns. A Dict observation has its keys at the root; any other
        observation has the key ``"observation"``. The items of a tuple have the keys
        ``"0"``, ``"1"`` and so on. A value of Gymnasium's ``Discrete`` space is one
        integer, not a one-hot vector. Rewards have shape ``[1]``, or the shape of the
        ``reward_space`` that environments with several objectives have.

    Raises:
        SchemaError: a space has no fixed size in bytes (``Text``, ``Graph``,
            ``Sequence``, ``OneOf``), or the leading dims of an extra are not the batch
            size, or agents of a group, or that take turns, differ in their spaces.
        TypeError: ``source`` has an unsupported type.
        ValueError: ``group_map`` does not name each agent of a PettingZoo environment
            once.

    Cost: O(keys). Environments are not reset or stepped.

    Example:
        >>> from torchrl.data import Bounded, Composite, Unbounded
        >>> schema = schema_of(Composite(pixels=Bounded(0, 255, (3, 8, 8), dtype=torch.uint8), speed=Unbounded(2)))
        >>> schema["pixels"].dtype, schema["speed"].shape
        (torch.uint8, torch.Size([2]))
    """
    gymnasium = sys.modules.get("gymnasium")
    parallel = parallel_envs(source)
    if parallel is not None:
        lanes = (len(source),) if isinstance(source, list | tuple) else ()
        schema = agents_schema(groups_of(parallel, group_map), lanes)
    elif takes_turns(source):
        schema = turns_schema(source, [*source.possible_agents])
    elif isinstance(source, TensorDictBase):
        schema = without_memory(source)
    elif callable(getattr(source, "fake_tensordict", None)):
        schema = without_memory(source.fake_tensordict())
    elif gymnasium is not None and isinstance(source, gymnasium.Env):
        spaces = source.observation_space, source.action_space
        schema = transition_schema(*spaces, reward_shape=_reward_shape(source))
    elif gymnasium is not None and isinstance(source, gymnasium.vector.VectorEnv):
        spaces = source.single_observation_space, source.single_action_space
        schema = transition_schema(
            *spaces, source.num_envs, reward_shape=_reward_shape(source)
        )
    elif is_space(source):
        schema = TensorDict({**_observation(source, ())}, [])
    else:
        raise TypeError(
            f"a {type(source).__name__} has no keys, dtypes and shapes: pass a TorchRL, Gymnasium or PettingZoo "
            "environment (not its name), a Gymnasium space, a TorchRL spec, or a TensorDict that holds one transition"
        )
    if extras is None:
        return schema
    schema = schema.copy()
    if not isinstance(extras, TensorDictBase):
        extras = tensors_of(extras, "extras")
    for key, value in walk(extras):
        refuse_unpackable(key, value)
        if value.shape[: schema.ndim] != schema.batch_size:
            raise SchemaError(
                f"the extra {show_key(key)} has shape {tuple(value.shape)}, expected "
                f"the leading dims {tuple(schema.batch_size)} of every entry of the "
                "schema"
            )
        schema.set(key, torch.empty_like(value, device="meta"))
    return schema


def transition_schema(
    observation_space: AnySpace,
    action_space: AnySpace,
    num_envs: int | None = None,
    *,
    reward_shape: Shape = (1,),
) -> TensorDict:
    """Return the schema, ``[]`` or ``[num_envs]``, of transitions; the spaces are those
    of a single environment."""
    if num_envs is not None and num_envs < 1:
        raise ValueError(
            f"num_envs must be at least 1, or None for a single environment, got {num_envs}"
        )
    lanes = () if num_envs is None else (num_envs,)
    for role, space in (("observation", observation_space), ("action", action_space)):
        if not is_space(space):
            kind = type(space).__name__
            raise TypeError(
                f"the {role} space must be a Gymnasium space or a TorchRL spec, got a {kind}"
            )
    observation = _observation(observation_space, lanes)
    reward = torch.empty((*lanes, *reward_shape), dtype=torch.float32, device="meta")
    after = observation | {"reward": reward}
    after |= {name: _flag((*lanes, 1)) for name in FLAGS}
    action = value_of_space(action_space, lanes, (ACTION,))
    # an environment's full_action_spec, which has keys
    is_composite = isinstance(action_space, Composite)
    actions = dict(action.items()) if is_composite else {ACTION: action}
    return TensorDict(observation | actions | {"next": after}, lanes)


def _reward_shape(env: Env | VectorEnv | None) -> Shape:
    """Return the shape of one environment's reward: that of ``reward_space``, or
    ``(1,)``."""
    while env is not None:
        space = getattr(env, "single_reward_space", getattr(env, "reward_space", None))
        if isinstance(space, sys.modules["gymnasium"].Space) and space.shape:
            return space.shape
        env = getattr(env, "env", None)
    return (1,)


def show_extra(key: Key, value: torch.Tensor) -> str:
    """Return the argument ``extras=`` that gives a transition an entry like
    ``value``."""
    example = f"torch.zeros({tuple(value.shape)}, dtype={value.dtype})"
    for name in reversed(key):
        example = f"{{{name!r}: {example}}}"
    return f"extras={example}"


def refuse_taken(keys: Iterable[str]) -> None:
    """Raise a :class:`SchemaError` if an observation has a key that a transition needs
    for another entry."""
    for key in RESERVED.intersection(keys):
        raise SchemaError(
            f"the observation has a key {key!r}, which is reserved for the transition: rename it"
        )


def as_array(value: object, key: Key) -> np.ndarray:
    """Convert an array, number or tensor without a copy if possible.

    Raises:
        SchemaError: a nested list has rows of unlike lengths.
    """
    if isinstance(value, torch.Tensor):
        try:
            return value.numpy(force=True)
        # NumPy lacks bfloat16 and float8, which float32 holds exactly
        except TypeError:
            return value.float().numpy(force=True)
    try:
        return np.asarray(value)
    except ValueError as error:
        raise SchemaError(
            f"{show_key(key)} is a {type(value).__name__} whose items differ in shape: give an array"
        ) from error


def tensors_of(value: object, name: str, *path: str) -> Any:
    """Convert nested dicts and tuples of arrays and numbers to nested dicts of tensors,
    without copies if possible."""
    parts = entries(value)
    if parts is not None:
        return {key: tensors_of(part, name, *path, key) for key, part in parts.items()}
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value, device="cpu")
    array = as_array(value, (name, *path))
    if isinstance(value, list) and array.dtype.kind in "fc" and _is_of_numbers(value):
        return torch.tensor(value, device="cpu")  # in torch's default dtype
    if (
        not array.flags.writeable
        or min(array.strides, default=0) < 0
        or not array.dtype.isnative
    ):
        # torch cannot share memory of another byte order
        array = np.array(array, dtype=array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise SchemaError(
            f"{show_key((name, *path))} is a {type(value).__name__} of dtype "
            f"{array.dtype}, which no tensor can hold: give numbers or arrays of them"
        ) from error


def _is_of_numbers(value: Any) -> bool:
    """Whether a nested list consists of Python's numbers, not of arrays or NumPy's
    scalars."""
    if isinstance(value, list):
        return all(map(_is_of_numbers, value))
    return type(value) in (bool, int, float, complex)


def parts_of_step(schema: TensorDict, observation_space: Space) -> dict[str, Paths]:
    """Return where the entries of an observation, an action and a next observation lie:
    pairs of a key in transitions like ``schema`` and a path in the value of a space."""
    keys = [key for key, _ in walk(schema)]
    actions = [key for key in keys if key[0] == ACTION]
    observed = [key[1:] for key in keys if key[0] == "next" and key not in _RESULTS]
    # the entries of a Dict lie at the root
    has_keys = isinstance(observation_space, sys.modules["gymnasium"].spaces.Dict)
    observation = [(key, key if has_keys else key[1:]) for key in observed]
    return {
        "observation": observation,
        "action": [(key, key[1:]) for key in actions],
        "next": after_step(observation),
    }


def after_step(paths: Paths) -> Paths:
    return [(("next", *key), path) for key, path in paths]


def _observation(space: AnySpace, lanes: Shape) -> dict[str, Any]:
    """Return an observation's schema as a dict; a space without keys gets the key
    ``"observation"``."""
    value = value_of_space(space, lanes, (OBSERVATION,))
    is_dict = isinstance(value, TensorDictBase) and type(space).__name__ != "Tuple"
    observation = dict(value.items()) if is_dict else {OBSERVATION: value}
    refuse_taken(observation)
    return observation


def is_space(source: object) -> bool:
    gymnasium = sys.modules.get("gymnasium")
    return isinstance(source, TensorSpec) or (
        gymnasium is not None and isinstance(source, gymnasium.Space)
    )


def entries(value: object) -> dict[str, Any] | None:
    """Return the entries of a dict or a tuple by name, the position in a tuple as a
    string; None: a leaf."""
    if isinstance(value, Mapping | TensorDictBase):
        for key in value.keys():
            if not isinstance(key, str):
                raise SchemaError(
                    f"keys are strings, got {key!r} of type {type(key).__name__}"
                )
        return dict(value.items())
    if isinstance(value, tuple):
        return {str(number): part for number, part in enumerate(value)}
    return None


def value_of_space(space: AnySpace, lanes: Shape, path: Key) -> Any:
    """Return an example of a value of a space or spec, ``[*lanes, ...]``, on the meta
    device."""
    if isinstance(space, TensorSpec):
        value = space.zero().to("meta")
        if isinstance(value, TensorDictBase):
            return without_memory(
                value.expand(*lanes, *value.shape) if lanes else value
            )
        return torch.empty((*lanes, *value.shape), dtype=value.dtype, device="meta")
    spaces = sys.modules["gymnasium"].spaces
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = entries(space.spaces) or {}
        return TensorDict(
            {
                key: value_of_space(part, lanes, (*path, key))
                for key, part in parts.items()
            },
            lanes,
        )
    if not isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        raise SchemaError(
            f"{show_key(path)} is a {type(space).__name__} space, which {_RAGGED}"
        )
    try:
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    except TypeError as error:
        raise SchemaError(
            f"{show_key(path)} has dtype {space.dtype}, which torch does not have"
        ) from error
    return torch.empty((*lanes, *space.shape), dtype=dtype, device="meta")


def without_memory(data: TensorDictBase) -> TensorDict:
    """Return a copy of the data on the meta device, which has only dtypes and
    shapes."""
    for key, value in walk(data):
        refuse_unpackable(key, value)
    meta = torch.device("meta")
    return cast(
        "TensorDict",
        data.apply(
            lambda x: torch.empty(x.shape, dtype=x.dtype, device=meta), device=meta
        ),
    )


def parallel_envs(source: object) -> list[ParallelEnv] | None:
    """Return the environments in ``source``, a parallel environment or a sequence of
    them; None for anything else."""
    pettingzoo = sys.modules.get("pettingzoo")
    if pettingzoo is None:
        return None
    envs = [*source] if isinstance(source, list | tuple) else [source]
    if not envs or not all(isinstance(env, pettingzoo.ParallelEnv) for env in envs):
        return None
    return envs


def takes_turns(source: object) -> bool:
    """Whether ``source`` is an environment of PettingZoo whose agents act one after
    another."""
    pettingzoo = sys.modules.get("pettingzoo")
    return pettingzoo is not None and isinstance(source, pettingzoo.AECEnv)


def turns_schema(env: AECEnv, agents: list[str]) -> TensorDict:
    """Return the schema, ``[agents]``, of the transitions of agents that take turns; an
    ``"action_mask"`` is bool."""
    remedy = "make buffers with from_spaces, and record in them with AECRecorder({agent: buffer, ...}, env)"
    schema = transition_schema(*_spaces_of(env, agents, remedy), len(agents))
    for part in (schema, schema.get("next")):
        mask = part.get(ACTION_MASK, None)
        if isinstance(mask, torch.Tensor):
            part.set(ACTION_MASK, torch.empty_like(mask, dtype=torch.bool))
    return schema


@dataclass(frozen=True)
class AgentGroup:
    """Agents with equal spaces, in the order of their rows in the tensors of the
    group."""

    name: str
    agents: tuple[str, ...]  # their names
    observation: Space  # of one agent
    action: Space  # of one agent

    def observed(self, lanes: Shape) -> dict[str, torch.Tensor | TensorDict]:
        """Return the schema of what the environment gives, ``[*lanes, agents, ...]``,
        as a dict of meta tensors."""
        lead = (*lanes, len(self.agents))
        value = value_of_space(self.observation, lead, (self.name, OBSERVATION))
        schema: dict[str, torch.Tensor | TensorDict] = {
            OBSERVATION: value,
            "mask": _flag(lead),
        }
        if isinstance(value, TensorDict) and ACTION_MASK in value.keys():
            schema[ACTION_MASK] = value.pop(ACTION_MASK).to(torch.bool)
        return schema

    @cached_property
    def observation_paths(self) -> Paths:
        keys = [key for key, _ in walk(self.observed(())) if key != ("mask",)]
        return [
            ((self.name, *key), key if key == (ACTION_MASK,) else key[1:])
            for key in keys
        ]

    @cached_property
    def next_paths(self) -> Paths:
        return after_step(self.observation_paths)

    @cached_property
    def flag_keys(self) -> list[Key]:
        """The keys of "done", "terminated" and "truncated"."""
        return [("next", self.name, flag) for flag in FLAGS]

    @cached_property
    def action_paths(self) -> Paths:
        action = value_of_space(self.action, (), (self.name, ACTION))
        keys = [key for key, _ in walk({ACTION: action})]
        return [((self.name, *key), key[1:]) for key in keys]


def groups_of(
    envs: Sequence[ParallelEnv], group_map: Groups = None
) -> list[AgentGroup]:
    """Return the groups of the agents of parallel environments, which must have equal
    agents and spaces.

    ``group_map`` is a dict from names to lists of agents, or a ``MarlGroupMapType`` of
    TorchRL. By default, the agents ``knight_0`` and ``knight_1`` are the group
    ``knight``, and other agents are groups of their own.
    """
    agents = [*envs[0].possible_agents]
    if group_map is None:
        group_map = _by_name(agents)
    elif hasattr(group_map, "get_group_map"):
        group_map = group_map.get_group_map(agents)
    if not isinstance(group_map, Mapping):
        raise TypeError(
            f"group_map must be a dict from names to lists of agents, got a {type(group_map).__name__}"
        )
    named = [agent for group in group_map.values() for agent in group]
    if sorted(named) != sorted(agents) or not all(group_map.values()):
        raise ValueError(
            f"group_map must name each of the agents {agents} once, got {dict(group_map)}"
        )
    for name in group_map:
        if not isinstance(name, str) or name in RESERVED:
            raise ValueError(
                f"a group must have a name that is not reserved for the transition, got {name!r}"
            )
    remedy = "put them in groups of their own, group_map={name: [agent, ...], ...}"
    groups: list[AgentGroup] = []
    for number, env in enumerate(envs):
        env_groups = [
            AgentGroup(name, (*members,), *_spaces_of(env, members, remedy))
            for name, members in group_map.items()
        ]
        groups = groups or env_groups
        if [*env.possible_agents] != agents or env_groups != groups:
            raise SchemaError(
                f"environment {number} has other agents or spaces than environment 0"
            )
    return groups


def _by_name(agents: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for agent in agents:
        name, _, number = agent.rpartition("_")
        is_numbered = name and number.lstrip("+-").isdecimal()
        groups.setdefault(name if is_numbered else agent, []).append(agent)
    return groups


def _spaces_of(
    env: ParallelEnv | AECEnv, agents: Sequence[str], remedy: str
) -> tuple[Space, Space]:
    """Return the observation and action space of agents; raise a SchemaError unless
    they have equal ones."""
    spaces = [
        (env.observation_space(agent), env.action_space(agent)) for agent in agents
    ]
    for agent, agent_spaces in zip(agents, spaces, strict=True):
        if agent_spaces != spaces[0]:
            raise SchemaError(
                f"the agents {agents[0]!r} and {agent!r} differ in their spaces: {remedy}"
            )
    return spaces[0]


def agents_schema(groups: list[AgentGroup], lanes: Shape) -> TensorDict:
    """Return the schema, ``[*lanes]``, of the transitions of parallel environments with
    these groups."""
    before: dict[NestedKey, Any] = {}
    after: dict[NestedKey, Any] = {name: _flag((*lanes, 1)) for name in FLAGS}
    for group in groups:
        lead = (*lanes, len(group.agents))
        action = value_of_space(group.action, lead, (group.name, ACTION))
        before[group.name] = group.observed(lanes) | {ACTION: action}
        reward = torch.empty((*lead, 1), dtype=torch.float32, device="meta")
        outcome = {name: _flag((*lead, 1)) for name in FLAGS}
        after[group.name] = group.observed(lanes) | {"reward": reward} | outcome
    return TensorDict(before | {"next": after}, lanes)


def _flag(shape: Shape) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bool, device="meta")
