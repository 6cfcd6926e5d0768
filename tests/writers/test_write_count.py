"""``write_count`` counts rows, however they were written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    PackedStorage,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    RolloutWriter,
)
from tests.backends import forced


def steps(*size: int) -> TensorDict:
    flag = torch.zeros(*size, 1, dtype=torch.bool)
    following = {"reward": flag.float(), "done": flag, "state_value": flag.float()}
    return TensorDict({"state_value": flag.float(), "next": following}, size)


def add(rb: ReplayBuffer) -> None:
    rb.add(steps(4))


def extend(rb: ReplayBuffer) -> None:
    rb.extend(steps(4, 1))


def extend_lanes(rb: ReplayBuffer) -> None:
    rb.extend(steps(4), lanes=torch.arange(4))


def one_lane_after_the_other(rb: ReplayBuffer) -> None:
    for lane in range(4):
        rb.lane(lane).add(steps())


def write_at(rb: ReplayBuffer) -> None:
    rb.writer.write_at(torch.tensor([0]), steps(1, 4))


WAYS: list[tuple[Callable[[], Any], Callable[[ReplayBuffer], None]]] = [
    *((RingWriter, write) for write in (add, extend, extend_lanes, write_at)),
    (RingWriter, one_lane_after_the_other),
    *((RolloutWriter, write) for write in (add, extend)),
    *((ReservoirWriter, write) for write in (add, extend)),
]


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize(("writer", "write"), WAYS)
def test_the_same_rows_count_the_same_however_they_are_written(writer, write, backend):
    with forced(backend):
        storage = PackedStorage(40, ndim=2, lanes=4)
        rb = ReplayBuffer(storage=storage, writer=writer())
        rb.extend(steps(4, 2))
        assert rb.write_count == rb.stats()["write_count"] == 8
        write(rb)
    assert rb.write_count == rb.stats()["write_count"] == 12


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_whole_steps_after_lanes_of_unlike_lengths_count_the_same(backend):
    with forced(backend):
        rb = ReplayBuffer(storage=PackedStorage(40, ndim=2, lanes=4))
        rb.extend(steps(3), lanes=1)
        rb.extend(steps(4, 2))
    assert rb.write_count == len(rb) == 11


def test_a_dump_and_a_reservoir_of_lanes_keep_the_count(tmp_path):
    made = (
        ReplayBuffer(storage=PackedStorage(12, ndim=2), writer=ReservoirWriter())
        for _ in range(2)
    )
    rb, again = made
    for _ in range(20):
        rb.extend(steps(4, 5))
    assert (rb.write_count, len(rb)) == (400, 12)
    rb.dumps(tmp_path)
    again.loads(tmp_path)
    assert again.write_count == 400
