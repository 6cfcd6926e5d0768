"""``add_step`` writes what ``add(make_transition(...))`` writes, for all kinds of
buffers, spaces and changes between two steps; a step that is refused changes nothing.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
import weakref
from collections.abc import Callable
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
    TrajectoryIndex,
    make_transition,
    schema_of,
)
from rlbuf_td.storages.episodes import TRAJ_KEY
from tests.catalogue import SCHEMAS, assert_same, transitions

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
    """Modifies rows where they are, and replaces an entry, on writing."""

    def _inv_call(self, tensordict: Any) -> Any:
        tensordict["achieved_goal"].mul_(2)
        after = tensordict["next", "achieved_goal"] * 2
        return tensordict.set(("next", "achieved_goal"), after)


class Adds(Doubles):
    def _inv_call(self, tensordict: Any) -> Any:
        size = tensordict.batch_size
        return super()._inv_call(tensordict).set("twice", torch.ones(size))


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


def reserved(lanes: int | None, **given: Any) -> Callable[[Path], ReplayBuffer]:
    """Make buffers whose rows are reserved, as ``from_env`` makes them."""

    def make(folder: Path) -> ReplayBuffer:
        schema = schema_of(transition(**Steps().make(lanes)))
        generator = torch.Generator().manual_seed(3)
        rows = STEPS * (lanes or 1)
        made = {
            name: part() if callable(part) else part for name, part in given.items()
        }
        how = {"batch_size": 4, "generator": generator} | made
        rb = ReplayBuffer.from_schema(schema, rows, **how)
        rb._has_environment = True  # as from_env says
        return rb

    return make


#: Makers of buffers by name, for single environments and for several.
KINDS: dict[tuple[str, int | None], Callable[[Path], Any]] = {}
for _lanes in (None, LANES):
    _over = partial(over, lanes=_lanes)
    _kinds = {
        "plain": _over(),
        "share_next": _over({"share_next": ["image"]}),
        "proportional": _over(sampler=partial(ProportionalSampler, STEPS * LANES)),
        "all at once": _over(
            {"frames": {"image": 4}, "shared": True},
            sampler=partial(RankSampler, STEPS * LANES),
        ),
        "statistics": _over(stats=EpisodeStats),
        "transform": _over(transform=Adds),
        "subclass": _over(cls=lambda: ByThrees),
        "writer": _over(writer=Counts),
        "reserved": reserved(_lanes),
        "reserved, shared": reserved(_lanes, shared=True),
        "rollout": of_class(RolloutBuffer, STEPS, _lanes, partial=True),
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
    with pytest.raises(SchemaError, match=r"'hidden' is torch.bfloat16.*with add"):
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
        outcome: Any = (0.0, np.zeros(1), False, False)
        made = make_transition(np.zeros(1), value, *outcome, more=value)
        rb: Any = ReplayBuffer()
        rb.add_step(
            observation=np.zeros(1),
            action=value,
            reward=[0.1],
            next_observation=np.zeros(1),
            terminated=False,
            truncated=False,
            more=value,
        )
        expected = torch.tensor(value)
    finally:
        torch.set_default_dtype(before)
    for step in (made, rb.storage[0]):
        for key in ("action", "more"):
            assert step[key].dtype == expected.dtype
            assert torch.equal(step[key], expected)
    assert rb.storage["next", "reward"].dtype == torch.float32


def test_tensors_of_any_kind_are_steps():
    make_buffer = over()
    rb = make_buffer(Path())
    twin = make_buffer(Path())
    wave = torch.ones(2, dtype=torch.complex64)
    conjugate = wave.conj()
    reward = torch.tensor(0.5)
    terminated = torch.tensor(False)
    truncated = torch.tensor(True)
    for number in range(4):
        action = torch.tensor(number)
        obs = TensorDict({"place": torch.full((2,), float(number))})
        with_grad = torch.full((2,), number + 1.0, requires_grad=True)
        next_obs = TensorDict({"place": with_grad})
        rb.add_step(
            observation=obs,
            action=action,
            reward=reward,
            next_observation=next_obs,
            terminated=terminated,
            truncated=truncated,
            wave=conjugate,
            obs=1.0,
        )
        row = make_transition(
            obs, action, reward, next_obs, terminated, truncated, wave=conjugate
        )
        twin.add(row.detach().set("obs", torch.tensor(1.0)))
    assert_same(rb[:], twin[:])
    low_precision = torch.ones(2, dtype=torch.bfloat16)
    rb.add_step(
        observation={"place": low_precision},
        action=1,
        reward=0.0,
        next_observation={"place": low_precision},
        terminated=False,
        truncated=False,
        wave=wave,
        obs=0.0,
    )
    assert rb[-1]["place"].tolist() == [1.0, 1.0]


# -- what happens between two steps


def copied_by(copier: Callable[[Any], Any]) -> Callable[[Twins, Path], None]:
    def change(twins: Twins, folder: Path) -> None:
        twins.rb, twins.twin = map(copier, twins.both)

    return change


def with_both(change: Callable[..., Any]) -> Callable[[Twins, Path], None]:
    def change_both(twins: Twins, folder: Path) -> None:
        for number, each in enumerate(twins.both):
            change(each, folder / f"part{number}")

    return change_both


def load_dump(rb: ReplayBuffer, folder: Path) -> None:
    rb.dumps(folder)
    rb.add_step(**Steps(9).make(LANES))
    rb.loads(folder)


def load_state(rb: ReplayBuffer, folder: Path) -> None:
    state = copy.deepcopy(rb.state_dict())
    rb.empty()
    rb.load_state_dict(state)


def load_another(rb: ReplayBuffer, folder: Path) -> None:
    """Load the rows of another buffer."""
    steps = Steps(9)
    other = ReplayBuffer(storage=PackedStorage(STEPS * LANES, ndim=2), batch_size=4)
    for _ in range(STEPS + 2):
        step = steps.make(LANES)
        if rb.storage.layout is not None and TRAJ_KEY in rb.storage.layout.places:
            step["collector"] = {"traj_ids": np.zeros(LANES, np.int64)}
        other.add_step(**step)
    other.dumps(folder)
    rb.loads(folder, rows_only=True)


def replace_storage(rb: ReplayBuffer, folder: Path) -> None:
    rb.set_storage(PackedStorage(STEPS * LANES, ndim=2, lanes=LANES))


def replace_parts(rb: ReplayBuffer, folder: Path) -> None:
    rb.set_sampler(RankSampler(STEPS * LANES))
    rb.set_writer(RingWriter())


def count_episodes(rb: ReplayBuffer, folder: Path) -> None:
    rb.episode_stats = EpisodeStats()


def attach_another(rb: ReplayBuffer, folder: Path) -> None:
    sampler = ProportionalSampler(STEPS * LANES)
    vars(rb)["other"] = ReplayBuffer(storage=rb.storage, sampler=sampler, batch_size=4)


def update(rb: ReplayBuffer, folder: Path) -> None:
    batch = rb.sample()
    batch["td_error"] = torch.linspace(1, 9, len(batch))
    rb.update_tensordict_priority(batch)


CHANGES: dict[str, Callable[[Twins, Path], Any]] = {
    "empty": with_both(lambda rb, folder: rb.empty()),
    "load a dump": with_both(load_dump),
    "load a state": with_both(load_state),
    "load another buffer": with_both(load_another),
    "share": with_both(lambda rb, folder: rb.share()),
    "set_storage": with_both(replace_storage),
    "set_sampler, set_writer": with_both(replace_parts),
    "count episodes": with_both(count_episodes),
    "append_transform": with_both(lambda rb, folder: rb.append_transform(Doubles())),
    "attach another": with_both(attach_another),
    "look up": with_both(lambda rb, folder: TrajectoryIndex(rb.storage)),
    "update": with_both(update),
    "deepcopy": copied_by(copy.deepcopy),
    "pickle": copied_by(lambda rb: pickle.loads(pickle.dumps(rb))),
}


@pytest.mark.parametrize(
    ("change", "kind"),
    [(change, "proportional") for change in CHANGES]
    + [(change, "share_next") for change in ("empty", "load a dump", "share", "pickle")]
    + [(change, "reserved") for change in ("load a state", "share", "deepcopy")],
)
def test_steps_go_on_after_what_changes_a_buffer(change, kind, tmp_path):
    twins = Twins(KINDS[kind, LANES], tmp_path, LANES)
    for count in (5, STEPS + 1):
        twins.write(count)
        twins.write_lanes(1)
        CHANGES[change](twins, tmp_path / str(count))
        if count == 5:  # another write is the first one after the change
            row = transition(**twins.steps.make(LANES))
            for buffer in twins.both:
                buffer.add(row.clone())
        twins.write(3)
        twins.write_lanes(2, 0, 0)
        twins.check()
        others = [vars(buffer).get("other") for buffer in twins.both]
        if others[0] is not None:
            assert state_of(others[0])[0] == state_of(others[1])[0]


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
    written: list[list[Any]] = [[] for _ in range(8)]
    errors = []

    def work(lane: int) -> None:
        steps, handle = Steps(lane), rb.lane(lane)
        try:
            for number in range(60):
                step = steps.make()
                if number % 3:
                    handle.add_step(**step)
                else:
                    rb.add_step(**step, lane=lane)
                written[lane].append(transition(**step))
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for lane in range(8):
        expected = torch.stack(written[lane][-STEPS:])
        assert_same(rb.lane(lane).chronological().exclude("index"), expected)


def test_priorities_are_set_by_td_errors_in_steps(tmp_path):
    twins = Twins(KINDS["proportional", LANES], tmp_path, LANES)
    for _ in range(4):
        step = twins.steps.make(LANES)
        step["td_error"] = twins.steps.rng.random((LANES, 1)).astype(np.float32)
        twins.rb.add_step(**step)
        twins.twin.add(transition(**step))
    twins.check()
    assert len({*state_of(twins.rb)[0]["priority"]}) == 4 * LANES


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
    before = state_of(twins.rb)
    for _ in range(2):  # a step after an error is seen as a first one
        with pytest.raises(SchemaError, match=fault):
            twins.rb.add_step(**change(step))
    numbers, rows = state_of(twins.rb)
    assert numbers == before[0]
    if rows is not None:
        assert_same(rows, before[1])
    twins.write(2)
    twins.check()


def test_no_number_is_refused_that_is_not_a_number(tmp_path):
    twins = Twins(KINDS["plain", None], tmp_path)
    twins.write()
    step = twins.steps.make()
    step["observation"]["achieved_goal"] = np.array([np.nan])
    step["next_observation"]["achieved_goal"][:] = -np.inf
    step["reward"] = np.nan
    twins.rb.add_step(**step)
    rows = twins.rb[-1]
    assert rows["achieved_goal"].isnan().all()
    assert rows["next", "achieved_goal"].isneginf().all()
    assert rows["next", "reward"].isnan().all()


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
        before = state_of(twins.rb)[0]
        for _ in range(2):  # a step after an error is seen as a first one
            with pytest.raises(error, match=fault):
                twins.rb.add_step(**Steps().make(given), lane=lane)
            assert state_of(twins.rb)[0] == before
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
    flags, values = np.zeros((2, 3), bool), np.zeros((2, 3, 4), np.float32)
    step = {"observation": values, "action": flags, "reward": values[..., 0]}
    step |= {"next_observation": values, "terminated": flags, "truncated": flags}
    with pytest.raises(SchemaError, match=r"ndim=3: use add\(make_transition"):
        rb.add_step(**step)
    rb.add(transition(**step))
    assert len(rb) == 6


@pytest.mark.parametrize("count", range(3))
def test_a_buffer_that_was_shut_down_refuses_steps(count, tmp_path):
    twins = Twins(KINDS["plain", None], tmp_path)
    twins.write(count)
    twins.rb.shutdown()
    with pytest.raises(ShutDown, match="no longer sampled, written"):
        twins.rb.add_step(**twins.steps.make())
    assert len(twins.rb) == count


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
