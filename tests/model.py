"""What a buffer must hold and give, in plain Python: the one oracle of the tests.

A :class:`Model` is told of everything that a buffer is told. It keeps a deque of rows
per lane, caches nothing, and answers each question by walking from row to row.
:func:`expected` says what a batch of given rows must hold. :class:`World` makes random
rows and writes them to a buffer and its model. :func:`assert_holds` and
:func:`assert_batch` compare. ``copy.deepcopy(model)`` is a saved state.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlbuf_td import PackedStorage, ReplayBuffer, TrajectoryIndex

Key = tuple[str, ...]
GROUP = "team"  # of agents
TO_GO = ("reward_to_go",)
# of one row: numbers, or lists of numbers, all of them exact in float32
Fields = dict[Key, Any]
# how likely a row terminates its episode, truncates it, begins another id
Often = tuple[float, float, float]

GOAL, NEXT_GOAL, OUTCOME = (
    ("desired_goal",),
    ("next", "desired_goal"),
    ("next", "achieved_goal"),
)
REWARD, INIT, TRAJ = ("next", "reward"), ("is_init",), ("collector", "traj_ids")
SLICE_END = "collector", "slice_end"
DONE, TERMINATED, TRUNCATED = (
    ("next", "done"),
    ("next", "terminated"),
    ("next", "truncated"),
)


# -- rows, lanes, episodes, priorities


@dataclass(eq=False)
class Row:
    """One transition."""

    lane: int
    serial: int  # its number in its lane; it lies in the cell (serial % steps, lane)
    fields: Fields
    priority: float
    # of all rows of the buffer in the order of writing: the row's identity, which
    # copies keep
    number: int
    # begins an episode, whatever flag and id of the row before it say
    breaks: bool = False

    @property
    def done(self) -> bool:
        keys = [DONE] if DONE in self.fields else [TERMINATED, TRUNCATED]
        return bool(np.any([np.any(self.fields.get(key, False)) for key in keys]))

    @property
    def name(self) -> Any:
        return self.fields.get(TRAJ)


def continues(before: Row, row: Row) -> bool:
    """Whether a row continues the episode of the row before it in its lane."""
    return not row.breaks and not before.done and before.name == row.name


@dataclass
class Model:
    """Lanes of rows, of which each keeps its newest ``steps``; ``lanes=0``: the rows
    ``[T]`` of a single lane."""

    steps: int
    lanes: int = 0
    # whether rows are written in time order; a reservoir's are not
    ordered: bool = True
    floor: float = 0.0  # the sampler's ``min_priority``
    largest: float | None = None  # the largest magnitude of all updates
    written: int = 0  # rows ever written
    count: int = 0  # rows written since all were removed
    # their number before the last write, which does not store its first rows if they
    # are too many
    began: int = 0
    rows_of: list[deque[Row]] = field(default_factory=list)
    # the newest row of each lane, even if it was removed since
    last: list[Row | None] = field(default_factory=list)
    cut: set[int] = field(default_factory=set)  # lanes whose next row begins an episode

    def __post_init__(self) -> None:
        self.rows_of = self.rows_of or [deque() for _ in range(max(1, self.lanes))]
        self.last = self.last or [None] * len(self.rows_of)

    # writes

    def append(self, lane: int, fields: Fields) -> Row:
        """Write a row to a lane, whose oldest row goes if the lane is full."""
        rows, before = self.rows_of[lane], self.last[lane]
        row = Row(
            lane,
            rows[-1].serial + 1 if rows else 0,
            dict(fields),
            self.entry,
            self.written,
        )
        row.breaks = (
            before is None
            or lane in self.cut
            or (not rows and not continues(before, row))
        )
        rows.append(row)
        self._drop(rows, self.steps, self.began)
        self.last[lane] = row
        self.written += 1
        self.count += 1
        self.cut.discard(lane)
        return row

    def _drop(self, rows: deque[Row], steps: int, stored: float = math.inf) -> None:
        """Remove the oldest rows; the oldest that is left keeps whether it began an
        episode.

        Rows whose number is not below ``stored`` have never been stored, so that nobody
        knows what came before it.
        """
        while len(rows) > steps:
            gone = rows.popleft()
            rows[0].breaks |= gone.number < stored and not continues(gone, rows[0])

    def give_up(self, more: Sequence[int]) -> None:
        """Remove the rows that a write of ``more[lane]`` rows to each lane was about to
        replace when it ended."""
        for rows, count in zip(self.rows_of, more, strict=True):
            while len(rows) > max(0, self.steps - count):
                gone = rows.popleft()
                if rows:
                    rows[0].breaks |= not continues(gone, rows[0])

    def put(self, slot: int, lane: int, fields: Fields) -> Row:
        """Write a row to a cell, as a writer without order does: the row after the last
        one, or edit one, which gets the priority of new rows."""
        rows = self.rows_of[lane]
        if slot == len(rows):
            return self.append(lane, fields)
        row = rows[slot]
        self.replace(row, fields)
        row.priority = self.entry
        self.written += 1
        self.count += 1
        return row

    def replace(self, row: Row, fields: Fields) -> None:
        """Write other entries in the place of a row's, which keeps its identity, its
        place in time and its priority."""
        row.fields = dict(fields)

    def edit(self, row: Row, fields: Fields) -> None:
        """Set some entries of a stored row; its episode may end then, or go on in the
        next one."""
        row.fields |= fields

    def write_back(self, rows: Sequence[Row], fields: Sequence[Fields]) -> int:
        """Set entries of the rows that are still stored, those of a row that occurs
        often in turn. Return how many."""
        kept = [
            (self.row(*self.cell(row)), new)
            for row, new in zip(rows, fields, strict=True)
            if self.holds(row)
        ]
        for row, new in kept:
            self.edit(row, new)
        return len(kept)

    def clear(self) -> None:
        """Remove all rows. Episodes go on, so that one whose first rows are gone is
        never whole."""
        for rows in self.rows_of:
            rows.clear()

    def empty(self) -> None:
        """Remove all rows and priorities."""
        self.clear()
        self.largest = None
        self.count = 0

    def begin_episodes(self, lanes: Iterable[int] | None = None) -> None:
        """Let the next row of each lane begin an episode: after a load, a reopening, a
        reset, another writer."""
        self.cut |= set(range(len(self.rows_of)) if lanes is None else lanes)

    # identity

    def __len__(self) -> int:
        return sum(map(len, self.rows_of))

    def rows(self) -> list[Row]:
        """Return all stored rows in the order of their cells."""
        return sorted((row for rows in self.rows_of for row in rows), key=self.cell)

    def cell(self, row: Row) -> tuple[int, int]:
        return row.serial % self.steps, row.lane

    def flat(self, row: Row) -> int:
        slot, lane = self.cell(row)
        return slot * len(self.rows_of) + lane

    def row(self, slot: int, lane: int = 0) -> Row:
        """Return the row that lies in a cell."""
        rows = self.rows_of[lane]
        return rows[(slot - rows[0].serial) % self.steps]

    def holds(self, row: Row) -> bool:
        """Whether a row, perhaps of another copy of this model, is still stored."""
        return any(row.number == each.number for each in self.rows_of[row.lane])

    # episodes

    def later(self, row: Row) -> Iterator[Row]:
        """Yield the row and the stored rows after it in its episode."""
        rows = [*self.rows_of[row.lane]]
        at = rows.index(row)
        yield row
        for before, after in zip(rows[at:], rows[at + 1 :], strict=False):
            if not continues(before, after):
                return
            yield after

    def episode(self, row: Row) -> list[Row]:
        """Return the stored rows of a row's episode, the oldest first."""
        rows = [*self.rows_of[row.lane]]
        at = rows.index(row)
        while at and continues(rows[at - 1], rows[at]):
            at -= 1
        return [*self.later(rows[at])]

    def next(self, row: Row) -> Row | None:
        """Return the row of its lane that was written after a row."""
        rows = self.rows_of[row.lane]
        return None if row is rows[-1] else rows[rows.index(row) + 1]

    def ended(self, row: Row) -> bool:
        """Whether a row's episode has ended: with a flag, or because its lane's next
        row begins another."""
        last = self.episode(row)[-1]
        return last.done or self.next(last) is not None

    def reach(self, row: Row) -> tuple[int, int, bool]:
        """Return how many stored rows of its episode lie before and after a row, and
        whether it has ended."""
        whole = self.episode(row)
        back = whole.index(row)
        return back, len(whole) - 1 - back, self.ended(row)

    def whole(self, *, only_finished: bool = True) -> list[list[Row]]:
        """Return the episodes whose rows are all stored, by lane and age."""
        # of which more may have been there
        oldest = [rows[0] for rows in self.rows_of if rows and not rows[0].breaks]
        starts = [
            row
            for rows in self.rows_of
            for row in rows
            if self.episode(row)[0] is row and row not in oldest
        ]
        return [
            self.episode(row) for row in starts if self.ended(row) or not only_finished
        ]

    # priorities

    @property
    def entry(self) -> float:
        """The magnitude that a new row gets: the largest seen, 1 before any."""
        return max(self.floor, 1.0) if self.largest is None else self.largest

    def update(self, rows: Sequence[Row], errors: Sequence[float]) -> int:
        """Set priorities from TD errors; return how many were stale. Raise, and change
        nothing, if one is no number."""
        if not all(map(math.isfinite, errors)):
            raise ValueError(f"a TD error of {errors} is not finite")
        stale = 0
        for row, error in zip(rows, errors, strict=True):
            if self.holds(row):
                stored = self.row(*self.cell(row))
                stored.priority = max(abs(float(error)), self.floor)
                self.largest = max(self.largest or 0.0, stored.priority)
            else:
                stale += 1
        return stale


# -- laws: the probability of each row, in the order of ``model.rows()``


def _normalized(weights: Iterable[float]) -> list[float]:
    weights = [*weights]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def age(model: Model, row: Row) -> int:
    """Return how many rows of its lane were written after a row."""
    return model.rows_of[row.lane][-1].serial - row.serial


def uniform(model: Model, max_age: float = math.inf) -> list[float]:
    return _normalized(float(age(model, row) <= max_age) for row in model.rows())


def recency(
    model: Model, half_life: float, window: float = math.inf, max_age: float = math.inf
) -> list[float]:
    ages = [age(model, row) for row in model.rows()]
    return _normalized(
        0.5 ** (a / half_life) * (a < window and a <= max_age) for a in ages
    )


def proportional(model: Model, alpha: float, eps: float = 1e-8) -> list[float]:
    return _normalized((row.priority + eps) ** alpha for row in model.rows())


def by_rank(model: Model, alpha: float) -> list[float]:
    """Rows of equal priorities rank by their order here; a sampler may rank them in any
    order."""
    rows = model.rows()
    order = sorted(range(len(rows)), key=lambda at: -rows[at].priority)
    rank = {at: 1 + place for place, at in enumerate(order)}
    return _normalized(rank[at] ** -alpha for at in range(len(rows)))


def mixed_importance(
    laws: Sequence[Sequence[float] | None],
    drawn: Sequence[Sequence[int]],
    beta: float,
    norms: Sequence[Literal["buffer", "batch"] | None],
) -> list[float]:
    """Return the importance weights of the rows drawn from each member of a mixture,
    one member after the other; a law of None: a member without priorities."""
    raw, largest = list[list[float]](), list[float]()
    for law, places, norm in zip(laws, drawn, norms, strict=True):
        if law is None:
            raw.append([1.0] * len(places))
            largest.append(1.0)
            continue
        raw.append(importance(law, places, beta, None))
        everywhere = importance(law, range(len(law)), beta, None)
        largest.append(max(everywhere if norm == "buffer" else raw[-1]))
    by = 1.0 if None in norms else max(largest)
    return [weight / by for weights in raw for weight in weights]


def importance(
    law: Sequence[float],
    drawn: Sequence[int],
    beta: float,
    norm: Literal["buffer", "batch"] | None = "buffer",
) -> list[float]:
    """Return the importance weights of the rows drawn, which are places in
    ``model.rows()``."""
    weights = [(len(law) * law[at]) ** -beta for at in drawn]
    if norm == "batch":
        return [weight / max(weights) for weight in weights]
    least = min(p for p in law if p > 0)
    return (
        weights
        if norm is None
        else [weight / (len(law) * least) ** -beta for weight in weights]
    )


def combined(
    errors: Sequence[float], counts: Sequence[bool], eta: float | None = None
) -> float:
    """Return the priority of a window's anchor: the largest magnitude, or a mix with
    the mean as in R2D2."""
    magnitudes = [
        abs(error) for error, here in zip(errors, counts, strict=True) if here
    ]
    largest = max(magnitudes)
    return (
        largest
        if eta is None
        else eta * largest + (1 - eta) * math.fsum(magnitudes) / len(magnitudes)
    )


# -- what a batch of given rows must hold


@dataclass(frozen=True)
class Episodes:
    """How a sampler of episodes is made."""

    padded: bool = True  # [B, L], else [S]
    finished_only: bool = True
    max_length: int | None = None  # steps of an episode in a batch
    to_go: float | None = None  # the discount of ``reward_to_go``


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
    across: bool = False  # windows go on into the lane's next episode
    in_time: bool = False  # batches of windows are [B, L], and mark their ends
    episodes: Episodes | None = None  # batches hold whole episodes, or parts of them

    @property
    def window(self) -> int:
        return self.length + self.burn_in if self.sequence else 1


def reward_fn(batch: TensorDictBase) -> torch.Tensor:
    """Return minus the distance to the goal, the more the greater the action,
    ``[B]``."""
    return -(batch[OUTCOME] - batch[GOAL]).abs().sum(-1) * (1 + batch["action"]) / 8


def terminated_fn(batch: TensorDictBase) -> torch.Tensor:
    """Return whether the goal is reached, ``[B]`` bool."""
    return (batch[OUTCOME] == batch[GOAL]).all(-1)


def relabeled(row: Row, goal: Row | None) -> Fields:
    """Return a transition whose goal is what another row has achieved, with its reward
    and end; None: as it is."""
    if goal is None:
        return dict(row.fields)
    new, reached = goal.fields[OUTCOME], row.fields[OUTCOME]
    distance = sum(abs(a - b) for a, b in zip(reached, new, strict=True))
    end = {
        TERMINATED: [reached == new],
        DONE: [reached == new or row.fields[TRUNCATED][0]],
    }
    return (
        row.fields
        | {
            GOAL: new,
            NEXT_GOAL: new,
            REWARD: [-distance * (1 + row.fields["action",]) / 8],
        }
        | end
    )


def allowed_goals(model: Model, row: Row, strategy: str) -> list[Row]:
    if strategy == "random":
        return model.rows()
    return {
        "future": [*model.later(row)],
        "episode": model.episode(row),
        "final": model.episode(row)[-1:],
    }[strategy]


def transition(model: Model, row: Row, goal: Row | None, recipe: Recipe) -> Fields:
    first = last = relabeled(row, goal)
    if not recipe.n_step:
        return first
    total = 0.0
    for k, here in enumerate(model.later(row)):
        last = relabeled(here, goal)
        total += recipe.gamma**k * last[REWARD][0]
        if k + 1 == recipe.n or last[DONE][0]:
            break
    following = {key: value for key, value in last.items() if key[0] == "next"}
    return first | following | {REWARD: [total], ("steps_to_next_obs",): [k + 1]}


def window(model: Model, anchor: Row, recipe: Recipe) -> tuple[list[Row], list[bool]]:
    """Return the rows of an anchor's window, and which of them are not padding."""
    whole = [*model.rows_of[anchor.lane]] if recipe.across else model.episode(anchor)
    at = whole.index(anchor)
    if recipe.boundary == "shift":
        at -= min(max(0, at + recipe.length - len(whole)), at)
    wanted = range(at - recipe.burn_in, at + recipe.length)
    real = [0 <= step < len(whole) for step in wanted]
    assert recipe.boundary != "strict" or all(real)
    return [whole[min(max(step, 0), len(whole) - 1)] for step in wanted], real


def expected(
    model: Model, anchors: Sequence[Row], goals: Sequence[Row | None], recipe: Recipe
) -> list[Fields]:
    """Return the rows of a batch, given the rows drawn and the goal of each."""
    batch: list[Fields] = []
    for anchor, goal in zip(anchors, goals, strict=True):
        report: Fields = {("relabeled",): goal is not None} if recipe.hindsight else {}
        if not recipe.sequence:
            batch.append(
                transition(model, anchor, goal, recipe)
                | report
                | {("index",): model.cell(anchor)}
            )
            continue
        rows, real = window(model, anchor, recipe)
        first, last = real.index(True), len(real) - 1 - real[::-1].index(True)
        for j, row in enumerate(rows):
            fields = (
                transition(model, row, goal, recipe)
                | report
                | {("index",): model.cell(row)}
            )
            begins = recipe.across and real[j] and model.episode(row)[0] is row
            fields[INIT] = [fields[INIT][0] or j in (0, first) or begins]
            for key in [SLICE_END] if recipe.in_time else [TRUNCATED, DONE]:
                fields[key] = [fields.get(key, [False])[0] or j == last]
            fields |= {("mask",): real[j], ("burn_in_mask",): j < recipe.burn_in}
            batch.append(fields | {("anchor_index",): model.cell(anchor)})
    return batch


def return_to_go(rows: Sequence[Row], gamma: float) -> float:
    """Return the discounted sum of the rewards of rows."""
    return math.fsum(gamma**k * row.fields[REWARD][0] for k, row in enumerate(rows))


def episode_part(
    model: Model,
    whole: Sequence[Row],
    start: int,
    padding: int,
    goal: Row | None,
    recipe: Recipe,
) -> list[Fields]:
    """Return the rows that a batch holds of an episode, from the step ``start``."""
    how = recipe.episodes
    assert how is not None
    count = min(len(whole), how.max_length or len(whole))
    part: list[Fields] = []
    for j in range(count + padding):
        step = start + min(j, count - 1)
        row, is_real = whole[step], j < count
        fields = transition(model, row, goal, recipe) | {("index",): model.cell(row)}
        fields[INIT] = [fields[INIT][0] or j == 0]
        fields |= {
            ("mask",): is_real,
            ("episode_step",): step,
            ("episode_length",): len(whole),
        }
        if recipe.hindsight:
            fields["relabeled",] = goal is not None
        if how.to_go is not None:
            fields[TO_GO] = [return_to_go(whole[step:], how.to_go) * is_real]
        part.append(fields)
    return part


# -- advantages


def estimate(
    model: Model, gamma: float, lmbda: float, agents: Sequence[int | None] = (None,)
) -> None:
    """Set the advantages and value targets of all rows, as if the newest step were the
    last; ``agents``: the numbers of those of the group :data:`GROUP`, None for the
    rewards of the step."""
    for rows in model.rows_of:
        estimates = [lane_estimates([*rows], gamma, lmbda, agent) for agent in agents]
        for t, row in enumerate(rows):
            for k, name in enumerate(("advantage", "value_target")):
                numbers = [[estimate[t][k]] for estimate in estimates]
                if agents[0] is None:
                    row.fields[name,] = numbers[0]
                else:
                    row.fields[GROUP, name] = numbers


def numbers_of(row: Row, agent: int | None) -> dict[str, float]:
    """Return what the estimates need of a row, or of one agent in it."""
    lead = () if agent is None else (GROUP,)
    keys = {
        "value": (*lead, "state_value"),
        "next_value": ("next", *lead, "state_value"),
        "reward": ("next", *lead, "reward"),
        "terminated": ("next", *lead, "terminated"),
        "done": ("next", *lead, "done"),
    }
    entries = {name: row.fields[key] for name, key in keys.items()}
    if agent is None:
        return {name: entry[0] for name, entry in entries.items()} | {"acts": True}
    numbers = {name: entry[agent][0] for name, entry in entries.items()}
    return numbers | {"acts": row.fields[GROUP, "mask"][agent]}


def lane_estimates(
    rows: Sequence[Row], gamma: float, lmbda: float, agent: int | None
) -> list[tuple[float, float]]:
    """Return the advantage and the value target of each row of a lane."""
    steps = [numbers_of(row, agent) for row in rows]
    goes_on = [
        not (row.done or step["done"]) and row.name == after.name and next_step["acts"]
        for row, after, step, next_step in zip(
            rows, rows[1:], steps, steps[1:], strict=False
        )
    ]
    goes_on.append(False)
    next_value = [
        steps[t + 1]["value"] if goes_on[t] else step["next_value"]
        for t, step in enumerate(steps)
    ]
    advantage = gae(
        [step["value"] for step in steps],
        next_value,
        [step["reward"] for step in steps],
        [step["terminated"] for step in steps],
        goes_on,
        gamma=gamma,
        lmbda=lmbda,
    )
    return [
        (a * step["acts"], (a + step["value"]) * step["acts"])
        for a, step in zip(advantage, steps, strict=True)
    ]


def gae(
    value: Sequence[float],
    next_value: Sequence[float],
    reward: Sequence[float],
    terminated: Sequence[float],
    goes_on: Sequence[float],
    *,
    gamma: float,
    lmbda: float,
) -> list[float]:
    """Return the advantages of the steps of a lane (Schulman et al., 2016, equation
    16)."""
    advantage, later = [0.0] * len(value), 0.0
    for t in reversed(range(len(value))):
        target = reward[t] + gamma * next_value[t] * (not terminated[t])
        later = target - value[t] + gamma * lmbda * later * goes_on[t]
        advantage[t] = later
    return advantage


# -- a buffer beside its model


class World:
    """Random rows, no two alike, which are written to a buffer and to its model.

    In each episode the next observation of a row is the observation of the following
    one, and so are the ``frames``.
    """

    def __init__(
        self,
        rb: Any,
        model: Model,
        seed: int = 0,
        often: Often = (0.08, 0.05, 0.03),
        *,
        ids: bool = True,
    ):
        self.rb, self.model, self.often, self.ids, self.rng = (
            rb,
            model,
            often,
            ids,
            random.Random(seed),
        )
        lanes = len(model.rows_of)
        self.fresh, self.names, self.count = [True] * lanes, [*range(lanes)], 0
        self.achieved = [[-1.0, float(lane)] for lane in range(lanes)]

    @classmethod
    def of(
        cls, sampler: Any, steps: int, lanes: int = 0, fill: float = 0.0, **given: Any
    ) -> World:
        """Return a world with a new buffer of ``[steps]`` or, with several lanes,
        ``[steps, lanes]`` rows."""
        lanes = lanes if lanes > 1 else 0
        mine = {
            name: given.pop(name) for name in ("seed", "often", "ids") if name in given
        }
        cls_, storage = (
            given.pop("buffer", ReplayBuffer),
            given.pop("storage", PackedStorage),
        )
        place = storage(steps * max(1, lanes), ndim=2 if lanes else 1)
        world = cls(
            cls_(storage=place, sampler=sampler, **given), Model(steps, lanes), **mine
        )
        left = round(fill * steps)
        while left:
            part = left if left < 11 else world.rng.randint(2, 9)
            world.extend(part)
            left -= part
        return world

    def make(self, lane: int) -> Fields:
        """Return a new row of a lane, which is not written yet."""
        rng = self.rng
        self.fresh[lane] |= rng.random() < self.often[2]
        if self.fresh[lane]:
            self.names[lane] += len(self.names)
            self.count += 4  # no observation is like one before
        terminated, truncated = (rng.random() < often for often in self.often[:2])
        now, self.count = 1.0 + self.count, self.count + 1
        outcome = [now + rng.randrange(32) / 64, float(lane)]
        fields: Fields = {
            ("observation",): [now, float(lane)],
            ("frames",): [now - 2, now - 1, now] if not self.fresh[lane] else [now] * 3,
            ("achieved_goal",): self.achieved[lane],
            GOAL: [float(rng.randrange(10_000, 20_000)), float(lane)],
            ("action",): rng.randrange(3),
            ("hidden",): [rng.randrange(64) / 64 for _ in range(3)],
            INIT: [self.fresh[lane]],
            ("next", "observation"): [now + 1, float(lane)],
            OUTCOME: outcome,
            REWARD: [rng.randrange(-64, 65) / 64],
            TERMINATED: [terminated],
            TRUNCATED: [truncated],
            DONE: [terminated or truncated],
        }
        fields["next", "frames"] = [*fields["frames",][1:], now + 1]
        fields[NEXT_GOAL] = fields[GOAL]
        if self.ids:
            fields[TRAJ] = self.names[lane]
        self.fresh[lane], self.achieved[lane] = terminated or truncated, outcome
        return fields

    def extend(self, steps: int) -> Any:
        """Write whole time steps, ``[n]`` or ``[E, n]``; return their index."""
        rows = [
            [self.make(lane) for lane in range(len(self.names))] for _ in range(steps)
        ]
        data = as_tensordict([row for step in rows for row in step]).view(
            steps, len(self.names)
        )
        index = self.rb.extend(
            data.transpose(0, 1).contiguous() if self.model.lanes else data[:, 0]
        )
        return self.tell([row for step in rows for row in enumerate(step)], index)

    def add(self) -> Any:
        """Write one time step."""
        rows = [self.make(lane) for lane in range(len(self.names))]
        data = as_tensordict(rows)
        return self.tell(
            [*enumerate(rows)], self.rb.add(data if self.model.lanes else data[0])
        )

    def add_step(self, lane: int | None = None, writer: Any = None) -> None:
        """Write one time step, or one of a lane, as arrays and numbers; ``writer``: the
        buffer, or the handle of the lane."""
        lanes = [*range(len(self.names))] if lane is None else [lane]
        rows = [self.make(each) for each in lanes]
        step = as_step(rows if self.model.lanes and lane is None else rows[0])
        if writer is None and lane is not None:
            step["lane"] = lane
        # an empty lane is false
        (self.rb if writer is None else writer).add_step(**step)
        self.tell([*zip(lanes, rows, strict=True)])

    def append(self, lanes: Sequence[int]) -> Any:
        """Write single rows, in this order, to lanes that advance alone."""
        rows = [self.make(lane) for lane in lanes]
        return self.tell(
            [*zip(lanes, rows, strict=True)],
            self.rb.extend(as_tensordict(rows), lanes=torch.tensor(lanes)),
        )

    def tell(self, rows: Sequence[tuple[int, Fields]], index: Any = None) -> Any:
        """Tell the model of rows that the buffer has got, and compare the index, if the
        buffer has returned one."""
        self.model.began = self.model.written
        cells = [
            self.model.cell(self.model.append(lane, fields)) for lane, fields in rows
        ]
        if isinstance(self.rb, ReplayBuffer) and index is not None:
            found = torch.as_tensor(index).reshape(len(rows), -1).tolist()
            assert found == [
                [*cell] if self.model.lanes else [cell[0]] for cell in cells
            ], "the index of written rows"
        return index

    def empty(self) -> None:
        self.rb.empty()
        self.model.empty()

    def check(self) -> None:
        assert_holds(self.rb, self.model)

    def rows_at(self, index: torch.Tensor) -> list[Row]:
        """Return the rows at a batch's index, ``[n]`` or ``[n, 2]``."""
        return [
            self.model.row(*(cell if isinstance(cell, list) else [cell]))
            for cell in index.tolist()
        ]

    def drawn(
        self, batch: TensorDictBase, recipe: Recipe
    ) -> tuple[list[Row], list[Row | None]]:
        """Return what chance has decided about a batch: its anchors, and their goals,
        each of which must be allowed."""
        model, batch = self.model, batch.flatten()
        key = "anchor_index" if recipe.sequence else "index"
        anchors = self.rows_at(batch[key][:: recipe.window])
        goals: list[Row | None] = [None] * len(anchors)
        for j, anchor in enumerate(anchors if recipe.hindsight else []):
            if batch["relabeled"][j * recipe.window]:
                goal = batch["desired_goal"][j * recipe.window].tolist()
                found = [
                    row
                    for row in allowed_goals(model, anchor, recipe.strategy)
                    if row.fields[OUTCOME] == goal
                ]
                assert found, (
                    f"{goal} was not reached where {recipe.strategy} goals of {model.cell(anchor)} are"
                )
                goals[j] = found[0]
        return anchors, goals

    def check_batch(
        self, batch: TensorDictBase, recipe: Recipe = Recipe()
    ) -> list[Row]:
        """Compare a batch, but for what the inner sampler reports, with what its
        anchors say; return the anchors, or all rows of the episodes."""
        if recipe.episodes is not None:
            return self.check_episodes(batch, recipe, recipe.episodes)
        anchors, goals = self.drawn(batch, recipe)
        innermost = getattr(self.rb.sampler, "innermost", self.rb.sampler)
        report = {
            "priority_weight",
            "sampled_at",
            *getattr(innermost, "report_keys", ()),
        }
        if recipe.in_time:
            assert batch.shape == (len(anchors), recipe.window)
        rows = batch.flatten().exclude(*report)
        assert_batch(rows, expected(self.model, anchors, goals, recipe))
        return anchors

    def check_episodes(
        self, batch: TensorDictBase, recipe: Recipe, how: Episodes
    ) -> list[Row]:
        """Compare a batch of episodes with what its first rows say; return its rows,
        without padding."""
        all_whole = self.model.whole(only_finished=how.finished_only)
        episode_of = {row.number: whole for whole in all_whole for row in whole}
        flat, drawn, wanted = batch.reshape(-1), list[Row](), list[Fields]()
        numbers = flat["episode"].tolist()
        assert sorted({*numbers}) == [*range(numbers[-1] + 1)]
        for number in range(numbers[-1] + 1):
            part = flat[flat["episode"] == number]
            rows = self.rows_at(part["index"][part["mask"]])
            whole = episode_of[rows[0].number]
            goal = self.goal_of(part, rows, recipe)
            start, padding = whole.index(rows[0]), len(part) - len(rows)
            part_wanted = episode_part(self.model, whole, start, padding, goal, recipe)
            wanted += [fields | {("episode",): number} for fields in part_wanted]
            drawn += rows
        if how.padded:
            longest = max(numbers.count(number) for number in {*numbers})
            assert batch.shape == (numbers[-1] + 1, longest)
            needed = [episode_of[row.number] for row in drawn]
            assert longest == (how.max_length or max(map(len, needed)))
        assert_batch(flat.exclude("sampled_at", "priority_weight"), wanted)
        return drawn

    def goal_of(
        self, part: TensorDictBase, rows: Sequence[Row], recipe: Recipe
    ) -> Row | None:
        """Return the row whose outcome is the goal of an episode; it is the goal of all
        rows."""
        if not recipe.hindsight or not part["relabeled"][0]:
            return None
        goal = part["desired_goal"][0].tolist()
        for anchor in rows:
            for row in allowed_goals(self.model, anchor, recipe.strategy):
                if row.fields[OUTCOME] == goal:
                    return row
        raise AssertionError(f"{goal} was not reached where goals of an episode are")


def as_tensordict(rows: Sequence[Fields]) -> TensorDict:
    """Return rows as ``[n]``: floats as float32, whole numbers as int64."""
    return TensorDict(
        {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}, [len(rows)]
    )


def as_step(rows: Fields | Sequence[Fields]) -> dict[str, Any]:
    """Return a row, or one of each environment, as arguments of ``add_step``."""
    single = isinstance(rows, dict)
    data = as_tensordict([rows] if single else rows)
    data = data[0] if single else data
    outcome = (
        data["next"].pop("reward").squeeze(-1),
        *(
            data["next"].pop(name).squeeze(-1).numpy()
            for name in ("terminated", "truncated")
        ),
    )
    del data["next", "done"]
    after = {key: value.numpy() for key, value in data.pop("next").items()}
    action = data.pop("action").numpy()
    observed = (data.keys() & after.keys()) - {GROUP}
    before = {key: data.pop(key).numpy() for key in after if key in observed}
    extras = data.numpy()
    extras["next"] = {key: after.pop(key) for key in [*after] if key not in before}
    names = "reward", "terminated", "truncated", "observation", "next_observation"
    step = dict(zip(names, (*outcome, before, after), strict=True))
    return step | {"action": action} | extras


def index_of(model: Model, rows: Sequence[Row]) -> Any:
    """Return the index of rows as a storage takes it: ``[n]``, or slots and lanes."""
    cells = torch.tensor([model.cell(row) for row in rows]).view(-1, 2)
    return (cells[:, 0], cells[:, 1]) if model.lanes else cells[:, 0]


def assert_batch(batch: TensorDictBase, rows: Sequence[Fields]) -> None:
    """Compare keys, shapes and values of a batch ``[n]`` with the rows that it must
    hold."""
    keys = {key if isinstance(key, tuple) else (key,) for key in batch.keys(True, True)}
    assert keys == set(rows[0]), f"unlike keys: {keys ^ set(rows[0])}"
    assert batch.batch_size == (len(rows),)
    for key in keys:
        found, wanted = batch[key].cpu(), torch.tensor([row[key] for row in rows])
        if key in (("index",), ("anchor_index",)) and found.ndim == 1:
            wanted = wanted[:, 0]
        assert found.shape == wanted.shape, (
            f"{key}: {found.shape}, expected {wanted.shape}"
        )
        is_sum = key in (REWARD, TO_GO) or key[-1] in ("advantage", "value_target")
        close: dict[str, Any] = (
            {"rtol": 1e-5, "atol": 1e-5} if is_sum else {"rtol": 0.0, "atol": 0.0}
        )
        torch.testing.assert_close(
            found.double(), wanted.double(), msg=partial("{}: {}".format, key), **close
        )


def assert_equal(what: str, found: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    """Compare what is said of each cell, and show only what differs."""
    unlike = {
        at: (found.get(at), wanted.get(at))
        for at in [*found, *wanted]
        if found.get(at) != wanted.get(at)
    }
    assert not unlike, f"{what}, by cell, found and expected: {unlike}"


def assert_holds(
    rb: Any, model: Model, *, episodes: bool = True, extra: Sequence[Any] = ()
) -> None:
    """Compare all rows, lanes, priorities and episodes of a buffer with its model,
    without ``extra`` entries."""
    rows, storage = model.rows(), rb.storage
    is_ours = isinstance(rb, ReplayBuffer) and isinstance(storage, PackedStorage)
    if is_ours:
        sizes = [len(rb.lane(lane)) for lane in range(model.lanes)] or [len(rb)]
        assert (len(rb), sizes) == (len(model), [len(lane) for lane in model.rows_of])
    if not rows:
        return
    index, cells = index_of(model, rows), [model.cell(row) for row in rows]
    assert_batch(
        storage.get(index).exclude("index", *extra), [row.fields for row in rows]
    )
    for lane, held in enumerate(model.rows_of if is_ours else []):
        if held and model.ordered:
            found = (rb.lane(lane) if model.lanes else rb).chronological()
            assert_batch(found.exclude(*extra), [row.fields for row in held])
    sampler = getattr(rb.sampler, "innermost", rb.sampler)
    if hasattr(sampler, "priority"):
        # rounded to float32
        priority = zip(
            rows, sampler.priority(index, storage=storage).tolist(), strict=True
        )
        near = [
            row.priority if math.isclose(p, row.priority, rel_tol=1e-6) else p
            for row, p in priority
        ]
        assert_equal(
            "priorities",
            dict(zip(cells, near, strict=True)),
            {model.cell(row): row.priority for row in rows},
        )
    if episodes and model.ordered:
        trajectories = TrajectoryIndex(storage)
        reach = dict(
            zip(
                cells,
                zip(
                    *(part.tolist() for part in trajectories.reach(index)), strict=True
                ),
                strict=True,
            )
        )
        assert_equal(
            "steps back and ahead, ended",
            reach,
            {model.cell(row): model.reach(row) for row in rows},
        )
        first, length = (
            part.tolist() for part in trajectories.whole(only_finished=False)
        )
        found = dict(
            zip(
                (divmod(row, max(1, model.lanes)) for row in first), length, strict=True
            )
        )
        wanted = {
            model.cell(whole[0]): len(whole)
            for whole in model.whole(only_finished=False)
        }
        assert_equal("lengths of whole episodes", found, wanted)


def saved(world: World) -> World:
    """Return a copy of a world's model and counters, with no buffer, for a buffer that
    is loaded later."""
    rb, world.rb = world.rb, None
    try:
        return copy.deepcopy(world)
    finally:
        world.rb = rb
