"""Where the bytes of the rows live: RAM, shared memory, a memory-mapped file, or a CUDA device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rlbuf_td._huge_pages import advise_huge_pages

ROWS_FILE = "rows.bin"


def allocate_bytes(
    nbytes: int, device: torch.device, *, scratch_dir: Path | None = None, shared: bool = False
) -> torch.Tensor:
    """Return ``[nbytes]`` uint8, not initialised; pages are taken from the system when they are first written.

    Raises:
        FileExistsError: ``scratch_dir`` already holds rows, which are not overwritten.
        OSError: the disk cannot hold the file.
        RuntimeError: the memory cannot be had.
    """
    if scratch_dir is not None:
        return _make_file(scratch_dir, nbytes)
    if shared:
        storage = torch.UntypedStorage._new_shared(nbytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        advise_huge_pages(memory)
    return memory


def _make_file(scratch_dir: Path, nbytes: int) -> torch.Tensor:
    scratch_dir.mkdir(parents=True, exist_ok=True)
    path = scratch_dir / ROWS_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError as error:
        raise FileExistsError(
            f"{path} already holds rows; they are not overwritten: choose another scratch_dir, or delete the file"
        ) from error
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)  # a full disk is an error here, not a crash at a later write
        else:
            os.ftruncate(descriptor, nbytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return map_bytes(scratch_dir, nbytes)


def map_bytes(scratch_dir: Path, nbytes: int) -> torch.Tensor:
    """Return the ``[nbytes]`` uint8 of a file that is there, as every process that maps it sees them."""
    return torch.from_file(str(scratch_dir / ROWS_FILE), shared=True, size=nbytes, dtype=torch.uint8)
