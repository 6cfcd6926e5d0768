"""Deduplicated rows: each stored row holds names of pool entries instead of observations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.kernels.rows import refuse_rows
from rlbuf_td.kernels.rows.pool import read_, rebuild_, write_
from rlbuf_td.kernels.rows.read_ahead import ask_for_entries, ask_for_rows
from rlbuf_td.kernels.rows.table import Table
from rlbuf_td.storages.dedup import ENTRY_NAMES, DedupLayout, Sections
from rlbuf_td.storages.rows import Rows, last_of_each
from rlbuf_td.storages.rows.pools import BlockPools, GrowingPools, MakeRoom

_CHUNK = 256 << 20  # bytes of whole rows that are assembled at once


class DedupRows(Rows):
    """Rows ``[T, *lanes]`` that hold names instead of observations; the observations are in pools of entries.

    All bytes of ``block`` are 0. If it has :attr:`Sections.total` bytes, it also holds the pools, and ``make_room``
    reserves disk space if it is a file. If it has only :attr:`Sections.fixed` bytes, the pools grow outside of it.
    """

    dedup: DedupLayout

    def __init__(
        self, dedup: DedupLayout, block: torch.Tensor, shape: torch.Size, make_room: MakeRoom | None = None
    ) -> None:
        stored, cells = dedup.stored, prod(shape)
        rows, sections = block[: cells * stored.row_bytes].view(cells, -1), Sections.of(dedup, cells)
        super().__init__(dedup.layout, rows.view(*shape, -1).view(stored.carrier))
        self.extents = np.zeros_like(dedup.layout.extents)
        for run in dedup.runs:
            self.extents[run.leaf] = run.offset, run.nbytes
        self.dedup, self.is_mapped, self._most = dedup, make_room is not None, sections.most
        self.pools = (
            BlockPools(dedup, block, sections, make_room)
            if len(block) == sections.total
            else GrowingPools(dedup, block, sections)
        )
        first = [sections.counters + 16 * g for g in range(len(dedup.groups))]
        self.table = Table(
            *(dedup.groups, dedup.parts, dedup.runs, rows, self.lanes.numel(), self.pools.entries, self.pools.stacks),
            counters=[block[at : at + 16].view(torch.int64) for at in first],
            is_compiled=self.pools.is_compiled,
        )

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

    def unpack(self, matrix: torch.Tensor) -> TensorDict:
        return self.dedup.stored.unpack(matrix).exclude(ENTRY_NAMES, inplace=True)

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
        cells = cells.contiguous()
        if self.is_mapped:
            asked = ask_for_rows(self.table.rows, cells.view(-1))
            if asked is not None:
                ask_for_entries(self.table, asked)
        if not read_(self.table, cells, self.cells, leaves):
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
        lanes = self.table.lanes
        self._reserve(count * lanes)
        self._copy_stored(start, count, [leaves[slot] for slot in self.dedup.kept])
        self._write_entries(leaves, lanes, start * lanes, count * lanes)

    def _copy_stored(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        head = min(count, self.steps - start)
        if head == count and leaves:
            torch._foreach_copy_(self._stored_columns(self.matrix.narrow(0, start, count)), leaves)
        elif head < count:
            self._copy_stored(start, head, [leaf[:head] for leaf in leaves])
            self._copy_stored(0, count - head, [leaf[head:] for leaf in leaves])

    def _stored_columns(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        columns = self.dedup.stored.columns(matrix)
        del columns[self.dedup.names_slot]
        return columns

    def _write_entries(self, leaves: list[torch.Tensor], lanes: int, cells: torch.Tensor | int, count: int) -> None:
        """Store observations, ``[T, lanes, ...]``, as pool entries, and their names in ``count`` rows."""
        found, device = self.layout.leaves, self.matrix.device
        given = [[_dense(leaves[i].to(device), lanes, found[i].shape) for i in slots] for slots in self.dedup.given]
        write_(self.table, given, cells, count, deferred=self.is_deferred)

    def replace_cells_(self, cells: np.ndarray, leaves: list[torch.Tensor]) -> None:
        if not len(cells):
            return
        rows, leaves = last_of_each(cells, leaves)
        self._reserve(len(rows))
        where = torch.from_numpy(rows).to(self.flat.device)
        for column, slot in zip(self._stored_columns(self.flat), self.dedup.kept, strict=True):
            column[where] = leaves[slot].to(column.device)
        self._write_entries(leaves, 1, where, len(rows))

    def _reserve(self, rows: int) -> None:
        """Make room for all entries that ``rows`` new rows may need; raise an OSError if the disk is full."""
        for g, (free, used) in enumerate(counters.tolist() for counters in self.table.counters):
            needed = used + max(0, rows * self.table.groups[g].names - (0 if self.is_deferred else free))
            self.pools.reserve(g, min(self._most[g], needed))

    def forget(self) -> None:
        self._clear_names()
        for counters in self.table.counters:
            counters.zero_()

    def _clear_names(self) -> None:
        for g in range(len(self.table.groups)):
            self.pools.clear_(self.table.names(g))

    def rebuild(self, used: Sequence[int] | None = None) -> None:
        rebuild_(self.table, used=used)

    def entries(self) -> list[torch.Tensor]:
        return [entries[:used] for entries, used in zip(self.table.entries, self.used, strict=True)]

    def takes(self, dedup: DedupLayout | None, used: Sequence[int]) -> bool:
        if self.is_deferred or dedup != self.dedup:  # deferred: a load must be undoable
            return False
        return all(count <= room for count, room in zip(used, self._most, strict=True))

    def room_for(self, used: Sequence[int]) -> list[torch.Tensor]:
        for g, count in enumerate(used):
            self.pools.reserve(g, count)
        self.forget()
        return [entries[:count] for entries, count in zip(self.table.entries, used, strict=True)]

    def copy_steps_(self, source: Rows, ranges: Iterable[tuple[int, int]]) -> None:
        if not self.is_deferred:
            self.forget()
            return super().copy_steps_(source, ranges)
        self._clear_names()  # the entries stay unchanged until the load is done
        try:
            super().copy_steps_(source, ranges)
        finally:  # also after an error, because unreferenced entries would never be freed
            self.rebuild()


def _dense(leaf: torch.Tensor, lanes: int, shape: torch.Size) -> torch.Tensor:
    """Return a leaf as ``[T, lanes, *shape]`` with contiguous rows; copy only if necessary."""
    leaf = leaf.resolve_conj().resolve_neg().reshape(-1, lanes, *shape)
    return leaf if leaf.is_contiguous() or leaf[:1, :1].is_contiguous() else leaf.contiguous()
