"""Writes and reads the data files of a dump. A data file never changes after it is written."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlbuf_td.checkpoint.manifest import CHUNK_NAME, MANIFEST, CheckpointError, Chunk, Manifest, Stored, checksum

DATA = "data"
CHUNK_BYTES = 8 << 20
_WRITERS = 8  # threads; their number does not depend on the cores, because they wait for the disk
_READERS = max(2, min(_WRITERS, os.cpu_count() or 2))

#: Called with the number of bytes processed since the last call.
Report = Callable[[int], Any]
#: A chunk, an offset in bytes to read from, and the tensor to fill; None: only check the chunk.
Job = tuple[Chunk, int, torch.Tensor | None]


class DumpWriter:
    """Writes a dump beside the previous dump; the caller must lock the folder."""

    def __init__(self, path: Path, about: dict[str, Any], *, sync: bool = True) -> None:
        self.path, self.sync = path, sync
        self.about = about | {"synced": sync}
        previous = Manifest.previous(path)
        self._is_known_synced = previous is not None and previous.about.get("synced") is True
        self.nbytes = 0  # bytes of all tensors
        self.generation = previous.generation + 1 if previous else 0
        self._prefix = f"{self.generation:06d}-{secrets.token_hex(8)}"
        self._numbers = count()
        (path / DATA).mkdir(exist_ok=True)
        sizes = {file.name: file.stat().st_size for file in (path / DATA).iterdir()}
        chunks = [chunk for stored in previous.tensors for chunk in stored.chunks] if previous else []
        self._known = {(each.nbytes, each.checksum): each for each in chunks if sizes.get(each.file) == each.nbytes}

    def store(self, tensors: Sequence[torch.Tensor], report: Report) -> tuple[Stored, ...]:
        """Write tensors of any device in chunks; a chunk that is in the previous dump is not written again."""
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        parts = [[part for part in flat_bytes(tensor).split(CHUNK_BYTES) if len(part)] for tensor in tensors]
        wait_for_gpus(tensors)
        chunks = []
        with ThreadPoolExecutor(_WRITERS) as pool:
            for chunk in pool.map(self._put, chain.from_iterable(parts)):
                report(chunk.nbytes)
                chunks.append(chunk)
        rest = iter(chunks)
        return tuple(
            Stored(tensor.dtype, tensor.shape, tuple(islice(rest, len(each))))
            for tensor, each in zip(tensors, parts, strict=True)
        )

    def _put(self, part: torch.Tensor) -> Chunk:
        data = part.cpu().numpy()
        digest = checksum(data)
        known = self._known.get((len(data), digest))
        if known is not None:
            if self.sync and not self._is_known_synced:
                _sync(self.path / DATA / known.file)
            return known
        name = f"{self._prefix}-{next(self._numbers)}.bin"
        _write_file(self.path / DATA / name, data, sync=self.sync)
        return Chunk(name, len(data), digest)

    def commit(self, state: dict[str, Any], tensors: tuple[Stored, ...]) -> None:
        """Replace the manifest, which makes the new dump the valid one."""
        manifest = Manifest(self.generation, state, tensors, self.about)
        if self.sync:
            _sync(self.path / DATA)
        temporary = self.path / f"{MANIFEST}.{self._prefix}"
        try:
            _write_file(temporary, manifest.to_bytes(), sync=self.sync)
            temporary.replace(self.path / MANIFEST)
        finally:
            temporary.unlink(missing_ok=True)
        if self.sync:
            _sync(self.path)

    def clean(self) -> None:
        """Delete the dump files that the manifest does not list, such as those of an interrupted dump."""
        manifest = Manifest.previous(self.path)
        named = {chunk.file for stored in manifest.tensors for chunk in stored.chunks} if manifest else ()
        for file in (self.path / DATA).iterdir():
            if CHUNK_NAME.fullmatch(file.name) and file.name not in named:
                file.unlink(missing_ok=True)
        for file in self.path.glob(f"{MANIFEST}.*-*"):
            file.unlink(missing_ok=True)


class DumpReader:
    """Reads the tensors of a dump; the caller must lock the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path)

    def tensor(self, number: Any) -> Stored:
        if type(number) is not int or not 0 <= number < len(self.manifest.tensors):
            raise CheckpointError(f"{self.path / MANIFEST} names a tensor {number!r} that it does not describe")
        return self.manifest.tensors[number]

    def read(self, number: Any) -> torch.Tensor:
        return self.read_stored(self.tensor(number), lambda nbytes: None)

    def read_stored(self, stored: Stored, report: Report) -> torch.Tensor:
        for chunk in stored.chunks:  # before memory of these lengths is allocated
            self._require(chunk)
        data = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
        self.read_into(stored, 0, data, report)
        return data.view(stored.dtype).view(stored.shape)

    def verify(self, tensors: Sequence[Stored], report: Report) -> None:
        self._read([(chunk, 0, None) for stored in tensors for chunk in stored.chunks], report)

    def read_into(self, stored: Stored, start: int, target: torch.Tensor, report: Report) -> None:
        """Fill the uint8 tensor ``target`` with the bytes of ``stored`` from byte ``start`` on."""
        wait_for_gpus([target])
        jobs: list[Job] = []
        at = 0
        for chunk in stored.chunks:
            first, last = max(start, at), min(start + len(target), at + chunk.nbytes)
            if first < last:
                jobs.append((chunk, first - at, target[first - start : last - start]))
            at += chunk.nbytes
        self._read(jobs, report)

    def _read(self, jobs: list[Job], report: Report) -> None:
        with ThreadPoolExecutor(_READERS) as pool:
            for nbytes in pool.map(self._read_part, jobs):
                report(nbytes)

    def _read_part(self, job: Job) -> int:
        # NumPy uses huge pages, which makes a comparison three times as fast as in torch's memory.
        chunk, offset, target = job
        file = self._require(chunk)
        nbytes = chunk.nbytes if target is None else len(target)
        data = np.empty(nbytes, np.uint8) if target is None or not target.is_cpu else target.numpy()
        with open(file, "rb") as opened:
            opened.seek(offset)
            if opened.readinto(data) != nbytes:  # type: ignore[arg-type]
                raise CheckpointError(f"{file} became shorter while it was read")
        if nbytes == chunk.nbytes and checksum(data) != chunk.checksum:  # a part of a chunk has no checksum
            raise CheckpointError(f"{file} is damaged: its checksum does not match the manifest's")
        if target is not None and not target.is_cpu:
            target.copy_(torch.from_numpy(data))
        return nbytes

    def _require(self, chunk: Chunk) -> Path:
        """Return the file of a chunk; raise a CheckpointError if the file is missing or has the wrong size."""
        file = self.path / DATA / chunk.file
        try:
            status = file.lstat()
        except OSError as error:
            found = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
            raise CheckpointError(f"{file} {found}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file} is not a plain file")
        if status.st_size != chunk.nbytes:
            kind = "cut short" if status.st_size < chunk.nbytes else "too long"
            raise CheckpointError(f"{file} is {kind}: {status.st_size} bytes, the manifest says {chunk.nbytes}")
        return file


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as 1-D uint8, without a copy if the tensor is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def wait_for_gpus(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for the current streams of the tensors' GPUs, because dumps and loads copy on other streams."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _write_file(path: Path, data: np.ndarray | bytes, *, sync: bool) -> None:
    with open(path, "xb") as file:
        file.write(data)  # type: ignore[arg-type]
        file.flush()
        if sync:
            os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Wait until a file or the entries of a folder are on the disk."""
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):
        return  # Windows
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError:
        if not is_folder:  # some network file systems refuse folders
            raise
    finally:
        os.close(descriptor)
