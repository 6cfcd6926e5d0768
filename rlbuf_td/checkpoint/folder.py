"""Saves a state in a folder, and loads it. Each dump and each load locks the folder."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch

from rlbuf_td.checkpoint.files import DumpReader, DumpWriter, Report
from rlbuf_td.checkpoint.manifest import MALFORMED, CheckpointError, decode, encode

_LOCK = ".lock"
_WAIT_S = 600.0
_LARGE = 1 << 30  # bytes from which a progress bar is shown by default


def save_state(path: str | Path, kind: str, state: dict[str, Any]) -> None:
    with writing(path, kind) as writer:
        write_state(writer, state, [], None)


def load_state(path: str | Path, kind: str) -> dict[str, Any]:
    with reading(path, kind) as reader, explained(reader):
        return decode(reader.manifest.state, reader.read)


@contextmanager
def writing(path: str | Path, kind: str, *, sync: bool = True) -> Iterator[DumpWriter]:
    """Create and lock the folder ``path``, and yield a writer; at the end, delete dump files that are not in use."""
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} cannot be created: it is a file; a dump is a folder") from error
    with _locked(folder):
        written = datetime.now(timezone.utc).isoformat(timespec="seconds")
        versions = {name: str(sys.modules[name].__version__) for name in ("rlbuf_td", "torch", "tensordict", "torchrl")}
        writer = DumpWriter(folder, {"kind": kind, "written": written, "versions": versions}, sync=sync)
        try:
            yield writer
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            writer.clean()
            room = f"{writer.nbytes:,} bytes are needed beside the previous dump, {disk_usage(folder).free:,} are free"
            raise OSError(error.errno, f"{error.strerror}: {room}", str(folder)) from error
        finally:
            writer.clean()


def write_state(writer: DumpWriter, state: dict[str, Any], tensors: list[torch.Tensor], progress: bool | None) -> None:
    tensors = list(tensors)
    encoded = encode(state, tensors, "state")
    with progress_bar("dump", sum(tensor.nbytes for tensor in tensors), progress) as report:
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
def progress_bar(what: str, nbytes: int, progress: bool | None) -> Iterator[Report]:
    """Yield a function that advances a bar; ``progress=None`` shows the bar on a terminal for 1 GiB or more."""
    is_shown = nbytes >= _LARGE and sys.stderr.isatty() if progress is None else progress
    try:
        from tqdm import tqdm
    except ImportError:
        if progress:
            raise ImportError("progress=True needs tqdm: pip install tqdm") from None
        is_shown = False
    if not is_shown:  # even a disabled bar takes tqdm's lock; a process may have died with it
        yield lambda done: None
        return
    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True) as shown:
        yield shown.update


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
