"""Findings and reports of the doctor, and the texts for each kind of fault.

Texts have fields in braces, such as ``{key}``; the check that finds a fault fills in
the values.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

from rlbuf_td.storages.schema import show_key

Row: TypeAlias = int | tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """A kind of fault and the rows that have it."""

    code: str  # one of `rlbuf_td.diagnostics.doctor.CODES`
    key: tuple[str, ...] | None  # the affected key, if it is a single one
    # the first few affected rows, as the storage indexes them: t, or (t, e) with lanes
    rows: tuple[Row, ...]
    count: int  # number of affected rows
    of: int  # how many were checked
    unit: str  # what `count` and `of` count, such as "rows" or "ends of trajectories"
    explanation: str  # the observed fault and its meaning
    remedy: str

    def __str__(self) -> str:
        title = self.code if self.key is None else f"{self.code}: {show_key(self.key)}"
        counts = f"{self.count:,} of {self.of:,} {self.unit} ({self._share})"
        if self.rows:
            counts += ": " + ", ".join(map(str, self.rows))
        if self.count > len(self.rows) > 0:
            counts += " ..."
        texts = (counts, self.explanation, f"Remedy: {self.remedy}")
        wrapped = [textwrap.indent(textwrap.fill(text, 76), "    ") for text in texts]
        return "\n".join([title, *wrapped])

    @property
    def _share(self) -> str:
        share = self.count / self.of if self.of else 0.0
        return f"{share:.0%}" if share >= 0.1 or not share else f"{100 * share:.2g}%"


@dataclass(frozen=True)
class Report:
    """The findings of :func:`~rlbuf_td.check`, the most serious first."""

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
        lanes = prod(self.shape[1:])
        where = f" ({self.shape[0]:,} steps of {lanes} lanes)"
        rows = f"{self.rows:,} rows{where if len(self.shape) > 1 else ''} read"
        findings = f"{len(self)} finding{'s' if len(self) > 1 else ''}"
        summary = "nothing found" if self.healthy else findings
        parts = [f"{rows}: {summary}", *map(str, self.findings)]
        if self.skipped:
            omitted = [f"not checked: {check}" for check in self.skipped]
            parts.append("\n".join(textwrap.fill(text, 80) for text in omitted))
        return "\n\n".join(parts)


class Fault(NamedTuple):
    """The texts of a kind of fault."""

    explanation: str
    remedy: str
    unit: str  # of its counts


ROWS = "rows"
INSIDE = "rows that another row of their trajectory follows"
ENDS = "ends of trajectories"
_JUMPS = "The next observation differs from the observation of the following row, although no trajectory ends here."
_ENDS = "The trajectory ends here, but the next observation equals the observation of the following row"
_DONE = "store done = terminated | truncated"
_WITH_FLAG = "rows with {name}"
_FLAG_WITHOUT_DONE = "{name} is set, but done is not: samplers read on past the end."

#: The faults by code, the most serious first.
FAULTS: dict[str, Fault] = {
    "lanes-mixed": Fault(
        _JUMPS
        + " It is another row's observation: rows are not in time order, or environments alternate in a lane.",
        "store each environment in a lane of its own, PackedStorage(..., ndim=2), and extend with batches [E, T], as "
        "collectors return them (or [T, E] with dim_extend=0); let NStepSampler compute n-step returns.",
        INSIDE,
    ),
    "trajectories-interleaved": Fault(
        "The following row has another trajectory id, although no flag is set here and rows of this trajectory come "
        "later: trajectories are stored in stretches of {mean:.1f} rows on average. n-step returns, sequences, "
        "hindsight goals and advantages end with each stretch.",
        "store each environment in a lane of its own, PackedStorage(..., ndim=2) or RolloutBuffer(num_steps, "
        "num_envs); or write more steps of one trajectory at a time; or keep the handle of rb.lane(e).",
        ROWS,
    ),
    "observation-reused": Fault(
        "The next observation equals the observation of the same row, and differs from that of the following row: the "
        "environment, or a wrapper, writes all observations to one array, so that a step changes the observation that "
        "was kept from before.",
        "keep a copy, obs = obs.copy(), before each env.step(action); GymnasiumRecorder and TorchRL's GymEnv do so.",
        INSIDE,
    ),
    "next-observation-differs": Fault(
        _JUMPS + " No other row has this observation either.",
        "store rows in time order, with each environment in a lane of its own; store both observations as the "
        "environment returned them (not one of them normalised, or n steps ahead).",
        INSIDE,
    ),
    "reset-without-done": Fault(
        _JUMPS
        + " No other row has this observation: probably the environment was reset here (or the loop was "
        "stopped), and done is not set. The trajectory then continues across the reset.",
        _DONE
        + ": a time limit also ends a trajectory. If you call reset yourself, set ('next', 'truncated') in the "
        "last row, or store ('collector', 'traj_ids').",
        INSIDE,
    ),
    "done-shifted": Fault(
        "done is set one step too {late}: the sequence of observations breaks one step {before} these rows, not at "
        "them. A learner then bootstraps from the first observation of another trajectory.",
        "store with each transition the done flag that this step returned: ('next', 'done') belongs to "
        "('next', 'observation'), not to 'observation'.",
        ENDS,
    ),
    "final-observation-lost": Fault(
        _ENDS
        + ". It is {jump:.1f} times as far from this row's observation as usual: the reset returned it. The true "
        "final observation is lost, and a truncated step bootstraps from the wrong one.",
        "store infos['final_obs'] of Gymnasium's same-step autoreset as the next observation, or let "
        "GymnasiumRecorder or TorchRL's collectors write the rows.",
        ENDS,
    ),
    "reset-row-stored": Fault(
        "The trajectory ended one row before, but these rows begin with its final observation, and their next "
        "observation is {jump:.1f} times as far away as usual: they are resets of Gymnasium's next-step autoreset, "
        "whose action has no effect, and not transitions.",
        "do not store the step that follows an end; GymnasiumRecorder omits it.",
        ENDS,
    ),
    "done-without-reset": Fault(
        _ENDS
        + ", and is as near to this row's as usual: the environment was not reset, so there was no end.",
        "store done as the environment's step returned it, and not another library's mask (1 - done); a trajectory id "
        "must not change within a trajectory.",
        ENDS,
    ),
    "terminated-without-done": Fault(_FLAG_WITHOUT_DONE, _DONE + ".", _WITH_FLAG),
    "truncated-without-done": Fault(_FLAG_WITHOUT_DONE, _DONE + ".", _WITH_FLAG),
    "done-never": Fault(
        "{seen} Values are then bootstrapped across every end. This is right only for tasks that never end.",
        _DONE + " as the environment's step returns them.",
        ROWS,
    ),
    "not-finite": Fault(
        "{key} is NaN or infinite there. One such row in a batch makes the loss NaN, and then all weights.",
        "look for a diverging simulation or a division by zero; omit such rows, or end the trajectory there.",
        ROWS,
    ),
    "out-of-bounds": Fault(
        "{key} lies outside the bounds of its space there.",
        "store what the environment returned, before any scaling; or correct the bounds, if it returns such values.",
        ROWS,
    ),
    "float64": Fault(
        "{keys}: float64, NumPy's default, takes twice the memory, and networks of float32 refuse such a batch.",
        "convert them before the first write, data[key] = data[key].float(); observations also by the environment: "
        "gymnasium.wrappers.DtypeObservation(env, np.float32), or TransformedEnv(env, DoubleToFloat()) of TorchRL.",
        ROWS,
    ),
}
