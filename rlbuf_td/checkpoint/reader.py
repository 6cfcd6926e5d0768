"""Reading what a dump holds, checked."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.checkpoint.folder import DATA, READERS, Report, settle, wait_for
from rlbuf_td.checkpoint.journal import read_journal, undo_
from rlbuf_td.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    Stored,
    read_manifest,
)
from rlbuf_td.kernels.rows.checksum import xxh64
from rlbuf_td.storages.allocate import ROWS_FILE


class _Part(NamedTuple):
    """A chunk, where it lies in which file, where it begins in its tensor, and what has been overwritten since."""

    file: Path
    offset: int
    chunk: Chunk
    start: int
    undo: dict[int, np.ndarray]


class DumpReader:
    """Reads what a manifest names; to be used under :func:`locked`.

    Raises:
        CheckpointError: see :func:`read_manifest`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._scratch = threading.local()

    def tensor(self, number: Any) -> Stored:
        """Return what ``{"$tensor": number}`` stands for, unread."""
        if type(number) is not int or not 0 <= number < len(self.manifest.tensors):
            raise CheckpointError(f"{self.path / MANIFEST} names a tensor {number!r} that it does not describe")
        return self.manifest.tensors[number]

    def read(self, number: Any) -> torch.Tensor:
        """Return the tensor that ``{"$tensor": number}`` stands for, in RAM, checked."""
        stored = self.tensor(number)
        for part in self._parts(stored):  # before memory is taken for what they say they hold
            self._open(part).close()
        data = torch.empty(stored.nbytes, dtype=torch.uint8)
        self.read_into(stored, 0, data, lambda nbytes: None, check=True)
        return data.view(stored.dtype).view(stored.shape)

    def verify(self, tensors: Sequence[Stored], report: Report) -> None:
        """Compare all files with their checksums.

        Raises:
            CheckpointError: one is missing, of another length, or differs; says which.
        """
        parts = [part for stored in tensors for part in self._parts(stored)]
        for part in parts:  # before memory is taken for what they say they hold
            self._open(part).close()
        with ThreadPoolExecutor(READERS) as pool:
            wait_for([pool.submit(self._verify, part) for part in parts], report)

    def _parts(self, stored: Stored) -> list[_Part]:
        """Return the chunks of a tensor with what must be known to read each."""
        undo = {} if stored.journal is None else read_journal(self.path / DATA / stored.journal)[0]
        starts = accumulate((chunk.nbytes for chunk in stored.chunks), initial=0)
        return [
            _Part(self.path / ROWS_FILE, stored.offset + at, chunk, at, undo)
            if chunk.file == ROWS_FILE
            else _Part(self.path / DATA / chunk.file, 0, chunk, at, {})
            for at, chunk in zip(starts, stored.chunks, strict=False)
        ]

    def _verify(self, part: _Part) -> int:
        chunk = part.chunk
        memory = getattr(self._scratch, "memory", None)
        if memory is None or len(memory) < chunk.nbytes:
            memory = self._scratch.memory = np.empty(chunk.nbytes, np.uint8)
        data = memory[: chunk.nbytes]
        self._fill(part, 0, data)
        _compare(part, data)
        return chunk.nbytes

    def read_into(
        self, stored: Stored, start: int, target: torch.Tensor, report: Report, *, check: bool = False
    ) -> None:
        """Read bytes from ``start`` on into ``target``, uint8 and contiguous, of any device.

        Args:
            stored: what to read from.
            start: the first byte.
            target: as long as what is to be read.
            report: told the bytes of each chunk that is done.
            check: compare what was read with its checksum, where it is a whole chunk.

        Raises:
            CheckpointError: as :meth:`verify`; ``target`` may have been written to.
        """
        jobs = []
        settle([target])
        with ThreadPoolExecutor(READERS) as pool:
            for part in self._parts(stored):
                at = part.start
                first, last = max(start, at), min(start + len(target), at + part.chunk.nbytes)
                if first < last:
                    to = target[first - start : last - start]
                    jobs.append(pool.submit(self._read_part, part, first - at, to, check))
            wait_for(jobs, report)

    def _read_part(self, part: _Part, offset: int, target: torch.Tensor, check: bool) -> int:
        on_cpu = target.device.type == "cpu"
        data = target.numpy() if on_cpu else np.empty(len(target), np.uint8)
        self._fill(part, offset, data)
        if check and len(data) == part.chunk.nbytes:
            _compare(part, data)
        if not on_cpu:
            target.copy_(torch.from_numpy(data))
        return len(target)

    def _open(self, part: _Part) -> Any:
        """Open a file of the dump: a plain one, of the right length."""
        file, needed = part.file, part.offset + part.chunk.nbytes
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        try:
            opened = os.fdopen(os.open(file, flags), "rb", buffering=0)
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        status = os.fstat(opened.fileno())
        problem = None
        if not stat.S_ISREG(status.st_mode):
            problem = "is not a plain file"
        elif status.st_size < needed:
            problem = f"is cut short: {status.st_size} bytes, the manifest says {needed}"
        elif status.st_size > needed and part.chunk.file != ROWS_FILE:
            problem = f"is too long: {status.st_size} bytes, the manifest says {needed}"
        if problem:
            opened.close()
            raise CheckpointError(f"{file} {problem}")
        return opened

    def _fill(self, part: _Part, offset: int, data: np.ndarray) -> None:
        with self._open(part) as opened:
            opened.seek(part.offset + offset)
            rest: Any = memoryview(data)  # type: ignore[arg-type]
            while rest.nbytes:
                got = opened.readinto(rest)
                if not got:
                    raise CheckpointError(f"{part.file} became shorter while it was read")
                rest = rest[got:]
        undo_(data, part.offset + offset, part.undo)


def _compare(part: _Part, data: np.ndarray) -> None:
    if xxh64(data) != part.chunk.xxh64:
        raise CheckpointError(f"{part.file} is damaged: its checksum does not match the manifest's")


def read_matrix(reader: DumpReader, stored: Stored, report: Report) -> torch.Tensor:
    """Return saved rows as they were stored, in memory of their own."""
    memory = torch.empty(stored.nbytes, dtype=torch.uint8)
    reader.read_into(stored, 0, memory, report, check=True)
    return memory.view(stored.dtype).view(stored.shape)
