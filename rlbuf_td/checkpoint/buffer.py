"""Saves and loads whole buffers, and reads a dump without a buffer. A failed load leaves the buffer unchanged."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import RoundRobinWriter

from rlbuf_td.checkpoint import parts
from rlbuf_td.checkpoint.files import DumpReader, Report, explained, progress_bar, reading, write_state, writing
from rlbuf_td.checkpoint.manifest import CheckpointError, decode
from rlbuf_td.checkpoint.rows import SavedRows, opened, split_rows
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.checks import OUT_OF_ORDER
from rlbuf_td.storages.indexing import row_count

KIND = "buffer"
_COUNTERS = "_cursor", "_write_count"


class Connect(Protocol):
    """Connects the parts of a buffer after a load."""

    def __call__(self, *, default_priorities: bool) -> object: ...


def dump_buffer(rb: Any, path: str | Path, progress: bool | None = None, *, sync: bool = True) -> None:
    with writing(path, KIND, sync=sync) as writer, parts.at_rest(rb):
        state = parts.capture(rb)
        write_state(writer, state, split_rows(state["storage"]), progress)


def load_buffer(
    rb: Any,
    path: str | Path,
    connect: Connect,  # called after all components are loaded
    alone: Any,  # a context manager that holds all locks of rb
    *,
    rows_only: bool,
    default_generator: bool,
    progress: bool | None,
) -> None:
    with reading(path, KIND) as reader:
        with explained(reader):
            load = _Load(rb, reader, rows_only)
        with progress_bar("load", load.rows.nbytes if load.rows else 0, progress) as report:
            if load.rows:
                load.rows.verify(report)
            rb.synchronize()
            with alone, explained(reader):
                load.apply(report, connect)
        if default_generator:
            parts.restore_default_generators(load.saved["default_generator"])
    if load.rows and load.rows.dropped:
        room = f"the buffer has room for {load.rows.capacity}"
        warnings.warn(f"the {load.rows.dropped} oldest time steps of the dump were dropped: {room}", stacklevel=3)


class _Load:
    """Loads a dump: the constructor checks the dump against the buffer, and :meth:`apply` changes the buffer."""

    def __init__(self, rb: Any, reader: DumpReader, rows_only: bool) -> None:
        self.rb, self.rows_only = rb, rows_only
        self.saved: dict[str, Any] = decode(reader.manifest.state, reader.read)
        self.rows: SavedRows | None = None
        self.priorities: tuple[torch.Tensor, float] | None = None
        storage, saved = rb.storage, self.saved["storage"]
        self._refuse_other_parts()
        # A dump made before the first write has no rows, but keys if its storage was reserved. A storage with rows
        # ignores these keys.
        if "layout" in saved["state"] and not (saved["state"].get("reserved") and storage.rows is not None):
            self.rows = SavedRows(reader, saved, storage)
            if not self.rows.in_order and getattr(rb.sampler, "needs_order", False):
                raise CheckpointError(f"a {type(rb.sampler).__name__} needs rows in time order, and {OUT_OF_ORDER}")
            if not self.rows.fits and not rows_only:
                self._take_other_capacity(self.rows)
        self.is_exact = not rows_only and (self.rows is None or self.rows.fits)
        parts.refuse_malformed(rb, self.saved)

    def _refuse_other_parts(self) -> None:
        rb, saved = self.rb, self.saved
        own = {"storage": type(rb.storage).__name__}
        if not self.rows_only:
            own |= {"writer": parts.name_of(rb.writer), "sampler": parts.name_of(rb.sampler)}
        elif not isinstance(rb.writer, RoundRobinWriter):
            raise CheckpointError(f"rows_only needs a ring, this buffer has a {type(rb.writer).__name__}")
        for part, name in own.items():
            if saved[part]["class"] != name:
                hint = "; rows_only=True loads only the rows" if part != "storage" else ""
                raise CheckpointError(f"the dump has a {saved[part]['class']} as {part}, this buffer a {name}{hint}")
        if saved["storage"]["ndim"] != rb.storage.ndim:
            raise CheckpointError(f"the dump has ndim={saved['storage']['ndim']}, this buffer {rb.storage.ndim}")

    def _take_other_capacity(self, rows: SavedRows) -> None:
        """Refuse parts whose state belongs to one capacity; keep the priorities of the rows."""
        writer, sampler = self.saved["writer"]["state"], self.saved["sampler"]["state"]
        if getattr(self.rb.writer, "needs_capacity", False) or "_generation" in writer:
            sizes = f"the dump has {rows.steps} time steps, this buffer {rows.capacity}"
            raise CheckpointError(f"{sizes}: rollouts and tracked generations need the same capacity")
        parts.refuse_other_capacity(self.rb.sampler)
        self.priorities = parts.saved_priorities(self.rb, sampler, rows.matrix.shape[:-1].numel())

    def apply(self, report: Report, connect: Connect) -> None:
        """Load all states into the buffer; if a component refuses its state, undo all changes."""
        rb, storage, saved, moved = self.rb, self.rb.storage, self.saved, None
        writer, sampler = saved["writer"]["state"], saved["sampler"]["state"]
        found = self.rows.read(report) if self.rows is not None else None
        with parts.Rollback() as rollback:
            if not self.rows_only:
                if rb.episode_stats is not None and saved["buffer"]["stats"] is not None:
                    rollback.load(rb.episode_stats, saved["buffer"]["stats"])
                rollback.load(rb.writer, writer)
                rollback.load(rb.transform, saved["transform"])
                if self.is_exact:
                    rollback.load(rb.sampler, sampler)
                else:
                    parts.restore_settings(rb.sampler, sampler, rollback)
            if self.rows is not None:
                moved = self.rows.put(found, report)
            else:
                torchrl_parts.empty_part(storage)
        # The code below cannot fail.
        if not self.is_exact:
            torchrl_parts.empty_part(rb.sampler)
        if self.rows_only:
            torchrl_parts.empty_part(rb.writer)
            torchrl_parts.set_cursor(rb.writer, *(writer.get(name, 0) for name in _COUNTERS))
        else:
            parts.restore_buffer(rb, saved["buffer"], saved["generator"])
        if moved is not None:
            torchrl_parts.set_cursor(rb.writer, storage.ring.cursor)
        if rb.flow is not None:
            rb.flow.restore(None if self.rows_only else saved["buffer"].get("flow"), row_count(storage))
        parts.end_loaded(rb)
        connect(default_priorities=not self.is_exact)
        if moved is not None and self.priorities is not None:
            parts.set_priorities(rb, self.priorities, *moved)
        if rb.replay_count is not None:
            rb.replay_count.restore(saved["buffer"]["replays"] if self.is_exact else None)


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


def open_checkpoint(path: str | Path, *, progress: bool | None = None) -> Checkpoint:
    """Read a dump of :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` without loading it into a buffer.

    Args:
        path: the folder of the dump.
        progress: whether to show a progress bar; ``None`` shows it on a terminal if the rows take 1 GiB or more.

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
        state = decode(reader.manifest.state, reader.read)
        saved, storage = state["storage"], None
        if "layout" in saved["state"]:
            nbytes = sum(reader.tensor(number).nbytes for number in saved["tensors"])
            with progress_bar("open", nbytes, progress) as report:
                storage = opened(reader, saved, report)
        return Checkpoint(
            about=reader.manifest.about,
            classes={name: state[name]["class"] for name in ("buffer", "storage", "sampler", "writer")},
            shape=tuple(saved["shape"]),
            rows=None if storage is None else storage[:],
            storage=storage,
            sampler=state["sampler"]["state"],
            writer=state["writer"]["state"],
        )
