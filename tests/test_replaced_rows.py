"""Whatever removes rows of a storage reaches all that follow its rows, and updates
that come late.

``CAUSES`` lists the calls after which the rows are others, ``FOLLOWERS`` all that keeps
something that belongs to rows: each must treat the rows as new ones after each call.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from rlbuf_td import (
    EpisodeSampler,
    EpisodeStats,
    ExperienceQueue,
    MinibatchSampler,
    NStepSampler,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    RingWriter,
    SequenceSampler,
    TrajectoryIndex,
    UniformSampler,
)
from rlbuf_td.envs.recorder import TrajectoryNumbers
from rlbuf_td.kernels.serials import REVISION
from tests.catalogue import buffer_of, numbered_rows
from tests.model import Row, assert_holds
from tests.model import World as ModelWorld

ROWS = 8
IDS = ("collector", "traj_ids")


def rows(first: int, count: int, *, ends: bool = True) -> TensorDict:
    """Numbered rows, in episodes of two."""
    x = torch.arange(first, first + count)
    done = (x % 2 == 1)[:, None] & ends
    after = {"reward": torch.ones(count, 1), "done": done, "terminated": done}
    return TensorDict(
        {"x": x, "next": after, "collector": {"traj_ids": x // 2}}, [count]
    )


@dataclass
class World:
    storage: PackedStorage
    first: Any  # a buffer over the storage
    theirs: Any  # a buffer of TorchRL's
    state: Any  # an earlier state of the first one
    their_state: Any
    folder: Path  # with dumps


@dataclass(frozen=True)
class Cause:
    """A call that replaces the rows, whose numbers are then ``kept``."""

    call: Callable[[World], object]
    kept: tuple[int, ...]
    saved: int = ROWS  # the number of rows of the state


ALL, FEW = (*range(ROWS),), (0, 1, 2, 3)
CAUSES = {
    "first.empty": Cause(lambda w: w.first.empty(), ()),
    "first.empty, counted": Cause(lambda w: w.first.empty(empty_write_count=False), ()),
    "storage._empty": Cause(lambda w: w.storage._empty(), ()),
    "theirs.empty": Cause(lambda w: w.theirs.empty(), ()),
    "first.load_state_dict": Cause(lambda w: w.first.load_state_dict(w.state), ALL),
    "first.load_state_dict, fewer": Cause(
        lambda w: w.first.load_state_dict(w.state), FEW, 4
    ),
    "first.loads": Cause(lambda w: w.first.loads(w.folder / "dump"), ALL),
    "first.loads, rows_only": Cause(
        lambda w: w.first.loads(w.folder / "dump", rows_only=True), FEW, 4
    ),
    "storage.load_state_dict": Cause(
        lambda w: w.storage.load_state_dict(w.state["_storage"]), ALL
    ),
    "storage.load_state_dict, fewer": Cause(
        lambda w: w.storage.load_state_dict(w.state["_storage"]), FEW, 4
    ),
    "storage.load_state_dict, none": Cause(
        lambda w: w.storage.load_state_dict({"_len": 0}), ()
    ),
    "storage.loads": Cause(lambda w: w.storage.loads(w.folder / "storage"), FEW, 4),
    "theirs.load_state_dict": Cause(
        lambda w: w.theirs.load_state_dict(w.their_state), FEW, 4
    ),
}


# what replaces or moves rows, with the numbers of those that are kept
MOVES = CAUSES | {
    "storage.share_memory_": Cause(
        lambda w: w.storage.share_memory_(), (*range(100, 100 + ROWS),)
    ),
}


def drawn(rb: Any, batches: int = 12) -> set[int]:
    return {x for _ in range(batches) for x in rb.sample()["x"].flatten().tolist()}


class Follower:
    """A buffer over the storage, used before the rows are replaced, and checked
    after."""

    parts: Callable[[], dict[str, Any]] = staticmethod(
        lambda: {"sampler": UniformSampler()}
    )
    cls: Any = ReplayBuffer

    def __init__(self, storage: PackedStorage) -> None:
        self.storage = storage
        self.rb = self.cls(storage=storage, batch_size=2, **self.parts())
        self.use()

    def use(self) -> None:
        self.rb.sample()

    def check(self, kept: tuple[int, ...]) -> None:
        """Check what belongs to rows, whose numbers are ``kept``."""
        assert len(self.rb) == len(kept)
        if kept:
            assert drawn(self.rb) <= {*kept}
        else:
            assert not self.rb.can_sample()

    def check_written(self, held: set[int]) -> None:
        """Check draws after a write: the storage now holds these rows."""
        assert drawn(self.rb) <= held


class Prioritized(Follower):
    parts = staticmethod(lambda: {"sampler": ProportionalSampler(ROWS, 1.0, eps=0.0)})

    def use(self) -> None:
        # cells 0 to 5 have the priority 0
        error = torch.tensor([0.0] * 6 + [50.0, 70.0])
        self.rb.update_priority(torch.arange(ROWS), error)
        self.rb.sample()

    def check(self, kept: tuple[int, ...]) -> None:
        super().check(kept)
        sampler = self.rb.parts.prioritized
        new = [1.0] * len(kept) + [-1.0] * (ROWS - len(kept))
        assert sampler.priority(torch.arange(ROWS)).tolist() == new
        assert sampler.default_priority == 1.0
        if kept:
            assert drawn(self.rb, 60) == {*kept}
        sampler.rule.check()


class ByRank(Prioritized):
    parts = staticmethod(lambda: {"sampler": RankSampler(ROWS, 0.1)})


class NStep(Prioritized):
    parts = staticmethod(
        lambda: {"sampler": NStepSampler(ProportionalSampler(ROWS, 1.0), 2, 0.9)}
    )


class Minibatch(Follower):
    parts = staticmethod(lambda: {"sampler": MinibatchSampler(2)})

    def check(self, kept: tuple[int, ...]) -> None:
        assert (self.rb.sampler.epoch, self.rb.sampler.position) == (0, 0)
        if kept:
            epoch = [x for _ in range(len(kept) // 2) for x in self.rb.sample()["x"]]
            assert sorted(map(int, epoch)) == [*kept]


class Chunks(Follower):
    parts = staticmethod(
        lambda: {"sampler": SequenceSampler(MinibatchSampler(), 2, stride=2)}
    )

    def check(self, kept: tuple[int, ...]) -> None:
        assert self.rb.sampler.innermost.position == 0
        if kept:
            chunks = [self.rb.sample()["x"].flatten() for _ in range(len(kept) // 2)]
            assert torch.cat(chunks).sort().values.tolist() == [*kept]


class Episodes(Follower):
    parts = staticmethod(lambda: {"sampler": EpisodeSampler(by="episode")})

    def check(self, kept: tuple[int, ...]) -> None:
        if kept:
            assert drawn(self.rb) == {*kept}
        else:
            assert not self.rb.can_sample()


class Ahead(Follower):
    parts = staticmethod(
        lambda: {"prefetch": 3, "transform": lambda batch: batch.clone()}
    )

    def check_written(self, held: set[int]) -> None:
        """Batches that were drawn ahead may have rows that a write has replaced."""


class Flow(Follower):
    parts = staticmethod(lambda: {"samples_per_insert": 4.0, "tolerance": 1000.0})

    def check(self, kept: tuple[int, ...]) -> None:
        report = self.rb.flow.report()
        assert (report["inserts"], report["samples"]) == (len(kept), 4 * len(kept))


class Queue(Follower):
    """All rows that have replaced others wait to be taken."""

    cls = ExperienceQueue
    parts = staticmethod(dict)

    def use(self) -> None:
        self.rb.extend(rows(110, 4))
        self.rb.sample()

    def check(self, kept: tuple[int, ...]) -> None:
        assert self.rb.waiting == len(kept)

    def check_written(self, held: set[int]) -> None:
        assert self.rb.waiting == len(held)
        taken = [x for _ in range(len(held) // 2) for x in self.rb.sample()["x"]]
        assert {*map(int, taken)} == held


class Theirs(Follower):
    """A buffer of TorchRL's, with our writer."""

    cls = TensorDictReplayBuffer
    parts = staticmethod(
        lambda: {"sampler": ProportionalSampler(ROWS, 1.0), "writer": RingWriter()}
    )

    def check(self, kept: tuple[int, ...]) -> None:
        if kept:
            assert drawn(self.rb, 60) == {*kept}
        else:
            with pytest.raises(RuntimeError, match="empty storage"):
                self.rb.sample()


class OnlyTheirs(Theirs):
    """A buffer of TorchRL's, with TorchRL's parts."""

    parts = staticmethod(
        lambda: {"sampler": PrioritizedSampler(ROWS, 1.0, 1.0, eps=0.0)}
    )

    def use(self) -> None:
        error = torch.tensor([0.0] * 6 + [50.0, 70.0])
        self.rb.update_priority(torch.arange(ROWS), error)

    def check(self, kept: tuple[int, ...]) -> None:
        super().check(kept)
        assert self.rb.writer._cursor == len(kept) % ROWS


class TheirEpochs(Theirs):
    parts = staticmethod(
        lambda: {"sampler": SamplerWithoutReplacement(), "writer": RingWriter()}
    )

    def check_written(self, held: set[int]) -> None:
        """TorchRL's sampler does not restart after writes."""


class Index(Follower):
    def use(self) -> None:
        self.index = TrajectoryIndex(self.storage)
        self.index.whole()

    def check(self, kept: tuple[int, ...]) -> None:
        if kept:
            assert self.index.whole()[0].tolist() == [*range(0, len(kept), 2)]


FOLLOWERS = (
    *(Prioritized, ByRank, NStep, Minibatch, Chunks, Episodes, Ahead, Flow),
    *(Queue, Theirs, OnlyTheirs, TheirEpochs, Index),
)


@pytest.fixture
def world(request: Any, tmp_path: Path) -> World:
    """Return the rows 100 to 107, and states of earlier ones."""
    storage = PackedStorage(ROWS)
    first: Any = ReplayBuffer(
        storage=storage, sampler=ProportionalSampler(ROWS), batch_size=2
    )
    theirs = TensorDictReplayBuffer(storage=storage, writer=RingWriter(), batch_size=2)
    first.extend(rows(0, request.param))
    state, their_state = first.state_dict(), theirs.state_dict()
    if "loads" in request.node.name:
        first.dumps(tmp_path / "dump")
        storage.dumps(tmp_path / "storage")
    first.extend(rows(100 - (ROWS - request.param), 2 * ROWS - request.param))
    return World(storage, first, theirs, state, their_state, tmp_path)


def worlds(causes: dict[str, Cause]) -> Any:
    return pytest.mark.parametrize(
        ("cause", "world"),
        [(name, cause.saved) for name, cause in causes.items()],
        indirect=["world"],
        ids=[*causes],
    )


every_cause = worlds(CAUSES)


@every_cause
def test_all_that_follows_the_rows_takes_other_rows_as_new(
    cause: str, world: World
) -> None:
    followers, kept = (
        [follower(world.storage) for follower in FOLLOWERS],
        CAUSES[cause].kept,
    )
    CAUSES[cause].call(world)
    for follower in followers:
        follower.check(kept)
    world.first.extend(rows(500, 2))
    held = {*[*kept, 500, 501][-ROWS:]}
    assert {*world.storage["x"].tolist()} == held
    for follower in followers:
        follower.check_written(held)
    world.storage.check()


@every_cause
def test_episodes_end_for_recorders_and_statistics_after_loads_alone(
    cause: str, world: World
) -> None:
    numbers = TrajectoryNumbers.of(world.storage)
    rb: Any = ReplayBuffer(storage=world.storage, stats=EpisodeStats())
    rb.extend(rows(300, 1))  # an episode begins
    CAUSES[cause].call(world)
    rb.extend(rows(301, 1))  # it ends; after a load, it has just begun
    is_load = "load" in cause
    assert numbers.loads == is_load
    assert rb.episode_stats.history()["length"].tolist() == [1 if is_load else 2]


@worlds(MOVES)
def test_plans_and_updates_follow_rows_that_move(cause: str, world: World) -> None:
    rb, storage = world.first, world.storage
    rb.update_tensordict_priority(rb.sample().set("td_error", torch.ones(2)))
    epoch, revision = storage.epoch, storage.revision
    MOVES[cause].call(world)
    assert storage.epoch > epoch
    assert storage.revision > revision or cause not in CAUSES
    rb.extend(rows(500, 1))
    batches = [rb.sample() for _ in range(64)]
    seen = {x for batch in batches for x in batch["x"].tolist()}
    assert seen == {*[*MOVES[cause].kept, 500][-ROWS:]}
    for batch in batches:
        rb.update_tensordict_priority(batch.set("td_error", 2.0 + batch["x"]))
    expected = 2.0 + storage["x"].double()
    assert torch.equal(rb.sampler.priority(torch.arange(len(storage))), expected)


# -- late updates go only to rows that still hold what was sampled


STEPS, ERROR = 10, 1000.0  # an error that is larger than what any row enters with


class Known(ModelWorld):
    """A prioritized buffer, and all rows that were ever written."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.known: dict[float, Row] = {}

    def write(self, count: int) -> None:
        self.extend(count)
        self.known |= {row.fields["observation",][0]: row for row in self.model.rows()}

    def check_update(self, batch: TensorDictBase) -> None:
        """Update with errors unlike any priority, and compare all priorities and the
        number of stale rows."""
        numbers = batch["observation"][..., 0]
        rows = [self.known[number] for number in numbers.flatten().tolist()]
        errors = [ERROR + j for j in range(len(rows))]
        batch["td_error"] = torch.tensor(errors).view(batch.shape)
        before = self.rb.stale_updates.total()
        self.rb.update_tensordict_priority(batch)
        stale = self.model.update(rows, errors)
        assert self.rb.stale_updates.total() == before + stale
        assert_holds(self.rb, self.model, episodes=False)


def full(lanes: int = 0, sampler: Any = ProportionalSampler, **options: Any) -> Any:
    made = sampler(STEPS * max(1, lanes))
    world: Any = Known.of(made, STEPS, lanes, batch_size=12, **options)
    world.write(STEPS)
    return world


def test_the_stamp_survives_what_users_do_with_a_batch() -> None:
    world = full()
    batch = world.rb.sample()
    world.write(STEPS // 2)
    for part in (
        batch[:5],
        batch[::3],
        batch.reshape(3, 4),
        batch[7],
        torch.cat([batch, world.rb.sample()]),
        batch.to("cpu", non_blocking=True),
        pickle.loads(pickle.dumps(batch)),
        batch[torch.randperm(12)],
        batch[batch["index"] % 2 == 0],
    ):
        world.check_update(part)
    assert world.rb.health()["stale_updates"] > 0


class OwnUpdate(ProportionalSampler):
    """A user's sampler, whose updates go through TorchRL's method."""

    def update_priority(self, index: Any, priority: Any, **given: Any) -> None:
        super().update_priority(index, priority, **given)


@pytest.mark.parametrize(
    ("lanes", "options"),
    [
        (0, {"prefetch": 3}),
        (3, {"prefetch": 3}),
        (0, {"sampler": OwnUpdate}),
        (3, {"sampler": OwnUpdate}),
        (0, {"writer": TensorDictRoundRobinWriter()}),
    ],
    ids=["ahead", "ahead, lanes", "own update", "own update, lanes", "TorchRL's ring"],
)
def test_late_updates_go_only_to_rows_that_were_sampled(
    lanes: int, options: dict[str, Any]
) -> None:
    world = full(lanes, **options)
    for _ in range(20):
        batch = world.rb.sample()
        world.write(3)
        world.check_update(batch)
    assert world.rb.stale_updates.total() > 0


def test_without_its_stamp_a_batch_updates_whatever_the_rows_hold() -> None:
    world = full()
    batch = world.rb.sample().set("td_error", torch.full((12,), ERROR))
    world.write(STEPS)
    world.rb.update_tensordict_priority(batch.exclude("sampled_at"))
    assert (world.rb.sampler.priority(batch["index"]) == ERROR).all()
    world.rb.update_priority(batch["index"], 2 * ERROR)
    assert (world.rb.sampler.priority(batch["index"]) == 2 * ERROR).all()
    assert world.rb.stale_updates.total() == 0


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("sampler", [UniformSampler(), ProportionalSampler(10)])
def test_only_prioritized_buffers_of_this_package_stamp_their_batches(
    sampler: Any, cls: Any
) -> None:
    rb = buffer_of(10, sampler, cls=cls, rows=numbered_rows(5), batch_size=4)
    is_stamped = cls is ReplayBuffer and isinstance(sampler, ProportionalSampler)
    assert ("sampled_at" in rb.sample().keys()) == is_stamped


def test_buffers_over_one_storage_know_of_each_others_writes() -> None:
    world = full()
    other = ReplayBuffer(storage=world.rb.storage, sampler=ProportionalSampler(STEPS))
    batch = other.sample(12).set("td_error", torch.full((12,), ERROR))
    world.write(STEPS)
    other.update_tensordict_priority(batch)
    assert (other.sampler.priority(torch.arange(STEPS)) == 1.0).all()
    assert (other.stale_updates.total(), world.rb.stale_updates.total()) == (12, 0)


LIMITS: Sequence[Any] = [
    (2**31, ProportionalSampler, 0, True),
    (2**32, RankSampler, 3, False),
    (2**53, ProportionalSampler, 3, False),
    (2**63, ProportionalSampler, 0, False),
    (2**63, RankSampler, 3, True),
]


@pytest.mark.parametrize(("limit", "sampler", "lanes", "shared"), LIMITS)
def test_days_of_writes_pass_the_limits_of_integers(
    limit: int, sampler: Any, lanes: int, shared: bool
) -> None:
    """Every counter starts near a limit, and nothing changes when it passes it."""
    world: Any = Known.of(sampler(21), 21 // max(1, lanes), lanes, shared=shared)
    rb, start = world.rb, limit - 40
    rb.writer._write_count = start
    if limit < 2**62:  # more rows than anybody will write
        rb.storage.ring.numbers[REVISION] = limit - 20
        rb.storage.ring.written += limit - 30
    counted = min(limit, 2**62) - 5  # a load refuses larger counts
    rb.stale_updates._numbers[0] = counted
    world.write(1)
    for number in range(40):
        batch = rb.sample(6)
        world.write(1 + number % 4)
        world.check_update(batch)
    assert_holds(rb, world.model)
    assert rb.stale_updates.total() > counted + 5
    assert rb.write_count == start + world.model.written


def test_a_batch_of_before_a_load_updates_no_loaded_row() -> None:
    rb = buffer_of(8, ProportionalSampler(8), rows=numbered_rows(8), batch_size=4)
    batch = rb.sample()
    rb.load_state_dict(rb.state_dict())
    rb.update_tensordict_priority(batch.set("td_error", torch.full((4,), ERROR)))
    assert rb.stale_updates.total() == 4
    assert (rb.sampler.priority(torch.arange(8)) == 1).all()


def test_rows_that_are_allocated_again_have_stamps_of_their_own() -> None:
    rb = buffer_of(8, ProportionalSampler(8), rows=numbered_rows(5), batch_size=4)
    batch = rb.sample().set("td_error", torch.full((4,), ERROR))
    rb.empty()
    rb.storage.release()
    rb.extend(numbered_rows(5).select("x"))
    rb.update_tensordict_priority(batch)
    assert (rb.sampler.priority(torch.arange(5)) == 1).all()
    assert rb.stale_updates.total() == 4
