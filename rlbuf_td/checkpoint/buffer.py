"""Saves and loads whole buffers, and reads a dump without a buffer. A failed load leaves the buffer unchanged."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import RoundRobinWriter

from rlbuf_td.checkpoint import parts
from rlbuf_td.checkpoint.files import DumpReader, SavedTensor, explained, progress_bar, reading, write_state, writing
from rlbuf_td.checkpoint.manifest import CheckpointError
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import OUT_OF_ORDER
from rlbuf_td.storages.indexing import written_rows
from rlbuf_td.storages.saved import Moves, SavedRows
from rlbuf_td.storages.torchrl_parts import empty_part

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

KIND = "buffer"


def dump_buffer(rb: ReplayBuffer, path: str | Path) -> None:
    with writing(path, KIND) as writer, parts.at_rest(rb):
        storage, state = rb.storage, parts.capture(rb, copies=False)
        content = state["_storage"]
        rows = [content.pop("rows"), *content.pop("entries", [])] if "rows" in content else []
        names = {part: parts.name_of(getattr(rb, part)) for part in ("storage", "sampler", "writer")}
        state |= {
            "classes": {"buffer": type(rb).__name__} | names,
            "capacity": storage.max_size,
            "shape": [*(storage._total_shape or ())],
            "ndim": storage.ndim,
            "rows": [*range(len(rows))],  # numbers of the tensors with the rows, which come first
        }
        write_state(writer, state, rows)


def load_buffer(rb: ReplayBuffer, path: str | Path, *, rows_only: bool) -> None:
    with reading(path, KIND) as reader:
        with explained(reader):
            load = _Load(rb, reader, rows_only)
        nbytes = sum(each.nbytes for each in (*load.files, *load.unchecked))
        with progress_bar("load", nbytes) as reader.report:
            for each in load.unchecked:
                each.verify()
            rb.synchronize()
            with rb._fully_locked(), explained(reader):
                load.apply()
    if load.rows and load.rows.dropped:
        room = f"the buffer has room for {load.rows.capacity}"
        warnings.warn(f"the {load.rows.dropped} oldest time steps of the dump were dropped: {room}", stacklevel=3)


class _Load:
    """Loads a dump: the constructor checks the dump against the buffer, and :meth:`apply` changes the buffer."""

    def __init__(self, rb: ReplayBuffer, reader: DumpReader, rows_only: bool) -> None:
        self.rb, self.rows_only = rb, rows_only
        self.saved: dict[str, Any] = reader.state()
        self._refuse_other_parts()
        self.rows: SavedRows | None = rb.storage.examine(self.saved["_storage"], reader.path)
        self.priorities: tuple[torch.Tensor, float] | None = None
        self.files: list[SavedTensor] = []  # of the rows
        sizes = self.saved["capacity"], rb.storage.max_size
        if rows := self.rows:
            if not rows.in_order and getattr(rb.sampler, "needs_order", False):
                raise CheckpointError(f"a {type(rb.sampler).__name__} needs rows in time order, and {OUT_OF_ORDER}")
            self.files = [each for each in (rows.matrix, *rows.entries) if isinstance(each, SavedTensor)]
            sizes = rows.steps, rows.capacity
        fits = sizes[0] == sizes[1]
        if not fits and not rows_only:
            parts.refuse_other_capacity(rb, self.saved, *sizes)
            if rows:
                cells = rows.matrix.shape[:-1].numel()
                self.priorities = parts.saved_priorities(rb, self.saved["_sampler"], cells)
        self.is_exact = fits and not rows_only
        #: Files that are checked before the load changes anything.
        self.unchecked = self.files if rows and not rows.is_read_once else []
        parts.refuse(rb, self.saved)

    def _refuse_other_parts(self) -> None:
        rb, saved = self.rb, self.saved
        own = {"storage": type(rb.storage).__name__}
        if not self.rows_only:
            own |= {"writer": parts.name_of(rb.writer), "sampler": parts.name_of(rb.sampler)}
        elif not isinstance(rb.writer, RoundRobinWriter):
            raise CheckpointError(f"rows_only needs a ring, this buffer has a {type(rb.writer).__name__}")
        for part, name in own.items():
            if (found := saved["classes"][part]) != name:
                hint = "; rows_only=True loads only the rows" if part != "storage" else ""
                raise CheckpointError(f"the dump has a {found} as {part}, this buffer a {name}{hint}")
        if saved["ndim"] != rb.storage.ndim:
            raise CheckpointError(f"the dump has ndim={saved['ndim']}, this buffer {rb.storage.ndim}")

    def apply(self) -> None:
        """Load all states into the buffer; if a component refuses its state, undo all changes."""
        found = None if self.rows is None else self.rows.read()

        def put() -> Moves | None:
            return empty_part(self.rb.storage) if self.rows is None else self.rows.put(found)

        how = {"is_exact": self.is_exact, "rows_only": self.rows_only}
        parts.restore(self.rb, self.saved, put, priorities=self.priorities, **how)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a dump."""

    about: dict[str, Any]  # when the dump was written, and by which versions
    classes: dict[str, str]  # the class names of buffer, storage, sampler and writer
    shape: tuple[int, ...]  # the capacity, [T, *lanes]
    rows: TensorDictBase | None  # the written rows, [n] or [steps, E]; None if there are none
    storage: PackedStorage | None  # the rows in a storage of that capacity in RAM; None before the first write
    sampler: dict[str, Any]  # the sampler's state
    writer: dict[str, Any]  # the writer's state: `_cursor` is a ring's next position, `_write_count` counts time steps


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read a dump of :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` without loading it into a buffer.

    Args:
        path: the folder of the dump.

    Returns:
        A :class:`Checkpoint` with the rows, the class names, the capacity, and the states of sampler and writer.

    Raises:
        CheckpointError: the folder holds no dump, a file is missing or damaged.

    Cost: reads all files and verifies their checksums. The rows take as many bytes of RAM as in the buffer.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from rlbuf_td import ReplayBuffer
        >>> rb = ReplayBuffer()
        >>> _ = rb.extend(TensorDict({"reward": torch.arange(3.0)}, [3]))
        >>> folder = tempfile.TemporaryDirectory()
        >>> rb.dumps(folder.name)
        >>> found = open_checkpoint(folder.name)
        >>> found.classes["sampler"], found.shape, found.rows["reward"].tolist()
        ('UniformSampler', (1000,), [0.0, 1.0, 2.0])
        >>> folder.cleanup()
    """
    with reading(path, KIND) as reader, explained(reader):
        saved, storage, rows = reader.state(), None, None
        if (content := saved["_storage"]) and "layout" in content:
            nbytes = sum(each.nbytes for each in (content["rows"], *content["entries"]))
            with progress_bar("open", nbytes) as reader.report:
                storage = PackedStorage.of_state(content)
            has_gap = storage.ndim == 1 and storage.ring.holes > 0  # after a kill
            rows = storage[written_rows(storage)] if has_gap else storage[:]
        return Checkpoint(
            about=reader.manifest.about,
            classes=saved["classes"],
            shape=tuple(saved["shape"]),
            rows=rows,
            storage=storage,
            sampler=saved["_sampler"],
            writer=saved["_writer"],
        )
