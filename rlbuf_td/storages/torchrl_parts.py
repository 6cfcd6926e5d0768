"""The private attributes of TorchRL's storages, samplers and writers that this package
reads or sets.

Other files use these attributes only in classes that inherit them.
"""

from __future__ import annotations

# faster than functions: their calls have no Python frame
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torchrl.data.replay_buffers import (
    ImmutableDatasetWriter,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    Writer,
)

if TYPE_CHECKING:
    import torch
    from torchrl.data.replay_buffers import Sampler

# the generator of a buffer or a part; None: torch's default generator
generator_of = attrgetter("_rng")
# the objects that a storage informs of each write
listeners_of = attrgetter("_attached_entities")
# the last written time step of a storage; None: unknown
newest_step_of = attrgetter("_last_cursor_index")
# a dict; testing whether it is empty is faster than ``len`` of a ModuleList
modules_of = attrgetter("_modules")
is_full = attrgetter("_is_full")  # whether a storage has as many rows as its capacity
# the next write begins with the first row
restart_writer = methodcaller("_empty", empty_write_count=False)
# removes the rows of a storage, or what a sampler knows about them
empty_part = methodcaller("_empty")


def parts_of(buffer: object) -> list[Any]:
    """Return the writer and the sampler of a buffer, and those that it wraps; none of
    an object without them."""
    # None: it is being made
    writer = getattr(buffer, "_writer", None)
    sampler = getattr(buffer, "_sampler", None)
    parts = [] if writer is None else [writer]
    while sampler is not None:
        parts.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return parts


def keeps_order(writer: object) -> bool | None:
    """Whether a writer writes one time step after another; None if it is unknown.

    A writer's class may have an attribute ``keeps_order``.
    """
    declared = getattr(writer, "keeps_order", None)
    if declared is not None:
        return bool(declared)
    if isinstance(writer, RoundRobinWriter | ImmutableDatasetWriter):
        return True
    return False if isinstance(writer, TensorDictMaxValueWriter) else None


def loses_order(writer: object) -> bool:
    """Whether it is known that a writer does not keep rows in time order."""
    return keeps_order(writer) is False


def stored_rows(storage: Storage) -> TensorDictBase | None:
    """Return all rows as views, ``[T, *lanes]``, without deduplicated keys; None if the
    storage holds no TensorDict."""
    # an ensemble of storages has no entries of its own
    rows = getattr(storage, "_storage", None)
    return rows if isinstance(rows, TensorDictBase) else None


def capacity_in_steps(storage: Storage, **data: object) -> int:
    """Return the capacity in time steps; before the first write, it depends on the
    number of lanes in the data.

    Pass one time step as ``single_data``, or several as ``batched_data``.
    """
    return storage._max_size_along_dim0(**data)


def set_length(storage: TensorStorage, length: int) -> None:
    storage._len = length


def set_generator(
    part: Storage | Sampler | Writer, generator: torch.Generator | None
) -> None:
    part._rng = generator


def replace_storage(writer: Writer, storage: Storage) -> None:
    """Register a new storage with a writer; if the writer refuses, keep the old
    storage."""
    before = writer._storage
    writer._storage = None  # pyrefly: ignore [bad-assignment]
    try:
        writer.register_storage(storage)
    except Exception:
        writer._storage = before
        raise


def set_cursor(
    writer: RoundRobinWriter, cursor: int, write_count: int | None = None
) -> None:
    writer._cursor = cursor
    if write_count is not None:
        writer._write_count = write_count


def take_other_rows(buffer: ReplayBuffer, storage: Any, cells: torch.Tensor) -> None:
    """Let the parts of a buffer forget the rows that a :class:`PackedStorage` had, and
    take those in ``cells`` as new ones."""
    sampler, writer = buffer._sampler, buffer._writer
    empty_part(sampler)
    restart_writer(writer)
    if isinstance(writer, RoundRobinWriter):
        set_cursor(writer, storage.ring.cursor if storage.ring.are_aligned else 0)
    if len(cells) and isinstance(sampler, PrioritizedSampler):
        sampler.mark_update(cells, storage=storage)


def last_step(storage: Storage, steps: int) -> int:
    """Return the last written of ``steps`` time steps, which the storage or a buffer's
    writer has recorded."""
    cursor = newest_step_of(storage)
    if hasattr(storage, "ring") and cursor is not None:
        return cursor
    for last in map(last_of_ring, listeners_of(storage)):
        if last is not None:
            return last % steps
    return steps - 1 if cursor is None or int(cursor) < 0 else int(cursor)


def last_of_ring(buffer: TensorDictReplayBuffer) -> int | None:
    """Return the time step that a ring writer wrote last (-1: the storage's last step),
    or None if there is none."""
    writer = getattr(buffer, "_writer", None)
    return (
        writer._cursor - 1
        if isinstance(writer, RoundRobinWriter) and writer._write_count
        else None
    )
