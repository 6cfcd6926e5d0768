"""Whatever removes all rows of a storage reaches all that follow its rows.

``CAUSES`` lists the calls after which the rows are others, ``FOLLOWERS`` all that keeps
something that belongs to rows: each must treat the rows as new ones after each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
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
from rlbuf_td.storages.indexing import attached_or_new

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
    numbers = attached_or_new(world.storage, TrajectoryNumbers)
    rb: Any = ReplayBuffer(storage=world.storage, stats=EpisodeStats())
    rb.extend(rows(300, 1))  # an episode begins
    CAUSES[cause].call(world)
    rb.extend(rows(301, 1))  # it ends; after a load, it has just begun
    is_load = "load" in cause
    assert numbers.loads == is_load
    assert rb.episode_stats.history()["length"].tolist() == [1 if is_load else 2]


@pytest.mark.parametrize("world", [ROWS], indirect=True)
def test_the_buffer_that_loads_keeps_the_state_of_its_parts(world: World) -> None:
    first = world.first
    first.update_priority(torch.arange(ROWS), torch.arange(1.0, ROWS + 1))
    state = first.state_dict()
    first.extend(rows(200, 3))
    first.load_state_dict(state)
    expected = torch.arange(1.0, ROWS + 1).tolist()
    assert first.sampler.priority(torch.arange(ROWS)).tolist() == expected


@worlds(MOVES)
def test_plans_and_updates_follow_rows_that_move(cause: str, world: World) -> None:
    rb, storage = world.first, world.storage
    rb.update_tensordict_priority(rb.sample().set("td_error", torch.ones(2)))
    epoch = storage.epoch
    revision = storage.revision
    MOVES[cause].call(world)
    assert storage.epoch > epoch
    assert storage.revision > revision or cause not in CAUSES
    last = storage[-1:].clone() if len(storage) else rows(0, 1)
    rb.extend(last.set("x", torch.tensor([500])))
    batches = [rb.sample() for _ in range(64)]
    seen = {x for batch in batches for x in batch["x"].tolist()}
    assert seen == {*[*MOVES[cause].kept, 500][-ROWS:]}
    for batch in batches:
        rb.update_tensordict_priority(batch.set("td_error", 2.0 + batch["x"]))
    index = torch.arange(len(storage))
    expected = 2.0 + storage["x"].double()
    assert torch.equal(rb.sampler.priority(index), expected)
