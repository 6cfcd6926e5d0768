"""The rows that a sampler with ``max_age`` may draw: the newest ``max_age + 1`` time steps of each lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from rlbuf_td.storages.checks import whole
from rlbuf_td.storages.indexing import lanes_of
from rlbuf_td.storages.lane_heads import lanes_apart
from rlbuf_td.storages.torchrl_parts import last_step


def age_limit(max_age: Any) -> int | None:
    """Check the argument ``max_age``."""
    return None if max_age is None else whole(0)("max_age", max_age)


def young_count(storage: Storage, max_age: int) -> int:
    """Return how many stored rows are at most ``max_age`` time steps of their lane old."""
    if lanes_apart(storage):
        return int(_spans(storage, max_age)[1].sum())
    rows = len(storage)
    return rows and min(rows, (max_age + 1) * lanes_of(storage).numel())


def nth_young(storage: Any, max_age: int, number: Tensor) -> Tensor:
    """Return flat indices, ``[B]`` int64; ``number`` counts the rows that are at most ``max_age`` old from 0 on."""
    if not lanes_apart(storage):
        rows, lanes = len(storage), lanes_of(storage).numel()
        after_newest = (last_step(storage, rows // lanes) + 1) * lanes
        return (number + (after_newest - young_count(storage, max_age))) % rows
    newest, span = (torch.from_numpy(each).to(number.device) for each in _spans(storage, max_age))
    end = span.cumsum(0)
    lane = torch.searchsorted(end, number, right=True)
    return (newest[lane] + 1 + number - end[lane]) % storage.all_rows().steps * len(span) + lane


def is_young(storage: Any, max_age: int, flat: Tensor) -> Tensor:
    """Return whether each row is at most ``max_age`` time steps of its lane old, ``[B]`` bool."""
    lanes = lanes_of(storage).numel()
    if not lanes_apart(storage):
        steps = len(storage) // lanes
        return (last_step(storage, steps) - flat // lanes) % steps <= max_age
    newest, span = (torch.from_numpy(each).to(flat.device)[flat % lanes] for each in _spans(storage, max_age))
    return (newest - flat // lanes) % storage.all_rows().steps < span


def _spans(storage: Any, max_age: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each lane's newest step, and how many of its rows are at most ``max_age`` old, ``[E]`` each."""
    newest, count = storage.heads.read(storage)
    return newest, np.minimum(count, max_age + 1)
