"""What the recorders of environments share: rows that fit a buffer, extras, trajectory
numbers, and writes.

Gymnasium's ``info`` is the dict of a vector environment, whose values are arrays
``[E]`` beside masks ``"_name"``, or a list of dicts, one per environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.envs.specs import (
    ACTION_MASK,
    Key,
    Paths,
    as_array,
    show_extra,
    tensors_of,
)
from rlbuf_td.envs.step_columns import REWARD, StepColumns, fill_, part_of
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import lanes_of
from rlbuf_td.storages.listeners import Attached, Listener
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.schema import Leaf, SchemaError, show_key, walk
from rlbuf_td.storages.staged_step import StagedStep
from rlbuf_td.storages.torchrl_parts import stored_rows

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer
    from rlbuf_td.storages.layout import RowLayout

_REMEDY = "make the buffer with from_env(env, ...)"
_NEXT, _HAS_READ, _LOADS = range(3)
_LOST = (
    "the episode of environment {} ended without 'final_obs' in the infos: this environment resets in the same step, "
    "and the final observation is lost. Write the steps with buffer.add_step(...) instead of the recorder. "
    "In a rollout, pass the critic's value of the final observation: next={{'state_value': ...}}. Otherwise, pass "
    "terminated=True at each end of an episode: then no value of the next observation is used"
)

Info: TypeAlias = Mapping[str, Any] | list[Mapping[str, Any]]


class TrajectoryNumbers(Attached, Listener):
    """Gives unique trajectory numbers to all recorders of a storage, in all processes
    that share the storage."""

    def __init__(self, storage: PackedStorage) -> None:
        super().__init__(storage)
        self._numbers = SharedNumbers("q", [0, 0, 0])
        if storage.shared:
            self._rows_shared()

    @property
    def loads(self) -> int:
        """How many times a checkpoint was loaded into the storage."""
        return self._numbers.values[_LOADS]

    def take(self, count: int) -> np.ndarray:
        """Return ``count`` new trajectory numbers, larger than all that are stored."""
        numbers = self._numbers
        with self.storage.lock:
            if not numbers[_HAS_READ]:
                numbers[_NEXT] = max(numbers[_NEXT], self._first_unused())
                numbers[_HAS_READ] = 1
            first = numbers[_NEXT]
            numbers[_NEXT] = first + count
        return np.arange(first, first + count)

    def _first_unused(self) -> int:
        """Return the number after the largest that is stored."""
        rows = stored_rows(self.storage)
        ids = None if rows is None else rows.get(TRAJ_KEY, None)
        if ids is None or not len(self.storage):
            return 0
        steps = len(self.storage) // lanes_of(self.storage).numel()
        return int(ids[:steps].max()) + 1

    def _rows_replaced(self, *, are_loaded: bool) -> None:
        if are_loaded:
            self._numbers[_LOADS] += 1
            self._numbers[_HAS_READ] = 0

    def _rows_shared(self) -> None:
        self._numbers.share_memory_()


@runtime_checkable
class BufferLane(Protocol):
    """What recorders need of :class:`~rlbuf_td.buffers.lane.Lane`, which is in a room
    above this one."""

    buffer: ReplayBuffer
    number: int


Target: TypeAlias = "ReplayBuffer | BufferLane"


class Recorder:
    """Writes the steps of E environments to a buffer, or those of one environment to a
    lane.

    A subclass calls :meth:`_fit` with the schema of its environments. In each step, it
    calls :meth:`_begin_step`, fills :attr:`_columns`, and calls :meth:`_write`. After
    each reset of its environments, it calls :meth:`_restart`.

    Args:
        target: a buffer, or one of its lanes, ``rb.lane(e)``.
    """

    _schema: TensorDict  # of the transitions, [E]
    _single: bool  # whether an environment's values have no dim E
    # names of the parts of a step, and where their values go
    _parts: Mapping[str, Paths] = MappingProxyType({})
    # made by the first step: the memory of a step, and what writes it
    _columns: StepColumns
    _writer: Any
    # the columns, [E, ...]; empty before the first step
    _rows: Mapping[Key, np.ndarray] = MappingProxyType({})
    _extra_keys: frozenset[Key] = frozenset()
    # the names of the extras if none is nested
    _extra_names: frozenset[str] | None = None

    def __init__(self, target: Target) -> None:
        is_lane = isinstance(target, BufferLane)
        buffer = target.buffer if is_lane else target
        # TorchRL's lack that
        if not isinstance(buffer, TensorDictReplayBuffer) or not hasattr(
            buffer, "from_env"
        ):
            name = type(buffer).__name__
            raise TypeError(
                f"buffer must be a ReplayBuffer or RolloutBuffer, or a lane rb.lane(e), got a {name}"
            )
        self.buffer = buffer
        #: The number of the lane to which this recorder writes; None: all lanes of the
        #: buffer, or a buffer ``[T]``.
        self._lane = target.number if is_lane else None
        self._is_flat = buffer.storage.ndim == 1
        self._numbers = TrajectoryNumbers.of(buffer.storage)
        # how many loads there had been at the last reset
        self._loads = self._numbers.loads

    # -- rows

    @property
    def _is_transformed(self) -> bool:
        """Whether a transform may change rows before they are written."""
        return bool(len(self.buffer.transform))

    def _fit(self, schema: TensorDict, *, single: bool) -> None:
        """Reserve rows like ``schema``, ``[E]``, in the buffer, or check that its rows
        match.

        Raises:
            SchemaError: the transitions do not fit the buffer's rows or lanes.
            ValueError: the buffer cannot write single lanes.
        """
        self._single = single
        self._lanes = len(schema)
        self._trajectories = np.zeros(self._lanes, np.int64)
        if self._lanes > 1 and (self._is_flat or self._lane is not None):
            where = "rows [T] hold"
            if self._lane is not None:
                where = f"lane {self._lane} holds"
            raise SchemaError(
                f"{where} the transitions of one environment, got {self._lanes} environments: "
                f"record them in a buffer [T, {self._lanes}], or one of them here"
            )
        if self._lane is not None and not self.buffer.takes_lanes:
            raise ValueError(
                f"a {type(self.buffer.writer).__name__} of this buffer writes whole "
                "time steps, and no single lane: use a ReplayBuffer with a "
                "RingWriter, or record all lanes with one recorder"
            )
        schema.set(
            TRAJ_KEY, torch.empty(schema.shape, dtype=torch.int64, device="meta")
        )
        storage = self.buffer.storage
        with storage.lock:  # recorders of other lanes may be made, or write first rows
            if storage.layout is None:
                storage.reserve(self._time_step(schema))
            self._fit_rows(storage, schema)
        self._schema = schema

    def _time_step(self, schema: TensorDict) -> TensorDict:
        """Return the schema of a time step of the buffer, ``[]`` or ``[E]``, for the
        schema of the environments."""
        if self._is_flat:
            return cast("TensorDict", schema[0])
        if self._lane is None:
            return schema
        return schema.expand(self.buffer.storage.lane_count)

    def _fit_rows(self, storage: PackedStorage, schema: TensorDict) -> None:
        """Check the rows, and give rewards in ``schema`` the dtype and shape that they
        have there."""
        lanes = tuple(self._time_step(schema).shape)
        if tuple(storage.lanes) != lanes:
            raise SchemaError(
                f"the buffer has lanes {tuple(storage.lanes)}, the environment {lanes}: {_REMEDY}"
            )
        layout = cast("RowLayout", storage.layout)
        for key, value in list(walk(schema)):
            leaf = layout.leaf(key)
            if leaf is None:
                self._refuse_missing(key, value)
            else:
                self._fit_leaf(schema, key, leaf)

    def _fit_leaf(self, schema: TensorDict, key: Key, leaf: Leaf) -> None:
        """Check one entry of the rows; rewards and action masks are as in the rows."""
        value = schema.get(key)
        is_reward = key[-1] == "reward" and leaf.dtype.is_floating_point
        wider = torch.promote_types(value.dtype, leaf.dtype)
        if is_reward and self._is_transformed and leaf.dtype != wider:
            return  # rows hold what a transform leaves of it
        if key == REWARD and is_reward:
            value = value.new_empty((self._lanes, *leaf.shape))
        # rows hold them as the extras or a space say
        if is_reward or key[-1] == ACTION_MASK:
            value = value.to(leaf.dtype)
            schema.set(key, value)
        shape = value.shape[1:]
        is_alike = (value.dtype, shape) == (leaf.dtype, leaf.shape)
        if not is_alike and not self._is_transformed:
            raise SchemaError(
                f"the environment gives {show_key(key)} as {value.dtype} of shape "
                f"{tuple(shape)}, the buffer's rows hold {leaf.dtype} of shape "
                f"{tuple(leaf.shape)}: {_REMEDY}"
            )

    def _refuse_missing(self, key: Key, value: torch.Tensor) -> None:
        """Raise a SchemaError if the buffer's rows have no entry ``key``, and the first
        write can no longer add it."""
        storage = self.buffer.storage
        if (
            self._is_transformed  # a transform may leave it out
            or storage.is_reserved
            or storage.layout is None
            or key in storage.layout.places
        ):
            return
        example = show_extra(key, value[0] if self._single else value)
        raise SchemaError(
            f"the buffer's rows have no {show_key(key)}, which the recorder writes, "
            "and can no longer get it: make the buffer with from_env(env, ..., "
            f"{example})"
        )

    def _begin_step(self, extras: Mapping[str, object]) -> None:
        """Fill the trajectory numbers and the extras; the first step makes the memory
        of the rows."""
        if extras.keys() == self._extra_names:
            for name, value in extras.items():
                fill_(self._columns.values[name,], value, (name,))
            return
        values = dict(walk(extras)) if extras else {}
        if not self._rows:
            self._make_rows(values)
        if values.keys() != self._extra_keys:
            names = sorted(map(show_key, values))
            first_names = sorted(map(show_key, self._extra_keys))
            raise SchemaError(
                f"this step has the extras {names}, the first step had {first_names}: pass the same extras"
            )
        for key, value in values.items():
            fill_(self._columns.values[key], value, key)

    def _make_rows(self, extras: Mapping[Key, object]) -> None:
        """Allocate the staged step for the entries of the schema and the ``extras``,
        and its writer."""
        schema = self._schema.copy()
        for key, value in extras.items():
            self._add_entry(schema, key, tensors_of(as_array(value, key), *key))
        staged = StagedStep.like(schema, self._is_flat)
        self._columns = StepColumns(staged, self._single, self._parts)
        self._writer = self.buffer.step_writer(staged, self._lane)
        self._rows = staged.columns
        self._extra_keys = frozenset(extras)
        if all(len(key) == 1 for key in extras):
            self._extra_names = frozenset(key[0] for key in extras)
        self._rows[TRAJ_KEY][...] = self._trajectories

    def _add_entry(self, schema: TensorDict, key: Key, value: torch.Tensor) -> None:
        """Add an entry to the schema of the rows, with the dims of an environment's
        values."""
        if schema.get(key, None) is not None or key == ("next",):
            raise SchemaError(
                f"the extra {show_key(key)} has the name of an entry that the environment returns"
            )
        value = value[None] if self._single else value
        if value.shape[:1] != schema.shape:
            raise SchemaError(
                f"{show_key(key)} has shape {tuple(value.shape)}, expected first dim {self._lanes}"
            )
        self._refuse_missing(key, value)
        schema.set(key, value)

    def _write(self, lanes: np.ndarray | None = None) -> None:
        """Write the rows of ``lanes``, a mask ``[E]``; None: one for each
        environment."""
        self._writer.write(self.buffer, lanes)

    # -- episodes

    @property
    def is_interrupted(self) -> bool:
        """Whether a checkpoint was loaded into the buffer, or the buffer got another
        storage, since the last reset."""
        numbers = self._numbers
        return self._loads != numbers.loads or not numbers.serves(self.buffer.storage)

    def _restart(self, lanes: np.ndarray) -> None:
        """Begin new trajectories in ``lanes``, a mask ``[E]``, after a reset."""
        self._numbers = TrajectoryNumbers.of(self.buffer.storage)
        self._loads = self._numbers.loads
        self._begin(lanes)

    def _begin(self, lanes: np.ndarray) -> None:
        """Give the next rows of ``lanes``, a mask ``[E]``, new trajectory numbers."""
        count = int(np.count_nonzero(lanes))
        if count:
            self._trajectories[lanes] = self._numbers.take(count)
            if self._rows:
                self._rows[TRAJ_KEY][...] = self._trajectories


def fill_final_(
    columns: Mapping[Key, np.ndarray], paths: Paths, info: Info, done: np.ndarray
) -> None:
    """In lanes where ``done`` is True, replace the next observation by ``final_obs``
    from the infos."""
    for lane in done.nonzero()[0].tolist():
        if isinstance(info, list):
            observation = info[lane].get("final_obs")
        else:
            observation = _of_lane(info.get("final_obs"), lane)
        if observation is None:
            raise RuntimeError(_LOST.format(lane))
        for key, path in paths:
            fill_(columns[key][lane, ...], part_of(observation, path), key)


def _of_lane(value: Any, lane: int) -> Any:
    """Return one environment's part of observations with a dim E, or of an array of
    them."""
    if isinstance(value, Mapping):
        return {key: _of_lane(part, lane) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_of_lane(part, lane) for part in value)
    return None if value is None else value[lane]


def info_of(info: Info, path: Key, lane: int) -> Any:
    """Return the info of a lane at ``path``; None if it is missing."""
    value: Any = info[lane] if isinstance(info, list) else info
    for part in path:
        if not isinstance(value, Mapping) or part not in value:
            return None
        mask = None if isinstance(info, list) else value.get(f"_{part}")
        if mask is not None and not mask[lane]:
            return None
        value = value[part]
    return value if isinstance(info, list) else value[lane]


def fill_info_(
    column: np.ndarray,
    path: Key,
    default: object,
    info: Info,
    lanes: np.ndarray,
    ended: np.ndarray,
) -> None:
    """Copy an info to ``lanes`` of a column; where ``ended`` is True, ``"final_info"``
    takes precedence."""
    for lane in lanes.nonzero()[0].tolist():
        value = info_of(info, ("final_info", *path), lane) if ended[lane] else None
        value = info_of(info, path, lane) if value is None else value
        fill_(column[lane, ...], default if value is None else value, ("next", *path))
