"""Writes and reads the folder of a dump: its lock, and its data files, which never change after they are written."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

from rlbuf_td.checkpoint.manifest import (
    CHUNK_NAME,
    MALFORMED,
    MANIFEST,
    CheckpointError,
    Chunk,
    Manifest,
    Stored,
    checksum,
    decode,
    encode,
)

_FOLDER = re.compile(r"([a-z]+)-[0-9a-f]{16}")
DATA, _LOCK, _NEXT = "data", ".lock", f"{MANIFEST}.next"
_WAIT_S = 600.0
_LARGE = 1 << 30  # bytes from which a progress bar is shown by default
CHUNK_BYTES = 8 << 20
_WRITERS = 8  # threads; their number does not depend on the cores, because they wait for the disk
_READERS = max(2, min(_WRITERS, os.cpu_count() or 2))

#: Called with the number of bytes processed since the last call.
Report = Callable[[int], Any]
#: A chunk and the tensor to fill; None: only check the chunk.
Job = tuple[Chunk, torch.Tensor | None]


class DumpWriter:
    """Writes a dump beside the previous dump; the caller must lock the folder."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.previous = Manifest.previous(path)
        self.nbytes = 0  # bytes of all tensors
        (path / DATA).mkdir(exist_ok=True)
        self._names = self.clean()  # of files that need not be written, or are being written
        self._lock = Lock()

    def store(self, tensors: Sequence[torch.Tensor], report: Report) -> tuple[Stored, ...]:
        """Write tensors of any device in chunks; a chunk that is in the previous dump is not written again."""
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        parts = [[part for part in flat_bytes(tensor).split(CHUNK_BYTES) if len(part)] for tensor in tensors]
        wait_for_devices(tensors)
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
        chunk = Chunk(checksum(data), len(data))
        with self._lock:
            is_known = chunk.file in self._names
            self._names.add(chunk.file)
        if not is_known:
            _write_file(self.path / DATA / chunk.file, data)
        return chunk

    def commit(self, state: dict[str, Any], tensors: tuple[Stored, ...]) -> None:
        """Replace the manifest, which makes the new dump the valid one."""
        _sync(self.path / DATA)
        _write_file(self.path / _NEXT, Manifest(state, tensors, self.about).to_bytes())
        (self.path / _NEXT).replace(self.path / MANIFEST)
        _sync(self.path)

    def clean(self) -> set[str]:
        """Delete the files that the manifest does not list, such as those of an interrupted dump; return the others."""
        manifest = Manifest.previous(self.path)
        listed = {name for stored in manifest.tensors for name in stored.files} if manifest else ()
        kept = set()
        for file in (self.path / DATA).iterdir():
            named = CHUNK_NAME.fullmatch(file.name)
            if named and file.name in listed and file.lstat().st_size == int(named[2]):
                kept.add(file.name)
            elif named:
                file.unlink()
        (self.path / _NEXT).unlink(missing_ok=True)
        return kept


class DumpReader:
    """Reads the tensors of a dump; the caller must lock the folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, Manifest.read(path)
        self.report: Report = lambda nbytes: None

    def state(self) -> dict[str, Any]:
        """Return the state; the tensors of the rows are not read yet."""
        state = decode(self.manifest.state, lambda number: self._tensor(number).read())
        if rows := [*map(self._tensor, state.get("rows", []))]:
            state["_storage"] |= {"rows": rows[0], "entries": rows[1:]}
        return state

    def _tensor(self, number: Any) -> SavedTensor:
        if type(number) is not int or not 0 <= number < len(self.manifest.tensors):
            raise CheckpointError(f"{self.path / MANIFEST} names a tensor {number!r} that it does not describe")
        return SavedTensor(self, self.manifest.tensors[number])

    def read(self, jobs: list[Job]) -> None:
        with ThreadPoolExecutor(_READERS) as pool:
            for nbytes in pool.map(self._read_part, jobs):
                self.report(nbytes)

    def _read_part(self, job: Job) -> int:
        # NumPy uses huge pages, which makes a comparison three times as fast as in torch's memory.
        chunk, target = job
        file = self.require(chunk)
        data = np.empty(chunk.nbytes, np.uint8) if target is None or not target.is_cpu else target.numpy()
        with open(file, "rb") as opened:
            if opened.readinto(data) != chunk.nbytes:  # type: ignore[arg-type]
                raise CheckpointError(f"{file} became shorter while it was read")
        if checksum(data) != chunk.checksum:
            raise CheckpointError(f"{file} is damaged: its checksum does not match the manifest's")
        if target is not None and not target.is_cpu:
            target.copy_(torch.from_numpy(data))
        return chunk.nbytes

    def require(self, chunk: Chunk) -> Path:
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


class SavedTensor:
    """A tensor of a dump, whose files are read when they are needed."""

    def __init__(self, reader: DumpReader, stored: Stored) -> None:
        self._reader, self.chunks = reader, stored.chunks
        self.dtype, self.shape, self.nbytes = stored.dtype, stored.shape, stored.nbytes

    def verify(self) -> None:
        """Raise a CheckpointError if a file is missing or damaged."""
        self._reader.read([(chunk, None) for chunk in self.chunks])

    def read(self) -> torch.Tensor:
        for chunk in self.chunks:  # before memory of these lengths is allocated
            self._reader.require(chunk)
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(found)
        return found

    def read_into(self, target: torch.Tensor) -> None:
        """Fill a contiguous tensor with the saved bytes."""
        wait_for_devices([target])
        parts = flat_bytes(target).split([chunk.nbytes for chunk in self.chunks]) if self.chunks else []
        self._reader.read([*zip(self.chunks, parts, strict=True)])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as 1-D uint8, without a copy if the tensor is contiguous."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.as_strided([tensor.numel()], [1]).view(torch.uint8)  # one number is contiguous with any stride


def wait_for_devices(tensors: Sequence[torch.Tensor]) -> None:
    """Wait until the devices have written the tensors, because dumps and loads copy them in other threads."""
    for tensor in tensors:
        tensor.reshape(-1)[:1].cpu()  # a read waits for the work that this thread has queued before


def _write_file(path: Path, data: np.ndarray | bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # some network file systems refuse folders
        os.fsync(descriptor)
    os.close(descriptor)


def save_state(path: str | Path, kind: str, state: dict[str, Any]) -> None:
    with writing(path, kind) as writer:
        write_state(writer, state, [])


def load_state(path: str | Path, kind: str) -> dict[str, Any]:
    with reading(path, kind) as reader, explained(reader):
        return reader.state()


@contextmanager
def writing(path: str | Path, kind: str) -> Iterator[DumpWriter]:
    """Create and lock the folder ``path``, and yield a writer; at the end, delete dump files that are not in use."""
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} cannot be created: it is a file; a dump is a folder") from error
    with _locked(folder):
        written = datetime.now(timezone.utc).isoformat(timespec="seconds")
        versions = {name: str(sys.modules[name].__version__) for name in ("rlbuf_td", "torch", "tensordict", "torchrl")}
        writer = DumpWriter(folder, {"kind": kind, "written": written, "versions": versions})
        try:
            yield writer
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            writer.clean()
            free = shutil.disk_usage(folder).free
            room = f"{writer.nbytes:,} bytes are needed beside the previous dump, {free:,} are free"
            raise OSError(error.errno, f"{error.strerror}: {room}", str(folder)) from error
        finally:
            writer.clean()


def write_state(writer: DumpWriter, state: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    tensors = list(tensors)
    encoded = encode(state, tensors, "state")
    with progress_bar("dump", sum(tensor.nbytes for tensor in tensors)) as report:
        stored = writer.store(tensors, report)
    writer.commit(encoded, stored)


@contextmanager
def reading(path: str | Path, kind: str) -> Iterator[DumpReader]:
    """Lock the folder ``path``, and yield a reader of its dump; refuse a dump that is not of this ``kind``."""
    folder = Path(path).absolute()
    if not folder.is_dir():
        DumpReader(folder)  # raises
    with _locked(folder, for_reading=True):
        reader = DumpReader(folder)
        found = reader.manifest.about.get("kind")
        if found != kind:
            raise CheckpointError(f"{folder} holds a dump of a {found}, expected one of a {kind}")
        yield reader


@contextmanager
def explained(reader: DumpReader) -> Iterator[None]:
    """Convert errors from a malformed state to a CheckpointError that names the dump."""
    try:
        yield
    except CheckpointError:
        raise
    except MALFORMED as error:
        words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"cannot load {reader.path}: {words}") from error


@contextmanager
def progress_bar(what: str, nbytes: int) -> Iterator[Report]:
    """Yield a function that advances a bar, which is shown on a terminal for 1 GiB or more."""
    if not (nbytes >= _LARGE and sys.stderr.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda done: bar.update(task, advance=done, refresh=True)


@contextmanager
def _locked(path: Path, *, for_reading: bool = False) -> Iterator[None]:
    """Lock a folder against other dumps and loads; the system releases the lock if this process dies."""
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(path / _LOCK, timeout=_WAIT_S))
        except Timeout as error:
            raise CheckpointError(f"another dump into {path} has been running for {_WAIT_S:.0f} seconds") from error
        except OSError:
            if not for_reading:  # a reader may use a read-only folder, which has no dumps in progress
                raise
        yield


# -- dumps of several buffers: each has a folder of its own, and is valid once a manifest elsewhere names the folder


def is_folder(name: object) -> bool:
    """Whether a name in a manifest can be that of a dump's folder."""
    return isinstance(name, str) and _FOLDER.fullmatch(name) is not None


def new_folder(path: Path, kind: str, last: object, members: Collection[str]) -> Path:
    """Return the folder of a new dump, with links to the ``members`` of the ``last`` one, if it is there.

    Members that have not changed are then not written again. The folder's name begins with ``kind``.
    """
    folder = path / f"{kind}-{secrets.token_hex(8)}"
    folder.mkdir(parents=True)
    for name in members if is_folder(last) else ():
        with suppress(OSError):  # a new member, or a file system without hard links
            before, ignored = path / str(last) / name, shutil.ignore_patterns(".lock")
            shutil.copytree(before, folder / name, copy_function=os.link, ignore=ignored)
    return folder


def delete_others(folder: Path) -> None:
    """Delete all dumps of the same kind beside a valid one."""
    kind = folder.name.partition("-")[0]
    for other in folder.parent.iterdir():
        found = _FOLDER.fullmatch(other.name)
        if found and found[1] == kind and other != folder:
            shutil.rmtree(other, ignore_errors=True)
