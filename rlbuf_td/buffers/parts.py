"""The parts of a buffer: what they are to each other, and how several processes share them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import ConsumingSampler, PrioritizedSampler, Sampler, Storage, Writer

from rlbuf_td.samplers.prioritized import Prioritized
from rlbuf_td.samplers.wrapper import SamplerWrapper
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.trajectory_index import TrajectoryIndex


class Parts(NamedTuple):
    """The parts of a buffer, and what each call needs to know of them; made anew when a part is replaced."""

    storage: Any
    sampler: Any
    writer: Any
    wrapper: SamplerWrapper | None  # the sampler, if it wraps another one
    prioritized: Prioritized | None  # the sampler that draws, if it is a prioritized one of this package
    transforms: Collection[Any]  # the live list: to ask the transform takes 1 us
    is_packed: bool  # the storage is a PackedStorage
    has_units: bool  # a sample unit expands what is drawn
    is_stamped: bool  # batches know when they were sampled
    draws: str  # the sampler's method on the short path: "draw_batch", "draw"; "": take TorchRL's general path
    writes_generally: bool  # writes take TorchRL's general path

    @classmethod
    def of(
        cls,
        storage: Storage,
        sampler: Sampler,
        writer: Writer,
        transforms: Collection[Any],
        has_units: bool,
        collates: bool,
    ) -> Parts:
        """Return the parts; ``collates``: the buffer has a collate function of the user's."""
        wrapper = sampler if isinstance(sampler, SamplerWrapper) else None
        innermost = sampler if wrapper is None else wrapper.innermost
        prioritized = innermost if isinstance(innermost, Prioritized) else None
        is_packed = isinstance(storage, PackedStorage)
        is_direct = is_packed and not has_units and not collates and not writer.tracks_generations
        draws = "" if not is_direct else "draw_batch" if wrapper is not None else _method_to_draw(type(sampler))
        is_theirs = isinstance(innermost, PrioritizedSampler) and prioritized is None
        return cls(
            storage,
            sampler,
            writer,
            wrapper,
            prioritized,
            transforms,
            is_packed,
            has_units,
            is_packed and not has_units and prioritized is not None,
            draws,
            is_theirs or isinstance(innermost, ConsumingSampler),
        )

    def draw(self, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any], TensorDictBase]:
        """Return flat rows of the short path, the sampler's report and the transitions; the caller holds the lock."""
        if self.draws == "draw_batch":
            return self.sampler.draw_batch(self.storage, batch_size)
        flat, info = self.sampler.draw(self.storage, batch_size)
        return flat, info, self.storage.gather(flat)


def _method_to_draw(sampler: type[Sampler]) -> str:
    """Return the best method by which a class draws; "" if it, or a subclass of one of ours, has its own ``sample``."""
    for each in sampler.__mro__:
        for name in ("draw_batch", "draw"):
            if name in each.__dict__:
                return name
        if "sample" in each.__dict__:
            return ""
    return ""


def share_parts(storage: PackedStorage, sampler: Sampler, writer: Writer) -> None:
    """Move rows, what is attached to them, and priorities into shared memory; a killed write undoes writer's counters.

    Raises:
        ValueError: rows on a CUDA device.
    """
    storage.share_memory_()
    counters = vars(writer)
    if storage.shared_rows is not None:
        watched = (counters[name] for name in ("_cursor_value", "_write_count_value") if name in counters)
        storage.shared_rows.journal.watch(*watched)
    samplers = list(_wrapped(sampler))
    for each in samplers:
        if isinstance(each, SamplerWrapper):  # it needs trajectories: one index, made now, serves all processes
            TrajectoryIndex.of(storage, done_key=each.done_key, traj_key=each.traj_key)
    for part in (*samplers, *storage._attached_entities):
        share = getattr(part, "share_memory_", None)
        if share is not None:
            share()


def _wrapped(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the one that it wraps, and so on."""
    while isinstance(sampler, Sampler):
        yield sampler
        sampler = getattr(sampler, "sampler", None)
