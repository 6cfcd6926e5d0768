"""Allocates the rows of a PackedStorage in RAM, shared memory or a file, or on another device."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rlbuf_td.kernels.huge_pages import advise_huge_pages
from rlbuf_td.storages.checks import usable_device, whole
from rlbuf_td.storages.dedup import DedupLayout
from rlbuf_td.storages.entries import Sections
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.memory_budget import Purpose, require_room, room_for, show_bytes
from rlbuf_td.storages.rows import PlainRows, Rows
from rlbuf_td.storages.rows.dedup import DedupRows
from rlbuf_td.storages.schema import SchemaError

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage
    from rlbuf_td.storages.shared.rows import SharedRows

ROWS_FILE = "rows.bin"
_ROWS = Purpose()
_FILL = 256 << 20  # most bytes reserved ahead
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python defines it from 3.13 on


def checked_lanes(lanes: Any, ndim: int) -> int:
    if ndim != 2:
        raise ValueError(f"lanes={lanes} needs ndim=2, for rows [T, E], got ndim={ndim}")
    return whole(1)("lanes", lanes)


def refuse(device: Any, scratch_dir: Any, shared: bool, dedups: bool) -> None:
    if scratch_dir is not None and shared:
        raise ValueError("a memory-mapped file is shared already: pass scratch_dir or shared, not both")
    if (scratch_dir is not None or shared) and torch.device("cpu" if device == "auto" else device).type != "cpu":
        raise ValueError(f"scratch_dir and shared need device='cpu', got device={str(device)!r}")
    if dedups and device != "auto":
        refuse_deduplication(torch.device(device))


def refuse_deduplication(device: torch.device) -> None:
    if device.type != "cpu":
        raise ValueError(
            f"share_next and frames need rows on the CPU, got device={str(device)!r}: leave them out, or keep the rows "
            "on the CPU and move batches with ReplayBuffer(device=...)"
        )


def refuse_reopen(reopen: bool, scratch_dir: Any, existsok: bool, auto_cleanup: bool, dedups: bool) -> None:
    if not reopen:
        return
    if scratch_dir is None:
        raise ValueError("reopen=True continues the rows in a folder: pass scratch_dir")
    if existsok or auto_cleanup:
        which, does = ("existsok", "replaces") if existsok else ("auto_cleanup", "deletes")
        raise ValueError(f"{which}=True {does} the rows in scratch_dir, reopen=True keeps them: pass one of the two")
    if dedups:
        raise ValueError(
            "reopen=True does not support deduplicated rows: leave out share_next and frames, or use dumps"
        )


def refuse_init(shared_init: bool, cleanup_memmap: bool, compilable: bool, shared: bool, device: Any) -> None:
    if shared_init and not cleanup_memmap:
        raise ValueError("cleanup_memmap=False keeps temporary files; shared_init=True makes none: pass scratch_dir")
    if compilable and (shared or shared_init):
        raise RuntimeError("a storage with compilable=True cannot be shared by processes: leave out compilable")
    if shared_init and torch.device("cpu" if device == "auto" else device).type != "cpu":
        raise ValueError(f"shared_init needs device='cpu', got device={str(device)!r}")
    if device != "auto":
        usable_device(device)


def steps_for(storage: PackedStorage, lanes: torch.Size) -> int:
    if not prod(lanes):
        raise SchemaError(f"cannot store transitions without lanes: the batch dims after time are {tuple(lanes)}")
    return -(-storage.max_size // prod(lanes))


def make_rows(
    storage: PackedStorage, layout: RowLayout, lanes: torch.Size, device: torch.device | None, dedup: DedupLayout | None
) -> Rows:
    shape = torch.Size([steps_for(storage, lanes), *lanes])
    place = torch.device(storage.device if storage.device != "auto" else device or "cpu")
    if dedup is not None:
        refuse_deduplication(place)
    sections = None if dedup is None else Sections.of(dedup, shape)
    nbytes = prod(shape) * layout.row_bytes if sections is None else sections.total
    what = f"{prod(shape):,} rows of {(dedup.stored if dedup else layout).row_bytes:,} bytes take"
    purpose = Purpose(what + (" with what they share" if dedup else ""), _remedy(storage, layout), storage.is_reserved)
    scratch_dir = storage.scratch_dir
    if scratch_dir is not None and (storage.existsok or storage.reopen):  # rows without a description hold no data
        (scratch_dir / ROWS_FILE).unlink(missing_ok=True)
    with torch.inference_mode(False):  # rows allocated in inference mode could not be written outside it
        shared = storage.shared_rows.file if storage.shared_rows is not None and scratch_dir is None else None
        sparse = None if sections is None else (sections.likely, sections.fixed)
        memory = allocate_bytes(nbytes, place, purpose, scratch_dir=scratch_dir, shared=shared, sparse=sparse)
        # For longer rows, huge pages cost more at the first write than they save in reads.
        if dedup is None and shared is None and layout.row_bytes <= mmap.PAGESIZE:
            advise_huge_pages(memory)
        if storage.auto_cleanup and scratch_dir is not None:
            weakref.finalize(storage, _delete_file, scratch_dir / ROWS_FILE, os.getpid())
        return rows_in(storage, memory, layout, shape, dedup)


def rows_in(
    storage: PackedStorage, block: torch.Tensor, layout: RowLayout, shape: torch.Size, dedup: DedupLayout | None
) -> Rows:
    rows: Rows
    if dedup is None:
        rows = PlainRows(layout, block.view(*shape, layout.row_bytes))
        rows.is_mapped = storage.scratch_dir is not None
    else:
        room = None if storage.scratch_dir is None else FileRoom(storage.scratch_dir, len(block))
        rows = DedupRows(dedup, block, shape, make_room=room)
    return rows


def find_rows(storage: PackedStorage, layout: RowLayout, shape: torch.Size, dedup: DedupLayout | None) -> Rows:
    """Map the rows that lie in the file of ``scratch_dir`` or in shared memory."""
    nbytes = prod(shape) * layout.row_bytes if dedup is None else Sections.of(dedup, shape).total
    with torch.inference_mode(False):
        if storage.scratch_dir is not None:
            refuse_other_size(storage.scratch_dir / ROWS_FILE, nbytes)
            memory = map_bytes(storage.scratch_dir, nbytes)
        else:
            memory = cast("SharedRows", storage.shared_rows).file.map(nbytes)
        return rows_in(storage, memory, layout, shape, dedup)


def refuse_other_size(file: Path, nbytes: int) -> None:
    """Raise a ValueError unless a file of rows has ``nbytes`` bytes; mapping it would extend it."""
    size = file.stat().st_size if file.exists() else 0
    if size != nbytes:
        raise ValueError(f"{file} has {size:,} bytes instead of {nbytes:,}: its rows are lost; load a dump elsewhere")


def _remedy(storage: PackedStorage, layout: RowLayout) -> str:
    largest = max(layout.leaves, key=lambda leaf: leaf.nbytes)
    elsewhere = "another scratch_dir" if storage.scratch_dir else "scratch_dir=..., which keeps the rows in a file"
    if storage.device != "auto" and torch.device(storage.device).type != "cpu":
        elsewhere = "keep the rows on the CPU and move batches with ReplayBuffer(device=...)"
    return (
        f"Take a smaller max_size, or {elsewhere}; the largest key is {largest.name}, {largest.nbytes:,} bytes per "
        "row. rlbuf_td.plan(...) shows the memory of every key."
    )


def allocate_bytes(
    nbytes: int,
    device: torch.device,
    purpose: Purpose = _ROWS,
    *,
    scratch_dir: Path | None = None,
    shared: Any = None,
    sparse: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 on a device, in a file, or in the nameless file ``shared``.

    With ``sparse=(likely, at_once)``, all bytes are zero, only ``likely`` bytes must be free, and a file reserves disk
    space only for its first ``at_once`` bytes.
    """
    lazily = scratch_dir is None
    likely, at_once = sparse or (nbytes, nbytes)
    is_shared = shared is not None
    require_room(likely, device, purpose, scratch_dir=scratch_dir, shared=is_shared, lazily=lazily)
    if scratch_dir is not None:
        return _make_file(scratch_dir, nbytes, at_once)
    try:
        if is_shared:
            return shared.map(nbytes)
        if sparse is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        memory = _zeros_not_reserved(nbytes)
    except (OSError, OverflowError, RuntimeError) as error:
        words = room_for(device, shared=is_shared).words()
        message = f"{purpose.what} {show_bytes(likely)}, which cannot be allocated: {words}. {purpose.remedy}"
        raise MemoryError(message) from error
    advise_huge_pages(memory)
    return memory


def _zeros_not_reserved(nbytes: int) -> torch.Tensor:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
    return torch.frombuffer(mmap.mmap(-1, nbytes, kind), dtype=torch.uint8)


class FileRoom:
    """Reserves disk space for a mapped file, because a write to the file crashes the process if the disk is full."""

    def __init__(self, scratch_dir: Path, nbytes: int) -> None:
        self._file, self._nbytes = scratch_dir / ROWS_FILE, nbytes
        self._filled: dict[int, int] = {}  # start of a section -> bytes reserved in it

    def __call__(self, section: int, nbytes: int) -> None:
        """Reserve disk space for the first ``nbytes`` bytes of the section at offset ``section`` of the file."""
        filled = self._filled.get(section, 0)
        if nbytes <= filled or not hasattr(os, "posix_fallocate"):
            return
        start, needed = section + filled, nbytes - filled
        ahead = min(max(needed, min(_FILL, filled // 8)), self._nbytes - start)
        with open(self._file, "r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), start, ahead)
            except OSError:
                ahead = needed
                os.posix_fallocate(file.fileno(), start, ahead)
        self._filled[section] = filled + ahead


def _make_file(scratch_dir: Path, nbytes: int, at_once: int) -> torch.Tensor:
    scratch_dir.mkdir(parents=True, exist_ok=True)
    path = scratch_dir / ROWS_FILE
    try:
        with open(path, "x+b", opener=partial(os.open, mode=0o644)) as file:
            if hasattr(os, "posix_fallocate"):  # a full disk raises an error here instead of crashing a later write
                os.posix_fallocate(file.fileno(), 0, at_once)
            os.ftruncate(file.fileno(), nbytes)
    except FileExistsError as error:
        raise FileExistsError(
            f"{path} already holds rows; they are not overwritten: choose another scratch_dir, or delete the file"
        ) from error
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return map_bytes(scratch_dir, nbytes)


def _delete_file(path: Path, process: int) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            path.parent.rmdir()


def map_bytes(scratch_dir: Path, nbytes: int) -> torch.Tensor:
    return torch.from_file(str(scratch_dir / ROWS_FILE), shared=True, size=nbytes, dtype=torch.uint8)
