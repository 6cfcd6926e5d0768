"""A named file beside the rows, from which another process continues a storage after a crash."""

from __future__ import annotations

import os
from pathlib import Path
from struct import pack, unpack
from typing import NoReturn

from rlbuf_td.storages.shared.memory import SharedFile, SharedNumbers

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

HEAD_FILE, PRIORITY_FILE = "head.bin", "priorities.bin"
HEADER = 1 << 16  # bytes of the header; a multiple of every system's page size
_MAGIC, _VERSION, _FIRST = int.from_bytes(b"rlbuf_td", "little"), 1, 24


class HeadFile(SharedFile):
    """The file ``head.bin``: a header of 64-bit numbers, then the memory that :meth:`map` returns.

    The file stays locked until this object is closed, or deleted, in this process and in those forked from it or
    spawned with it. Mapped bytes survive the end of a process, but not a loss of power.
    """

    def __init__(self, folder: Path, rows_file: Path) -> None:
        if fcntl is None:
            raise RuntimeError("reopen=True needs a system with POSIX file locks")
        self.path, self._next = folder / HEAD_FILE, _FIRST
        if rows_file.exists() and not self.path.exists():
            raise FileExistsError(
                f"{rows_file} holds rows without {self.path.name}, so that they cannot be continued (they were not "
                "written with reopen=True): nothing has been changed. Choose another scratch_dir, or delete the file"
            )
        folder.mkdir(parents=True, exist_ok=True)
        how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        super().__init__(os.open(self.path, how, 0o644), HEADER)
        self._locked: SharedFile | None = SharedFile(os.open(self.path, how))  # never mapped: a map keeps a lock
        self._lock(self._locked.descriptor)
        magic, version, _ = self._read_header()
        self.is_new = not magic and not rows_file.exists()  # a process may have died before :meth:`finish`
        if self.is_new:
            (folder / PRIORITY_FILE).unlink(missing_ok=True)  # of rows that were deleted
            os.ftruncate(self.descriptor, 0)
            os.ftruncate(self.descriptor, HEADER)
            self.reserve(-HEADER, HEADER)
        elif (magic, version) != (_MAGIC, _VERSION) or os.fstat(self.descriptor).st_size < HEADER:
            self.refuse(f"its header is not that of a head of version {_VERSION}")

    def _lock(self, descriptor: int) -> None:
        """Lock the file; unlike a record lock, this lock is kept when another descriptor of the file is closed."""
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
        """Return the magic number, the version, and the id of the process that opened the file last."""
        return unpack("<3q", os.pread(self.descriptor, _FIRST, 0).ljust(_FIRST, b"\0"))

    def keep(self, *numbers: SharedNumbers) -> None:
        """Move numbers to the header, or, in an older file, replace them by those in the header."""
        for each in numbers:
            each.keep_in(self, self._next, found=not self.is_new)
            self._next += 8 * len(each)

    def finish(self) -> None:
        """Mark the header as complete."""
        os.pwrite(self.descriptor, pack("<3q", _MAGIC, _VERSION, os.getpid()), 0)

    def reserve(self, start: int, nbytes: int) -> None:
        """Reserve disk space after the header, because a write to a mapped file crashes the process on a full disk."""
        if nbytes > 0 and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, HEADER + start, nbytes)

    def refuse_short(self, nbytes: int) -> None:
        """Raise a ValueError if the file ends before the first ``nbytes`` after the header."""
        if os.fstat(self.descriptor).st_size < HEADER + nbytes:
            self.refuse("it is too short")

    def refuse(self, fault: str) -> NoReturn:
        raise ValueError(
            f"{self.path} is damaged ({fault}): nothing has been written. Load a dump into a storage with another "
            "scratch_dir"
        )
