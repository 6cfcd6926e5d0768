"""Record the transitions of running PettingZoo environments in a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.envs.infos import fill_, part_of, to_array
from rlbuf_td.envs.lane_queues import StepRows
from rlbuf_td.envs.recorder_state import (
    TrajectoryNumbers,
    array_of,
    buffer_state,
    checked_buffer,
    copied,
    refuse_other,
    refuse_other_rows,
    resume_buffer,
    saved_rows,
    schema_of_rows,
)
from rlbuf_td.envs.specs import ACTION_MASK, FLAGS, AgentGroup, Key, agents_schema, groups_of, parallel_envs, show_extra
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.checks import state_of
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import attached_or_new
from rlbuf_td.storages.notebooks import TRANSITIONS
from rlbuf_td.storages.schema import kind, show_key, walk

_MASK, _ACTION_MASK, _REWARD = ("mask",), (ACTION_MASK,), ("reward",)
_REMEDY = "make the buffer with from_env(env, ...) and the same group_map"


class PettingZooRecorder:
    """Steps parallel environments of PettingZoo, and stores the transitions of all agents in a buffer.

    :meth:`reset` and :meth:`step` return the environment's results unchanged. A row is one step of an environment. Its
    keys are those of TorchRL's ``PettingZooEnv(..., use_mask=True)``; n is the number of agents in a group:

    - ``(group, "observation")``, ``[n, ...]`` (with the keys of a Dict space), and ``(group, "action")``;
    - ``(group, "mask")``, ``[n]`` bool: whether the agent acts in this step;
    - ``(group, "action_mask")``, bool, if observations have an ``"action_mask"``;
    - the same keys (without the action) under ``"next"``, and ``("next", group, "reward")``, ``"done"``,
      ``"terminated"`` and ``"truncated"``, ``[n, 1]``;
    - ``("next", "done")``, ``"terminated"`` and ``"truncated"``, ``[1]``, of the environment, which is done when it has
      no more agents;
    - ``("collector", "traj_ids")``, one number per episode.

    An agent may die, and return, while others go on. An agent that does not act in a step has the mask False, zeros as
    observation, action and reward, and the flags True, as in TorchRL. So each agent's trajectory ends where it dies:
    :class:`RolloutWriter` computes each agent's returns with ``reward_key=("next", group, "reward")``, for one group;
    let agents that learn together be one group. :class:`NStepSampler` refuses such rewards. Multiply your loss by the
    mask. In contrast to TorchRL, an environment goes on while it has agents, Discrete observations are
    integers, not one-hot vectors, and infos are not stored.

    With a list of E environments, the buffer has rows ``[T, E]``, and :meth:`step` steps all of them.

    Args:
        buffer: a :class:`ReplayBuffer` or :class:`RolloutBuffer`, for example from ``from_env(env, ...)``.
        env: a ``ParallelEnv``, or a list of them with equal agents and spaces.
        group_map: the groups: a dict from names to lists of agents, or a ``MarlGroupMapType`` of TorchRL. The agents of
            a group have equal spaces. By default, ``knight_0`` and ``knight_1`` form the group ``knight``, and each
            other agent is a group of its own.

    Raises:
        TypeError: ``buffer`` or ``env`` has the wrong type.
        ValueError: ``group_map`` does not name each agent once.
        SchemaError: the agents of a group or the environments differ in their spaces, or the transitions do not fit the
            buffer's rows or lanes.

    Cost: about 0.1 ms, and 50 us per agent, in each step, without the time of the environments.

    TorchRL has no recorder; its ``PettingZooEnv`` wraps an environment for TorchRL's collectors.

    Example:
        >>> from gymnasium.spaces import Box, Discrete
        >>> import pettingzoo
        >>> from rlbuf_td import PettingZooRecorder, ReplayBuffer
        >>> class Race(pettingzoo.ParallelEnv):  # an agent leaves when it arrives at 1
        ...     possible_agents = ["car_0", "car_1"]
        ...     def observation_space(self, agent):
        ...         return Box(0, 1, (1,))
        ...     def action_space(self, agent):
        ...         return Discrete(2)
        ...     def reset(self, seed=None, options=None):
        ...         self.agents, self.at = [*self.possible_agents], dict.fromkeys(self.possible_agents, 0.0)
        ...         return self.observe(), {}
        ...     def observe(self):
        ...         return {agent: torch.tensor([self.at[agent]]) for agent in self.agents}
        ...     def step(self, actions):
        ...         self.at = {agent: min(1.0, self.at[agent] + move / 2) for agent, move in actions.items()}
        ...         arrived, result = {agent: at == 1.0 for agent, at in self.at.items()}, self.observe()
        ...         self.agents = [agent for agent in self.agents if not arrived[agent]]
        ...         return result, dict.fromkeys(arrived, -1.0), arrived, dict.fromkeys(arrived, False), {}
        >>> env = Race()
        >>> rb = ReplayBuffer.from_env(env, 1_000, batch_size=8)
        >>> recorder = PettingZooRecorder(rb, env)
        >>> observations, infos = recorder.reset(seed=0)
        >>> while env.agents:
        ...     result = recorder.step({agent: 1 if agent == "car_0" else len(rb) > 0 for agent in env.agents})
        >>> rb[:]["car", "mask"], rb[:]["next", "car", "reward"].squeeze(-1)
        (tensor([[ True,  True],
                 [ True,  True],
                 [False,  True]]), tensor([[-1., -1.],
                 [-1., -1.],
                 [ 0., -1.]]))
    """

    def __init__(self, buffer: TensorDictReplayBuffer, env: Any, *, group_map: Any = None) -> None:
        buffer = checked_buffer(buffer)
        envs = parallel_envs(env)
        if envs is None:
            raise TypeError(f"env must be a ParallelEnv of PettingZoo or a list of them, got a {type(env).__name__}")
        self.buffer, self.env, self.envs = buffer, env, envs
        self.groups = groups_of(envs, group_map)
        self._single, self._flat = not isinstance(env, list | tuple), buffer.storage.ndim == 1
        if self._flat and len(envs) > 1:
            raise SchemaError(f"the rows of {len(envs)} environments need lanes, [T, E]: {_REMEDY}")
        self._schema = self._fitted(agents_schema(self.groups, (len(envs),)))
        self._rows: _Rows | None = None  # None before the first step
        self._extra_keys: set[Key] = set()
        self._observed: list[Mapping[str, Any] | None] = [None] * len(envs)  # None: a reset must follow
        self._trajectories = np.zeros(len(envs), np.int64)
        self._numbers = attached_or_new(buffer.storage, TrajectoryNumbers)
        self._loads = self._numbers.loads

    def _fitted(self, schema: TensorDict) -> TensorDict:
        """Reserve the buffer's rows, or check that reserved rows match ``schema``; return the completed schema."""
        schema.set(TRAJ_KEY, torch.empty(schema.shape, dtype=torch.int64, device="meta"))
        storage = self.buffer.storage
        if storage.layout is None:
            storage.reserve(schema[0] if self._flat else schema)
        lanes = () if self._flat else tuple(schema.shape)
        if tuple(storage.lanes) != lanes:
            raise SchemaError(f"the buffer has lanes {tuple(storage.lanes)}, the environments {lanes}: {_REMEDY}")
        stored = {} if storage.layout is None else {leaf.key: leaf for leaf in storage.layout.leaves}
        for key, value in list(walk(schema)):
            leaf = stored.get(key)
            if leaf is None:
                if not storage.is_reserved:
                    raise SchemaError(f"the buffer's rows have no {show_key(key)}, and can no longer get it: {_REMEDY}")
            elif key[-1] == "reward" and leaf.dtype.is_floating_point and value.shape[1:] == leaf.shape:
                schema.set(key, torch.empty(value.shape, dtype=leaf.dtype, device="meta"))
            elif (value.dtype, value.shape[1:]) != (leaf.dtype, leaf.shape):
                given, rows = kind(value.dtype, value.shape[1:]), kind(leaf.dtype, leaf.shape)
                raise SchemaError(f"the agents give {show_key(key)} as {given}, the rows hold {rows}: {_REMEDY}")
        return schema

    def reset(self, *, seed: Any = None, options: Any = None, lanes: Any = None) -> Any:
        """Reset the environments and return the result: of a list, a list with a result per environment.

        Args:
            seed: the seed; of a list of environments, a seed per environment, or a number to which their places are
                added.
            options: the environment's options.
            lanes: which environments of a list to reset, a mask ``[E]``; by default all. The results of the others are
                None.

        Raises:
            ValueError: there is not one seed or one element of the mask per environment; nothing has changed.
            RuntimeError: some environments are not reset, but the last step failed, or a checkpoint was loaded.
        """
        self._notice_load()
        count = len(self.envs)
        mask = np.ones(count, bool) if lanes is None else np.asarray(lanes, bool)
        seeds = [*seed] if isinstance(seed, Sequence) else [None if seed is None else seed + e for e in range(count)]
        if mask.shape != (count,) or len(seeds) != count:
            raise ValueError(
                f"lanes and seed need one element for each of {count} environments, got {lanes} and {seed}"
            )
        lost = [e for e in range(count) if not mask[e] and self._observed[e] is None]
        if lost:
            raise RuntimeError(f"environments {lost} need a reset, too, because their state is unknown{TRANSITIONS}")
        results: list[Any] = [None] * count
        for e in mask.nonzero()[0].tolist():
            self._observed[e] = None
            results[e] = self.envs[e].reset(seed=seeds[e], options=options)
            self._observed[e] = results[e][0]
        self._begin(mask)
        return results[0] if self._single else results

    def step(self, action: Any, **extras: Any) -> Any:
        """Take a step, store its transition, and return the result: of a list, a list with a result per environment.

        Args:
            action: a dict from the living agents to their actions; for a list of environments, a list of dicts.
            **extras: further entries: arrays, tensors, or nested dicts of them, such as
                ``knight={"state_value": values}`` with ``[E, n, 1]`` values of the group ``knight``, without ``E`` for
                a single environment. Every step must have the same extras. Those of agents that do not act are stored
                as zeros.

        Raises:
            RuntimeError: an environment must be reset before this step: it has no agents, a step failed, or a
                checkpoint was loaded. Or an agent left without being done, or was truncated without an observation.
            ValueError: a living agent has no action.
            SchemaError: the dtype or shape of an entry differs from its space or from the first step.
        """
        self._notice_load()
        actions = [action] if self._single else [*action]
        self._refuse_step(actions)
        rows = self._rows
        if rows is None:
            rows = self._make_rows(extras)
        rows.words[:] = 0
        before = [[*env.agents] for env in self.envs]
        for e, agents in enumerate(before):
            self._fill_before(rows, e, agents, self._observed[e], actions[e])
        self._fill_extras(rows.columns, extras)
        rows.columns[TRAJ_KEY][...] = self._trajectories
        self._observed = [None] * len(self.envs)  # if this step fails, a reset must follow
        results = [env.step(each) for env, each in zip(self.envs, actions, strict=True)]
        for e, result in enumerate(results):
            self._fill_after(rows, e, before[e], result)
        now = rows.now[0] if self._flat else rows.now
        self.buffer.add(now.clone() if len(self.buffer.transform) else now)  # a transform may modify it
        self._rows, self._observed = rows, [result[0] for result in results]
        return results[0] if self._single else results

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a recorder needs to go on in mid-episode; see :meth:`GymnasiumRecorder.state_dict`.

        It holds the current observations, the living agents, and the trajectory numbers.
        """
        self._notice_load()
        rows = self._rows
        observed = [None if each is None else {a: copied(x) for a, x in each.items()} for each in self._observed]
        return {
            "settings": self._settings(),
            "observations": observed,
            "agents": [None if each is None else [*env.agents] for each, env in zip(observed, self.envs, strict=True)],
            "trajectories": torch.from_numpy(self._trajectories.copy()),
            "layout": None if rows is None else saved_rows(rows.layout),
            "extras": sorted(map(list, self._extra_keys)),
            "buffer": buffer_state(self.buffer, self._numbers),
        }

    def _settings(self) -> dict[str, Any]:
        groups = {group.name: [*group.agents] for group in self.groups}
        lanes, rows = 0 if self._single else len(self.envs), "[T]" if self._flat else "[T, E]"
        return {"recorder": type(self).__name__, "lanes": lanes, "rows": rows, "groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in mid-episode from a :meth:`state_dict`, after the buffer and the environments have been restored.

        Raises:
            ValueError: the state is from another number of environments, other groups or other kinds of rows; the
                environments do not have the saved agents; or the buffer does not hold the rows of the moment when the
                state was saved. Nothing has changed.
        """
        with state_of(self):
            refuse_other(self._settings(), state_dict["settings"], "the state")
            trajectories = array_of(state_dict, "trajectories", self._trajectories)
            observed, alive = state_dict["observations"], state_dict["agents"]
            for e, (env, each, agents) in enumerate(zip(self.envs, observed, alive, strict=True)):
                if each is not None and [*env.agents] != agents:
                    has = f"environment {e} has the agents {[*env.agents]}, the state {agents}"
                    raise ValueError(f"{has}: restore the environments first")
                self._refuse_observations(each or {}, agents or [])
            rows, extras = None, {tuple(key) for key in state_dict["extras"]}
            if (layout := state_dict["layout"]) is not None:
                schema = schema_of_rows(layout, len(self.envs), self._schema, self.buffer.storage)
                rows = _Rows(schema, self.groups)
            refuse_other_rows(self.buffer, state_dict["buffer"])
            resume_buffer(self.buffer, self._numbers, state_dict["buffer"])
        self._trajectories, self._rows, self._extra_keys = trajectories, rows, extras
        self._observed = [None if each is None else {a: copied(x) for a, x in each.items()} for each in observed]
        self._loads = self._numbers.loads

    def _refuse_observations(self, observed: Mapping[str, Any], agents: list[str]) -> None:
        for group in self.groups:
            for key, path in group.observation_paths:
                path_in_rows = group.name, *key
                shape = self._schema[path_in_rows].shape[2:]
                for agent in (agent for agent in group.agents if agent in agents):
                    value = part_of(observed[agent], path)
                    if value.shape != shape:
                        got = f"the saved observation of {agent!r} has shape {tuple(value.shape)}"
                        raise ValueError(f"{got}, expected {tuple(shape)}")

    def _refuse_step(self, actions: list[Any]) -> None:
        if len(actions) != len(self.envs):
            raise ValueError(f"step needs one dict of actions for each of {len(self.envs)} environments")
        ended = [e for e, env in enumerate(self.envs) if self._observed[e] is None or not env.agents]
        if ended:
            when = "when they have no agents, before the first step, after a step that failed, and after a load"
            how = "" if self._single else ", with reset(lanes=[not env.agents for env in envs])"
            raise RuntimeError(f"reset environments {ended} first{how}: a reset is due {when}{TRANSITIONS}")
        for e, env in enumerate(self.envs):
            missing = [agent for agent in env.agents if agent not in actions[e]]
            if missing:
                raise ValueError(f"environment {e} needs an action of each living agent, {missing} have none")

    def _notice_load(self) -> None:
        """If a checkpoint was loaded into the buffer, begin a new trajectory in each lane, after a reset."""
        if self._loads != self._numbers.loads:
            self._loads, self._observed = self._numbers.loads, [None] * len(self.envs)

    def _begin(self, lanes: np.ndarray) -> None:
        count = int(np.count_nonzero(lanes))
        if count:
            self._trajectories[lanes] = self._numbers.take(count, TRAJ_KEY)

    def _make_rows(self, extras: Mapping[str, Any]) -> _Rows:
        """Return memory for a row of each environment, with the keys of the schema and of the first step's extras."""
        schema, storage = self._schema.copy(), self.buffer.storage
        for key, value in walk(extras):
            array = to_array(value)[None] if self._single else to_array(value)
            tensor = torch.as_tensor(array, device="cpu")
            if schema.get(key, None) is not None or key == ("next",):
                raise SchemaError(f"the extra {show_key(key)} has the name of an entry that the environment returns")
            if tensor.shape[:1] != schema.shape:
                raise SchemaError(
                    f"{show_key(key)} has shape {tuple(tensor.shape)}, expected first dim {len(self.envs)}"
                )
            is_open = getattr(storage, "is_reserved", True) or storage.layout is None or len(self.buffer.transform)
            if not is_open and key not in storage.layout.places:
                example = show_extra(key, tensor[0] if self._single else tensor)
                raise SchemaError(f"the buffer's rows have no {show_key(key)}: use from_env(env, ..., {example})")
            schema.set(key, tensor)
        self._extra_keys = {key for key, _ in walk(extras)}
        return _Rows(schema, self.groups)

    def _fill_extras(self, columns: dict[Key, np.ndarray], extras: Mapping[str, Any]) -> None:
        given = dict(walk(extras))
        if given.keys() != self._extra_keys:
            now, first = (sorted(map(show_key, keys)) for keys in (given, self._extra_keys))
            raise SchemaError(f"this step has the extras {now}, the first step had {first}: pass the same extras")
        for key, value in given.items():
            column = columns[key][0, ...] if self._single else columns[key]
            fill_(column, value, key)
        for group in self.groups:
            absent = ~columns[group.name, "mask"]
            for key in given:
                if group.name in key[:2] and columns[key].shape[:2] == absent.shape:
                    columns[key][absent] = 0

    def _fill_before(self, rows: _Rows, e: int, agents: list[str], observed: Any, actions: Any) -> None:
        for group, columns in zip(self.groups, rows.before, strict=True):
            for place, agent in enumerate(group.agents):
                if agent in agents:
                    columns[_MASK][e, place] = True
                    for key, path in group.action_paths:
                        fill_(columns[key][e, place, ...], part_of(actions[agent], path), (group.name, *key))
                    _fill_observation(columns, group, (e, place), observed[agent])
                elif group.has_action_mask:
                    columns[_ACTION_MASK][e, place] = True

    def _fill_after(self, rows: _Rows, e: int, before: list[str], result: Any) -> None:
        observed, rewards, terminated, truncated, _ = result
        agents = self.envs[e].agents
        for group, columns in zip(self.groups, rows.after, strict=True):
            for place, agent in enumerate(group.agents):
                lives = agent in agents
                columns[_MASK][e, place] = lives
                if agent in observed and (lives or agent in before):
                    _fill_observation(columns, group, (e, place), observed[agent])
                elif group.has_action_mask:
                    columns[_ACTION_MASK][e, place] = True
                ended = cut = True
                if agent in before:
                    fill_(columns[_REWARD][e, place, 0, ...], rewards[agent], ("next", group.name, *_REWARD))
                    ended, cut = bool(terminated[agent]), bool(truncated[agent])
                    _refuse_loss(agent, lives, ended, cut, agent in observed)
                for name, flag in zip(FLAGS, (ended or cut, ended, cut), strict=True):
                    columns[name,][e, place] = flag
        done = not agents
        ended = done and all(terminated[agent] for agent in before)
        for name, flag in zip(FLAGS, (done, ended, done and not ended), strict=True):
            rows.columns["next", name][e] = flag


class _Rows(StepRows):
    """Memory for one row of each environment, ``[E]``."""

    def __init__(self, schema: TensorDict, groups: list[AgentGroup]) -> None:
        super().__init__(schema)
        #: The columns of each group, by the rest of their keys: before the step, and after it.
        self.before = [self._below(group.name) for group in groups]
        self.after = [self._below("next", group.name) for group in groups]

    def _below(self, *path: str) -> dict[Key, np.ndarray]:
        return {key[len(path) :]: x for key, x in self.columns.items() if key[: len(path)] == path}


def _fill_observation(
    columns: dict[Key, np.ndarray], group: AgentGroup, place: tuple[int, int], observation: Any
) -> None:
    for key, path in group.observation_paths:
        value = part_of(observation, path)
        value = to_array(value).astype(bool) if key == _ACTION_MASK else value
        fill_(columns[key][place[0], place[1], ...], value, (group.name, *key))


def _refuse_loss(agent: str, lives: bool, terminated: bool, truncated: bool, is_observed: bool) -> None:
    """Raise a RuntimeError if it is unknown how the trajectory of an agent goes on."""
    if not (lives or terminated or truncated):
        fault = "left the environment without being terminated or truncated, so that its last step cannot be used"
    elif not (is_observed or terminated):
        fault = "has no observation after a step that did not terminate it, which the value of the next state needs"
    else:
        return
    raise RuntimeError(f"agent {agent!r} {fault}: the environment breaks PettingZoo's interface{TRANSITIONS}")
