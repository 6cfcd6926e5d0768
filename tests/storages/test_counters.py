"""Days of writes: every counter starts near a limit of some integer, and nothing changes when it passes it."""

from __future__ import annotations

import pytest
import torch

from rlbuf_td import PackedStorage, ProportionalSampler, RankSampler, ReplayBuffer
from rlbuf_td.storages.trajectory_index import TrajectoryIndex
from tests.storages.test_kill import rows

CAPACITY = 21


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
@pytest.mark.parametrize("limit", [2**31, 2**32, 2**33, 2**53, 2**63])
def test_a_buffer_goes_on_where_its_counters_pass_a_limit(limit, sampler, lanes, shared):
    storage = PackedStorage(CAPACITY, ndim=2 if lanes else 1)
    rb = ReplayBuffer(storage=storage, sampler=sampler(CAPACITY), batch_size=6, shared=shared)
    start, steps = limit - 40, CAPACITY // max(1, lanes)
    rb.writer._write_count = start
    rb.storage._mutation_revision_value.value = limit - 20
    rb.storage.clock.numbers[0] = limit - 30
    rb.stale_updates._numbers[0] = limit - 5
    trajectories = TrajectoryIndex.of(rb.storage)
    written = stale = 0
    while written < 120:
        batch = rb.sample() if written else None
        count = 1 + written % 4
        rb.extend(rows(written, count, lanes)) if count > 1 else rb.add(rows(written, 1, lanes)[..., 0])
        written += count
        if batch is not None:
            held = rb.storage[:]["x"].flatten()
            index = batch["index"] @ torch.tensor([lanes, 1]) if lanes else batch["index"]
            stale += int((held[index] != batch["x"]).sum())
            batch["td_error"] = torch.rand(6)
            rb.update_tensordict_priority(batch)
        kept = min(steps, written)
        stored = rb.chronological()["x"]
        assert (stored[:, 0] if lanes else stored).tolist() == list(range(written - kept, written))
        cells = torch.arange(len(rb))
        for mine, right in zip(trajectories.reach(cells), TrajectoryIndex(rb.storage).reach(cells), strict=True):
            assert torch.equal(mine, right)
        assert (rb.sampler.priority(cells) > 0).all()
    assert stale > 5
    wrapped = (limit - 5 + stale + 2**63) % 2**64 - 2**63
    assert rb.stale_updates.total() == wrapped
    assert rb.write_count == (start + written + 2**63) % 2**64 - 2**63
    assert (rb.write_count > limit) == (limit < 2**63)
