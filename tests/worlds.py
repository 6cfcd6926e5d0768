"""A small world of lanes with goals, rewards and ends, its whole history, and what a batch of it must hold.

:class:`World` fills a buffer and remembers every row. :func:`expected` says what a batch of given rows holds, from the
definitions alone: in Python, row by row, in float64.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ReplayBuffer
from tests.histories import History

Key = tuple[str, ...]
Cell = tuple[int, int]  # slot and lane
Fields = dict[Key, Any]  # of one row: numbers, or lists of numbers
Often = tuple[float, float, float]

GOAL, NEXT_GOAL, OUTCOME = ("desired_goal",), ("next", "desired_goal"), ("next", "achieved_goal")
REWARD = ("next", "reward")
DONE, TERMINATED, TRUNCATED = ("next", "done"), ("next", "terminated"), ("next", "truncated")
INIT = ("is_init",)


class World:
    """Lanes of transitions: what is written is random, unique, and remembered.

    ``often``: how likely a trajectory is to terminate, to be truncated, and to be cut by another id, with each row.
    """

    def __init__(
        self, rb: TensorDictReplayBuffer, steps: int, lanes: int, seed: int, often: Often = (0.08, 0.05, 0.03)
    ) -> None:
        self.rb, self.lanes, self.rng, self.often = rb, lanes, random.Random(seed), often
        self.history = History(steps, lanes)
        self.time = self.begun = 0
        self.fresh, self.ids = [True] * lanes, list(range(lanes))
        self.outcomes: dict[tuple[float, ...], Cell] = {}
        self.reached = [[-1.0, float(lane)] for lane in range(lanes)]

    @classmethod
    def of(
        cls, sampler: Any, steps: int, lanes: int, fill: float, buffer: Any = ReplayBuffer, seed: int = 0, **parts: Any
    ) -> World:
        """Return the world of a new buffer in which ``fill * steps`` time steps have been written."""
        often = {"often": parts.pop("often")} if "often" in parts else {}
        storage = parts.pop("storage", PackedStorage)(steps * lanes, ndim=2 if lanes > 1 else 1)
        made = cls(buffer(storage=storage, sampler=sampler, **parts), steps, lanes, seed, **often)
        made.fill(max(2, round(fill * steps)))
        return made

    def _row(self, lane: int) -> Fields:
        rng = self.rng
        if rng.random() < self.often[2]:
            self.fresh[lane] = True
        if self.fresh[lane]:
            self.ids[lane] += self.lanes
        terminated, truncated = (rng.random() < often for often in self.often[:2])
        here = [float(self.time), float(lane)]
        outcome = [self.time + rng.random() / 2, float(lane)]
        fields: Fields = {
            ("observation",): here,
            ("achieved_goal",): self.reached[lane],
            GOAL: [rng.uniform(1e4, 2e4), float(lane)],
            ("action",): rng.randrange(3),
            ("hidden",): [rng.random() for _ in range(3)],
            INIT: [self.fresh[lane]],
            ("collector", "traj_ids"): self.ids[lane],
            ("next", "observation"): [here[0] + 0.5, here[1]],
            OUTCOME: outcome,
            REWARD: [rng.uniform(-1, 1)],
            TERMINATED: [terminated],
            TRUNCATED: [truncated],
            DONE: [terminated or truncated],
        }
        fields[NEXT_GOAL] = fields[GOAL]
        self.fresh[lane] = terminated or truncated
        self.reached[lane] = outcome
        return fields

    def write(self, steps: int) -> None:
        rows = []
        for _ in range(steps):
            rows.append([self._row(lane) for lane in range(self.lanes)])
            self.time += 1
        lead = [steps, self.lanes]
        columns = {key: torch.tensor([[row[key] for row in step] for step in rows]) for key in rows[0][0]}
        data = TensorDict(columns, lead)
        for step in range(steps):  # as the buffer sees the numbers, in float32
            seen = [{key: data[key][step, lane].tolist() for key in rows[0][0]} for lane in range(self.lanes)]
            done = [row[DONE][0] for row in seen]
            slot = (self.time - self.begun - steps + step) % self.history.steps
            self.history.put(slot, done, [row["collector", "traj_ids"] for row in seen], seen)
            self.outcomes |= {tuple(row[OUTCOME]): (slot, lane) for lane, row in enumerate(seen)}
        self.rb.extend(data[:, 0] if self.rb.storage.ndim == 1 else data.transpose(0, 1).contiguous())

    def empty(self) -> None:
        """Empty the buffer; what is written next lies at its beginning."""
        self.rb.empty()
        self.history.forget()
        self.begun = self.time

    def fill(self, steps: int) -> None:
        while self.time < steps:
            left = steps - self.time
            part = min(left, self.rng.randint(2, 9))
            self.write(left if left - part < 2 else part)

    def cell(self, index: Any) -> Cell:
        """Return a row that a batch's index names, as slot and lane."""
        slot, *lane = index if isinstance(index, list) else [index]
        return slot, lane[0] if lane else 0

    def flat(self, cell: Cell) -> int:
        return cell[0] * self.lanes + cell[1]

    def fields(self, cell: Cell) -> Fields:
        return dict(self.history.at(*cell).values)

    def later(self, cell: Cell) -> Iterator[Cell]:
        yield cell
        for slot in self.history.later(*cell):
            yield slot, cell[1]

    def trajectory(self, cell: Cell) -> list[Cell]:
        return [(slot, cell[1]) for slot in self.history.trajectory(*cell)]

    def allowed(self, cell: Cell, strategy: str) -> list[Cell]:
        if strategy == "future":
            return list(self.later(cell))
        if strategy == "final":
            return list(self.later(cell))[-1:]
        return self.trajectory(cell) if strategy == "episode" else self.history.written()

    def reached_at(self, goal: list[float]) -> Cell:
        """Return the row whose outcome a goal is."""
        cell = self.outcomes.get(tuple(goal))
        assert cell is not None, f"{goal} was never reached"
        assert self.fields(cell)[OUTCOME] == goal, f"{goal} was reached at a row that is not stored any more"
        return cell


def reward_fn(batch: TensorDictBase) -> torch.Tensor:
    """Return minus the distance, the more the greater the action, ``[B]``."""
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).abs().sum(-1)
    return -distance * (1 + batch["action"]) / 8


def terminated_fn(batch: TensorDictBase) -> torch.Tensor:
    """Return whether the goal is reached, ``[B]`` bool."""
    return (batch["next", "achieved_goal"] == batch["desired_goal"]).all(-1)


def relabelled(fields: Fields, goal: list[float] | None) -> Fields:
    """Return a transition under another goal, with its reward and end; ``None``: as it is."""
    if goal is None:
        return dict(fields)
    distance = sum(abs(a - b) for a, b in zip(fields[OUTCOME], goal, strict=True))
    terminated = fields[OUTCOME] == goal
    return fields | {
        GOAL: goal,
        NEXT_GOAL: goal,
        REWARD: [-distance * (1 + fields["action",]) / 8],
        TERMINATED: [terminated],
        DONE: [terminated or fields[TRUNCATED][0]],
    }


@dataclass(frozen=True)
class Recipe:
    """Which wrappers stand around the sampler, and their arguments."""

    hindsight: bool = False
    n_step: bool = False
    sequence: bool = False
    strategy: str = "future"
    her_ratio: float = 0.6
    future_gamma: float = 1.0
    n: int = 3
    gamma: float = 0.9
    length: int = 4
    burn_in: int = 2
    boundary: Literal["pad", "shift", "strict"] = "pad"

    @property
    def window(self) -> int:
        return self.length + self.burn_in if self.sequence else 1


def transition(world: World, cell: Cell, goal: list[float] | None, recipe: Recipe) -> Fields:
    if not recipe.n_step:
        return relabelled(world.fields(cell), goal)
    total, first = 0.0, relabelled(world.fields(cell), goal)
    for k, here in enumerate(world.later(cell)):
        last = relabelled(world.fields(here), goal)
        total += recipe.gamma**k * last[REWARD][0]
        if k + 1 == recipe.n or last[DONE][0]:
            break
    following = {key: value for key, value in last.items() if key[0] == "next"}
    return first | following | {REWARD: [total], ("steps_to_next_obs",): [k + 1]}


def window(world: World, anchor: Cell, recipe: Recipe) -> tuple[list[Cell], list[bool]]:
    """Return the rows of an anchor's window, and which of them are real."""
    whole = world.trajectory(anchor)
    at = whole.index(anchor)
    if recipe.boundary == "shift":
        at -= min(max(0, at + recipe.length - len(whole)), at)
    wanted = range(at - recipe.burn_in, at + recipe.length)
    real = [0 <= step < len(whole) for step in wanted]
    if recipe.boundary == "strict":
        assert all(real)
    return [whole[min(max(step, 0), len(whole) - 1)] for step in wanted], real


def sequence(world: World, anchor: Cell, goal: list[float] | None, recipe: Recipe) -> list[Fields]:
    cells, real = window(world, anchor, recipe)
    first, last = real.index(True), len(real) - 1 - real[::-1].index(True)
    rows = []
    for j, cell in enumerate(cells):
        row = transition(world, cell, goal, recipe)
        row[INIT] = [row[INIT][0] or j in (0, first)]
        for key in (TRUNCATED, DONE):
            row[key] = [row[key][0] or j == last]
        row[("index",)] = cell
        row[("mask",)], row[("burn_in_mask",)], row[("anchor_index",)] = real[j], j < recipe.burn_in, anchor
        rows.append(row)
    return rows


def expected(
    world: World, anchors: Sequence[Cell], goals: Sequence[list[float] | None], recipe: Recipe
) -> list[Fields]:
    """Return all rows of a batch, given the rows drawn and the goal of each."""
    rows: list[Fields] = []
    for anchor, goal in zip(anchors, goals, strict=True):
        if recipe.sequence:
            part = sequence(world, anchor, goal, recipe)
        else:
            part = [transition(world, anchor, goal, recipe) | {("index",): anchor}]
        if recipe.hindsight:
            part = [row | {("relabeled",): goal is not None} for row in part]
        rows += part
    return rows
