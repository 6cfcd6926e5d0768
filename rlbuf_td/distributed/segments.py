"""Loads dumps of shards into a different number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from rlbuf_td.buffers.replay import ReplayBuffer
from rlbuf_td.checkpoint import open_checkpoint
from rlbuf_td.storages import PackedStorage, torchrl_parts
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

Segment: TypeAlias = tuple[str, int, int | None]
"""Time steps of a dump: folder of the dump, first time step (0 is the oldest), number of time steps (None: all)."""


def deal(steps: Sequence[int], shards: int) -> list[list[tuple[int, int, int]]]:
    """Return each shard's segments, ``(number of the dump, first time step, number of time steps)``.

    Example:
        >>> deal([4, 2], 3)
        [[(0, 0, 2)], [(0, 2, 2)], [(1, 0, 2)]]
    """
    total, dealt = sum(steps), []
    bounds = [round(place * total / shards) for place in range(shards + 1)]
    for first, last in pairwise(bounds):
        segments, begin = [], 0
        for dump, count in enumerate(steps):
            low, high = max(first, begin), min(last, begin + count)
            if low < high:
                segments.append((dump, low - begin, high - low))
            begin += count
        dealt.append(segments)
    return dealt


def end_trajectories(storage: PackedStorage) -> None:
    """End all open trajectories, so that the rows written next do not continue them."""
    for each in torchrl_parts.listeners_of(storage):
        if isinstance(each, TrajectoryIndex):
            each.part()


def load_segments(buffer: ReplayBuffer, segments: Sequence[Segment]) -> None:
    """Fill a new buffer with the rows and priorities of ``segments``."""
    if len(segments) == 1 and segments[0][1:] == (0, None):
        return buffer.loads(segments[0][0], progress=False)
    for folder, first, count in segments:
        found = open_checkpoint(folder, progress=False)
        if found.rows is None:
            continue
        state: dict[str, Any] = found.sampler
        while "sampler" in state:
            state = state["sampler"]
        steps, capacity = found.rows.batch_size[0], found.shape[0]
        oldest = found.writer["_cursor"] if steps == capacity else 0
        chosen = (torch.arange(first, steps if count is None else first + count, device="cpu") + oldest) % steps
        end_trajectories(buffer.storage)
        rows = found.rows[chosen]
        index = buffer.extend(rows if buffer.storage.ndim == 1 else rows.transpose(0, 1), update_priority=False)
        prioritized = buffer._initialize().prioritized
        if prioritized is not None:
            lanes = rows.shape[1:].numel() if buffer.storage.ndim > 1 else 1
            magnitude = state["priorities"]["magnitude"][: steps * lanes].view(steps, lanes)[chosen].flatten()
            prioritized.alpha = state["alpha"]
            priorities = prioritized.priorities
            priorities.assign(index, magnitude, None, buffer.storage, counts=False)
            priorities.largest = max(priorities.largest, float(state["largest"]))
