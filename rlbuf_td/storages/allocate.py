"""Where the bytes of the rows live: RAM, shared memory, a memory-mapped file, a CUDA device, or RAM that one reads."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rlbuf_td.kernels.huge_pages import advise_huge_pages
from rlbuf_td.storages.dedup.layout import DedupLayout, Sections
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.memory_budget import require_room, room_for, show_bytes
from rlbuf_td.storages.pinned import page_locked, refuse_offload
from rlbuf_td.storages.rows import PlainRows, Rows
from rlbuf_td.storages.rows.dedup import DedupRows, grows
from rlbuf_td.storages.schema import SchemaError

ROWS_FILE = "rows.bin"


class Purpose(NamedTuple):
    """What memory is for, in words for warnings and errors, as :func:`require_room` takes them."""

    what: str = "The rows take"
    remedy: str = ""
    quiet: bool = False


_ROWS = Purpose()

# -- the rows of a PackedStorage ``storage``


def refuse_arguments(
    max_size: Any, ndim: int, device: Any, scratch_dir: Any, shared: bool, offload: bool, dedup: bool
) -> None:
    if max_size < 1 or max_size != int(max_size):
        raise ValueError(f"max_size must be a whole number, at least 1, got {max_size}")
    if ndim < 1:
        raise ValueError(f"ndim must be at least 1, got {ndim}")
    if offload:
        refuse_offload(device, scratch_dir=scratch_dir, shared=shared, dedup=dedup)
    if scratch_dir is not None and shared:
        raise ValueError("a memory-mapped file is shared already: pass scratch_dir or shared, not both")
    if (scratch_dir is not None or shared) and torch.device("cpu" if device == "auto" else device).type != "cpu":
        raise ValueError(f"scratch_dir and shared need device='cpu', got device={str(device)!r}")


def refuse_init(shared_init: bool, cleanup_memmap: bool, compilable: bool, shared: bool, device: Any) -> None:
    """Refuse arguments of TorchRL's storages that cannot be met, by name."""
    if shared_init and not cleanup_memmap:
        raise ValueError(
            "cleanup_memmap=False keeps temporary files, and shared_init=True makes none: give scratch_dir"
        )
    if compilable and (shared or shared_init):
        raise RuntimeError("a storage with compilable=True cannot be shared by processes: leave it out")
    if shared_init and torch.device("cpu" if device == "auto" else device).type != "cpu":
        raise ValueError(f"shared_init needs device='cpu', got device={str(device)!r}")


def reserve(storage: Any, schema: TensorDictBase) -> None:
    """Allocate, before the first write, for transitions that hold at least the keys of a schema.

    The first write may bring more keys, such as a policy's outputs. RAM is not touched until then, unless it is
    page-locked.

    Args:
        schema: a time step, ``[*lanes]``: an example, or what :func:`~rlbuf_td.envs.specs.schema_of` gives.

    Raises:
        RuntimeError: the rows are there already.
        SchemaError: the schema has too few batch dims, no lanes, or an entry that cannot be packed.
    """
    if storage.rows is not None:
        raise RuntimeError("the rows of this storage are there already: reserve them before the first write")
    if schema.batch_dims < storage.ndim - 1:
        raise SchemaError(
            f"a storage with ndim={storage.ndim} takes a schema of {storage.ndim - 1} or more batch dims (lanes), "
            f"got batch size {tuple(schema.batch_size)}"
        )
    storage._init(schema)
    storage.is_reserved = True


def release(storage: Any) -> None:
    """Give back reserved rows; a RuntimeError if rows have been written."""
    if len(storage):
        raise RuntimeError("rows that have been written are not given back: empty the buffer instead")
    storage.rows = storage._live = storage._storage = None
    if storage.scratch_dir is not None:
        (storage.scratch_dir / ROWS_FILE).unlink()


def steps_for(storage: Any, lanes: torch.Size) -> int:
    if not prod(lanes):
        raise SchemaError(f"cannot store transitions of no lanes: the batch dims after time are {tuple(lanes)}")
    return -(-storage.max_size // prod(lanes))


def make_rows(
    storage: Any, layout: RowLayout, lanes: torch.Size, device: torch.device | None, dedup: DedupLayout | None
) -> Rows:
    """Return new rows of the capacity and in the place of a storage, which it does not use before ``adopt``."""
    shape = torch.Size([steps_for(storage, lanes), *lanes])
    place = torch.device(storage.device if storage.device != "auto" else device or "cpu")
    nbytes = bytes_of(layout, shape, dedup)
    what = f"{prod(shape):,} rows of {(dedup.stored if dedup else layout).row_bytes:,} bytes take"
    purpose = Purpose(what + (" with what they share" if dedup else ""), _remedy(storage, layout), storage.is_reserved)
    scratch_dir = storage.scratch_dir
    if storage.existsok and scratch_dir is not None:
        (scratch_dir / ROWS_FILE).unlink(missing_ok=True)
    with torch.inference_mode(False):  # else rows first written in inference mode could not be written outside it
        if storage.shared_rows is not None and scratch_dir is None:
            memory = storage.shared_rows.memory(nbytes)
        elif dedup is None:
            places = {"scratch_dir": scratch_dir, "shared": storage.shared, "offload": storage.offload}
            memory = allocate_bytes(nbytes, place, purpose, **places)
            if layout.row_bytes <= mmap.PAGESIZE:  # longer rows cost more at their first write than reads save soon
                advise_huge_pages(memory)
        elif grows(place):
            sections = Sections.of(dedup, prod(shape))
            memory = allocate_bytes(sections.fixed, place, purpose, scratch_dir=scratch_dir).zero_()
        else:
            sections = Sections.of(dedup, prod(shape))
            likely = sections.likely(dedup, prod(shape))
            memory = allocate_sparse(nbytes, likely, sections.fixed, purpose, scratch_dir=scratch_dir)
        if storage.auto_cleanup and scratch_dir is not None:
            weakref.finalize(storage, _delete_file, scratch_dir / ROWS_FILE, os.getpid())
        return rows_in(storage, memory, layout, shape, dedup)


def bytes_of(layout: RowLayout, shape: torch.Size, dedup: DedupLayout | None) -> int:
    return shape.numel() * layout.row_bytes if dedup is None else Sections.of(dedup, shape.numel()).total


def rows_in(
    storage: Any, memory: torch.Tensor, layout: RowLayout, shape: torch.Size, dedup: DedupLayout | None
) -> Rows:
    """Return the rows that lie in memory of :func:`bytes_of` bytes."""
    rows: Rows
    if dedup is None:
        rows = PlainRows(layout, memory.view(*shape, layout.row_bytes))
        rows.is_mapped = storage.scratch_dir is not None
    else:
        room = None if storage.scratch_dir is None else FileRoom(storage.scratch_dir, len(memory))
        rows = DedupRows(dedup, memory, shape, make_room=room)
        rows.is_deferred = storage.shared_rows is not None
    return rows


def find_rows(storage: Any, layout: RowLayout, shape: torch.Size, dedup: DedupLayout | None) -> Rows:
    """Return the rows that another process has made, in the file in ``scratch_dir`` or in shared memory."""
    nbytes = bytes_of(layout, shape, dedup)
    if storage.scratch_dir is not None:
        memory = map_bytes(storage.scratch_dir, nbytes)
    else:
        memory = storage.shared_rows.memory(nbytes)
    return rows_in(storage, memory, layout, shape, dedup)


def _remedy(storage: Any, layout: RowLayout) -> str:
    largest = max(layout.leaves, key=lambda leaf: leaf.nbytes)
    elsewhere = "another scratch_dir" if storage.scratch_dir else "scratch_dir=..., which keeps the rows in a file"
    if storage.offload:
        elsewhere = (
            "raise the limits on locked memory (ulimit -l, those of a container), or keep the rows on the CPU with "
            "scratch_dir=..., in a file, and bring batches to the GPU by ReplayBuffer(device=...)"
        )
    elif storage.device != "auto" and torch.device(storage.device).type == "cuda":
        elsewhere = "offload=True, which keeps the rows in RAM"
    return (
        f"Take a smaller max_size, or {elsewhere}; the largest key is {largest.name}, {largest.nbytes:,} bytes a "
        "row. rlbuf_td.plan(...) tells more."
    )


# -- memory


def allocate_bytes(
    nbytes: int,
    device: torch.device,
    purpose: Purpose = _ROWS,
    *,
    scratch_dir: Path | None = None,
    shared: bool = False,
    offload: bool = False,
) -> torch.Tensor:
    """Return ``[nbytes]`` uint8, not initialized: in RAM, in a file, in shared memory, or page-locked for a device.

    In RAM, pages are taken from the system when they are first written; elsewhere all are taken at once.
    """
    place = torch.device("cpu") if offload else device
    lazily = scratch_dir is None and not shared and not offload
    require_room(nbytes, place, scratch_dir=scratch_dir, shared=shared, lazily=lazily, **purpose._asdict())
    if scratch_dir is not None:
        return _make_file(scratch_dir, nbytes)
    with _explained(nbytes, purpose, place, shared=shared, cause=offload):
        if shared:
            storage = torch.UntypedStorage._new_shared(nbytes)
            return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        if offload:
            return page_locked(nbytes, device)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def allocate_sparse(
    nbytes: int, likely: int, at_once: int, purpose: Purpose = _ROWS, *, scratch_dir: Path | None = None
) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 zeros in RAM or in a file, of which ``likely`` bytes will be used.

    RAM is taken from the system as it is written to. The file has holes behind the first ``at_once`` bytes, which
    :class:`FileRoom` fills before they are written to.
    """
    cpu, lazily = torch.device("cpu"), scratch_dir is None
    require_room(likely, cpu, scratch_dir=scratch_dir, lazily=lazily, **purpose._asdict())
    if scratch_dir is not None:
        return _make_file(scratch_dir, nbytes, at_once)
    with _explained(likely, purpose, cpu):
        if hasattr(mmap, "MAP_PRIVATE"):
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
            memory = torch.frombuffer(mmap.mmap(-1, nbytes, kind), dtype=torch.uint8)
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    advise_huge_pages(memory)
    return memory


@contextmanager
def _explained(
    nbytes: int, purpose: Purpose, place: torch.device, *, shared: bool = False, cause: bool = False
) -> Iterator[None]:
    """Turn a failed allocation into a MemoryError in words, which with ``cause`` quote the system's."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        words = room_for(place, shared=shared).words() + (f", but {error}" if cause else "")
        message = f"{purpose.what} {show_bytes(nbytes)}, which cannot be had: {words}. {purpose.remedy}"
        raise MemoryError(message) from error


class FileRoom:
    """Takes disk space for holes of a file before they are written to: a full disk is then an error, not a crash."""

    def __init__(self, scratch_dir: Path, nbytes: int) -> None:
        self._file, self._nbytes = scratch_dir / ROWS_FILE, nbytes
        self._filled: dict[int, int] = {}  # by the beginning of a section, how many of its bytes

    def __call__(self, section: int, nbytes: int) -> None:
        """Take disk space for the first ``nbytes`` of a section; an OSError if the disk is full."""
        filled = self._filled.get(section, 0)
        if nbytes <= filled or not hasattr(os, "posix_fallocate"):
            return
        start, needed = section + filled, nbytes - filled
        ahead = min(max(needed, min(_FILL, filled // 8)), self._nbytes - start)
        descriptor = os.open(self._file, os.O_RDWR)
        try:
            try:
                os.posix_fallocate(descriptor, start, ahead)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                ahead = needed
                os.posix_fallocate(descriptor, start, needed)
        finally:
            os.close(descriptor)
        self._filled[section] = filled + ahead


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


def _delete_file(path: Path, process: int) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            path.parent.rmdir()


def map_bytes(scratch_dir: Path, nbytes: int) -> torch.Tensor:
    """Return the ``[nbytes]`` uint8 of a file that is there, as every process that maps it sees them."""
    return torch.from_file(str(scratch_dir / ROWS_FILE), shared=True, size=nbytes, dtype=torch.uint8)
