"""Loading into another capacity: which rows, in which order, and what becomes of the sampler's state."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torchrl.data.replay_buffers import RandomSampler, Sampler

from rlbuf_td.checkpoint.encoding import CheckpointError


@dataclass(frozen=True)
class Fit:
    """Where the rows of a dump go.

    Attributes:
        ranges: (first, count) of the saved time steps that fill the storage from step 0 on, one after the other.
        steps: their number.
        is_same: whether the capacities are equal, so that nothing moves.
        dropped: number of time steps, the oldest, for which there is no room.
    """

    ranges: tuple[tuple[int, int], ...]
    steps: int
    is_same: bool
    dropped: int

    @property
    def moves(self) -> bool:
        """Whether a row gets another number, or is dropped."""
        return not self.is_same and (self.ranges != ((0, self.steps),) or self.dropped > 0)

    def rows(self, lanes: int) -> torch.Tensor:
        """Return the saved flat row of each row of the storage, ``[steps * lanes]`` int64."""
        parts = [torch.arange(first * lanes, (first + count) * lanes) for first, count in self.ranges]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def fit(saved: int, capacity: int, live: int, cursor: int | None) -> Fit:
    """Fit ``live`` written steps of a ring of ``saved`` steps into one of ``capacity``: the newest, oldest first.

    Args:
        saved: time steps of the saved storage, ``live <= saved``.
        capacity: time steps of the storage to fill.
        live: time steps that had been written.
        cursor: where the ring would have written next; ``None`` if the writer keeps no order of age.

    Raises:
        CheckpointError: rows must be dropped, and there is no order of age.
    """
    if saved == capacity:
        return Fit(((0, live),) if live else (), live, True, 0)
    if live < saved and live <= capacity:
        return Fit(((0, live),) if live else (), live, False, 0)
    if cursor is None:
        raise CheckpointError(
            f"a dump of {live} time steps does not fit a capacity of {capacity}, and its writer keeps no order of age "
            "that would say which to drop: load it into the same capacity"
        )
    oldest = cursor if live == saved else 0
    kept = min(live, capacity)
    start = oldest + live - kept
    parts = ((start, min(kept, max(0, live - start))), (max(0, start - live), kept - min(kept, max(0, live - start))))
    return Fit(tuple(part for part in parts if part[1]), kept, False, live - kept)


def warn_dropped(fit: Fit) -> None:
    """Warn of the oldest time steps if there was no room for them."""
    if fit.dropped:
        warnings.warn(
            f"the {fit.dropped} oldest time steps of the dump were dropped: the buffer has room for {fit.steps}",
            stacklevel=4,
        )


def resized_state(
    sampler: Sampler, state: dict[str, Any], rows: torch.Tensor | None, capacity: int, moved: bool
) -> dict[str, Any]:
    """Return a sampler's saved state for a storage of another capacity.

    A sampler whose state depends on the rows has a method ``resized_state(state, rows, capacity, moved)``.

    Args:
        sampler: the sampler that will load the state.
        state: what the saved sampler's ``state_dict`` returned.
        rows: ``[n]`` int64, the saved row of each of the ``n`` new rows; ``None`` if the capacity is the same.
        capacity: number of rows that the storage has room for.
        moved: whether a row has another number now, or is gone.

    Raises:
        CheckpointError: the sampler has no such method, and the capacity differs.
    """
    resize = getattr(sampler, "resized_state", None)
    if resize is not None:
        return resize(state, rows, capacity, moved)
    if rows is None or isinstance(sampler, RandomSampler):
        return state
    raise CheckpointError(
        f"a {type(sampler).__name__} can be loaded into the same capacity only; rows_only=True leaves its state out"
    )
