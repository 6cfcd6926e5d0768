"""Dumps into buffers of another capacity: the newest rows that fit, in the order of age, with what belongs to them."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import MinibatchSampler, PackedStorage, ReplayBuffer, RingWriter, TrajectoryIndex
from rlbuf_td.checkpoint.rows import fit
from tests.catalogue import assert_same
from tests.checkpoint.worlds import make, step, transitions


def test_the_newest_steps_are_kept_oldest_first():
    for saved, capacity in itertools.product((1, 4, 7), range(1, 12)):
        for written in range(2 * saved + 2):
            live, cursor = min(written, saved), written % saved
            ring = [written - 1 - (cursor - 1 - slot) % saved for slot in range(live)]
            found = fit(saved, capacity, live, cursor)
            taken = [ring[slot] for first, count in found.ranges for slot in range(first, first + count)]
            kept = min(live, capacity)
            assert taken == (ring if saved == capacity else list(range(written))[written - kept :])
            assert (found.steps, found.dropped) == (len(taken), live - len(taken))
            if taken:
                assert found.moves == (taken != ring)


@pytest.mark.parametrize(
    ("lanes", "written", "capacity"),
    [(0, 1, 5), (3, 3, 12), (0, 4, 19), (3, 11, 5), (0, 11, 12), (3, 11, 21), (0, 1, 50)],
)
@pytest.mark.parametrize("sampler", ["uniform", "proportional", "rank"])
def test_rows_and_priorities_move_together(sampler, lanes, written, capacity, tmp_path):
    rb = make(sampler, lanes=lanes)
    TrajectoryIndex.of(rb.storage)
    for number in range(written):
        step(rb, number, lanes)
    rb.dumps(tmp_path)
    again = make(sampler, steps=capacity, lanes=lanes)
    live = len(rb) // max(1, lanes)
    dropped = f"the {live - capacity} oldest time steps of the dump were dropped"
    with pytest.warns(UserWarning, match=dropped) if live > capacity else nullcontext():
        again.loads(tmp_path)
    kept = min(live, capacity)
    assert_same(again.chronological(), rb.last(kept))
    assert again.write_count == rb.write_count
    if sampler != "uniform":
        found = (each.sampler.priority(torch.arange(len(each))) for each in (rb, again))
        priorities = [each.view(-1, max(1, lanes)) for each in found]
        start = rb.writer._cursor if rb.full else 0
        assert torch.equal(priorities[1], priorities[0].roll(-start, 0)[-kept:])
        assert (again.sampler.priority(torch.arange(len(again), again.storage.max_size)) == -1).all()
    index, fresh = TrajectoryIndex.of(again.storage), TrajectoryIndex(again.storage)
    rows = torch.arange(len(again))
    for left, right in zip(index.reach(rows), fresh.reach(rows), strict=True):
        assert torch.equal(left, right)
    for number in range(20, 30):
        step(again, number, lanes)
    assert again.chronological()["number"].flatten()[-1] == 29 * 3 + 2


def test_a_sampler_with_room_to_spare_takes_priorities_of_a_smaller_one(tmp_path):
    rb = make("proportional")
    step(rb, 0)
    rb.dumps(tmp_path)
    again = make("proportional", steps=50, storage=PackedStorage(20))
    again.loads(tmp_path)
    assert again.sampler._max_capacity == 50
    rows = torch.arange(8)
    assert torch.equal(again.sampler.priority(rows), rb.sampler.priority(rows))
    step(again, 1)


def test_epochs_start_anew_when_rows_move(tmp_path):
    def buffer(capacity):
        return ReplayBuffer(storage=PackedStorage(capacity), sampler=MinibatchSampler(2), batch_size=2)

    rb = buffer(6)
    rb.extend(transitions(8))
    rb.sample()
    rb.dumps(tmp_path)
    again = buffer(10)
    again.loads(tmp_path)
    drawn = [again.sample()["number"] for _ in range(6)]
    assert sorted(torch.cat(drawn).tolist()) == sorted(2 * list(range(2, 8)))


def test_tracked_generations_need_the_same_capacity_except_for_the_rows_alone(tmp_path):
    def tracked(steps):
        return ReplayBuffer(storage=PackedStorage(steps), writer=RingWriter(track_generations=True), batch_size=4)

    rb, larger = tracked(5), tracked(9)
    rb.extend(TensorDict({"x": torch.arange(7)}, [7]))
    rb.dumps(tmp_path)
    larger.loads(tmp_path, rows_only=True)
    assert larger[:]["x"].tolist() == [2, 3, 4, 5, 6]
