"""Late updates of priorities go only to rows that still hold what was sampled, however
the batch came and went."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import (
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer
from rlbuf_td.kernels.serials import REVISION
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.model import Row, World, assert_holds

STEPS, ERROR = 10, 1000.0  # an error that is larger than what any row enters with


class Known(World):
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
        rows = [
            self.known[seen] for seen in batch["observation"][..., 0].flatten().tolist()
        ]
        errors, before = (
            [ERROR + j for j in range(len(rows))],
            self.rb.health()["stale_updates"],
        )
        self.rb.update_tensordict_priority(
            batch.set("td_error", torch.tensor(errors).view(batch.shape))
        )
        assert self.rb.health()["stale_updates"] - before == self.model.update(
            rows, errors
        )
        assert_holds(self.rb, self.model, episodes=False)


def full(lanes: int = 0, **options: Any) -> Known:
    world: Any = Known.of(
        ProportionalSampler(STEPS * max(1, lanes)),
        STEPS,
        lanes,
        batch_size=12,
        **options,
    )
    world.write(STEPS)
    return world


def test_the_stamp_survives_what_users_do_with_a_batch() -> None:
    world = full()
    batch = world.rb.sample()
    world.write(STEPS // 2)
    parts = [
        batch[:5],
        batch[::3],
        batch.reshape(3, 4),
        batch[7],
        torch.cat([batch, world.rb.sample()]),
        batch.to("cpu", non_blocking=True),
        pickle.loads(pickle.dumps(batch)),
        batch[torch.randperm(12)],
        batch[batch["index"] % 2 == 0],
    ]
    for part in parts:
        world.check_update(part)
    assert world.rb.health()["stale_updates"] > 0


@pytest.mark.parametrize("lanes", [0, 3])
def test_it_holds_for_batches_drawn_ahead(lanes: int) -> None:
    world = full(lanes, prefetch=3)
    for _ in range(20):
        batch = world.rb.sample()
        world.write(3)
        world.check_update(batch)
    assert world.rb.health()["stale_updates"] > 0


class OwnUpdate(ProportionalSampler):
    """A user's sampler, whose updates go through TorchRL's method."""

    def update_priority(self, index: Any, priority: Any, **given: Any) -> None:
        super().update_priority(index, priority, **given)


@pytest.mark.parametrize("lanes", [0, 3])
def test_it_holds_for_an_update_of_ones_own(lanes: int) -> None:
    world: Any = Known.of(OwnUpdate(STEPS * max(1, lanes)), STEPS, lanes, batch_size=12)
    world.write(STEPS)
    for _ in range(5):
        batch = world.rb.sample()
        world.write(3)
        world.check_update(batch)
    assert world.rb.health()["stale_updates"] > 0


def test_it_holds_under_torchrls_ring() -> None:
    rb = ReplayBuffer(
        storage=PackedStorage(30),
        sampler=ProportionalSampler(30),
        writer=TensorDictRoundRobinWriter(),
        batch_size=12,
    )
    for first in range(0, 175, 7):
        batch = rb.sample() if first else None
        rb.extend(TensorDict({"x": torch.arange(first, first + 7)}, [7]))
        if batch is None:
            continue
        expected, same = (
            rb.sampler.priority(torch.arange(30)),
            rb.storage["x"][batch["index"]] == batch["x"],
        )
        batch["td_error"] = ERROR + torch.arange(12.0) + 12 * first
        rb.update_tensordict_priority(batch)
        for row, error in zip(
            batch["index"][same], batch["td_error"][same], strict=True
        ):
            expected[row] = error
        assert torch.equal(rb.sampler.priority(torch.arange(30)), expected)
    assert 0 < rb.health()["stale_updates"] < 24 * 12


def test_without_its_stamp_a_batch_updates_whatever_the_rows_hold() -> None:
    world = full()
    batch = world.rb.sample().set("td_error", torch.full((12,), ERROR))
    world.write(STEPS)
    world.rb.update_tensordict_priority(batch.exclude("sampled_at"))
    assert (world.rb.sampler.priority(batch["index"]) == ERROR).all()
    world.rb.update_priority(batch["index"], 2 * ERROR)
    assert (world.rb.sampler.priority(batch["index"]) == 2 * ERROR).all()
    assert world.rb.health()["stale_updates"] == 0


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_only_prioritized_buffers_of_this_package_stamp_their_batches(cls: Any) -> None:
    plain = cls(storage=PackedStorage(10), batch_size=4)
    prioritized = cls(
        storage=PackedStorage(10), sampler=ProportionalSampler(10), batch_size=4
    )
    for rb in (plain, prioritized):
        rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
        assert ("sampled_at" in rb.sample().keys()) == (
            rb is prioritized and cls is ReplayBuffer
        )


def test_buffers_over_one_storage_know_of_each_others_writes() -> None:
    world = full()
    other = ReplayBuffer(
        storage=world.rb.storage, sampler=ProportionalSampler(STEPS), batch_size=12
    )
    batch = other.sample().set("td_error", torch.full((12,), ERROR))
    world.write(STEPS)
    other.update_tensordict_priority(batch)
    assert (other.sampler.priority(torch.arange(STEPS)) == 1.0).all()
    assert (other.health()["stale_updates"], world.rb.health()["stale_updates"]) == (
        12,
        0,
    )


def numbered(first: int, count: int, lanes: int) -> TensorDict:
    number = (
        torch.arange(first, first + count) + 1000 * torch.arange(max(1, lanes))[:, None]
    )
    number = number if lanes else number[0]
    return TensorDict(
        {"x": number, "next": {"done": (number % 4 == 3)[..., None]}}, number.shape
    )


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
    storage = PackedStorage(21, ndim=2 if lanes else 1)
    rb = ReplayBuffer(storage=storage, sampler=sampler(21), batch_size=6, shared=shared)
    start, steps = limit - 40, 21 // max(1, lanes)
    rb.writer._write_count = start
    if limit < 2**62:  # more rows than anybody will write
        rb.storage.ring.numbers[REVISION] = limit - 20
        rb.storage.ring.written += limit - 30
    rb.stale_updates._numbers[0] = limit - 5
    trajectories = TrajectoryIndex(rb.storage)
    written = stale = 0
    while written < 120:
        batch = rb.sample() if written else None
        count = 1 + written % 4
        rb.extend(numbered(written, count, lanes)) if count > 1 else rb.add(
            numbered(written, 1, lanes)[..., 0]
        )
        written += count
        if batch is not None:
            held = rb.storage[:]["x"].flatten()
            index = (
                batch["index"] @ torch.tensor([lanes, 1]) if lanes else batch["index"]
            )
            stale += int((held[index] != batch["x"]).sum())
            batch["td_error"] = torch.rand(6)
            rb.update_tensordict_priority(batch)
        assert (rb.sampler.priority(torch.arange(len(rb))) > 0).all()
        kept, stored, cells = (
            min(steps, written),
            rb.chronological()["x"],
            torch.arange(len(rb)),
        )
        assert (stored[:, 0] if lanes else stored).tolist() == list(
            range(written - kept, written)
        )
        for mine, right in zip(
            trajectories.reach(cells),
            TrajectoryIndex(rb.storage).reach(cells),
            strict=True,
        ):
            assert torch.equal(mine, right)
    assert stale > 5
    wrapped = (limit - 5 + stale + 2**63) % 2**64 - 2**63
    assert rb.stale_updates.total() == wrapped
    rows = written * max(1, lanes)
    assert rb.write_count == start + rows


def test_a_batch_of_before_a_load_updates_no_loaded_row() -> None:
    rb = ReplayBuffer(
        storage=PackedStorage(8), sampler=ProportionalSampler(8), batch_size=4
    )
    rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
    batch, state = rb.sample(), rb.state_dict()
    rb.load_state_dict(state)
    rb.update_tensordict_priority(batch.set("td_error", torch.full((4,), 9.0)))
    assert rb.stale_updates.total() == 4
    assert (rb.sampler.priority(torch.arange(8)) == 1).all()


def test_rows_that_are_allocated_again_have_stamps_of_their_own() -> None:
    rb: Any = ReplayBuffer(
        storage=PackedStorage(8), sampler=ProportionalSampler(8), batch_size=4
    )
    rb.extend(TensorDict({"x": torch.zeros(5)}, [5]))
    batch = rb.sample()
    rb.empty()
    rb.storage.release()
    rb.extend(TensorDict({"y": torch.zeros(5, 2)}, [5]))
    rb.update_tensordict_priority(batch.set("td_error", torch.full((4,), 50.0)))
    assert rb.sampler.priority(torch.arange(5)).tolist() == [1.0] * 5
    assert rb.health()["stale_updates"] == 4
