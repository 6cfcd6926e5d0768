"""The folder of a dump: files that never change once written, and the manifest that names them.

A dump writes new files beside the old ones, and then puts a new manifest in the place of the old one, which the
operating system does at once or not at all. Until then the previous dump is untouched; what a killed dump leaves
behind is named by no manifest, and the next dump removes it. Chunks that the previous dump holds already are not
written again.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.checkpoint.journal import read_journal, undo_
from rlbuf_td.checkpoint.manifest import (
    CHUNK_NAME,
    FORMAT,
    JOURNAL_NAME,
    MANIFEST,
    Chunk,
    Manifest,
    Stored,
    read_manifest,
)
from rlbuf_td.kernels.checksum import xxh64
from rlbuf_td.storages.memory import ROWS_FILE

DATA = "data"
_LOCK = ".lock"
_WAIT_S = 600.0
_SMALLEST_CHUNK, _LARGEST_CHUNK, _CHUNKS = 4 << 20, 64 << 20, 64
_THREADS = 8  # whatever the number of cores: they wait for the disk

Report = Callable[[int], Any]


def chunk_bytes(nbytes: int) -> int:
    """Return how many bytes of a tensor of ``nbytes`` go into a file: a power of two."""
    size = _SMALLEST_CHUNK
    while size < _LARGEST_CHUNK and size * _CHUNKS < nbytes:
        size *= 2
    return size


@contextmanager
def locked(path: Path, *, for_reading: bool = False) -> Iterator[None]:
    """Keep other dumps away from a folder, those of other processes too. The lock of a killed process is free.

    Raises:
        CheckpointError: someone else has kept it for ten minutes.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path / _LOCK, timeout=_WAIT_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise CheckpointError(f"another dump into {path} has been going on for {_WAIT_S:.0f} seconds") from error
    except OSError:
        if not for_reading:
            raise
        yield  # a folder that may not be written to: nobody dumps into it
        return
    try:
        yield
    finally:
        lock.release()


class Source(NamedTuple):
    """What is known of a tensor that is to be stored.

    Attributes:
        whole: its bytes when the buffer is full, which sets the size of its chunks.
        journal: set if its bytes lie in the storage's own file already, and must only be described.
    """

    whole: int = 0
    journal: str | None = None


class DumpWriter:
    """Builds a dump beside the one that is there; to be used under :func:`locked`.

    Args:
        path: the folder, which exists.
        about: what the manifest says of the dump as a whole.

    Raises:
        CheckpointError: the folder holds a manifest that is not ours, or of a newer version, which is not replaced.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.about = about
        previous = _previous(path)
        self.generation = previous.generation + 1 if previous else 0
        self._prefix = f"{self.generation:06d}-{secrets.token_hex(8)}"
        self._numbers = count()
        self._known: dict[tuple[int, str], Chunk] = {}
        for chunk in (chunk for stored in previous.tensors for chunk in stored.chunks) if previous else ():
            if CHUNK_NAME.fullmatch(chunk.file) and _size(path / DATA / chunk.file) == chunk.nbytes:
                self._known[chunk.nbytes, chunk.xxh64] = chunk
        (path / DATA).mkdir(exist_ok=True)

    def new_name(self, ending: str) -> str:
        """Return a file name that no dump has used."""
        return f"{self._prefix}-{next(self._numbers)}.{ending}"

    def store(self, tensors: Sequence[torch.Tensor], sources: Sequence[Source], report: Report) -> tuple[Stored, ...]:
        """Write tensors, except what the previous dump holds already.

        Args:
            tensors: of any device.
            sources: what is known of each.
            report: told the bytes of each chunk that is done.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            jobs = []
            for tensor, source in zip(tensors, sources, strict=True):
                parts = flat_bytes(tensor).split(chunk_bytes(max(tensor.nbytes, source.whole)))
                jobs.append([pool.submit(self._put, part, source.journal) for part in parts if len(part)])
            wait_for([job for part in jobs for job in part], report)
            return tuple(
                Stored(tensor.dtype, tensor.shape, tuple(job.result() for job in part), source.journal)
                for tensor, part, source in zip(tensors, jobs, sources, strict=True)
            )

    def _put(self, part: torch.Tensor, journal: str | None) -> Chunk:
        data = part.cpu().numpy()
        digest = xxh64(data)
        if journal is not None:
            return Chunk(ROWS_FILE, len(data), digest)
        known = self._known.get((len(data), digest))
        if known is not None:
            return known
        name = self.new_name("bin")
        write_file(self.path / DATA / name, data)
        return Chunk(name, len(data), digest)

    def commit(self, state: dict[str, Any], tensors: tuple[Stored, ...]) -> Manifest:
        """Make the new dump the valid one: from here on, the previous one is gone."""
        manifest = Manifest(self.generation, state, tensors, self.about)
        sync_folder(self.path / DATA)
        temporary = self.path / f"{MANIFEST}.{self._prefix}"
        try:
            write_file(temporary, manifest.to_bytes())
            temporary.replace(self.path / MANIFEST)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.path)
        return manifest

    def clean(self) -> None:
        """Remove the files of dumps that are not valid any more, or never were; after a failure, those of this one."""
        manifest = _previous(self.path)
        named = manifest.files if manifest else set()
        for file in (self.path / DATA).iterdir():
            ours = CHUNK_NAME.fullmatch(file.name) or JOURNAL_NAME.fullmatch(file.name)
            if ours and file.name not in named:
                file.unlink(missing_ok=True)
        for file in self.path.glob(f"{MANIFEST}.*-*"):
            file.unlink(missing_ok=True)


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
        with ThreadPoolExecutor(_THREADS) as pool:
            wait_for([pool.submit(self._verify, part) for part in parts], report)

    def _parts(self, stored: Stored) -> list[_Part]:
        """Return the chunks of a tensor with what must be known to read each."""
        undo = {} if stored.journal is None else read_journal(self.path / DATA / stored.journal)[0]
        starts = accumulate((chunk.nbytes for chunk in stored.chunks), initial=0)
        return [
            _Part(self.path / ROWS_FILE, at, chunk, at, undo)
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
        with ThreadPoolExecutor(_THREADS) as pool:
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


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, 1-D uint8; a view where the tensor is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def wait_for(jobs: Sequence[Any], report: Report) -> None:
    """Wait for all jobs; raise the first error, having called off what has not begun."""
    try:
        for job in as_completed(jobs):
            result = job.result()
            report(result.nbytes if isinstance(result, Chunk) else result)
    except BaseException:
        for job in jobs:
            job.cancel()
        raise


def write_file(path: Path, data: np.ndarray | bytes) -> None:
    """Write a new file, through to the disk."""
    with open(path, "xb", buffering=0) as file:
        rest: Any = memoryview(data)  # type: ignore[arg-type]
        while rest.nbytes:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Bring a file to the disk, with what has been written to it through a mapping."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Bring a folder's list of names to the disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # some network file systems refuse
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _previous(path: Path) -> Manifest | None:
    """Return the manifest that is there; ``None`` if there is none, or if what is there cannot be used any more.

    Raises:
        CheckpointError: it is not ours, or of a newer version.
    """
    try:
        return read_manifest(path)
    except CheckpointError as error:
        try:
            head = (path / MANIFEST).read_bytes()[:100]
        except OSError:
            return None
        if head and (FORMAT.encode() not in head or "install a newer one" in str(error)):
            raise CheckpointError(f"{error}. It is not overwritten: choose another folder, or remove it") from error
        return None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1
