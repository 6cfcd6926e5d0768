"""What a storage of rows is before anything is read or written: its counters, and the memory of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data.replay_buffers import LazyTensorStorage

from rlbuf_td.storages.allocate import ROWS_FILE, FileRoom, allocate_bytes, allocate_sparse, map_bytes
from rlbuf_td.storages.dedup.layout import DedupLayout, Sections
from rlbuf_td.storages.dedup.options import DedupOptions, choose_groups
from rlbuf_td.storages.dedup.rows import DedupRows, grows
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.rows import OffloadedRows, PlainRows, Rows
from rlbuf_td.storages.schema import Leaf, SchemaError
from rlbuf_td.storages.shared.rows import SharedRows
from rlbuf_td.storages.write_clock import WriteClock


class AllocatedStorage(LazyTensorStorage):
    """Counters and memory of :class:`~rlbuf_td.PackedStorage`."""

    device: torch.device | str
    scratch_dir: Path | None
    shared: bool
    offload: bool
    clock: WriteClock
    lock: Any  # what every buffer over this storage takes
    rows: Rows | None  # from the first write on
    _live: Rows | None  # those that have been written, as of the last look
    is_reserved: bool  # whether the rows are those of a schema, to which the first write may add keys
    shared_rows: SharedRows | None
    _asked: DedupOptions  # what rows are to share

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
        return None if self.rows is None else self.rows.layout

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row, padding included, as batches hold it; 0 before the first write."""
        return 0 if self.rows is None else self.rows.layout.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, with what they share so far; 0 before the first write."""
        return 0 if self.rows is None else self.rows.nbytes

    @property
    def saved_bytes(self) -> dict[tuple[str, ...], int]:
        """Bytes that the rows written take less, by key at the root, because they share observations or frames."""
        return {} if self.rows is None else self.written_rows().saved_bytes()

    @property
    def dedup(self) -> DedupLayout | None:
        """What rows share; None if that is nothing, and before the first write."""
        return None if self.rows is None else self.rows.dedup

    @property
    def deduplicated(self) -> Mapping[tuple[str, ...], Leaf]:
        """The leaves that are stored once, by key; empty if none is, and before the first write."""
        return {} if self.rows is None else self.rows.deduplicated

    def _init(self, data: TensorDictBase) -> None:
        """Allocate for time steps like ``data`` (which has no time dim); TorchRL's checkpointers call it."""
        layout = RowLayout(data, self.ndim - 1)
        self._allocate(layout, data.batch_size[: self.ndim - 1], data.device, self.dedup_of(layout))

    @property
    def lanes(self) -> torch.Size:
        """The dims after time; empty before there are rows."""
        return torch.Size([]) if self.rows is None else self.rows.lanes

    def reserve(self, schema: TensorDictBase) -> None:
        """Allocate, before the first write, for transitions that hold at least the keys of a schema.

        The first write may bring more keys, such as a policy's outputs or a collector's; it then fixes the rows. RAM
        is not touched until it does, unless it is page-locked.

        Args:
            schema: a time step, ``[*lanes]``: an example, or what :func:`~rlbuf_td.envs.specs.schema_of` gives.

        Raises:
            RuntimeError: the rows are there already.
            SchemaError: the schema has too few batch dims, no lanes, or an entry that cannot be packed.
        """
        if self.rows is not None:
            raise RuntimeError("the rows of this storage are there already: reserve them before the first write")
        if schema.batch_dims < self.ndim - 1:
            raise SchemaError(
                f"a storage with ndim={self.ndim} takes a schema of {self.ndim - 1} or more batch dims (lanes), "
                f"got batch size {tuple(schema.batch_size)}"
            )
        device = None if schema.device is None or schema.device.type == "meta" else schema.device
        layout = RowLayout(schema, self.ndim - 1)
        self._allocate(layout, schema.batch_size[: self.ndim - 1], device, self.dedup_of(layout))
        self.is_reserved = True

    def _allocate(
        self, layout: RowLayout, lanes: torch.Size, device: torch.device | None, dedup: DedupLayout | None = None
    ) -> Rows:
        return self.adopt(self.make_rows(layout, lanes, device, dedup))

    def dedup_of(self, layout: RowLayout, data: TensorDictBase | None = None) -> DedupLayout | None:
        """Return what rows of this layout share: what was asked for, or None if that is nothing."""
        chosen = choose_groups(self.dedup_options, layout, data) if self.dedup_options else ()
        return DedupLayout(layout, chosen) if chosen else None

    def make_rows(
        self, layout: RowLayout, lanes: torch.Size, device: torch.device | None, dedup: DedupLayout | None = None
    ) -> Rows:
        """Return rows of this capacity, which the storage does not use before :meth:`adopt`."""
        if self.device != "auto":
            device = self.device
        elif device is None:
            device = torch.device("cpu")
        shape = torch.Size([self.steps_for(lanes), *lanes])
        nbytes = self._bytes_of(layout, shape, dedup)
        about: Any = {
            "scratch_dir": self.scratch_dir,
            "quiet": self.is_reserved,
            "what": f"{prod(shape):,} rows of {(dedup.stored if dedup else layout).row_bytes:,} bytes take",
            "remedy": self._remedy(layout),
        }
        with torch.inference_mode(False):  # else rows first written in inference mode could not be written outside it
            if self.shared_rows is not None and self.scratch_dir is None:
                memory = self.shared_rows.memory(nbytes)
            elif dedup is not None:
                sections = Sections.of(dedup, prod(shape))
                about["what"] += " with what they share"
                if grows(torch.device(device)):
                    memory = allocate_bytes(sections.fixed, torch.device(device), **about).zero_()
                else:
                    memory = allocate_sparse(nbytes, sections.likely(dedup, prod(shape)), sections.fixed, **about)
            else:
                about |= {"shared": self.shared, "offload": self.offload}
                memory = allocate_bytes(nbytes, torch.device(device), **about)
            return self._rows_in(memory, layout, shape, dedup)

    def _bytes_of(self, layout: RowLayout, shape: torch.Size, dedup: DedupLayout | None) -> int:
        """Return how many bytes of memory rows need."""
        return shape.numel() * layout.row_bytes if dedup is None else Sections.of(dedup, shape.numel()).total

    def _rows_in(self, memory: torch.Tensor, layout: RowLayout, shape: torch.Size, dedup: DedupLayout | None) -> Rows:
        """Return the rows that lie in memory of :meth:`_bytes_of` bytes."""
        if dedup is None:
            kind = OffloadedRows if self.offload else PlainRows
            plain = kind(layout, memory.view(*shape, layout.row_bytes))
            plain.is_mapped = self.scratch_dir is not None
            return plain
        room = None if self.scratch_dir is None else FileRoom(self.scratch_dir, len(memory))
        rows = DedupRows(dedup, memory, shape, make_room=room)
        rows.is_deferred = self.shared_rows is not None
        return rows

    def _map(self, layout: RowLayout, shape: torch.Size, dedup: DedupLayout | None) -> Rows:
        """Return the rows in the file in ``scratch_dir``."""
        if self.scratch_dir is None:
            raise ValueError("a PackedStorage without scratch_dir has no file")
        memory = map_bytes(self.scratch_dir, self._bytes_of(layout, shape, dedup))
        return self._rows_in(memory, layout, shape, dedup)

    def adopt(self, rows: Rows) -> Rows:
        """Make ``rows`` the rows of this storage, and TorchRL's ``_storage`` a TensorDict of views of them."""
        self.rows, self._live = rows, None
        self.device = rows.matrix.device
        self._storage = rows.view()
        self.max_size = rows.cells
        self.__dict__["_total_shape_value"] = rows.shape
        self.initialized = True
        if self.shared_rows is not None:
            self._describe(self.shared_rows, rows)
        return rows

    def about_to_write(self, rows: Rows, start: int, count: int) -> None:
        """Let what must survive a killed process be noted, before time steps from ``start`` on are overwritten."""
        if self.shared_rows is not None:
            lanes = rows.cells // rows.steps
            self.shared_rows.journal.begin(start * lanes, count * lanes, self._len_value.value)

    def steps_for(self, lanes: torch.Size) -> int:
        """Return the capacity in time steps of these lanes."""
        if not prod(lanes):
            raise SchemaError(f"cannot store transitions of no lanes: the batch dims after time are {tuple(lanes)}")
        return -(-self.max_size // prod(lanes))

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        """Return the capacity in time steps; before the first write, that for lanes like those of the data."""
        if self.rows is not None:
            return self.rows.steps
        if self.ndim == 1:
            return self.max_size
        single = single_data is not None
        data = as_tensordict(single_data if single else batched_data)
        return self.steps_for(data.batch_size[1 - single : self.ndim - single])

    def all_rows(self) -> Rows:
        """Return the rows, written or not.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if self.rows is None:
            raise RuntimeError("cannot read from a PackedStorage before the first write: its rows have no keys yet")
        return self.rows

    def written_rows(self) -> Rows:
        """Return the rows that have been written."""
        cells, rows, live = self._len_value.value, self.all_rows(), self._live
        if live is None or live.cells != cells:
            live = self._live = rows.first(cells // prod(rows.lanes))
        return live

    def release(self) -> None:
        """Give back rows that have been reserved, and not written."""
        self.rows = self._live = self._storage = None
        if self.scratch_dir is not None:
            (self.scratch_dir / ROWS_FILE).unlink()

    def _empty(self) -> None:
        if self.rows is not None and self.rows.dedup is not None:
            self.about_to_write(self.rows, 0, self.rows.steps)
            self.rows.forget()
        self._len_value.value = 0
        if self.rows is not None:
            self.clock.forget(self.rows.steps)
        self._bump_mutation_revision()

    def _describe(self, sharing: SharedRows, rows: Rows) -> None:
        description = {"layout": rows.layout.state(), "shape": list(rows.shape)}
        if rows.dedup is not None:
            description["pooled"] = rows.dedup.state()
        written = sharing.place(rows.flat, description)
        self.clock.keep_in(written)

    def _remedy(self, layout: RowLayout) -> str:
        """Return what to do if the rows do not fit."""
        largest = max(layout.leaves, key=lambda leaf: leaf.nbytes)
        elsewhere = "another scratch_dir" if self.scratch_dir else "scratch_dir=..., which keeps the rows in a file"
        if self.offload:
            elsewhere = (
                "raise the limits on locked memory (ulimit -l, those of a container), or keep the rows on the CPU with "
                "scratch_dir=..., in a file, and bring batches to the GPU by ReplayBuffer(device=...)"
            )
        elif self.device != "auto" and torch.device(self.device).type == "cuda":
            elsewhere = "offload=True, which keeps the rows in RAM"
        return (
            f"Take a smaller max_size, or {elsewhere}; the largest key is {largest.name}, {largest.nbytes:,} bytes a "
            "row. rlbuf_td.plan(...) tells more."
        )


def as_tensordict(data: Any) -> TensorDictBase:
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
