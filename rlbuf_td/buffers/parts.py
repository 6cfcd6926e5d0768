"""The components of a buffer (storage, sampler and writer), and which of them fit
together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import (
    ConsumingSampler,
    PrioritizedSampler,
    Sampler,
    Writer,
)

from rlbuf_td.samplers.common import (
    StatefulSampler,
    refuse_stored,
    refuse_unordered,
)
from rlbuf_td.samplers.minibatch import MinibatchSampler
from rlbuf_td.samplers.priorities import Update
from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.queue import QueueSampler
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.indexing import (
    Info,
    by_row,
    device_of,
    first_of_row,
    inner_dims,
)
from rlbuf_td.storages.keys import as_tuple
from rlbuf_td.storages.ring import SAMPLED_AT
from rlbuf_td.storages.tensordict_fast import entries_of
from rlbuf_td.storages.torchrl_parts import listeners_of, loses_order
from rlbuf_td.storages.writes import Write
from rlbuf_td.writers import ReservoirWriter, RingWriter
from rlbuf_td.writers.common import NO_GENERATIONS, TimeWriter
from rlbuf_td.writers.rollout import RolloutWriter

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer


class Parts(NamedTuple):
    """The components of a buffer, and properties derived from them; a new object is
    made when a component changes."""

    storage: PackedStorage
    sampler: Any
    writer: Any
    wrapper: SamplerWrapper | None  # the sampler, if it wraps another one
    # the innermost sampler, if it is a prioritized one of this package
    prioritized: Prioritized | None
    # TorchRL's own list, kept here because each lookup takes 1 us
    transforms: Collection[Any]
    # batches are drawn through TorchRL's interface, see
    # :class:`~rlbuf_td.buffers.plan.GeneralPlan`
    is_general: bool
    gives_windows: bool  # batches get a dim for the steps of each window
    writes_generally: bool  # TorchRL's code writes
    # the writer only counts what the storage writes after the newest rows
    writes_directly: bool
    # what does so: a method of the writer, or that of the storage if the writer only
    # calls it
    write: Callable[[Write], Any]
    # which of the sampler's methods "add" and "extend" do something
    notices: frozenset[str]

    @classmethod
    def of(
        cls,
        storage: PackedStorage,
        sampler: Sampler,
        writer: Writer,
        transforms: Any,
        is_general: bool,
    ) -> Parts:
        """Derive the properties from the components; ``is_general``: whether the buffer
        has a ``sample_unit`` or a ``collate_fn``."""
        wrapper = sampler if isinstance(sampler, SamplerWrapper) else None
        innermost = sampler if wrapper is None else wrapper.innermost
        refuse_writer(writer, storage)
        refuse_unordered(sampler, storage, writer)
        refuse_stored(sampler, storage)
        if wrapper is not None:
            # must precede a load of rows, which ends their trajectories
            wrapper.watch(storage)
        prioritized = innermost if isinstance(innermost, Prioritized) else None
        is_general |= wrapper is None and not _draws(sampler)
        windows = wrapper is not None and wrapper.gives_windows and not is_general
        is_theirs = isinstance(innermost, PrioritizedSampler) and prioritized is None
        generally = is_theirs or isinstance(innermost, ConsumingSampler)
        names = "add", "extend", "append"
        write = storage.advance
        if isinstance(writer, TimeWriter) and type(writer).write != TimeWriter.write:
            write = writer.write
        nothing = StatefulSampler.add, Sampler.add, Sampler.extend
        return cls(
            *(storage, sampler, writer, wrapper, prioritized, transforms),
            *(is_general, windows, generally),
            writes_directly=isinstance(writer, TimeWriter)
            and all(
                getattr(writer, name).__func__ is getattr(TimeWriter, name)
                for name in names
            ),
            write=write,
            notices=frozenset(
                how for how in ("add", "extend") if has_own(sampler, how, *nothing)
            ),
        )

    @property
    def only_restarts(self) -> bool:
        """Whether the sampler's ``add`` does no more than restart epochs, whatever the
        index."""
        nothing = StatefulSampler.add, Sampler.add, Sampler.extend, MinibatchSampler.add
        return not any(has_own(self.sampler, how, *nothing) for how in self.notices)

    def without_report(self, batch: object, info: Info) -> Any:
        """Exclude the sampler's entries ``info`` from a batch, except entries that the
        rows have, too."""
        if not isinstance(batch, TensorDictBase):  # a `collate_fn` may return anything
            return batch
        stored = self.storage.all_rows().layout.places
        return batch.exclude(*(key for key in info if as_tuple(key) not in stored))

    @property
    def fault_of_lanes(self) -> str:
        """Why single lanes cannot be written; "" if they can."""
        return fault_of_lanes(self.storage, self.writer)

    def update_of(self, data: TensorDictBase, dims: int, key: NestedKey) -> Update:
        """Return the update of priorities by a batch with ``dims`` batch dims, whose TD
        errors are at ``key``."""
        entries = entries_of(data)
        sampler = self.prioritized
        td_error = entries.get(key) if type(key) is str else data.get(key, None)
        index = entries.get("index")
        if td_error is None or index is None or sampler is None:
            refuse_missing(key if td_error is None else "index")
        if not self._are_by_row(td_error, index, dims):
            td_error, index = by_row(
                td_error, index, dims, self.storage, sampler.reduction
            )
        stamp = entries.get(SAMPLED_AT)
        if stamp is not None and dims != 1:
            stamp = first_of_row(stamp, dims, inner_dims(self.storage, dims))
        update = Update(index, td_error, stamp)
        return (
            update if self.wrapper is None else self.wrapper.anchored(entries, update)
        )

    def _are_by_row(self, td_error: Any, index: torch.Tensor, dims: int) -> bool:
        """Whether TD errors and index of a batch are as :func:`by_row` returns them, so
        that it need not be called."""
        dims_of_index = dims + 1 if self.storage.ndim > 1 else dims
        return (
            dims == (2 if self.gives_windows else 1)
            and type(td_error) is torch.Tensor
            and td_error.ndim == dims
            and index.ndim == dims_of_index
            and not td_error.requires_grad
            and not td_error.is_neg()
        )


def fault_of_lanes(storage: PackedStorage, writer: Writer) -> str:
    """Return why a writer cannot write single lanes of a storage; "" if it can."""
    if storage.ndim != 2:
        return f"needs a PackedStorage(max_size, ndim=2), this buffer has one with ndim={storage.ndim}"
    if not getattr(writer, "appends", False):
        return f"needs a RingWriter, this buffer has a {type(writer).__name__}"
    return ""


def has_own(sampler: Sampler, method: str, *empty: object) -> bool:
    """Whether a sampler, or a sampler that it wraps, has a method other than the
    ``empty`` ones, which do nothing."""
    passed_on = getattr(SamplerWrapper, method), *empty
    while (
        isinstance(sampler, SamplerWrapper)
        and getattr(type(sampler), method) in passed_on
    ):
        sampler = sampler.sampler
    return getattr(type(sampler), method) not in empty


def _draws(sampler: Sampler) -> bool:
    """Whether a sampler's class draws with ``draw``, not with a ``sample`` of its
    own."""
    methods = (
        name
        for base in type(sampler).__mro__
        for name in ("draw", "sample")
        if name in base.__dict__
    )
    return next(methods) == "draw"


def refuse_writer(
    writer: Writer, storage: PackedStorage, buffer: object = None
) -> None:
    """Raise a ValueError if the storage, or the sampler of a buffer over it, needs time
    order and the writer keeps none, or a NotImplementedError if the writer counts the
    writes to each position. If a ``buffer`` is given, the writer replaces its
    writer."""
    if loses_order(writer) and storage.dedup_options:
        reason = "share_next and frames store observations in time order"
        raise ValueError(
            f"{reason}, a {type(writer).__name__} keeps none: use a RingWriter, or leave them out"
        )
    if writer.tracks_generations:
        raise NotImplementedError(NO_GENERATIONS)
    if isinstance(writer, ReservoirWriter):
        writer.refuse_others(storage, buffer)
    for listener in listeners_of(storage):
        refuse_unordered(getattr(listener, "_sampler", None), storage, writer)


def refuse_writer_of_reopened(writer: Writer) -> None:
    """Raise a ValueError for a writer that cannot continue rows without its own
    state."""
    if not isinstance(writer, RingWriter):
        raise ValueError(
            f"a {type(writer).__name__} cannot continue the rows of PackedStorage(reopen=True), because its own "
            "counters are lost: use a RingWriter, or rb.dumps and rb.loads"
        )


def refuse_missing(key: NestedKey) -> NoReturn:
    """Raise a KeyError for a batch without TD errors, or without the index of its
    rows."""
    remedy = "set the TD errors of the sampled rows"
    if key == "index":
        remedy = (
            "it was sampled with include_info=False, or a transform has removed it. Sample with include_info=True, or "
            "with return_info=True, and call update_priority(info['index'], td_error)"
        )
    raise KeyError(f"the batch has no {key!r}: {remedy}")


def trajectory_ids(lanes: torch.Size) -> dict[NestedKey, torch.Tensor]:
    return {TRAJ_KEY: torch.empty(lanes, dtype=torch.int64, device="meta")}


def with_missing(
    schema: TensorDictBase, more: Mapping[NestedKey, torch.Tensor]
) -> TensorDictBase:
    """Return a copy of ``schema`` with the entries of ``more`` that it lacks."""
    schema = schema.copy()
    for key, value in more.items():
        if schema.get(key, None) is None:
            schema.set(key, value)
    return schema


def copied(
    batch: TensorDictBase, report: Info, device: torch.device | None
) -> tuple[TensorDictBase, Info]:
    """Return a batch and its report on another device."""
    return batch.to(device), {  # pyrefly: ignore [bad-return]
        key: tuple(part.to(device) for part in value)
        if isinstance(value, tuple)
        else value.to(device)
        for key, value in report.items()
    }


def refuse_copies(parts: Parts) -> None:
    """Raise a TypeError if the storage and the sampler do not support copying batches
    to a ``device``."""
    if parts.is_general or device_of(parts.storage).type != "cpu":
        raise TypeError(
            "device= needs a PackedStorage on the CPU and a sampler of this package or one with draw(), got "
            f"{type(parts.storage).__name__} on {device_of(parts.storage)} and {type(parts.sampler).__name__} "
            f"(and no collate_fn or sample unit)"
        )


def refuse_ahead(buffer: ReplayBuffer, sampler: Sampler, writer: Writer) -> None:
    """Raise a ValueError if the buffer draws batches ahead, and flow control, sampler
    or writer decide late which rows a batch may have."""
    prefetch = buffer._prefetch_cap
    if not prefetch:
        return
    innermost = getattr(sampler, "innermost", sampler)
    max_age = getattr(innermost, "max_age", None)
    if buffer.flow is not None:
        kept = "the ratio of flow control"
    elif max_age is not None:
        kept = f"max_age={max_age}"
    elif isinstance(innermost, MinibatchSampler | QueueSampler):
        kept = f"the order of a {type(innermost).__name__}"
    elif isinstance(writer, RolloutWriter):
        kept = f"the newest rollout of a {type(writer).__name__}"
    else:
        return
    raise ValueError(
        f"with prefetch={prefetch}, batches are drawn too early to keep {kept}: use prefetch=0"
    )
