"""Saves and loads whole buffers, and reads a dump without a buffer. A failed load leaves the buffer unchanged."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torchrl.data.replay_buffers import RoundRobinWriter

from rlbuf_td.checkpoint import parts
from rlbuf_td.checkpoint.files import CheckpointError, SavedTensor, progress_bar, reading, writing
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.checks import OUT_OF_ORDER
from rlbuf_td.storages.indexing import written_rows
from rlbuf_td.storages.torchrl_parts import empty_part

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

KIND = "buffer"


def dump_buffer(rb: ReplayBuffer, path: str | Path) -> None:
    with writing(path, KIND) as writer, parts.at_rest(rb):
        storage, state = rb.storage, parts.capture(rb, copies=False)
        names = {part: parts.name_of(getattr(rb, part)) for part in ("storage", "sampler", "writer")}
        state |= {
            "classes": {"buffer": type(rb).__name__} | names,
            "capacity": storage.max_size,
            "shape": [*(storage._total_shape or ())],
            "ndim": storage.ndim,
        }
        writer.write(state)


def load_buffer(rb: ReplayBuffer, path: str | Path, *, rows_only: bool) -> None:
    """Check a dump against the buffer, and then load it; if a component refuses its state, undo all changes."""
    rb.synchronize()
    with reading(path, KIND) as dump:
        saved = dump.state()
        _refuse_other_parts(rb, saved, rows_only)
        rows = rb.storage.examine(saved["_storage"], dump.path)
        sizes = (saved["capacity"], rb.storage.max_size) if rows is None else (rows.steps, rows.capacity)
        is_exact = sizes[0] == sizes[1] and not rows_only
        if rows and not rows.in_order and getattr(rb.sampler, "needs_order", False):
            raise CheckpointError(f"a {type(rb.sampler).__name__} needs rows in time order, and {OUT_OF_ORDER}")
        priorities = None if is_exact or rows_only else parts.of_other_capacity(rb, saved, rows, *sizes)
        parts.refuse(rb, saved)
        files = [] if rows is None else [x for x in (rows.matrix, *rows.entries) if isinstance(x, SavedTensor)]
        unchecked = files if rows and not rows.is_read_once else []  # before the load changes anything
        with progress_bar("load", sum(each.nbytes for each in (*files, *unchecked))) as dump.report:
            for each in unchecked:
                each.verify()
            with rb._fully_locked():
                put = partial(empty_part, rb.storage) if rows is None else partial(rows.put, rows.read())
                parts.restore(rb, saved, put, is_exact=is_exact, rows_only=rows_only, priorities=priorities)
    if rows and rows.dropped:
        room = f"the buffer has room for {rows.capacity}"
        warnings.warn(f"the {rows.dropped} oldest time steps of the dump were dropped: {room}", stacklevel=3)


def _refuse_other_parts(rb: ReplayBuffer, saved: dict[str, Any], rows_only: bool) -> None:
    own = {"storage": type(rb.storage).__name__}
    if not rows_only:
        own |= {"writer": parts.name_of(rb.writer), "sampler": parts.name_of(rb.sampler)}
    elif not isinstance(rb.writer, RoundRobinWriter):
        raise CheckpointError(f"rows_only needs a ring, this buffer has a {type(rb.writer).__name__}")
    for part, name in own.items():
        if (found := saved["classes"][part]) != name:
            hint = "; rows_only=True loads only the rows" if part != "storage" else ""
            raise CheckpointError(f"the dump has a {found} as {part}, this buffer a {name}{hint}")
    if saved["ndim"] != rb.storage.ndim:
        raise CheckpointError(f"the dump has ndim={saved['ndim']}, this buffer {rb.storage.ndim}")


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
    with reading(path, KIND) as dump:
        saved, storage, rows = dump.state(), None, None
        if (content := saved["_storage"]) and "layout" in content:
            nbytes = sum(each.nbytes for each in (content["rows"], *content.get("entries", [])))
            with progress_bar("open", nbytes) as dump.report:
                storage = PackedStorage.of_state(content)
            has_gap = storage.ndim == 1 and storage.ring.holes > 0  # after a kill
            rows = storage[written_rows(storage)] if has_gap else storage[:]
        return Checkpoint(
            about=dump.about,
            classes=saved["classes"],
            shape=tuple(saved["shape"]),
            rows=rows,
            storage=storage,
            sampler=saved["_sampler"],
            writer=saved["_writer"],
        )
