"""Rewards and terminations for hindsight relabelling, computed by Gymnasium's goal
environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase

from rlbuf_td.storages.keys import as_tuple, nested_key

TransitionFn: TypeAlias = Callable[[TensorDictBase], torch.Tensor]


def gymnasium_reward_fn(
    env: object,
    *,
    goal_key: NestedKey = "desired_goal",
    achieved_goal_key: NestedKey = "achieved_goal",
    info_keys: Mapping[str, NestedKey] | None = None,
    vectorized: bool = True,
) -> TransitionFn:
    """Return a ``reward_fn`` for :class:`HindsightSampler` that calls a goal
    environment's ``compute_reward``.

    Args:
        env: an environment of Gymnasium or TorchRL, wrapped or not, that has the method
            ``compute_reward(achieved_goal, desired_goal, info)``, as in
            gymnasium-robotics.
        goal_key: the key of the desired goal in the batch.
        achieved_goal_key: the key of the achieved goal in the batch's ``"next"``.
        info_keys: maps each name in ``info`` to the batch key of its value; by default,
            ``info`` is an empty dict.
        vectorized: whether ``compute_reward`` takes a batch of goals; if False, the
            method is called per row.

    Returns:
        A function that takes a batch ``[B]`` and returns rewards, ``[B]``, of the dtype
        of ``compute_reward``.

    Raises:
        TypeError: the environment has no ``compute_reward``.

    Cost: one call of ``compute_reward`` per batch (or per row). A batch on CUDA is
    copied to the host.

    Example:
        >>> import numpy as np
        >>> from tensordict import TensorDict
        >>> class Line:
        ...     def compute_reward(self, achieved_goal, desired_goal, info):
        ...         return -np.abs(achieved_goal - desired_goal)[:, 0]
        >>> reward_fn = gymnasium_reward_fn(Line())
        >>> goals = {"desired_goal": torch.ones(2, 1), "next": {"achieved_goal": torch.tensor([[1.0], [3.0]])}}
        >>> reward_fn(TensorDict(goals, [2]))
        tensor([-0., -2.])
    """
    return _caller(
        env, "compute_reward", goal_key, achieved_goal_key, info_keys, vectorized
    )


def gymnasium_terminated_fn(
    env: object,
    *,
    goal_key: NestedKey = "desired_goal",
    achieved_goal_key: NestedKey = "achieved_goal",
    info_keys: Mapping[str, NestedKey] | None = None,
    vectorized: bool = False,
) -> TransitionFn:
    """Return a ``terminated_fn`` for :class:`HindsightSampler` that calls an
    environment's ``compute_terminated``.

    Args:
        env: an environment that has the method
            ``compute_terminated(achieved_goal, desired_goal, info)``.
        goal_key: as for :func:`gymnasium_reward_fn`.
        achieved_goal_key: as for :func:`gymnasium_reward_fn`.
        info_keys: as for :func:`gymnasium_reward_fn`.
        vectorized: whether ``compute_terminated`` takes a batch of goals; if False, the
            method is called per row.

    Returns:
        A function that takes a batch ``[B]`` and returns flags, ``[B]`` bool.

    Raises:
        TypeError: the environment has no ``compute_terminated``.

    Cost: one call of ``compute_terminated`` per row, or per batch if ``vectorized``.

    Example:
        >>> from tensordict import TensorDict
        >>> class Line:
        ...     def compute_terminated(self, achieved_goal, desired_goal, info):
        ...         return bool(abs(achieved_goal - desired_goal) < 0.5)
        >>> terminated_fn = gymnasium_terminated_fn(Line())
        >>> goals = {"desired_goal": torch.ones(2, 1), "next": {"achieved_goal": torch.tensor([[1.0], [3.0]])}}
        >>> terminated_fn(TensorDict(goals, [2]))
        tensor([ True, False])
    """
    return _caller(
        env, "compute_terminated", goal_key, achieved_goal_key, info_keys, vectorized
    )


def _caller(
    env: object,
    name: str,
    goal_key: NestedKey,
    achieved_goal_key: NestedKey,
    info_keys: Any,
    vectorized: bool,
) -> TransitionFn:
    """Return a function of a batch that calls the environment's method ``name`` with
    goals and infos."""
    compute = _method(env, name)
    info_keys = {name: nested_key(key) for name, key in (info_keys or {}).items()}
    keys = ("next", *as_tuple(achieved_goal_key)), nested_key(goal_key)

    def call(batch: TensorDictBase) -> torch.Tensor:
        achieved, desired = (batch.get(key).cpu().numpy() for key in keys)
        info = {name: batch.get(key).cpu().numpy() for name, key in info_keys.items()}
        if vectorized:
            values = compute(achieved, desired, info)
        else:
            infos = [
                {name: column[row] for name, column in info.items()}
                for row in range(len(achieved))
            ]
            values = [
                compute(*goals) for goals in zip(achieved, desired, infos, strict=True)
            ]
        return torch.from_numpy(np.asarray(values)).to(batch.device or "cpu")

    return call


def _method(env: object, name: str) -> Callable[..., Any]:
    """Return the method ``name`` of the environment, or of one that it wraps; TypeError
    if there is none."""
    innermost = env
    while env is not None:
        innermost = getattr(env, "unwrapped", None) or env
        for candidate in (innermost, env):
            method = getattr(candidate, name, None)
            if callable(method):
                return method
        env = getattr(env, "_env", None)  # TorchRL's wrappers
    missing = (
        f"{type(innermost).__name__} has no {name}(achieved_goal, desired_goal, info)"
    )
    raise TypeError(f"{missing}: write a function of the batch")
