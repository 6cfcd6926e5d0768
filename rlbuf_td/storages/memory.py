"""Where a block of bytes lies: in RAM or on a device, in memory that processes share,
or in a file.

The files in a folder of rows: ``rows.bin`` has the rows. With ``reopen=True``,
``head.bin`` has all that describes them, and ``priorities.bin`` their priorities.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from struct import pack, unpack
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from rlbuf_td.kernels.host_memory import advise_huge_pages
from rlbuf_td.storages.checks import State
from rlbuf_td.storages.memory_budget import require_room, room_for, show_bytes

if TYPE_CHECKING:
    from rlbuf_td.storages.numbers import SharedNumbers

if sys.platform != "win32":
    import fcntl
else:
    fcntl = None

ROWS_FILE, HEAD_FILE, PRIORITY_FILE = "rows.bin", "head.bin", "priorities.bin"
HEADER = 1 << 16  # bytes of a file's header; a multiple of every system's page size
_MAGIC, _VERSION, FIRST = int.from_bytes(b"rlbuf_td", "little"), 4, 24
_FILL = 256 << 20  # most bytes of a file that are reserved ahead
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python defines it from 3.13 on


def allocate_bytes(
    nbytes: int,
    device: torch.device,
    what: str,
    remedy: str,
    *,
    scratch_dir: Path | None = None,
    shared: Any = None,
    sparse: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 on a device, in a file, or in the nameless file
    ``shared``.

    With ``sparse=(likely, at_once)``, all bytes are zero, only ``likely`` bytes must be
    free, and a file reserves disk space only for its first ``at_once`` bytes.
    """
    likely, at_once = sparse or (nbytes, nbytes)
    require_room(likely, device, what, remedy, scratch_dir)
    if scratch_dir is not None:
        return RowsFile.make(scratch_dir, nbytes, at_once).map(nbytes)
    try:
        if shared is not None:
            return shared.map(nbytes)
        if sparse is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        memory = _zeros_not_reserved(nbytes)
    except (OSError, OverflowError, RuntimeError) as error:
        words = room_for(device).words()
        message = (
            f"{what} {show_bytes(likely)}, which cannot be allocated: {words}. {remedy}"
        )
        raise MemoryError(message) from error
    advise_huge_pages(memory)
    return memory


def _zeros_not_reserved(nbytes: int) -> torch.Tensor:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    kind = (
        mmap.MAP_PRIVATE
        | mmap.MAP_ANONYMOUS
        | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
    )
    return torch.frombuffer(mmap.mmap(-1, nbytes, kind), dtype=torch.uint8)


class SharedFile:
    """An open file, shared with forked processes and with spawned ones that receive
    this object.

    :meth:`map` skips the first ``start`` bytes, a multiple of the page size.
    """

    def __init__(self, descriptor: int, start: int = 0) -> None:
        self.descriptor, self._start = descriptor, start

    def map(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` (at least 1) of the file as shared uint8 memory; new bytes
        are zero."""
        if os.fstat(self.descriptor).st_size < self._start + nbytes:
            os.ftruncate(self.descriptor, self._start + nbytes)
        # memory mapped in inference mode could not be written outside it
        with torch.inference_mode(False):
            return torch.frombuffer(
                mmap.mmap(self.descriptor, nbytes, offset=self._start),
                dtype=torch.uint8,
            )

    def reserve(self, start: int, nbytes: int) -> None:
        """Reserve disk space, because a write to a mapped file crashes the process on a
        full disk."""
        if nbytes > 0 and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, self._start + start, nbytes)

    def __getstate__(self) -> dict[str, object]:
        if get_spawning_popen() is None:
            raise RuntimeError(
                "shared memory is sent to a spawned process, never copied"
            )
        return self.__dict__ | {"descriptor": reduction.DupFd(self.descriptor)}

    def __setstate__(self, state: State) -> None:
        self.__dict__.update(state)
        self.descriptor = state["descriptor"].detach()

    def __del__(self) -> None:
        descriptor = self.__dict__.pop("descriptor", None)
        # not if the constructor failed, nor in the state of a pickle
        if isinstance(descriptor, int):
            os.close(descriptor)


class NamelessFile(SharedFile):
    """A file in memory without a name."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            super().__init__(os.memfd_create("rlbuf_td"))
        else:
            with tempfile.TemporaryFile() as file:
                super().__init__(os.dup(file.fileno()))


class RowsFile(SharedFile):
    """The file of the rows in a folder; calling it reserves more disk space in one of
    its sections."""

    def __init__(self, folder: Path, more_flags: int = 0) -> None:
        super().__init__(
            os.open(folder / ROWS_FILE, os.O_RDWR | os.O_CLOEXEC | more_flags, 0o644)
        )
        # start of a section -> bytes reserved in it
        self._reserved: dict[int, int] = {}

    @classmethod
    def make(cls, folder: Path, nbytes: int, at_once: int) -> RowsFile:
        """Make a file of ``nbytes``, and reserve disk space for its first ``at_once``
        bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = cls(folder, os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            raise FileExistsError(
                f"{folder / ROWS_FILE} already holds rows; they are not overwritten: choose another scratch_dir, or "
                "delete the file"
            ) from error
        try:
            file.reserve(0, at_once)
            os.ftruncate(file.descriptor, nbytes)
        except OSError:
            (folder / ROWS_FILE).unlink(missing_ok=True)
            raise
        return file

    @classmethod
    def open(cls, folder: Path, nbytes: int) -> RowsFile:
        """Open a file of ``nbytes``; raise a ValueError if it has another size: mapping
        it would extend it."""
        path = folder / ROWS_FILE
        size = path.stat().st_size if path.exists() else 0
        if size != nbytes:
            raise ValueError(
                f"{path} has {size:,} bytes instead of {nbytes:,}: its rows are lost; load a dump elsewhere"
            )
        return cls(folder)

    def __call__(self, section: int, nbytes: int) -> None:
        """Reserve disk space for the first ``nbytes`` bytes of the section that begins
        at byte ``section``."""
        reserved = self._reserved.get(section, 0)
        if nbytes <= reserved:
            return
        # More than needed, so that few writes reserve; on a disk that is almost full,
        # no more.
        start, needed = section + reserved, nbytes - reserved
        ahead = min(
            max(needed, min(_FILL, reserved // 8)),
            os.fstat(self.descriptor).st_size - start,
        )
        try:
            self.reserve(start, ahead)
        except OSError:
            ahead = needed
            self.reserve(start, ahead)
        self._reserved[section] = reserved + ahead


def delete_rows_file(path: Path, inode: int, process: int) -> None:
    """Delete the file of the rows, and its folder if it is empty, in the process that
    made them.

    ``inode`` is the number of the file: another storage may have replaced it.
    """
    if os.getpid() != process or not path.exists() or path.stat().st_ino != inode:
        return
    path.unlink()
    with suppress(OSError):  # not empty
        path.parent.rmdir()


class HeadFile(SharedFile):
    """The file ``head.bin``: a header of 64-bit numbers, then the memory that
    :meth:`map` returns.

    The file stays locked until this object is closed, or deleted, in this process and
    in those forked from it or spawned with it. Mapped bytes survive the end of a
    process, but not a loss of power.
    """

    def __init__(self, folder: Path) -> None:
        if fcntl is None:
            raise RuntimeError("reopen=True needs a system with POSIX file locks")
        self.path = folder / HEAD_FILE
        self._next = FIRST
        rows_file = folder / ROWS_FILE
        if rows_file.exists() and not self.path.exists():
            raise FileExistsError(
                f"{rows_file} holds rows without {self.path.name}, so that they cannot be continued (they were not "
                "written with reopen=True): nothing has been changed. Choose another scratch_dir, or delete the file"
            )
        folder.mkdir(parents=True, exist_ok=True)
        how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        super().__init__(os.open(self.path, how, 0o644), HEADER)
        # never mapped: a map keeps a lock
        self._locked: SharedFile | None = SharedFile(os.open(self.path, how))
        self._lock(self._locked.descriptor)
        magic, version, _ = self._read_header()
        # a process may have died before :meth:`finish`
        self.is_new = not magic and not rows_file.exists()
        if self.is_new:
            # of rows that were deleted
            (folder / PRIORITY_FILE).unlink(missing_ok=True)
            os.ftruncate(self.descriptor, 0)
            os.ftruncate(self.descriptor, HEADER)
            self.reserve(-HEADER, HEADER)
        elif (magic, version) != (_MAGIC, _VERSION) or os.fstat(
            self.descriptor
        ).st_size < HEADER:
            self.refuse(f"its header is not that of a head of version {_VERSION}")

    def _lock(self, descriptor: int) -> None:
        """Lock the file; unlike a record lock, this lock is kept when another
        descriptor of the file is closed."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"the rows in {self.path.parent} are open in process {self._read_header()[2]}, or in one started by "
                "it: call close() of the buffers there, end these processes, or choose another scratch_dir"
            ) from None

    def close(self) -> None:
        """Let other processes open the file, although this process may still map it."""
        self._locked = None

    def _read_header(self) -> tuple[int, int, int]:
        """Return the magic number, the version, and the id of the process that opened
        the file last."""
        return unpack("<3q", os.pread(self.descriptor, FIRST, 0).ljust(FIRST, b"\0"))

    def keep(self, *numbers: SharedNumbers) -> None:
        """Move numbers to the header, or, in an older file, replace them by those in
        the header."""
        for shared in numbers:
            shared.keep_in(self, self._next, exists=not self.is_new)
            self._next += 8 * len(shared)

    def finish(self) -> None:
        """Mark the header as complete."""
        os.pwrite(self.descriptor, pack("<3q", _MAGIC, _VERSION, os.getpid()), 0)

    def refuse_short(self, nbytes: int) -> None:
        """Raise a ValueError if the file ends before the first ``nbytes`` after the
        header."""
        if os.fstat(self.descriptor).st_size < HEADER + nbytes:
            self.refuse("it is too short")

    def refuse(self, fault: str) -> NoReturn:
        raise ValueError(
            f"{self.path} is damaged ({fault}): nothing has been written. Load a dump into a storage with another "
            "scratch_dir"
        )
