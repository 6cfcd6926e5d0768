"""Limits on the age of the rows that a sampler may draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlbuf_td.samplers.wrapper import column_of
from rlbuf_td.storages import SchemaError
from rlbuf_td.storages.checks import as_number, whole
from rlbuf_td.storages.indexing import lanes_of, revision_of
from rlbuf_td.storages.lane_heads import holes_among, lanes_apart
from rlbuf_td.storages.torchrl_parts import last_step
from rlbuf_td.storages.trajectory_index import as_tuple

_FEW = 8  # ranges
NO_RANGES = np.zeros((0, 3), np.int64)
_NO_NUMBERS = torch.bool, torch.complex64, torch.complex128


def numbers_of(storage: Storage, age_key: NestedKey, *, oldest_of_row: bool = False) -> Tensor:
    """Return the numbers that the rows have at ``age_key``, ``[N]``; SchemaError unless each row has one.

    ``oldest_of_row``: a row may have several numbers, as the steps of a trajectory; the smallest one counts.
    """
    column: Any = column_of(storage, as_tuple(age_key))
    is_tensor = isinstance(column, Tensor)  # not a node of several entries
    if is_tensor and oldest_of_row and not column.is_meta and column[:1].numel() > 1:
        column = column.flatten(1).amin(1)
    if not is_tensor or column.is_meta or column.dtype in _NO_NUMBERS or column[:1].numel() != 1:
        found = f"{column.dtype} of shape {tuple(column.shape[1:])}" if is_tensor else "no such entry"
        raise SchemaError(f"age_key={age_key!r} must name one number per row, stored in the row: {found}")
    return column[: len(storage)].reshape(-1)


class AgeLimit:
    """The largest age of rows that may be drawn, and which stored rows are *young*: not older.

    Args:
        max_age: the largest age, at least 0, in time steps (0: the newest time step), or in the unit of ``age_key``.
        age_key: the key of a stored number that increases over time, such as ``"policy_version"``. The age of a row is
            then :attr:`consumer_version` minus the row's number, or the largest stored number minus the row's number.
    """

    def __init__(self, max_age: Any, age_key: NestedKey | None) -> None:
        self.max_age, self.age_key = whole(0)("max_age", max_age), age_key
        self._version: float | int | None = None
        self._known: tuple[Any, np.ndarray | None] = (None, None)  # with age_key: the buffer's state, the ranges

    @classmethod
    def of(cls, max_age: Any, age_key: NestedKey | None) -> AgeLimit | None:
        """Return a limit, or None if ``max_age`` is None; ValueError for an ``age_key`` alone."""
        if max_age is None and age_key is not None:
            raise ValueError(f"age_key={age_key!r} is the unit of max_age, which is not given: pass max_age, too")
        return None if max_age is None else cls(max_age, age_key)

    @property
    def consumer_version(self) -> float | int | None:
        """The number from which ages are counted, with ``age_key``; ``None``: the largest stored number."""
        return self._version

    @consumer_version.setter
    def consumer_version(self, value: Any) -> None:
        if self.age_key is None:
            raise ValueError("consumer_version needs max_age and age_key: without age_key, ages are time steps")
        if value is not None:
            number = as_number(value)
            if not abs(number) < float("inf"):
                raise ValueError(f"consumer_version must be a finite number or None, got {value!r}")
            value = int(number) if number.is_integer() else number
        self._version = value

    def ranges(self, storage: Storage) -> np.ndarray:
        """Return the ranges of flat indices that hold the young rows, ascending, ``[R, 3]`` int64.

        A range has its first row, the row after its last one, and the number of rows in this and all earlier ranges.

        Cost: O(1); O(N) after a write or a change of ``consumer_version``, with ``age_key`` or while lanes are apart.
        """
        if self.age_key is None and not lanes_apart(storage):
            return self._in_steps(storage)
        state = ref(storage), len(storage), revision_of(storage), self._version
        known, ranges = self._known
        if ranges is None or known != state:
            young = self._young_by_lane(storage) if self.age_key is None else self._young_by_key(storage)
            edges = np.flatnonzero(np.diff(young, prepend=False, append=False)).reshape(-1, 2)
            ranges = np.column_stack((edges, (edges[:, 1] - edges[:, 0]).cumsum())).astype(np.int64)
            self._known = state, ranges
        return ranges

    def count(self, storage: Storage) -> int:
        """Return the number of young rows."""
        return count_of(self.ranges(storage)) if len(storage) else 0

    def _in_steps(self, storage: Storage) -> np.ndarray:
        lanes = lanes_of(storage).numel()
        steps = len(storage) // lanes
        span = min(steps, self.max_age + 1)
        first = (last_step(storage, steps) + 1 - span) % steps if span < steps else 0
        past = first + span
        if past <= steps:
            return np.array([[first * lanes, past * lanes, span * lanes]], np.int64)
        early = (past - steps) * lanes  # the rows at the begin of the ring
        return np.array([[0, early, early], [first * lanes, steps * lanes, span * lanes]], np.int64)

    def _young_by_lane(self, storage: Any) -> np.ndarray:
        """Return which rows are not too old, ``[N]`` bool; ages are counted in each lane."""
        newest, count = storage.heads.read(storage)
        steps = storage.all_rows().steps
        age = (newest - np.arange(len(storage) // len(count))[:, None]) % steps
        return ((age <= self.max_age) & (age < count)).reshape(-1)

    def _young_by_key(self, storage: Storage) -> np.ndarray:
        """Return which rows are not too old, ``[N]`` bool."""
        number = numbers_of(storage, self.age_key)
        holes = holes_among(storage, torch.arange(len(number), device=number.device))
        written = number if holes is None else number[~holes]
        young = (written.max() if self._version is None else self._version) - number <= self.max_age
        return (young if holes is None else young & ~holes).cpu().numpy()

    def is_young(self, storage: Storage, flat: Tensor) -> Tensor:
        """Return whether rows of a queue are not too old, ``[n]`` bool; ``flat`` is all waiting rows, oldest first."""
        if self.age_key is None:
            return torch.arange(len(flat), device=flat.device) >= len(flat) - self.max_age - 1
        number = numbers_of(storage, self.age_key, oldest_of_row=True)
        newest = self._version if self._version is not None or not len(number) else number.max()
        return newest - number[flat] <= self.max_age

    def too_old(self) -> str:
        """Return the message of the error if all rows are too old."""
        unit = "time steps" if self.age_key is None else f"{self.age_key!r}"
        return f"all rows are older than max_age={self.max_age} ({unit}): write newer rows, or use a larger max_age"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": (None, None)}


def count_of(ranges: np.ndarray) -> int:
    return int(ranges[-1, 2]) if len(ranges) else 0


def rows_in(ranges: np.ndarray, number: Tensor) -> Tensor:
    """Return the rows with the numbers ``0 <= number < count`` among the rows in ``ranges``, ``[B]`` int64."""
    if len(ranges) <= _FEW:  # without a copy of the ranges to a device, for which the host would wait
        rows, before = number, 0
        for first, _, past in ranges.tolist():
            rows = torch.where(number >= before, number + (first - before), rows)
            before = past
        return rows
    firsts, _, ends = torch.from_numpy(ranges).to(number.device).unbind(1)
    which = torch.searchsorted(ends.contiguous(), number, right=True)
    return number + firsts[which] - torch.where(which > 0, ends[which - 1], 0)


def of_limit(name: str) -> Callable[[Any], Any]:
    """Return a getter of an attribute of a sampler's ``age_limit``; None if the sampler has no limit."""

    def get(sampler: Any) -> Any:
        return None if sampler.age_limit is None else getattr(sampler.age_limit, name)

    return get


def set_consumer_version(sampler: Any, value: Any) -> None:
    if sampler.age_limit is None:
        raise ValueError("consumer_version needs max_age and age_key: make the sampler with both")
    sampler.age_limit.consumer_version = value
