"""Measures the free memory in RAM, in shared memory, on a disk or on a CUDA device.

The size of an allocation of 1 MiB or more is first compared with the free memory.
Allocations on CUDA devices are not checked beforehand. Memory limits of control groups
(containers, job schedulers) count as limits of the machine. A limit that the system
does not report is ignored.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# bytes from which an allocation is checked, which takes some hundred microseconds
_WORTH_A_LOOK = 1 << 20
_SHARED = Path("/dev/shm")  # where torch puts shared tensors on Linux
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class MemoryWarning(UserWarning):
    """A full buffer will exceed the free memory.

    The warning is issued when rows or priorities are allocated. A size above the total
    memory raises a ``MemoryError``.

    Example:
        >>> import warnings
        >>> from rlbuf_td import MemoryWarning
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", MemoryWarning)  # or "error": stop now instead of being killed later
    """


@dataclass(frozen=True)
class Room:
    """The free and total memory of RAM, shared memory, a disk or a CUDA device."""

    place: str  # "RAM", "shared memory", "disk (/path)", "cuda:0"
    free: int | None  # free bytes; None: not known
    total: int | None  # total bytes, swap included; None: not known

    def words(self) -> str:
        if self.free is None:
            return f"{self.place} of unknown size"
        in_all = "" if self.total is None else f" ({show_bytes(self.total)} in all)"
        return f"{show_bytes(self.free)} of {self.place} are free{in_all}"


def room_for(
    device: torch.device, *, scratch_dir: Path | None = None, shared: bool = False
) -> Room:
    if scratch_dir is not None:
        return disk(scratch_dir)
    if device.type == "cuda":
        return cuda(device)
    return shared_rows() if shared else ram()


def ram() -> Room:
    kib = _numbers(_PROC / "meminfo")
    if "MemTotal" not in kib:
        with suppress(AttributeError, ValueError, OSError):
            return Room(
                "RAM", None, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            )
        return Room("RAM", None, None)
    total = (kib["MemTotal"] + kib.get("SwapTotal", 0)) << 10
    free = kib["MemAvailable"] << 10 if "MemAvailable" in kib else total
    for limit, unused in _control_groups():
        free, total = min(free, unused), min(total, limit)
    return Room("RAM", max(free, 0), total)


def shared_rows() -> Room:
    """Return the memory of a nameless file, which is RAM where the system has such
    files, and otherwise a disk."""
    return (
        replace(ram(), place="shared memory")
        if hasattr(os, "memfd_create")
        else disk(Path(tempfile.gettempdir()))
    )


def shared_tensors() -> Room:
    """Return the memory that torch can share, each number the minimum of the values for
    RAM and for ``/dev/shm``."""
    both = ram(), _file_system(_SHARED, "")
    free = min((room.free for room in both if room.free is not None), default=None)
    total = min((room.total for room in both if room.total is not None), default=None)
    return Room(f"shared memory ({_SHARED})", free, total)


def disk(folder: Path) -> Room:
    folder = folder.absolute()
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    return _file_system(there, f"disk ({folder})")


def _file_system(folder: Path, place: str) -> Room:
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        return Room(place, usage.free, usage.total)
    return Room(place, None, None)


def cuda(device: torch.device) -> Room:
    """Return the memory of a CUDA device; memory that torch caches counts as free."""
    if not torch.cuda.is_available():
        return Room(str(device), None, None)
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    spare = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return Room(f"cuda:{index}", free + spare, total)


class Purpose(NamedTuple):
    """The texts of warnings and errors about an allocation."""

    # the beginning of messages: "1,000 rows of 8 bytes take"
    what: str = "The rows take"
    remedy: str = ""
    quiet: bool = False  # whether to suppress warnings


def require_room(
    nbytes: int,
    device: torch.device,
    purpose: Purpose,
    *,
    scratch_dir: Path | None = None,
    shared: bool = False,
    lazily: bool = False,
    room_of: Callable[[], Room] | None = None,
) -> None:
    """Raise an error if ``nbytes`` are not free; if ``lazily``, raise only if they
    exceed the total, and else warn.

    ``room_of`` returns the memory to look at, default: that of the other arguments.
    """
    if nbytes < _WORTH_A_LOOK or device.type == "cuda":
        return
    if room_of is None:
        room = room_for(device, scratch_dir=scratch_dir, shared=shared)
    else:
        room = room_of()
    message = f"{purpose.what} {show_bytes(nbytes)}, but {room.words()}"
    limit = room.total if lazily else room.free
    if limit is not None and nbytes > limit:
        message = f"{message}. {purpose.remedy}"
        raise (
            MemoryError(message)
            if scratch_dir is None
            else OSError(errno.ENOSPC, message)
        )
    if room.free is not None and nbytes > room.free and not purpose.quiet:
        share = f"{room.free / nbytes:.0%}"
        message = f"{message}: the system may kill this process when {share} of them are written. {purpose.remedy}"
        warnings.warn(message, MemoryWarning, stacklevel=2)


def show_bytes(nbytes: float) -> str:
    if nbytes < 1 << 10:
        return f"{nbytes:.0f} bytes"
    exponent = min(int(math.log2(nbytes)) // 10, len(_UNITS))
    return f"{nbytes / (1 << 10 * exponent):,.1f} {_UNITS[exponent - 1]}"


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {
        words[0]: int(words[1])
        for words in lines
        if len(words) > 1 and words[1].isdigit()
    }


def _control_groups() -> Iterator[tuple[int, int]]:
    """Yield (limit, unused bytes) of each control group that limits memory; file cache
    counts as unused."""
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one tree for all controllers
            root, limit_file, used_file, prefix = (
                _CGROUPS,
                "memory.max",
                "memory.current",
                "",
            )
        elif "memory" in controllers.split(","):
            root, prefix = _CGROUPS / "memory", "total_"
            limit_file, used_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # in a container, this path and some of its parents do not exist
        inner = root / path.lstrip("/")
        for folder in (
            inner,
            *(each for each in inner.parents if each == root or root in each.parents),
        ):
            limit, used = (
                _read(folder / limit_file).strip(),
                _read(folder / used_file).strip(),
            )
            if limit.isdigit() and used.isdigit():
                stat = _numbers(folder / "memory.stat")
                cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(
                    f"{prefix}active_file", 0
                )
                yield int(limit), int(limit) - int(used) + cached
