"""Building a dump beside the one that is there."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.checkpoint.folder import (
    DATA,
    WRITERS,
    Report,
    flat_bytes,
    settle,
    sync_file,
    sync_folder,
    wait_for,
    write_file,
)
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
from rlbuf_td.kernels.rows.checksum import xxh64
from rlbuf_td.storages.allocate import ROWS_FILE

_SMALLEST_CHUNK, _LARGEST_CHUNK, _CHUNKS = 4 << 20, 64 << 20, 64


def chunk_bytes(nbytes: int) -> int:
    """Return how many bytes of a tensor of ``nbytes`` go into a file: a power of two."""
    size = _SMALLEST_CHUNK
    while size < _LARGEST_CHUNK and size * _CHUNKS < nbytes:
        size *= 2
    return size


class Source(NamedTuple):
    """What is known of a tensor that is to be stored.

    Attributes:
        whole: its bytes when the buffer is full, which sets the size of its chunks.
        journal: set if its bytes lie in the storage's own file already, and must only be described.
        offset: where they begin in that file.
    """

    whole: int = 0
    journal: str | None = None
    offset: int = 0


class DumpWriter:
    """Builds a dump beside the one that is there; to be used under :func:`locked`.

    Args:
        path: the folder, which exists.
        about: what the manifest says of the dump as a whole.
        sync: bring everything to the disk; else that is left to the system.

    Raises:
        CheckpointError: the folder holds a manifest that is not ours, or of a newer version, which is not replaced.
    """

    def __init__(self, path: Path, about: dict[str, Any], *, sync: bool = True) -> None:
        self.path, self.sync = path, sync
        self.about = about | {"synced": sync}
        previous = _previous(path)
        self._is_known_synced = previous is not None and previous.about.get("synced") is True
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
        flat = [flat_bytes(tensor) for tensor in tensors]
        settle(flat)
        with ThreadPoolExecutor(WRITERS) as pool:
            jobs = []
            for data, source in zip(flat, sources, strict=True):
                parts = data.split(chunk_bytes(max(data.nbytes, source.whole)))
                jobs.append([pool.submit(self._put, part, source.journal) for part in parts if len(part)])
            wait_for([job for part in jobs for job in part], report)
            return tuple(
                Stored(tensor.dtype, tensor.shape, tuple(job.result() for job in part), source.journal, source.offset)
                for tensor, part, source in zip(tensors, jobs, sources, strict=True)
            )

    def _put(self, part: torch.Tensor, journal: str | None) -> Chunk:
        data = part.cpu().numpy()
        digest = xxh64(data)
        if journal is not None:
            return Chunk(ROWS_FILE, len(data), digest)
        known = self._known.get((len(data), digest))
        if known is not None:
            if self.sync and not self._is_known_synced:
                sync_file(self.path / DATA / known.file)
            return known
        name = self.new_name("bin")
        write_file(self.path / DATA / name, data, sync=self.sync)
        return Chunk(name, len(data), digest)

    def commit(self, state: dict[str, Any], tensors: tuple[Stored, ...]) -> Manifest:
        """Make the new dump the valid one: from here on, the previous one is gone."""
        manifest = Manifest(self.generation, state, tensors, self.about)
        if self.sync:
            sync_folder(self.path / DATA)
        temporary = self.path / f"{MANIFEST}.{self._prefix}"
        try:
            write_file(temporary, manifest.to_bytes(), sync=self.sync)
            temporary.replace(self.path / MANIFEST)
        finally:
            temporary.unlink(missing_ok=True)
        if self.sync:
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
