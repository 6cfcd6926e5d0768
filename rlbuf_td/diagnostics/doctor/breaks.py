"""Rows whose next observation is not what the following row begins with, though nothing ends, and where it leads."""

from __future__ import annotations

import torch

from rlbuf_td.diagnostics.doctor.compare import hashes
from rlbuf_td.diagnostics.doctor.flow import SAMPLED, Flow, spread
from rlbuf_td.diagnostics.doctor.record import Record
from rlbuf_td.diagnostics.doctor.report import Finding


def broken_finding(record: Record, where: torch.Tensor, flow: Flow, *, mostly: bool, never: bool = False) -> Finding:
    """Return what broken rows mean.

    Args:
        record: the rows.
        where: those concerned, ``[T, E]``.
        flow: how the rows lead to each other.
        mostly: most rows within trajectories are concerned, so that rows cannot lie in the order of time.
        never: no flag ever says that a trajectory ends.
    """
    sample = spread(where)
    count, of, first = int(where.sum()), int(flow.inside.sum()), record.first(where)
    elsewhere = _found_elsewhere(record, sample, mostly)
    seen = "The next observation is not the following row's observation, though the trajectory goes on there."
    if elsewhere is not None:
        what, remedy = elsewhere
        return Finding("lanes-mixed", None, first, count, of, f"{seen} {what}", remedy)
    if mostly:
        return Finding(
            "next-observation-differs",
            None,
            first,
            count,
            of,
            f"{seen} It is found nowhere else in the buffer either.",
            "store rows in the order of time, one lane after the other in its own column; store both observations as "
            "the environment gave them (not one of them normalised, or n steps ahead).",
        )
    if never:
        return never_finding(record, where, "The observations show resets at these rows, and no done flag is ever set.")
    return Finding(
        "reset-without-done",
        None,
        first,
        count,
        of,
        f"{seen} It is no other row's observation: the environment seems to have been reset here (or the loop to have "
        "stopped), and done is not set. Trajectories run across the reset.",
        "store done = terminated | truncated: a time limit ends a trajectory too. If you reset by hand, set "
        "('next', 'truncated') in the last row, or store ('collector', 'traj_ids').",
    )


def never_finding(record: Record, where: torch.Tensor, seen: str) -> Finding:
    """Return the finding that no trajectory ends; ``where`` it should have, as far as can be seen."""
    rows = record.steps * record.lanes
    return Finding(
        "done-never",
        None,
        record.first(where),
        int(where.sum()) or rows,
        rows,
        f"{seen} Values are then bootstrapped across every end. That is right for tasks without end only.",
        "store done = terminated | truncated as the environment's step returns them.",
    )


def _found_elsewhere(record: Record, sample: torch.Tensor, mostly: bool) -> tuple[str, str] | None:
    """Look for rows that begin with the next observations of a sample; return what their places say, and a remedy."""
    here = hashes(record, record.observed, under_next=True, rows=sample)
    ordered, order = hashes(record, record.observed, under_next=False).sort()
    low, high = torch.searchsorted(ordered, here), torch.searchsorted(ordered, here, right=True)
    matches = high - low
    if not bool(matches.any()):
        return None
    votes: dict[tuple[int, int], int] = {}
    for row, start, stop in zip(sample.tolist(), low.tolist(), high.tolist(), strict=True):
        there = order[start : min(stop, start + SAMPLED)]
        ahead = (there // record.lanes - row // record.lanes) % record.steps
        across = there % record.lanes - row % record.lanes
        for offset in set(zip(ahead.tolist(), across.tolist(), strict=True)):
            votes[offset] = votes.get(offset, 0) + 1
    (ahead, across), agreed = max(votes.items(), key=lambda item: item[1])
    stack = "store lanes as a dim of their own: PackedStorage(..., ndim=2), and extend with batches [E, T]"
    if agreed >= max(2, 0.9 * len(sample)):
        if not across and mostly:
            return (
                f"It is found {ahead} rows later: the rows of {ahead} environments lie one after the other, or next "
                f"observations are {ahead} steps ahead.",
                f"{stack}; n-step returns are the sampler's work.",
            )
        if not ahead and across:
            return (
                f"It is found in the same time step, {abs(across)} lane(s) on: time and lanes are exchanged.",
                "the storage keeps [T, E], and extend takes [E, T], as collectors give it: transpose the batch, or "
                "pass dim_extend=0 to the buffer.",
            )
        if across:
            return f"It is found {ahead} step(s) later in another lane: lanes change their places.", f"{stack}."
    found = matches[matches > 0]
    if len(found) >= max(1, len(sample) // 2) and int(found.median()) <= 3:
        pieces = "pieces of several trajectories lie one after the other"
        return (
            f"It begins another row, elsewhere: {'rows are not in the order of time' if mostly else pieces}.",
            f"{stack}; or store ('collector', 'traj_ids'), which tell the pieces apart.",
        )
    return None
