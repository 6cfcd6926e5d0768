"""The reservoir: every set of rows is equally likely to be what is left, and what is
left is what was written."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, ReservoirWriter
from tests.catalogue import buffer_of
from tests.statistics import assert_follows, power
from tests.storages.test_sharing import all_elsewhere


def numbered(first: int, count: int, lanes: int = 0) -> TensorDict:
    step = torch.arange(first, first + count)
    if not lanes:
        return TensorDict({"step": step, "lane": step * 0}, [count])
    lane = torch.arange(lanes)[:, None].expand(lanes, count).clone()
    return TensorDict(
        {"step": step.expand(lanes, count).clone(), "lane": lane}, [lanes, count]
    )


def buffer(
    capacity: int,
    lanes: int = 0,
    storage: Any = PackedStorage,
    cls: Any = ReplayBuffer,
    **parts: Any,
) -> Any:
    sampler = parts.pop("sampler", None)
    return buffer_of(
        capacity,
        sampler,
        lanes,
        storage,
        cls,
        writer=ReservoirWriter(),
        batch_size=8,
        **parts,
    )


@pytest.mark.parametrize(("steps", "parts"), [(2, (1, 2, 1, 2)), (1, (4, 1))])
def test_every_set_of_time_steps_is_equally_likely_to_be_left(steps, parts):
    writer, total, rounds = ReservoirWriter(), sum(parts), 40_000
    writer._rng = torch.Generator().manual_seed(1)
    counts = dict.fromkeys(combinations(range(total), steps), 0)
    for _ in range(rounds):
        writer._empty()
        left: dict[int, int] = {}
        for count in parts:
            written, choice = writer._write_count, writer.choose(count, steps)
            left |= {written + place: written + place for place in range(choice.filled)}
            left |= {slot: written + place for place, slot in choice.kept}
            writer.numbers.set(choice.state)
        counts[tuple(sorted(left.values()))] += 1
    law = torch.full((len(counts),), 1 / len(counts), dtype=torch.float64)
    assert power(law.numpy(), rounds, bias=0.035) > 0.9
    assert_follows(list(counts.values()), law)


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("lanes", [0, 3])
def test_what_is_left_is_what_the_index_says(lanes, cls):
    """With whole time steps of all lanes, each of them left as often as any other."""
    capacity, total, rounds = 10, 60, 12
    left = torch.zeros(total)
    rb = buffer(capacity, lanes, cls=cls)
    for _ in range(rounds):
        rb.empty()
        wanted, step = torch.full((capacity, max(lanes, 1)), -1), 0
        while step < total:
            # TorchRL's buffer fails with single steps of several lanes
            count = (5, 7, 2, 6)[step % 4]
            count = total - step if total - step < count + 2 else count
            index = rb.extend(numbered(step, count, lanes))
            flat = index if not lanes else index.view(count, lanes, 2)[:, 0, 0]
            if lanes:
                assert (index.view(count, lanes, 2)[:, :, 0] == flat[:, None]).all()
            for place, slot in enumerate(flat.tolist()):
                if slot >= 0:
                    wanted[slot] = step + place
            step += count
        assert torch.equal(rb.storage[:]["step"].view(capacity, -1), wanted)
        assert (
            rb.storage[:]["lane"].view(capacity, -1) == torch.arange(max(lanes, 1))
        ).all()
        assert len(rb) == capacity * max(lanes, 1)
        left += torch.bincount(wanted[:, 0], minlength=total)
    assert left.sum() == rounds * capacity
    assert abs(float(left[:30].sum()) / (rounds * capacity) - 0.5) < 0.2
    assert rb.write_count == total * max(lanes, 1)


def test_single_steps_are_added_and_refused_alike():
    rb = buffer(4)
    index = [rb.add(TensorDict({"step": torch.tensor(step)})) for step in range(200)]
    assert index[:4] == [0, 1, 2, 3]
    assert set(index) == {-1, 0, 1, 2, 3}
    assert index.count(-1) > 150
    last = {slot: step for step, slot in enumerate(index)}
    assert rb.storage["step"].tolist() == [last[slot] for slot in range(4)]


def test_new_rows_get_their_priorities_and_old_batches_change_the_rows_that_are_there():
    rb = buffer(6, sampler=ProportionalSampler(6, eps=0.0))
    cells, serials = torch.arange(6), None
    for first in range(0, 400, 5):
        rows = numbered(first, 5)
        rows["td_error"] = rows["step"].float() + 1
        batch = rb.sample() if first else None
        rb.extend(rows)
        priority = rb.sampler.priority(torch.arange(len(rb)))
        assert torch.equal(priority, rb.storage["step"].double() + 1)
        if len(rb) < 6:
            continue
        stamps = rb.storage.stamps(cells)
        assert serials is None or torch.equal(stamps, serials)
        serials = stamps
        batch["td_error"] = torch.full((8,), 0.5)
        rb.update_tensordict_priority(batch)
        assert (rb.sampler.priority(batch["index"]) == 0.5).all()
        rb.update_priority(cells, rb.storage["step"].float() + 1)
    assert rb.health()["stale_updates"] == 0


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("brought", [0, 3])
def test_a_new_storage_begins_a_new_sample(brought, lanes):
    rb, other = buffer(5, lanes), buffer(5, lanes)
    rb.extend(numbered(0, 40, lanes))
    if brought:
        other.extend(numbered(0, brought, lanes))
    storage = other.storage
    with pytest.raises(ValueError, match=r"writer=rb\.writer"):
        rb.set_storage(storage)
    assert rb.write_count == 40 * max(1, lanes)
    del other
    rb.set_storage(storage)
    assert rb.write_count == brought * max(1, lanes)
    rb.extend(numbered(50, 2, lanes))
    assert len(rb) == rb.write_count == (brought + 2) * max(1, lanes)


def _write(rb: ReplayBuffer, seed: int) -> None:
    rb.set_rng(torch.Generator().manual_seed(seed))
    for first in range(0, 1_000, 10):
        rb.extend(numbered(10_000 * seed + first, 10))


def test_processes_fill_one_reservoir():
    rb = buffer(200)
    rb.extend(numbered(0, 10))
    rb.share()
    all_elsewhere(_write, [(rb, seed) for seed in (1, 2, 3)])
    assert (rb.write_count, len(rb)) == (3_010, 200)
    step = rb.storage["step"]
    assert len(step.unique()) == 200
    by_writer = torch.bincount(step // 10_000, minlength=4)[1:]
    assert (by_writer > 30).all()  # 66 each, with a deviation of 6.4


def test_two_writers_over_one_storage_must_be_the_same():
    storage = PackedStorage(4)
    rb = ReplayBuffer(storage=storage, writer=ReservoirWriter())
    for make in (ReplayBuffer, TensorDictReplayBuffer):
        with pytest.raises(ValueError, match=r"writer=rb\.writer"):
            make(storage=storage, writer=ReservoirWriter())
    first = rb.writer
    assert rb.set_writer(ReservoirWriter()) is first
    other = ReplayBuffer(storage=storage, writer=rb.writer)
    writer = rb.writer
    with pytest.raises(ValueError, match=r"writer=rb\.writer"):
        rb.set_writer(ReservoirWriter())
    assert rb.writer is writer
    rb.extend(TensorDict({"x": torch.arange(50)}, [50]))
    other.extend(TensorDict({"x": torch.arange(50, 99)}, [49]))
    assert rb.write_count == other.write_count == 99
