"""The components of a buffer (storage, sampler and writer): how to replace and share them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torchrl.data.replay_buffers import (
    ConsumingSampler,
    PrioritizedSampler,
    RoundRobinWriter,
    Sampler,
    Storage,
    TensorDictReplayBuffer,
    Writer,
)

from rlbuf_td.buffers.flow import FlowControl
from rlbuf_td.envs.trajectory_numbers import TrajectoryNumbers
from rlbuf_td.samplers.common import refuse_disorder, refuse_drawn, refuse_stored, refuse_taken, reported_by
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.checks import OUT_OF_ORDER, whole
from rlbuf_td.storages.indexing import attached_or_new
from rlbuf_td.storages.layout import RowLayout
from rlbuf_td.storages.memory_budget import Purpose, require_room, shared_tensors
from rlbuf_td.storages.notebooks import PROCESSES
from rlbuf_td.storages.state import NEWEST
from rlbuf_td.storages.trajectory_index import as_tuple
from rlbuf_td.writers import RingWriter
from rlbuf_td.writers.common import is_in_time_order, keeps_order, next_step

_SHARED = Purpose(
    "Priorities and trajectories of a shared buffer take",
    "Mount a larger /dev/shm (docker run --shm-size=...), or use a smaller max_size, or UniformSampler.",
)


class Parts(NamedTuple):
    """The components of a buffer, and properties derived from them; a new object is made when a component changes."""

    storage: Any
    sampler: Any
    writer: Any
    wrapper: SamplerWrapper | None  # the sampler, if it wraps another one
    prioritized: Prioritized | None  # the innermost sampler, if it is a prioritized one of this package
    transforms: Collection[Any]  # TorchRL's own list, kept here because each lookup takes 1 us
    is_packed: bool  # the storage is a PackedStorage
    has_units: bool  # TorchRL's ``sample_unit`` expands the drawn rows
    is_stamped: bool  # batches have an entry "sampled_at"
    report_keys: frozenset[str]  # names of the entries, besides "index", that the sampler is known to add to each batch
    draws: str  # the sampler's method that draws: "draw_batch" or "draw"; "": TorchRL's code draws
    writes_generally: bool  # TorchRL's code writes
    newest: Callable[[], int]  # returns the newest time step; -1: unknown, or the last step of the storage

    @classmethod
    def of(
        cls, storage: Storage, sampler: Sampler, writer: Writer, transforms: Any, has_units: bool, collates: bool
    ) -> Parts:
        """Derive the properties from the components; ``collates``: whether the buffer has a ``collate_fn``."""
        wrapper = sampler if isinstance(sampler, SamplerWrapper) else None
        innermost = sampler if wrapper is None else wrapper.innermost
        refuse_unordered(sampler, writer, storage)
        refuse_stored(sampler, storage)
        if wrapper is not None:
            wrapper.watch(storage)  # must precede a load of rows, which ends their trajectories
        prioritized = innermost if isinstance(innermost, Prioritized) else None
        is_packed = isinstance(storage, PackedStorage)
        is_direct = is_packed and not has_units and not collates and not writer.tracks_generations
        draws = "" if not is_direct else "draw_batch" if wrapper is not None else _method_to_draw(type(sampler))
        is_stamped = is_packed and not has_units and prioritized is not None
        is_theirs = isinstance(innermost, PrioritizedSampler) and prioritized is None
        generally = is_theirs or isinstance(innermost, ConsumingSampler)
        given = storage, sampler, writer, wrapper, prioritized, transforms
        newest = partial(_newest_step, storage) if is_packed else partial(torchrl_parts.step_before_cursor, writer)
        return cls(*given, is_packed, has_units, is_stamped, reported_by(sampler), draws, generally, newest)

    def draw(self, batch_size: int, gather: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor, dict[Any, Any], Any]:
        """Draw rows; return their indices, the sampler's info dict and the transitions."""
        if self.draws == "draw_batch":  # the caller holds the buffer's lock
            flat, info, batch = self.sampler.draw_batch(self.storage, batch_size)
        else:
            refuse_disorder(self.sampler, self.storage)
            flat, info = self.sampler.draw(self.storage, batch_size)
            refuse_drawn(self.sampler, flat)
            batch = gather(flat)
        if not info.keys() <= self.report_keys:  # a user's sampler
            refuse_taken(self.sampler, self.storage.layout.names, info.keys() - self.report_keys)
        return flat, info, batch

    @property
    def is_looking(self) -> bool:
        """Whether the next draws look for interleaved trajectories, which plans do not."""
        return self.wrapper is not None and not self.wrapper.has_looked

    def without_report(self, batch: Any, info: dict[Any, Any]) -> Any:
        """Exclude the sampler's entries ``info`` from a batch, except entries that the rows have, too."""
        stored = self.storage.layout.places if self.draws else {}
        return batch.exclude(*(key for key in info if as_tuple(key) not in stored))


def as_size(batch_size: Any) -> int | None:
    """Convert a batch size to an int; raise a ValueError if it is negative or no whole number."""
    is_size = batch_size is None or (type(batch_size) is int and batch_size >= 0)
    return batch_size if is_size else whole(0)("batch_size", batch_size)


def _newest_step(storage: PackedStorage) -> int:
    return storage.numbers.values[NEWEST]


def _method_to_draw(sampler: type[Sampler]) -> str:
    """Return "draw_batch" or "draw"; "" for a class whose own ``sample`` must be called."""
    for each in sampler.__mro__:
        for name in ("draw_batch", "draw"):
            if name in each.__dict__:
                return name
        if "sample" in each.__dict__:
            return ""
    return ""


def refuse_unordered(sampler: Any, writer: Writer, storage: Storage) -> None:
    """Raise a ValueError if the sampler needs rows in time order, and the rows or the writer keep no such order."""
    if not getattr(sampler, "needs_order", False):
        return
    needs, kind = f"a {type(sampler).__name__} needs rows in time order", type(writer).__name__
    keeps = keeps_order(writer)
    if keeps is False:
        raise ValueError(f"{needs}, a {kind} keeps none: use a RingWriter")
    if not is_in_time_order(storage):
        raise ValueError(f"{needs}, and {OUT_OF_ORDER}")
    if keeps is None and not isinstance(storage, PackedStorage):
        remedy = (
            f"use a PackedStorage, which checks each write, or set keeps_order = True in the class {kind} if it does"
        )
        raise ValueError(f"{needs}, and a {kind} may write in any order: {remedy}")


def refuse_schema(rb: Any, layout: RowLayout) -> None:
    """Raise a SchemaError if rows of this layout, which have not been allocated yet, do not fit the sampler."""
    sampler = vars(rb).get("_sampler")
    if sampler is not None:  # missing while a copy of the buffer is made
        refuse_taken(sampler, layout.names, reported_by(sampler))


def share_parts(storage: PackedStorage, sampler: Sampler, writer: Writer, flow: FlowControl | None) -> None:
    """Move rows, counters and priorities to shared memory.

    Raises:
        ValueError: the rows are on a CUDA device.
        MemoryError: rows, priorities or trajectories do not fit into shared memory; nothing has changed.
    """
    samplers = [sampler]
    while isinstance(inner := getattr(samplers[-1], "sampler", None), Sampler):
        samplers.append(inner)
    movable = (samplers[-1], *torchrl_parts.listeners_of(storage))
    nbytes = sum(getattr(part, "bytes_to_share", 0) for part in movable)
    require_room(nbytes, torch.device("cpu"), _SHARED, room=shared_tensors())
    storage.share_memory_()
    attached_or_new(storage, TrajectoryNumbers)  # before sharing, so that recorders in all processes use these numbers
    counters = vars(writer)
    if storage.shared_rows is not None:
        names = "_cursor_value", "_write_count_value", "_taken_value", "_following_value", "_threshold_value"
        watched = [counters[name] for name in names if name in counters]
        watched += [] if flow is None else flow.undone_with_rows
        storage.shared_rows.journal.watch(*watched)  # restored if a process is killed during a write
    for part in (*samplers, writer, flow, *torchrl_parts.listeners_of(storage)):
        share = getattr(part, "share_memory_", None)
        if share is not None:
            share()


def set_storage(rb: Any, storage: Storage, collate_fn: Any = None) -> Storage:
    """Replace the storage, together with its rows; return the old storage.

    Unlike in TorchRL, a ring writer continues after the newest row of the new storage, and all rows get the default
    priority.
    """
    _refuse_if_shared(rb, "storage")
    refuse_unordered(rb.sampler, rb.writer, storage)
    refuse_stored(rb.sampler, storage)
    with rb.fully_locked():
        torchrl_parts.replace_storage(rb.writer, storage)
        previous = TensorDictReplayBuffer.set_storage(rb, storage, collate_fn)
        storage.attach(rb)
        torchrl_parts.set_generator(storage, torchrl_parts.generator_of(rb))
        if isinstance(rb.writer, RoundRobinWriter):
            torchrl_parts.set_cursor(rb.writer, next_step(storage))
        torchrl_parts.empty_part(rb.sampler)
        if rb.flow is not None:
            rb.flow.restart(len(storage))
        rb.connect(default_priorities=True)
    return previous


def set_sampler(rb: Any, sampler: Sampler) -> Sampler:
    """Replace the sampler; return the old one.

    Unlike in TorchRL, rows without a priority in the new sampler get the default priority.
    """
    _refuse_if_shared(rb, "sampler")
    refuse_unordered(sampler, rb.writer, rb.storage)
    with rb.fully_locked():
        previous, rng = TensorDictReplayBuffer.set_sampler(rb, sampler), torchrl_parts.generator_of(sampler)
        torchrl_parts.set_generator(sampler, torchrl_parts.generator_of(rb))
        try:
            rb.connect(default_priorities=True)
        except Exception:
            TensorDictReplayBuffer.set_sampler(rb, previous)
            torchrl_parts.set_generator(sampler, rng)
            rb.connect()
            raise
    return previous


def set_writer(rb: Any, writer: Writer) -> Writer:
    """Replace the writer; return the old one. A new :class:`RingWriter` continues after the newest row."""
    _refuse_if_shared(rb, "writer")
    refuse_unordered(rb.sampler, writer, rb.storage)
    with rb.replay_lock:
        writer.register_storage(rb.storage)  # refuses before the old writer is replaced
        previous = TensorDictReplayBuffer.set_writer(rb, writer)
        continue_ring(writer, rb.storage)
        rb.connect()
        return previous


def continue_ring(writer: Writer, storage: Storage) -> None:
    """Let a ring writer that has not written yet continue after the newest row of the storage."""
    if type(writer) is RingWriter and not torchrl_parts.write_count_of(writer):
        torchrl_parts.set_cursor(writer, next_step(storage))


def restore_options(rb: Any, batch_size: int | None, consume_after_n_samples: int | None) -> None:
    """Set the options ``batch_size`` and ``consume_after_n_samples`` while a saved buffer is loaded."""
    rb._batch_size, rb._consume_after_n_samples = batch_size, consume_after_n_samples


def order_lost(rb: Any) -> None:
    """Stop fast draws of a sampler that needs rows in time order; the next draw then raises an error."""
    if getattr(vars(rb).get("_sampler"), "needs_order", False):  # absent while a copy is made
        rb.bound = {}


def _refuse_if_shared(rb: Any, part: str) -> None:
    if getattr(rb.storage, "shared_rows", None) is not None:
        reason = "other processes would keep the old one. Set it before you share the buffer"
        raise RuntimeError(f"cannot set the {part} of a shared buffer: {reason}{PROCESSES}")
