"""How long the stretches are in which a storage holds its trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from rlbuf_td.storages.packed import PackedStorage

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


def stretches_of(storage: PackedStorage) -> Stretches:
    """Count the stretches among the last rows of a storage; errors are those of its ``episodes_now``. O(N)."""
    ring, episodes = storage.ring, storage.episodes_now()
    cells = ring.cell_of(torch.arange(max(0, len(ring) - _MOST_ROWS), len(ring), device=storage.device))
    found, rows = episodes.spans(cells), storage.all_rows()
    is_last, flagged = found.ahead == 0, torch.zeros(len(cells), dtype=torch.bool, device=storage.device)
    for key in episodes.flags:
        flagged |= rows.column_at(key, cells).reshape(len(cells), -1).any(1)
    count, broken = torch.stack((is_last.sum(), (is_last & found.ended & ~flagged).sum())).tolist()
    ids = count if episodes.id_key is None else rows.column_at(episodes.id_key, cells).unique().numel()
    return Stretches(len(cells), count, broken, ids, bool(episodes.flags))
