"""Loads dumps of shards into a different number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rlbuf_td.checkpoint import open_checkpoint
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

if TYPE_CHECKING:
    from rlbuf_td.buffers.replay import ReplayBuffer

Segment: TypeAlias = tuple[str, int, int | None]
"""Part of a dump: its folder, the first time step (0 is the oldest), the number of time steps (``None``: all)."""


def deal(steps: Sequence[int], shards: int) -> list[list[tuple[int, int, int]]]:
    """Distribute the time steps of several dumps over a number of shards, evenly and in order.

    Args:
        steps: the number of time steps of each dump.
        shards: the number of shards.

    Returns:
        For each shard its segments: the number of the dump, the first time step, and the number of time steps.

    Example:
        >>> deal([4, 2], 3)
        [[(0, 0, 2)], [(0, 2, 2)], [(1, 0, 2)]]
    """
    total, dealt, begin = sum(steps), [], 0
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


def load_segments(buffer: ReplayBuffer, segments: Sequence[Segment]) -> None:
    """Fill a new buffer with parts of dumps and their priorities; no trajectory continues from part to part."""
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
        for each in buffer.storage._attached_entities:
            if isinstance(each, TrajectoryIndex):
                each.part()
        rows = found.rows[chosen]
        index = buffer.extend(rows if buffer.storage.ndim == 1 else rows.transpose(0, 1), update_priority=False)
        prioritized = buffer._parts.prioritized
        if prioritized is not None:
            lanes = rows.shape[1:].numel() if buffer.storage.ndim > 1 else 1
            magnitude = state["priorities"]["magnitude"][: steps * lanes].view(steps, lanes)[chosen].flatten()
            prioritized.alpha = state["alpha"]
            priorities = prioritized.priorities
            priorities.assign(index, magnitude, None, buffer.storage, counts=False)
            priorities.largest = max(priorities.largest, float(state["largest"]))
