"""Record the transitions of running parallel environments of PettingZoo in a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlbuf_td.envs.recorder import Recorder, Target
from rlbuf_td.envs.specs import (
    ACTION_MASK,
    FLAGS,
    AgentGroup,
    Key,
    agents_schema,
    groups_of,
    parallel_envs,
    takes_turns,
)
from rlbuf_td.envs.step_columns import fill_, fill_parts_
from rlbuf_td.storages.episodes import TRAJ_KEY

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

    from rlbuf_td.envs.specs import Groups

_FLAG_KEYS: list[Key] = [("next", name) for name in FLAGS]


class PettingZooRecorder(Recorder):
    """Steps parallel environments of PettingZoo, and stores the transitions of all
    agents in a buffer.

    :meth:`reset` and :meth:`step` return the environment's results unchanged. A row is
    one step of an environment. Its keys are those of TorchRL's
    ``PettingZooEnv(..., use_mask=True)``; n is the number of agents in a group:

    - ``(group, "observation")``, ``[n, ...]`` (with the keys of a Dict space), and
      ``(group, "action")``;
    - ``(group, "mask")``, ``[n]`` bool: whether the agent acts in this step;
    - ``(group, "action_mask")``, bool, if observations have an ``"action_mask"``;
    - the same keys (without the action) under ``"next"``, and
      ``("next", group, "reward")``, ``"done"``, ``"terminated"`` and ``"truncated"``,
      ``[n, 1]``;
    - ``("next", "done")``, ``"terminated"`` and ``"truncated"``, ``[1]``, of the
      environment, which is done when it has no more agents;
    - ``("collector", "traj_ids")``, one number per episode.

    An agent may die, and return, while others go on. An agent that does not act in a
    step has the mask False, zeros as observation, action and reward, and the flags
    True, as in TorchRL. Each agent's trajectory ends where it dies:
    ``RolloutBuffer(group=...)`` computes the returns of the agents of one group.
    :class:`NStepSampler` sums the rewards of each agent up to there. Multiply your loss
    by the mask.

    With a list of E environments, the buffer has rows ``[T, E]``, and :meth:`step`
    steps all of them. With ``rb.lane(e)`` in place of the buffer, a single environment
    is lane ``e``, so that actors record at their own pace. Games whose agents act one
    after another need an :class:`AECRecorder`.

    Args:
        buffer: a :class:`ReplayBuffer` or :class:`RolloutBuffer`, for example from
            ``from_env(env, ...)``; or one lane of a :class:`ReplayBuffer`,
            ``rb.lane(e)``.
        env: a ``ParallelEnv``, or a list of them with equal agents and spaces.
        group_map: the groups: a dict from names to lists of agents, or a
            ``MarlGroupMapType`` of TorchRL. The agents of a group have equal spaces. By
            default, ``knight_0`` and ``knight_1`` form the group ``knight``, and each
            other agent is a group of its own.

    Raises:
        TypeError: ``buffer`` or ``env`` has the wrong type.
        ValueError: ``group_map`` does not name each agent once, or the buffer of a lane
            cannot write single lanes.
        SchemaError: the agents of a group or the environments differ in their spaces,
            or the transitions do not fit the buffer's rows or lanes, or a lane or a
            buffer ``[T]`` gets several environments.

    Cost: one write of a step, and a copy of each agent's values, in each step.

    TorchRL has no recorder; its ``PettingZooEnv`` wraps an environment for its
    collectors. Here, an environment goes on while it has agents, and Discrete
    observations are integers.

    Example:
        >>> import pettingzoo
        >>> from rlbuf_td import PettingZooRecorder, ReplayBuffer
        >>> env = pettingzoo.make("parallel", "classic/rps_v2", max_cycles=3)
        >>> rb = ReplayBuffer.from_env(env, 1_000, batch_size=8)
        >>> recorder = PettingZooRecorder(rb, env)
        >>> observations, infos = recorder.reset(seed=0)
        >>> while env.agents:
        ...     result = recorder.step({"player_0": 0, "player_1": len(rb)})  # rock against rock, paper, scissors
        >>> rb[:]["player", "mask"].all(), rb[:]["next", "player", "reward"].squeeze(-1)
        (tensor(True), tensor([[ 0.,  0.],
                [-1.,  1.],
                [ 1., -1.]]))
    """

    def __init__(
        self,
        buffer: Target,
        env: ParallelEnv | list[ParallelEnv],
        *,
        group_map: Groups = None,
    ) -> None:
        super().__init__(buffer)
        envs = parallel_envs(env)
        if envs is None:
            remedy = (
                ": AECRecorder records games whose agents take turns"
                if takes_turns(env)
                else ""
            )
            raise TypeError(
                "env must be a ParallelEnv of PettingZoo or a list of them, got a "
                f"{type(env).__name__}{remedy}"
            )
        self.env, self.envs = env, envs
        self.groups = groups_of(envs, group_map)
        #: What is True of agents that do not act; all else of them is stored as zeros.
        self._true_of_absent: set[Key] = set()
        for group in self.groups:
            masks = (group.name, ACTION_MASK), ("next", group.name, ACTION_MASK)
            self._true_of_absent |= {*group.flag_keys, *masks}
        self._fit(
            agents_schema(self.groups, (len(envs),)),
            single=not isinstance(env, list | tuple),
        )
        # None: a reset must follow
        self._observed: list[Mapping[str, Any] | None] = [None] * len(envs)

    def reset(
        self,
        *,
        seed: int | Sequence[int] | None = None,
        options: Any = None,
        lanes: Any = None,
    ) -> Any:
        """Reset the environments and return the result: of a list, a list with a result
        per environment.

        Args:
            seed: the seed; of a list of environments, a seed per environment, or a
                number to which their places are added.
            options: the environment's options.
            lanes: which environments of a list to reset, a mask ``[E]``; by default
                all. The results of the others are None.

        Raises:
            ValueError: there is not one seed or one element of the mask per
                environment; nothing has changed.
            RuntimeError: some environments are not reset, but the last step failed, or
                a checkpoint was loaded.
        """
        count = len(self.envs)
        mask = np.ones(count, bool) if lanes is None else np.asarray(lanes, bool)
        seeds = self._seeds(seed)
        if mask.shape != (count,) or len(seeds) != count:
            raise ValueError(
                f"lanes and seed need one element for each of {count} environments, got {lanes} and {seed}"
            )
        lost = [e for e in self._lost() if not mask[e]]
        if lost:
            raise RuntimeError(
                f"environments {lost} need a reset, too, because their state is unknown"
            )
        results: list[Any] = [None] * count
        chosen = mask.nonzero()[0].tolist()
        for e in chosen:
            self._observed[e] = None
            results[e] = self.envs[e].reset(seed=seeds[e], options=options)
        self._restart(mask)
        for e in chosen:  # after an error or an interrupt, another reset must follow
            self._observed[e] = results[e][0]
        return results[0] if self._single else results

    def _seeds(self, seed: int | Sequence[int] | None) -> Sequence[int | None]:
        """Return the seed of each environment."""
        if isinstance(seed, Sequence):
            return seed
        if seed is None:
            return [None for _ in self.envs]
        return [seed + e for e in range(len(self.envs))]

    def _lost(self) -> list[int]:
        """Return the environments whose state is unknown, so that they must be
        reset."""
        if self.is_interrupted:
            return [*range(len(self.envs))]
        return [e for e, seen in enumerate(self._observed) if seen is None]

    def step(self, action: Any, **extras: object) -> Any:
        """Take a step, store its transition, and return the result: of a list, a list
        with a result per environment.

        Args:
            action: a dict from the living agents to their actions; for a list of
                environments, a list of dicts.
            **extras: further entries: arrays, tensors, or nested dicts of them, such as
                ``knight={"state_value": values}`` with ``[E, n, 1]`` values of the
                group ``knight``, without ``E`` for a single environment. Every step
                must have the same extras. Those of agents that do not act are stored as
                zeros.

        Raises:
            RuntimeError: an environment must be reset before this step: it has no
                agents, a step failed, or a checkpoint was loaded. Or an agent left
                without being done, or was truncated without an observation.
            ValueError: a living agent has no action.
            SchemaError: the dtype or shape of an entry differs from its space or from
                the first step.
        """
        actions = [action] if self._single else [*action]
        self._refuse_step(actions)
        self._begin_step(extras)
        for key in self._rows.keys() - self._extra_keys - {TRAJ_KEY}:
            self._rows[key][...] = key in self._true_of_absent
        acting = [[*env.agents] for env in self.envs]
        for e, agents in enumerate(acting):
            self._fill_before(e, agents, actions[e])
        self._clear_absent()
        # if this step fails, a reset must follow
        self._observed = [None] * len(self.envs)
        results = [
            env.step(env_action)
            for env, env_action in zip(self.envs, actions, strict=True)
        ]
        for e, result in enumerate(results):
            self._fill_after(e, acting[e], result)
        self._write()
        self._observed = [result[0] for result in results]
        return results[0] if self._single else results

    def _refuse_step(self, actions: list[Any]) -> None:
        """Raise an error if an environment must be reset first, or if a living agent
        has no action."""
        if len(actions) != len(self.envs):
            raise ValueError(
                f"step needs one dict of actions for each of {len(self.envs)} environments"
            )
        ended = [e for e, env in enumerate(self.envs) if not env.agents]
        due = sorted({*self._lost(), *ended})
        if due:
            how = ", with reset(lanes=[not env.agents for env in envs])"
            raise RuntimeError(
                f"reset environments {due} first{'' if self._single else how}: a "
                "reset is due when they have no agents, before the first step, "
                "after a step that failed, and after a load"
            )
        for e, env in enumerate(self.envs):
            missing = [agent for agent in env.agents if agent not in actions[e]]
            if missing:
                raise ValueError(
                    f"environment {e} needs an action of each living agent, {missing} have none"
                )

    def _clear_absent(self) -> None:
        """Store zeros as extras of agents that do not act."""
        for group in self.groups:
            absent = ~self._rows[group.name, "mask"]
            for key in self._extra_keys:
                if group.name in key[:2] and self._rows[key].shape[:2] == absent.shape:
                    self._rows[key][absent] = 0

    def _fill_before(self, e: int, acting: list[str], actions: Any) -> None:
        """Fill what the agents of environment ``e`` have observed, and what they do."""
        columns = self._rows
        observed: Any = self._observed[e]
        for group in self.groups:
            for number, agent in enumerate(group.agents):
                cell = (e, number, ...)
                if agent in acting:
                    columns[group.name, "mask"][cell] = True
                    fill_parts_(columns, group.action_paths, actions[agent], cell)
                    fill_parts_(columns, group.observation_paths, observed[agent], cell)

    def _fill_after(self, e: int, acting: list[str], result: Any) -> None:
        """Fill the result of a step of environment ``e``."""
        observed, _, terminated, _, _ = result
        for group in self.groups:
            for number, agent in enumerate(group.agents):
                is_acting = agent in acting
                self._fill_next(group, e, number, is_acting, observed)
                if is_acting:
                    self._fill_outcome(group, e, number, result)
        is_done = not self.envs[e].agents
        are_terminated = is_done and all(terminated[agent] for agent in acting)
        is_cut = is_done and not are_terminated
        self._fill_flags(_FLAG_KEYS, e, are_terminated, is_cut)

    def _fill_next(
        self, group: AgentGroup, e: int, number: int, is_acting: bool, observed: Any
    ) -> None:
        """Fill the next observation of an agent."""
        columns = self._rows
        agent = group.agents[number]
        cell = (e, number, ...)
        lives = agent in self.envs[e].agents
        columns["next", group.name, "mask"][cell] = lives
        if agent in observed and (lives or is_acting):
            fill_parts_(columns, group.next_paths, observed[agent], cell)

    def _fill_outcome(
        self, group: AgentGroup, e: int, number: int, result: Any
    ) -> None:
        """Fill the reward and the flags of an agent that has acted."""
        observed, rewards, terminated, truncated, _ = result
        agent = group.agents[number]
        key = ("next", group.name, "reward")
        fill_(self._rows[key][e, number, 0, ...], rewards[agent], key)
        is_terminated = bool(terminated[agent])
        is_truncated = bool(truncated[agent])
        if not (is_terminated or is_truncated or agent in self.envs[e].agents):
            _refuse(
                agent,
                "left the environment without being terminated or truncated, so that its last step cannot be used",
            )
        if not (is_terminated or agent in observed):
            _refuse(
                agent,
                "has no observation after a step that did not terminate it, which the value of the next state needs",
            )
        self._fill_flags(group.flag_keys, (e, number), is_terminated, is_truncated)

    def _fill_flags(
        self, keys: Sequence[Key], cell: Any, terminated: bool, truncated: bool
    ) -> None:
        """Fill the done, terminated and truncated flags of one agent; ``keys`` are in
        this order."""
        done_key, terminated_key, truncated_key = keys
        columns = self._rows
        columns[done_key][cell] = terminated or truncated
        columns[terminated_key][cell] = terminated
        columns[truncated_key][cell] = truncated


def _refuse(agent: str, fault: str) -> NoReturn:
    raise RuntimeError(
        f"agent {agent!r} {fault}: the environment breaks PettingZoo's interface"
    )
