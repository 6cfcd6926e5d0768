"""What rows are made of, and the memory that they get."""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from rlbuf_td.kernels.host_memory import advise_huge_pages
from rlbuf_td.storages.dedup import DedupLayout
from rlbuf_td.storages.entries import Sections
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.memory import RowsFile, SharedFile, allocate_bytes
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.rows.dedup import DedupRows


class RowsForm(NamedTuple):
    """The form of rows ``[T, *lanes]``. Their memory is that of a device, lies in a
    folder, or, without one, in memory that processes share."""

    layout: RowLayout
    shape: torch.Size
    dedup: DedupLayout | None

    @property
    def nbytes(self) -> int:
        if self.dedup is None:
            return prod(self.shape) * self.layout.row_bytes
        return Sections.of(self.dedup, self.shape).total

    def allocate(
        self,
        device: torch.device,
        folder: Path | None,
        shared: SharedFile | None,
        remedy: str,
    ) -> Rows:
        """Allocate new rows.

        Raises:
            MemoryError, OSError: there is too little room; ``remedy`` says what helps.
        """
        dedup, shape = self.dedup, self.shape
        sparse = None
        stored = self.layout
        what = "take"
        if dedup is not None:
            sections = Sections.of(dedup, shape)
            sparse = sections.likely, sections.fixed
            stored = dedup.stored
            what = "take with what they share"
        what = f"{prod(shape):,} rows of {stored.row_bytes:,} bytes {what}"
        memory = allocate_bytes(
            self.nbytes,
            device,
            what,
            remedy,
            scratch_dir=folder,
            shared=shared,
            sparse=sparse,
        )
        # For longer rows, huge pages cost more at the first write than they save in
        # reads.
        is_shared = shared is not None and folder is None
        is_short = stored.row_bytes <= mmap.PAGESIZE
        if dedup is None and not is_shared and is_short:
            advise_huge_pages(memory)
        return self._rows_in(memory, folder)

    def map(self, folder: Path | None, shared: SharedFile) -> Rows:
        """Map rows that are there."""
        file = shared if folder is None else RowsFile.open(folder, self.nbytes)
        return self._rows_in(file.map(self.nbytes), folder)

    def _rows_in(self, block: torch.Tensor, folder: Path | None) -> Rows:
        if self.dedup is not None:
            file = None if folder is None else RowsFile(folder)
            return DedupRows(self.dedup, block, self.shape, file)
        matrix = block.view(*self.shape, self.layout.row_bytes)
        rows = Rows(self.layout, matrix.view(self.layout.carrier))
        rows.is_mapped = folder is not None
        return rows
