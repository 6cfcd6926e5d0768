"""Findings about the order of rows, and about the flags that end trajectories.

Within a trajectory, the next observation of a row must equal the observation of the following row. The next
observation in a trajectory's last row must differ from the first observation of the following trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlbuf_td.diagnostics.doctor.record import Record, differ, hashes
from rlbuf_td.diagnostics.doctor.report import Finding
from rlbuf_td.storages.episodes import TRAJ_KEY
from rlbuf_td.storages.stretches import Stretches

_AT_ONCE = 4_096  # rows
_SAMPLED = 256  # rows that suffice to identify the kind of a fault
_FEW = 32  # fewer rows may all be of one kind by chance
_LONG = 10_000  # time steps: this many without an end are a finding
_SOME_ENDS = 8  # fewer changes of the trajectory id without a flag are no finding
_STACK = "store lanes as a dim of their own: PackedStorage(..., ndim=2), and extend with batches [E, T]"


@dataclass
class Flow:
    """How each row relates to the following row: flags ``[T, E]`` bool on the CPU."""

    broken: torch.Tensor  # the next observation is not the following row's, though the trajectory continues
    unbroken: torch.Tensor  # the trajectory ends, yet the next observation is the following row's, not this row's
    apart: torch.Tensor  # the next observation is not the following row's, with or without an end
    inside: torch.Tensor  # the trajectory continues with the following row
    ends: torch.Tensor  # the trajectory ends, and another follows


def sequence_findings(record: Record, needed: int) -> Iterator[Finding]:
    """Yield the faults in the order of rows; the sampler needs ``needed`` consecutive rows of a trajectory."""
    flags = {name: flag for name in ("done", "terminated", "truncated") if (flag := record.flag(name)) is not None}
    ended = torch.stack([torch.zeros_like(record.cut), *flags.values()]).any(0)
    flow = _flow(record) if record.knows_ends and record.observed else None
    if record.knows_ends and flow is None:
        record.skipped.append("next observations: no key is stored both at the root and under 'next'")
    fault = None
    if flow is not None:
        if int(flow.broken.sum()) > max(1, int(flow.inside.sum()) // 2):
            fault = _broken(record, flow.broken, flow, mostly=True)
        else:
            fault = _shifted(record, flow, flags.get("done", ended))
    if fault is not None:
        yield fault
    if "done" in flags and (fault is None or fault.code != "done-shifted"):
        for name, flag in flags.items():
            lacking = flag & ~flags["done"]
            if bool(lacking.any()):
                yield record.finding(f"{name}-without-done", lacking, int(flag.sum()), ("next", name), name=name)
    if record.knows_ends and fault is None:
        yield from _ends(record, flow, ended)
    ids = record.columns.get(TRAJ_KEY)
    if record.knows_ends and ids is not None:
        broken = record.cut & record.paired & ~ended
        counts = int(record.cut.sum()), int(broken.sum()), ids.unique().numel()
        stretches = Stretches(record.rows, *counts, bool(flags))
        if stretches.are_interleaved(needed):
            yield record.finding("trajectories-interleaved", broken, record.rows, mean=stretches.mean)


def _ends(record: Record, flow: Flow | None, ended: torch.Tensor) -> Iterator[Finding]:
    """Yield the faults at the ends of trajectories; ``ended``, ``[T, E]`` bool, is True where an end flag is set."""
    if bool(ended.all()) and record.rows >= _FEW:
        yield record.finding("done-always", ended, record.rows)
        return
    one_step, never = _one_step_rows(record, ended), not bool(ended.any())
    if flow is not None and bool((broken := flow.broken & ~ended).any()):
        yield _broken(record, broken, flow, never=never)
    elif flow is not None and never and _ids_show_ends(record, flow):
        seen = "Trajectory ids and observations show resets at these rows, and no done flag is ever set."
        yield record.finding("done-never", flow.ends & flow.apart, record.rows, seen=seen)
    elif never and record.steps >= _LONG:
        yield record.finding("done-never", None, record.rows, seen=f"No trajectory ends in {record.steps:,} steps.")
    if flow is not None and bool(flow.unbroken.any()) and _is_no_chance(record, flow):
        yield _unbroken(record, flow, one_step)
        return
    ids, count = record.columns.get(TRAJ_KEY), int(one_step.sum())
    trajectories = int((record.cut & record.paired).sum()) if ids is None else ids.unique().numel()
    if count >= _FEW and count >= 0.9 * trajectories:  # in short games, half of the trajectories may have one step
        yield record.finding("one-step-trajectories", one_step, trajectories)


def _flow(record: Record) -> Flow:
    inside, ends = record.paired & ~record.cut, record.paired & record.cut
    differing, unbroken, main = torch.zeros_like(inside), ends.clone(), record.main
    for block in record.blocks():
        for key in record.observed:
            apart = differ(*record.pairs(key, block)).cpu()
            differing[block] |= apart
            if key in main:
                unbroken[block] &= ~apart
    moved = torch.zeros_like(inside).flatten()
    for rows in unbroken.flatten().nonzero()[:, 0].split(_AT_ONCE):
        for key in main:
            begun, after = (record.at(each, rows)[:, None] for each in (key, ("next", *key)))
            moved[rows] |= differ(after, begun).cpu()[:, 0]
    unbroken &= moved.view_as(unbroken)
    return Flow(inside & differing, unbroken, record.paired & differing, inside, ends)


def _spread(where: torch.Tensor) -> torch.Tensor:
    """Return up to 256 row numbers, evenly spaced among the rows of the mask ``where``, ``[T, E]``."""
    rows = where.flatten().nonzero()[:, 0]
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), _SAMPLED), dtype=torch.float64, device="cpu").long()]


def _broken(record: Record, where: torch.Tensor, flow: Flow, *, mostly: bool = False, never: bool = False) -> Finding:
    """Return the finding about rows whose next observation differs from the following row's observation."""
    of, sample = int(flow.inside.sum()), _spread(where)
    if mostly and not _moves(record, sample):
        return record.finding("observation-reused", where, of)
    found = _found_elsewhere(record, sample, mostly)
    if found is not None:
        return record.finding("lanes-mixed", where, of, place=found[0], way=found[1])
    if never and not mostly:
        seen = "The observations show resets at these rows, and no done flag is ever set."
        return record.finding("done-never", where, record.rows, seen=seen)
    return record.finding("next-observation-differs" if mostly else "reset-without-done", where, of)


def _moves(record: Record, rows: torch.Tensor) -> bool:
    """Whether the next observation of one of the rows differs from the row's own observation."""
    for key in record.main:
        before, after = (record.at(each, rows)[:, None] for each in (key, ("next", *key)))
        if bool(differ(after, before).any()):
            return True
    return False


def _found_elsewhere(record: Record, sample: torch.Tensor, mostly: bool) -> tuple[str, str] | None:
    """Search all observations for the next observations of the rows in ``sample``; return their place, and a remedy."""
    here = hashes(record, [("next", *key) for key in record.observed], sample)
    ordered, order = hashes(record, record.observed).sort()
    low, high = torch.searchsorted(ordered, here), torch.searchsorted(ordered, here, right=True)
    matches = high - low
    if not bool(matches.any()):
        return None
    votes = Counter[tuple[int, int]]()
    for row, start, stop in zip(sample.tolist(), low.tolist(), high.tolist(), strict=True):
        there = order[start : min(stop, start + _SAMPLED)]
        ahead = (there // record.lanes - row // record.lanes) % record.steps
        across = there % record.lanes - row % record.lanes
        votes.update(set(zip(ahead.tolist(), across.tolist(), strict=True)) - {(0, 0)})  # other rows than this one
    if not votes:
        return None
    ((ahead, across), agreed), *_ = votes.most_common(1)
    if agreed >= max(2, 0.9 * len(sample)):
        if not across and mostly:
            return (
                f"It is the observation {ahead} rows later: the rows of {ahead} environments alternate, or next "
                f"observations are {ahead} steps ahead.",
                f"{_STACK}; let NStepSampler compute n-step returns.",
            )
        if not ahead and across:
            return (
                f"It is the observation in the same time step, {abs(across)} lane(s) on: time and lanes are exchanged.",
                "the storage keeps [T, E], but extend takes [E, T], as collectors return it: transpose the batch, or "
                "pass dim_extend=0 to the buffer.",
            )
        if across:
            place = f"It is the observation {ahead} step(s) later in another lane: the order of lanes changes."
            return place, f"{_STACK}."
    found = matches[matches > 0]
    if len(found) >= max(1, len(sample) // 2) and int(found.median()) <= 3:
        pieces = "rows are not in time order" if mostly else "parts of several trajectories follow each other"
        return (
            f"It is the observation of another row: {pieces}.",
            f"{_STACK}; or store ('collector', 'traj_ids'), which separates the parts.",
        )
    return None


def _shifted(record: Record, flow: Flow, done: torch.Tensor) -> Finding | None:
    """Return a finding if done flags are set one step too late or one step too early."""
    for step, late, before in ((1, "late", "before"), (-1, "early", "after")):
        beside = flow.apart & ~done & flow.unbroken.roll(-step, 0)
        count = int(beside.sum())
        if count and 2 * count >= max(int(flow.broken.sum()), int(flow.unbroken.sum())):
            of = int(flow.ends.sum())
            return record.finding("done-shifted", beside.roll(step, 0), of, late=late, before=before)
    return None


def _ids_show_ends(record: Record, flow: Flow) -> bool:
    """Whether changes of the trajectory id seem to mark ends of episodes.

    No id may appear again later, and lengths must vary: equal lengths suggest that the data was cut into pieces.
    """
    cuts = (flow.ends & flow.apart).T.flatten().nonzero()[:, 0]
    ids = record.columns.get(TRAJ_KEY)
    if ids is None or len(cuts) < _SOME_ENDS:
        return False
    changes = int((ids[1:] != ids[:-1]).sum())
    return int(ids.unique().numel()) >= changes and len(cuts.diff().unique()) > 1


def _is_no_chance(record: Record, flow: Flow) -> bool:
    """Whether ``flow.unbroken`` is unlikely to come from observations that are equal by chance."""
    if 2 * int(flow.unbroken.sum()) >= int(flow.ends.sum()):
        return True
    values = hashes(record, record.main)
    return 100 * (len(values) - len(values.unique())) < len(values)


def _unbroken(record: Record, flow: Flow, one_step: torch.Tensor) -> Finding:
    """Return the finding about trajectory ends whose next observation equals the following row's observation."""
    where, of = flow.unbroken, int(flow.ends.sum())
    here, after = _jumps(record, where, flow.inside)
    if not max(here, after):
        if 2 * int((where & (one_step | one_step.roll(-1, 0))).sum()) >= int(where.sum()):
            return record.finding("one-step-trajectories", one_step & (where | where.roll(1, 0)), of)
        return record.finding("done-without-reset", where, of)
    if here >= after:
        return record.finding("final-observation-lost", where, of, jump=here)
    return record.finding("reset-row-stored", where.roll(1, 0), of, jump=after)


def _jumps(record: Record, where: torch.Tensor, inside: torch.Tensor) -> tuple[float, float]:
    """Return the median change of the observation in the rows of the mask ``where``, and in the rows after them.

    The unit is the mean change within trajectories. A median that is usual within trajectories becomes 0.
    """
    usual, rows = _spread(inside), _spread(where)
    if not len(usual):
        return 0.0, 0.0
    every = torch.cat([usual, rows, (rows + record.lanes) % record.rows])
    total = torch.zeros(len(every), dtype=torch.float64, device="cpu")
    for key in record.main:
        if record.columns[key].dtype is torch.bool or record.columns[key].dtype.is_complex:
            continue
        moved = record.at(("next", *key), every).double() - record.at(key, every).double()
        distance = moved.abs().nan_to_num(0.0, 0.0, 0.0).flatten(1).mean(1).cpu()
        if (scale := distance[: len(usual)].mean()) > 0:
            total += distance / scale  # in mean distances within trajectories
    usually, *others = total.split([len(usual), len(rows), len(rows)])
    mean = usually.mean()
    if not float(mean):
        return 0.0, 0.0
    limit = usually.quantile(0.9 if len(rows) >= 4 else 0.99)
    here, after = (float(each.median() / mean) * bool(each.median() > limit) for each in others)
    return here, after


def _one_step_rows(record: Record, ended: torch.Tensor) -> torch.Tensor:
    """Return whether each row is a trajectory of one step, ``[T, E]`` bool."""
    alone = ended & ended.roll(1, 0) & record.paired.roll(1, 0)  # false for the oldest row
    ids = record.columns.get(TRAJ_KEY)
    if ids is not None:  # rows of several lanes may alternate: count all rows with the id
        _, inverse, counts = ids[..., 0].cpu().unique(return_inverse=True, return_counts=True)
        alone |= (counts == 1)[inverse] & record.paired
    return alone
