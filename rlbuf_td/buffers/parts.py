"""The components of a buffer (storage, sampler and writer): which fit together, and how processes share them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import ConsumingSampler, PrioritizedSampler, Sampler, Storage, Writer

from rlbuf_td.buffers.flow import FlowControl
from rlbuf_td.envs.recorder_state import TrajectoryNumbers
from rlbuf_td.samplers.common import refuse_disorder, refuse_stored, refuse_taken, reported_by, rows_drawn
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.wrapper import SamplerWrapper, refuse_lists
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.checks import OUT_OF_ORDER, whole
from rlbuf_td.storages.indexing import attached_or_new, by_row
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.lane_heads import NEWEST
from rlbuf_td.storages.memory_budget import Purpose, require_room, shared_tensors
from rlbuf_td.storages.notebooks import PRIORITIES
from rlbuf_td.storages.schema import walk
from rlbuf_td.storages.shared.journal_file import PRIORITY_FILE
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.trajectory_index import TRAJ_KEY
from rlbuf_td.writers import RingWriter
from rlbuf_td.writers.common import is_in_time_order, keeps_order, next_step
from rlbuf_td.writers.rollout import RolloutWriter

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

_SHARED = Purpose(
    "Priorities and trajectories of a shared buffer take",
    "Mount a larger /dev/shm (docker run --shm-size=...), or use a smaller max_size, or UniformSampler.",
)


PRIORITIES_OF_REOPENED = (
    "rows were reopened without a priority, and have that of new rows: their write was killed, "
    "a buffer without a prioritized sampler wrote them, they were edited, or priorities.bin is missing or damaged"
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
    gives_windows: bool  # batches have a dim for the steps of each window
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
            refuse_lists(wrapper, storage)
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
        windows = wrapper is not None and wrapper.gives_windows
        return cls(*given, is_packed, windows, has_units, is_stamped, reported_by(sampler), draws, generally, newest)

    def draw(self, batch_size: int, gather: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor, dict[Any, Any], Any]:
        """Draw rows; return their indices, the sampler's info dict and the transitions."""
        if self.draws == "draw_batch":  # the caller holds the buffer's lock
            flat, info, batch = self.sampler.draw_batch(self.storage, batch_size)
        else:
            refuse_disorder(self.sampler, self.storage)
            flat, info = rows_drawn(self.sampler, self.sampler.draw(self.storage, batch_size))
            batch = gather(flat)
        if not info.keys() <= self.report_keys:  # a user's sampler
            refuse_taken(self.sampler, self.storage.layout.names, info.keys() - self.report_keys)
        return flat, info, batch

    def laid_out(self, batch: Any, info: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        """Return a batch and the sampler's info dict in the shape that the sampler gives them."""
        return self.sampler.lay_out(batch, info) if self.gives_windows else (batch, info)

    @property
    def is_looking(self) -> bool:
        """Whether the next draws look for interleaved trajectories, which plans do not."""
        return self.wrapper is not None and not self.wrapper.has_checked_order

    def without_report(self, batch: Any, info: dict[Any, Any]) -> Any:
        """Exclude the sampler's entries ``info`` from a batch, except entries that the rows have, too."""
        stored = self.storage.layout.places if self.draws else {}
        return batch.exclude(*(key for key in info if as_tuple(key) not in stored))

    def split_report(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return a batch without the sampler's entries that are not in its info dict, and these entries."""
        if not isinstance(batch, TensorDictBase):
            return batch, {}
        found = {key: batch.get(key) for key in self.report_keys & {*batch.keys()}}
        return batch.exclude(*found), found

    def errors_of(self, data: TensorDictBase, key: NestedKey) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index of the rows whose priorities a batch updates, and one TD error for each row."""
        entries, sampler = entries_of(data), self.prioritized
        td_error = entries.get(key) if type(key) is str else data.get(key, None)
        index = entries.get("index")
        if td_error is None or index is None or sampler is None:
            refuse_missing(key if td_error is None else "index")
        td_error, index = by_row(td_error, index, data.ndim, self.storage, sampler.reduction)
        return (index, td_error) if self.wrapper is None else self.wrapper.anchored(data, index, td_error)


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
    """Raise a ValueError if sampler or rows need time order, and the rows or the writer keep no such order."""
    if keeps_order(writer) is False and getattr(storage, "dedup_options", None):
        reason = "share_next and frames store observations in time order"
        raise ValueError(f"{reason}, a {type(writer).__name__} keeps none: use a RingWriter, or leave them out")
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


def refuse_writer_of_reopened(writer: Writer) -> None:
    """Raise a ValueError for a writer that cannot continue rows without its own state."""
    if not isinstance(writer, RingWriter):
        raise ValueError(
            f"a {type(writer).__name__} cannot continue the rows of PackedStorage(reopen=True), because its own "
            "counters are lost: use a RingWriter, or rb.dumps and rb.loads"
        )


def refuse_second_priorities(rb: ReplayBuffer, storage: Storage, sampler: Sampler) -> None:
    """Raise a ValueError if another buffer keeps its priorities in the file beside the rows of a reopened storage."""
    own: Any = getattr(sampler, "innermost", sampler)
    if not (isinstance(own, Prioritized) and isinstance(storage, PackedStorage) and storage.reopen):
        return
    for other in torchrl_parts.listeners_of(storage):
        theirs = getattr(getattr(other, "parts", None), "prioritized", None)
        if other is not rb and theirs not in (None, own) and theirs.priorities.file is not None:
            raise ValueError(
                f"another buffer over this storage keeps its priorities in {storage.scratch_dir}/{PRIORITY_FILE}, and "
                "two buffers would overwrite each other's: use one buffer, or a sampler without priorities here, or "
                "call shutdown() of the other buffer first"
            )


def continue_ring(writer: Writer, storage: Storage) -> None:
    """Let a ring writer that has not written yet continue after the newest row of the storage."""
    if type(writer) is RingWriter and not torchrl_parts.write_count_of(writer):
        shared_rows = getattr(storage, "shared_rows", None)
        if shared_rows is not None and shared_rows.of_writer is not None:
            writer.continue_counts(shared_rows.of_writer)
            shared_rows.of_writer = None
        torchrl_parts.set_cursor(writer, next_step(storage))


def refuse_missing(key: NestedKey) -> NoReturn:
    """Raise a KeyError for a batch without TD errors, or without the index of its rows."""
    remedy = "set the TD errors of the sampled rows"
    if key == "index":
        remedy = (
            "it was sampled with include_info=False, or a transform has removed it. Sample with include_info=True, or "
            "with return_info=True, and call update_priority(info['index'], td_error)"
        )
    raise KeyError(f"the batch has no {key!r}: {remedy}{PRIORITIES}")


def complete_reserved(rb: ReplayBuffer) -> None:
    """Add the entries that recorders, collectors and the writer will write to the reserved rows of a buffer."""
    storage, layout = rb.storage, rb.storage.layout
    schema = layout.unpack(torch.empty((*storage.lanes, layout.row_bytes), dtype=torch.uint8, device="meta"))
    more = rb.writer.added_entries(schema) if isinstance(rb.writer, RolloutWriter) else {}
    if rb._has_environment:
        more |= trajectory_ids(storage.lanes)
    complete = with_missing(schema, more)
    if len(list(walk(complete))) > len(layout.leaves):
        storage.release()
        storage.reserve(complete)


def with_trajectory_ids(rb: ReplayBuffer, data: TensorDictBase, dims: int) -> TensorDictBase:
    """Return data whose first ``dims`` dims index rows; if only the shared rows have trajectory ids, with ids of 0.

    A loop of one's own writes no ids. Its trajectories then end at the done flags.
    """
    layout = rb.storage.layout
    if layout is None or TRAJ_KEY not in layout.places or data.get(TRAJ_KEY, None) is not None:
        return data
    ids = torch.zeros(data.batch_size[:dims], dtype=torch.int64, device="cpu")
    return data.copy().set(TRAJ_KEY, ids)


def trajectory_ids(lanes: torch.Size) -> dict[NestedKey, torch.Tensor]:
    return {TRAJ_KEY: torch.empty(lanes, dtype=torch.int64, device="meta")}


def with_missing(schema: TensorDictBase, more: Mapping[NestedKey, torch.Tensor]) -> TensorDictBase:
    """Return a copy of ``schema`` with the entries of ``more`` that it lacks."""
    schema = schema.copy()
    for key, value in more.items():
        if schema.get(key, None) is None:
            schema.set(key, value)
    return schema
