"""The entries of deduplicated observations: their memory beside the rows, and how rows
get them.

:mod:`rlbuf_td.kernels.rows.entries` explains entries, names, chunks and rings. All
numbers lie in the memory of the rows, where other processes and later ones find them.
``head``, ``[2, E]`` int64, is an argument that tells which rows of a lane are live: the
serial of its oldest row, and that of the row to write next; the row with a serial is in
time step ``serial % T``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch

from rlbuf_td.kernels.host_memory import address_of, addresses_of, on_host
from rlbuf_td.kernels.rows import ask_for_entries
from rlbuf_td.kernels.rows.entries import Stored
from rlbuf_td.storages.checks import State
from rlbuf_td.storages.dedup import DedupLayout
from rlbuf_td.storages.schema import SchemaError

# (offset of a section, nbytes): reserves disk space
MakeRoom: TypeAlias = Callable[[int, int], None]
_PAGE = 4096
_MAX_ENTRIES = 2**31 - 2
_DIRTY = 0  # position in `Entries.numbers`; the two counters of each group follow


@dataclass(frozen=True)
class Sections:
    """Byte offsets of the memory after the rows, aligned to pages: numbers, then links
    and entries of each group."""

    numbers: int
    following: tuple[int, ...]
    entries: tuple[int, ...]
    chunks: tuple[int, ...]  # capacity of each group
    fixed: int  # bytes before the links
    likely: int  # bytes used if each row shares its next observation
    total: int

    @classmethod
    def of(cls, dedup: DedupLayout, shape: torch.Size) -> Sections:
        # As many entries as the rows refer to, and three chunks more per lane: they may
        # begin and end within a chunk.
        cells, lanes = prod(shape), prod(shape[1:])
        chunks = tuple(
            lanes * (3 + (shape[0] * group.names >> group.bits))
            for group in dedup.groups
        )
        most = max(
            count << group.bits
            for count, group in zip(chunks, dedup.groups, strict=True)
        )
        if most > _MAX_ENTRIES:
            fit = f"{cells * _MAX_ENTRIES // most:,} of these fit. Take a smaller max_size"
            raise SchemaError(f"{cells:,} deduplicated rows are too many: {fit}")
        numbers, following, entries = _pages(cells * dedup.stored.row_bytes), [], []
        offset = numbers + _pages(8 + 16 * len(chunks))
        for group, count in zip(dedup.groups, chunks, strict=True):
            following.append(offset)
            offset += _pages(4 * count)
            entries.append(offset)
            offset += _pages(group.nbytes * count << group.bits)
        likely = following[0] + sum(cells * group.nbytes for group in dedup.groups)
        return cls(
            numbers,
            tuple(following),
            tuple(entries),
            chunks,
            following[0],
            likely,
            offset,
        )


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class Entries:
    """The entries of rows ``[T, *lanes]``, in the same ``block`` of memory, all of
    which is 0 at first.

    ``make_room`` reserves disk space if the block is a file.
    """

    def __init__(
        self,
        dedup: DedupLayout,
        block: torch.Tensor,
        shape: torch.Size,
        make_room: MakeRoom | None,
    ) -> None:
        self._dedup = dedup
        self.groups = dedup.groups
        self.lanes = prod(shape[1:])
        self._make_room = make_room
        self._sections = sections = Sections.of(dedup, shape)
        self.rows = block[: prod(shape) * dedup.stored.row_bytes].view(prod(shape), -1)
        self._following = [
            block[offset:][: 4 * n]
            for offset, n in zip(sections.following, sections.chunks, strict=True)
        ]
        #: Per group ``[M, bytes]`` uint8: name ``i`` is entry ``i - 1``.
        self.memory = [
            block[offset:][: n * group.nbytes << group.bits].view(-1, group.nbytes)
            for offset, n, group in zip(
                sections.entries, sections.chunks, self.groups, strict=True
            )
        ]
        self._numbers = block[sections.numbers :][: 8 + 16 * len(self.groups)].view(
            torch.int64
        )
        #: Whether the rings must be linked before the next write; then spare chunk plus
        # 1 and used chunks per group.
        self.numbers = self._numbers.numpy()
        self._stored = np.zeros(len(Stored._fields), np.int64)

    @property
    def used(self) -> list[int]:
        """For each group, the number of entries in all chunks that have been used."""
        return [
            int(n) << group.bits
            for n, group in zip(self.numbers[2::2], self.groups, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        return sum(
            n * group.nbytes for n, group in zip(self.used, self.groups, strict=True)
        )

    def names(self, g: int) -> torch.Tensor:
        """Return a view of the int32 entry names that the rows store for group number
        ``g``, ``[N, names]``."""
        group = self.groups[g]
        return self.rows.narrow(1, group.names_at, 4 * group.names).view(torch.int32)

    @property
    def address(self) -> int:
        """The address of a :class:`Stored`: always the same, but what it says is made
        anew if the rows have moved."""
        if self._stored[0] != self.rows.data_ptr():
            self._describe()
        return int(self._stored.ctypes.data)

    def _describe(self) -> None:
        self.numbers, total = self._numbers.numpy(), self.rows.shape[0]
        groups = [
            group._replace(
                chunks=self._sections.chunks[g],
                entries=self.memory[g].data_ptr(),
                following=self._following[g].data_ptr(),
                counters=self._numbers.data_ptr() + 8 + 16 * g,
            )
            for g, group in enumerate(self.groups)
        ]
        kept = groups, self._dedup.parts, self._dedup.runs
        self._arrays = [np.array(numbers, np.int64) for numbers in kept]
        groups_at, parts_at, runs_at = (numbers.ctypes.data for numbers in self._arrays)
        sizes = [*map(len, self._arrays)]
        self._stored[:] = Stored(
            rows=self.rows.data_ptr(),
            row_bytes=self.rows.shape[1],
            total=total,
            lanes=self.lanes,
            groups=groups_at,
            group_count=sizes[0],
            parts=parts_at,
            part_count=sizes[1],
            runs=runs_at,
            run_count=sizes[2],
        )

    def ask_for(self, cells: torch.Tensor) -> None:
        """Request the memory pages of the entries of rows in a file."""
        for g, memory in enumerate(self.memory):
            ask_for_entries(self.names(g), memory, cells)

    def read(
        self, cells: torch.Tensor, live: int, leaves: Sequence[torch.Tensor | None]
    ) -> bool:
        """Copy the rows in ``cells`` to the tensors ``leaves``; return False if a row
        is not in ``[0, live)``.

        ``leaves`` has one contiguous tensor, or None, per key; after False, their
        contents are undefined.
        """
        from rlbuf_td.kernels.rows import entries_cpu

        targets = np.array(
            [0 if leaf is None else leaf.data_ptr() for leaf in leaves], np.int64
        )
        return entries_cpu.read(
            self.address, targets, address_of(cells), 0, cells.numel(), live, True
        )

    # -- writing

    def begin(self, head: np.ndarray) -> None:
        """Prepare a write; if the last one did not end, find the entries of the rows
        that are live."""
        if self.numbers[_DIRTY]:
            self.link(head)
        self.numbers[_DIRTY] = 1

    def end(self) -> None:
        self.numbers[_DIRTY] = 0

    def write(
        self, leaves: Sequence[torch.Tensor], head: np.ndarray, cells: torch.Tensor
    ) -> None:
        """Write the observations of rows to entries, and the names of these entries to
        the rows.

        Args:
            leaves: the leaves of whole rows, ``[B, ...]``.
            head: which rows are live before the write.
            cells: the flat indices of the rows, ``[B]`` int64, those of a lane in time
                order, at most ``T`` of each.
        """
        from rlbuf_td.kernels.rows import entries_cpu

        host_leaves = [*map(on_host, leaves)]  # kept alive for the loop
        places, cells = np.array(addresses_of(host_leaves)), cells.contiguous()
        self.begin(head)
        entries_cpu.write(
            self.address,
            places.ctypes.data,
            head.ctypes.data,
            address_of(cells),
            len(cells),
        )
        self.end()

    def link(self, head: np.ndarray) -> None:
        """Build the rings of all lanes from the rows that are live; all other chunks
        become spare."""
        from rlbuf_td.kernels.rows import entries_cpu

        entries_cpu.link(self.address, head.ctypes.data)
        self.numbers[_DIRTY] = 0

    def reserve(self, rows: int) -> None:
        """Make room for all entries that ``rows`` new rows may need; raise an OSError
        if the disk is full."""
        # memory needs no reservation: its pages are committed at their first write
        if self._make_room is None:
            return
        for g, (group, used) in enumerate(
            zip(self.groups, self.numbers[2::2].tolist(), strict=True)
        ):
            needed = used + (rows * group.names >> group.bits) + 3 * self.lanes
            self._reserve_chunks(
                self._make_room, g, min(self._sections.chunks[g], needed)
            )

    def _reserve_chunks(self, make_room: MakeRoom, g: int, count: int) -> None:
        group = self.groups[g]
        make_room(self._sections.following[g], 4 * count)
        make_room(self._sections.entries[g], group.nbytes * count << group.bits)

    # -- state

    def check(self, head: np.ndarray) -> None:
        """Raise an AssertionError unless the invariants of
        :mod:`rlbuf_td.kernels.rows.entries` hold."""
        for g, group in enumerate([] if self.numbers[_DIRTY] else self.groups):
            names = self.names(g).unflatten(0, (-1, self.lanes))
            used = int(self.numbers[2 + 2 * g])
            # on a full disk, the links of other chunks cannot be read
            following = self._following[g].view(torch.int32)[:used].tolist()
            rings = [_walk(following, int(self.numbers[1 + 2 * g]) - 1)]
            for lane in range(self.lanes):
                rows = names[np.arange(*head[:, lane]) % len(names), lane].numpy()
                chunks = _chunks_in_order(rows, used << group.bits, group.bits)
                live = [] if chunks is None else chunks.tolist()
                rings.append(_walk(following, live[0] if live else -1))
                if chunks is None or rings[-1][: len(live)] != live:
                    raise AssertionError(
                        f"the entries of lane {lane} are not in the order of its rows: {rows}"
                    )
            if sorted(chain.from_iterable(rings)) != [*range(used)]:
                raise AssertionError(f"a chunk is not in one ring or spare: {rings}")

    def forget(self) -> None:
        """Give up all entries; if the rows come back, :meth:`link` finds them."""
        self.numbers[1:] = 0
        self.numbers[_DIRTY] = 1

    def room_for(self, used: Sequence[int]) -> list[torch.Tensor]:
        """Return memory for the first ``used`` entries per group, which the caller
        fills."""
        chunks = [
            -(-count >> group.bits)
            for count, group in zip(used, self.groups, strict=True)
        ]
        for g, count in enumerate(chunks):
            if self._make_room is not None:
                self._reserve_chunks(self._make_room, g, count)
        self.forget()
        self.numbers[2::2] = chunks
        return [memory[:count] for memory, count in zip(self.memory, used, strict=True)]


def refuse_foreign(
    dedup: DedupLayout, matrix: torch.Tensor, entries: Sequence[Any], ring: State
) -> None:
    """Raise a SchemaError unless saved rows, ``[steps, *lanes, row_bytes]``, and
    ``entries`` belong together.

    Each name in a live row of the saved ``ring`` must have an entry; the entries of a
    lane must be in the order of its rows, in chunks of this lane alone, so that later
    writes do not change them.
    """
    steps, lanes = len(matrix), prod(matrix.shape[1:-1])
    rows = (
        matrix.cpu()
        .contiguous()
        .view(torch.uint8)
        .reshape(steps, lanes, matrix.shape[-1] * matrix.itemsize)
    )
    fits, serials = len(entries) == len(dedup.groups), ring["head"][:2].T.tolist()
    capacities = Sections.of(
        dedup, torch.Size([ring["steps"], *matrix.shape[1:-1]])
    ).chunks
    for group, memory, chunks in zip(dedup.groups, entries, capacities, strict=False):
        fits = (
            fits
            and len(memory.shape) == 2
            and memory.dtype is torch.uint8
            and memory.shape[1] == group.nbytes
        )
        if not fits or memory.shape[0] > chunks << group.bits:
            fits = False
            break
        names = (
            rows.narrow(2, group.names_at, 4 * group.names)
            .contiguous()
            .view(torch.int32)
            .numpy()
        )
        owners = np.full(chunks, -1)
        for lane, live in enumerate(serials):
            owned = _chunks_in_order(
                names[np.arange(*live) % ring["steps"], lane],
                memory.shape[0],
                group.bits,
            )
            fits = fits and owned is not None and bool((owners[owned] < 0).all())
            owners[owned] = lane
    if not fits:
        raise SchemaError(
            "the saved rows and the observations that they share do not belong together"
        )


def _chunks_in_order(names: np.ndarray, used: int, bits: int) -> np.ndarray | None:
    """Return the chunks of the entries ``names``, ``[n, names]``, of the rows of a lane
    by age, in this order; None: names are out of order, or above ``used``."""
    if not names.size:
        return np.empty(0, np.int32)
    if names.min() < 1 or names.max() > used:
        return None
    chunks, first, inverse = np.unique(
        (names - 1) >> bits, return_index=True, return_inverse=True
    )
    order = (first.argsort().argsort()[inverse].reshape(names.shape) << bits) + (
        (names - 1) & ((1 << bits) - 1)
    )
    oldest, newest = order[:, 0], order[:, -1]
    is_sorted = bool((np.diff(oldest) >= 0).all() and (np.diff(newest) >= 0).all())
    are_within = (order.min(1) == oldest).all() and (order.max(1) == newest).all()
    return chunks[first.argsort()] if is_sorted and are_within else None


def _walk(following: list[int], first: int) -> list[int]:
    """Return the chunks of a ring, or of the list of spare chunks."""
    chunks: list[int] = []
    while first >= 0 and (not chunks or first != chunks[0]):
        chunks.append(first)
        first = following[first]
    return chunks
