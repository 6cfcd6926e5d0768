"""A look into a dump by someone who does not know what buffer it is of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td.checkpoint.errors import CheckpointError
from rlbuf_td.checkpoint.folder import flat_bytes
from rlbuf_td.checkpoint.reader import read_matrix
from rlbuf_td.checkpoint.saving import bar, reading
from rlbuf_td.checkpoint.state import decode
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.dedup.rows import PooledRows
from rlbuf_td.storages.state import refuse_foreign, saved_pooling


@dataclass(frozen=True)
class Checkpoint:
    """What a dump holds.

    Attributes:
        about: when it was written, and by which versions.
        classes: the names of the classes of buffer, storage, sampler and writer.
        shape: ``[T, *lanes]``, the capacity.
        rows: all rows that were written, where they lay: ``[n]`` or ``[steps, E]``; ``None`` if there are none.
        storage: the same as a storage of that capacity in RAM; ``None`` if it was one of TorchRL's.
        sampler: the sampler's state.
        writer: the writer's state; ``_cursor`` is the time step that a ring writes next, ``_write_count`` counts steps.
    """

    about: dict[str, Any]
    classes: dict[str, str]
    shape: tuple[int, ...]
    rows: TensorDictBase | None
    storage: PackedStorage | None
    sampler: dict[str, Any]
    writer: dict[str, Any]


def open_checkpoint(path: str | Path, *, progress: bool | None = None) -> Checkpoint:
    """Read what :meth:`ReplayBuffer.dumps <rlbuf_td.ReplayBuffer.dumps>` saved, without a buffer to load it into.

    Args:
        path: the folder.
        progress: show a bar; ``None``: on a terminal, from 1 GiB on.

    Returns:
        A :class:`Checkpoint`: ``rows``, ``classes``, ``shape``, the states of sampler and writer.

    Raises:
        CheckpointError: a file is missing, damaged, cut short, foreign or of a newer version: says which.

    Cost: all files are read and compared with their checksums; the rows take as much RAM as in the buffer.

    Example:
        >>> import tempfile
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
    with reading(path, "buffer") as reader:
        try:
            state = {name: decode(part, reader.read) for name, part in reader.manifest.state.items()}
            saved, storage = state["storage"], None
            if "layout" in saved["state"]:
                stored, shape = reader.tensor(saved["rows"]), [int(size) for size in saved["shape"]]
                storage = PackedStorage(prod(shape), ndim=int(saved["ndim"]))
                layout, lanes = storage.admit_state(saved["state"], torch.Size(shape[1:]))
                size = (*stored.shape[:-1], stored.shape[-1] * stored.dtype.itemsize)
                pooling = saved_pooling(layout, saved["state"])
                row_bytes = layout.row_bytes if pooling is None else pooling.own.row_bytes
                if size[1:] != (*lanes, row_bytes) or saved["state"]["_len"] != prod(size[:-1]):
                    raise CheckpointError("the layout of the rows does not fit their size")
                with bar("open", stored.nbytes, progress) as report:
                    reader.verify([stored], report)
                rows = storage._adopt(storage._make_rows(layout, lanes, None, pooling))
                if pooling is not None and isinstance(rows, PooledRows):
                    matrix = read_matrix(reader, stored, lambda done: None)
                    entries = [reader.read(number) for number in saved["entries"]]
                    refuse_foreign(pooling, matrix, entries)
                    rows.restore_(matrix, entries)
                else:
                    target = flat_bytes(rows.matrix)[: stored.nbytes]
                    reader.read_into(stored, 0, target, lambda done: None)
                storage.restore_counters(saved["state"])
            return Checkpoint(
                about=reader.manifest.about,
                classes={name: state[name]["class"] for name in ("buffer", "storage", "sampler", "writer")},
                shape=tuple(saved["shape"]),
                rows=_content(saved["state"]) if storage is None else storage[:],
                storage=storage,
                sampler=state["sampler"]["state"],
                writer=state["writer"]["state"],
            )
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{reader.path} cannot be opened: {error}") from error


def _content(state: dict[str, Any]) -> TensorDictBase | None:
    """Return the rows of a storage of TorchRL's, if they are tensors."""
    content = state.get("_storage")
    if not isinstance(content, dict) or not content:
        return None
    return TensorDict({}).load_state_dict(content, strict=False)[: state["_len"]]
