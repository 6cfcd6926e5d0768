"""Priorities go only to rows that still hold what was sampled: against an oracle that looks at the rows themselves."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictMaxValueWriter, TensorDictReplayBuffer, TensorDictRoundRobinWriter
from torchrl.envs.transforms import DoubleToFloat

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, RingWriter
from rlbuf_td.storages.write_clock import SAMPLED_AT, WriteClock

CAPACITY = 30
ERROR = 1000.0  # larger than what any row enters with


class Numbered:
    """A prioritized buffer in which no two rows that were ever written hold the same number."""

    def __init__(self, lanes: int = 0, sampler=ProportionalSampler, writer=RingWriter, **kwargs):
        self.lanes, self.next = lanes, 0
        capacity = 10 * lanes if lanes else CAPACITY
        self.rb = ReplayBuffer(
            storage=PackedStorage(capacity, ndim=2 if lanes else 1),
            sampler=sampler(capacity),
            writer=writer(),
            batch_size=12,
            **kwargs,
        )

    def rows(self, count: int) -> TensorDict:
        shape = (self.lanes, count) if self.lanes else (count,)
        first, self.next = self.next, self.next + count * max(1, self.lanes)
        return TensorDict({"x": torch.arange(first, self.next).view(shape)}, shape)

    def write(self, count: int) -> None:
        self.rb.extend(self.rows(count))

    def check_update(self, batch: TensorDict) -> None:
        """Update with errors unlike any priority; only rows with the number that was sampled may have changed."""
        rb = self.rb
        before, counted = self.priorities(), rb.health()["stale_updates"]
        index = batch["index"].reshape(-1, 2) if self.lanes else batch["index"].reshape(-1)
        flat = index[:, 0] * self.lanes + index[:, 1] if self.lanes else index
        live = flat < len(rb)
        held = torch.full_like(flat, -1)
        if len(rb):
            held[live] = rb.storage["x"].flatten()[flat[live]]
        same = held == batch["x"].reshape(-1)
        batch["td_error"] = ERROR + torch.arange(batch.numel(), dtype=torch.float64).view(batch.shape)
        rb.update_tensordict_priority(batch)
        expected = before.clone()
        for row, error, applies in zip(flat, batch["td_error"].flatten(), same, strict=True):
            if applies:
                expected[row] = error.abs()
        assert torch.equal(self.priorities(), expected)
        assert rb.health()["stale_updates"] - counted == int((~same).sum())

    def priorities(self) -> torch.Tensor:
        return self.rb.sampler.priority(torch.arange(self.rb.storage.max_size))


def sampled_before_writes(count: int) -> tuple[Numbered, TensorDict]:
    """Return a full buffer, and a batch with large errors that was sampled before the last ``count`` writes."""
    buffer = Numbered()
    buffer.write(CAPACITY)
    batch = buffer.rb.sample()
    buffer.write(count)
    return buffer, batch.set("td_error", torch.full((12,), ERROR))


@pytest.mark.parametrize("writer", [TensorDictMaxValueWriter, TensorDictRoundRobinWriter])
def test_it_holds_under_torchrls_writers(writer):
    make = writer if writer is TensorDictRoundRobinWriter else lambda: writer(rank_key="rank")
    buffer = Numbered(writer=make)
    draw = torch.Generator().manual_seed(0)

    def write() -> None:
        rows = buffer.rows(7)
        rows["rank"] = torch.rand(7, generator=draw)
        buffer.rb.extend(rows)

    for _ in range(5):
        write()
    for _ in range(20):
        batch = buffer.rb.sample()
        write()
        buffer.check_update(batch)
    if writer is TensorDictMaxValueWriter:  # of seven rows two or so are good enough to be written
        assert 0 < buffer.rb.health()["stale_updates"] < 20 * 12


def test_the_stamp_survives_what_users_do_with_a_batch():
    buffer, batch = sampled_before_writes(CAPACITY // 2)
    parts = {
        "part": batch[:5],
        "strided": batch[::3],
        "reshaped": batch.reshape(3, 4),
        "of no dims": batch[7],
        "together": torch.cat([batch, buffer.rb.sample().update({"td_error": torch.zeros(12)})]),
        "moved": batch.to("cpu", non_blocking=True),
        "pickled": pickle.loads(pickle.dumps(batch)),
        "shuffled": batch[torch.randperm(12)],
        "masked": batch[batch["index"] % 2 == 0],
    }
    for data in parts.values():
        buffer.check_update(data)
    assert buffer.rb.health()["stale_updates"] > 0


def test_without_its_stamp_a_batch_updates_whatever_the_rows_hold():
    buffer, batch = sampled_before_writes(CAPACITY)
    buffer.rb.update_tensordict_priority(batch.exclude(SAMPLED_AT))
    assert (buffer.priorities()[batch["index"]] == ERROR).all()
    buffer.rb.update_priority(batch["index"], 2 * ERROR)
    assert (buffer.priorities()[batch["index"]] == 2 * ERROR).all()
    assert buffer.rb.health()["stale_updates"] == 0


def test_stale_errors_do_not_raise_the_priority_that_new_rows_enter_with():
    buffer, batch = sampled_before_writes(CAPACITY)
    buffer.rb.update_tensordict_priority(batch)
    assert buffer.rb.sampler.default_priority == 1.0
    assert buffer.rb.health()["stale_updates"] == 12


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_only_prioritized_buffers_of_this_package_stamp_their_batches(cls):
    plain = cls(storage=PackedStorage(10), batch_size=4)
    prioritized = cls(storage=PackedStorage(10), sampler=ProportionalSampler(10), batch_size=4)
    for rb in (plain, prioritized):
        rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
        assert (SAMPLED_AT in rb.sample().keys()) == (rb is prioritized and cls is ReplayBuffer)


@pytest.mark.parametrize(
    "kwargs",
    [{"prefetch": 3}, {"transform": DoubleToFloat()}, {"collate_fn": lambda rows: rows}],
    ids=["prefetch", "transform", "general path"],
)
@pytest.mark.parametrize("lanes", [0, 3])
def test_it_holds_however_the_batch_came(kwargs, lanes):
    buffer = Numbered(lanes, **kwargs)
    buffer.write(10)
    for _ in range(20):
        batch = buffer.rb.sample()
        assert batch[SAMPLED_AT].shape == (12,)
        buffer.write(3)
        buffer.check_update(batch)
    assert buffer.rb.health()["stale_updates"] > 0


def test_buffers_over_one_storage_know_of_each_others_writes():
    buffer = Numbered()
    other = ReplayBuffer(storage=buffer.rb.storage, sampler=ProportionalSampler(CAPACITY), batch_size=12)
    buffer.write(CAPACITY)
    batch = other.sample()
    buffer.write(CAPACITY)
    batch["td_error"] = torch.full((12,), ERROR)
    other.update_tensordict_priority(batch)
    assert (other.sampler.priority(torch.arange(CAPACITY)) == 1.0).all()
    assert (other.health()["stale_updates"], buffer.rb.health()["stale_updates"]) == (12, 0)


def test_times_of_rows_that_were_saved_elsewhere_go_to_where_the_rows_are():
    clock, other = WriteClock(), WriteClock()
    clock.advance(0, 4, torch.Size([4]))
    clock.note(torch.tensor([2]), 1, torch.Size([4]))
    saved = clock.state_dict()
    assert saved["written"].tolist() == [1, 2, 5, 4]
    other.load_state_dict(saved, 4, 3, torch.device("meta"))
    stamp = torch.full((4,), 4, device="meta")
    kept, _ = other.skip_rewritten(torch.arange(4, device="meta"), stamp, torch.Size([4]))
    assert kept.device.type == "meta"
    again = WriteClock()
    again.load_state_dict(saved, 4, 3, torch.device("cpu"))
    saved["written"].zero_()
    kept, count = again.skip_rewritten(torch.arange(4), torch.full((4,), 4), torch.Size([4]))
    assert (kept.tolist(), count) == ([0, 1, -1, 3], 1)


@pytest.mark.parametrize("start", [2**31 - 5, 2**32 - 5, 2**63 - 40])
def test_differences_stay_right_where_the_clock_passes_a_limit(start):
    """After a write out of order; for writes in order, ``tests/storages/test_counters.py``."""
    buffer = Numbered()
    clock = buffer.rb.storage.clock
    clock.numbers[0] = start
    buffer.write(20)
    buffer.rb[torch.tensor([3])] = buffer.rows(1)
    for _ in range(12):
        batch = buffer.rb.sample()
        buffer.write(9)
        buffer.check_update(batch)
    assert buffer.rb.health()["stale_updates"] > 0
    assert (clock.now > start) == (start < 2**62)


def test_a_ring_takes_clock_memory_only_after_a_write_out_of_order():
    buffer = Numbered()
    for count in (20, 7, 31, 1):
        buffer.write(count)
    assert buffer.rb.storage.clock.state_dict()["written"] is None
    buffer.rb[torch.tensor([3])] = buffer.rows(1)
    assert buffer.rb.storage.clock.state_dict()["written"].shape == (CAPACITY,)
    buffer.rb.empty()
    assert buffer.rb.storage.clock.state_dict()["written"] is None
