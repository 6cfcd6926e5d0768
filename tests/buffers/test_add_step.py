"""``add_step`` writes what ``add(make_transition(...))`` writes, for all kinds of
buffers, spaces and changes between two steps; a step that is refused changes nothing.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torchrl.envs import Transform

from rlbuf_td import (
    EpisodeStats,
    ExperienceQueue,
    HindsightSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    RolloutBuffer,
    SchemaError,
    SequenceSampler,
    ShutDown,
    TrajectoryIndex,
    UniformSampler,
    make_transition,
    schema_of,
)
from tests.backends import forced
from tests.catalogue import SCHEMAS, assert_same, reward_fn, transitions
from tests.test_lockstep import forked

STEPS, LANES, ROWS = 7, 3, 21
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Steps:
    """Random steps of environments with goals; within an episode, each observation is
    the one that the step before has led to."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.seen: dict[int | None, Any] = {}  # the newest observation of a lane

    def observe(self, lead: tuple[int, ...]) -> dict[str, Any]:
        rng = self.rng
        return {
            "image": rng.integers(0, 256, (*lead, 4, 4), np.uint8),
            "achieved_goal": rng.normal(size=(*lead, 1)).astype(np.float32),
            "desired_goal": np.ones((*lead, 1), np.float32),
            "pair": (rng.normal(size=(*lead, 2)), rng.integers(0, 5, lead)),
        }

    def make(self, lanes: int | None = None, lane: int | None = None) -> dict[str, Any]:
        """Return a step of ``lanes`` environments, or of that of one ``lane``."""
        lead = () if lanes is None or lane is not None else (lanes,)
        rng, before, after = self.rng, self.seen.get(lane), self.observe(lead)
        self.seen[lane] = after
        terminated, truncated = rng.random(lead) < 0.2, rng.random(lead) < 0.1
        value = rng.normal(size=(*lead, 1)).astype(np.float32)
        return {
            "observation": self.observe(lead) if before is None else before,
            "action": rng.integers(0, 3, lead),
            "reward": rng.normal(size=lead),
            "next_observation": after,
            "terminated": terminated if lead else bool(terminated),
            "truncated": truncated if lead else bool(truncated),
            "state_value": value,
            "next": {"state_value": value + 1},
        }


def transition(
    observation: Any,
    action: Any,
    reward: Any,
    next_observation: Any,
    terminated: Any,
    truncated: Any,
    **extras: Any,
) -> TensorDict:
    outcome = reward, next_observation, terminated, truncated
    return make_transition(observation, action, *outcome, **extras)


class Twins:
    """Two buffers that were made alike: ``rb`` gets ``add_step``, and ``twin`` gets
    ``add(make_transition(...))``."""

    def __init__(
        self, make: Callable[[Path], Any], folder: Path, lanes: int | None = None
    ) -> None:
        self.rb, self.twin = make(folder / "one"), make(folder / "two")
        self.lanes, self.steps = lanes, Steps()

    @property
    def both(self) -> tuple[Any, Any]:
        return self.rb, self.twin

    def write(self, count: int = 1) -> None:
        """Write steps of all lanes."""
        for _ in range(count):
            step = self.steps.make(self.lanes)
            self.rb.add_step(**step)
            self.twin.add(transition(**step))

    def write_lanes(self, *lanes: int) -> None:
        """Write a step of each of these lanes."""
        for lane in lanes:
            step = self.steps.make(self.lanes, lane)
            self.rb.add_step(**step, lane=lane)
            self.twin.extend(transition(**step)[None], lanes=lane)

    def check(self, *, samples: bool = True) -> None:
        (numbers, rows), (expected, wanted) = map(state_of, self.both)
        assert numbers == expected
        assert (rows is None) == (wanted is None)
        if rows is not None:
            assert_same(rows, wanted)
            if samples:
                assert_same(self.rb.sample(4), self.twin.sample(4))


def state_of(rb: ReplayBuffer) -> tuple[dict[str, Any], Any]:
    """Return numbers that belong to the rows of a buffer, and the rows by age."""
    ring, sampler = rb.storage.ring, getattr(rb.sampler, "innermost", rb.sampler)
    ring.check()
    stats, flow = rb.episode_stats, rb.flow
    numbers: dict[str, Any] = {
        "serials": ring.serials.tolist(),
        "count": rb.write_count,
        "stats": None if stats is None else stats.summary(),
        "flow": None if flow is None else flow.report()["inserts"],
    }
    if not len(rb):
        return numbers, None
    cells = ring.cells_by_age()
    is_flat = rb.storage.ndim == 1
    index = cells if is_flat else (cells // ring.lanes, cells % ring.lanes)
    if ring.in_order:
        reached = TrajectoryIndex(rb.storage).reach(cells)
        numbers["reach"] = [part.tolist() for part in reached]
    if hasattr(sampler, "priority"):
        numbers["priority"] = sampler.priority(cells).tolist()
    return numbers, rb.storage[index]


# -- kinds of buffers


def over(
    options: dict[str, Any] | None = None, lanes: int | None = None, **parts: Any
) -> Callable[[Path], ReplayBuffer]:
    """Make buffers over rows with these options; parts are functions that make them."""

    def make(folder: Path) -> ReplayBuffer:
        options_here = dict(options or {})
        if "scratch_dir" in options_here:
            options_here["scratch_dir"] = folder
        how = {"ndim": 2, "lanes": lanes} if lanes else {}
        made = {
            name: part() if callable(part) else part for name, part in parts.items()
        }
        cls = made.pop("cls", ReplayBuffer)
        storage = PackedStorage(STEPS * (lanes or 1), **how, **options_here)
        generator = torch.Generator().manual_seed(3)
        return cls(storage=storage, batch_size=4, generator=generator, **made)

    return make


def of_class(cls: Any, *sizes: Any, **given: Any) -> Callable[[Path], ReplayBuffer]:
    def make(folder: Path) -> ReplayBuffer:
        generator = torch.Generator().manual_seed(3)
        return cls(*sizes, batch_size=4, generator=generator, **given)

    return make


class Doubles(Transform):
    """Modifies rows where they are, replaces an entry, and adds one, on writing."""

    def _inv_call(self, tensordict: Any) -> Any:
        tensordict["achieved_goal"].mul_(2)
        tensordict["next", "achieved_goal"] = tensordict["next", "achieved_goal"] * 2
        return tensordict.set("twice", torch.ones(tensordict.batch_size))


class ByThrees(ReplayBuffer):
    """A user's buffer, which keeps steps until it has three of them."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.kept: list[Any] = []

    def add(self, data: Any) -> Any:
        self.kept.append(data)
        if len(self.kept) < 3:
            return 0
        kept, self.kept = self.kept, []
        return [super(ByThrees, self).add(each) for each in kept][-1]


class Counts(RingWriter):
    """A user's writer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def add(self, data: Any) -> Any:
        self.kept.append(data["action"])
        return super().add(data)


def reserved(lanes: int | None, **given: Any) -> Callable[[Path], ReplayBuffer]:
    """Make buffers whose rows are reserved, as ``from_env`` makes them."""

    def make(folder: Path) -> ReplayBuffer:
        schema = schema_of(transition(**Steps().make(lanes)))
        generator = torch.Generator().manual_seed(3)
        rows = STEPS * (lanes or 1)
        given_here = {"batch_size": 4, "generator": generator} | given
        rb = ReplayBuffer.from_schema(schema, rows, **given_here)
        rb._has_environment = True  # as from_env says
        return rb

    return make


SAMPLERS: dict[str, Any] = {
    "proportional": lambda: ProportionalSampler(STEPS * LANES),
    "rank": lambda: RankSampler(STEPS * LANES),
    "n-step": lambda: NStepSampler(ProportionalSampler(STEPS * LANES), 3, 0.9),
    "hindsight": lambda: HindsightSampler(UniformSampler(), reward_fn),
    "sequence": lambda: SequenceSampler(UniformSampler(), 2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "share_next": {"share_next": ["image"]},
    "frames": {"frames": {"image": 4}},
    "shared": {"shared": True},
    "file": {"scratch_dir": True},
    "reopened": {"scratch_dir": True, "reopen": True},
}
#: Makers of buffers by name, for single environments and for several.
KINDS: dict[tuple[str, int | None], Callable[[Path], Any]] = {}
for _lanes in (None, LANES):
    _over = partial(over, lanes=_lanes)
    _kinds = {name: _over(options) for name, options in OPTIONS.items()}
    _kinds |= {name: _over(sampler=sampler) for name, sampler in SAMPLERS.items()}
    _kinds |= {
        "all at once": _over(
            OPTIONS["frames"] | {"shared": True}, sampler=SAMPLERS["rank"]
        ),
        "statistics": _over(stats=EpisodeStats),
        "transform": _over(transform=Doubles),
        "flow control": _over(samples_per_insert=1.0, min_size=2, tolerance=1e9),
        "device": _over(device="cpu"),
        "subclass": _over(cls=lambda: ByThrees),
        "writer": _over(writer=Counts),
        "generations": _over(writer=lambda: RingWriter(track_generations=True)),
        "reserved": reserved(_lanes),
        "reserved, shared": reserved(_lanes, shared=True),
        "rollout": of_class(RolloutBuffer, STEPS, _lanes, partial=True),
    }
    KINDS |= {(name, _lanes): make for name, make in _kinds.items()}
KINDS["reservoir", None] = over(writer=ReservoirWriter)
KINDS["queue", None] = over(cls=lambda: ExperienceQueue)


@pytest.mark.parametrize(("kind", "lanes"), KINDS, ids=lambda value: str(value or ""))
def test_a_step_becomes_the_row_that_add_writes(kind, lanes, tmp_path):
    twins = Twins(KINDS[kind, lanes], tmp_path, lanes)
    for _ in range(6):
        twins.write(4)
        twins.check()
    if hasattr(twins.rb, "kept"):
        twins.write(2)
        assert_same(*(torch.stack(each.kept[-2:]) for each in twins.both))


APART = (
    *(
        "plain",
        "share_next",
        "frames",
        "shared",
        "file",
        "proportional",
        "rank",
        "n-step",
    ),
    *("all at once", "statistics", "transform", "flow control", "writer", "reserved"),
)


@pytest.mark.parametrize("kind", APART)
def test_lanes_that_advance_alone_get_the_rows_of_extend(kind, tmp_path):
    twins = Twins(KINDS[kind, LANES], tmp_path, LANES)
    twins.write_lanes(1)  # before any step of all lanes
    for lane in range(LANES):
        twins.write_lanes(*[lane] * (3 + 2 * lane), 0)
        twins.check()
        twins.write(2)
        twins.check()


@pytest.mark.parametrize("kind", ["plain", "share_next", "shared", "transform"])
def test_a_handle_begins_an_episode_with_its_first_step(kind, tmp_path):
    twins = Twins(KINDS[kind, LANES], tmp_path, LANES)
    twins.write()
    handles = [each.lane(1) for each in twins.both]
    for count in (1, 2, 3, 4):
        for _ in range(count):
            step = twins.steps.make(LANES, 1)
            handles[0].add_step(**step)
            handles[1].add(transition(**step))
        twins.write()
        if count == 2:
            handles = [each.lane(1) for each in twins.both]
        if count == 3:  # both ways of writing belong to one handle
            step = twins.steps.make(LANES, 1)
            for handle in handles:
                handle.add(transition(**copy.deepcopy(step)))
        twins.check()


# -- what steps consist of

_BOX = spaces.Box(-2, 2, (3,), np.float32)
_NODE = spaces.Dict(inner=spaces.Tuple((_BOX, spaces.MultiBinary(4))), speed=_BOX)
SPACES: dict[str, spaces.Space] = {
    "vector": _BOX,
    "wide": spaces.Box(-2, 2, (2, 2), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (5, 4, 3), np.uint8),
    "no numbers": spaces.Box(0, 1, (0,), np.float32),
    "choice": spaces.Discrete(4),
    "choices": spaces.MultiDiscrete([3, 4]),
    "bits": spaces.MultiBinary((2, 2)),
    "pair": spaces.Tuple((_BOX, spaces.Tuple((spaces.Discrete(3), _BOX)))),
    "nested": spaces.Dict(camera=spaces.Box(0, 255, (2, 2), np.uint8), deep=_NODE),
    "no entries": spaces.Dict(void=spaces.Dict(), place=_BOX),
}


@pytest.mark.parametrize("lanes", [None, 1, LANES])
@pytest.mark.parametrize("name", SPACES)
def test_every_space_is_stored_as_make_transition_converts_it(name, lanes):
    space = SPACES[name] if lanes is None else batch_space(SPACES[name], lanes)
    space.seed(0)
    rb, twin = (over(lanes=lanes)(Path()) for _ in range(2))
    flags = False if lanes is None else np.zeros(lanes, bool)
    reward = 0.5 if lanes is None else np.full(lanes, 0.1)
    for _ in range(9):
        before, action, after = space.sample(), space.sample(), space.sample()
        step = {"observation": before, "action": action, "next_observation": after}
        step |= {"reward": reward, "terminated": flags, "truncated": flags}
        rb.add_step(**step)
        twin.add(transition(**step))
    assert_same(rb[:], twin[:])


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
def test_extras_of_every_kind_are_stored(schema):
    rb, twin = (over(lanes=LANES)(Path()) for _ in range(2))
    steps = Steps()
    for number in range(STEPS + 3):
        data = transitions(schema, None, (LANES,), seed=number)
        for key, value in [*data.items(True, True)]:
            if value.dtype.itemsize < 4 and value.is_floating_point():
                del data[key]  # NumPy lacks bfloat16 and float8
        step = steps.make(LANES) | {"more": data, "next": {"more": data.to_dict()}}
        rb.add_step(**step)
        twin.add(transition(**step))
    assert_same(rb[:], twin[:])


def test_bfloat16_is_refused_with_a_way_that_works(tmp_path):
    rb, step = over()(tmp_path), Steps().make()
    step["hidden"] = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(SchemaError, match="'hidden' is torch.bfloat16.*with add"):
        rb.add_step(**step)
    rb.add(transition(**step))
    assert rb[0]["hidden"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1, 2, np.float32(0.3), np.float64(0.1), np.nan, -np.inf, 1e300, 2.0**24],
        [True, np.int8(-3), np.bool_(False), torch.tensor(3), torch.tensor(0.7)],
        [torch.tensor(0.1, dtype=torch.float16), torch.tensor([0.3]), [0.25], 7],
        [np.array([0.1]), np.array([[0.1]])[0], 0.1, np.float64(1e300)],
    ],
    ids=["numbers", "other types", "lists", "arrays"],
)
def test_a_reward_is_stored_as_make_transition_converts_it(rewards):
    rb, steps = over()(Path()), Steps()
    rows = []
    for reward in [0.0, *rewards]:
        step = steps.make() | {"reward": reward}
        rb.add_step(**step)
        rows.append(transition(**step)["next", "reward"].float())
    assert_same(rb.chronological()["next", "reward"], torch.stack(rows)[-STEPS:])


@pytest.mark.parametrize("shape", [(3,), (1, 2), (2, 1)])
@pytest.mark.parametrize("lanes", [None, LANES])
def test_several_rewards_have_the_shape_of_the_first_ones(shape, lanes):
    rb, twin = (over(lanes=lanes)(Path()) for _ in range(2))
    lead, steps = (lanes,) if lanes else (), Steps()
    for _ in range(4):
        step = steps.make(lanes)
        step["reward"] = steps.rng.normal(size=(*lead, *shape))
        rb.add_step(**step)
        twin.add(transition(**step))
    assert_same(rb[:], twin[:])
    fault = r"'reward'.* came with shape .* the rows hold .*give rewards of this shape"
    with pytest.raises(SchemaError, match=fault):
        rb.add_step(**step | {"reward": np.zeros(lead)})
    assert_same(rb[:], twin[:])


def test_whole_numbers_in_float64_rewards_are_exact_from_the_first_step_on():
    schema = schema_of(transition(**Steps().make()))
    schema["next", "reward"] = torch.empty(1, dtype=torch.float64, device="meta")
    rb, steps = ReplayBuffer.from_schema(schema, STEPS), Steps()
    for reward in (2.0**24 + 1, 0.1, 2**40 + 1, np.int64(2**24 + 1)):
        rb.add_step(**steps.make() | {"reward": reward})
    found = rb[:]["next", "reward"].flatten().tolist()
    assert found == [2.0**24 + 1, 0.1, 2.0**40 + 1, 2.0**24 + 1]


def widened(step: dict[str, Any]) -> dict[str, Any]:
    """Return a step of equal numbers, as other types."""
    image, pair = step["observation"]["image"], step["observation"]["pair"]
    observation = step["observation"] | {
        "image": image.astype(np.int64),
        "achieved_goal": step["observation"]["achieved_goal"].astype(np.float64),
        "desired_goal": [1],
        "pair": (torch.from_numpy(pair[0]), pair[1].astype(np.int32)),
    }
    flags = {
        "terminated": float(step["terminated"]),
        "truncated": int(step["truncated"]),
    }
    return step | {"observation": observation, "action": int(step["action"])} | flags


@pytest.mark.parametrize("at", range(3))
def test_numbers_of_other_types_are_cast_in_the_first_and_in_later_steps(at):
    rb, twin = (reserved(None)(Path()) for _ in range(2))
    steps = Steps()
    for number in range(3):
        step = steps.make()
        rb.add_step(**widened(step) if number == at else step)
        twin.add(transition(**step))
    assert_same(rb[:], twin[:])


def test_tensors_of_any_kind_are_steps():
    rb, twin = (over()(Path()) for _ in range(2))
    weights = torch.ones(2, dtype=torch.complex64)
    for number in range(4):
        before = TensorDict({"place": torch.full((2,), float(number))})
        after = TensorDict(
            {"place": torch.full((2,), number + 1.0, requires_grad=True)}
        )
        outcome = torch.tensor(0.5), after, torch.tensor(False), torch.tensor(True)
        more = {"wave": weights.conj(), "obs": torch.ones(3).t(), "reward": 1}
        rb.add_step(
            observation=before,
            action=torch.tensor(number),
            reward=outcome[0],
            next_observation=after,
            terminated=outcome[2],
            truncated=outcome[3],
            **{"wave": more["wave"], "obs": 1.0},
        )
        data = make_transition(
            before, torch.tensor(number), *outcome, wave=more["wave"]
        )
        twin.add(data.detach().set("obs", torch.tensor(1.0)))
    assert_same(rb[:], twin[:])
    low = torch.ones(2, dtype=torch.bfloat16)
    rb.add_step(
        observation={"place": low},
        action=1,
        reward=0.0,
        next_observation={"place": low},
        terminated=False,
        truncated=False,
        wave=weights,
        obs=0.0,
    )
    assert rb[-1]["place"].tolist() == [1.0, 1.0]
