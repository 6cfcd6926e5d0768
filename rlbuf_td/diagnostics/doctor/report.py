"""Findings of the doctor, and the report that lists them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rlbuf_td.storages.schema import show_key

Row: TypeAlias = int | tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One kind of fault.

    Attributes:
        code: one of ``rlbuf_td.diagnostics.doctor.CODES``.
        key: the key concerned, if it is one.
        rows: the first few rows concerned, as the storage indexes them: ``t``, or ``(t, e)`` with lanes.
        count: the number of rows concerned, of ``of`` that could have been.
        explanation: what was seen, and what it means; ``remedy``: what to do.
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
        return self.count / self.of if self.of else 0.0

    def __str__(self) -> str:
        title = self.code if self.key is None else f"{self.code}: {show_key(self.key)}"
        share = f"{self.share:.0%}" if self.share >= 0.1 or not self.share else f"{100 * self.share:.2g}%"
        rows = f"{self.count:,} of {self.of:,} rows ({share})"
        if self.rows:
            rows += ": " + ", ".join(map(str, self.rows)) + (" ..." if self.count > len(self.rows) else "")
        wrapped = [textwrap.fill(text, 96) for text in (self.explanation, f"Remedy: {self.remedy}")]
        return "\n".join([title, *(textwrap.indent(text, "    ") for text in (rows, *wrapped))])


@dataclass(frozen=True)
class Report:
    """The findings of :func:`~rlbuf_td.diagnostics.doctor.check`, the most serious first; false if there are none.

    Attributes:
        findings: what was found.
        rows: the number of rows read.
        shape: their shape ``[T, *lanes]``.
        skipped: checks that these rows do not allow, and why.
    """

    findings: tuple[Finding, ...]
    rows: int
    shape: tuple[int, ...]
    skipped: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        return not self.findings

    @property
    def codes(self) -> list[str]:
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
