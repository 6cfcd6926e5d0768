"""Two ways in to one thing do the same: ``add`` and ``extend``, a lane's handle and the
whole buffer, the recorders, a sampler alone and within a wrapper, the plans of a batch,
a setting of the constructor and one that is set later."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorDictMaxValueWriter
from torchrl.data.replay_buffers import Sequence, TensorDictReplayBuffer
from torchrl.envs.transforms import DTypeCastTransform, ExcludeTransform, Transform

from rlbuf_td import (
    AECRecorder,
    EpisodeSampler,
    GymnasiumRecorder,
    HindsightSampler,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    PettingZooRecorder,
    ProportionalSampler,
    RankSampler,
    RecencySampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    RowSampler,
    SchemaError,
    SequenceSampler,
    UniformSampler,
    make_transition,
)
from rlbuf_td.samplers.common import Setting, StatefulSampler
from tests.backends import forced
from tests.catalogue import SAMPLERS, assert_same, buffer_of, numbered_rows, reward_fn
from tests.environments import Walk
from tests.multi_agent import Council, Meadow
from tests.test_lockstep import stopped

CAPACITY = 8


def seeded(rb: Any, seed: int = 0) -> Any:
    rb.set_rng(torch.Generator().manual_seed(seed))
    return rb


def content(rb: Any) -> list[Any]:
    """Return what a user can see of a buffer: its rows, priorities and next batch."""
    priority = getattr(rb.sampler, "priority", None)
    batch = seeded(rb, 3).sample(8)
    priorities = None if priority is None else priority(torch.arange(len(rb))).tolist()
    return [rb[:], batch, priorities, len(rb), rb.sampler.state_dict().keys()]


def assert_alike(left: list[Any], right: list[Any]) -> None:
    for one, other in zip(left, right, strict=True):
        if isinstance(one, TensorDictBase):
            assert_same(one, other)
        else:
            assert one == other


# -- add and extend


def rated_rows(n: int) -> TensorDict:
    """Return rows with a rating and a TD error, none of which is that of another."""
    rows = numbered_rows(n)
    generator = torch.Generator().manual_seed(1)
    rows["rating"] = torch.randperm(n, generator=generator).float()
    rows["td_error"] = 1 + torch.rand(n, generator=generator)
    rows["next", "note"] = torch.zeros(n, 2)
    return rows


WRITERS = {
    "ring": RingWriter,
    "reservoir": ReservoirWriter,
    "best rows": lambda: TensorDictMaxValueWriter(rank_key="rating"),
}
TRANSFORMS: dict[str, Callable[[list[Any]], Any]] = {
    "none": lambda keys: None,
    "half": lambda keys: DTypeCastTransform(
        torch.float16, torch.float32, in_keys=keys, in_keys_inv=keys
    ),
    "exclude": lambda keys: ExcludeTransform(*keys, inverse=True),
}
WAYS: dict[str, Callable[[Any, TensorDictBase], Any]] = {
    "add": lambda rb, rows: [rb.add(row.clone()) for row in rows],
    "extend one": lambda rb, rows: [rb.extend(row[None].clone()) for row in rows],
    "extend a list": lambda rb, rows: [rb.extend([row.clone()]) for row in rows],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("writer", WRITERS)
def test_add_and_extend_write_the_same_rows_and_priorities(writer, transform):
    for sampler, is_reserved in (
        (lambda: ProportionalSampler(CAPACITY), False),
        (MinibatchSampler, True),
    ):
        seen = []
        for write in WAYS.values():
            rb = buffer_of(
                CAPACITY,
                sampler(),
                writer=WRITERS[writer](),
                transform=TRANSFORMS[transform]([("next", "note")]),
            )
            if is_reserved:  # for the rows before the transform
                rb.storage.reserve(rated_rows(1)[0])
            write(rb, rated_rows(13))
            seen.append(content(rb))
        assert len(seen[0][0]) == CAPACITY
        for other in seen[1:]:
            assert_alike(seen[0], other)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_add_step_and_add_write_the_same_rows(transform):
    seen = []
    for way in ("add", "add_step", "add_step, reserved"):
        rb = buffer_of(
            CAPACITY,
            ProportionalSampler(CAPACITY),
            transform=TRANSFORMS[transform](["observation"]),
        )
        for number in range(13):
            step = {
                "observation": np.full(2, number, np.float32),
                "action": np.int64(number % 3),
                "reward": float(number),
                "next_observation": np.full(2, number + 1, np.float32),
                "terminated": number % 5 == 4,
                "truncated": False,
                "note": torch.tensor([number / 3]),
            }
            row = make_transition(*[*step.values()][:-1], note=step["note"])
            if way == "add":
                rb.add(row)
                continue
            if "reserved" in way and not number:
                rb.storage.reserve(row)
            rb.add_step(**step)
        seen.append(content(rb))
    for other in seen[1:]:
        assert_alike(seen[0], other)


def test_another_storage_is_written_as_by_a_new_buffer():
    step: dict[str, Any] = {
        "observation": np.zeros(2),
        "action": 0,
        "reward": 2.0**24 + 1,  # no float32
        "next_observation": np.ones(2),
        "terminated": False,
        "truncated": False,
    }
    exact = torch.tensor(step["reward"], dtype=torch.float64)
    wide = make_transition(*(step | {"reward": exact}).values())
    used, new = (ReplayBuffer(storage=PackedStorage(CAPACITY)) for _ in range(2))
    used.add_step(**step | {"reward": 1.0})
    used.set_storage(PackedStorage(CAPACITY))
    for rb in (used, new):
        rb.storage.reserve(wide)
        rb.add_step(**step)
    assert used[:]["next", "reward"] == step["reward"]
    assert_same(used[:], new[:])


def test_a_row_that_the_writer_leaves_out_changes_nothing():
    sampler = ProportionalSampler(2)
    rb = buffer_of(2, sampler, writer=TensorDictMaxValueWriter(rank_key="rating"))
    rows = rated_rows(3)
    rows["rating"] = torch.tensor([2.0, 3.0, 1.0])
    assert [rb.add(row) for row in rows[:2]] == [0, 1]
    before = content(rb)
    assert rb.add(rows[2]) is None
    assert rb.extend(rows[2:]).tolist() == [-1]
    assert_alike(before, content(rb))


FAULTS: dict[str, Callable[[TensorDict], TensorDictBase]] = {
    "another dtype": lambda rows: rows.set("x", rows["x"].double()),
    "another shape": lambda rows: rows.set("x", rows["x"][:, None]),
    "a key less": lambda rows: rows.exclude("desired_goal"),
    "a key more": lambda rows: rows.set("more", torch.zeros(len(rows))),
    "NaN as TD error": lambda rows: rows.set("td_error", rows["rating"] * torch.nan),
    "an entry of the report": lambda rows: rows.set("priority_weight", rows["rating"]),
    "an index": lambda rows: rows.set("index", rows["rating"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_add_and_extend_refuse_the_same_rows(fault):
    errors = []
    for write in WAYS.values():
        rb = buffer_of(CAPACITY, ProportionalSampler(CAPACITY))
        rb.extend(rated_rows(5))
        before = content(rb)
        with pytest.raises((SchemaError, ValueError)) as caught:
            write(rb, FAULTS[fault](rated_rows(1)))
        assert_alike(before, content(rb))
        errors.append((caught.type, str(caught.value)[:20]))
    assert len({*errors}) == 1, errors


# -- one lane through its handle, and through the buffer


LANE_WAYS: dict[str, Callable[[Any, int, TensorDictBase], Any]] = {
    "handle.add": lambda rb, lane, rows: [*map(handle_of(rb, lane).add, rows)],
    "handle.extend": lambda rb, lane, rows: handle_of(rb, lane).extend(rows),
    "lanes=": lambda rb, lane, rows: rb.extend(rows, lanes=lane),
    "lanes=[n]": lambda rb, lane, rows: rb.extend(rows, lanes=[lane] * len(rows)),
    "lane_key": lambda rb, lane, rows: rb.extend(rows),
}


def handle_of(rb: Any, lane: int) -> Any:
    """Return the handle of a lane, always the same one, which has begun its episode."""
    handles = vars(rb).setdefault("handles", {})
    if lane not in handles:
        handles[lane] = rb.lane(lane)
        handles[lane]._process = os.getpid()  # another handle begins an episode
    return handles[lane]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_lane_is_the_same_through_its_handle_and_through_the_buffer(transform):
    seen = []
    for name, write in LANE_WAYS.items():
        rb = ReplayBuffer(
            storage=PackedStorage(3 * CAPACITY, ndim=2, lanes=3),
            sampler=ProportionalSampler(3 * CAPACITY),
            transform=TRANSFORMS[transform]([("next", "note")]),
            lane_key="lane" if name == "lane_key" else None,
        )
        rows = rated_rows(30)
        for part, lane in zip(rows.split(4), (0, 2, 2, 1, 0, 2, 2, 1), strict=True):
            part["lane"] = torch.full((len(part),), lane)
            write(rb, lane, part)
        priorities = rb.sampler.priority(torch.arange(3 * CAPACITY)).tolist()
        lanes = [rb.lane(lane).chronological() for lane in range(3)]
        batch = seeded(rb).sample(8)
        seen.append([batch, priorities, *lanes, [len(each) for each in lanes]])
    assert seen[0][-1] == [8, 6, CAPACITY]
    for other in seen[1:]:
        assert_alike(seen[0], other)


def test_a_transform_that_holds_rows_back_holds_them_back_from_every_way_in():
    class Waiting(Transform):
        def _inv_call(self, rows: TensorDictBase) -> Any:
            return None

        inv = _inv_call

    storage = PackedStorage(30, ndim=2, lanes=3)
    rb = ReplayBuffer(storage=storage, transform=Waiting())
    rows = rated_rows(3)
    assert rb.add(rows).shape == rb.extend(rows[None]).shape == (0, 2)
    assert rb.extend(rows, lanes=[0, 1, 2]).shape == rb.lane(1).extend(rows).shape
    assert rb.lane(1).add(rows[0]) is None
    assert not len(rb)


# -- the recorders


class Game:
    """An environment, its recorder, and how a game goes on."""

    def __init__(self, name: str, make_buffer: Callable[..., Any]) -> None:
        self.env: Any = {"gymnasium": Walk, "parallel": Meadow, "turns": Council}[
            name
        ]()
        self.rb = make_buffer(self.env)
        recorders: dict[str, Any] = {
            "gymnasium": GymnasiumRecorder,
            "parallel": PettingZooRecorder,
            "turns": AECRecorder,
        }
        self.recorder: Any = recorders[name](self.rb, self.env)
        self.name, self.is_over, self.number = name, False, 0

    def reset(self) -> None:
        self.recorder.reset(seed=5)
        self.is_over = False

    def step(self) -> None:
        self.number += 1
        if self.name == "gymnasium":
            _, _, terminated, truncated, _ = self.recorder.step(self.number % 3)
            self.is_over = terminated or truncated
        elif self.name == "parallel":
            move, place = self.number % 3, np.full(2, 0.5, np.float32)
            agents = self.env.agents
            moves = {agent: place if agent == "sheep" else move for agent in agents}
            self.recorder.step(moves)
            self.is_over = not self.env.agents
        else:
            is_dead = False
            if self.env.agents:
                *_, terminated, truncated, _ = self.env.last()
                is_dead = terminated or truncated
            self.recorder.step(None if is_dead else self.number % 3)
            self.is_over = not self.env.agents

    def play(self, steps: int) -> Game:
        self.reset()
        for _ in range(steps):
            if self.is_over:
                self.reset()
            self.step()
        return self


GAMES = pytest.mark.parametrize("name", ["gymnasium", "parallel", "turns"])


def fail(game: Game, method: str) -> None:
    """Let a call of the environment raise an error once."""

    def failing(*_: object, **__: object) -> None:
        delattr(game.env, method)
        raise OSError("the simulator is lost")

    setattr(game.env, method, failing)
    with pytest.raises(OSError, match="the simulator is lost"):
        game.reset() if method == "reset" else game.step()


LOSSES: dict[str, Callable[[Game], Any]] = {
    "a reset that failed": lambda game: fail(game, "reset"),
    "a step that failed": lambda game: fail(game, "step"),
    "a load": lambda game: game.rb.load_state_dict(game.rb.state_dict()),
    "another storage": lambda game: game.rb.set_storage(
        BUFFERS["a new storage"](game.env).storage
    ),
}


@GAMES
@pytest.mark.parametrize("loss", LOSSES)
def test_after_a_loss_every_recorder_asks_for_a_reset(name, loss):
    game = Game(name, lambda env: ReplayBuffer.from_env(env, 300, batch_size=4))
    with pytest.raises(RuntimeError, match="reset"):
        game.step()
    game.play(9)
    if game.is_over:
        game.reset()
    LOSSES[loss](game)
    before = game.rb.write_count
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reset"):
            game.step()
    assert game.rb.write_count == before
    game.play(9)
    assert game.rb.write_count > before


def go_on(game: Game, steps: int) -> None:
    """Play on; reset where the recorder asks for it."""
    for _ in range(steps):
        try:
            game.step()
        except RuntimeError as error:
            assert "reset" in str(error)  # noqa: PT017  of some steps
            game.reset()


def refuse_joints(game: Game, key: Any) -> None:
    """Check that each row follows the row before it in its trajectory."""
    rb = game.rb
    lanes = [rb[:]]
    if rb.storage.ndim == 2:
        lanes = [rb.lane(e).chronological() for e in range(3) if len(rb.lane(e))]
    for rows in lanes:
        ids = rows["collector", "traj_ids"]
        follows = ids[1:] == ids[:-1]
        assert not rows["next", "done"][:-1][follows].any()
        assert torch.equal(rows[key][1:][follows], rows["next", key][:-1][follows])


@pytest.mark.parametrize(
    ("name", "key"), [("gymnasium", "observation"), ("turns", "time")]
)
@pytest.mark.parametrize(
    "every", [37, pytest.param(3, marks=pytest.mark.slow)], ids=str
)
def test_rows_of_an_interrupted_recorder_follow_each_other(name, key, every):
    for line in itertools.count(1, every):
        game = Game(name, lambda env: ReplayBuffer.from_env(env, 300, batch_size=4))
        game.play(2)
        is_done = False
        with stopped(line, signal.SIGINT):
            go_on(game, 14)
            is_done = True
        go_on(game, 6)
        refuse_joints(game, key)
        if is_done:
            break


KEYS: dict[str, list[Any]] = {
    "gymnasium": ["observation", ("next", "observation")],
    "parallel": [("wolf", "observation"), ("next", "wolf", "observation")],
    "turns": ["time", ("next", "time")],
}
BUFFERS: dict[str, Callable[..., Any]] = {
    "from_env": lambda env, **how: ReplayBuffer.from_env(env, 300, **how),
    "a new storage": lambda env, **how: ReplayBuffer(
        storage=PackedStorage(300)
        if not isinstance(env, Council)
        else PackedStorage(300, ndim=2, lanes=3),
        **how,
    ),
}


def recorded(rb: Any) -> TensorDictBase:
    """Return the stored rows, oldest first, of one lane after another."""
    rows = rb.storage[:]
    if rb.storage.ndim == 1:
        return rows
    counts = rb.storage.ring.count.tolist()
    return torch.cat([rows[:count, lane] for lane, count in enumerate(counts)])


@GAMES
@pytest.mark.parametrize("buffer", BUFFERS)
def test_recorders_store_what_a_transform_leaves_of_the_rows(name, buffer):
    plain = recorded(Game(name, BUFFERS["from_env"]).play(20).rb)
    keys = KEYS[name]
    for kind in ("half", "exclude"):
        transform = TRANSFORMS[kind](keys)

        def make(env: Any, transform: Any = transform) -> Any:
            return BUFFERS[buffer](env, transform=transform)

        game = Game(name, make).play(20)
        first = game.recorder
        # a second recorder finds rows that are not those of the environment
        if name == "turns":
            game.recorder = AECRecorder(game.rb, game.env)
        else:
            game.recorder = type(first)(game.rb, game.env)
        rows = recorded(game.rb)
        if kind == "exclude":
            expected = plain.exclude(*keys)
        else:
            expected = plain.clone()
            for key in keys:
                expected[key] = expected[key].half()
        assert_same(rows, expected)
        before = game.rb.write_count
        assert game.play(9).rb.write_count > before


# -- a sampler alone and within a wrapper


ROW_SAMPLERS = [
    "uniform",
    "unique",
    "minibatch",
    "recency",
    "proportional",
    "independent",
    "no norm",
    "floored",
    "young",
    "rank",
    "rank, independent",
]
NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "n-step": lambda inner: NStepSampler(inner, 1, 0.9),
    "n-step over hindsight": lambda inner: NStepSampler(
        HindsightSampler(inner, reward_fn, her_ratio=0.0), 1, 0.9
    ),
}


def of_program(rb: Any) -> Iterator[Any]:
    """Write, draw, update and empty; yield what a user sees of it."""
    inner = getattr(rb.sampler, "innermost", rb.sampler)
    first = 0
    for number, count in enumerate((7, 20, 1, 0)):
        if count:
            rb.extend(numbered_rows(count, first))
            first += count
        else:
            rb.empty()
            rb.extend(numbered_rows(5, first))
        for _ in range(2):
            batch = seeded(rb, number).sample(4)
            yield batch.exclude("relabeled", "steps_to_next_obs")
            yield rb.sampler.ran_out, getattr(inner, "position", None), len(rb)
            batch["td_error"] = 1 + batch["x"].float() % 5
            rb.update_tensordict_priority(batch)
            yield rb.sampler.can_sample(rb.storage, 4)
    state = inner.state_dict()
    yield {key: str(value) for key, value in state.items()}


@pytest.mark.filterwarnings("ignore:trajectories are stored in stretches")
@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("name", ROW_SAMPLERS)
def test_a_sampler_draws_the_same_alone_and_within_a_wrapper(name, backend):
    with forced(backend):
        alone = buffer_of(20, SAMPLERS[name](20))
        expected = [*of_program(alone)]
        for wrap in NEUTRAL.values():
            rb = buffer_of(20, wrap(SAMPLERS[name](20)))
            assert_alike(expected, [*of_program(rb)])


# -- the plans, and what a user's sampler reports


class Reporter(RowSampler):
    """Draws the first rows, and reports an entry of some name without declaring it."""

    def __init__(self, key: str) -> None:
        self.key = key

    def draw(self, storage: Any, batch_size: int) -> Any:
        rows = torch.arange(batch_size, device=storage.device)
        return rows, {self.key: torch.full((batch_size,), -1)}


PLACES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda inner: {"sampler": inner},
    "n-step": lambda inner: {"sampler": NStepSampler(inner, 2, 0.9)},
    "hindsight": lambda inner: {"sampler": HindsightSampler(inner, reward_fn)},
    "sequence": lambda inner: {"sampler": SequenceSampler(inner, 2)},
    "strict": lambda inner: {"sampler": SequenceSampler(inner, 2, boundary="strict")},
    "collate_fn": lambda inner: {"sampler": inner, "collate_fn": lambda rows: rows},
    "sample_unit": lambda inner: {"sampler": inner, "sample_unit": Sequence(length=2)},
    "prefetch": lambda inner: {"sampler": inner, "prefetch": 2},
    "transform": lambda inner: {"sampler": inner, "transform": lambda rows: rows},
}


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("place", PLACES)
def test_no_plan_lets_a_report_replace_a_stored_entry(place, backend, cls):
    with forced(backend):
        for key in ("x", "mine"):
            rb = cls(
                storage=PackedStorage(30), batch_size=8, **PLACES[place](Reporter(key))
            )
            rb.extend(numbered_rows(30))
            with (
                pytest.raises(SchemaError, match="the rows have an entry 'x', and a")
                if key == "x"
                else nullcontext()
            ):
                assert (rb.sample()["mine"] == -1).all()


# -- a function of the user that uses the buffer


USES: dict[str, Callable[[Any], object]] = {
    "sample": lambda rb: rb.sample(),
    "another size": lambda rb: rb.sample(4),
    "read": lambda rb: rb[:],
    "extend": lambda rb: rb.extend(numbered_rows(30, 30)),
    "update": lambda rb: rb.update_priority(torch.arange(30), 3.0),
}


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "alone": lambda hindsight: hindsight,
    "n-step": lambda hindsight: NStepSampler(hindsight, 2, 0.9),
    "sequence": lambda hindsight: SequenceSampler(hindsight, 3, burn_in=1),
    "episodes": lambda hindsight: EpisodeSampler(hindsight, 4),
}


def batch_during(use: Callable[[Any], object], wrapper: str) -> TensorDictBase:
    """Return a batch whose reward function has used the buffer."""
    calls = []

    def reward(rows: TensorDictBase) -> Any:
        calls.append(len(rows))
        if len(calls) == 2:  # of the second batch, and not of one within it
            use(rb)
        return reward_fn(rows)

    inner = UniformSampler() if wrapper == "episodes" else ProportionalSampler(30)
    sampler = WRAPPED[wrapper](HindsightSampler(inner, reward))
    rb = buffer_of(30, sampler, rows=numbered_rows(30), batch_size=8)
    rb.sample()
    batch = seeded(rb).sample()
    assert len(calls) > 1
    return batch


@pytest.mark.filterwarnings("ignore:trajectories are stored in stretches")
@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_batch_is_the_same_whatever_its_reward_function_does(wrapper, backend):
    with forced(backend):
        expected = batch_during(lambda rb: None, wrapper)
        for use in USES.values():
            assert_same(batch_during(use, wrapper), expected)


# -- settings


GOALS: Any = {"her_ratio": 1.0}
SETTINGS: list[tuple[Callable[..., Any], str, Any, Any]] = [
    (UniformSampler, "unique", False, True),
    (RecencySampler, "half_life", 30.0, 2.0),
    (lambda window: RecencySampler(window=window), "window", 20, 4),
    *(
        (lambda kind=kind, **how: kind(30, **how), name, before, after)
        for kind in (ProportionalSampler, RankSampler)
        for name, before, after in (
            ("alpha", 0.9, 0.1),
            ("beta", 0.4, 1.0),
            ("stratified", True, False),
            ("weight_norm", "buffer", "batch"),
            ("reduction", "max", "min"),
        )
    ),
    (MinibatchSampler, "epochs", 1, 3),
    (MinibatchSampler, "shuffle", True, False),
    (lambda **how: hindsight(**how), "her_ratio", 1.0, 0.2),
    (lambda **how: hindsight(**GOALS, **how), "only_finished", False, True),
    (lambda **how: hindsight(**GOALS, **how), "future_gamma", 1.0, 0.1),
    (lambda **how: n_step(**how), "n_steps", 1, 4),
    (lambda **how: n_step(**how), "gamma", 1.0, 0.5),
    (lambda **how: windows(**how), "eta", 0.9, 0.1),
    (lambda **how: EpisodeSampler(**how), "finished_only", True, False),
]


def hindsight(**how: Any) -> HindsightSampler:
    return HindsightSampler(UniformSampler(), reward_fn, **how)


def n_step(n_steps: int = 3, gamma: float = 1.0) -> NStepSampler:
    return NStepSampler(UniformSampler(), n_steps, gamma)


def windows(**how: Any) -> SequenceSampler:
    return SequenceSampler(ProportionalSampler(30), 3, priority="mix", **how)


def drawn_with(rb: Any) -> list[Any]:
    """Return three batches, after each of which priorities are updated, and these."""
    found = []
    for number in range(3):
        batch = seeded(rb, number).sample(6)
        found.append(batch)
        errors = 1 + batch["x"].flatten()[:, None].float() % 5 + torch.arange(2.0)
        batch["td_error"] = errors.view(*batch.shape, 2)
        rb.update_tensordict_priority(batch)
    priorities = rb.parts.prioritized
    if priorities is not None:
        found.append(priorities.priority(torch.arange(25)).tolist())
    return found


@pytest.mark.parametrize(
    ("make", "name", "before", "after"),
    SETTINGS,
    ids=[f"{number}-{each[1]}" for number, each in enumerate(SETTINGS)],
)
def test_a_setting_has_the_same_effect_from_the_start_and_after_a_draw(
    make, name, before, after
):
    seen = []
    for first, later in ((after, after), (before, after), (before, before)):
        sampler = make(**{name: first})
        rb = seeded(ReplayBuffer(storage=PackedStorage(30), sampler=sampler))
        rb.extend(numbered_rows(25))
        if rb.parts.prioritized is not None:
            rb.update_priority(torch.arange(25), torch.arange(25.0))
        rb.sample(6)
        setattr(sampler, name, later)
        if isinstance(sampler, MinibatchSampler):
            sampler.restart()
        seen.append([*drawn_with(rb), getattr(sampler, "_remaining_batches", None)])
    assert_alike(seen[0], seen[1])
    with pytest.raises(AssertionError):  # the setting has an effect
        assert_alike(seen[0], seen[2])


def test_every_setting_is_in_the_table():
    kinds = [StatefulSampler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    own = {
        name
        for kind in kinds
        if kind.__module__.startswith("rlbuf_td.")
        for name, value in vars(kind).items()
        if isinstance(value, Setting) and not value._is_fixed
    }
    assert own | {"alpha", "beta"} == {name for _, name, *_ in SETTINGS}
