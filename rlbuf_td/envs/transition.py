"""Conversion of a Gymnasium step to a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from rlbuf_td.envs.specs import (
    OBSERVATION,
    as_array,
    entries,
    refuse_taken,
    tensors_of,
)
from rlbuf_td.storages.schema import SchemaError, refuse_rounding, show_key, walk


class GymnasiumStep(NamedTuple):
    """One step of Gymnasium environments; see :func:`make_transition`."""

    observation: Any  # an array, a dict or a tuple
    action: Any
    reward: Any  # a number, or ``[E]``
    next_observation: Any  # before a reset
    terminated: Any  # a bool, or ``[E]``
    truncated: Any
    extras: Mapping[str, Any]  # further entries by name; under "next": of the outcome


def make_transition(
    obs: object,
    action: object,
    reward: object,
    next_obs: object,
    terminated: object,
    truncated: object,
    **extras: object,
) -> TensorDict:
    """Return one step of a Gymnasium environment as a TensorDict with TorchRL's keys.

    A loop that only writes steps is faster with :meth:`ReplayBuffer.add_step`, which
    makes no TensorDict.

    Observations, actions and extras are arrays, numbers or tensors, or nested dicts and
    tuples of these. The items of a tuple have the keys ``"0"``, ``"1"`` and so on. The
    result keeps dtypes (except of rewards); Python's floats, and lists of them, have
    torch's default dtype, as in ``torch.tensor``. It shares memory with tensors and writable
    arrays. A dict observation has its entries at the root; any other observation has
    the key ``"observation"``.

    Args:
        obs: the observation before the step.
        action: the action.
        reward: a number, or an array ``[E]`` for ``E`` environments, with further dims
            for several rewards. Rewards are converted to float32, except floating-point
            tensors, which keep their dtype.
        next_obs: the observation after the step. With same-step autoreset, pass
            ``final_obs`` when an episode ends.
        terminated: a bool, or bools of shape ``[E]``. This shape is the batch size of
            the result.
        truncated: a bool, or bools of the same shape as ``terminated``.
        **extras: more entries for the root, such as a policy's outputs; entries of a
            dict ``next`` go to ``"next"``.

    Returns:
        A TensorDict of batch size ``[]`` or ``[E]``, for :meth:`ReplayBuffer.add`. The
        flags and a single reward have shape ``[1]`` or ``[E, 1]``; ``("next", "done")``
        is ``terminated | truncated``.

    Raises:
        SchemaError: an entry does not consist of numbers, lacks the leading dim ``E``,
            or has the key of another entry; the observations before and after the step
            differ in keys or shapes; the reward is not a number; or float32 cannot hold
            a whole number among the rewards, such as 2**24 + 1.

    Cost: O(entries). Only rewards, and arrays that torch cannot share
    (read-only arrays), are copied.

    Example:
        >>> import numpy as np
        >>> obs, following = {"image": np.zeros((8, 8), np.uint8), "speed": 0.5}, {"image": np.ones((8, 8), np.uint8)}
        >>> step = make_transition(obs, 2, 1.0, following | {"speed": 0.6}, False, True, log_prob=-0.7)
        >>> step["image"].dtype, step["next", "done"], step["next", "reward"]
        (torch.uint8, tensor([True]), tensor([1.]))
    """
    outcome = reward, next_obs, terminated, truncated
    return as_transition(GymnasiumStep(obs, action, *outcome, extras))


def as_transition(step: GymnasiumStep) -> TensorDict:
    """Return a step as :func:`make_transition` does; its extras may have any names."""
    flags = {
        "terminated": _flag(step.terminated, "terminated"),
        "truncated": _flag(step.truncated, "truncated"),
    }
    lanes = flags["terminated"].shape
    shape = flags["truncated"].shape
    if shape != lanes:
        raise SchemaError(
            f"'truncated' has shape {tuple(shape)}, expected that of 'terminated', {tuple(lanes)}"
        )
    before = _observation(step.observation)
    after = _observation(step.next_observation, "next")
    root = before | {"action": tensors_of(step.action, "action")}
    outcome = after | {"reward": _reward(step.reward, lanes)}
    outcome |= {name: flag.unsqueeze(-1) for name, flag in flags.items()}
    outcome["done"] = outcome["terminated"] | outcome["truncated"]
    extras = tensors_of(step.extras, "extras")
    _add_extras(outcome, extras.pop("next", {}), {*outcome})
    _add_extras(root, extras, {*root, "next"})
    transition = _batch(root | {"next": outcome}, lanes)
    _refuse_unlike(before, after)
    return transition


def _add_extras(part: dict[str, Any], extras: Any, names: set[str]) -> None:
    """Add further entries to a part of a transition; SchemaError if one has a name of
    ``names``."""
    if not isinstance(extras, dict):
        raise SchemaError(
            f"the extra 'next' must be a dict of entries, got a {type(extras).__name__}"
        )
    for key in extras:
        if key in names:
            raise SchemaError(f"the extra {key!r} has the name of an existing entry")
    part.update(extras)


def _observation(obs: Any, *path: str) -> dict[str, Any]:
    if entries(obs) is None or isinstance(obs, tuple):
        return {OBSERVATION: tensors_of(obs, *path, OBSERVATION)}
    refuse_taken(obs.keys())
    return {key: tensors_of(value, *path, key) for key, value in obs.items()}


def _refuse_unlike(before: dict[str, object], after: dict[str, object]) -> None:
    """Raise a SchemaError if the observations before and after a step differ in keys or
    shapes."""
    shapes_before, shapes_after = (
        {key: f"of shape {tuple(value.shape)}" for key, value in walk(part)}
        for part in (before, after)
    )
    for key in {**shapes_before, **shapes_after}:
        this = shapes_before.get(key, "missing")
        following = shapes_after.get(key, "missing")
        if this != following:
            raise SchemaError(
                f"{show_key(key)} is {this} before the step and {following} after "
                "it: give the observations before and after one step "
                "(make_transition: obs, action, reward, next_obs)"
            )


def _flag(value: object, name: str) -> torch.Tensor:
    flag = tensors_of(value, name)
    if not isinstance(flag, torch.Tensor) or flag.dtype is not torch.bool:
        got = getattr(flag, "dtype", type(value).__name__)
        raise SchemaError(f"{name!r} must be bool, or an array of bool, got {got}")
    return flag


def _reward(value: object, lanes: torch.Size) -> torch.Tensor:
    """Return rewards as a floating point tensor, with a last dim of 1 if there is one
    per lane."""
    reward = tensors_of(value, "next", "reward")
    if not isinstance(reward, torch.Tensor):
        raise SchemaError(
            f"'reward' must be a number or an array, got a {type(value).__name__}"
        )
    if reward.is_complex():
        raise SchemaError(f"'reward' must be real, got {reward.dtype}")
    if not (isinstance(value, torch.Tensor) and reward.is_floating_point()):
        if isinstance(value, float | list):  # before it is rounded
            reward = torch.as_tensor(as_array(value, ("next", "reward")), device="cpu")
        refuse_rounding(
            ("next", "reward"),
            reward,
            torch.float32,
            "pass rewards as a float64 tensor",
        )
        reward = reward.to(torch.float32)
    return reward.unsqueeze(-1) if reward.shape == lanes else reward


def _batch(parts: dict[str, Any], lanes: torch.Size, *path: str) -> TensorDict:
    """Convert nested dicts to a TensorDict; SchemaError if a tensor lacks the leading
    dims ``lanes``."""
    for key, value in parts.items():
        if not isinstance(value, dict) and value.shape[: len(lanes)] != lanes:
            raise SchemaError(
                f"{show_key((*path, key))} has shape {tuple(value.shape)}, expected "
                f"the leading dims {tuple(lanes)} of 'terminated': one entry per "
                "environment"
            )
    nested = {
        key: _batch(value, lanes, *path, key)
        for key, value in parts.items()
        if isinstance(value, dict)
    }
    return TensorDict({**parts, **nested}, lanes)
