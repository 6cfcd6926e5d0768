"""The common properties of the shards' buffers, and the check that a buffer can be sharded."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.diagnostics.health import unwrapped
from rlbuf_td.samplers import EpisodeSampler, FreshRowsSampler, ProportionalSampler, SequenceSampler, UniformSampler
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage
from rlbuf_td.writers import RingWriter


class Spec(NamedTuple):
    """The properties of the shards' buffers that clients need."""

    ndim: int
    capacity: int  # rows per shard
    batch_size: int | None
    priority_key: Any
    is_prioritized: bool
    beta: float
    norm: str | None
    stratified: bool
    reduction: Any
    windows: SequenceSampler | None  # a sampler with the settings of the shards' SequenceSamplers; it never draws

    @property
    def window_rows(self) -> int:
        """Number of rows per draw: the length of a sequence, including burn-in, or 1 without sequences."""
        return 1 if self.windows is None else self.windows.window

    @classmethod
    def of(cls, buffer: ReplayBuffer) -> Spec:
        """Return the properties of a buffer; TypeError or ValueError if the buffer cannot be sharded."""
        inner, outer, windows = checked_sampler(buffer), buffer.sampler, None
        if isinstance(outer, SequenceSampler):
            settings = {"burn_in": outer.burn_in, "boundary": outer.boundary, "priority": outer.priority_rule}
            windows = SequenceSampler(UniformSampler(), outer.length, eta=outer.eta, **settings)
        common = buffer.storage.ndim, buffer.storage.max_size, buffer.batch_size, buffer.priority_key
        if not isinstance(inner, ProportionalSampler):
            return cls(*common, False, 0.0, None, True, "max", windows)
        return cls(*common, True, inner.beta, inner.weight_norm, inner.stratified, inner.reduction, windows)


def _draws_fresh(sampler: Any) -> bool:
    is_fresh = isinstance(sampler, FreshRowsSampler)
    return is_fresh or (isinstance(sampler, SamplerWrapper) and _draws_fresh(sampler.sampler))


def checked_sampler(buffer: Any) -> Any:
    """Return the buffer's sampler without its wrappers; TypeError or ValueError if the buffer cannot be sharded."""
    if not isinstance(buffer, ReplayBuffer) or not isinstance(buffer.storage, PackedStorage):
        raise TypeError(f"make_buffer must return a ReplayBuffer of this package with a PackedStorage, got {buffer!r}")
    sampler, inner, parts = buffer.sampler, unwrapped(buffer.sampler), buffer._initialize()
    for is_there, what, remedy in (
        (type(inner) not in (UniformSampler, ProportionalSampler), type(inner).__name__, "a ProportionalSampler"),
        (getattr(inner, "max_age", None) is not None, "max_age", "rows of any age, or one buffer"),
        (isinstance(sampler, EpisodeSampler), "EpisodeSampler", "a SequenceSampler"),
        (_draws_fresh(sampler), "FreshRowsSampler", "the wrapped sampler, without fresh rows"),
        (getattr(inner, "unique", False), "UniformSampler(unique=True)", "unique=False"),
        (getattr(sampler, "boundary", "") == "strict", "boundary='strict'", "'pad' or 'shift'"),
        (type(buffer.writer) is not RingWriter, type(buffer.writer).__name__, "a RingWriter"),
        (len(parts.transforms), "a transform", "transforms in the learner"),
        (buffer.prefetcher or buffer.batch_device, "prefetch or device", "those of the shards and the learner"),
        (buffer.flow is not None, "flow control", "samples_per_insert and min_size of the ShardedReplayBuffer"),
        (parts.has_units, "a sample unit", "a SequenceSampler"),
        (buffer.storage.device.type != "cpu", f"rows on {buffer.storage.device}", "rows on the CPU"),
    ):
        if is_there:
            raise ValueError(f"{what} has no exact form over shards: use {remedy}")
    return inner
