"""Creates buffers from TorchRL's replay buffers, and from the folders that these have
written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from tensordict import MemoryMappedTensor, NestedKey, TensorDict, TensorDictBase
from torchrl.data.replay_buffers import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    PrioritizedSampler,
    RoundRobinWriter,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    Writer,
)

from rlbuf_td.checkpoint import CheckpointError
from rlbuf_td.samplers.common import refuse_unordered
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.proportional import read_torchrl_priorities
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import (
    are_ragged,
    coordinates,
    lanes_of,
    row_count,
    steps_by_age,
)
from rlbuf_td.storages.keys import is_key, nested_key, optional_key

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

Buffer = TypeVar("Buffer", bound="ReplayBuffer")
_READ_AT_ONCE = 1 << 26  # bytes


def import_torchrl(
    cls: type[Buffer],
    rb: TensorDictReplayBuffer | str | PathLike[str],
    capacity: int | None,
    *,
    exclude: NestedKey | Sequence[NestedKey],
    trajectory_key: NestedKey | None,
    **kwargs: Any,
) -> Buffer:
    """Return a new buffer with the rows of another buffer, see
    :meth:`ReplayBuffer.from_torchrl`."""
    is_folder = isinstance(rb, str | PathLike)
    rb, priorities = _load(Path(rb)) if is_folder else (rb, None)
    if isinstance(getattr(rb, "sampler", None), PrioritizedSampler):
        priorities = rb.sampler.state_dict()
    if not hasattr(rb, "storage") or not hasattr(rb, "writer"):
        raise TypeError(
            f"from_torchrl imports a replay buffer with a storage and a writer, got a {type(rb).__name__}"
        )
    storage: Any = rb.storage
    excluded = [nested_key(key) for key in ([exclude] if is_key(exclude) else exclude)]
    kwargs.setdefault("batch_size", rb.batch_size)
    refuse_unordered(kwargs.get("sampler"), storage, rb.writer)
    choose = partial(
        _chosen, exclude=excluded, trajectory_key=optional_key(trajectory_key)
    )
    new, cells = _copy(cls, rb, capacity, choose, kwargs)
    _set_priorities(new, cells, priorities)
    if is_folder:
        new.storage.end_load(but=new)
    if new.flow is not None:  # the rows were brought, as by a load
        new.flow.restart(row_count(new.storage))
    return new


def _copy(
    cls: type[Buffer],
    rb: TensorDictReplayBuffer,
    capacity: int | None,
    choose: Callable[[object], TensorDictBase],
    kwargs: dict[str, Any],
) -> tuple[Buffer, torch.Tensor]:
    """Return a buffer with the rows of ``rb``, and the flat index of each row in
    ``rb``."""
    storage = rb.storage
    steps = _steps(rb.writer, storage)
    lanes = lanes_of(storage).numel()
    if capacity is not None and capacity < len(steps) * lanes:
        raise ValueError(
            f"the buffer holds {len(steps) * lanes:,} transitions, more than the capacity of {capacity:,}"
        )
    schema = cast("TensorDictBase", choose(storage.get(steps[:1]))[0])
    new = cls.from_schema(schema, capacity or storage.max_size, **kwargs)
    for part in steps.split(max(1, _READ_AT_ONCE // (new.storage.row_bytes * lanes))):
        new.writer.extend(choose(storage.get(part)))
    return new, (steps[:, None] * lanes + torch.arange(lanes, device="cpu")).flatten()


def _load(folder: Path) -> tuple[TensorDictReplayBuffer, Mapping[str, Any] | None]:
    """Return a TorchRL buffer whose rows are the memory-mapped files of a folder, and
    the state of its sampler."""
    storage_file = folder / "storage/storage_metadata.json"
    writer_file = folder / "writer/metadata.json"
    if not storage_file.is_file() or json.loads(storage_file.read_text())["is_pytree"]:
        raise CheckpointError(
            f"{folder} holds no TensorDicts that TorchRL's default checkpointer "
            "wrote: load it into a buffer of TorchRL, and pass that buffer"
        )
    _refuse_links(folder)
    shape = _map_rows(folder / "storage").batch_size
    # maps, does not copy
    storage = LazyMemmapStorage(
        shape.numel(), ndim=len(shape), scratch_dir=folder / "storage"
    )
    storage.loads(folder / "storage")
    saved = json.loads(writer_file.read_text()) if writer_file.is_file() else {}
    is_ring = "cursor" in saved and "rank_key" not in saved
    by_rank = (
        TensorDictMaxValueWriter() if "rank_key" in saved else ImmutableDatasetWriter()
    )
    writer = TensorDictRoundRobinWriter() if is_ring else by_rank
    batch_size = json.loads((folder / "buffer_metadata.json").read_text())["batch_size"]
    rb = TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=batch_size)
    if is_ring:
        writer.loads(folder / "writer")
    sampler_file = folder / "sampler/sampler_metadata.json"
    tree_file = folder / "sampler/sumtree.memmap"
    if not tree_file.is_file():
        return rb, None
    state = json.loads(sampler_file.read_text())
    size = torch.Size([int(state["_max_capacity"])])
    _refuse_short(tree_file, 8 * size.numel())
    return rb, state | {
        "_sum_tree": MemoryMappedTensor.from_filename(tree_file, torch.float64, size)
    }


def _map_rows(folder: Path) -> TensorDict:
    """Map the files of a TensorDict; raise a CheckpointError, and change nothing, if
    this is not safe.

    Links could lead anywhere, pickles could run any code (and no row can hold what is
    pickled), and files that are too short would become longer.
    """
    _refuse_links(folder)
    for meta in folder.rglob("meta.json"):
        for name, leaf in json.loads(meta.read_text()).items():
            if isinstance(leaf, dict) and "dtype" in leaf and not leaf.get("is_nested"):
                item = getattr(torch, leaf["dtype"].removeprefix("torch.")).itemsize
                _refuse_short(
                    meta.parent / f"{name}.memmap",
                    torch.Size(leaf["shape"]).numel() * item,
                )
    try:
        return TensorDict.load_memmap(folder, allow_pickle=False)
    except RuntimeError as error:
        if "pickle" not in str(error):
            raise
        raise CheckpointError(
            f"{folder} has entries that are no tensors, in a pickle, which is never loaded"
        ) from None


def _refuse_links(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link, and a dump has none: copy the file that it leads to"
            )


def _refuse_short(file: Path, nbytes: int) -> None:
    """Raise a CheckpointError if a file of a dump is missing or has fewer bytes than
    expected."""
    size = file.stat().st_size if file.is_file() else -1
    if size < nbytes:
        fault = (
            f"has {size:,} bytes, expected {nbytes:,}" if size >= 0 else "is missing"
        )
        raise CheckpointError(
            f"{file} {fault}: the dump is incomplete; nothing has been changed"
        )


def _set_priorities(
    new: TensorDictReplayBuffer, cells: torch.Tensor, state: Mapping[str, object] | None
) -> None:
    """Give each row ``i`` of a new buffer the priority of row ``cells[i]`` in the state
    of TorchRL's sampler."""
    sampler = getattr(new.sampler, "innermost", new.sampler)
    if state is None or not isinstance(sampler, Prioritized):
        return
    magnitude = read_torchrl_priorities(state)[0][cells]
    known = (magnitude >= 0).nonzero().flatten()
    if len(known):
        sampler.update_priority(
            coordinates(known, new.storage), magnitude[known], storage=new.storage
        )


def _steps(writer: Writer, storage: Storage) -> torch.Tensor:
    """Return the indices of the written time steps, oldest first if the writer is a
    round-robin writer."""
    if not len(storage):
        raise RuntimeError("the buffer is empty: there is nothing to import")
    if are_ragged(storage):
        raise ValueError(
            "lanes stand at unlike steps: dump the buffer and load the dump"
        )
    steps = len(storage) // lanes_of(storage).numel()
    if isinstance(writer, RoundRobinWriter):
        return steps_by_age(storage, steps)
    return torch.arange(steps, device="cpu")


def _chosen(
    rows: Any, exclude: Any, trajectory_key: NestedKey | None
) -> TensorDictBase:
    """Omit the keys in ``exclude`` from rows, and rename ``trajectory_key`` to
    ``("collector", "traj_ids")``."""
    if not isinstance(rows, TensorDictBase):
        raise TypeError(
            f"from_torchrl imports rows that are TensorDicts, this buffer holds a {type(rows).__name__}"
        )
    keys = rows.keys(include_nested=True)
    missing = [key for key in exclude if key not in keys]
    if missing:
        raise KeyError(
            f"cannot exclude {missing}: exclude takes a list of keys of the rows, {[*rows.keys()]}"
        )
    rows = rows.exclude("index", *exclude)
    if (
        trajectory_key is None
        or rows.get(TRAJ_KEY, None) is not None
        or rows.get(trajectory_key, None) is None
    ):
        return rows
    return rows.exclude(trajectory_key).set(TRAJ_KEY, rows.get(trajectory_key))
