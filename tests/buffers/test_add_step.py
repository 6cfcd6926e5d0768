"""``add_step`` writes what ``add(make_transition(...))`` writes, for all kinds of
buffers, spaces and changes between two steps; a step that is refused changes nothing.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    RolloutBuffer,
    SchemaError,
    ShutDown,
    make_transition,
    schema_of,
)
from tests.catalogue import SCHEMAS, assert_same, transitions
from tests.test_goes_on import ALWAYS, assert_equal, everything
from tests.test_refusals import contents

STEPS, LANES = 7, 3
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

    def check(self) -> None:
        assert_equal(everything(self.rb), everything(self.twin), ALWAYS)
        assert_same(self.rb.sample(4), self.twin.sample(4))


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


class Doubles(Transform):
    """Modifies rows where they are, and replaces an entry, on writing."""

    def _inv_call(self, tensordict: Any) -> Any:
        tensordict["achieved_goal"].mul_(2)
        after = tensordict["next", "achieved_goal"] * 2
        return tensordict.set(("next", "achieved_goal"), after)


class ByThrees(ReplayBuffer):
    """A user's buffer, which keeps steps until it has three of them."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.kept: list[Any] = []

    def add(self, data: Any, *columns: object) -> Any:
        self.kept.append(data)
        if len(self.kept) < 3:
            return 0
        kept, self.kept = self.kept, []
        return [super(ByThrees, self).add(step) for step in kept][-1]


class Counts(RingWriter):
    """A user's writer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def add(self, data: Any) -> Any:
        self.kept.append(data["action"])
        return super().add(data)


def reserved(lanes: int | None, **parts: Any) -> Callable[[Path], ReplayBuffer]:
    """Make buffers whose rows are reserved, as ``from_env`` makes them."""

    def make(folder: Path) -> ReplayBuffer:
        schema = schema_of(transition(**Steps().make(lanes)))
        generator = torch.Generator().manual_seed(3)
        how = {"batch_size": 4, "generator": generator} | parts
        rb = ReplayBuffer.from_schema(schema, STEPS * (lanes or 1), **how)
        rb._has_environment = True  # as from_env says
        return rb

    return make


def rollout(lanes: int | None) -> Callable[[Path], ReplayBuffer]:
    return lambda folder: RolloutBuffer(
        STEPS, lanes, partial=True, batch_size=4, generator=torch.Generator()
    )


#: Makers of buffers by name, for single environments and for several.
KINDS: dict[tuple[str, int | None], Callable[[Path], Any]] = {}
for _lanes in (None, LANES):
    _over = partial(over, lanes=_lanes)
    _kinds = {
        "plain": _over(),
        "proportional": _over(sampler=partial(ProportionalSampler, STEPS * LANES)),
        "all at once": _over(
            {"frames": {"image": 4}, "shared": True},
            sampler=partial(RankSampler, STEPS * LANES),
        ),
        "statistics": _over(stats=EpisodeStats),
        "transform": _over(transform=Doubles),
        "subclass": _over(cls=lambda: ByThrees),
        "writer": _over(writer=Counts),
        "reserved": reserved(_lanes),
        "reserved, shared": reserved(_lanes, shared=True),
        "rollout": rollout(_lanes),
    }
    KINDS |= {(name, _lanes): make for name, make in _kinds.items()}
KINDS["reservoir", None] = over(writer=ReservoirWriter)


@pytest.mark.parametrize(("kind", "lanes"), KINDS, ids=lambda value: str(value or ""))
def test_a_step_becomes_the_row_that_add_writes(kind, lanes, tmp_path):
    twins = Twins(KINDS[kind, lanes], tmp_path, lanes)
    for _ in range(6):
        twins.write(4)
        twins.check()
    if hasattr(twins.rb, "kept"):
        twins.write(2)
        assert_same(*(torch.stack(buffer.kept[-2:]) for buffer in twins.both))


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


def write_converted(steps: Sequence[dict[str, Any]], lanes: int | None) -> Any:
    """Write steps, and compare the rows with those that ``make_transition`` makes of
    them; return the buffer."""
    rb, twin = (over(lanes=lanes)(Path()) for _ in range(2))
    for step in steps:
        rb.add_step(**step)
        twin.add(transition(**step))
    assert_same(rb[:], twin[:])
    return rb


@pytest.mark.parametrize("lanes", [None, 1, LANES])
@pytest.mark.parametrize("name", SPACES)
def test_every_space_is_stored_as_make_transition_converts_it(name, lanes):
    space = SPACES[name] if lanes is None else batch_space(SPACES[name], lanes)
    space.seed(0)
    flags = False if lanes is None else np.zeros(lanes, bool)
    outcome = {"reward": 0.5 if lanes is None else np.full(lanes, 0.1)}
    outcome |= {"terminated": flags, "truncated": flags}
    entries = "observation", "action", "next_observation"
    steps = [{key: space.sample() for key in entries} | outcome for _ in range(9)]
    write_converted(steps, lanes)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=str)
def test_extras_of_every_kind_are_stored(schema):
    made, steps = Steps(), []
    for number in range(STEPS + 3):
        data = transitions(schema, None, (LANES,), seed=number)
        for key, value in [*data.items(True, True)]:
            if value.dtype.itemsize < 4 and value.is_floating_point():
                del data[key]  # NumPy lacks bfloat16 and float8
        steps.append(
            made.make(LANES) | {"more": data, "next": {"more": data.to_dict()}}
        )
    write_converted(steps, LANES)


def in_observation(step: dict[str, Any], **entries: Any) -> dict[str, Any]:
    return {"observation": step["observation"] | entries}


REWARDS = [2, np.float32(0.3), np.nan, -np.inf, 1e300, 2.0**24, True, [0.25]]
REWARDS += [np.int8(-3), np.bool_(False), np.array([0.1]), torch.tensor(3)]
REWARDS += [torch.tensor(0.1, dtype=torch.float16), torch.tensor([0.3])]
#: Entries of a step, given as other types; the flags are those of the step.
TYPES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **{
        f"reward {reward!r}": lambda step, reward=reward: {"reward": reward}
        for reward in REWARDS
    },
    "numbers": lambda step: {
        "action": int(step["action"]),
        "terminated": float(step["terminated"]),
        "truncated": torch.tensor(int(step["truncated"])),
    },
    "wider arrays": lambda step: in_observation(
        step,
        image=step["observation"]["image"].astype(np.int64),
        achieved_goal=step["observation"]["achieved_goal"].astype(np.float64),
        desired_goal=[1],
    ),
    "no number": lambda step: in_observation(
        step, achieved_goal=np.array([np.nan]), desired_goal=[-np.inf]
    ),
    "tensors": lambda step: in_observation(
        step,
        achieved_goal=torch.tensor([0.5], requires_grad=True),
        desired_goal=torch.ones(1, dtype=torch.bfloat16),
        pair=(torch.from_numpy(step["observation"]["pair"][0]), np.int32(3)),
    ),
    "a TensorDict": lambda step: {
        "observation": make_transition(*[*step.values()][:6]).select(
            *step["observation"]
        )
    },
    "a conjugate": lambda step: {
        "state_value": torch.ones(1, dtype=torch.complex64).conj().imag
    },
}


@pytest.mark.parametrize("name", TYPES)
def test_other_types_are_cast_in_the_first_and_in_later_steps(name):
    rb, steps, expected = reserved(None)(Path()), Steps(), []
    for number in range(4):
        step = steps.make()
        changed = step | TYPES[name](step) if number != 1 else step
        rb.add_step(**changed)
        flags = {name: step[name] for name in ("terminated", "truncated")}
        row = transition(**changed | flags).detach()
        expected.append(row.apply(lambda x, y: x.to(y.dtype), transition(**step)))
    assert_same(rb[:], torch.stack(expected))


def test_bfloat16_is_refused_with_a_way_that_works(tmp_path):
    rb, step = over()(tmp_path), Steps().make()
    step["hidden"] = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(SchemaError, match=r"'hidden' is torch.bfloat16.*with add"):
        rb.add_step(**step)
    rb.add(transition(**step))
    assert rb[0]["hidden"].dtype is torch.bfloat16


@pytest.mark.parametrize("shape", [(3,), (1, 2), (2, 1)])
@pytest.mark.parametrize("lanes", [None, LANES])
def test_several_rewards_have_the_shape_of_the_first_ones(shape, lanes):
    lead, made = (lanes,) if lanes else (), Steps()
    steps = [
        made.make(lanes) | {"reward": made.rng.normal(size=(*lead, *shape))}
        for _ in range(4)
    ]
    rb = write_converted(steps, lanes)
    fault = r"'reward'.* came with shape .* the rows hold .*give rewards of this shape"
    with pytest.raises(SchemaError, match=fault):
        rb.add_step(**made.make(lanes))
    assert len(rb) == 4 * (lanes or 1)


def test_whole_numbers_in_float64_rewards_are_exact_from_the_first_step_on():
    schema = schema_of(transition(**Steps().make()))
    schema["next", "reward"] = torch.empty(1, dtype=torch.float64, device="meta")
    rb, steps = ReplayBuffer.from_schema(schema, STEPS), Steps()
    rewards = [2**24 + 1, 0.1, 2**40 + 1]
    for reward in rewards:
        rb.add_step(**steps.make() | {"reward": reward})
    assert rb[:]["next", "reward"].flatten().tolist() == rewards


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "value",
    [0.5, [0.5, 1.5], [[0.5], [1.5]], [1, 2.5], [1, 2], [True, False], [1j, 0.5]],
    ids=str,
)
def test_lists_of_numbers_have_the_dtypes_of_torch(value: Any, default: Any) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        expected = torch.tensor(value)
        step = Steps().make() | {"action": value, "more": value, "reward": [0.1]}
        rb = write_converted([step], None)
    finally:
        torch.set_default_dtype(before)
    assert_same(rb[0]["action"], expected)
    assert_same(rb[0]["more"], expected)
    assert rb[0]["next", "reward"].dtype == torch.float32


# -- what happens between two steps


def replace_parts(rb: ReplayBuffer) -> None:
    rb.set_sampler(RankSampler(STEPS * LANES))
    rb.set_writer(RingWriter())


def attach_another(rb: ReplayBuffer) -> None:
    sampler = ProportionalSampler(STEPS * LANES)
    vars(rb)["other"] = ReplayBuffer(storage=rb.storage, sampler=sampler, batch_size=4)


#: ``tests/test_lockstep.py`` has others: loads, copies, updates.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "set_storage": lambda rb: rb.set_storage(
        PackedStorage(STEPS * LANES, ndim=2, lanes=LANES)
    ),
    "set_sampler, set_writer": replace_parts,
    "count episodes": lambda rb: setattr(rb, "episode_stats", EpisodeStats()),
    "append_transform": lambda rb: rb.append_transform(Doubles()),
    "attach another": attach_another,
}


@pytest.mark.parametrize("change", CHANGES)
def test_steps_go_on_after_what_changes_a_buffer(change, tmp_path):
    twins = Twins(KINDS["proportional", LANES], tmp_path, LANES)
    for count in (5, STEPS + 1):
        twins.write(count)
        twins.write_lanes(1)
        for buffer in twins.both:
            CHANGES[change](buffer)
        twins.write(3)
        twins.write_lanes(2, 0, 0)
        twins.check()
        if change == "attach another":
            one, other = (everything(vars(buffer)["other"]) for buffer in twins.both)
            assert_equal(one, other, ALWAYS)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_buffer_that_is_shut_down_refuses_steps(is_first):
    rb, steps = ReplayBuffer(storage=PackedStorage(STEPS)), Steps()
    count = 0 if is_first else 3  # later steps are written in one compiled call
    for _ in range(count):
        rb.add_step(**steps.make())
    rb.shutdown()
    with pytest.raises(ShutDown):
        rb.add_step(**steps.make())
    assert len(rb) == count


def test_td_errors_in_steps_set_priorities(tmp_path):
    rb = KINDS["proportional", LANES](tmp_path)
    errors = np.arange(1.0, 4.0, dtype=np.float32)[:, None]
    for factor in (1, 2):
        rb.add_step(**Steps().make(LANES), td_error=errors * factor)
    assert rb.sampler.priority(torch.arange(6)).tolist() == [1, 2, 3, 2, 4, 6]


def test_the_memory_of_a_step_keeps_no_rows():
    rb, steps, gone = over(lanes=LANES)(Path()), Steps(), []
    for _ in range(3):
        rb.add_step(**steps.make(LANES))
    kept = rb.storage
    weakref.finalize(kept.rows, gone.append, True)
    rb.set_storage(PackedStorage(STEPS * LANES, ndim=2, lanes=LANES))
    del kept
    assert gone


def test_each_thread_has_a_step_of_its_own():
    rb = over(lanes=8)(Path())
    rb.add_step(**Steps().make(8))
    rb.empty()

    def work(lane: int) -> TensorDict:
        steps, handle, written = Steps(lane), rb.lane(lane), []
        for number in range(60):
            step = steps.make()
            if number % 3:
                handle.add_step(**step)
            else:
                rb.add_step(**step, lane=lane)
            written.append(transition(**step))
        return torch.stack(written[-STEPS:])

    with ThreadPoolExecutor(8) as pool:
        written = [*pool.map(work, range(8))]
    for lane, expected in enumerate(written):
        assert_same(rb.lane(lane).chronological().exclude("index"), expected)


# -- what is refused


def _with(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda step: step | {name: value}


def _observed(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda step: step | {"observation": step["observation"] | {name: value}}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "another shape": (
        _with("action", np.zeros(2, np.int64)),
        "'action' came (with shape|as int64 of shape)",
    ),
    "another length": (
        _observed("image", np.zeros((4, 5), np.uint8)),
        "'image' (came with shape|has|is)",
    ),
    "a fraction": (_with("action", 0.5), "'action' came as float64.*cast it first"),
    "NaN as an int": (_with("action", np.nan), "'action' came as float64"),
    "a long int": (
        _observed("desired_goal", [2**24 + 1]),
        "'desired_goal' is 16777217",
    ),
    "a long float": (_observed("desired_goal", [2.0**24 + 1]), "is 16777217"),
    "a high number": (
        _observed("image", np.full((4, 4), 256, np.int64)),
        "'image' came as int64, expected uint8",
    ),
    "a long reward": (_with("reward", 2**24 + 1), "'reward'.* is 16777217"),
    "objects": (
        _observed("desired_goal", np.array([None])),
        "'desired_goal' (came as object|is a ndarray of dtype object)",
    ),
    "no action": (_with("action", None), "'action' (came as object|is a NoneType)"),
    "a word": (_with("action", "left"), "'action' (came as <U4|is a str)"),
    "a ragged list": (
        _observed("image", [[1, 2], [3]]),
        "'image' is a list whose items differ in shape",
    ),
    "two rewards": (_with("reward", [1.0, 2.0]), "'reward'.*shape"),
    "a flag of 2": (
        _with("terminated", 2),
        "'terminated'.* came as int64, expected bool",
    ),
    "two flags": (_with("truncated", np.zeros(2, bool)), "'truncated'.*shape"),
    "flags of lanes": (
        lambda step: step | {"terminated": np.zeros(2, bool), "truncated": [False] * 2},
        "the leading dims .* of 'terminated'",
    ),
    "no observation": (
        _with("observation", {}),
        "('observation' has the entries|missing)",
    ),
    "one observation less": (
        lambda step: (
            step
            | {
                "observation": {
                    key: step["observation"][key] for key in ("image", "pair")
                }
            }
        ),
        "('observation' has the entries|missing before)",
    ),
    "one observation more": (
        _observed("more", 1),
        "('observation' has the entries|more)",
    ),
    "an observation renamed": (
        lambda step: (
            step
            | {
                "observation": {"x": 1}
                | {k: v for k, v in step["observation"].items() if k != "image"}
            }
        ),
        "(other entries than the first|missing)",
    ),
    "no dict": (_with("observation", np.zeros(3)), "(other entries|missing)"),
    "a tuple of one": (
        _observed("pair", (np.zeros(2),)),
        r"('observation', 'pair'\) has the entries \['0'\]|missing)",
    ),
    "a dict in its place": (_with("action", {"a": 1}), "'action'"),
    "an extra more": (_with("more", 1), "('extras' has the entries|more)"),
    "an extra less": (
        lambda step: {key: step[key] for key in step if key != "state_value"},
        "('extras' has the entries|state_value)",
    ),
    "an extra less in next": (
        _with("next", {}),
        r"('extras', 'next'\) has|state_value)",
    ),
    "an extra renamed": (
        lambda step: {
            ("x" if key == "state_value" else key): step[key] for key in step
        },
        "(other entries than the first|state_value|'x')",
    ),
    "a key that is no string": (_observed(3, 1), "(keys are strings|has the entries)"),  # pyrefly: ignore [bad-argument-type]
}


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_step_changes_nothing_and_the_next_one_is_written(name, is_first):
    """``is_first``: the rows are those of another way of writing."""
    change, fault = REFUSED[name]
    twins = Twins(KINDS["proportional", None], Path())
    if is_first:
        row = transition(**twins.steps.make())
        for buffer in twins.both:
            buffer.add(row)
    else:
        twins.write(3)
    step = twins.steps.make()
    before = contents(twins.rb)
    for _ in range(2):  # a step after an error is seen as a first one
        with pytest.raises(SchemaError, match=fault):
            twins.rb.add_step(**change(step))
    assert contents(twins.rb) == before
    twins.write(2)
    twins.check()


LANE_FAULTS: list[tuple[Any, int | None, Any, type[Exception], str]] = [
    (LANES, None, LANES, IndexError, "lane 3 is out of range: lanes are 0 to 2"),
    (LANES, None, -1, (IndexError, ValueError), "lane.* -1"),
    (LANES, None, True, TypeError, "lane must be a whole number"),
    (LANES, None, [1], TypeError, "lane must be a whole number"),
    (LANES, LANES, 1, SchemaError, "lane= takes the step of one environment"),
    (LANES, None, None, SchemaError, r"give bools \[E\], or lane=e"),
    (LANES, 2, None, SchemaError, "rows have 3 lanes: give the step of all|expected"),
    (LANES, 4, None, SchemaError, "rows have 3 lanes: give the step of all|expected"),
    (None, None, 0, TypeError, "lane= needs a PackedStorage.*ndim=2"),
    (None, LANES, None, SchemaError, "give one bool, or make the buffer with from_env"),
]


@pytest.mark.parametrize(("lanes", "given", "lane", "error", "fault"), LANE_FAULTS)
def test_steps_of_other_lanes_than_a_buffer_has_are_refused(
    lanes, given, lane, error, fault, tmp_path
):
    for count in range(3):
        twins = Twins(KINDS["plain", lanes], tmp_path, lanes)
        twins.write(count)
        before = contents(twins.rb)
        for _ in range(2):  # a step after an error is seen as a first one
            with pytest.raises(error, match=fault):
                twins.rb.add_step(**Steps().make(given), lane=lane)
            assert contents(twins.rb) == before
        twins.write()
        twins.check()


def test_writers_of_whole_time_steps_refuse_the_step_of_a_lane(tmp_path):
    rb, steps = KINDS["rollout", LANES](tmp_path), Steps()
    for _ in range(3):
        rb.add_step(**steps.make(LANES))
        with pytest.raises(TypeError, match="lane= needs a RingWriter"):
            rb.add_step(**Steps().make(), lane=1)


def test_rows_of_several_batch_dims_are_refused_with_a_way_that_works():
    rb = ReplayBuffer(storage=PackedStorage(24, ndim=3), batch_size=2)
    values, flags = np.zeros((2, 3), np.float32), np.zeros((2, 3), bool)
    entries = "observation", "action", "reward", "next_observation"
    step = dict.fromkeys(entries, values) | {"terminated": flags, "truncated": flags}
    with pytest.raises(SchemaError, match=r"ndim=3: use add\(make_transition"):
        rb.add_step(**step)
    rb.add(transition(**step))
    assert len(rb) == 6


def test_a_step_that_waits_for_flow_control_is_written_as_it_was_given(tmp_path):
    make = over(samples_per_insert=1.0, min_size=4, tolerance=4.0)
    twins = Twins(make, tmp_path)
    steps = [twins.steps.make() for _ in range(14)]

    def work() -> None:
        for step in steps:
            twins.rb.add_step(**step)

    writer = threading.Thread(target=work)
    writer.start()
    while writer.is_alive():
        with suppress(RuntimeError):  # not yet
            twins.rb.sample()
        time.sleep(0.001)
    writer.join()
    assert twins.rb.health()["insert_waits"] > 0
    expected = torch.stack([transition(**step) for step in steps])[-STEPS:]
    assert_same(twins.rb.chronological().exclude("index"), expected)
