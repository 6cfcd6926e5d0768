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
from rlbuf_td.storages.rows import Rows
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
        self._rows: Rows | None = None  # from the first write on
        self._live: Rows | None = None  # those that have been written, as of the last look
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
    def layout(self) -> RowLayout | None:
        """What a row holds; ``None`` before the first write."""
        return None if self._rows is None else self._rows.layout

    @property
    def row_bytes(self) -> int:
        """Bytes a row takes, padding included; 0 before the first write."""
        return 0 if self._rows is None else self._rows.layout.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows; 0 before the first write."""
        return 0 if self._rows is None else self._rows.nbytes

    def _init(self, data: TensorDictBase) -> None:
        """Allocate for time steps like ``data`` (which has no time dim); TorchRL's checkpointers call it."""
        self._allocate(RowLayout(data, self.ndim - 1), data.batch_size[: self.ndim - 1], data.device)

    def _allocate(self, layout: RowLayout, lanes: torch.Size, device: torch.device | None) -> None:
        if not prod(lanes):
            raise SchemaError(f"cannot store transitions of no lanes: the batch dims after time are {tuple(lanes)}")
        if self.device == "auto":
            self.device = device or torch.device("cpu")
        steps = -(-self.max_size // prod(lanes))
        nbytes = steps * prod(lanes) * layout.row_bytes
        memory = allocate_bytes(nbytes, self.device, scratch_dir=self.scratch_dir, shared=self.shared)
        self._adopt(Rows(layout, memory.view(steps, *lanes, layout.row_bytes)))

    def _adopt(self, rows: Rows) -> None:
        """Make ``rows`` the rows of this storage, and TorchRL's ``_storage`` a TensorDict of views of them."""
        self._rows, self._live = rows, None
        self._storage = rows.view()
        self.max_size = rows.cells
        self.__dict__["_total_shape_value"] = rows.shape
        self.initialized = True

    def _written(self) -> Rows:
        """Return the rows that have been written."""
        cells, rows = self._len_value.value, self._rows
        if rows is None:
            raise RuntimeError("cannot read from a PackedStorage before the first write: its rows have no keys yet")
        if self._live is None or self._live.cells != cells:
            self._live = rows.first(cells // prod(rows.lanes))
        return self._live

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
        rows = self._written()
        if _is_key(index):
            return rows.view().get(index)
        if isinstance(index, list | range | np.ndarray):
            index = torch.as_tensor(np.asarray(index))
        if _is_mask(index) and index.shape == rows.shape:
            index = index.nonzero(as_tuple=True)
        if _is_index(index):
            return rows.at_steps(index.to(self.device, torch.int64))
        if isinstance(index, tuple) and len(index) == self.ndim and all(map(_is_index, index)):
            return rows.at_coordinates(tuple(part.to(self.device, torch.int64) for part in index))
        return super().get(index)

    def gather(self, flat: torch.Tensor) -> TensorDict:
        """Return the transitions at flat positions (``t * E + e``): ``[B]`` int64 on this device, not negative."""
        return self._written().at_cells(flat)

    # -- writing

    def write(self, start: int, data: TensorDictBase, *, single: bool = False) -> None:
        """Write consecutive time steps from ``start`` on, wrapping at the capacity: the way in of :class:`RingWriter`.

        An ``"index"`` in ``data`` is not stored.

        Args:
            start: the first time step, ``0 <= start < T``, not beyond the steps written so far.
            data: ``[n, *lanes]`` transitions, ``1 <= n <= T``.
            single: ``data`` is one time step, ``[*lanes]``.

        Raises:
            SchemaError: ``data`` does not match the rows; nothing has been written.
        """
        data = _as_tensordict(data)
        if self._rows is None:
            data = data.exclude("index")
        leaves, count = self._admit(data, single)
        steps = self._rows.steps
        self._rows.copy_(start, count, leaves)
        self._advance(min(start + count, steps), (start + count - 1) % steps)

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
        data = _as_tensordict(data)
        if isinstance(cursor, tuple) or _is_mask(cursor):
            rows = self._written()
            rows.replace_(cursor, rows.layout.collect(data, rows.shape_of(cursor)))
            return self._bump_mutation_revision()
        single = isinstance(cursor, int | np.integer) or (isinstance(cursor, torch.Tensor) and not cursor.ndim)
        total = self._max_size_along_dim0(**{"single_data" if single else "batched_data": data})
        live = 0 if self._rows is None else self._written().steps
        steps = _as_steps(cursor, total if set_cursor else live)
        _refuse_steps(steps, total, live, set_cursor)
        if not single and data.batch_size[:1] != steps.shape:
            raise SchemaError(f"data of batch size {tuple(data.batch_size)} cannot fill {len(steps)} positions")
        leaves, count = self._admit(data, single)
        if single or (np.diff(steps) == 1).all():
            self._rows.copy_(int(steps[0]), count, leaves)
        else:
            self._rows.scatter_(steps, leaves)
        if set_cursor:
            self._advance(int(steps.max()) + 1, int(steps[-1]))
        else:
            self._bump_mutation_revision()

    def _admit(self, data: TensorDictBase, single: bool) -> tuple[list[torch.Tensor], int]:
        """Return the leaves of transitions that fit the rows, and the number of time steps.

        The first time, the rows are made to fit.
        """
        if self._rows is None:
            lead_dims = self.ndim - single
            if data.batch_dims < lead_dims:
                raise SchemaError(
                    f"a storage with ndim={self.ndim} takes TensorDicts with {lead_dims} or more batch dims here "
                    f"(time, lanes), got batch size {tuple(data.batch_size)}"
                )
            self._allocate(RowLayout(data, lead_dims), data.batch_size[1 - single : lead_dims], data.device)
        rows = self._rows
        if single:
            return rows.layout.collect(data, rows.lanes), 1
        lead = data.batch_size[:1] + rows.lanes
        return rows.layout.collect(data, lead), lead[0]

    def _advance(self, steps: int, last: int) -> None:
        """Count ``steps`` time steps as written, the newest of this write being ``last``."""
        cells = steps * prod(self._rows.lanes)
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
        if get_spawning_popen() is None:
            settings = ("max_size", "device", "ndim", "shared", "_attached_entities_list", "_checkpointer")
            return {name: self.__dict__[name] for name in settings} | {"_saved": self.state_dict()}
        if self._rows is None:
            raise RuntimeError(
                "a PackedStorage cannot be sent to another process before its first write, which allocates the rows: "
                "the processes would not share them. Write one batch first."
            )
        return self.__dict__ | {"_rng": None, "_storage": None, "_live": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_saved" not in state:  # another process: the same rows
            self.__dict__.update(state)
            self._adopt(self._rows)
            return
        self.__init__(state["max_size"], device=state["device"], ndim=state["ndim"], shared=state["shared"])
        self.__dict__.update({name: state[name] for name in ("_attached_entities_list", "_checkpointer")})
        self.load_state_dict(state["_saved"])

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the rows written so far, with their layout, as tensors, numbers and strings."""
        if self._rows is None or not len(self):
            return {"_len": 0}
        return {
            "_len": len(self),
            "full": self._is_full,
            "last_cursor": self._last_cursor_index_value.value,
            "layout": self._rows.layout.state(),
            "rows": self._written().matrix.clone(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content by what :meth:`state_dict` returned.

        Raises:
            SchemaError: the saved rows differ in keys, dtypes or shapes; this storage stays as it was.
            ValueError: the capacity or the lanes do not fit the saved rows; this storage stays as it was.
        """
        if not state_dict["_len"]:
            return self._empty()
        layout, matrix = RowLayout.from_state(state_dict["layout"]), state_dict["rows"]
        lanes = matrix.shape[1:-1]
        if self._rows is not None and layout != self._rows.layout:
            raise SchemaError("the saved rows hold other keys, dtypes or shapes than those of this storage")
        if self._rows is not None and lanes != self._rows.lanes:
            raise ValueError(f"saved rows of lanes {tuple(lanes)} do not fit lanes {tuple(self._rows.lanes)}")
        capacity = -(-self.max_size // prod(lanes)) * prod(lanes)
        if state_dict["_len"] > capacity or (state_dict["full"] and state_dict["_len"] != capacity):
            raise ValueError(
                f"{state_dict['_len']} rows of a {'full ' if state_dict['full'] else ''}buffer do not fit "
                f"a capacity of {capacity}"
            )
        if self._rows is None:
            self._allocate(layout, lanes, matrix.device)
        self._rows.matrix[: matrix.shape[0]].copy_(matrix)
        self._len_value.value = state_dict["_len"]
        self._last_cursor = self._last_cursor_index_value.value = state_dict["last_cursor"]
        self._bump_mutation_revision()

    def __repr__(self) -> str:
        if self._rows is None:
            return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, device={self.device}, empty)"
        place = "shared memory" if self.shared else "mapped file" if self.scratch_dir else str(self.device)
        lines = (
            f"    {leaf.name}: {str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
            for leaf in self._rows.layout.leaves
        )
        return "\n".join(
            (
                f"{type(self).__name__}({len(self):,} of {self.max_size:,} rows, shape {tuple(self._rows.shape)}, "
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


def _as_tensordict(data: Any) -> TensorDictBase:
    """Return the data of a write as one TensorDict.

    Raises:
        TypeError: it is none.
    """
    if type(data) is TensorDict:
        return data
    if isinstance(data, (list, tuple)) and data and all(map(is_tensor_collection, data)):
        data = torch.stack(list(data))
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"PackedStorage stores TensorDicts, got {type(data).__name__}: wrap it in a TensorDict, "
            "or use torchrl.data.LazyTensorStorage, which takes tensors, tensorclasses and pytrees"
        )
    return data


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


def _refuse_steps(steps: np.ndarray, total: int, live: int, append: bool) -> None:
    """Refuse positions that are out of range, or that would leave a row unwritten before the last one.

    Raises:
        IndexError: see above.
    """
    if not len(steps):
        raise IndexError("cannot write at an empty set of positions")
    if steps.min() < 0 or steps.max() >= total:
        bad = steps[(steps < 0) | (steps >= total)][0]
        raise IndexError(f"position {bad} is out of range of a storage of {total} time steps")
    if append and len(np.unique(steps[steps >= live])) != max(0, int(steps.max()) + 1 - live):
        raise IndexError(
            f"positions up to {steps.max()} leave rows after {live - 1} unwritten: write them in order, "
            "or pass set_cursor=False to write without counting the rows"
        )
