"""Findings and reports of the doctor, with a title, an explanation and a remedy for each code.

The check that finds a fault fills in the words in braces.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rlbuf_td.storages.schema import show_key

Row: TypeAlias = int | tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One kind of fault."""

    code: str  # one of `rlbuf_td.diagnostics.doctor.CODES`
    key: tuple[str, ...] | None  # the affected key, if it is a single one
    rows: tuple[Row, ...]  # the first few affected rows, as the storage indexes them: t, or (t, e) with lanes
    count: int  # number of affected rows
    of: int  # number of rows checked
    explanation: str  # the observed fault and its meaning
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
    """The findings of :func:`~rlbuf_td.diagnostics.doctor.check`, the most serious first; false if there are none."""

    findings: tuple[Finding, ...]
    rows: int  # the number of rows read
    shape: tuple[int, ...]  # [T, *lanes]
    skipped: tuple[str, ...] = ()  # omitted checks, and the reasons

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


class Fault(NamedTuple):
    """The texts of a finding."""

    summary: str
    explanation: str
    remedy: str


_JUMPS = "The next observation is not the following row's observation, though the trajectory goes on there."
_ENDS = "The trajectory ends here, and yet the next observation is that of the following row"
_DONE = "store done = terminated | truncated"
_FLAG_WITHOUT_DONE = "{name} is set but done is not (counted among rows with {name}): samplers continue past the end."

#: The faults by code, the most serious first.
FAULTS = {
    "lanes-mixed": Fault("next observations lead to other rows than the following ones", _JUMPS + " {place}", "{way}"),
    "next-observation-differs": Fault(
        "next observations lead nowhere",
        _JUMPS + " It is found nowhere else in the buffer either.",
        "store rows in the order of time, one lane after the other in its own column; store both observations as "
        "the environment gave them (not one of them normalised, or n steps ahead).",
    ),
    "reset-without-done": Fault(
        "the environment was reset, and done is not set",
        _JUMPS + " It is no other row's observation: the environment seems to have been reset here (or the loop to "
        "have stopped), and done is not set. Trajectories run across the reset.",
        _DONE + ": a time limit ends a trajectory too. If you reset by hand, set ('next', 'truncated') in the last "
        "row, or store ('collector', 'traj_ids').",
    ),
    "done-shifted": Fault(
        "done is set one step late or early",
        "done is set one step too {late}: the observations break off one step {before} these rows, and go on at them. "
        "A learner then bootstraps from the first observation of another trajectory.",
        "store with each transition the done flag that this step returned: ('next', 'done') belongs to "
        "('next', 'observation'), not to 'observation'.",
    ),
    "final-observation-lost": Fault(
        "at an end, the next observation is what the reset returned",
        _ENDS + ", {jump:.1f} times as far from its own as within trajectories: it is what the reset returned. The "
        "true final observation is lost, and a truncated step bootstraps from the wrong one.",
        "store infos['final_obs'] of Gymnasium's same-step autoreset as the next observation, or let "
        "GymnasiumRecorder or TorchRL's collectors write the rows.",
    ),
    "reset-row-stored": Fault(
        "the reset of an autoreset is stored as a transition",
        "The trajectory ended with the row before, and yet these rows begin with its final observation, from which "
        "they go {jump:.1f} times as far as rows do within trajectories: they are no transitions, but resets of "
        "Gymnasium's next-step autoreset, whose action had no effect.",
        "do not store the step that follows a done; GymnasiumRecorder leaves it out.",
    ),
    "done-without-reset": Fault(
        "done is set, and the trajectory goes on",
        _ENDS + ", and no further from it than within trajectories: the environment went on, and there was no end.",
        "store done as the environment's step returned it; a trajectory id must not change within a trajectory.",
    ),
    "terminated-without-done": Fault("terminated is set, and done is not", _FLAG_WITHOUT_DONE, _DONE + "."),
    "truncated-without-done": Fault("truncated is set, and done is not", _FLAG_WITHOUT_DONE, _DONE + "."),
    "done-never": Fault(
        "no trajectory ever ends",
        "{seen} Values are then bootstrapped across every end. That is right for tasks without end only.",
        _DONE + " as the environment's step returns them.",
    ),
    "done-always": Fault(
        "every row ends a trajectory",
        "done is set in every row, so that no value is ever bootstrapped. That is right for bandits only.",
        "store the flag of each step; check that it is not the mask of another library (1 - done, or 'discount').",
    ),
    "one-step-trajectories": Fault(
        "trajectories of a single step",
        "These trajectories have a single step, of as many trajectories that end. That is right for bandits; elsewhere "
        "done is set twice, an id changes with each row, or the environment is reset after each step.",
        "set done in the last row of a trajectory only, and keep its id from the first row to the last.",
    ),
    "not-finite": Fault(
        "an observation, a reward or an action is NaN or infinite",
        "{key} is NaN or infinite there. One such row in a batch makes the loss NaN, and then the network.",
        "look for a diverging simulation or a division by zero; leave such rows out, or end the trajectory there.",
    ),
    "out-of-bounds": Fault(
        "an observation lies outside its space",
        "{key} lies outside the bounds of its space there.",
        "store what the environment returned, before any scaling; or correct the bounds, if it returns such values.",
    ),
    "constant": Fault(
        "a column of an observation or action never changes",
        "{key} has the same value ({value:g}) in every row: {columns}.",
        "if a sensor or a wrapper should have filled it, look there; else leave it out, which saves memory.",
    ),
    "float-image": Fault(
        "images are stored as floats",
        "{key} holds images as {dtype}: {size} times the memory that they need, and the bytes of each batch.",
        "store them as uint8, as the environment gives them, and convert the batch: "
        "rb.append_transform(ToTensorImage(...)), or batch[key].float() / 255.",
    ),
    "never-sampled": Fault(
        "most rows are never drawn",
        "These rows have never been drawn, though rows are drawn {mean:.1f} times on the average.",
        "lower alpha, look for outliers among the TD errors (RankSampler does not mind them), and check that "
        "priorities are updated after every batch.",
    ),
    "stale-priorities": Fault(
        "priorities are not updated",
        "These rows have been drawn, and still have the priority with which they entered: replay is uniform.",
        "after each batch put the TD errors into it (TorchRL's losses do, under priority_key) and call "
        "rb.update_tensordict_priority(batch).",
    ),
}
