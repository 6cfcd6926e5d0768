"""The order of rows, and the flags that say where trajectories end."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from rlbuf_td.diagnostics.doctor.breaks import broken_finding, never_finding
from rlbuf_td.diagnostics.doctor.ends import FEW, is_telling, mostly_one_step, one_step_rows, unbroken_finding
from rlbuf_td.diagnostics.doctor.flow import Flow, flow_of
from rlbuf_td.diagnostics.doctor.record import Record
from rlbuf_td.diagnostics.doctor.report import Finding
from rlbuf_td.storages.trajectory_index import TRAJ_KEY

# A lane that does not end in so many steps is worth a word.
_LONG = 10_000
# So many ids must be over without a flag.
_SOME_ENDS = 8


def sequence_findings(record: Record) -> Iterator[Finding]:
    """Yield what is wrong with the order of rows, and with the flags."""
    done, flags = record.flag("done"), [record.flag("terminated"), record.flag("truncated")]
    flow = flow_of(record) if record.observed else None
    if flow is None and record.paired is not None and record.cut is not None:
        record.skipped.append("next observations: no key is stored both at the root and under 'next'")
    said = [flag for flag in (done, *flags) if flag is not None]
    ended = torch.stack(said).any(0) if said else torch.zeros(record.steps, record.lanes, dtype=torch.bool)
    mixed = shifted = False
    if flow is not None:
        mixed = int(flow.broken.sum()) > max(1, int(flow.inside.sum()) // 2)
        if mixed:
            yield broken_finding(record, flow.broken, flow, mostly=True)
        else:
            shifted = yield from _shift(record, flow, ended if done is None else done)
    if done is not None and not shifted:
        for name, flag in zip(("terminated", "truncated"), flags, strict=True):
            if flag is not None and bool((flag & ~done).any()):
                yield _flag_without_done(record, name, flag & ~done, int(flag.sum()))
    if record.cut is not None and record.paired is not None and not mixed and not shifted:
        yield from _ends(record, flow, ended)


def _shift(record: Record, flow: Flow, done: torch.Tensor) -> Generator[Finding, None, bool]:
    """Yield a finding if done flags lie one step beside the breaks, and return whether they do."""
    for step, word in ((1, "late"), (-1, "early")):
        beside = flow.apart & ~done & flow.unbroken.roll(-step, 0)
        count = int(beside.sum())
        if not count or 2 * count < max(int(flow.broken.sum()), int(flow.unbroken.sum())):
            continue
        yield Finding(
            "done-shifted",
            None,
            record.first(beside.roll(step, 0)),
            count,
            int(flow.ends.sum()),
            f"done is set one step too {word}: the observations break off one step "
            f"{'before' if step > 0 else 'after'} these rows, and go on at them. A learner then bootstraps from the "
            "first observation of another trajectory.",
            "store with each transition the done flag that this step returned: ('next', 'done') belongs to "
            "('next', 'observation'), not to 'observation'.",
        )
        return True
    return False


def _flag_without_done(record: Record, name: str, where: torch.Tensor, of: int) -> Finding:
    return Finding(
        f"{name}-without-done",
        ("next", name),
        record.first(where),
        int(where.sum()),
        of,
        f"{name} is set and done is not, of as many rows with {name}. Samplers that need trajectories go by done, and "
        "run across the end.",
        "store done = terminated | truncated.",
    )


def _ends(record: Record, flow: Flow | None, ended: torch.Tensor) -> Iterator[Finding]:
    """Yield what is wrong with the ends of trajectories."""
    rows, everything = ended.numel(), bool(ended.all())
    one_step = one_step_rows(record, ended)
    if everything and rows >= FEW:
        yield Finding(
            "done-always",
            None,
            record.first(ended),
            rows,
            rows,
            "done is set in every row, so that no value is ever bootstrapped. That is right for bandits only.",
            "store the flag of each step; check that it is not the mask of another library (1 - done, or 'discount').",
        )
        return
    broken = torch.zeros_like(ended) if flow is None else flow.broken & ~ended
    if flow is not None and bool(broken.any()):
        yield broken_finding(record, broken, flow, mostly=False, never=not bool(ended.any()))
    elif flow is not None and not bool(ended.any()) and _ids_tell_of_ends(record, flow):
        seen = "Trajectory ids and observations show resets at these rows, and no done flag is ever set."
        yield never_finding(record, flow.ends & flow.apart, seen)
    elif not bool(ended.any()) and record.steps >= _LONG:
        yield never_finding(record, torch.zeros_like(ended), f"No trajectory ends in {record.steps:,} steps.")
    if flow is not None and bool(flow.unbroken.any()) and is_telling(record, flow):
        yield unbroken_finding(record, flow, one_step)
    else:
        yield from mostly_one_step(record, one_step)


def _ids_tell_of_ends(record: Record, flow: Flow) -> bool:
    """Return whether trajectory ids show ends, rather than the pieces in which several lanes lie one after the other.

    An id that is over does not come again, and trajectories hardly have all the same length.
    """
    cuts = (flow.ends & flow.apart).T.flatten().nonzero()[:, 0]
    ids = record.columns.get(TRAJ_KEY)
    if ids is None or len(cuts) < _SOME_ENDS:
        return False
    runs = int((ids[1:] != ids[:-1]).sum()) + record.lanes
    return int(ids.unique().numel()) >= runs - record.lanes and len(cuts.diff().unique()) > 1
