"""Where the bytes of the rows live: RAM, shared memory, a memory-mapped file, or a CUDA device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rlbuf_td._huge_pages import advise_huge_pages
from rlbuf_td._room import require_room, room_for, show_bytes

ROWS_FILE = "rows.bin"


def allocate_bytes(
    nbytes: int,
    device: torch.device,
    *,
    scratch_dir: Path | None = None,
    shared: bool = False,
    quiet: bool = False,
    what: str = "The rows take",
    remedy: str = "",
) -> torch.Tensor:
    """Return ``[nbytes]`` uint8, not initialised.

    In RAM, pages are taken from the system when they are first written; in shared memory, on a disk and on a CUDA
    device all is taken at once.

    Args:
        nbytes: bytes.
        device: where the memory lies.
        scratch_dir: in a file there.
        shared: in shared memory.
        quiet: do not warn: that has been done.
        what: what it is for, and what to do if it cannot be had: words for the errors.
        remedy: see ``what``.

    Raises:
        FileExistsError: ``scratch_dir`` already holds rows, which are not overwritten.
        OSError: the disk cannot hold the file.
        MemoryError: the memory cannot be had, now or ever.

    Warns:
        MemoryWarning: there is less RAM free than the rows will take when all are written.
    """
    require_room(
        nbytes,
        device,
        scratch_dir=scratch_dir,
        shared=shared,
        lazily=scratch_dir is None and not shared,
        quiet=quiet,
        what=what,
        remedy=remedy,
    )
    if scratch_dir is not None:
        return _make_file(scratch_dir, nbytes)
    try:
        if shared:
            storage = torch.UntypedStorage._new_shared(nbytes)
            return torch.empty(0, dtype=torch.uint8).set_(storage)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        room = room_for(device, shared=shared)
        raise MemoryError(f"{what} {show_bytes(nbytes)}, which cannot be had: {room.words()}. {remedy}") from error
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
