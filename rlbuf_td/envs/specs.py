"""Schemas of Gymnasium spaces, TorchRL specs and environments: the keys, dtypes and shapes of a transition.

A schema is a TensorDict on the ``"meta"`` device, which uses no memory. Schemas have batch size ``[]``, or ``[E]`` for
``E`` environments. Gymnasium is optional: this module never imports it, but looks it up in ``sys.modules``.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite

from rlbuf_td.envs.agent_groups import agents_schema, groups_of, parallel_envs
from rlbuf_td.envs.spaces import ACTION, OBSERVATION, RESERVED, Key, entries, is_space, value_of_space, without_memory
from rlbuf_td.storages.notebooks import TRANSITIONS
from rlbuf_td.storages.schema import SchemaError, refuse_unpackable, show_key, walk

_RESULTS = {("next", name) for name in ("reward", "terminated", "truncated", "done")}


def schema_of(source: Any, *, extras: Any = None, group_map: Any = None) -> TensorDict:
    """Return the keys, dtypes and shapes of a transition as a TensorDict of meta tensors.

    Args:
        source: a TorchRL environment; a Gymnasium environment, single or vectorised; a parallel environment of
            PettingZoo, or a list of them; a TensorDict with an example of a transition; or only an observation space: a
            Gymnasium space or a TorchRL spec.
        extras: examples of further entries, such as a policy's outputs, in a TensorDict or a nested dict. An extra
            replaces an entry with the same key.
        group_map: the groups of a PettingZoo environment's agents, see :class:`PettingZooRecorder`.

    Returns:
        The schema, with batch size ``[]``, or ``[E]`` for ``E`` environments. A Dict observation has its keys at the
        root; any other observation has the key ``"observation"``. The items of a tuple have the keys ``"0"``, ``"1"``
        and so on. A value of Gymnasium's ``Discrete`` space is one integer, not a one-hot vector. Rewards have shape
        ``[1]``, or the shape of the ``reward_space`` that environments with several objectives have.

    Raises:
        SchemaError: a space has no fixed size in bytes (``Text``, ``Graph``, ``Sequence``, ``OneOf``), or the leading
            dims of an extra are not the batch size, or the agents of a group differ in their spaces.
        TypeError: ``source`` has an unsupported type.
        ValueError: ``group_map`` does not name each agent of a PettingZoo environment once.

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
    elif isinstance(source, TensorDictBase):
        schema = without_memory(source)
    elif callable(getattr(source, "fake_tensordict", None)):
        schema = without_memory(source.fake_tensordict())
    elif gymnasium is not None and isinstance(source, gymnasium.Env):
        spaces = source.observation_space, source.action_space
        schema = transition_schema(*spaces, reward_shape=_reward_shape(source))
    elif gymnasium is not None and isinstance(source, gymnasium.vector.VectorEnv):
        spaces = source.single_observation_space, source.single_action_space
        schema = transition_schema(*spaces, source.num_envs, reward_shape=_reward_shape(source))
    elif is_space(source):
        schema = TensorDict(_observation(source, ()), [])
    else:
        raise TypeError(
            f"a {type(source).__name__} has no keys, dtypes and shapes: pass a TorchRL, Gymnasium or PettingZoo "
            "environment (not its name), a Gymnasium space, a TorchRL spec, or a TensorDict that holds one transition"
        )
    if extras is None:
        return schema
    schema = schema.copy()
    for key, value in walk(extras if isinstance(extras, TensorDictBase) else tensors_of(extras, "extras")):
        refuse_unpackable(key, value)
        if value.shape[: schema.ndim] != schema.batch_size:
            expected = f"expected the leading dims {tuple(schema.batch_size)} of every entry of the schema"
            raise SchemaError(f"the extra {show_key(key)} has shape {tuple(value.shape)}, {expected}")
        schema.set(key, torch.empty_like(value, device="meta"))
    return schema


def transition_schema(
    observation_space: Any, action_space: Any, num_envs: int | None = None, *, reward_shape: tuple[int, ...] = (1,)
) -> TensorDict:
    """Return the schema, ``[]`` or ``[num_envs]``, of transitions; the spaces are those of a single environment."""
    if num_envs is not None and num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, or None for a single environment, got {num_envs}")
    lanes = () if num_envs is None else (num_envs,)
    for role, space in (("observation", observation_space), ("action", action_space)):
        if not is_space(space):
            kind = type(space).__name__
            raise TypeError(f"the {role} space must be a Gymnasium space or a TorchRL spec, got a {kind}")
    observation = _observation(observation_space, lanes)
    flag = torch.empty((*lanes, 1), dtype=torch.bool, device="meta")
    reward = torch.empty((*lanes, *reward_shape), dtype=torch.float32, device="meta")
    after = observation | {"reward": reward, "done": flag, "terminated": flag.clone(), "truncated": flag.clone()}
    action = value_of_space(action_space, lanes, (ACTION,))
    is_composite = isinstance(action_space, Composite)  # an environment's full_action_spec, which has keys
    root = observation | (dict(action.items()) if is_composite else {ACTION: action}) | {"next": after}
    return TensorDict(root, lanes)


def _reward_shape(env: Any) -> tuple[int, ...]:
    """Return the shape of one environment's reward: that of ``reward_space``, or ``(1,)``."""
    while env is not None:
        space = getattr(env, "single_reward_space", getattr(env, "reward_space", None))
        if isinstance(space, sys.modules["gymnasium"].Space) and space.shape:
            return space.shape
        env = getattr(env, "env", None)
    return (1,)


def show_extra(key: Key, value: torch.Tensor) -> str:
    """Return the argument ``extras=`` that gives a transition an entry like ``value``."""
    example = f"torch.zeros({tuple(value.shape)}, dtype={value.dtype})"
    for name in reversed(key):
        example = f"{{{name!r}: {example}}}"
    return f"extras={example}"


def refuse_taken(keys: Any) -> None:
    """Raise a :class:`SchemaError` if an observation has a key that a transition needs for another entry."""
    for key in RESERVED.intersection(keys):
        raise SchemaError(f"the observation has a key {key!r}, which is reserved for the transition: rename it")


def tensors_of(value: Any, name: str, *path: str) -> Any:
    """Convert nested dicts and tuples of arrays and numbers to nested dicts of tensors, without copies if possible."""
    parts = entries(value)
    if parts is not None:
        return {key: tensors_of(part, name, *path, key) for key, part in parts.items()}
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value, device="cpu")
    array = np.asarray(value)
    if not array.flags.writeable or min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="))  # torch cannot share memory of another byte order
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        kind = f"{type(value).__name__} of dtype {array.dtype}, which no tensor can hold"
        raise SchemaError(f"{show_key((name, *path))} is a {kind}: give numbers or arrays of them") from error


def autoreset_mode_of(env: Any, given: Any, single: bool) -> str:
    if single:
        while hasattr(env, "env"):
            if type(env).__name__ == "Autoreset":
                return "NextStep"
            env = env.env
        return "Disabled"
    given, known = (getattr(mode, "value", mode) for mode in (given, env.metadata.get("autoreset_mode")))
    mode = known if given is None else given
    if mode not in (None, "NextStep", "SameStep", "Disabled"):
        raise ValueError(f"autoreset_mode must be one of Gymnasium's AutoresetMode, got {mode!r}")
    if known is not None and mode != known:
        fault = f"autoreset_mode={mode!r} contradicts the environment's metadata, which say {known!r}"
        raise ValueError(f"{fault}: leave it out, and choose the mode when the environment is made{TRANSITIONS}")
    if mode is None:
        lack = "the environment's metadata lack 'autoreset_mode', and next-step autoreset is assumed"
        warnings.warn(
            f"{lack}: pass the mode that it has, autoreset_mode=...{TRANSITIONS}", RuntimeWarning, stacklevel=3
        )
    return mode or "NextStep"


def paths_of(env: Any, schema: TensorDict, single: bool) -> tuple[list[tuple[Key, Key]], list[tuple[Key, Key]]]:
    """Return pairs ``(key in the buffer, path in Gymnasium's value)`` for the observation and for the action."""
    space = env.observation_space if single else env.single_observation_space
    whole = not isinstance(space, sys.modules["gymnasium"].spaces.Dict)
    after = [key[1:] for key, _ in walk(schema) if key[0] == "next" and key not in _RESULTS]
    actions = [key for key, _ in walk(schema) if key[0] == ACTION]
    return [(key, key[whole:]) for key in after], [(key, key[1:]) for key in actions]


def _observation(space: Any, lanes: tuple[int, ...]) -> dict[str, Any]:
    """Return an observation's schema as a dict; a space without keys gets the key ``"observation"``."""
    value = value_of_space(space, lanes, (OBSERVATION,))
    is_dict = isinstance(value, TensorDictBase) and type(space).__name__ != "Tuple"
    observation = dict(value.items()) if is_dict else {OBSERVATION: value}
    refuse_taken(observation)
    return observation
