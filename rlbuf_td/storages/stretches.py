"""How long the stretches are in which a storage holds its trajectories."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlbuf_td.storages.indexing import device_of, nth_rows, row_count
from rlbuf_td.storages.torchrl_parts import columns_of
from rlbuf_td.storages.trajectory_index import TrajectoryIndex

_MOST_ROWS = 1 << 16  # rows that suffice to judge a storage
_FEW_ROWS = 1_024  # among fewer rows, trajectories need not go on after a break


class Stretches(NamedTuple):
    """Counts of *stretches*, the rows of one trajectory that are stored one after another."""

    rows: int
    number: int  # of stretches
    broken: int  # stretches that end because a row with another trajectory id follows, and not with an end flag
    ids: int  # of different trajectories; ``number`` if no ids are stored
    has_flags: bool  # whether end flags are stored

    @property
    def mean(self) -> float:
        """The mean number of rows in a stretch."""
        return self.rows / max(1, self.number)

    def are_interleaved(self, needed: int) -> bool:
        """Whether most stretches are pieces of trajectories, with fewer than ``needed`` rows on average."""
        go_on = 2 * (self.number - self.ids) >= self.broken  # other pieces of most trajectories are stored, too
        may_go_on = self.has_flags and self.rows < _FEW_ROWS
        return 2 * self.broken > self.number and self.mean < needed and (go_on or may_go_on)


def stretches_of(index: TrajectoryIndex) -> Stretches:
    """Count the stretches among the last rows of a storage; errors are those of :meth:`TrajectoryIndex.reach`. O(N)."""
    storage = index.storage
    written = row_count(storage)
    rows = nth_rows(storage, torch.arange(max(0, written - _MOST_ROWS), written, device=device_of(storage)))
    _, ahead, ended = index.reach(rows)
    cut, columns, keys = ahead == 0, columns_of(storage), index.end_keys()
    flagged = torch.zeros_like(cut)
    for key in keys:
        flagged |= columns.get(key).flatten(0, storage.ndim - 1)[rows].reshape(len(rows), -1).any(1)
    name = None if index.traj_key is None else columns.get(index.traj_key, None)
    count, broken = torch.stack((cut.sum(), (cut & ended & ~flagged).sum())).tolist()
    ids = count if name is None else name.flatten(0, storage.ndim - 1)[rows].unique().numel()
    return Stretches(len(rows), count, broken, ids, bool(keys))
