"""The folder of a dump: files that never change once written, and the manifest that names them.

A dump writes new files beside the old ones, and then puts a new manifest in the place of the old one, which the
operating system does at once or not at all. Until then the previous dump is untouched; what a killed dump leaves
behind is named by no manifest, and the next dump removes it. Chunks that the previous dump holds already are not
written again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.checkpoint.manifest import Chunk

DATA = "data"
_LOCK = ".lock"
_WAIT_S = 600.0
WRITERS = 8  # threads, whatever the number of cores: they wait for the disk
READERS = max(2, min(WRITERS, os.cpu_count() or 2))

Report = Callable[[int], Any]


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


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, 1-D uint8; a view where the tensor is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def settle(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for what GPUs are still to do with tensors, so that threads, which have other streams, may use them."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


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


def write_file(path: Path, data: np.ndarray | bytes, *, sync: bool) -> None:
    """Write a new file, through to the disk if it is to be synced."""
    with open(path, "xb", buffering=0) as file:
        rest: Any = memoryview(data)  # type: ignore[arg-type]
        while rest.nbytes:
            rest = rest[file.write(rest) :]
        if sync:
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
