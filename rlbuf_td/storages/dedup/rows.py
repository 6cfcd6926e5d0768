"""Rows that share what repeats between them: a :class:`Rows` whose pooled keys lie in entries that rows name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.kernels.rows import new_rows
from rlbuf_td.kernels.rows.pool import Table, check, grow_, read_, rebuild_, write_
from rlbuf_td.kernels.rows.pool_by_steps import write_by_steps_
from rlbuf_td.kernels.rows.read_ahead import ask_for_entries, ask_for_rows
from rlbuf_td.storages.dedup.pooling import NAMES, Pooling
from rlbuf_td.storages.dedup.sections import Sections
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.rows import Rows, _wrapped
from rlbuf_td.storages.schema import SchemaError

_CHUNK = 256 << 20  # bytes of whole rows that are put together at once where many are copied
_LOOK = 4096  # rows of which is asked at once whether any holds entries


class PooledRows(Rows):
    """``[T, *lanes]`` rows of bytes that name entries of a pool.

    Args:
        pooling: what a row holds, and what of that is in the pool.
        memory: :attr:`Sections.total` bytes, uint8, zeros at first. On another device than the CPU, where memory cannot
            be had bit by bit, the first :attr:`Sections.fixed` of them: entries have memory of their own then, which is
            copied to a larger one when it is full; before each write the host waits to see whether it is.
        shape: ``[T, *lanes]``.
        make_room: called, before entries are taken, with each section that grows and the bytes that it needs: it raises
            an ``OSError`` if there are not so many.
        table: that of the rows that these are the first of.
    """

    def __init__(
        self,
        pooling: Pooling,
        memory: torch.Tensor,
        shape: torch.Size,
        *,
        make_room: Callable[[int, int], None] | None = None,
        table: Table | None = None,
    ) -> None:
        self.layout, self.pooling, self.memory = pooling.layout, pooling, memory
        self.own: RowLayout = pooling.own
        cells = prod(shape)
        matrix = memory[: cells * self.own.row_bytes].view(*shape, self.own.row_bytes)
        self.matrix = matrix.view(self.own.carrier)
        self.flat = self.matrix.view(-1, self.matrix.shape[-1])
        self.shape, self.steps, self.lanes, self.cells = shape, shape[0], shape[1:], cells
        self.is_mapped = make_room is not None
        self._begin, self._end = 0, None
        self.is_deferred = False  # where a process may die in the middle of a write
        self._make_room = make_room
        self.table: Table = self._make_table() if table is None else table

    @cached_property
    def sections(self) -> Sections:
        """Where rows and entries lie in the memory."""
        return Sections.of(self.pooling, len(self.table.rows))

    def _make_table(self) -> Table:
        pooling, memory = self.pooling, self.memory
        parts = Sections.of(pooling, self.cells)
        entries, stacks, counters = [], [], []
        for g, (group, most) in enumerate(zip(pooling.groups, parts.most, strict=True)):
            if grows(memory.device):
                entries.append(memory.new_empty((1, group.nbytes)))
                stacks.append(memory.new_empty(1, dtype=torch.int32))
            else:
                at = parts.entries[g]
                entries.append(memory[at : at + group.nbytes * (most + 1)].view(most + 1, group.nbytes))
                at = parts.stacks[g]
                stacks.append(memory[at : at + 4 * (most + 1)].view(torch.int32))
            at = parts.counters + 16 * g
            counters.append(memory[at : at + 16].view(torch.int64))
        return Table(
            pooling.groups,
            pooling.runs,
            memory[: self.cells * self.own.row_bytes].view(self.cells, self.own.row_bytes),
            self.layout.row_bytes,
            self.cells // self.steps,
            entries,
            stacks,
            tuple(counters),
            not grows(memory.device),
        )

    @property
    def used(self) -> list[int]:
        """How many entries of each group have memory, free ones included."""
        return [int(counters[1]) for counters in self.table.counters]

    @property
    def held(self) -> list[int]:
        """How many entries of each group rows hold."""
        return [int(counters[1] - counters[0]) for counters in self.table.counters]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, and of the entries that have been used so far."""
        sizes = (group.nbytes for group in self.table.groups)
        return self.cells * self.own.row_bytes + sum(n * size for n, size in zip(self.used, sizes, strict=True))

    def saved_bytes(self) -> dict[tuple[str, ...], int]:
        """Return by key how many bytes these rows take less than if each held its own."""
        return self.pooling.saved_bytes(self.cells, self.held)

    def check(self) -> None:
        """Look whether each entry is either free or held, by rows that may share it; for tests.

        Raises:
            AssertionError: it is not.
        """
        check(self.table)

    def sources(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that reading goes to; entries on a device move to others when they are many."""
        return (self.matrix, *self.table.entries)

    def first(self, steps: int) -> PooledRows:
        """Return the first time steps, as a view."""
        shape = torch.Size([steps, *self.lanes])
        rows = PooledRows(self.pooling, self.memory, shape, make_room=self._make_room, table=self.table)
        rows.is_deferred = self.is_deferred
        return rows

    def view(self) -> TensorDict:
        """Return all rows as a TensorDict of strided views, without the keys that are pooled."""
        return self.own.unpack(self.matrix).exclude(NAMES, inplace=True)

    # -- reading, as fresh memory

    def at_cells(self, flat: torch.Tensor) -> TensorDict:
        """Return the rows at flat positions."""
        return self.layout.unpack(self._packed(flat))

    def pack_(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write whole rows at flat positions into memory like what :meth:`_packed` returns."""
        out.copy_(self._packed(flat))

    def _packed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return whole rows, packed as :attr:`layout` says.

        Raises:
            IndexError: a position is out of range (on the CPU).
        """
        flat = flat.contiguous()
        block = self._whole(len(flat))
        if not read_(self.table, flat, self.cells, block, self._ask_for(flat) if self.is_mapped else None):
            _wrapped(flat, self.cells)
            raise IndexError(f"index {int(flat.min())} is out of range: {self.cells} have been written")
        return block.view(self.layout.carrier)

    def _ask_for(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Ask for the pages of rows and of what they name; return the order in which to read them."""
        order = ask_for_rows(self.table.rows, flat)
        if order is not None:
            ask_for_entries(self.table, flat[order])
        return order

    def blank(self, count: int) -> TensorDict:
        """Return memory for ``count`` whole rows, not initialised."""
        return self.layout.unpack(self._whole(count).view(self.layout.carrier))

    def _whole(self, count: int) -> torch.Tensor:
        return new_rows(torch.empty((0, self.layout.row_bytes), dtype=torch.uint8, device=self.matrix.device), count)

    def batches_at_cells(self, flat: torch.Tensor, size: int) -> list[TensorDict]:
        """Return :meth:`at_cells` of each ``size`` of ``flat``, as parts of one block of memory."""
        return self.layout.unpack_batches(self._packed(flat), size)

    def _at(self, cells: torch.Tensor) -> TensorDict:
        """Return the rows at flat positions of any shape."""
        block = self._packed(cells.reshape(-1))
        return self.layout.unpack(block.view((*cells.shape, block.shape[1])))

    def at_steps(self, index: torch.Tensor) -> TensorDict:
        """Return the time steps at ``index``; see :class:`Rows`."""
        steps = index % max(1, self.steps) if index.is_cuda else _wrapped(index, self.steps)
        lanes = self.cells // max(1, self.steps)
        if not self.lanes:
            return self._at(steps)
        cells = steps[..., None] * lanes + torch.arange(lanes, device=steps.device)
        return self._at(cells.view(*index.shape, *self.lanes))

    def at_coordinates(self, index: tuple[torch.Tensor, ...]) -> TensorDict:
        """Return the rows at coordinates; see :class:`Rows`."""
        flat: torch.Tensor | int = 0
        for size, coordinate in zip(self.shape, index, strict=True):
            flat = flat * size + (coordinate % size if coordinate.is_cuda else _wrapped(coordinate, size))
        return self._at(torch.as_tensor(flat))

    def at_region(self, index: Any) -> TensorDict:
        """Return what any other index that tensors take names: views of what rows hold themselves, where it gives some.

        Keys that are pooled are fresh memory.
        """
        found = self.view()[index]
        is_step = isinstance(index, int | np.integer) and not isinstance(index, bool)  # True is a mask
        if is_step and -self.steps <= index < self.steps:
            cells = self.cells_at(np.array([index % self.steps])).view(self.lanes)
        else:
            cells = torch.arange(self.cells, device=self.matrix.device).view(self.shape)[index]
        for key in self.pooling.places:
            found.set(key, self.column_at(key, cells))
        return found

    def column(self, key: tuple[str, ...]) -> torch.Tensor:
        """Return one pooled key of all rows, ``[T, *lanes, ...]``, as fresh memory."""
        return self.column_at(key, torch.arange(self.cells, device=self.matrix.device).view(self.shape))

    def column_at(self, key: tuple[str, ...], cells: torch.Tensor) -> torch.Tensor:
        """Return one pooled key of the rows at flat positions of any shape, as fresh memory."""
        g, p, side = self.pooling.places[key]
        leaf, group = self.pooling.leaves[key], self.table.groups[g]
        part, flat = group.parts[p], cells.reshape(-1)
        first = side * group.pieces
        names = self.table.ids(g)[:, first : first + group.pieces].index_select(0, flat).flatten().long() - 1
        raw = self.table.entries[g].narrow(1, part.into, part.inner * part.outer).index_select(0, names)
        raw = raw.view(len(flat), group.pieces, part.outer, part.inner).transpose(1, 2).contiguous()
        return raw.view(-1).view(leaf.dtype).view((*cells.shape, *leaf.shape))

    # -- writing leaves that fit

    def copy_(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Write ``count`` time steps from ``start`` on, wrapping at the end; leaves may be views of these rows."""
        if self._holds_any(leaves):
            leaves = [leaf.clone() for leaf in leaves]  # else a row could be read after it was overwritten
        self._ensure(count * (self.cells // self.steps))
        self._copy_own(start, count, [leaves[slot] for slot in self.pooling.kept])
        lanes = self.cells // self.steps
        self._share(leaves, len(self.lanes), start * lanes, count * lanes)

    def _copy_own(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        head = min(count, self.steps - start)
        if head == count:
            columns = self.own.columns(self.matrix.narrow(0, start, count))
            del columns[self.pooling.names_slot]
            if columns:
                torch._foreach_copy_(columns, leaves)
        else:
            self._copy_own(start, head, [leaf[:head] for leaf in leaves])
            self._copy_own(0, count - head, [leaf[head:] for leaf in leaves])

    def _share(self, leaves: list[torch.Tensor], lane_dims: int, cells: torch.Tensor | int, count: int) -> None:
        """Let rows name what is written to them; leaves that lack the time dim are of one time step."""
        table, device, deferred = self.table, self.matrix.device, self.is_deferred
        if table.is_compiled:
            lanes = leaves[0].ndim - len(self.layout.leaves[0].shape) - lane_dims
            lanes = leaves[0].shape[lanes : lanes + lane_dims].numel()
            sources, held = np.empty((len(self.pooling.given), 2, 3), np.int64), []
            for source, slots in zip(sources, self.pooling.given, strict=True):
                for s, slot in enumerate(slots):
                    leaf, shape = leaves[slot], self.layout.leaves[slot].shape
                    if leaf.is_contiguous() and leaf.device == device and not (leaf.is_conj() or leaf.is_neg()):
                        width = self.layout.leaves[slot].nbytes
                        source[s] = leaf.data_ptr(), lanes * width, width
                        continue
                    leaf = _dense(leaf.to(device).resolve_conj().resolve_neg(), lane_dims, len(shape))
                    held.append(leaf)
                    size = leaf.element_size()
                    source[s] = leaf.data_ptr(), leaf.stride(0) * size, leaf.stride(1) * size
            return write_(table, sources, cells, count, lanes, deferred=deferred)
        if isinstance(cells, int):
            cells = (cells + torch.arange(count, device=device)) % self.cells
        given = [
            tuple(
                _dense(leaves[slot].to(device), lane_dims, len(self.layout.leaves[slot].shape)).resolve_conj()
                for slot in slots
            )
            for slots in self.pooling.given
        ]
        write_by_steps_(table, given, cells, deferred=deferred)

    def scatter_(self, steps: np.ndarray, leaves: list[torch.Tensor]) -> None:
        """Write the time steps named; of one that is named twice, the last row stays."""
        steps, leaves = _last_of_each(steps, leaves)
        lanes = self.cells // self.steps
        self._ensure(len(steps) * lanes)
        where = torch.from_numpy(steps).to(self.matrix.device)
        self._put_own(self.own.columns(self.matrix), where, leaves)
        self._share(leaves, len(self.lanes), self.cells_at(steps), len(steps) * lanes)

    def _put_own(self, columns: list[torch.Tensor], where: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        del columns[self.pooling.names_slot]
        for column, slot in zip(columns, self.pooling.kept, strict=True):
            column[where] = leaves[slot].to(column.device)

    def replace_(self, cells: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Write at flat positions of any shape; of one that is named twice, the last row stays."""
        if not cells.numel():
            return
        flat = [leaf.flatten(0, cells.ndim - 1) if cells.ndim else leaf[None] for leaf in leaves]
        rows, flat = _last_of_each(cells.reshape(-1).cpu().numpy(), flat)
        self._ensure(len(rows))
        where = torch.from_numpy(rows).to(self.matrix.device)
        self._put_own(self.own.columns(self.flat), where, flat)
        self._share([leaf[:, None] for leaf in flat], 1, where, len(rows))

    def _ensure(self, rows: int) -> None:
        """Make room for the entries that a write of so many rows may take.

        Raises:
            OSError: the disk is full.
        """
        if self._make_room is None and not grows(self.matrix.device):
            return
        for g, (free, used) in enumerate(counters.tolist() for counters in self.table.counters):
            needed = used + max(0, rows * self.table.groups[g].names - (0 if self.is_deferred else free))
            self._make_room_for(g, min(self.sections.most[g], needed))

    def _make_room_for(self, g: int, entries: int) -> None:
        """Make room for so many entries of a group."""
        if self._make_room is not None:
            self._make_room(self.sections.stacks[g], 4 * (entries + 1))
            self._make_room(self.sections.entries[g], self.table.groups[g].nbytes * entries)
        elif grows(self.matrix.device):
            room = len(self.table.entries[g]) - 1
            if entries > room:
                grow_(self.table, g, max(entries, min(self.sections.most[g], room * 5 // 4)))

    def forget(self) -> None:
        """Let all rows hold nothing: all entries are unused.

        Rows that hold nothing are only looked at, so that no memory is taken for those that never were written.
        """
        for g, counters in enumerate(self.table.counters):
            self._let_go(g)
            counters.zero_()

    def begin_load(self) -> None:
        """Let all rows hold nothing, before others are written to them by several calls that :meth:`end_load` ends.

        Where a process may die, no entry that they held is taken before that.
        """
        if not self.is_deferred:
            return self.forget()
        for g in range(len(self.table.groups)):
            self._let_go(g)

    def end_load(self) -> None:
        """Find anew which entries are free, where :meth:`begin_load` left those that rows held."""
        if self.is_deferred:
            self.rebuild()

    def _let_go(self, g: int) -> None:
        ids = self.table.ids(g)
        if grows(ids.device):
            ids.zero_()
            return
        for part in ids.split(_LOOK):
            if part.any():
                part.zero_()

    def rebuild(self) -> None:
        """Find anew which entries are free, from what the rows name."""
        rebuild_(self.table)

    # -- state

    def entries(self) -> list[torch.Tensor]:
        """Return the entries of each group that have been used, ``[n, bytes]``, as views."""
        return [entries[:used] for entries, used in zip(self.table.entries, self.used, strict=True)]

    def takes(self, pooling: Pooling | None, used: Sequence[int]) -> bool:
        """Return whether saved rows may be put in place as they are.

        They share the same, there is room for so many entries of each group, and nobody may have to undo it.
        """
        if self.is_deferred or pooling != self.pooling:
            return False
        return all(count <= room for count, room in zip(used, self.sections.most, strict=True))

    def restore_(self, matrix: torch.Tensor, entries: list[torch.Tensor]) -> None:
        """Put saved rows, the first time steps, and their entries in place of what is here.

        Raises:
            SchemaError: they name entries that there are none of; rows hold nothing then.
        """
        for room, saved in zip(self.room_for([len(saved) for saved in entries]), entries, strict=True):
            room.copy_(saved)
        self.matrix[: len(matrix)].copy_(matrix)
        self.take_in([len(saved) for saved in entries])

    def room_for(self, used: Sequence[int]) -> list[torch.Tensor]:
        """Let rows hold nothing, and return memory for so many entries of each group, which :meth:`take_in` takes.

        Raises:
            OSError: the disk is full; rows are as they were.
        """
        for g, count in enumerate(used):
            self._make_room_for(g, count)
        self.forget()
        return [entries[:count] for entries, count in zip(self.table.entries, used, strict=True)]

    def take_in(self, used: list[int]) -> None:
        """Take rows and entries that have been put in place; so many entries of each group are used.

        Raises:
            SchemaError: they name entries that there are none of; rows hold nothing then.
        """
        for g, most in enumerate(used):
            ids = self.table.ids(g)
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > most):
                self.forget()
                raise SchemaError("the saved rows name entries that were not saved with them")
        rebuild_(self.table, used=used)

    def chunks(self, first: int, count: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield time steps in order, as how many and their leaves, in parts that fit into memory."""
        lanes = self.cells // max(1, self.steps)
        size = max(1, _CHUNK // (lanes * self.layout.row_bytes))
        for start in range(first, first + count, size):
            steps = min(size, first + count - start)
            cells = torch.arange(start * lanes, (start + steps) * lanes, device=self.matrix.device)
            yield steps, self.layout.columns(self._packed(cells).view(steps, *self.lanes, -1))


def grows(device: torch.device) -> bool:
    """Return whether memory on a device is all taken at once, so that it has to grow by copies."""
    return device.type != "cpu"


def _dense(leaf: torch.Tensor, lane_dims: int, shape_dims: int) -> torch.Tensor:
    """Return a leaf as ``[T, E, ...]`` whose rows are dense, a copy only where it must be one."""
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


def _last_of_each(steps: np.ndarray, leaves: list[torch.Tensor]) -> tuple[np.ndarray, list[torch.Tensor]]:
    """Return positions in order, each once, with the last row that is given for it."""
    unique, last = np.unique(steps[::-1], return_index=True)
    keep = torch.from_numpy(len(steps) - 1 - last)
    return unique, [leaf[keep.to(leaf.device)] for leaf in leaves]
