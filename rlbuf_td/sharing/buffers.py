"""Sharing a buffer: each of its parts, in the order in which they depend on each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrl.data.replay_buffers import Sampler, Writer

from rlbuf_td.storages import PackedStorage
from rlbuf_td.trajectories import TrajectoryIndex

_COUNTERS = ("_cursor_value", "_write_count_value")


def share_buffer(storage: PackedStorage, sampler: Sampler, writer: Writer) -> None:
    """Move rows, what is attached to them, and priorities into shared memory; undo the writer's counters with a write.

    Raises:
        ValueError: rows on a CUDA device.
    """
    storage.share_memory_()
    storage.undo_also(*(getattr(writer, name) for name in _COUNTERS if hasattr(writer, name)))
    samplers = list(_wrapped(sampler))
    for each in samplers:
        if "traj_key" in vars(each):  # it will ask for trajectories: better one index of all than one of each process
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
