"""Read a dump without the buffer that it is of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase

from rlbuf_td.checkpoint.encoding import CheckpointError, decode
from rlbuf_td.checkpoint.files import DumpReader
from rlbuf_td.checkpoint.folder import explained, progress_bar, reading
from rlbuf_td.checkpoint.rows import SavedRows
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.state import admit_state


@dataclass(frozen=True)
class Checkpoint:
    """The content of a dump."""

    about: dict[str, Any]
    """When it was written, and by which versions."""
    classes: dict[str, str]
    """The class names of buffer, storage, sampler and writer."""
    shape: tuple[int, ...]
    """The capacity, ``[T, *lanes]``."""
    rows: TensorDictBase | None
    """All rows that were written, at their positions: ``[n]`` or ``[steps, E]``; ``None`` if there are none."""
    storage: PackedStorage | None
    """The rows as a storage of that capacity in RAM; ``None`` if the dump is of a TorchRL storage."""
    sampler: dict[str, Any]
    """The sampler's state."""
    writer: dict[str, Any]
    """The writer's state: ``_cursor`` is the time step that a ring writes next, ``_write_count`` counts steps."""


def open_checkpoint(path: str | Path, *, progress: bool | None = None) -> Checkpoint:
    """Read what :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` saved, without a buffer to load it into.

    Args:
        path: the folder.
        progress: show a bar; ``None``: on a terminal, from 1 GiB on.

    Returns:
        A :class:`Checkpoint`: ``rows``, ``classes``, ``shape``, the states of sampler and writer.

    Raises:
        CheckpointError: a file is missing, damaged, cut short, foreign or of another version. The message names it.

    Cost: reads all files and compares them with their checksums; the rows take as much RAM as in the buffer.

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
    with reading(path, "buffer") as reader, explained(reader):
        state = {name: decode(part, reader.read) for name, part in reader.manifest.state.items()}
        saved = state["storage"]
        storage = _storage(reader, saved, progress) if "layout" in saved["state"] else None
        return Checkpoint(
            about=reader.manifest.about,
            classes={name: state[name]["class"] for name in ("buffer", "storage", "sampler", "writer")},
            shape=tuple(saved["shape"]),
            rows=_content(saved["state"]) if storage is None else storage[:],
            storage=storage,
            sampler=state["sampler"]["state"],
            writer=state["writer"]["state"],
        )


def _storage(reader: DumpReader, saved: dict[str, Any], progress: bool | None) -> PackedStorage:
    shape = [int(size) for size in saved["shape"]]
    storage = PackedStorage(prod(shape), ndim=int(saved["ndim"]))
    rows = SavedRows(reader, saved, storage, None)
    if rows.lanes != tuple(shape[1:]):
        raise CheckpointError("the layout of the rows does not fit their size")
    admit_state(storage, saved["state"], rows.lanes)
    with progress_bar("open", rows.nbytes, progress) as report:
        rows.put(rows.allocated(report, keep_shared=True), report)
    storage.restore_counters(saved["state"])
    return storage


def _content(state: dict[str, Any]) -> TensorDictBase | None:
    """Return the rows of a TorchRL storage, if they are tensors."""
    content = state.get("_storage")
    if not isinstance(content, dict) or not content:
        return None
    return TensorDict({}).load_state_dict(content, strict=False)[: state["_len"]]
