"""The stored rows as the doctor reads them: columns, their order in time, and where trajectories are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import (
    ImmutableDatasetWriter,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    Storage,
    TensorStorage,
    Writer,
)

from rlbuf_td.diagnostics.doctor.report import NAMED, Row
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.dedup.rows import PooledRows
from rlbuf_td.storages.schema import walk
from rlbuf_td.storages.trajectory_index import TRAJ_KEY, TrajectoryIndex

Key: TypeAlias = tuple[str, ...]
#: What lies under "next", and at the root too, without being what the following row begins with.
_OTHERS = {"reward", "done", "terminated", "truncated", "state_value", "index"}
_BLOCK_BYTES = 4 << 20


class SharedColumn:
    """A column that rows share, ``[T, E, ...]``: what is asked of it is read then.

    Args:
        rows: of a storage.
        key: of the column.
        steps: how many time steps are written.
    """

    def __init__(self, rows: PooledRows, key: Key, steps: int) -> None:
        self._rows, self._key = rows, key
        leaf = rows.pooling.leaves[key]
        self._tail = tuple(leaf.shape) or (1,)
        lanes = rows.cells // rows.steps
        self.shape, self.ndim = torch.Size([steps, lanes, *self._tail]), 2 + len(self._tail)
        self.dtype, self.device = leaf.dtype, rows.matrix.device
        self._cells = torch.arange(steps * lanes, device=self.device).view(steps, lanes)

    def __getitem__(self, index: Any) -> torch.Tensor:
        cells = self._cells[index]
        return self._rows.column_at(self._key, cells).view((*cells.shape, *self._tail))

    def __len__(self) -> int:
        return len(self._cells)

    def element_size(self) -> int:
        """Return bytes a number."""
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Return whether numbers are real and not whole."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Return whether numbers are complex."""
        return self.dtype.is_complex


class Record:
    """What there is to read of a buffer: ``[T, E]`` rows, lanes flattened.

    Args:
        storage: of TensorDicts of tensors, written at least once.
        writer: what wrote it, if that is known.
        ignore: keys not to look at.

    Attributes:
        columns: each key's rows, ``[T, E, ...]`` with at least one dim more, views (or read when they are asked for).
        shape: ``[T, *lanes]``.
        newest: the time step that was written last.
        paired: ``[T, E]`` bool, on the CPU: does the lane go on, in whatever trajectory, with step ``t + 1`` of the
            ring? ``None`` if rows do not lie in the order of time.
        cut: ``[T, E]`` bool: the trajectory ends with this row, or does not go on with the next one for another reason.
            ``None`` if that is not told.
        skipped: what cannot be checked, and why.
    """

    def __init__(self, storage: Storage, writer: Writer | None, ignore: tuple[Key, ...] = ()) -> None:
        if not len(storage):
            raise ValueError("the buffer is empty: there is nothing to read")
        rows = getattr(storage, "_storage", None)
        if not isinstance(rows, TensorDictBase):
            raise TypeError(
                "the doctor reads storages of TensorDicts (PackedStorage, LazyTensorStorage, "
                f"LazyMemmapStorage), not a {type(storage).__name__} of {type(rows).__name__}"
            )
        lanes = tuple(rows.shape[1 : storage.ndim])
        self.lanes = torch.Size(lanes).numel()
        self.steps = len(storage) // self.lanes
        self.shape = (self.steps, *lanes)
        self.columns: dict[Key, Any] = {
            key: value[: self.steps].view(self.steps, self.lanes, *(value.shape[storage.ndim :] or (1,)))
            for key, value in walk(rows)
            if isinstance(value, torch.Tensor) and key not in ignore
        }
        if isinstance(storage, PackedStorage) and isinstance(storage._rows, PooledRows):
            for key in storage._rows.pooling.places:
                if key not in ignore:
                    self.columns[key] = SharedColumn(storage._rows, key, self.steps)
        self.skipped: list[str] = []
        cursor = storage._last_cursor_index
        self.newest = self.steps - 1 if cursor is None or not 0 <= int(cursor) < self.steps else int(cursor)
        if self.steps < len(rows):  # not yet full
            self.newest = self.steps - 1
        self.paired: torch.Tensor | None = None
        self.cut: torch.Tensor | None = None
        index = next((each for each in storage._attached_entities if isinstance(each, TrajectoryIndex)), None)
        if index is None and not isinstance(writer, RoundRobinWriter | ImmutableDatasetWriter | None):
            self.skipped.append(f"the order of rows, which a {type(writer).__name__} does not keep")
            return
        self.paired = torch.ones(self.steps, self.lanes, dtype=torch.bool)
        self.paired[self.newest] = False
        self._find_cuts(storage, index)

    def _find_cuts(self, storage: Storage, index: TrajectoryIndex | None) -> None:
        done_key = next((key for key in self._flags("done", "terminated", "truncated")), None)
        if done_key is None and TRAJ_KEY not in self.columns:
            self.skipped.append("trajectories: neither done flags nor trajectory ids are stored")
            return
        index = index or TrajectoryIndex(storage, done_key=(*(done_key or ("next",))[:-1], "done"))
        self.cut = torch.empty(self.steps * self.lanes, dtype=torch.bool)
        over = torch.empty_like(self.cut)
        try:
            for rows in torch.arange(len(self.cut)).split(1 << 16):
                _, ahead, ended = index.reach(rows.to(self.device))
                self.cut[rows], over[rows] = ahead.cpu() == 0, ended.cpu()
        except TypeError as error:
            self.cut = None
            self.skipped.append(f"trajectories: {error}")
            return
        self.cut, over = self.cut.view(self.steps, self.lanes), over.view(self.steps, self.lanes)
        self.paired = self.paired & ~(self.cut & ~over)  # rows written out of order

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return next(iter(self.columns.values())).device

    def _flags(self, *names: str) -> list[Key]:
        """Return the keys under "next" with one of these names, the first name and the shallowest key first."""
        found = [key for key in self.columns if key[0] == "next" and key[-1] in names]
        return sorted(found, key=lambda key: (names.index(key[-1]), len(key)))

    def flag(self, name: str) -> torch.Tensor | None:
        """Return a flag under "next", ``[T, E]`` bool on the CPU, true where any of a row's flags of that name is."""
        keys = self._flags(name)
        if not keys or self.columns[keys[0]].dtype is not torch.bool:
            return None
        return self.columns[keys[0]].flatten(2).any(2).cpu()

    @property
    def observed(self) -> list[Key]:
        """The keys (of the root) that a row has both at its root and under "next": what the next row begins with."""
        return [
            key
            for key, column in self.columns.items()
            if key[0] != "next"
            and key[-1] not in _OTHERS
            and ("next", *key) in self.columns
            and self.next(key).shape == column.shape
            and self.next(key).dtype is column.dtype
        ]

    def next(self, key: Key) -> torch.Tensor:
        """Return the column of what lies under "next" for a key of the root."""
        under: Key = ("next", *key)
        return self.columns[under]

    def blocks(self) -> Iterator[slice]:
        """Yield time steps, so many at once that a block stays in a cache."""
        row = sum(column[0].numel() * column.element_size() for column in self.columns.values())
        size = max(1, _BLOCK_BYTES // max(1, row))
        for start in range(0, self.steps, size):
            yield slice(start, min(start + size, self.steps))

    def after(self, key: Key, block: slice) -> torch.Tensor:
        """Return a column of the rows one step after those of a block; the ring's first follows its last."""
        column = self.columns[key]
        if block.stop < self.steps:
            return column[block.start + 1 : block.stop + 1]
        return torch.cat([column[block.start + 1 :], column[:1]])

    def name(self, flat: int) -> Row:
        """Return a flat row as the storage indexes it."""
        if len(self.shape) == 1:
            return flat
        parts = []
        for size in reversed(self.shape[1:]):
            flat, part = divmod(flat, size)
            parts.append(part)
        return (flat, *reversed(parts))

    def first(self, where: torch.Tensor) -> tuple[Row, ...]:
        """Return the first few rows of ``[T, E]`` flags."""
        return tuple(self.name(flat) for flat in where.flatten().nonzero()[:NAMED, 0].tolist())


def open_source(source: Any) -> tuple[Storage, Sampler | None, Writer | None]:
    """Return the parts of a buffer; of a storage or a TensorDict what there is of them.

    Raises:
        TypeError: it is nothing of the kind.
    """
    if isinstance(source, ReplayBuffer):
        return source._storage, source._sampler, source._writer
    if isinstance(source, Storage):
        return source, None, None
    if isinstance(source, TensorDictBase):
        storage = TensorStorage(source, ndim=max(1, source.ndim))
        storage._len = source.numel()  # TorchRL counts time steps until the storage is first used
        return storage, None, None
    raise TypeError(
        f"the doctor looks at a buffer, a storage, a TensorDict of rows [T] or [T, E], or the path of a saved buffer, "
        f"not at a {type(source).__name__}"
    )
