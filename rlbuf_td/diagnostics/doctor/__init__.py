"""Checks of stored rows: :func:`~rlbuf_td.check`, and
``python -m rlbuf_td doctor PATH``.

Within a trajectory, the next observation of a row must equal the observation of the
following row. The next observation in a trajectory's last row must differ from the
first observation of the following trajectory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from rlbuf_td.diagnostics.doctor.record import Record, bounds_of, open_source
from rlbuf_td.diagnostics.doctor.report import FAULTS, Finding, Report
from rlbuf_td.storages.schema import show_key

__all__ = ["CODES", "Finding", "Report", "check", "main"]

_SAMPLED = 256  # rows that suffice to identify the kind of a fault
_LONG = 10_000  # time steps: this many without an end are a finding
_SHORT = 8  # shorter stretches of rows are of little use
_SOME_ENDS = 8  # fewer changes of the trajectory id without a flag are no finding
#: The codes of all findings, the most serious first.
CODES = tuple(FAULTS)


def check(
    source: object, *, space: object = None, ignore: str | Sequence[str] = ()
) -> Report:
    """Read all rows of a buffer and report faults, each with example rows and a remedy.

    The most important fault: within a trajectory, a row's next observation differs from
    the following row's observation. The check does not change the buffer.

    Args:
        source: a buffer of this package or of TorchRL; a storage of TensorDicts; a
            TensorDict of rows ``[T]`` or ``[T, E]`` in time order; or the folder of a
            dump of :meth:`ReplayBuffer.dumps`.
        space: a Gymnasium space or a TorchRL spec of the observations, an environment,
            or the name of one of Gymnasium. Observations outside the bounds of its Box
            spaces are reported.
        ignore: codes of findings to omit; ``rlbuf_td.diagnostics.doctor.CODES`` lists
            all codes.

    Returns:
        A report of the findings, the most serious first. ``report.healthy`` is true if
        there are no findings.

    Raises:
        TypeError: ``source`` or ``space`` has an unsupported type.
        ValueError: there is no environment of this name, the buffer is empty,
            ``ignore`` contains an unknown code, or the dump cannot be read (a
            CheckpointError).

    Cost: one pass over the rows, about a second for a million rows of 167 bytes.
    Memory: 40 bytes per row.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> place = torch.arange(41.0).unsqueeze(-1)
        >>> done = (torch.arange(40) % 10 == 9).unsqueeze(-1)
        >>> rows = TensorDict({"observation": place[:-1], "next": {"observation": place[1:], "done": done}}, [40])
        >>> rb = ReplayBuffer(storage=PackedStorage(40))
        >>> _ = rb.extend(rows)
        >>> report = check(rb)
        >>> report.codes, report[0].rows
        (['done-without-reset'], (9, 19, 29))
    """
    ignored = {ignore} if isinstance(ignore, str) else set(ignore)
    if not ignored <= set(CODES):
        raise ValueError(
            f"there is no finding {', '.join(sorted(ignored - set(CODES)))}; there are {', '.join(CODES)}"
        )
    bounds = {} if space is None else bounds_of(space)
    storage, writer = open_source(source)
    with (
        getattr(source, "_replay_lock", nullcontext()),
        getattr(source, "_write_lock", nullcontext()),
    ):
        record = Record(storage, writer, bounds)
        findings, wrong = [*_order_findings(record)], record.wrong.items()
        findings += [
            record.finding(code, where, record.rows, key)
            for (code, key), where in wrong
            if bool(where.any())
        ]
        if doubles := [
            key for key, value in record.kinds.items() if value.dtype is torch.float64
        ]:
            one = doubles[0] if len(doubles) == 1 else None
            findings += [
                record.finding(
                    "float64",
                    None,
                    record.rows,
                    one,
                    keys=", ".join(map(show_key, doubles)),
                )
            ]
    findings = sorted(
        (finding for finding in findings if finding.code not in ignored),
        key=lambda finding: CODES.index(finding.code),
    )
    return Report(tuple(findings), record.rows, record.shape, tuple(record.skipped))


def main(options: argparse.Namespace) -> int:
    """Print the report of a saved buffer; return 0 without findings, 1 with findings, 2
    after an error."""
    try:
        report = check(options.path, space=options.env, ignore=options.ignore)
    except (OSError, ValueError, TypeError) as error:
        print(f"cannot examine {options.path}: {error}", file=sys.stderr)
        return 2
    print(f"{options.path}: {report}")
    return 0 if report.healthy else 1


def _order_findings(record: Record) -> Iterator[Finding]:
    """Yield the faults in the order of rows."""
    flags, fault = record.flags, None
    ended = torch.stack([torch.zeros_like(record.cut), *flags.values()]).any(0)
    if record.knows_ends and not record.observed:
        record.skipped.append(
            "next observations: no key is stored both at the root and under 'next'"
        )
    elif record.knows_ends:
        broken = record.inside & record.apart
        if int(broken.sum()) > max(1, int(record.inside.sum()) // 2):
            fault = _broken(record, broken, mostly=True)
        else:
            fault = _shifted(record, flags.get("done", ended))
        if fault is not None:
            yield fault
    if record.knows_ends:
        yield from _interleaved(record, ended)
    if "done" in flags and (fault is None or fault.code != "done-shifted"):
        for name, flag in flags.items():
            lacking = flag & ~flags["done"]
            if bool(lacking.any()):
                yield record.finding(
                    f"{name}-without-done",
                    lacking,
                    int(flag.sum()),
                    ("next", name),
                    name=name,
                )
    if record.knows_ends and fault is None:
        yield from _ends(record, ended)


def _interleaved(record: Record, ended: Tensor) -> Iterator[Finding]:
    """Yield the finding that trajectories are stored in short stretches, because rows
    of several ones alternate; ``ended``: an end flag is set."""
    if record.ids is None:
        return
    lane = (~record.paired).cumsum(0) - (~record.paired).long()
    _, name = torch.stack((lane, record.ids.long())).unique(dim=1, return_inverse=True)
    position = torch.arange(record.rows, device="cpu")
    last = torch.zeros_like(position).scatter_reduce(0, name, position, "amax")
    left_off = record.ends & ~ended & (last[name] > position)
    stretches = int((record.cut | ~record.paired).sum())
    if 2 * int(left_off.sum()) > stretches and record.rows < _SHORT * stretches:
        mean = record.rows / stretches
        yield record.finding(
            "trajectories-interleaved", left_off, record.rows, mean=mean
        )


def _ends(record: Record, ended: Tensor) -> Iterator[Finding]:
    """Yield the faults at the ends of trajectories; ``ended``: an end flag is set."""
    never = not bool(ended.any())
    broken = record.inside & record.apart & ~ended
    if bool(broken.any()):
        yield _broken(record, broken, never=never)
    elif never and _ids_show_ends(record):
        seen = "Trajectory ids and observations show resets at these rows, and no done flag is ever set."
        yield record.finding(
            "done-never", record.ends & record.apart, record.rows, seen=seen
        )
    elif never and record.shape[0] >= _LONG:
        yield record.finding(
            "done-never",
            None,
            record.rows,
            seen=f"No trajectory ends in {record.shape[0]:,} steps.",
        )
    if bool(record.unbroken.any()) and _is_no_chance(record):
        yield _not_reset(record)


def _spread(where: Tensor) -> Tensor:
    """Return up to 256 row numbers, evenly spaced among the rows of the mask
    ``where``."""
    rows = where.nonzero()[:, 0]
    return rows[
        torch.linspace(
            0,
            len(rows) - 1,
            min(len(rows), _SAMPLED),
            dtype=torch.float64,
            device="cpu",
        ).long()
    ]


def _broken(
    record: Record, where: Tensor, *, mostly: bool = False, never: bool = False
) -> Finding:
    """Return the finding about rows whose next observation differs from the following
    row's observation."""
    total, sample = int(record.inside.sum()), _spread(where)
    if mostly and bool((record.there == record.here)[sample].all()):
        return record.finding("observation-reused", where, total)
    if _are_elsewhere(record, sample):
        return record.finding("lanes-mixed", where, total)
    if never and not mostly:
        seen = (
            "The observations show resets at these rows, and no done flag is ever set."
        )
        return record.finding("done-never", where, record.rows, seen=seen)
    return record.finding(
        "next-observation-differs" if mostly else "reset-without-done", where, total
    )


def _are_elsewhere(record: Record, sample: Tensor) -> bool:
    """Whether most next observations of the rows in ``sample`` are the observation of a
    few other rows."""
    matches = torch.stack(
        [(record.here == there).sum() for there in record.there[sample]]
    )
    counts = matches[matches > 0]
    return len(counts) >= max(1, len(sample) // 2) and int(counts.median()) <= 3


def _shifted(record: Record, done: Tensor) -> Finding | None:
    """Return a finding if done flags are set one step too late or one step too
    early."""
    unbroken, broken, apart = (
        record.unbroken,
        record.inside & record.apart,
        record.paired & record.apart,
    )
    for step, late, before in ((1, "late", "before"), (-1, "early", "after")):
        beside = apart & ~done & unbroken.roll(-step)
        count = int(beside.sum())
        if count and 2 * count >= max(int(broken.sum()), int(unbroken.sum())):
            return record.finding(
                "done-shifted",
                beside.roll(step),
                int(record.ends.sum()),
                late=late,
                before=before,
            )
    return None


def _ids_show_ends(record: Record) -> bool:
    """Whether changes of the trajectory id seem to mark ends of episodes.

    No id may appear again later, and lengths must vary: equal lengths suggest that the
    data was cut into pieces.
    """
    cuts, ids = (record.ends & record.apart).nonzero()[:, 0], record.ids
    if ids is None or len(cuts) < _SOME_ENDS:
        return False
    return (
        ids.unique().numel() >= int((ids[1:] != ids[:-1]).sum())
        and len(cuts.diff().unique()) > 1
    )


def _is_no_chance(record: Record) -> bool:
    """Whether ``record.unbroken`` is unlikely to come from observations that are equal
    by chance."""
    if 2 * int(record.unbroken.sum()) >= int(record.ends.sum()):
        return True
    return 100 * (record.rows - len(record.here.unique())) < record.rows


def _not_reset(record: Record) -> Finding:
    """Return the finding about trajectory ends whose next observation equals the
    following row's observation."""
    where, total = record.unbroken, int(record.ends.sum())
    here, after = _jumps(record, where)
    if not max(here, after):
        return record.finding("done-without-reset", where, total)
    if here >= after:
        return record.finding("final-observation-lost", where, total, jump=here)
    return record.finding("reset-row-stored", where.roll(1), total, jump=after)


def _jumps(record: Record, where: Tensor) -> tuple[float, float]:
    """Return the median change of the observation in the rows of the mask ``where``,
    and in the rows after them.

    The unit is the mean change within trajectories. A median that is usual within
    trajectories becomes 0.
    """
    usual, rows = _spread(record.inside), _spread(where)
    if not len(usual):
        return 0.0, 0.0
    values = record.read(torch.cat([usual, rows, (rows + 1) % record.rows]))
    total = torch.zeros(len(usual) + 2 * len(rows), dtype=torch.float64, device="cpu")
    # a single number may be a count
    main = [key for key in record.observed if values[key].shape[1:].numel() > 1]
    for key in main or record.observed:
        if values[key].dtype is torch.bool or values[key].dtype.is_complex:
            continue
        path = ("next", *key)
        moved = values[path].double() - values[key].double()
        distance = moved.abs().nan_to_num(0.0, 0.0, 0.0).flatten(1).mean(1).cpu()
        if (scale := distance[: len(usual)].mean()) > 0:
            total += distance / scale  # in mean distances within trajectories
    usually, *others = total.split([len(usual), len(rows), len(rows)])
    mean = usually.mean()
    if not float(mean):
        return 0.0, 0.0
    limit = usually.quantile(0.9 if len(rows) >= 4 else 0.99)
    here, after = (
        float(distances.median() / mean) * bool(distances.median() > limit)
        for distances in others
    )
    return here, after
