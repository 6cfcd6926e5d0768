"""What the recorders of environments share: rows that fit a buffer, extras, trajectory numbers, and writes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.envs.columns import fill_, to_array
from rlbuf_td.envs.specs import ACTION_MASK, Key, show_extra, tensors_of
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import attached_or_new, lanes_of, stored_rows
from rlbuf_td.storages.listeners import Attached
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.schema import SchemaError, show_key, walk

REWARD: Key = ("next", "reward")
_REMEDY = "make the buffer with from_env(env, ...)"
_NEXT, _HAS_READ, _LOADS = range(3)


class TrajectoryNumbers(Attached):
    """Gives unique trajectory numbers to all recorders of a storage, in all processes that share the storage."""

    def __init__(self, storage: PackedStorage) -> None:
        super().__init__(storage)
        self._numbers = SharedNumbers("q", [0, 0, 0])

    @property
    def loads(self) -> int:
        """How many times a checkpoint was loaded into the storage."""
        return self._numbers.values[_LOADS]

    def take(self, count: int) -> np.ndarray:
        """Return ``count`` new trajectory numbers, larger than all that are stored."""
        with self.storage.lock:
            first, numbers = self._numbers[_NEXT], self._numbers
            rows = None if numbers[_HAS_READ] else stored_rows(self.storage)
            stored = None if rows is None else rows.get(TRAJ_KEY, None)
            if stored is not None and len(self.storage):
                steps = len(self.storage) // lanes_of(self.storage).numel()
                first = max(first, int(stored[:steps].max()) + 1)
            numbers[_NEXT], numbers[_HAS_READ] = first + count, 1
        return np.arange(first, first + count)

    def mark_update(self, index: object) -> None:
        """Do nothing; writers call this method after each write."""

    def mark_load(self) -> None:
        self._numbers[_LOADS], self._numbers[_HAS_READ] = self.loads + 1, 0

    def share_memory_(self) -> None:
        self._numbers.share_memory_()


@runtime_checkable
class BufferLane(Protocol):
    """What recorders need of :class:`~rlbuf_td.buffers.lane.Lane`, which is in a room above this one."""

    buffer: TensorDictReplayBuffer
    number: int


Target: TypeAlias = TensorDictReplayBuffer | BufferLane


class Recorder:
    """Writes the steps of E environments to a buffer, or those of one environment to a lane.

    A subclass calls :meth:`_fit` with the schema of its environments. In each step, it calls :meth:`_begin_step`, fills
    the :attr:`_columns` of the rows, and calls :meth:`_write_step`.

    Args:
        target: a buffer, or one of its lanes, ``rb.lane(e)``.
    """

    _schema: TensorDict  # of the transitions, [E]
    _single: bool  # whether an environment's values have no dim E
    _rows: Mapping[Key, np.ndarray] = MappingProxyType({})  # the columns, [E, ...]; empty before the first step
    _columns: Mapping[Key, np.ndarray]  # the same, with the dims of an environment's values
    _step: TensorDict  # the rows as the buffer takes them, in the same memory
    _extra_keys: frozenset[Key] = frozenset()

    def __init__(self, target: Target) -> None:
        #: The number of the lane to which this recorder writes; None: all lanes of the buffer, or a buffer ``[T]``.
        self._lane = target.number if isinstance(target, BufferLane) else None
        self.buffer = _checked(target.buffer if isinstance(target, BufferLane) else target)
        self._flat = self.buffer.storage.ndim == 1
        self._numbers = attached_or_new(self.buffer.storage, TrajectoryNumbers)
        self._loads = self._numbers.loads

    # -- rows

    def _fit(self, schema: TensorDict, *, single: bool) -> None:
        """Reserve rows like ``schema``, ``[E]``, in the buffer, or check that its rows match.

        Raises:
            SchemaError: the transitions do not fit the buffer's rows or lanes.
            ValueError: the buffer cannot write single lanes.
        """
        self._single, self._lanes = single, len(schema)
        self._trajectories = np.zeros(self._lanes, np.int64)
        self._refuse_lanes()
        schema.set(TRAJ_KEY, torch.empty(schema.shape, dtype=torch.int64, device="meta"))
        storage = self.buffer.storage
        with storage.lock:  # recorders of other lanes may be made, or write first rows
            if storage.layout is None:
                storage.reserve(self._time_step(schema))
            self._fit_rows(storage, schema)
        self._schema = schema

    def _refuse_lanes(self) -> None:
        if self._lanes > 1 and (self._flat or self._lane is not None):
            where = f"lane {self._lane} holds" if self._lane is not None else "rows [T] hold"
            fault = f"{where} the transitions of one environment, got {self._lanes} environments"
            raise SchemaError(f"{fault}: record them in a buffer [T, {self._lanes}], or one of them here")
        if self._lane is not None and not self.buffer.takes_lanes:
            fault = f"a {type(self.buffer.writer).__name__} of this buffer writes whole time steps, and no single lane"
            raise ValueError(f"{fault}: use a ReplayBuffer with a RingWriter, or record all lanes with one recorder")

    def _time_step(self, schema: TensorDict) -> TensorDict:
        """Return the schema of a time step of the buffer, ``[]`` or ``[E]``, for the schema of the environments."""
        if self._flat:
            return schema[0]
        return schema if self._lane is None else schema.expand(self.buffer.storage.lane_count)

    def _fit_rows(self, storage: PackedStorage, schema: TensorDict) -> None:
        """Check the rows, and give rewards in ``schema`` the dtype and shape that they have there."""
        lanes = tuple(self._time_step(schema).shape)
        if tuple(storage.lanes) != lanes:
            raise SchemaError(f"the buffer has lanes {tuple(storage.lanes)}, the environment {lanes}: {_REMEDY}")
        stored = {} if storage.layout is None else {leaf.key: leaf for leaf in storage.layout.leaves}
        for key, value in list(walk(schema)):
            leaf = stored.get(key)
            if leaf is None:
                self._refuse_missing(key, value)
            elif key == REWARD and leaf.dtype.is_floating_point:  # as the extras or the reward space say
                schema.set(key, torch.empty((self._lanes, *leaf.shape), dtype=leaf.dtype, device="meta"))
            elif value.shape[1:] == leaf.shape and _may_be(key, leaf.dtype):
                schema.set(key, value.to(leaf.dtype))
            elif (value.dtype, value.shape[1:]) != (leaf.dtype, leaf.shape):
                given = f"the environment gives {show_key(key)} as {value.dtype} of shape {tuple(value.shape[1:])}"
                stored_as = f"the buffer's rows hold {leaf.dtype} of shape {tuple(leaf.shape)}"
                raise SchemaError(f"{given}, {stored_as}: {_REMEDY}")

    def _refuse_missing(self, key: Key, value: torch.Tensor) -> None:
        """Raise a SchemaError if the buffer's rows have no entry ``key``, and the first write can no longer add it."""
        storage = self.buffer.storage
        if storage.is_reserved or storage.layout is None or key in storage.layout.places:
            return
        fault = f"the buffer's rows have no {show_key(key)}, which the recorder writes, and can no longer get it"
        remedy = f"make the buffer with from_env(env, ..., {self._show(key, value)})"
        raise SchemaError(f"{fault}: {remedy}")

    def _show(self, key: Key, value: torch.Tensor) -> str:
        """Return the argument ``extras=`` of ``from_env`` for an entry ``[E, ...]``."""
        return show_extra(key, value[0] if self._single else value)

    def _begin_step(self, extras: Mapping[str, object]) -> None:
        """Fill the trajectory numbers and the extras; the first step makes the memory of the rows."""
        given = dict(walk(extras))
        if not self._rows:
            self._make_rows(given)
        if given.keys() != self._extra_keys:
            now, first = (sorted(map(show_key, keys)) for keys in (given, self._extra_keys))
            raise SchemaError(f"this step has the extras {now}, the first step had {first}: pass the same extras")
        self._rows[TRAJ_KEY][...] = self._trajectories
        for key, value in given.items():
            fill_(self._columns[key], value, key)

    def _make_rows(self, extras: Mapping[Key, object]) -> None:
        """Make memory for a row of each environment, with the keys of the first step's extras."""
        schema = self._schema.copy()
        for key, value in extras.items():
            self._add_entry(schema, key, tensors_of(to_array(value), *key))
        rows = schema.apply(lambda x: torch.zeros(x.shape, dtype=x.dtype, device="cpu"), device=torch.device("cpu"))
        self._step, self._extra_keys = rows[0] if self._flat else rows, frozenset(extras)
        self._rows = {key: x.numpy() for key, x in walk(rows)}
        self._columns = {key: x[0, ...] for key, x in self._rows.items()} if self._single else self._rows

    def _add_entry(self, schema: TensorDict, key: Key, value: torch.Tensor) -> None:
        """Add an entry to the schema of the rows, with the dims of an environment's values."""
        if schema.get(key, None) is not None or key == ("next",):
            raise SchemaError(f"the extra {show_key(key)} has the name of an entry that the environment returns")
        value = value[None] if self._single else value
        if value.shape[:1] != schema.shape:
            raise SchemaError(f"{show_key(key)} has shape {tuple(value.shape)}, expected first dim {self._lanes}")
        if not len(self.buffer.transform):  # a transform may leave it out
            self._refuse_missing(key, value)
        schema.set(key, value)

    # -- writes

    def _write_step(self) -> None:
        """Write the rows, one for each environment."""
        self._write(self._step, self._lane)

    def _write(self, rows: TensorDict, lanes: int | np.ndarray | None = None) -> None:
        """Write the next row of each of ``lanes``; None: of all lanes."""
        rows = rows.clone() if len(self.buffer.transform) else rows  # a transform may modify them
        if lanes is None:
            self.buffer.add(rows)
        else:
            self.buffer.extend(rows, lanes=lanes)

    # -- episodes

    def _begin(self, lanes: np.ndarray) -> None:
        """Give the next rows of ``lanes``, a mask ``[E]``, new trajectory numbers."""
        count = int(np.count_nonzero(lanes))
        if count:
            self._trajectories[lanes] = self._numbers.take(count)

    def notice_load(self) -> None:
        """If a checkpoint was loaded into the buffer, interrupt all episodes."""
        if self._loads != self._numbers.loads:
            self._interrupt()
            self._loads = self._numbers.loads

    def _interrupt(self) -> None:
        """Let a reset follow."""
        raise NotImplementedError


def _may_be(key: Key, dtype: torch.dtype) -> bool:
    """Whether rows may hold an entry in ``dtype``, because extras or spaces say so: rewards and action masks."""
    return key[-1] == ACTION_MASK or (key[-1] == "reward" and dtype.is_floating_point)


def _checked(buffer: object) -> TensorDictReplayBuffer:
    """Return a buffer; raise a TypeError if it is not one of this package over a :class:`PackedStorage`."""
    if not isinstance(buffer, TensorDictReplayBuffer) or not hasattr(buffer, "from_env"):  # TorchRL's lack that
        name = type(buffer).__name__
        raise TypeError(f"buffer must be a ReplayBuffer or RolloutBuffer, or a lane rb.lane(e), got a {name}")
    return buffer
