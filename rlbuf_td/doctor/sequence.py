"""The order of rows, and the flags that say where trajectories end."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from rlbuf_td.doctor.breaks import broken_finding, never_finding
from rlbuf_td.doctor.ends import FEW, is_telling, mostly_one_step, one_step_rows, unbroken_finding
from rlbuf_td.doctor.flow import Flow, flow_of
from rlbuf_td.doctor.record import Record
from rlbuf_td.doctor.report import Finding

# A lane that does not end in so many steps is worth a word.
_LONG = 10_000


def sequence_findings(record: Record) -> Iterator[Finding]:
    """Yield what is wrong with the order of rows, and with the flags."""
    done, flags = record.flag("done"), [record.flag("terminated"), record.flag("truncated")]
    flow = flow_of(record) if record.observed else None
    if flow is None and record.paired is not None and record.cut is not None:
        record.skipped.append("next observations: no key is stored both at the root and under 'next'")
    shifted = torch.zeros(record.steps, record.lanes, dtype=torch.bool)
    mixed = False
    if flow is not None:
        mixed = int(flow.broken.sum()) > max(1, int(flow.inside.sum()) // 2)
        if mixed:
            yield broken_finding(record, flow.broken, flow, mostly=True)
        else:
            shifted = yield from _shift(record, flow)
    if done is not None:
        for name, flag in zip(("terminated", "truncated"), flags, strict=True):
            if flag is not None and bool((flag & ~done & ~shifted).any()):
                yield _flag_without_done(record, name, flag & ~done & ~shifted, int(flag.sum()))
    if mixed or record.cut is None or record.paired is None:
        return
    said = [flag for flag in (done, *flags) if flag is not None]
    ended = torch.stack(said).any(0) if said else torch.zeros_like(shifted)
    yield from _ends(record, flow, ended, bool(shifted.any()))


def _shift(record: Record, flow: Flow) -> Generator[Finding, None, torch.Tensor]:
    """Yield a finding if done flags lie one step beside the breaks, and return the rows that this explains."""
    explained = torch.zeros_like(flow.broken)
    for step, word in ((1, "late"), (-1, "early")):
        beside = flow.broken & flow.unbroken.roll(-step, 0)
        count = int(beside.sum())
        if not count or 2 * count < int(flow.broken.sum()):
            continue
        flagged = beside.roll(step, 0)
        yield Finding(
            "done-shifted",
            None,
            record.first(flagged),
            count,
            int(flow.ends.sum()),
            f"done is set one step too {word}: the observations break off one step "
            f"{'before' if step > 0 else 'after'} these rows, and go on at them. A learner then bootstraps from the "
            "first observation of another trajectory.",
            "store with each transition the done flag that this step returned: ('next', 'done') belongs to "
            "('next', 'observation'), not to 'observation'.",
        )
        explained |= flow.broken | flow.unbroken
        flow.broken, flow.unbroken = torch.zeros_like(explained), torch.zeros_like(explained)
    return explained


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


def _ends(record: Record, flow: Flow | None, ended: torch.Tensor, is_shifted: bool) -> Iterator[Finding]:
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
    elif not bool(ended.any()) and record.steps >= _LONG:
        yield never_finding(record, torch.zeros_like(ended), f"No trajectory ends in {record.steps:,} steps.")
    if flow is not None and bool(flow.unbroken.any()) and is_telling(record, flow):
        yield unbroken_finding(record, flow, one_step)
    elif not is_shifted:
        yield from mostly_one_step(record, one_step)
