"""What the doctor says: findings, and a report of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rlbuf_td.storages.schema import show_key

Row: TypeAlias = int | tuple[int, ...]
#: So many rows are named in a finding.
NAMED = 5


@dataclass(frozen=True)
class Finding:
    """One kind of fault.

    Attributes:
        code: its name, see :func:`~rlbuf_td.diagnostics.doctor.check`.
        key: the key that it is about, if it is about one.
        rows: the first few of the rows concerned, as the storage indexes them: ``t``, or ``(t, e)`` with lanes.
        count: how many rows there are.
        of: among how many rows.
        explanation: what was seen, and what it means.
        remedy: what to do.
    """

    code: str
    key: tuple[str, ...] | None
    rows: tuple[Row, ...]
    count: int
    of: int
    explanation: str
    remedy: str

    @property
    def share(self) -> float:
        """The share of the rows that are concerned, in [0, 1]."""
        return self.count / self.of if self.of else 0.0

    def __str__(self) -> str:
        title = self.code if self.key is None else f"{self.code}: {show_key(self.key)}"
        lines = [title, f"{self.count:,} of {self.of:,} rows ({_percent(self.share)})"]
        if self.rows:
            lines[-1] += ": " + ", ".join(map(str, self.rows)) + (" ..." if self.count > len(self.rows) else "")
        wrapped = [textwrap.fill(text, 96) for text in (self.explanation, f"Remedy: {self.remedy}")]
        body = textwrap.indent("\n".join(lines[1:] + wrapped), "    ")
        return f"{title}\n{body}"


@dataclass(frozen=True)
class Report:
    """What :func:`~rlbuf_td.diagnostics.doctor.check` has found, the gravest first; false if there is nothing.

    Attributes:
        findings: what was found.
        rows: how many rows were read.
        shape: ``[T, *lanes]`` of them.
        skipped: checks that these rows do not allow, and why.
    """

    findings: tuple[Finding, ...]
    rows: int
    shape: tuple[int, ...]
    skipped: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def codes(self) -> list[str]:
        """The codes of the findings."""
        return [finding.code for finding in self.findings]

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __getitem__(self, index: int) -> Finding:
        return self.findings[index]

    def __str__(self) -> str:
        lanes = f" ({self.shape[0]:,} steps of {self.shape[1:]} lanes)" if len(self.shape) > 1 else ""
        found = "nothing found" if self.healthy else f"{len(self)} finding{'s' * (len(self) > 1)}"
        parts = [f"{self.rows:,} rows{lanes} read: {found}", *map(str, self.findings)]
        if self.skipped:
            parts.append("\n".join(f"not checked: {what}" for what in self.skipped))
        return "\n\n".join(parts)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or not share else f"{100 * share:.2g}%"
