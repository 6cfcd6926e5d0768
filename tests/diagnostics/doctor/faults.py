"""Faults to plant into healthy rows ``[T, E]``: each is named by the finding that it must give."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict

Fault = Callable[[TensorDict], TensorDict]
FLAGS = ("done", "terminated", "truncated")


def flags(rows: TensorDict, **values: torch.Tensor) -> TensorDict:
    for name, value in values.items():
        rows["next", name] = value.clone()
    return rows


def shifted(by: int, *names: str) -> Fault:
    return lambda rows: flags(rows, **{name: rows["next", name].roll(by, 0) for name in names})


def without_flags(rows: TensorDict) -> TensorDict:
    return flags(rows, **{name: torch.zeros_like(rows["next", name]) for name in FLAGS})


def same_step_autoreset(rows: TensorDict) -> TensorDict:
    """Store as next observation what ``step`` returned: at an end, the first one of the next episode."""
    following = rows.exclude("next", "action", "done", "collector").apply(lambda leaf: leaf.roll(-1, 0))
    ends = rows["next", "done"].squeeze(-1).clone()
    ends[-1] = False
    rows["next"].update(torch.where(ends, following, rows["next"].select(*following.keys())))
    return rows


def time_limit_left_out(rows: TensorDict) -> TensorDict:
    return flags(rows, done=rows["next", "terminated"], truncated=torch.zeros_like(rows["next", "done"]))


def next_step_autoreset(rows: TensorDict) -> TensorDict:
    """Store the step after an end, which resets, as a transition; of one lane."""
    lane, stored = rows[:, 0], []
    for t in range(len(lane) - 1):
        stored.append(lane[t])
        if bool(lane["next", "done"][t]):
            reset = lane[t + 1].clone()
            reset.update(lane[t]["next"].exclude("reward", *FLAGS))
            reset["next"].update(lane[t + 1].exclude("next", "action", "done"))
            reset["next"].update({name: torch.zeros(1, dtype=torch.bool) for name in FLAGS})
            reset["next", "reward"] = torch.zeros(1)
            stored.append(reset)
    return torch.stack(stored)[:, None]


def done_twice(rows: TensorDict) -> TensorDict:
    """Set done one step before the end, too: the last step is then a trajectory of its own."""
    done = rows["next", "done"]
    return flags(rows, done=done | done.roll(-1, 0))


def done_within(rows: TensorDict) -> TensorDict:
    done = rows["next", "done"][:, 0, 0]
    alone = [t for t in range(5, len(done) - 5) if not done[t - 5 : t + 5].any()]
    rows["next", "done"][alone[-1], 0] = True
    return rows


def interleaved(rows: TensorDict) -> TensorDict:
    return rows.reshape(-1)[:, None]


def in_pieces(rows: TensorDict) -> TensorDict:
    """Flatten batches [E, T] of 50 steps, as a collector gives them, without ids."""
    return torch.cat([piece.transpose(0, 1).reshape(-1) for piece in rows.split(50)])[:, None]


def transposed(rows: TensorDict) -> TensorDict:
    return rows[: 10 * (len(rows) // 10)].transpose(0, 1).contiguous()


def lanes_shuffled(rows: TensorDict) -> TensorDict:
    lanes = rows.shape[1]
    return torch.cat([piece[:, torch.arange(lanes).roll(j)] for j, piece in enumerate(rows.split(50))])


def rows_shuffled(rows: TensorDict) -> TensorDict:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def two_steps_ahead(rows: TensorDict) -> TensorDict:
    """Store a next observation that is none: of another scale."""
    seen = rows["next"].exclude("reward", *FLAGS)
    rows["next"].update(seen.apply(lambda leaf: 3 * leaf + 1 if leaf.is_floating_point() else leaf))
    return rows


def one_array(rows: TensorDict) -> TensorDict:
    """Store what is left of an observation after a step that writes the next one to the same array."""
    rows.update(rows["next"].exclude("reward", *FLAGS))
    return rows


#: The fault, the number of lanes that it needs (0: any), and the code of its finding.
FAULTS: dict[str, tuple[Fault, int, str]] = {
    "done late": (shifted(1, "done"), 0, "done-shifted"),
    "done early": (shifted(-1, "done"), 0, "done-shifted"),
    "all flags late": (shifted(1, *FLAGS), 0, "done-shifted"),
    "all flags early": (shifted(-1, *FLAGS), 0, "done-shifted"),
    "done never": (without_flags, 0, "done-never"),
    "done always": (lambda rows: flags(rows, done=torch.ones_like(rows["next", "done"])), 0, "done-always"),
    "time limit left out": (time_limit_left_out, 0, "reset-without-done"),
    "terminated without done": (lambda rows: flags(rows, done=rows["next", "truncated"]), 0, "terminated-without-done"),
    "truncated without done": (lambda rows: flags(rows, done=rows["next", "terminated"]), 0, "truncated-without-done"),
    "same-step autoreset": (same_step_autoreset, 0, "final-observation-lost"),
    "next-step autoreset": (next_step_autoreset, 1, "reset-row-stored"),
    "done twice": (done_twice, 0, "one-step-trajectories"),
    "done within": (done_within, 0, "done-without-reset"),
    "interleaved": (interleaved, 3, "lanes-mixed"),
    "pieces": (in_pieces, 3, "lanes-mixed"),
    "transposed": (transposed, 12, "lanes-mixed"),
    "lanes shuffled": (lanes_shuffled, 3, "lanes-mixed"),
    "rows shuffled": (rows_shuffled, 1, "lanes-mixed"),
    "one array": (one_array, 0, "observation-reused"),
    "another scale": (two_steps_ahead, 0, "next-observation-differs"),
}
