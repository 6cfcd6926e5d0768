"""Faults in the order of rows: shifted or missing end flags, lost final observations,
environments that alternate in a lane."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlbuf_td.diagnostics.doctor.record import Key, Record, Values
from rlbuf_td.diagnostics.doctor.report import Finding
from rlbuf_td.storages.episodes import StoredSegments

_SAMPLED = 256  # rows that suffice to identify the kind of a fault
_LONG = 10_000  # time steps: this many without an end are a finding
_SHORT = 8  # shorter stretches of rows are of little use
_SOME_ENDS = 8  # fewer changes of the trajectory id without a flag are no finding


def order_findings(record: Record) -> Iterator[Finding]:
    """Yield what is wrong with the order of rows and with the flags that end
    trajectories."""
    fault = _systematic_fault(record) if record.knows_ends else None
    if fault is not None:
        yield fault
    if record.knows_ends and record.ids is not None:
        yield from _interleaved(record, record.ids)
    if fault is None or fault.code != "done-shifted":
        yield from _flags_without_done(record)
    if record.knows_ends and fault is None:
        yield from _missing_ends(record)
        yield from _ends_without_reset(record)


def _systematic_fault(record: Record) -> Finding | None:
    """Return the fault that most rows have, because of which the rest means little."""
    broken = record.inside & record.differs
    inside = int(record.inside.sum())
    if int(broken.sum()) <= max(1, inside // 2):
        return _shifted(record)
    sample = _spread(broken)
    if bool((record.seen_next == record.seen)[sample].all()):
        return record.finding("observation-reused", broken)
    if _are_elsewhere(record, sample):
        return record.finding("lanes-mixed", broken)
    return record.finding("next-observation-differs", broken)


def _shifted(record: Record) -> Finding | None:
    """Return a finding if done flags are set one step too late or one step too
    early."""
    done = record.flags.get("done", record.ended)
    broken = int((record.inside & record.differs).sum())
    doubtful = max(broken, int(record.goes_on.sum()))
    for step, late, before in ((1, "late", "before"), (-1, "early", "after")):
        has_flag_beside = record.goes_on.roll(-step)
        beside = record.has_next & record.differs & ~done & has_flag_beside
        count = int(beside.sum())
        if count and 2 * count >= doubtful:
            flagged = beside.roll(step)
            return record.finding("done-shifted", flagged, late=late, before=before)
    return None


def _interleaved(record: Record, ids: Tensor) -> Iterator[Finding]:
    """Yield the finding that trajectories are stored in short stretches, because rows
    of several ones alternate."""
    is_last_of_lane = (~record.has_next).long()
    lane = is_last_of_lane.cumsum(0) - is_last_of_lane
    trajectories = torch.stack((lane, ids.long()))
    _, trajectory = trajectories.unique(dim=1, return_inverse=True)
    position = torch.arange(record.rows, device="cpu")
    last = torch.zeros_like(position)
    last.scatter_reduce_(0, trajectory, position, "amax")
    goes_on_later = record.ends & ~record.ended & (last[trajectory] > position)
    segments = StoredSegments(
        rows=record.rows,
        number=int((record.cut | ~record.has_next).sum()),
        broken=int(goes_on_later.sum()),
        ids=int(trajectory.max()) + 1,
        has_flags=False,
    )
    if segments.are_interleaved(_SHORT):
        yield record.finding(
            "trajectories-interleaved", goes_on_later, mean=segments.mean
        )


def _flags_without_done(record: Record) -> Iterator[Finding]:
    """Yield a finding for each flag, such as terminated, that is set where done is
    not."""
    done = record.flags.get("done")
    if done is None:
        return
    for name, flag in record.flags.items():
        lacking = flag & ~done
        if bool(lacking.any()):
            code = f"{name}-without-done"
            yield record.finding(code, lacking, ("next", name), name=name)


def _missing_ends(record: Record) -> Iterator[Finding]:
    """Yield a finding if observations or ids show resets at rows without an end, or if
    no trajectory ends."""
    is_endless = not bool(record.ended.any())
    broken = record.inside & record.differs & ~record.ended
    if bool(broken.any()):
        if _are_elsewhere(record, _spread(broken)):
            yield record.finding("lanes-mixed", broken)
        elif is_endless:
            seen = "The observations show resets at these rows, and no done flag is ever set."
            yield record.finding("done-never", broken, seen=seen)
        else:
            yield record.finding("reset-without-done", broken)
    elif is_endless and _ids_show_ends(record):
        seen = "Trajectory ids and observations show resets at these rows, and no done flag is ever set."
        yield record.finding("done-never", record.ends & record.differs, seen=seen)
    elif is_endless and record.shape[0] >= _LONG:
        seen = f"No trajectory ends in {record.shape[0]:,} steps."
        yield record.finding("done-never", seen=seen)


def _ends_without_reset(record: Record) -> Iterator[Finding]:
    """Yield the finding about trajectory ends whose next observation equals the
    following row's observation."""
    where = record.goes_on
    if not bool(where.any()) or _may_be_chance(record):
        return
    at_ends, after_ends = _jumps(record, where)
    if at_ends == after_ends == 0.0:
        yield record.finding("done-without-reset", where)
    elif at_ends >= after_ends:
        yield record.finding("final-observation-lost", where, jump=at_ends)
    else:
        yield record.finding("reset-row-stored", where.roll(1), jump=after_ends)


def _spread(where: Tensor) -> Tensor:
    """Return up to 256 row numbers, evenly spaced among the rows of the mask
    ``where``."""
    rows = where.nonzero()[:, 0]
    count = min(len(rows), _SAMPLED)
    last = len(rows) - 1
    return rows[
        torch.linspace(0, last, count, dtype=torch.float64, device="cpu").long()
    ]


def _are_elsewhere(record: Record, sample: Tensor) -> bool:
    """Whether most next observations of the rows in ``sample`` are the observation of a
    few other rows."""
    counts = [
        (record.seen == following).sum() for following in record.seen_next[sample]
    ]
    matches = torch.stack(counts)
    matches = matches[matches > 0]
    is_most = len(matches) >= max(1, len(sample) // 2)
    return is_most and int(matches.median()) <= 3


def _ids_show_ends(record: Record) -> bool:
    """Whether changes of the trajectory id seem to mark ends of episodes.

    No id may appear again later, and lengths must vary: equal lengths suggest that the
    data was cut into pieces.
    """
    ids = record.ids
    ends = (record.ends & record.differs).nonzero()[:, 0]
    if ids is None or len(ends) < _SOME_ENDS:
        return False
    changes = int((ids[1:] != ids[:-1]).sum())
    return ids.unique().numel() >= changes and len(ends.diff().unique()) > 1


def _may_be_chance(record: Record) -> bool:
    """Whether ``record.goes_on`` may come from observations that are equal by
    chance."""
    if 2 * int(record.goes_on.sum()) >= int(record.ends.sum()):
        return False
    repeated = record.rows - len(record.seen.unique())
    return 100 * repeated >= record.rows


def _jumps(record: Record, where: Tensor) -> tuple[float, float]:
    """Return the median change of the observation in the rows of the mask ``where``,
    and in the rows after them.

    The unit is the mean change within trajectories. A median that is usual within
    trajectories becomes 0.
    """
    inside = _spread(record.inside)
    ends = _spread(where)
    if not len(inside):
        return 0.0, 0.0
    following = (ends + 1) % record.rows
    values = record.read(torch.cat([inside, ends, following]))
    distance = torch.zeros(
        len(inside) + 2 * len(ends), dtype=torch.float64, device="cpu"
    )
    for key in _numbers(record, values):
        next_value = values[("next", *key)]
        change = next_value.double() - values[key].double()
        change = change.abs().nan_to_num(0.0, 0.0, 0.0).flatten(1).mean(1).cpu()
        scale = change[: len(inside)].mean()
        if scale > 0:
            distance += change / scale
    usual, at_ends, after_ends = distance.split([len(inside), len(ends), len(ends)])
    mean = usual.mean()
    if not float(mean):
        return 0.0, 0.0
    limit = usual.quantile(0.9 if len(ends) >= 4 else 0.99)
    medians = (at_ends.median(), after_ends.median())
    here, after = (float(x / mean) if x > limit else 0.0 for x in medians)
    return here, after


def _numbers(record: Record, values: Values) -> list[Key]:
    """Return the keys of observations whose changes can be measured."""
    # a single number may be a count
    longer = [key for key in record.observed if values[key].shape[1:].numel() > 1]
    return [
        key
        for key in longer or record.observed
        if values[key].dtype is not torch.bool and not values[key].dtype.is_complex
    ]
