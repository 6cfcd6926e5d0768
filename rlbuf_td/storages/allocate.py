"""Where the bytes of the rows live: RAM, shared memory, a memory-mapped file, a CUDA device, or RAM that one reads."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path

import torch

from rlbuf_td.kernels.huge_pages import advise_huge_pages
from rlbuf_td.storages.memory_budget import require_room, room_for, show_bytes
from rlbuf_td.storages.pinned import page_locked

ROWS_FILE = "rows.bin"


def allocate_bytes(
    nbytes: int,
    device: torch.device,
    *,
    scratch_dir: Path | None = None,
    shared: bool = False,
    offload: bool = False,
    quiet: bool = False,
    what: str = "The rows take",
    remedy: str = "",
) -> torch.Tensor:
    """Return ``[nbytes]`` uint8, not initialised.

    In RAM, pages are taken from the system when they are first written; in shared memory, on a disk, on a CUDA device
    and in RAM that one reads all is taken at once.

    Args:
        nbytes: bytes.
        device: where the memory lies.
        scratch_dir: in a file there.
        shared: in shared memory.
        offload: in page-locked RAM, as a tensor of ``device``, a CUDA device.
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
    place = torch.device("cpu") if offload else device
    require_room(
        nbytes,
        place,
        scratch_dir=scratch_dir,
        shared=shared,
        lazily=scratch_dir is None and not shared and not offload,
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
        if offload:
            return page_locked(nbytes, device)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (OSError, RuntimeError) as error:
        words = room_for(place, shared=shared).words() + (f", but {error}" if offload else "")
        raise MemoryError(f"{what} {show_bytes(nbytes)}, which cannot be had: {words}. {remedy}") from error
    if device.type == "cpu":
        advise_huge_pages(memory)
    return memory


def allocate_sparse(
    nbytes: int,
    likely: int,
    at_once: int,
    *,
    scratch_dir: Path | None = None,
    quiet: bool = False,
    what: str = "The rows take",
    remedy: str = "",
) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 zeros in RAM or in a file, most of which will never be used.

    RAM is taken from the system as it is written to. The file has holes; whoever writes to one fills it before, see
    :class:`FileRoom`.

    Args:
        nbytes: bytes at most.
        likely: bytes that will be used.
        at_once: bytes of the file that are taken at once.
        scratch_dir: in a file there.
        quiet: do not warn: that has been done.
        what: see :func:`allocate_bytes`, also for the errors.
        remedy: see ``what``.
    """
    cpu = torch.device("cpu")
    given = {"scratch_dir": scratch_dir, "lazily": scratch_dir is None, "quiet": quiet, "what": what, "remedy": remedy}
    require_room(likely, cpu, **given)  # type: ignore[arg-type]
    if scratch_dir is not None:
        return _make_file(scratch_dir, nbytes, at_once)
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
            memory = torch.frombuffer(mmap.mmap(-1, nbytes, kind), dtype=torch.uint8)
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        room = room_for(cpu)
        raise MemoryError(f"{what} {show_bytes(likely)}, which cannot be had: {room.words()}. {remedy}") from error
    advise_huge_pages(memory)
    return memory


class FileRoom:
    """Fills holes of a file before they are written to, so that a full disk is an error then and no crash.

    Args:
        scratch_dir: where the file is.
        nbytes: its size.
    """

    def __init__(self, scratch_dir: Path, nbytes: int) -> None:
        self._file, self._nbytes = scratch_dir / ROWS_FILE, nbytes
        self._filled: dict[int, int] = {}  # by the beginning of a section, how many of its bytes

    def __call__(self, section: int, nbytes: int) -> None:
        """Make sure that the first ``nbytes`` of a section have a place on the disk.

        Raises:
            OSError: the disk is full.
        """
        filled = self._filled.get(section, 0)
        if nbytes <= filled or not hasattr(os, "posix_fallocate"):
            return
        descriptor = os.open(self._file, os.O_RDWR)
        try:
            for more in (max(nbytes - filled, min(_FILL, filled // 8)), nbytes - filled):  # ahead, if there is room
                more = min(more, self._nbytes - section - filled)
                try:
                    os.posix_fallocate(descriptor, section + filled, more)
                except OSError as error:
                    if error.errno != errno.ENOSPC or more == nbytes - filled:
                        raise
                else:
                    self._filled[section] = filled + more
                    return
        finally:
            os.close(descriptor)


_FILL = 256 << 20  # bytes that are taken ahead at most
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # not named before Python 3.13


def _make_file(scratch_dir: Path, nbytes: int, at_once: int | None = None) -> torch.Tensor:
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
            # A full disk is an error here, not a crash at a later write.
            os.posix_fallocate(descriptor, 0, nbytes if at_once is None else at_once)
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
