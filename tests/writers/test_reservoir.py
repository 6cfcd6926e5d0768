"""The reservoir: every set of rows is equally likely to be what is left.

``tests/test_lockstep.py`` compares what is left with what was written.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import ReplayBuffer, ReservoirWriter
from tests.catalogue import buffer_of
from tests.statistics import assert_follows, power
from tests.storages.test_sharing import all_elsewhere


def numbered(first: int, count: int, lanes: int = 0) -> TensorDict:
    step = torch.arange(first, first + count)
    if lanes:
        step = step.expand(lanes, count).clone()
    return TensorDict({"step": step}, step.shape)


def buffer(steps: int, lanes: int = 0, cls: Any = ReplayBuffer) -> Any:
    return buffer_of(steps, None, lanes, cls=cls, writer=ReservoirWriter())


@pytest.mark.parametrize(("steps", "parts"), [(2, (1, 2, 1, 2)), (1, (4, 1))])
def test_every_set_of_time_steps_is_equally_likely_to_be_left(steps, parts):
    writer, total, rounds = ReservoirWriter(), sum(parts), 20_000
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
    assert power(law.numpy(), rounds, bias=0.05) > 0.9
    assert_follows(list(counts.values()), law)


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_single_steps_are_added_and_refused_alike(cls):
    rb = buffer(4, cls=cls)
    index = [rb.add(TensorDict({"step": torch.tensor(step)})) for step in range(200)]
    assert index[:4] == [0, 1, 2, 3]
    assert set(index) == {-1, 0, 1, 2, 3}
    assert index.count(-1) > 150
    last = {slot: step for step, slot in enumerate(index)}
    assert rb.storage["step"].tolist() == [last[slot] for slot in range(4)]


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
    rb = buffer(4)
    writer = rb.writer
    for make in (ReplayBuffer, TensorDictReplayBuffer):
        with pytest.raises(ValueError, match=r"writer=rb\.writer"):
            make(storage=rb.storage, writer=ReservoirWriter())
    assert rb.set_writer(ReservoirWriter()) is writer
    other = ReplayBuffer(storage=rb.storage, writer=rb.writer)
    with pytest.raises(ValueError, match=r"writer=rb\.writer"):
        rb.set_writer(ReservoirWriter())
    assert rb.writer is other.writer
    rb.extend(numbered(0, 50))
    other.extend(numbered(50, 49))
    assert rb.write_count == other.write_count == 99
