"""What a dump into a memory-mapped storage's own folder needs of rows that are overwritten later.

Such a dump copies nothing: its rows are those of the storage's file, which go on changing. So before the first change
of a block of bytes since the dump, the storage appends the block as it was to a journal. To read the dump is to read
the file with these blocks put back; blocks are named by number, and of one that was kept twice the first counts.

A process that is killed loses nothing of this; when the machine stops, the file may have reached the disk and the
journal not: the checksums then say so.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.kernels.rows.checksum import xxh64

BLOCK = 1 << 16
_HEADER = struct.Struct("<QQ16s")  # the block's number, its bytes, their checksum


class Journal:
    """Keeps blocks of ``data`` before they change.

    Args:
        file: made if it is not there.
        data: the bytes of the dumped rows, 1-D uint8, as the storage has them mapped.
        step_bytes: bytes of a time step.
        kept: numbers of blocks that are in the file already.
        entries: of rows that share observations, how many entries of each group were dumped.
    """

    def __init__(
        self, file: Path, data: np.ndarray, step_bytes: int, kept: Sequence[int] = (), entries: Sequence[int] = ()
    ) -> None:
        self.file, self.entries = file, entries
        self._data = data
        self._step_bytes = step_bytes
        self._changed = np.zeros(-(-len(data) // BLOCK), bool)
        self._changed[list(kept)] = True
        if file.exists():
            os.truncate(file, read_journal(file)[1])  # a record that a killed process began would hide those behind it
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        weakref.finalize(self, os.close, self._descriptor)

    def keep(self, start: int, count: int, steps: int) -> None:
        """Keep what will be lost when ``count`` time steps from ``start`` on, wrapping after ``steps``, are written.

        Raises:
            OSError: the disk is full; nothing may be written then.
        """
        head = min(count, steps - start)
        self.keep_bytes(start * self._step_bytes, (start + head) * self._step_bytes)
        self.keep_bytes(0, (count - head) * self._step_bytes)

    def keep_bytes(self, start: int, stop: int) -> None:
        """Keep the blocks of a range of bytes; see :meth:`keep`."""
        stop = min(stop, len(self._data))
        if start >= stop:
            return
        first = start // BLOCK
        for number in first + np.flatnonzero(~self._changed[first : -(-stop // BLOCK)]):
            block = self._data[number * BLOCK : (number + 1) * BLOCK]
            record = _HEADER.pack(number, len(block), xxh64(block).encode()) + block.tobytes()
            while record:
                record = record[os.write(self._descriptor, record) :]
            self._changed[number] = True


def read_journal(file: Path) -> tuple[dict[int, np.ndarray], int]:
    """Return the blocks of a journal by number, and how many bytes of it are whole.

    What a killed process has left of its last record is left out: its block had not been changed yet.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        if not file.exists():
            return {}, 0
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"{file} is not a plain file")
        data = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    blocks: dict[int, np.ndarray] = {}
    at = 0
    while at + _HEADER.size <= len(data):
        number, nbytes, digest = _HEADER.unpack(data[at : at + _HEADER.size].tobytes())
        end = at + _HEADER.size + nbytes
        block = data[at + _HEADER.size : end]
        if nbytes > BLOCK or len(block) < nbytes or xxh64(block).encode() != digest:
            break
        blocks.setdefault(number, block)
        at = end
    return blocks, at


def undo_(data: np.ndarray, start: int, blocks: dict[int, np.ndarray]) -> None:
    """Put blocks back into ``data``, which holds the file's bytes from ``start`` on."""
    for number, block in blocks.items():
        at = number * BLOCK - start
        first, last = max(0, at), min(len(data), at + len(block))
        if first < last:
            data[first:last] = block[first - at : last - at]
