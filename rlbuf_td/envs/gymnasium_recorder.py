"""Record the transitions of a running Gymnasium environment in a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from rlbuf_td.envs.recorder import (
    Recorder,
    Target,
    fill_final_,
    fill_info_,
)
from rlbuf_td.envs.specs import (
    as_array,
    parts_of_step,
    schema_of,
    tensors_of,
)

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.vector import VectorEnv

_SAME_STEP = (
    "gymnasium.make_vec(id, num_envs, vectorization_mode='sync', "
    "vector_kwargs={'autoreset_mode': gymnasium.vector.AutoresetMode.SAME_STEP})"
)


class GymnasiumRecorder(Recorder):
    """Steps a Gymnasium environment, and stores the transitions in a buffer.

    :meth:`reset` and :meth:`step` return the environment's results unchanged. With
    same-step autoreset, the stored next observation at the end of an episode is
    ``final_obs`` from the infos. With next-step autoreset, the steps that only reset
    the environment are not stored. ``done`` is ``terminated | truncated``. A reward is
    a number, or an array if the environment has a ``reward_space`` or the buffer an
    example in ``extras``. Rewards are stored as float32; whole numbers that float32
    lacks, such as 2**24 + 1, are refused, unless ``extras`` has a float64 reward.

    Each episode has a unique number, ``("collector", "traj_ids")``. If ``reset``
    interrupts an episode, its last transition keeps ``done=False``. Loading a
    checkpoint into the buffer interrupts all episodes; call :meth:`reset` before the
    next step.

    A single environment is recorded in a buffer ``[T]``. E environments need a buffer
    ``[T, E]``, in which environment ``e`` is lane ``e``. With next-step autoreset, a
    lane that begins an episode has no transition in that step, and the lanes get unlike
    lengths (see :meth:`ReplayBuffer.lane`). Rollouts and other buffers that write whole
    time steps require same-step autoreset,
    ``SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)``. The mode is the
    ``"autoreset_mode"`` of the environment's metadata.

    Rows have the dtypes of the spaces. A transform stores narrower ones: with TorchRL's
    ``DTypeCastTransform``, ``keys = ["observation", ("next", "observation")]`` and
    ``from_env(env, ..., transform=DTypeCastTransform(torch.float16, torch.float32,
    in_keys=keys, in_keys_inv=keys))``, rows hold half floats, which take half the
    memory, and batches have floats.

    With ``rb.lane(e)`` in place of the buffer, a single environment is lane ``e`` of a
    replay buffer ``[T, E]``. Each actor, in a thread or after ``rb.share()`` in a
    process, then has its own recorder, and waits for no other.

    Args:
        buffer: a :class:`ReplayBuffer` or :class:`RolloutBuffer`, for example from
            ``from_env(env, ...)``; or one lane of a :class:`ReplayBuffer`,
            ``rb.lane(e)``.
        env: a Gymnasium environment, or a vector environment.
        infos: infos to store under ``"next"``: a dict from names, such as ``"score"``
            or the nested ``("episode", "r")``, to values of the same dtype and shape,
            which stand for an info that a step does not return.

    Raises:
        TypeError: ``buffer``, ``env`` or ``infos`` has the wrong type.
        ValueError: the metadata of a vector environment lack the ``"autoreset_mode"``;
            or the buffer cannot write single lanes, and one is given, or several
            environments that reset in the next step.
        SchemaError: the environment's transitions do not fit the buffer's rows or
            lanes, or a lane or a buffer ``[T]`` gets several environments.

    Cost: ``python -m tests.benchmarks.loops`` measures it, without the time of the
    environments.

    TorchRL has no recorder for Gymnasium environments; its collectors step TorchRL
    environments.

    Example:
        >>> import gymnasium
        >>> from rlbuf_td import GymnasiumRecorder, ReplayBuffer
        >>> env = gymnasium.make_vec("CartPole-v1", num_envs=2)
        >>> rb = ReplayBuffer.from_env(env, 1_000, batch_size=8)
        >>> recorder = GymnasiumRecorder(rb, env)
        >>> obs, info = recorder.reset(seed=0)
        >>> for _ in range(100):
        ...     obs, reward, terminated, truncated, info = recorder.step(env.action_space.sample())
        >>> rb.sample()["next", "observation"].shape
        torch.Size([8, 4])
    """

    def __init__(
        self,
        buffer: Target,
        env: Env | VectorEnv,
        *,
        infos: Mapping[Any, object] = MappingProxyType({}),
    ) -> None:
        super().__init__(buffer)
        if not isinstance(infos, Mapping):
            raise TypeError(
                "infos must be a dict from names to values that stand for a missing "
                f"info, for example {{'score': 0.0}}, got a {type(infos).__name__}"
            )
        schema = schema_of(env)
        single = not schema.ndim
        self.env = env
        self._mode = _autoreset_mode_of(env, single)
        space = (
            env.observation_space
            if single
            else cast("VectorEnv", env).single_observation_space
        )
        self._parts = parts_of_step(schema, space)
        self._infos = {
            (name,) if isinstance(name, str) else tuple(name): value
            for name, value in infos.items()
        }
        self._fit(schema.unsqueeze(0) if single else schema, single=single)
        for path, default in self._infos.items():
            array = as_array(tensors_of(default, *path), path)
            value = torch.as_tensor(array, device="cpu")
            value = value if single else value.expand(self._lanes, *value.shape)
            self._add_entry(self._schema, ("next", *path), value)
        if self._mode == "NextStep" and self._lanes > 1 and not self.buffer.takes_lanes:
            writer = type(self.buffer.writer).__name__
            raise ValueError(
                f"cannot record next-step autoreset: a lane that resets falls a step behind, and a {writer} here "
                f"writes whole time steps. Instead, use same-step autoreset, for example {_SAME_STEP}"
            )
        self._obs: Any = None  # None: a reset must follow
        # the lanes whose episode has ended, while no new one has begun
        self._ended = np.zeros(self._lanes, bool)
        self._has_ended = False  # whether there are such lanes

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and return the result; ``options={"reset_mask": mask}``
        resets only some lanes."""
        mask = (options or {}).get("reset_mask")
        lanes = np.ones(self._lanes, bool) if mask is None else np.array(mask, bool)
        # every lane lacks the step that failed
        are_lost = self._obs is None or self.is_interrupted
        # after an error or an interrupt, another reset must follow
        self._obs = None
        observation, info = self.env.reset(seed=seed, options=options)
        self._ended &= ~lanes
        self._has_ended = bool(self._ended.any())
        self._restart(np.ones_like(lanes) if are_lost else lanes)
        self._obs = observation
        return observation, info

    def step(
        self, action: object, **extras: object
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step, store its transitions, and return the result of the
        environment's ``step``.

        Args:
            action: the action.
            **extras: further entries of the transitions, such as a policy's
                ``state_value`` of shape ``[E, 1]``. Every step must have the same
                extras. Extras are arrays, tensors, or nested dicts of arrays and
                tensors.

        Raises:
            RuntimeError: the environment must be reset before this step; or an episode
                has ended in an environment with same-step autoreset, and the infos have
                no ``final_obs``.
            SchemaError: the dtype or shape of an entry differs from its space or from
                the first step.
        """
        if self._obs is None or self._has_ended or self.is_interrupted:
            self._refuse_step()
        if extras or self._extra_keys or not self._rows:
            self._begin_step(extras)
        columns = self._columns
        columns.fill("observation", self._obs)
        columns.fill("action", action)
        self._obs = None  # if this step fails, a reset must follow
        result = self.env.step(action)
        observation, reward, terminated, truncated, info = result
        has_ended = columns.fill_outcome(reward, terminated, truncated)
        columns.fill("next", observation)
        # the other lanes are reset by this step
        acting = ~self._ended if self._has_ended else None
        # the results are those of the next episode's first observation
        is_reset = has_ended and self._mode == "SameStep"
        if is_reset:
            fill_final_(self._rows, self._parts["next"], info, columns.done)
        if self._infos:
            self._fill_infos(info, columns.done & is_reset, acting)
        if acting is None or acting.any():
            self._write(acting)
        if has_ended or self._has_ended:
            self._end(columns.done, acting)
        self._obs = observation  # last: an interrupted step asks for a reset
        return result

    def _refuse_step(self) -> None:
        """Raise a RuntimeError that says which reset must come before the next step."""
        if self._obs is None or self.is_interrupted:
            raise RuntimeError(
                "call the recorder's reset() before its first step(), after a step "
                "that failed, and after a checkpoint was loaded or the storage was "
                "replaced"
            )
        if self._mode == "Disabled":
            ended = self._ended.nonzero()[0].tolist()
            how = ", with options={'reset_mask': terminated | truncated}"
            raise RuntimeError(
                f"the episode has ended in lanes {ended}: reset before the next step{'' if self._single else how}"
            )

    def _fill_infos(
        self, info: Any, is_reset: np.ndarray, acting: np.ndarray | None
    ) -> None:
        """Copy the infos of a step to the lanes that are ``acting``, all if None; lanes
        where ``is_reset`` is True have begun another episode."""
        info = [info] if self._single else info
        lanes = np.ones_like(is_reset) if acting is None else acting
        for path, default in self._infos.items():
            column = self._rows[("next", *path)]
            fill_info_(column, path, default, info, lanes, is_reset)

    def _end(self, done: np.ndarray, acting: np.ndarray | None) -> None:
        """Begin new episodes in lanes that a step has ended or reset."""
        if self._mode == "SameStep":
            self._begin(done)
            return
        if acting is None:
            self._ended = done.copy()
        else:
            self._ended = done & acting
            self._begin(~acting)
        self._has_ended = bool(self._ended.any())


def _autoreset_mode_of(env: Env | VectorEnv, single: bool) -> str:
    """Return the autoreset mode that an environment has; a single one without a wrapper
    that resets has "Disabled"."""
    if single:
        while hasattr(env, "env"):
            if type(env).__name__ == "Autoreset":
                return "NextStep"
            env = env.env
        return "Disabled"
    mode = env.metadata.get("autoreset_mode")
    mode = getattr(mode, "value", mode)
    if mode not in ("NextStep", "SameStep", "Disabled"):
        raise ValueError(
            "the environment's metadata must have an 'autoreset_mode' of "
            f"Gymnasium's AutoresetMode, got {mode!r}: set the mode that the "
            "environment has, for example env.metadata = env.metadata | "
            "{'autoreset_mode': AutoresetMode.NEXT_STEP}"
        )
    return mode
