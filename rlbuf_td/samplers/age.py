"""The rows that a sampler with ``max_age`` may draw: the newest ``max_age + 1`` time steps of each lane."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlbuf_td.storages.checks import whole
from rlbuf_td.storages.indexing import lanes_of, stand_apart
from rlbuf_td.storages.torchrl_parts import last_step


def age_limit(max_age: Any) -> int | None:
    """Check the argument ``max_age``."""
    return None if max_age is None else whole(0)("max_age", max_age)


def young_count(storage: Any, max_age: int) -> int:
    """Return how many stored rows are at most ``max_age`` time steps of their lane old."""
    if hasattr(storage, "ring"):
        return int(storage.ring.count.clip(max=max_age + 1).sum())
    return min(len(storage), (max_age + 1) * lanes_of(storage).numel()) if len(storage) else 0


def nth_young(storage: Any, max_age: int, number: Tensor) -> Tensor:
    """Return flat indices, ``[B]`` int64; ``number`` counts the rows that are at most ``max_age`` old from 0 on."""
    if stand_apart(storage):
        return storage.ring.newest_of(number, storage.ring.count.clip(max=max_age + 1))
    rows, lanes = len(storage), lanes_of(storage).numel()
    after_newest = (last_step(storage, rows // lanes) + 1) * lanes
    return (number + (after_newest - young_count(storage, max_age))) % rows


def is_young(storage: Any, max_age: int, flat: Tensor) -> Tensor:
    """Return whether each row is at most ``max_age`` time steps of its lane old, ``[B]`` bool."""
    if hasattr(storage, "ring"):
        return (storage.ring.reach(flat)[1] <= max_age) & storage.ring.is_live(flat)
    steps, lanes = len(storage) // lanes_of(storage).numel(), lanes_of(storage).numel()
    return (last_step(storage, steps) - flat // lanes) % steps <= max_age
