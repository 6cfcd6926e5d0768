"""Deduplicated rows: each stored row holds names of entries instead of observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlbuf_td.kernels.rows import ask_for_rows, refuse_rows
from rlbuf_td.storages.dedup import ENTRY_NAMES, DedupLayout
from rlbuf_td.storages.entries import Entries, MakeRoom
from rlbuf_td.storages.rows import Rows


class DedupRows(Rows):
    """Rows ``[T, *lanes]`` that hold names instead of observations; the observations
    are entries in the same block.

    All bytes of ``block``, :attr:`Sections.total`, are 0. ``make_room`` reserves disk
    space if it is a file.
    """

    dedup: DedupLayout

    def __init__(
        self,
        dedup: DedupLayout,
        block: torch.Tensor,
        shape: torch.Size,
        make_room: MakeRoom | None = None,
    ) -> None:
        self.entries = Entries(dedup, block, shape, make_room)
        super().__init__(
            dedup.layout, self.entries.rows.view(*shape, -1).view(dedup.stored.carrier)
        )
        self.extents = np.zeros_like(dedup.layout.extents)
        for run in dedup.runs:
            self.extents[run.leaf] = run.offset, run.nbytes
        self.dedup, self.is_mapped = dedup, make_room is not None
        self.words = None  # kernels on a GPU read plain rows alone

    @property
    def nbytes(self) -> int:
        return self.cells * self.dedup.stored.row_bytes + self.entries.nbytes

    def saved_bytes(self) -> dict[tuple[str, ...], int]:
        return self.dedup.saved_bytes(self.cells, self.entries.used)

    def unpack(self, matrix: torch.Tensor) -> TensorDict:
        return self.dedup.stored.unpack(matrix).exclude(ENTRY_NAMES, inplace=True)

    def leaves_at(self, cells: torch.Tensor) -> list[torch.Tensor]:
        leaves = self.layout.blank(cells.shape, self.matrix.device)
        self.read_(cells, leaves)
        return leaves

    def pack_(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        torch._foreach_copy_(self.layout.columns(out), self.leaves_at(flat))

    def joined_at(self, cells: torch.Tensor, last: torch.Tensor) -> TensorDict:
        leaves = self.layout.blank(cells.shape, self.matrix.device)
        named = list(zip(self.layout.places, leaves, strict=True))
        self.read_(cells, [None if key[0] == "next" else leaf for key, leaf in named])
        self.read_(last, [leaf if key[0] == "next" else None for key, leaf in named])
        return self.layout.wrap(leaves, cells.shape, self.matrix.device, {})

    def read_(self, cells: torch.Tensor, leaves: Sequence[torch.Tensor | None]) -> None:
        """Copy the rows at flat indices ``cells`` to ``leaves``: contiguous tensors, or
        None for leaves to skip."""
        cells = cells.contiguous()
        if self.is_mapped:
            self.ask_for(cells.view(-1))
        if not self.entries.read(cells, self.cells, leaves):
            refuse_rows(cells, self.cells)

    def ask_for(self, cells: torch.Tensor) -> None:
        asked = ask_for_rows(self.entries.rows, cells)
        if asked is not None:
            self.entries.ask_for(asked)

    def at_region(self, index: object) -> TensorDict:
        region = super().at_region(index)
        cells = self.cells_of(index)
        for key in self.dedup.deduplicated:
            region.set(key, self.column_at(key, cells))
        return region

    def column(self, path: tuple[str, ...]) -> Any:
        if path in self.dedup.deduplicated:
            return self.column_at(path, self.cells_of(slice(None)))
        node = super().column(path)
        for key in self.dedup.deduplicated:
            if key[: len(path)] == path:
                node.set(key[len(path) :], self.column(key))
        return node

    def column_at(self, key: tuple[str, ...], cells: torch.Tensor) -> torch.Tensor:
        if key not in self.dedup.deduplicated:
            return super().column_at(key, cells)
        leaf = self.dedup.deduplicated[key]
        column = torch.empty(
            (*cells.shape, *leaf.shape), dtype=leaf.dtype, device=self.matrix.device
        )
        leaves: list[torch.Tensor | None] = [None] * len(self.layout.leaves)
        leaves[self.layout.places[key]] = column
        self.read_(cells, leaves)
        return column

    # -- writing

    def append_(
        self, cells: np.ndarray, leaves: list[torch.Tensor], head: np.ndarray
    ) -> None:
        begin = self.matrix.data_ptr()
        if any(
            begin <= leaf.data_ptr() < begin + self.matrix.nbytes for leaf in leaves
        ):
            # otherwise a row could be read after it was overwritten
            leaves = [leaf.clone() for leaf in leaves]
        self.entries.reserve(len(cells))
        where = torch.from_numpy(cells)
        columns = self.dedup.stored.columns(self.flat)
        del columns[self.dedup.names_slot]
        for column, slot in zip(columns, self.dedup.kept, strict=True):
            column[where] = leaves[slot].to(column.device)
        self.entries.write(leaves, head, where)

    # -- state

    def used_entries(self) -> list[torch.Tensor]:
        return [
            memory[:used]
            for memory, used in zip(self.entries.memory, self.entries.used, strict=True)
        ]

    def room_for(self, used: Sequence[int]) -> list[torch.Tensor]:
        return self.entries.room_for(used)

    def forget(self) -> None:
        self.entries.forget()

    def link(self, head: np.ndarray) -> None:
        self.entries.link(head)
