"""How rows lead to each other: whether a row's next observation is what the following row begins with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlbuf_td.diagnostics.doctor.compare import differ
from rlbuf_td.diagnostics.doctor.record import Key, Record

_TOGETHER = 4_096
#: So many rows tell what kind of fault it is.
SAMPLED = 256


@dataclass
class Flow:
    """How the rows lead to each other: ``[T, E]`` bool each, on the CPU.

    Attributes:
        broken: the next observation is not that of the following row, though the trajectory goes on there.
        unbroken: the next observation is that of the following row, and not that of its own, though the trajectory
            ends there.
        apart: the next observation is not that of the following row, whatever the flags say.
        inside: the trajectory goes on with the following row.
        ends: the trajectory ends here, and another follows.
    """

    broken: torch.Tensor
    unbroken: torch.Tensor
    apart: torch.Tensor
    inside: torch.Tensor
    ends: torch.Tensor


def flow_of(record: Record) -> Flow | None:
    """Compare each row's next observation with the following row's; ``None`` if the rows do not allow it."""
    if record.paired is None or record.cut is None:
        return None
    inside, ends = record.paired & ~record.cut, record.paired & record.cut
    differing, unbroken = torch.zeros_like(inside), ends.clone()
    main = main_keys(record)
    for block in record.blocks():
        for key in record.observed:
            apart = differ(record.next(key)[block], record.after(key, block)).cpu()
            differing[block] |= apart
            if key in main:
                unbroken[block] &= ~apart
    unbroken &= _moved(record, unbroken)
    return Flow(inside & differing, unbroken, record.paired & differing, inside, ends)


def _moved(record: Record, where: torch.Tensor) -> torch.Tensor:
    """Return which of the flagged rows have a next observation that is not their own, ``[T, E]``."""
    moved = torch.zeros_like(where)
    for rows in where.flatten().nonzero()[:, 0].split(_TOGETHER):
        steps, lanes = rows // record.lanes, rows % record.lanes
        for key in main_keys(record):
            begun, reached = (record.columns[each][steps, lanes][:, None] for each in (key, ("next", *key)))
            moved[steps, lanes] |= differ(reached, begun).cpu()[:, 0]
    return moved


def main_keys(record: Record) -> list[Key]:
    """Return the observed keys, without counters and flags if there is more."""
    large = [key for key in record.observed if record.columns[key][0, 0].numel() > 1]
    return large or record.observed


def spread(where: torch.Tensor) -> torch.Tensor:
    """Return up to 256 of the flagged rows, spread evenly, as flat rows."""
    rows = where.flatten().nonzero()[:, 0]
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), SAMPLED)).long()] if len(rows) else rows
