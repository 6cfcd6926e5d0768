"""Record the transitions of a running PettingZoo environment whose agents take
turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlbuf_td.envs.recorder import BufferLane, Recorder, Target
from rlbuf_td.envs.specs import (
    ACTION_MASK,
    parts_of_step,
    takes_turns,
    turns_schema,
)
from rlbuf_td.storages.schema import SchemaError

if TYPE_CHECKING:
    from pettingzoo import AECEnv

    from rlbuf_td.buffers.replay import ReplayBuffer


class AECRecorder:
    """Steps a turn-based environment of PettingZoo (an ``AECEnv``), and stores each
    agent's transitions in a lane.

    A transition of an agent goes from its turn to its next turn: its observation and
    action, the sum of the rewards that it got until its next turn, and the next
    observation, ``terminated`` and ``truncated`` of ``env.last()``. The last transition
    ends at the agent's last turn, which PettingZoo gives to each agent that is dead or
    whose game is over, with the action None. Rewards are stored as float32; those
    before an agent's first turn are not stored.

    The rows are those of a :class:`GymnasiumRecorder`: a Dict observation has its keys
    at the root. An ``"action_mask"`` among them is stored as bool. A next mask that
    allows no action, as games give it to an agent that no longer acts, is stored as
    True everywhere, so that the greatest value of the allowed actions is finite.

    Each game has a number for each agent, ``("collector", "traj_ids")``. A
    :meth:`reset` in mid-game stores the last transitions of dead agents, and drops
    those that have not ended. Loading a checkpoint into the buffer interrupts the game;
    call :meth:`reset` before the next step.

    Loop as PettingZoo does, with ``recorder.reset`` and ``recorder.step`` in place of
    the environment's. Opponents that are not recorded may act with ``env.step``.

    Args:
        buffer: a :class:`ReplayBuffer` ``[T, A]`` for the A agents of
            ``env.possible_agents``, in this order, for example from
            ``from_env(env, ...)``. Or a dict from the agents to be recorded to lanes,
            ``rb.lane(e)``, or buffers ``[T]``: for agents with unlike spaces, for
            several games in one buffer, or for a learner among opponents.
        env: an ``AECEnv``.

    Raises:
        TypeError: ``buffer`` or ``env`` has the wrong type.
        ValueError: the buffer cannot write single lanes, or the dict names an agent
            that the environment lacks.
        SchemaError: the agents of one buffer differ in their spaces, or the transitions
            do not fit the rows or lanes.

    Cost: one call of ``env.last()`` and one write of a step per turn.

    TorchRL has no recorder; its ``PettingZooEnv`` gives a row to every turn, with a
    mask of the agent that acts.

    Example:
        >>> import pettingzoo
        >>> from rlbuf_td import AECRecorder, ReplayBuffer
        >>> env = pettingzoo.make("aec", "classic/tictactoe_v3")
        >>> rb = ReplayBuffer.from_env(env, 1_000, batch_size=8)
        >>> recorder = AECRecorder(rb, env)
        >>> recorder.reset(seed=0)
        >>> for agent in env.agent_iter():
        ...     observation, reward, terminated, truncated, info = env.last()
        ...     is_dead = terminated or truncated
        ...     recorder.step(None if is_dead else observation["action_mask"].argmax())  # the first empty square
        >>> rb.lane(0).chronological()["action"], rb.lane(0).chronological()["next", "reward"].flatten()
        (tensor([0, 2, 4, 6]), tensor([0., 0., 0., 1.]))
        >>> rb.lane(1).chronological()["action"], rb.lane(1).chronological()["next", "reward"].flatten()
        (tensor([1, 3, 5]), tensor([ 0.,  0., -1.]))
    """

    def __init__(
        self, buffer: ReplayBuffer | Mapping[str, Target], env: AECEnv
    ) -> None:
        if not takes_turns(env):
            raise TypeError(
                f"env must be an AECEnv of PettingZoo, whose agents take turns, got a {type(env).__name__}"
            )
        self.env = env
        agents = [*env.possible_agents]
        targets = buffer if isinstance(buffer, Mapping) else _lanes_of(buffer, env)
        unknown = [agent for agent in targets if agent not in agents]
        if unknown:
            raise ValueError(
                f"the environment has no agents {unknown}: its agents are {agents}"
            )
        self._seats = {
            agent: _Seat(target, env, agent) for agent, target in targets.items()
        }
        self._is_running = False  # False: a reset must follow

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> None:
        """Store the last transitions of dead agents, and reset the environment."""
        env = self.env
        if self._goes_on():
            self._refuse_lost()
            with self._stopped_if_interrupted():
                self._end_dead()
        self._is_running = False
        env.reset(seed=seed, options=options)
        for seat in self._seats.values():
            seat.begin_game()
        self._is_running = True

    def _end_dead(self) -> None:
        """Store the last transitions of dead agents, whose last turns are still to
        come."""
        env = self.env
        for agent, seat in self._seats.items():
            if not seat.is_open:
                continue
            terminated, truncated = env.terminations[agent], env.truncations[agent]
            if terminated or truncated:
                reward = env._cumulative_rewards[agent]  # noqa: SLF001  which env.last() will return
                seat.end(env.observe(agent), reward, terminated, truncated)

    def step(self, action: object, **extras: object) -> None:
        """Take the turn of ``env.agent_selection``, and store the transition that ends
        with this turn.

        Args:
            action: the agent's action; None at its last turn.
            **extras: further entries of the transition that begins, such as a policy's
                ``state_value`` of shape ``[1]``. Every step of an agent must have the
                same extras; those of its last turn are ignored.

        Raises:
            RuntimeError: the environment must be reset before this step; or an agent
                has left the environment without its last turn.
            ValueError: a living agent has no action, or a dead one has one; nothing has
                changed.
            SchemaError: the dtype or shape of an entry differs from its space or from
                the agent's first step.
        """
        env = self.env
        goes_on = self._goes_on()
        if goes_on:
            self._refuse_lost()
        if not goes_on or not env.agents:
            raise RuntimeError(
                "call the recorder's reset() before the first step, when no agent "
                "is left, after a step that failed, and after a load"
            )
        agent = env.agent_selection
        observation, reward, terminated, truncated, _ = env.last()
        is_dead = bool(terminated or truncated)
        if is_dead is not (action is None):
            state = (
                "is dead, and its last action is None"
                if is_dead
                else "is alive, and needs an action"
            )
            raise ValueError(f"agent {agent!r} {state}, got {action!r}")
        seat = self._seats.get(agent)
        if seat is not None:
            with self._stopped_if_interrupted():
                seat.end(observation, reward, terminated, truncated)
                if not is_dead:
                    seat.begin(observation, action, extras)
        self._is_running = False  # if this step fails, a reset must follow
        env.step(action)
        self._is_running = True

    @contextmanager
    def _stopped_if_interrupted(self) -> Iterator[None]:
        """Let a reset follow if the ``with`` block is interrupted, so that nobody knows
        which transitions it has stored; after an error, the game goes on."""
        self._is_running = False
        try:
            yield
        except Exception:
            self._is_running = True
            raise
        self._is_running = True

    def _goes_on(self) -> bool:
        """Whether the game goes on: no step has failed, and no checkpoint was
        loaded."""
        seats = self._seats.values()
        return self._is_running and not any(seat.is_interrupted for seat in seats)

    def _refuse_lost(self) -> None:
        """Raise a RuntimeError if a transition can no longer end; a reset must
        follow."""
        lost = [
            agent
            for agent, seat in self._seats.items()
            if seat.is_open and agent not in self.env.agents
        ]
        if lost:
            self._is_running = False
            raise RuntimeError(
                f"agents {lost} have left the environment, and their last rewards "
                "are not known: pass the None of their last turns to the recorder's "
                "step"
            )


class _Seat(Recorder):
    """The transition that an agent has begun with its newest action."""

    def __init__(self, target: Target, env: AECEnv, agent: str) -> None:
        super().__init__(target)
        schema = turns_schema(env, [agent])
        self._parts = parts_of_step(schema, env.observation_space(agent))
        self._fit(schema, single=True)
        self.is_open = False

    def begin_game(self) -> None:
        self.is_open = False
        self._restart(np.ones(1, bool))

    def begin(
        self, observation: object, action: object, extras: Mapping[str, object]
    ) -> None:
        self._begin_step(extras)
        self._columns.fill("observation", observation)
        self._columns.fill("action", action)
        self.is_open = True

    def end(
        self, observation: object, reward: float, terminated: bool, truncated: bool
    ) -> None:
        """Store the transition, if the agent has begun one."""
        if not self.is_open:
            return
        self._columns.fill("next", observation)
        self._columns.fill_outcome(reward, terminated, truncated)
        mask = self._rows.get(("next", ACTION_MASK))
        # no action is allowed: all, so that the greatest allowed value is finite
        if mask is not None and not mask.any():
            mask[...] = True
        self._write()
        self.is_open = False


def _lanes_of(buffer: ReplayBuffer, env: AECEnv) -> dict[str, BufferLane]:
    """Return the lanes of a buffer for the agents of an environment, which have equal
    spaces."""
    agents = [*env.possible_agents]
    turns_schema(env, agents)
    if not hasattr(buffer, "lane"):
        raise TypeError(
            f"buffer must be a ReplayBuffer, or a dict from agents to lanes, got a {type(buffer).__name__}"
        )
    lanes = [buffer.lane(0)]
    lanes += [buffer.lane(e) for e in range(1, buffer.storage.lane_count or 1)]
    if len(lanes) != len(agents):
        raise SchemaError(
            f"the buffer has {len(lanes)} lanes, the environment {len(agents)} agents: "
            "make the buffer with from_env(env, ...)"
        )
    return dict(zip(agents, lanes, strict=True))
