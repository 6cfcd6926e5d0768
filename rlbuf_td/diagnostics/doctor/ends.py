"""Rows at which a trajectory ends, though the next observation is what the following row begins with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlbuf_td.diagnostics.doctor.compare import hashes
from rlbuf_td.diagnostics.doctor.flow import Flow, main_keys, spread
from rlbuf_td.diagnostics.doctor.record import Key, Record
from rlbuf_td.diagnostics.doctor.report import Finding
from rlbuf_td.storages.trajectory_index import TRAJ_KEY

#: Fewer rows than this are all of one kind by chance.
FEW = 32
_SOME = 4


def is_telling(record: Record, flow: Flow) -> bool:
    """Return whether unbroken ends can be no chance: they are most of the ends, or observations hardly ever repeat."""
    if 2 * int(flow.unbroken.sum()) >= int(flow.ends.sum()):
        return True
    everywhere = hashes(record, main_keys(record), under_next=False).sort().values  # by which ends were judged
    repeats = everywhere.shape[0] - torch.unique_consecutive(everywhere).shape[0]
    return 100 * repeats < everywhere.shape[0]


def unbroken_finding(record: Record, flow: Flow, one_step: torch.Tensor) -> Finding:
    """Return what unbroken ends mean: from how far observations move there follows what happened."""
    where, of = flow.unbroken, int(flow.ends.sum())
    count, first = int(where.sum()), record.first(where)
    short = one_step | one_step.roll(-1, 0)
    here, after = _jumps(record, where, flow.inside)
    seen = "The trajectory ends here, and yet the next observation is that of the following row"
    if not max(here, after):
        if 2 * int((where & short).sum()) >= count:
            return _one_step_finding(record, one_step & (where | where.roll(1, 0)), of)
        return Finding(
            "done-without-reset",
            None,
            first,
            count,
            of,
            f"{seen}, and no further from it than within trajectories: the environment went on, and there was no end.",
            "store done as the environment's step returned it; a trajectory id must not change within a trajectory.",
        )
    if here >= after:
        return Finding(
            "final-observation-lost",
            None,
            first,
            count,
            of,
            f"{seen}, {here:.1f} times as far from its own as within trajectories: it is what the reset returned. The "
            "true final observation is lost, and a truncated step bootstraps from the wrong one.",
            "store infos['final_obs'] of Gymnasium's same-step autoreset as the next observation, or let "
            "GymnasiumRecorder or TorchRL's collectors write the rows.",
        )
    return Finding(
        "reset-row-stored",
        None,
        record.first(where.roll(1, 0)),
        count,
        of,
        "The trajectory ended with the row before, and yet these rows begin with its final observation, from which "
        f"they go {after:.1f} times as far as rows do within trajectories: they are no transitions, but resets of "
        "Gymnasium's next-step autoreset, whose action had no effect.",
        "do not store the step that follows a done; GymnasiumRecorder leaves it out.",
    )


def _jumps(record: Record, where: torch.Tensor, inside: torch.Tensor) -> tuple[float, float]:
    """Return how far observations move at some rows and at those that follow, as multiples of the usual.

    0 stands for what is no more than some usual rows do: one row in ten, or (to judge by few rows) one in a hundred.
    """
    usual, rows = spread(inside), spread(where)
    following = (rows + record.lanes) % (record.steps * record.lanes)
    groups = [torch.zeros(len(each), dtype=torch.float64) for each in (usual, rows, following)]
    for key in main_keys(record):
        if record.columns[key].dtype is torch.bool or record.columns[key].is_complex() or not len(usual):
            continue
        distances = [_distance(record, key, each) for each in (usual, rows, following)]
        scale = distances[0].mean()
        if scale > 0:
            groups = [total + distance / scale for total, distance in zip(groups, distances, strict=True)]
    if not len(usual) or not float(groups[0].mean()):
        return 0.0, 0.0
    limit = groups[0].quantile(0.9 if len(rows) >= _SOME else 0.99)
    here, after = (float(each.median() / groups[0].mean()) * bool(each.median() > limit) for each in groups[1:])
    return here, after


def _distance(record: Record, key: Key, rows: torch.Tensor) -> torch.Tensor:
    """Return how far each of some rows moves in one key, ``[n]`` float64."""
    steps, lanes = rows // record.lanes, rows % record.lanes
    begun, reached = (column[steps, lanes].double() for column in (record.columns[key], record.next(key)))
    return (reached - begun).abs().nan_to_num(0.0, 0.0, 0.0).flatten(1).mean(1).cpu()


def one_step_rows(record: Record, ended: torch.Tensor) -> torch.Tensor:
    """Return which rows are a trajectory of their own, ``[T, E]``; the oldest row's beginning is not known."""
    if record.cut is None or record.paired is None:
        return torch.zeros_like(ended)
    alone = ended & ended.roll(1, 0) & record.paired.roll(1, 0)
    ids = record.columns.get(TRAJ_KEY)
    if ids is not None:  # rows of several lanes may take turns: an id that comes again is a longer trajectory
        _, inverse, counts = ids[..., 0].cpu().unique(return_inverse=True, return_counts=True)
        alone |= (counts == 1)[inverse] & record.paired
    return alone


def mostly_one_step(record: Record, one_step: torch.Tensor) -> Iterator[Finding]:
    """Yield a finding if most trajectories have a single step."""
    trajectories = (
        int((record.cut & record.paired).sum()) if record.cut is not None and record.paired is not None else 0
    )
    count = int(one_step.sum())
    if TRAJ_KEY in record.columns:
        trajectories = record.columns[TRAJ_KEY].unique().numel()
    if count >= FEW and count >= 0.9 * trajectories:  # games of few steps end at once in half of the cases
        yield _one_step_finding(record, one_step, trajectories)


def _one_step_finding(record: Record, where: torch.Tensor, of: int) -> Finding:
    return Finding(
        "one-step-trajectories",
        None,
        record.first(where),
        int(where.sum()),
        of,
        "These trajectories have a single step, of as many trajectories that end. That is right for bandits; elsewhere "
        "done is set twice, an id changes with each row, or the environment is reset after each step.",
        "set done in the last row of a trajectory only, and keep its id from the first row to the last.",
    )
