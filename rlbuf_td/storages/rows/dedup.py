"""Deduplicated rows: each stored row holds ids of pool entries instead of observations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.kernels.rows import refuse_rows
from rlbuf_td.kernels.rows.pool import Table, grow_, read_, rebuild_, write_
from rlbuf_td.kernels.rows.pool_steps import write_by_steps_
from rlbuf_td.kernels.rows.read_ahead import ask_for_entries, ask_for_rows
from rlbuf_td.storages.dedup import ENTRY_IDS, DedupLayout, Sections
from rlbuf_td.storages.rows import Rows, last_of_each

_CHUNK = 256 << 20  # bytes of whole rows that are assembled at once
_LOOK = 4096  # rows whose entry ids are checked at once
MakeRoom: TypeAlias = Callable[[int, int], None]  # (offset of a section, nbytes): reserves disk space


class DedupRows(Rows):
    """Rows ``[T, *lanes]`` that hold ids instead of observations; the observations are in a pool.

    ``block`` holds :attr:`Sections.total` bytes on the CPU and :attr:`Sections.fixed` bytes on other devices, all zero.
    """

    dedup: DedupLayout

    def __init__(self, dedup: DedupLayout, block: torch.Tensor, shape: torch.Size, make_room: MakeRoom | None) -> None:
        stored = dedup.stored
        matrix = block[: prod(shape) * stored.row_bytes].view(*shape, stored.row_bytes)
        super().__init__(dedup.layout, matrix.view(stored.carrier))
        self.extents = np.zeros_like(dedup.layout.extents)
        self.extents[dedup.runs[:, 1]] = dedup.runs[:, [0, 2]]
        self.dedup, self.block, self._make_room = dedup, block, make_room
        self.is_mapped = make_room is not None
        self._sections = Sections.of(dedup, self.cells)
        self.table = self._make_table(self._sections)

    def _make_table(self, parts: Sections) -> Table:
        dedup, block, row_bytes = self.dedup, self.block, self.dedup.stored.row_bytes
        entries, stacks, counters = [], [], []
        for g, (group, most) in enumerate(zip(dedup.groups, parts.most, strict=True)):
            if grows(block.device):
                entries.append(block.new_empty((1, group.nbytes)))
                stacks.append(block.new_empty(1, dtype=torch.int32))
            else:
                entries.append(block[parts.entries[g] :][: group.nbytes * (most + 1)].view(most + 1, group.nbytes))
                stacks.append(block[parts.stacks[g] :][: 4 * (most + 1)].view(torch.int32))
            counters.append(block[parts.counters + 16 * g :][:16].view(torch.int64))
        rows, lanes = block[: self.cells * row_bytes].view(self.cells, row_bytes), self.cells // self.steps
        is_compiled = not grows(block.device)
        return Table(dedup.groups, dedup.runs, rows, lanes, entries, stacks, tuple(counters), is_compiled)

    @property
    def used(self) -> list[int]:
        """For each pool, the number of entries used so far, including entries that are free again."""
        return [int(counters[1]) for counters in self.table.counters]

    @property
    def in_use(self) -> list[int]:
        return [int(counters[1] - counters[0]) for counters in self.table.counters]

    @property
    def nbytes(self) -> int:
        sizes = (group.nbytes for group in self.table.groups)
        return self.cells * self.dedup.stored.row_bytes + sum(n * m for n, m in zip(self.used, sizes, strict=True))

    def saved_bytes(self) -> dict[tuple[str, ...], int]:
        return self.dedup.saved_bytes(self.cells, self.in_use)

    def sources(self) -> tuple[torch.Tensor, ...]:
        return (self.matrix, *self.table.entries)

    def unpack(self, matrix: torch.Tensor) -> TensorDict:
        return self.dedup.stored.unpack(matrix).exclude(ENTRY_IDS, inplace=True)

    def leaves_at(self, cells: torch.Tensor) -> list[torch.Tensor]:
        leaves = self.layout.blank(cells.shape, self.matrix.device)
        self.read_(cells, leaves)
        return leaves

    def joined_at(self, cells: torch.Tensor, last: torch.Tensor) -> TensorDict:
        leaves = self.layout.blank(cells.shape, self.matrix.device)
        named = list(zip(self.layout.places, leaves, strict=True))
        self.read_(cells, [None if key[0] == "next" else leaf for key, leaf in named])
        self.read_(last, [leaf if key[0] == "next" else None for key, leaf in named])
        return self.layout.wrap(leaves, cells.shape, self.matrix.device, {})

    def read_(self, cells: torch.Tensor, leaves: Sequence[torch.Tensor | None]) -> None:
        """Copy the rows at flat indices ``cells`` to ``leaves``: contiguous tensors, or None for leaves to skip."""
        cells, order = cells.contiguous(), None
        if self.is_mapped:
            flat = cells.view(-1)
            order = ask_for_rows(self.table.rows, flat)
            if order is not None:
                ask_for_entries(self.table, flat[order])
        if not read_(self.table, cells, self.cells, leaves, order):
            refuse_rows(cells, self.cells)

    def at_region(self, index: Any) -> TensorDict:
        found = self.view()[index]
        is_step = isinstance(index, int | np.integer) and not isinstance(index, bool)  # True is a mask
        if is_step and -self.steps <= index < self.steps:
            cells = self.cells_at(torch.tensor(index % self.steps, device="cpu"))
        else:
            cells = self.cells_of(index)
        for key in self.dedup.deduplicated:
            found.set(key, self.column_at(key, cells))
        return found

    def column(self, path: tuple[str, ...]) -> Any:
        if path in self.dedup.deduplicated:
            return self.column_at(path, self.cells_of(slice(None)))
        node = self.view()[path]
        for key in self.dedup.deduplicated:
            if key[: len(path)] == path:
                node.set(key[len(path) :], self.column(key))
        return node

    def column_at(self, key: tuple[str, ...], cells: torch.Tensor) -> torch.Tensor:
        if key not in self.dedup.deduplicated:
            return super().column_at(key, cells)
        leaf = self.dedup.deduplicated[key]
        column = torch.empty((*cells.shape, *leaf.shape), dtype=leaf.dtype, device=self.matrix.device)
        leaves: list[torch.Tensor | None] = [None] * len(self.layout.leaves)
        leaves[self.layout.places[key]] = column
        self.read_(cells, leaves)
        return column

    def chunks(self, first: int, count: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        lanes = self.lanes.numel()
        size = max(1, _CHUNK // (lanes * self.layout.row_bytes))
        for start in range(first, first + count, size):
            steps = min(size, first + count - start)
            cells = torch.arange(start * lanes, (start + steps) * lanes, device=self.matrix.device)
            yield steps, self.leaves_at(cells.view(steps, *self.lanes))

    def copy_(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        if self.holds_any(leaves):
            leaves = [leaf.clone() for leaf in leaves]  # otherwise a row could be read after it was overwritten
        lanes = self.cells // self.steps
        self._ensure(count * lanes)
        self._copy_stored(start, count, [leaves[slot] for slot in self.dedup.kept])
        self._write_entries(leaves, len(self.lanes), start * lanes, count * lanes)

    def _copy_stored(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        head = min(count, self.steps - start)
        if head == count and leaves:
            torch._foreach_copy_(self._stored_columns(self.matrix.narrow(0, start, count)), leaves)
        elif head < count:
            self._copy_stored(start, head, [leaf[:head] for leaf in leaves])
            self._copy_stored(0, count - head, [leaf[head:] for leaf in leaves])

    def _stored_columns(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        columns = self.dedup.stored.columns(matrix)
        del columns[self.dedup.ids_slot]
        return columns

    def _write_entries(self, leaves: list[torch.Tensor], lane_dims: int, cells: torch.Tensor | int, count: int) -> None:
        """Store the observations in ``leaves`` as pool entries, and their ids in the rows at flat indices ``cells``."""
        table, device, deferred = self.table, self.matrix.device, self.is_deferred
        if table.is_compiled:
            lanes = leaves[0].ndim - len(self.layout.leaves[0].shape) - lane_dims
            lanes = leaves[0].shape[lanes : lanes + lane_dims].numel()
            sources, alive = np.empty((len(self.dedup.given), 2, 3), np.int64), []
            for source, slots in zip(sources, self.dedup.given, strict=True):
                for s, slot in enumerate(slots):
                    leaf, shape = leaves[slot], self.layout.leaves[slot].shape
                    if leaf.is_contiguous() and leaf.device == device and not (leaf.is_conj() or leaf.is_neg()):
                        width = self.layout.leaves[slot].nbytes
                        source[s] = leaf.data_ptr(), lanes * width, width
                        continue
                    leaf = _dense(leaf.to(device).resolve_conj().resolve_neg(), lane_dims, len(shape))
                    alive.append(leaf)
                    size = leaf.element_size()
                    source[s] = leaf.data_ptr(), leaf.stride(0) * size, leaf.stride(1) * size
            return write_(table, sources, cells, count, lanes, deferred=deferred)
        if isinstance(cells, int):
            cells = (cells + torch.arange(count, device=device)) % self.cells
        dims = [len(leaf.shape) for leaf in self.layout.leaves]
        plain = [leaf.to(device).resolve_conj().resolve_neg() for leaf in leaves]
        dense = [[_dense(plain[i], lane_dims, dims[i]) for i in x] for x in self.dedup.given]
        write_by_steps_(table, [tuple(sides) for sides in dense], cells, deferred=deferred)

    def replace_cells_(self, cells: np.ndarray, leaves: list[torch.Tensor]) -> None:
        if not len(cells):
            return
        rows, leaves = last_of_each(cells, leaves)
        self._ensure(len(rows))
        where = torch.from_numpy(rows).to(self.flat.device)
        for column, slot in zip(self._stored_columns(self.flat), self.dedup.kept, strict=True):
            column[where] = leaves[slot].to(column.device)
        self._write_entries([leaf[:, None] for leaf in leaves], 1, where, len(rows))

    def _ensure(self, rows: int) -> None:
        """Reserve memory for all entries that ``rows`` new rows may need; raise an OSError if the disk is full."""
        if self._make_room is None and not grows(self.matrix.device):
            return
        for g, (free, used) in enumerate(counters.tolist() for counters in self.table.counters):
            needed = used + max(0, rows * self.table.groups[g].names - (0 if self.is_deferred else free))
            self._make_room_for(g, min(self._sections.most[g], needed))

    def _make_room_for(self, g: int, entries: int) -> None:
        if self._make_room is not None:
            self._make_room(self._sections.stacks[g], 4 * (entries + 1))
            self._make_room(self._sections.entries[g], self.table.groups[g].nbytes * entries)
        elif grows(self.matrix.device):
            room = len(self.table.entries[g]) - 1
            if entries > room:
                grow_(self.table, g, max(entries, min(self._sections.most[g], room * 5 // 4)))

    def forget(self) -> None:
        for g, counters in enumerate(self.table.counters):
            self._clear_ids(g)
            counters.zero_()

    def _clear_ids(self, g: int) -> None:
        """Set the ids of pool ``g`` in all rows to 0."""
        ids = self.table.ids(g)
        for part in [ids] if grows(ids.device) else ids.split(_LOOK):
            if grows(ids.device) or part.any():  # memory that is only read stays uncommitted
                part.zero_()

    def rebuild(self, used: Sequence[int] | None = None) -> None:
        rebuild_(self.table, used=used)

    def entries(self) -> list[torch.Tensor]:
        return [entries[:used] for entries, used in zip(self.table.entries, self.used, strict=True)]

    def takes(self, dedup: DedupLayout | None, used: Sequence[int]) -> bool:
        if self.is_deferred or dedup != self.dedup:  # deferred: a load must be undoable
            return False
        return all(count <= room for count, room in zip(used, self._sections.most, strict=True))

    def room_for(self, used: Sequence[int]) -> list[torch.Tensor]:
        for g, count in enumerate(used):
            self._make_room_for(g, count)
        self.forget()
        return [entries[:count] for entries, count in zip(self.table.entries, used, strict=True)]

    def copy_steps_(self, source: Rows, ranges: Iterable[tuple[int, int]]) -> None:
        if not self.is_deferred:
            self.forget()
            return super().copy_steps_(source, ranges)
        for g in range(len(self.table.groups)):
            self._clear_ids(g)  # the entries stay unchanged until the load is done
        try:
            super().copy_steps_(source, ranges)
        finally:  # also after an error, because unreferenced entries would never be freed
            self.rebuild()


def grows(device: torch.device) -> bool:
    """Whether pools on this device start small and grow."""
    return device.type != "cpu"  # other devices commit memory at allocation, not at the first use


def _dense(leaf: torch.Tensor, lane_dims: int, shape_dims: int) -> torch.Tensor:
    """Return a leaf as ``[T, E, ...]`` with contiguous rows; copy only if necessary."""
    if leaf.ndim == lane_dims + shape_dims:
        leaf = leaf[None]
    size = leaf.shape[1 : 1 + lane_dims].numel()
    if lane_dims != 1:
        leaf = leaf.reshape(len(leaf), size, *leaf.shape[1 + lane_dims :])
    inner, stride = 1, True
    for dim in range(leaf.ndim - 1, leaf.ndim - 1 - shape_dims, -1):
        stride &= leaf.shape[dim] == 1 or leaf.stride(dim) == inner
        inner *= leaf.shape[dim]
    return leaf if stride else leaf.contiguous()
