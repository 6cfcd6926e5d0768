"""Measures free memory, and warns of rows and priorities that will not fit into it."""

import errno
import math
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

_WORTH_A_LOOK = 1 << 20  # bytes; to measure takes some hundred microseconds
SHARED = Path("/dev/shm")  # where torch puts shared tensors on Linux
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class MemoryWarning(UserWarning):
    """A full buffer will exceed the free memory (the total: ``MemoryError``).

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", MemoryWarning)  # raise it
        >>> warnings.simplefilter("default", MemoryWarning)
    """


class Room(NamedTuple):
    """The free and total bytes, None if unknown, of RAM, a disk or a CUDA device."""

    location: str  # "RAM", "disk (/path)", "cuda:0"
    free: int | None = None
    total: int | None = None  # swap included

    def words(self) -> str:
        if self.free is None or self.total is None:
            return f"{self.location} of unknown size"
        free, total = show_bytes(self.free), show_bytes(self.total)
        return f"{free} of {self.location} are free ({total} in all)"


def room_for(device: torch.device, folder: Path | None = None) -> Room:
    """Return the room on a device, or in a folder, which need not exist yet."""
    if folder is not None:
        folder = folder.absolute()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        usage = shutil.disk_usage(existing)
        return Room(f"disk ({folder})", usage.free, usage.total)
    if device.type == "cuda":
        sizes = torch.cuda.mem_get_info(device) if torch.cuda.is_available() else ()
        return Room(str(device), *sizes)
    with suppress(OSError):  # systems other than Linux do not tell
        lines = Path("/proc/meminfo").read_text().splitlines()
        size = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
        total = size["MemTotal"] + size["SwapTotal"]
        with suppress(OSError, ValueError):  # of a container; "max": no limit
            total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
        return Room("RAM", min(size["MemAvailable"], total), total)
    return Room("RAM")


def require_room(
    nbytes: int, device: torch.device, what: str, remedy: str, folder: Path | None
) -> None:
    """Raise an error if a folder or the total memory is too small, or warn."""
    if nbytes < _WORTH_A_LOOK or device.type == "cuda":
        return
    room = room_for(device, folder)
    if room.free is None or nbytes <= room.free:
        return
    message = f"{what} {show_bytes(nbytes)}, but {room.words()}. {remedy}"
    if folder is not None:
        raise OSError(errno.ENOSPC, message)
    if nbytes > (room.total or 0):
        raise MemoryError(message)
    warnings.warn(message, MemoryWarning, stacklevel=2)


def show_bytes(nbytes: float) -> str:
    exponent = int(math.log2(max(nbytes, 1))) // 10
    return f"{nbytes / (1 << 10 * exponent):,.{exponent and 1}f} {_UNITS[exponent]}"
