"""A storage in which a transition is one row of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data.replay_buffers import LazyTensorStorage

from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.memory import allocate_bytes
from rlbuf_td.storages.schema import SchemaError

_INDEX_DTYPES = frozenset((torch.int64, torch.int32, torch.int16, torch.int8))


class PackedStorage(LazyTensorStorage):
    """A TensorDict storage with one row of bytes a transition: a batch is one gather, whatever the number of keys.

    The first write fixes the schema (keys, dtypes, shapes, nesting); the rows are allocated then, and memory is taken
    from the system as rows are written. A sampled batch is fresh memory: changing it never changes the storage. As in
    TorchRL, an ``int`` or a ``slice`` gives a view instead.

    Args:
        max_size: capacity in transitions. With ``ndim > 1`` it is rounded up to whole time steps of all lanes.
        device: where the rows live: ``"cpu"``, a CUDA device, or ``"auto"`` (that of the first write).
        ndim: number of leading dims that count as transitions: 1 for ``[T]``, 2 for ``[T, E]`` (time, lanes).
        scratch_dir: a folder for a memory-mapped file of the rows (CPU only). The file is kept; one that is there
            already is never overwritten.
        shared: put the rows into shared memory (CPU only).

    Raises:
        ValueError: an argument is out of range, or two of them exclude each other.
        SchemaError: (on writing) the data does not match the rows; nothing has been written.

    Cost: a gather of ``B`` rows is O(B * row_bytes), one kernel on CUDA; a write touches only its rows.

    Differs from TorchRL's ``LazyTensorStorage``: a missing key is an error rather than uninitialised memory, an unknown
    key is an error rather than dropped, and only TensorDicts of tensors are taken.

    Example:
        >>> storage = PackedStorage(1000)
        >>> storage.set(range(2), TensorDict({"observation": torch.ones(2, 3), "done": torch.zeros(2, 1).bool()}, [2]))
        >>> storage.get(torch.tensor([1, 1]))["observation"].sum()
        tensor(6.)
        >>> storage["observation"].shape, storage.row_bytes
        (torch.Size([2, 3]), 16)
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        scratch_dir: str | Path | None = None,
        shared: bool = False,
    ) -> None:
        if max_size < 1:
            raise ValueError(f"max_size must be at least 1, got {max_size}")
        if ndim < 1:
            raise ValueError(f"ndim must be at least 1, got {ndim}")
        if scratch_dir is not None and shared:
            raise ValueError("a memory-mapped file is shared already: pass scratch_dir or shared, not both")
        if (scratch_dir is not None or shared) and torch.device("cpu" if device == "auto" else device).type != "cpu":
            raise ValueError(f"scratch_dir and shared need device='cpu', got device={str(device)!r}")
        super().__init__(max_size, device=device, ndim=ndim)
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self.shared = shared
        self.layout: RowLayout | None = None
        self._rows: torch.Tensor = torch.empty(0)  # [T, *lanes, row_bytes] in layout.carrier, once initialised
        self._flat: torch.Tensor = torch.empty(0)  # the same as [cells, row_bytes]
        self._live: tuple[int, torch.Tensor, torch.Tensor] = (-1, self._rows, self._flat)
        self._make_counters()

    # -- counters: 64 bits, in memory that a forked or spawned process shares; the buffer's locks order the writes

    def _make_counters(self, length: int = 0, revision: int = 0, last_cursor: int = -1) -> None:
        self._len_value = RawValue("q", length)
        self._mutation_revision_value = RawValue("q", revision)
        self._last_cursor_index_value = RawValue("q", last_cursor)

    @property
    def _len(self) -> int:
        return self._len_value.value

    @_len.setter
    def _len(self, value: int) -> None:
        if "_len_value" in self.__dict__:  # not yet, while TorchRL's constructor runs
            self._len_value.value = value

    def __len__(self) -> int:
        return self._len_value.value

    def _bump_mutation_revision(self) -> None:
        self._mutation_revision_value.value += 1

    # -- memory

    @property
    def row_bytes(self) -> int:
        """Bytes a row takes, padding included; 0 before the first write."""
        return 0 if self.layout is None else self.layout.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows; 0 before the first write."""
        return self._rows.numel() * self._rows.element_size()

    @property
    def lanes(self) -> torch.Size:
        """The dims after time (``[E]`` when ``ndim=2``); empty when ``ndim=1`` or before the first write."""
        return self._rows.shape[1:-1] if self.initialized else torch.Size([])

    def _init(self, data: TensorDictBase) -> None:
        """Allocate for time steps like ``data`` (which has no time dim); TorchRL's checkpointers call it."""
        self._allocate(RowLayout(data, self.ndim - 1), data.batch_size[: self.ndim - 1], data.device)

    def _allocate(self, layout: RowLayout, lanes: torch.Size, device: torch.device | None = None) -> None:
        if self.device == "auto":
            self.device = device or torch.device("cpu")
        steps = -(-self.max_size // prod(lanes))
        nbytes = steps * prod(lanes) * layout.row_bytes
        memory = allocate_bytes(nbytes, self.device, scratch_dir=self.scratch_dir, shared=self.shared)
        self._adopt(layout, memory.view(steps, *lanes, layout.row_bytes))

    def _adopt(self, layout: RowLayout, rows: torch.Tensor) -> None:
        """Make ``rows`` the rows of this storage, and TorchRL's ``_storage`` a TensorDict of views of it."""
        self.layout = layout
        self._rows = rows.view(layout.carrier)
        self._flat = self._rows.view(-1, self._rows.shape[-1])
        self._storage = layout.unpack(self._rows)
        self._live = (-1, self._rows, self._flat)
        self.max_size = self._flat.shape[0]
        self.__dict__["_total_shape_value"] = self._rows.shape[:-1]
        self.initialized = True

    def _live_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that have been written, as ``[T, *lanes, row]`` and as ``[cells, row]``."""
        cells = self._len_value.value
        if self._live[0] != cells:
            steps = -(-cells // prod(self.lanes))
            self._live = (cells, self._rows.narrow(0, 0, steps), self._flat.narrow(0, 0, cells))
        return self._live[1], self._live[2]

    # -- reading

    def get(self, index: Any) -> Any:
        """Return the transitions at ``index``, or one column of all of them.

        Args:
            index: a key, which gives that column as a strided view ``[T, *lanes, ...]`` of the rows; an ``int`` or a
                ``slice`` along time, which give views too; or, for fresh memory, a tensor, list, ``range`` or array of
                integers of any shape, a boolean mask, or a tuple of one index a dim.

        Raises:
            RuntimeError: nothing has been written yet.
            IndexError: an index is out of range of the rows that have been written.
            KeyError: no such key.
        """
        if self.layout is None:
            raise RuntimeError("cannot read from a PackedStorage before the first write: its rows have no keys yet")
        if _is_key(index):
            return self._storage[: self._len_along_dim0].get(index)
        if isinstance(index, (list, range, np.ndarray)):
            index = torch.as_tensor(np.asarray(index))
        steps, cells = self._live_rows()
        if _is_mask(index) and index.shape == steps.shape[:-1]:
            index = index.nonzero(as_tuple=True)
        if _is_index(index):
            return self.layout.unpack(_gather(steps, index.to(self.device, torch.int64)))
        if isinstance(index, tuple) and len(index) == self.ndim and all(map(_is_index, index)):
            return self.layout.unpack(_gather(cells, self.flat_index(index)))
        return super().get(index)

    def gather(self, flat: torch.Tensor) -> TensorDict:
        """Return the transitions at flat positions (``t * E + e``).

        Args:
            flat: ``[B]`` int64 on the storage's device, not negative.
        """
        return self.layout.unpack(self._live_rows()[1].index_select(0, flat))

    def flat_index(self, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return coordinates (one integer tensor a dim) as flat positions; each is checked, on the CPU.

        Raises:
            IndexError: a coordinate is out of range.
        """
        flat: torch.Tensor | int = 0
        for size, coordinate in zip(self._live_rows()[0].shape[:-1], index, strict=True):
            coordinate = coordinate.to(self.device, torch.int64)
            flat = flat * size + (coordinate if coordinate.is_cuda else _wrapped(coordinate, size))
        return flat

    # -- writing

    @torch.no_grad()
    def write(self, start: int, data: TensorDictBase) -> None:
        """Write consecutive time steps from ``start`` on, wrapping at the capacity: the way in of :class:`RingWriter`.

        An ``"index"`` in ``data`` is not stored.

        Args:
            start: the first time step, ``0 <= start < T``, not beyond the steps written so far.
            data: ``[n, *lanes]`` transitions, ``1 <= n <= T``; or one time step without the time dim.

        Raises:
            SchemaError: ``data`` does not match the rows; nothing has been written.
        """
        count = None if data.batch_dims < self.ndim else data.batch_size[0]
        leaves = self._admit(data if self.layout is not None else data.exclude("index"), count)
        count, steps = count or 1, self._rows.shape[0]
        first = min(count, steps - start)
        if first == count:
            self._copy(start, count, leaves)
        else:
            self._copy(start, first, [leaf[:first] for leaf in leaves])
            self._copy(0, count - first, [leaf[first:] for leaf in leaves])
        self._advance(min(start + count, steps), (start + count - 1) % steps)

    @torch.no_grad()
    def set(self, cursor: Any, data: TensorDictBase | Sequence[TensorDictBase], *, set_cursor: bool = True) -> None:
        """Write transitions at ``cursor``.

        Args:
            cursor: an ``int``, ``slice``, integer tensor, array, list or ``range`` along time; or, to replace
                transitions, a boolean mask or a tuple of one index a dim. Of a repeated position the last row stays.
            data: as many transitions; a list of TensorDicts is stacked.
            set_cursor: whether the write may append. It must not leave out a row before those that it appends.

        Raises:
            SchemaError: ``data`` does not match the rows; nothing has been written.
            IndexError: a position is out of range; nothing has been written.
            TypeError: ``data`` is not a TensorDict.
        """
        if isinstance(data, (list, tuple)) and data and all(map(is_tensor_collection, data)):
            data = torch.stack(list(data))
        if not isinstance(data, TensorDictBase):
            raise TypeError(
                f"PackedStorage stores TensorDicts, got {type(data).__name__}: wrap it in a TensorDict, "
                "or use torchrl.data.LazyTensorStorage, which takes tensors, tensorclasses and pytrees"
            )
        if isinstance(cursor, tuple) or _is_mask(cursor):
            return self._replace(cursor, data)
        single = isinstance(cursor, (int, np.integer)) or (isinstance(cursor, torch.Tensor) and not cursor.ndim)
        total = self._max_size_along_dim0(**{"single_data" if single else "batched_data": data})
        steps = _as_steps(cursor, total if set_cursor else self._live_rows()[0].shape[0])
        self._refuse_steps(steps, total, set_cursor)
        leaves = self._admit(data, None if single else len(steps))
        if single or (np.diff(steps) == 1).all():
            self._copy(int(steps[0]), len(steps), leaves)
        else:
            self._scatter(steps, leaves)
        if set_cursor:
            self._advance(int(steps.max()) + 1, int(steps[-1]))
        else:
            self._bump_mutation_revision()

    def _admit(self, data: TensorDictBase, count: int | None) -> list[torch.Tensor]:
        """Return the leaves of ``[count, *lanes]`` (or, for ``None``, ``[*lanes]``) transitions that fit the rows.

        The first time, the rows are made to fit.
        """
        if self.layout is None:
            lead_dims = self.ndim if count is not None else self.ndim - 1
            if data.batch_dims < lead_dims:
                raise SchemaError(
                    f"a storage with ndim={self.ndim} takes TensorDicts with {lead_dims} or more batch dims here "
                    f"(time, lanes), got batch size {tuple(data.batch_size)}"
                )
            lanes = data.batch_size[lead_dims - self.ndim + 1 : lead_dims]
            self._allocate(RowLayout(data, lead_dims), lanes, data.device)
        lanes = self._rows.shape[1:-1]
        return self.layout.collect(data, lanes if count is None else torch.Size((count, *lanes)))

    def _copy(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        torch._foreach_copy_(self.layout.columns(self._rows.narrow(0, start, count)), leaves)

    def _scatter(self, steps: np.ndarray, leaves: list[torch.Tensor]) -> None:
        unique, last = np.unique(steps[::-1], return_index=True)
        if len(unique) < len(steps):
            keep = torch.from_numpy(len(steps) - 1 - last)
            steps, leaves = unique, [leaf[keep.to(leaf.device)] for leaf in leaves]
        block = self._rows.new_zeros((len(steps), *self._rows.shape[1:]))
        torch._foreach_copy_(self.layout.columns(block), leaves)
        self._rows.index_copy_(0, torch.from_numpy(steps).to(self.device), block)

    def _replace(self, region: Any, data: TensorDictBase) -> None:
        """Write into a region of the rows that have been written, given by a mask or by one index a dim."""
        rows = self._live_rows()[0]
        lead = torch.zeros((), device=self.device).expand(rows.shape[:-1])[region].shape
        for column, leaf in zip(self.layout.columns(rows), self.layout.collect(data, lead), strict=True):
            column[region] = leaf
        self._bump_mutation_revision()

    def _refuse_steps(self, steps: np.ndarray, total: int, append: bool) -> None:
        live = self._live_rows()[0].shape[0]
        if len(steps) == 0:
            raise IndexError("cannot write at an empty set of positions")
        if steps.min() < 0 or steps.max() >= total:
            bad = steps[(steps < 0) | (steps >= total)][0]
            raise IndexError(f"position {bad} is out of range of a storage of {total} time steps")
        if append and len(np.unique(steps[steps >= live])) != max(0, int(steps.max()) + 1 - live):
            raise IndexError(
                f"positions up to {steps.max()} leave rows after {live - 1} unwritten: write them in order, "
                "or pass set_cursor=False to write without counting the rows"
            )

    def _advance(self, steps: int, last: int) -> None:
        """Count ``steps`` time steps as written, the newest of this write being ``last``."""
        cells = steps * (self._flat.shape[0] // self._rows.shape[0])
        if cells > self._len_value.value:
            self._len_value.value = cells
        self._last_cursor = last
        self._last_cursor_index_value.value = last
        self._bump_mutation_revision()

    def _empty(self) -> None:
        self._len_value.value = 0
        self._bump_mutation_revision()

    # -- state

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            if self.layout is None:
                raise RuntimeError(
                    "a PackedStorage cannot be sent to another process before its first write, which allocates the "
                    "rows: the processes would not share them. Write one batch first."
                )
            return self.__dict__ | {"_rng": None, "_storage": None, "_live": None, "_flat": None}
        settings = ("max_size", "device", "ndim", "shared", "_attached_entities_list", "_checkpointer")
        return {name: self.__dict__[name] for name in settings} | {"_saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_saved" not in state:  # another process: the same rows
            self.__dict__.update(state)
            self._adopt(self.layout, self._rows.view(torch.uint8))
            return
        self.__init__(state["max_size"], device=state["device"], ndim=state["ndim"], shared=state["shared"])
        self.__dict__.update({name: state[name] for name in ("_attached_entities_list", "_checkpointer")})
        self.load_state_dict(state["_saved"])

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the rows written so far, with their layout, as tensors, numbers and strings."""
        if self.layout is None or not len(self):
            return {"_len": 0}
        return {
            "_len": len(self),
            "full": self._is_full,
            "last_cursor": self._last_cursor_index_value.value,
            "layout": self.layout.state(),
            "rows": self._live_rows()[0].clone(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content by what :meth:`state_dict` returned.

        Raises:
            SchemaError: the saved rows differ in keys, dtypes or shapes; this storage stays as it was.
            ValueError: the capacity or the lanes do not fit the saved rows; this storage stays as it was.
        """
        if not state_dict["_len"]:
            return self._empty()
        layout, rows = RowLayout.from_state(state_dict["layout"]), state_dict["rows"]
        if self.layout is None:
            capacity = -(-self.max_size // prod(rows.shape[1:-1])) * prod(rows.shape[1:-1])
        else:
            capacity = self.max_size
            if layout != self.layout:
                raise SchemaError("the saved rows hold other keys, dtypes or shapes than those of this storage")
            if rows.shape[1:-1] != self._rows.shape[1:-1]:
                raise ValueError(f"saved rows of lanes {tuple(rows.shape[1:-1])} do not fit lanes {tuple(self.lanes)}")
        if state_dict["_len"] > capacity or (state_dict["full"] and state_dict["_len"] != capacity):
            raise ValueError(
                f"{state_dict['_len']} rows of a {'full ' if state_dict['full'] else ''}buffer do not fit "
                f"a capacity of {capacity}"
            )
        if self.layout is None:
            self._allocate(layout, rows.shape[1:-1], rows.device)
        self._rows[: rows.shape[0]].copy_(rows)
        self._len_value.value = state_dict["_len"]
        self._last_cursor = self._last_cursor_index_value.value = state_dict["last_cursor"]
        self._bump_mutation_revision()

    def __repr__(self) -> str:
        if self.layout is None:
            return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, device={self.device}, empty)"
        place = "shared memory" if self.shared else "mapped file" if self.scratch_dir else str(self.device)
        lines = (
            f"    {leaf.name}: {str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
            for leaf in self.layout.leaves
        )
        return "\n".join(
            (
                f"{type(self).__name__}({len(self):,} of {self.max_size:,} rows, shape {tuple(self._rows.shape[:-1])}, "
                f"{self.row_bytes} bytes a row, {self.nbytes / 2**20:,.1f} MiB, {place}",
                *lines,
                ")",
            )
        )


def _is_key(index: Any) -> bool:
    return isinstance(index, str) or (
        isinstance(index, tuple) and len(index) > 0 and all(isinstance(part, str) for part in index)
    )


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor | np.ndarray) and index.dtype in (torch.bool, np.bool_)


def _is_index(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.ndim > 0 and index.dtype in _INDEX_DTYPES


def _wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``index`` (on the CPU) with negative positions counted from the end.

    Raises:
        IndexError: a position is out of range.
    """
    if not index.numel():
        return index
    low, high = int(index.min()), int(index.max())
    if low < -size or high >= size:
        raise IndexError(f"index {high if high >= size else low} is out of range of {size} written rows")
    return torch.where(index < 0, index + size, index) if low < 0 else index


def _gather(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``rows[index]`` as fresh memory, by the quickest way of the device."""
    if rows.is_cuda:
        return rows[index]
    flat = index.reshape(-1)
    try:
        block = rows.index_select(0, flat)
    except IndexError:
        block = rows.index_select(0, _wrapped(flat, rows.shape[0]))
    return block if index.ndim == 1 else block.view(*index.shape, *rows.shape[1:])


def _as_steps(cursor: Any, total: int) -> np.ndarray:
    """Return a cursor along time as int64 positions; a slice counts from a storage of ``total`` steps."""
    if isinstance(cursor, slice):
        cursor = range(*cursor.indices(total))
    if isinstance(cursor, torch.Tensor):
        cursor = cursor.cpu().numpy()
    steps = np.atleast_1d(np.asarray(cursor))
    if steps.ndim != 1 or (steps.size and steps.dtype.kind not in "iu"):
        raise IndexError(f"cannot write at a cursor of shape {steps.shape} and dtype {steps.dtype}")
    return steps.astype(np.int64)
