"""Rows that several processes share, and forks beside threads.

``os.fork`` copies the memory of a process, but only the thread that forks: a child
inherits the locks of other threads as held, and their rows half written. While a
process forks, this module therefore holds the lock of each storage, so that no other
thread is inside a write, a draw or an update, and the lock of numba's compiler.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import zlib
from math import prod
from pathlib import Path
from struct import unpack_from
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch

from rlbuf_td.kernels.host_memory import outside_inference_mode
from rlbuf_td.kernels.serials import block_size
from rlbuf_td.storages.dedup import saved_dedup
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.listeners import Attached, WeakReference
from rlbuf_td.storages.lock import ProcessLock
from rlbuf_td.storages.memory import (
    FIRST,
    HEAD_FILE,
    HEADER,
    HeadFile,
    NamelessFile,
    SharedFile,
)
from rlbuf_td.storages.memory_budget import require_room
from rlbuf_td.storages.numbers import SharedNumbers
from rlbuf_td.storages.row_class import loaded
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.rows.form import RowsForm
from rlbuf_td.storages.torchrl_parts import listeners_of

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage

_COPY = (
    "A copy of the written rows in shared memory takes",
    "Share the rows before they are written (shared=True), or keep them in a file (scratch_dir=...).",
)
_PAGE = 4096
# seconds; otherwise, a thread that waits for the forking thread would stop both for
# ever
_LONGEST = 10.0
#: The storages for whose calls a fork of this process waits.
watched: WeakSet[Any] = WeakSet()
_fork = threading.local()  # ``held``: the locks that the fork of this thread holds


class SharedRows(Attached):
    """The shared memory of a storage, which a lock protects; the first writer allocates
    the rows."""

    def __init__(self, storage: PackedStorage) -> None:
        super().__init__(storage)
        self.file = NamelessFile()  # for the rows
        self._beside: SharedFile = NamelessFile()  # for all else
        # Size of the rows' description in bytes (0: none yet), and its checksum.
        self._described = SharedNumbers("q", [0, 0]).share_memory_()
        self._keys = storage.keys
        self._has_rows = False  # whether this process maps the rows
        # memory for the numbers of episodes
        self.of_episodes: torch.Tensor | None = None
        self._head_file: HeadFile | None = None

    def take_rows(self, head_file: HeadFile | None = None) -> None:
        """Move the storage's rows and serials to memory that other processes can map, and
        what describes them to a file if there is one; an error changes nothing."""
        storage = self.storage
        rows = storage.rows
        lock = ProcessLock(self, storage.lock)
        if head_file is not None:
            self.keep_in(head_file)
            lock.keep_in(head_file)
            storage.keys.keep_in(head_file)
        if rows is not None and storage.scratch_dir is None:
            written = storage.written_rows()
            entries = written.used_entries()
            nbytes = sum(tensor.nbytes for tensor in (written.matrix, *entries))
            require_room(nbytes, torch.device("cpu"), *_COPY, None)
            form = RowsForm(rows.layout, rows.shape, rows.dedup)
            rows = storage.map_rows(form, self.file)
            rows.restore_(written.matrix, entries)
        storage.shared_rows = self
        try:
            if rows is not None:
                storage.adopt(rows)
        except BaseException:
            storage.shared_rows = None
            raise
        storage.device = torch.device("cpu")
        storage.is_reserved = False  # reserved rows can no longer be replaced
        storage.lock, storage.live = lock, None

    def keep_in(self, head_file: HeadFile) -> None:
        """Keep all that describes the rows in a file; rows that another process has
        left are found at the next lock."""
        self._beside = self._head_file = head_file
        head_file.keep(self._described)

    def close(self) -> None:
        """Let another process open the file."""
        if self._head_file is not None:
            self._head_file.close()

    def restore(self, storage: PackedStorage) -> None:
        """Connect to the storage that a spawned process has received, and map its
        rows."""
        self._owner = WeakReference(storage)
        self.find()

    def find(self) -> None:
        """Map the rows if another process has allocated them and this process has not
        mapped them."""
        length = self._described[0]
        if length and not self._has_rows:
            storage = self.storage
            if storage.keys.are_outdated:
                storage.keys.follow()
            if self._head_file is not None:
                self._head_file.refuse_short(length)
            text = bytes(self._beside.map(length).numpy())
            if self._head_file is not None and zlib.crc32(text) != self._described[1]:
                self._head_file.refuse(
                    "the description of the rows does not match its checksum"
                )
            description = json.loads(text)
            layout = RowLayout.from_state(description["layout"])
            shape = torch.Size(description["shape"])
            self._refuse_other(shape)
            storage.row_class = loaded(description["row_class"])
            dedup = saved_dedup(layout, description)
            form = RowsForm(layout, shape, dedup)
            storage.adopt(storage.map_rows(form, self.file))

    def place(self, made: Rows) -> None:
        """Describe the rows to other processes, and move their ring to shared
        memory."""
        description: dict[str, Any] = {
            "layout": made.layout.state(),
            "shape": list(made.shape),
            "row_class": self.storage.row_class,
        }
        if made.dedup is not None:
            description["deduplicated"] = made.dedup.state()
        text = torch.frombuffer(
            bytearray(json.dumps(description).encode()), dtype=torch.uint8
        )
        rows = made.cells
        lanes = made.cells // made.steps
        exists = bool(self._described[0])
        first, size = -(-len(text) // _PAGE) * _PAGE, block_size(lanes)
        nbytes = first + 8 * (rows + size)
        if self._head_file is not None and exists:
            self._head_file.refuse_short(nbytes)
        elif self._head_file is not None:
            self._head_file.reserve(0, nbytes)
        memory = self._beside.map(nbytes)
        # a later write could not change views that inference mode has made
        with outside_inference_mode():
            numbers, block = memory[first:].view(torch.int64).split([rows, size])
            self.of_episodes = numbers.view(torch.int32).view(lanes, made.steps, 2)
        self._has_rows = True
        self.storage._ring.keep_in(block, exists=exists)
        if not exists:
            memory[: len(text)] = text
            self._described[1] = zlib.crc32(text.numpy().data)
            self._described[0] = len(text)  # last

    def _refuse_other(self, shape: torch.Size) -> None:
        """Raise a ValueError if rows that another process has left do not fit the
        arguments of this storage."""
        storage, lanes = self.storage, shape[1:]
        where = f"the rows in {storage.scratch_dir} have"
        if len(shape) != storage.ndim:
            raise ValueError(f"{where} ndim={len(shape)}, not ndim={storage.ndim}")
        if storage.lanes_wanted not in (None, *lanes):
            raise ValueError(
                f"{where} lanes={lanes[0]}, not lanes={storage.lanes_wanted}"
            )
        if storage.steps_for(lanes) != shape[0]:
            raise ValueError(
                f"{where} capacity {prod(shape)}, not {storage.max_size}: reopen them with "
                f"max_size={prod(shape)}"
            )

    def follow(self) -> None:
        """Map the rows, and take the keys of episodes, that another process has set."""
        self.find()
        if self._keys.are_outdated:
            self._keys.follow()
            self.storage.find_episodes()

    def is_whole(self) -> bool:
        """Whether no write is in progress."""
        return not self.storage._ring.dirty

    def recover(self) -> None:
        self.find()
        self.storage.recover()

    def __getstate__(self) -> dict[str, object]:
        # Without the storage, so that TorchRL's data sets can send the state of a
        # storage without the storage.
        return self.__dict__ | {"_has_rows": False, "of_episodes": None, "_owner": None}


def shape_in_folder(folder: Path) -> list[int]:
    """Return the shape of the rows that a process has left in a folder; ValueError if
    there are none."""
    file = folder / HEAD_FILE
    with open(file, "rb") as opened:
        header = opened.read(HEADER).ljust(HEADER, b"\0")
        (length,) = unpack_from("<q", header, FIRST)  # as `SharedRows.keep_in` has it
        text = opened.read(max(0, length))
    if not text:
        raise ValueError(f"{folder} holds no rows")
    try:
        return json.loads(text)["shape"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _hold() -> None:
    _fork.held = held = []
    for storage in list(watched):
        # the part of a ProcessLock that other processes ignore
        lock = getattr(storage.lock, "threads", storage.lock)
        if lock.acquire(timeout=_LONGEST):
            held.append(lock)
            # what has been attached since the rows were shared: parts of TorchRL's
            # buffers and of copied ones
            if storage.shared:
                storage.share_parts()
    numba = sys.modules.get("numba.core.compiler_lock")
    if numba is not None:  # last: calls compile while they hold the lock of a storage
        numba.global_compiler_lock.acquire()
        held.append(numba.global_compiler_lock)


def _release() -> None:
    while _fork.held:
        _fork.held.pop().release()


def _begin_child() -> None:
    """Release the locks, and do without the threads of the other process; a plan of
    writes does not look for a fork, so that the first write makes another one."""
    _release()
    for storage in list(watched):
        if not storage.shared:
            storage.write_plan = None
        for listener in listeners_of(storage).own():
            listener._begin_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold, after_in_parent=_release, after_in_child=_begin_child
    )


def pickled_generator(generator: torch.Generator | None) -> tuple[str, bytes] | None:
    """Return the device and the state of a generator, as plain values for pickles.

    A spawned process receives a tensor as a descriptor of its memory, which must stay
    open until the process has started. A tensor that a pickler makes, such as the state
    of a generator, is freed before.
    """
    return (
        None
        if generator is None
        else (str(generator.device), generator.get_state().numpy().tobytes())
    )


def unpickled_generator(pickled: tuple[str, bytes] | None) -> torch.Generator | None:
    if pickled is None:
        return None
    device, state = pickled
    generator = torch.Generator(device)
    generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    return generator
