"""The columns of a step, and how they are filled with what an environment returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlbuf_td.envs.specs import Key, Paths, as_array, show_extra, tensors_of
from rlbuf_td.storages.schema import SchemaError, refuse_rounding, show_key
from rlbuf_td.storages.staged_step import StagedStep

REWARD: Key = ("next", "reward")
_TERMINATED: Key = ("next", "terminated")
_TRUNCATED: Key = ("next", "truncated")
_DONE: Key = ("next", "done")
_WIDER = "store it in float64, with from_env(env, ..., extras=...) and an example of {} in extras"
#: The largest number up to which a dtype holds every whole number.
_EXACT = {np.dtype(np.float32): 2**24, np.dtype(np.float64): 2**53}
_LEAST_EXACT = 127  # other dtypes hold all whole numbers up to this one
#: The number of rewards up to which Python's `max` takes less time than NumPy, which
#: first makes sure that an overflow does not warn.
_FEW = 64
_BOOL = np.dtype(bool)
_DOUBLE = np.dtype(np.float64)
_FLAGS = bool, np.bool_
_TRUE = b"\x01"


class StepColumns:
    """The columns of a staged step, ``[E, ...]``, which one step after another fills.

    Args:
        staged: the memory of the step.
        single: whether values come from one environment, without a dim E.
        parts: names for the parts of a step, such as ``"action"``, and where their
            values go.
    """

    def __init__(
        self, staged: StagedStep, single: bool, parts: Mapping[str, Paths]
    ) -> None:
        self.staged, self.single, self.parts = staged, single, parts
        columns = staged.columns
        #: The columns in the shape in which values come.
        self.values = {
            key: column[0, ...] if single else column for key, column in columns.items()
        }
        self._targets = {
            name: [(self.values[key], path, key) for key, path in paths]
            for name, paths in parts.items()
        }
        if REWARD not in columns or _TRUNCATED not in columns:
            return
        # in the shape in which values come: without their last dim, which rows have
        self._terminated = self.values[_TERMINATED][..., 0]
        self._truncated = self.values[_TRUNCATED][..., 0]
        self._rewards = rewards = self.values[REWARD]
        # a single reward comes without it, too
        is_one = rewards.shape == (*self._terminated.shape, 1)
        self._reward = rewards[..., 0] if is_one else rewards
        self._exact = _EXACT.get(rewards.dtype, _LEAST_EXACT)
        # the same memory, ``[E]``
        self._terminated_by_lane = columns[_TERMINATED][:, 0]
        self._truncated_by_lane = columns[_TRUNCATED][:, 0]
        #: Where an episode ends, ``[E]``.
        self.done = columns[_DONE][:, 0]

    def fill(self, part: str, value: object) -> None:
        """Copy the value of a part of the step.

        Raises:
            SchemaError: its dtype or shape does not fit.
        """
        for column, path, key in self._targets[part]:
            fill_(column, part_of(value, path) if path else value, key)

    def fill_outcome(
        self, reward: object, terminated: object, truncated: object
    ) -> bool:
        """Fill the rewards and end flags; return whether an episode has ended."""
        self._fill_reward(reward)
        if self.single and type(terminated) is bool and type(truncated) is bool:
            self._terminated[...] = terminated
            self._truncated[...] = truncated
            self.done[0] = has_ended = terminated or truncated
            return has_ended
        fill_(self._terminated, terminated, _TERMINATED)
        fill_(self._truncated, truncated, _TRUNCATED)
        np.logical_or(self._terminated_by_lane, self._truncated_by_lane, out=self.done)
        # takes a twentieth of the time of `any`, a Python function
        return _TRUE in self.done.tobytes()

    def _fill_reward(self, reward: object) -> None:
        """Fill the reward column; SchemaError if its shape differs or if casting rounds
        it."""
        column = self._reward
        if isinstance(reward, float) and not column.shape:
            is_exact = abs(reward) <= self._exact
        else:
            reward = reward if type(reward) is np.ndarray else as_array(reward, REWARD)
            is_exact = reward.shape == column.shape and (
                reward.dtype is column.dtype or self._is_exact(reward)
            )
        if is_exact:
            column[...] = reward
            return
        array = as_array(reward, REWARD)
        if array.shape == column.shape:
            fill_(column, array, REWARD)
        elif array.shape == self._rewards.shape:
            fill_(self._rewards, array, REWARD)
        else:
            self._refuse_reward(array.shape)

    def _is_exact(self, rewards: np.ndarray) -> bool:
        """Whether it is quickly found that the rows hold all whole numbers."""
        if rewards.ndim != 1 or rewards.dtype is not _DOUBLE:
            return False
        if len(rewards) <= _FEW:
            numbers = rewards.tolist()
            return max(numbers) <= self._exact and min(numbers) >= -self._exact
        with np.errstate(over="ignore"):
            # not below the square of any of them, and NaN if one is
            return rewards.dot(rewards) <= self._exact**2

    def _refuse_reward(self, shape: tuple[int, ...]) -> None:
        """Raise a SchemaError for rewards of this shape."""
        column = self._rewards
        dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
        example = show_extra(REWARD, torch.empty(shape, dtype=dtype, device="meta"))
        raise SchemaError(
            f"{show_key(REWARD)} came with shape {shape}, the rows hold "
            f"{column.shape}: give rewards of this shape, or make the buffer with "
            f"from_env(env, ..., {example})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"staged": self.staged, "single": self.single, "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def part_of(value: Any, path: Key) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, tuple) else value[part]
    return value


def fill_(column: np.ndarray, value: object, key: Key) -> None:
    """Copy a value into a column of equal shape.

    NumPy's "same_kind" casts (float64 to float32) are allowed unless they change a
    whole number, such as 2**24 + 1; other casts, such as from 0 and 1 to bool, if they
    change no number. Otherwise, a SchemaError is raised.
    """
    if type(value) is np.ndarray:
        array = value
    elif isinstance(value, _FLAGS) and column.dtype is _BOOL and not column.shape:
        column[...] = value
        return
    else:
        array = as_array(value, key)
    if array.shape != column.shape:
        raise SchemaError(
            f"{show_key(key)} came with shape {array.shape}, expected {column.shape}"
        )
    if array.dtype is not column.dtype:
        array = _cast(array, column.dtype, key)
    column[...] = array


def _cast(array: np.ndarray, dtype: np.dtype, key: Key) -> np.ndarray:
    """Return an array as ``dtype``; SchemaError if a value changes by more than
    rounding."""
    if np.can_cast(array.dtype, dtype, "same_kind"):
        if _is_below(array, _EXACT.get(dtype, _LEAST_EXACT)):
            return array  # NumPy casts it without a loss of whole numbers
        tensor_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        values = tensors_of(array.reshape(-1), *key)
        refuse_rounding(key, values, tensor_dtype, _WIDER.format(show_key(key)))
        with np.errstate(over="ignore"):  # beyond the dtype: infinite, as in torch
            return array.astype(dtype)
    if array.dtype.kind in "biuf":
        with np.errstate(invalid="ignore"):  # NaN has no integer value
            cast = array.astype(dtype)
        if np.array_equal(cast, array):
            return cast
    raise SchemaError(
        f"{show_key(key)} came as {array.dtype}, expected {dtype}: cast it first"
    )


def _is_below(array: np.ndarray, limit: int) -> bool:
    """Whether the size of all numbers is below ``limit``."""
    # the least integer has no absolute value, and float16 may not hold the limit
    if array.dtype.kind in "if":
        array = array.astype(np.float64, copy=False)
    return bool((np.abs(array) < limit).all())


def fill_parts_(
    columns: Mapping[Key, np.ndarray], paths: Paths, value: object, cell: Any
) -> None:
    """Copy the parts of an observation or action into the elements ``cell`` of their
    columns."""
    for key, path in paths:
        fill_(columns[key][cell], part_of(value, path), key)
