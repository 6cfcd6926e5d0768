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
from contextlib import ExitStack
from os import PathLike

import torch

from rlbuf_td.diagnostics.doctor.bounds import bounds_of
from rlbuf_td.diagnostics.doctor.order import order_findings
from rlbuf_td.diagnostics.doctor.record import Record, open_source
from rlbuf_td.diagnostics.doctor.report import FAULTS, Finding, Report
from rlbuf_td.storages import PackedStorage
from rlbuf_td.storages.schema import show_key

__all__ = ["CODES", "Finding", "Report", "check", "main"]

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
            TensorDict of rows ``[T]`` or ``[T, E]`` in time order; or a folder: that of
            a dump of :meth:`ReplayBuffer.dumps`, or of rows with ``reopen=True`` that
            no process has open. This opens and closes such rows as their next process
            would.
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
        RuntimeError: the rows of ``reopen=True`` are open in a process.

    Cost: one pass over the rows, about a second for a million rows of 167 bytes.
    Memory: 40 bytes per row.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from rlbuf_td import PackedStorage, ReplayBuffer
        >>> position = torch.arange(41.0).unsqueeze(-1)
        >>> done = (torch.arange(40) % 10 == 9).unsqueeze(-1)
        >>> rows = TensorDict({"observation": position[:-1], "next": {"observation": position[1:], "done": done}}, [40])
        >>> rb = ReplayBuffer(storage=PackedStorage(40))
        >>> _ = rb.extend(rows)
        >>> report = check(rb)
        >>> report.codes, report[0].rows
        (['done-without-reset'], (9, 19, 29))
    """
    ignored = {ignore} if isinstance(ignore, str) else set(ignore)
    unknown = sorted(ignored - set(CODES))
    if unknown:
        raise ValueError(
            f"there is no finding {', '.join(unknown)}; there are {', '.join(CODES)}"
        )
    bounds = {} if space is None else bounds_of(space)
    storage, writer = open_source(source)
    with ExitStack() as stack:
        for lock in ("_replay_lock", "_write_lock"):
            if hasattr(source, lock):
                stack.enter_context(getattr(source, lock))
        if isinstance(storage, PackedStorage) and isinstance(source, str | PathLike):
            stack.callback(storage.close)
        record = Record(storage, writer, bounds)
        findings = [*order_findings(record), *_value_findings(record)]
    findings = [finding for finding in findings if finding.code not in ignored]
    findings.sort(key=lambda finding: CODES.index(finding.code))
    return Report(tuple(findings), record.rows, record.shape, tuple(record.skipped))


def _value_findings(record: Record) -> Iterator[Finding]:
    """Yield the faults in the values of single rows."""
    for (code, key), where in record.wrong.items():
        if bool(where.any()):
            yield record.finding(code, where, key)
    doubles = [
        key for key, value in record.example.items() if value.dtype is torch.float64
    ]
    if doubles:
        key = doubles[0] if len(doubles) == 1 else None
        yield record.finding("float64", key=key, keys=", ".join(map(show_key, doubles)))


def main(options: argparse.Namespace) -> int:
    """Print the report of a saved buffer; return 0 without findings, 1 with findings, 2
    after an error."""
    try:
        report = check(options.path, space=options.env, ignore=options.ignore)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        print(f"cannot examine {options.path}: {error}", file=sys.stderr)
        return 2
    print(f"{options.path}: {report}")
    return 0 if report.healthy else 1
