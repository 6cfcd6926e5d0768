"""What the recorders of a storage share, and what they save and restore to go on in mid-episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td.envs.infos import to_array
from rlbuf_td.envs.specs import Key, entries
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import require_packed
from rlbuf_td.storages.indexing import lanes_of, stored_rows
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.listeners import Attached
from rlbuf_td.storages.schema import kind, show_key
from rlbuf_td.storages.shared.memory import SharedNumbers

_NEXT, _HAS_READ, _LOADS = range(3)


class TrajectoryNumbers(Attached):
    """Gives unique trajectory numbers to all recorders of a storage, in all processes that share the storage."""

    def __init__(self, storage: PackedStorage) -> None:
        super().__init__(storage)
        self.recorders: WeakSet[Any] = WeakSet()  # the recorders of this process
        self._numbers = SharedNumbers("q", [0, 0, 0])

    @property
    def loads(self) -> int:
        """How many times a checkpoint was loaded into the storage."""
        return self._numbers.values[_LOADS]

    def take(self, count: int, key: tuple[str, ...] | None) -> np.ndarray:
        """Return ``count`` new trajectory numbers, larger than all numbers stored at ``key``."""
        with self.storage.lock:
            first, numbers = self._numbers[_NEXT], self._numbers
            rows = None if numbers[_HAS_READ] else stored_rows(self.storage)
            stored = None if rows is None or key is None else rows.get(key, None)
            if stored is not None and len(self.storage):
                steps = len(self.storage) // lanes_of(self.storage).numel()
                first = max(first, int(stored[:steps].max()) + 1)
            numbers[_NEXT], numbers[_HAS_READ] = first + count, 1
        return np.arange(first, first + count)

    @property
    def next_number(self) -> int:
        """The number that :meth:`take` gives next, unless larger ones are stored."""
        return self._numbers[_NEXT]

    def go_on(self, number: int) -> None:
        """Give next what another process, which a recorder's state is from, would have given next."""
        with self.storage.lock:
            self._numbers[_NEXT], self._numbers[_HAS_READ] = max(number, self._numbers[_NEXT]), 1

    def mark_update(self, index: Any) -> None:
        """Do nothing; writers call this method after each write."""

    def mark_load(self) -> None:
        self._numbers[_LOADS], self._numbers[_HAS_READ] = self.loads + 1, 0

    def share_memory_(self) -> None:
        self._numbers.share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "recorders"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, recorders=WeakSet())


@runtime_checkable
class BufferLane(Protocol):
    """What recorders need of :class:`~rlbuf_td.buffers.lane.Lane`, which is in a room above this one."""

    buffer: TensorDictReplayBuffer
    number: int


def checked_buffer(buffer: Any) -> TensorDictReplayBuffer:
    """Return a buffer; raise a TypeError if it is not one of this package over a :class:`PackedStorage`."""
    if not isinstance(buffer, TensorDictReplayBuffer) or not hasattr(buffer, "from_env"):  # TorchRL's lack that
        name = type(buffer).__name__
        raise TypeError(f"buffer must be a ReplayBuffer or RolloutBuffer, or a lane rb.lane(e), got a {name}")
    require_packed(buffer.storage, "a recorder", "write the transitions of make_transition with rb.add")
    return buffer


def copied(observation: Any) -> Any:
    """Return a copy of an observation as a tensor, or as nested dicts of tensors, with the dtypes that it has."""
    parts = entries(observation)
    if parts is not None:
        return {key: copied(part) for key, part in parts.items()}
    array = to_array(observation)
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))


def refuse_other(own: Mapping[str, Any], saved: Mapping[str, Any], whose: str) -> None:
    """Raise a ValueError if two dicts of settings differ."""
    for name, mine in own.items():
        if name not in saved or saved[name] != mine:
            raise ValueError(f"{whose} has {name} {saved.get(name)!r}, this recorder {mine!r}")


def array_of(state: Mapping[str, Any], name: str, like: np.ndarray) -> np.ndarray:
    """Return a copy of a saved tensor as an array; raise a ValueError unless it has the shape and dtype of ``like``."""
    found = state[name].numpy()
    if (found.shape, found.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"the saved {name} are {found.dtype} of shape {found.shape}, expected {like.dtype} {like.shape}"
        )
    return found.copy()


def buffer_state(buffer: Any, numbers: TrajectoryNumbers) -> dict[str, Any]:
    """Return what a load of the buffer forgets because other recorders could go on, and what identifies its rows."""
    stats = buffer.episode_stats
    return {
        "write_count": int(buffer.write_count),
        "next_number": numbers.next_number,
        "stats": None if stats is None else stats.state_dict(),
    }


def refuse_other_rows(buffer: Any, saved: Mapping[str, Any]) -> None:
    """Raise a ValueError if the buffer does not hold the rows that it held when the state was saved."""
    count = saved["write_count"]
    if type(count) is not int or type(saved["next_number"]) is not int or count != buffer.write_count:
        has = f"the buffer's write_count is {buffer.write_count}, and was {count} when the state was saved"
        raise ValueError(f"{has}: load the buffer first, from a dump of the same moment")


def resume_buffer(buffer: Any, numbers: TrajectoryNumbers, saved: Mapping[str, Any]) -> None:
    """Let the next rows continue the trajectories and the statistics of the newest rows, which a load has ended."""
    if buffer.episode_stats is not None and saved["stats"] is not None:
        buffer.episode_stats.load_state_dict(saved["stats"])
    numbers.go_on(saved["next_number"])
    if buffer.storage.episodes is not None:
        buffer.storage.episodes.resume()


def saved_rows(layout: RowLayout) -> list[list[Any]]:
    """Return the entries of rows as plain values, in the order in which rows hold them."""
    return [[[*leaf.key], str(leaf.dtype).removeprefix("torch."), [*leaf.shape]] for leaf in layout.leaves]


def schema_of_rows(rows: list[list[Any]], lanes: int, expected: TensorDict, storage: Any) -> TensorDict:
    """Return the schema, ``[E]``, of saved rows; raise a ValueError if it lacks entries of ``expected`` or the storage.

    The shapes of rewards may differ from the expected ones, because the first step tells them.
    """
    schema = TensorDict({}, [lanes])
    for key, dtype, shape in rows:
        schema.set(tuple(key), torch.empty((lanes, *shape), dtype=getattr(torch, dtype), device="meta"))
    stored = getattr(getattr(storage, "layout", None), "places", {}) if len(storage) else {}
    for key in expected.keys(True, True):
        path: Key = key if isinstance(key, tuple) else (key,)
        found, wanted = schema.get(path, None), expected[path]
        if found is None or found.dtype is not wanted.dtype or ("reward" not in path and found.shape != wanted.shape):
            got = None if found is None else kind(found.dtype, found.shape[1:])
            raise ValueError(
                f"the saved rows have {show_key(path)} as {got}, here {kind(wanted.dtype, wanted.shape[1:])}"
            )
    for path, place in stored.items():
        leaf, found = storage.layout.leaves[place], schema.get(path, None)
        if found is not None and (found.dtype, found.shape[1:]) != (leaf.dtype, leaf.shape):
            given, rows_hold = kind(found.dtype, found.shape[1:]), kind(leaf.dtype, leaf.shape)
            raise ValueError(f"the saved rows have {show_key(path)} as {given}, the buffer's rows as {rows_hold}")
    return schema
