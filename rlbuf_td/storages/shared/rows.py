"""Rows that several processes share."""

from __future__ import annotations

import json
import zlib
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from rlbuf_td.kernels.dispatch import import_kernels
from rlbuf_td.kernels.inference_mode import outside_inference_mode
from rlbuf_td.kernels.serials import block_size
from rlbuf_td.storages.allocate import find_rows, steps_for
from rlbuf_td.storages.dedup import saved_dedup
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.listeners import Attached, WeakReference
from rlbuf_td.storages.memory_budget import Purpose, require_room
from rlbuf_td.storages.row_class import RowClass
from rlbuf_td.storages.rows import Rows
from rlbuf_td.storages.shared.head_file import HeadFile
from rlbuf_td.storages.shared.lock import ProcessLock
from rlbuf_td.storages.shared.memory import NamelessFile, SharedFile, SharedNumbers

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage

_PAGE = 4096
_COPY = Purpose(
    "A copy of the written rows in shared memory takes",
    "Share the rows before they are written (shared=True), or keep them in a file (scratch_dir=...).",
)


class SharedRows(Attached):
    """The shared memory of a storage, which a lock protects; the first writer allocates the rows."""

    def __init__(self, storage: PackedStorage) -> None:
        super().__init__(storage)
        self.file = NamelessFile()  # for the rows
        self._beside: SharedFile = NamelessFile()  # for all else
        # Size of the rows' description in bytes (0: none yet), and its checksum.
        self._described = SharedNumbers("q", [0, 0]).share_memory_()
        self._has_rows = False  # whether this process maps the rows
        self.of_episodes: torch.Tensor | None = None  # memory for the numbers of episodes
        self._head_file: HeadFile | None = None
        #: The counts of the first ring writer over rows in a file, which later processes continue.
        self.of_writer: SharedNumbers | None = None

    def keep_in(self, head_file: HeadFile) -> None:
        """Keep all that describes the rows in a file; rows that another process has left are found at the next lock."""
        self._beside = self._head_file = head_file
        storage, self.of_writer = self.storage, SharedNumbers("q", [0, 0, -1, 0])
        head_file.keep(self._described, storage.numbers, storage.episode_state, self.of_writer)

    def close(self) -> None:
        """Let another process open the file."""
        if self._head_file is not None:
            self._head_file.close()

    def restore(self, storage: PackedStorage) -> None:
        """Connect to the storage that a spawned process has received, and map its rows."""
        self._owner = WeakReference(storage)
        self.find()

    def find(self) -> None:
        """Map the rows if another process has allocated them and this process has not mapped them."""
        length = self._described[0]
        if length and not self._has_rows:
            storage = self.storage
            if self._head_file is not None:
                self._head_file.refuse_short(length)
            text = bytes(self._beside.map(length).numpy())
            if self._head_file is not None and zlib.crc32(text) != self._described[1]:
                self._head_file.refuse("the description of the rows does not match its checksum")
            found = json.loads(text)
            layout, shape = RowLayout.from_state(found["layout"]), torch.Size(found["shape"])
            _refuse_other(storage, shape)
            storage.row_class = storage.row_class or RowClass.of_state(found.get("row_class"))
            storage.adopt(find_rows(storage, layout, shape, saved_dedup(layout, found)))

    def place(self, made: Rows) -> None:
        """Describe the rows to other processes, and move their ring to shared memory."""
        description: dict[str, Any] = {"layout": made.layout.state(), "shape": list(made.shape)}
        if self.storage.row_class is not None:
            description["row_class"] = self.storage.row_class.state()
        if made.dedup is not None:
            description["pooled"] = made.dedup.state()
        text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
        rows, lanes, found = made.cells, made.cells // made.steps, bool(self._described[0])
        first, size = -(-len(text) // _PAGE) * _PAGE, block_size(lanes)
        nbytes = first + 8 * (2 * rows + size)
        if self._head_file is not None and found:
            self._head_file.refuse_short(nbytes)
        elif self._head_file is not None:
            self._head_file.reserve(0, nbytes)
        memory = self._beside.map(nbytes)
        with outside_inference_mode():  # a later write could not change views that inference mode has made
            generations, numbers, block = memory[first:].view(torch.int64).split([rows, rows, size])
            self.of_episodes = numbers.view(torch.int32).view(lanes, made.steps, 2)
        self._has_rows = True
        self.storage._ring.keep_in(block, generations, found=found)
        if not found:
            memory[: len(text)] = text
            self._described[1] = zlib.crc32(text.numpy().data)
            self._described[0] = len(text)  # last

    def entered(self) -> None:
        self.find()

    def leaving(self, failed: bool) -> bool:
        return not (failed and self.storage._ring.dirty)

    def recover(self) -> None:
        self.find()
        self.storage.recover()

    def __getstate__(self) -> dict[str, Any]:
        # Without the storage, so that TorchRL's data sets can send the state of a storage without the storage.
        return self.__dict__ | {"_has_rows": False, "of_episodes": None, "_owner": None}


def _refuse_other(storage: PackedStorage, shape: torch.Size) -> None:
    """Raise a ValueError if rows that another process has left do not fit the arguments of this storage."""
    lanes = shape[1:]
    if len(shape) != storage.ndim:
        raise ValueError(f"the rows in {storage.scratch_dir} have ndim={len(shape)}, not ndim={storage.ndim}")
    if storage.lanes_wanted not in (None, *lanes):
        raise ValueError(f"the rows in {storage.scratch_dir} have lanes={lanes[0]}, not lanes={storage.lanes_wanted}")
    if steps_for(storage, lanes) != shape[0]:
        raise ValueError(
            f"the rows in {storage.scratch_dir} have capacity {prod(shape)}, not {storage.max_size}: reopen them with "
            f"max_size={prod(shape)}; rb.dumps and rb.loads transfer rows into another capacity"
        )


def share(storage: PackedStorage, head_file: HeadFile | None = None) -> None:
    """Move the rows to shared memory, see :meth:`PackedStorage.share_memory_`."""
    if storage.shared_rows is not None:
        return
    if torch.device("cpu" if storage.device == "auto" else storage.device).type != "cpu":
        raise ValueError(
            f"rows on {storage.device} cannot be shared by several processes: keep them on the CPU, and move batches "
            f"(a transform does), or let one process write"
        )
    import_kernels()
    with storage.lock:
        rows = storage.rows
        written = None if rows is None or storage.scratch_dir is not None else rows
        if written is not None and written.dedup is None:
            written = storage.written_rows()  # only these are copied
        if written is not None:
            nbytes = sum(tensor.nbytes for tensor in (written.matrix, *written.used_entries()))
            require_room(nbytes, torch.device("cpu"), _COPY, shared=True)
        storage.device = torch.device("cpu")
        storage.shared_rows = shared = SharedRows(storage)
        lock = ProcessLock(shared, storage.lock)
        if head_file is not None:
            shared.keep_in(head_file)
            lock.keep_in(head_file)
        storage.numbers.share_memory_()
        storage.episode_state.share_memory_()
        storage.is_reserved = False  # reserved rows can no longer be replaced
        if rows is not None and written is not None:
            moved = find_rows(storage, rows.layout, rows.shape, rows.dedup)
            storage.adopt(moved)
            moved.restore_(written.matrix, written.used_entries())
        elif rows is not None:
            shared.place(rows)
            storage.find_episodes(storage.episodes)
        storage.shared = storage.scratch_dir is None
        storage.lock, storage.live = lock, None
