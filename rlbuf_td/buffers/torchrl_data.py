"""Creates buffers from TorchRL's replay buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import RoundRobinWriter, Storage, Writer

from rlbuf_td.buffers.flow import count_imported
from rlbuf_td.checkpoint.folder import progress_bar
from rlbuf_td.envs.minari_episodes import TRAJECTORY
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.indexing import lanes_of
from rlbuf_td.storages.writes import is_key
from rlbuf_td.writers.common import steps_by_age

_READ_AT_ONCE = 1 << 26  # bytes


def from_torchrl(
    cls: Any,
    /,
    rb: Any,
    capacity: int | None = None,
    *,
    copy: bool = True,
    exclude: NestedKey | Sequence[NestedKey] = (),
    trajectory_key: NestedKey | None = "episode",
    progress: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Return a buffer with the rows of a TorchRL buffer (a data set of ``torchrl.data.datasets``, for example).

    The rows are copied without transforms, oldest first if ``rb`` has a round-robin writer. With ``scratch_dir``, the
    rows may exceed RAM.

    TorchRL's ``LeRobotExperienceReplay`` reads LeRobot data sets (needs ``torchrl[vla]``). In LeRobot data, exclude
    instructions (strings) and videos: ``exclude=["language_instruction", ("observation", "image", "camera")]``.

    Args:
        rb: a replay buffer of TorchRL whose rows are TensorDicts; the import does not change its rows.
        capacity: the capacity of the new buffer in transitions, default: the capacity of ``rb``.
        copy: ``False`` uses the storage of ``rb`` without a copy; each buffer then sees the other buffer's writes.
        exclude: a list of keys to omit, such as the keys of strings, or one key.
        trajectory_key: the key of episode numbers in ``rb``. The import renames this key to
            ``("collector", "traj_ids")``, unless the rows already have that entry.
        progress: whether to show a progress bar (needs tqdm); by default, only on a terminal for 1 GiB of data or more.
        **kwargs: keywords of :meth:`from_schema` or, if ``copy=False``, of the buffer's class: ``sampler``,
            ``batch_size`` (default: that of ``rb``), ...

    Raises:
        RuntimeError: ``rb`` is empty.
        TypeError: ``rb`` is not a replay buffer, or its rows are not TensorDicts.
        KeyError: the rows have no entry at a key in ``exclude``.
        ValueError: ``rb`` has more rows than ``capacity``, ``storage`` is given, or ``copy=False`` comes with
            ``capacity`` or ``exclude``.
        SchemaError: an entry does not consist of numbers, and is not excluded.
        MemoryError: the rows are larger than RAM, and no ``scratch_dir`` is given.

    Cost: a read and a write of each row; none with ``copy=False``.

    Example:
        >>> from rlbuf_td import ReplayBuffer
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        >>> _ = theirs.extend(TensorDict({"x": torch.arange(6)}, [6]))
        >>> rb = ReplayBuffer.from_torchrl(theirs)
        >>> rb.storage["x"], rb.batch_size
        (tensor([2, 3, 4, 5]), 2)
    """
    if not hasattr(rb, "storage") or not hasattr(rb, "writer"):
        raise TypeError(f"from_torchrl imports a replay buffer with a storage and a writer, got a {type(rb).__name__}")
    storage: Any = rb.storage
    exclude = [exclude] if is_key(exclude) else exclude
    kwargs.setdefault("batch_size", rb.batch_size)
    _restore_cursor(rb, storage)
    if not copy:
        if capacity is not None or exclude or "storage" in kwargs:
            raise ValueError("copy=False uses a storage as it is: omit capacity, exclude and storage, or copy")
        new = cls(storage=storage, **kwargs)
        count_imported(new, new.flow)
        return new
    steps, lanes = _steps(rb.writer, storage), lanes_of(storage).numel()
    if capacity is not None and capacity < len(steps) * lanes:
        raise ValueError(f"the buffer holds {len(steps) * lanes:,} transitions, more than the capacity of {capacity:,}")
    first = _chosen(storage.get(steps[:1]), exclude, trajectory_key)
    new = cls.from_schema(first[0], capacity or storage.max_size, **kwargs)
    row_bytes = new.storage.row_bytes
    with progress_bar("copying", len(steps) * lanes * row_bytes, progress) as report:
        for part in steps.split(max(1, _READ_AT_ONCE // (row_bytes * lanes))):
            new.writer.extend(_chosen(storage.get(part), exclude, trajectory_key))
            report(len(part) * lanes * row_bytes)
    count_imported(new, new.flow)
    return new


def _restore_cursor(rb: Any, storage: Any) -> None:
    """Tell a full TorchRL storage which time step is the newest; TorchRL's ``loads`` does not restore this."""
    last = torchrl_parts.last_of_ring(rb) if torchrl_parts.is_full(storage) else None
    if last is not None and not isinstance(storage, PackedStorage):
        torchrl_parts.set_newest_step(storage, last % (len(storage) // lanes_of(storage).numel()))


def _steps(writer: Writer, storage: Storage) -> torch.Tensor:
    """Return the indices of the written time steps, oldest first if the writer is a round-robin writer."""
    if not len(storage):
        raise RuntimeError("the buffer is empty: there is nothing to import")
    if isinstance(writer, RoundRobinWriter):
        return steps_by_age(writer, storage, None)
    return torch.arange(len(storage) // lanes_of(storage).numel(), device="cpu")


def _chosen(rows: Any, exclude: Any, trajectory_key: NestedKey | None) -> TensorDictBase:
    """Omit the keys in ``exclude`` from rows, and rename ``trajectory_key`` to ``("collector", "traj_ids")``."""
    if not isinstance(rows, TensorDictBase):
        raise TypeError(f"from_torchrl imports rows that are TensorDicts, this buffer holds a {type(rows).__name__}")
    keys = rows.keys(include_nested=True)
    if missing := [key for key in exclude if not is_key(key) or key not in keys]:
        raise KeyError(f"cannot exclude {missing}: exclude takes a list of keys of the rows, {[*rows.keys()]}")
    rows = rows.exclude("index", *exclude)
    if trajectory_key is None or rows.get(TRAJECTORY, None) is not None or rows.get(trajectory_key, None) is None:
        return rows
    return rows.exclude(trajectory_key).set(TRAJECTORY, rows.get(trajectory_key))
