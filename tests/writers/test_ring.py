"""The ring: where rows go, what is counted, who is told, and what survives a
restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import (
    Storage,
    TensorDictRoundRobinWriter,
)

from rlbuf_td import (
    PackedStorage,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    RolloutWriter,
)
from tests.backends import forced
from tests.catalogue import assert_same, copied


def ring(storage: Storage, **settings: Any) -> RingWriter:
    writer = RingWriter(**settings)
    writer.register_storage(storage)
    return writer


def numbered(start: int, n: int | None, lanes: tuple[int, ...] = ()) -> TensorDict:
    """Return transitions that carry their place in the order of writing."""
    shape = (*(() if n is None else (n,)), *lanes)
    x = torch.arange(start, start + torch.Size(shape).numel()).view(shape)
    return TensorDict({"x": x, "next": {"y": x.float().unsqueeze(-1)}}, shape)


def write(writer: RingWriter, how: str, data: TensorDict) -> Any:
    """Write all of the data, or its first step; "write_at" needs rows that are
    there."""
    if how == "extend":
        return writer.extend(data)
    return (
        writer.add(data[0])
        if how == "add"
        else writer.write_at(torch.arange(len(data)), data)
    )


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def mark_update(self, index: Any) -> None:
        self.heard.append(index)


@pytest.mark.parametrize("ndim", [1, 2])
def test_the_newest_rows_stay_and_listeners_hear_of_the_rows_written(ndim: int) -> None:
    lanes = (3,) * (ndim - 1)
    cells = torch.Size(lanes).numel()
    storage = PackedStorage(5 * cells, ndim=ndim)
    writer = ring(storage)
    listener = Listener()
    storage.attach(listener)
    total = 0
    expected = torch.full((5, *lanes), -1)
    for n in (1, 1, None, 4, 3, 4, None, 5, 3, 6, 13, 12, None, 23):
        listener.heard.clear()
        data = numbered(total * cells, n, lanes)
        index = writer.add(data) if n is None else writer.extend(data)
        steps = [step % 5 for step in range(total, total + (n or 1))]
        for step, row in zip(steps, data["x"] if n else [data["x"]], strict=True):
            expected[step] = row
        total += len(steps)
        kept = min(total, 5)
        assert torch.equal(storage.get(slice(None))["x"], expected[:kept])
        assert torch.equal(
            storage.get(slice(None))["next", "y"][..., 0], expected[:kept].float()
        )
        assert (len(storage), writer._cursor, writer._write_count) == (
            cells * kept,
            total % 5,
            cells * total,
        )
        time = (
            torch.as_tensor(index) if ndim == 1 else torch.as_tensor(index)[::cells, 0]
        )
        assert time.flatten().tolist() == steps
        (told,) = listener.heard
        assert torch.equal(torch.as_tensor(told), torch.as_tensor(index))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_indices_and_rows_are_those_of_torchrl_writers(ndim: int) -> None:
    lanes = {1: (), 2: (3,), 3: (3, 2)}[ndim]
    cells = torch.Size(lanes).numel()
    ours, theirs = (
        PackedStorage(7 * cells, ndim=ndim),
        LazyTensorStorage(7 * cells, ndim=ndim),
    )
    writer, their_writer = ring(ours), TensorDictRoundRobinWriter()
    their_writer.register_storage(theirs)
    for j, n in enumerate([2, None, 3, 1, None, 4, 7, None]):
        data = numbered(100 * j, n, lanes)
        how = "add" if n is None else "extend"
        index, expected = (
            getattr(writer, how)(data),
            getattr(their_writer, how)(copied(data)),
        )
        assert type(index) is type(expected)
        assert torch.equal(torch.as_tensor(index), torch.as_tensor(expected))
        assert torch.as_tensor(index).dtype == torch.as_tensor(expected).dtype
        assert (writer._cursor, writer._write_count) == (
            their_writer._cursor,
            their_writer._write_count * cells,  # rows, not time steps
        )
        assert_same(ours.get(slice(None)), theirs.get(slice(None)).exclude("index"))
        assert (len(ours), ours.shape, ours._is_full) == (
            len(theirs),
            theirs.shape,
            theirs._is_full,
        )


@pytest.mark.parametrize("how", ["extend", "add", "write_at"])
def test_an_index_that_comes_with_the_data_is_dropped(how: str) -> None:
    storage = PackedStorage(6)
    writer = ring(storage)
    marked = numbered(0, 3).set("index", torch.tensor([7, 8, 9]))
    if how == "write_at":
        writer.extend(marked.exclude("index"))
    for _ in range(2):
        write(writer, how, marked)
    assert set(storage.get(slice(None)).keys(True, True)) == {"x", ("next", "y")}
    assert marked["index"].tolist() == [7, 8, 9]


def test_a_writer_belongs_to_one_storage() -> None:
    storage, writer = PackedStorage(4), RingWriter(compilable=True)
    rb = ReplayBuffer(storage=storage, writer=writer)
    rb.extend(numbered(0, 3))
    ReplayBuffer(storage=storage, writer=writer).extend(numbered(3, 1))
    assert (len(storage), writer._cursor) == (4, 0)
    rb.set_storage(PackedStorage(5))
    assert rb.extend(numbered(0, 2)).tolist() == [0, 1]
    other = ReplayBuffer(storage=PackedStorage(4))
    assert (rb.writer, rb.extend(numbered(0, 1)).tolist(), len(other)) == (
        writer,
        [2],
        0,
    )


def test_write_at_tells_the_index_that_was_written() -> None:
    storage = PackedStorage(5)
    writer = ring(storage)
    listener = Listener()
    writer.extend(numbered(0, 5))
    storage.attach(listener)
    index = writer.write_at(torch.tensor([3, 1]), numbered(10, 2))
    assert torch.as_tensor(index).tolist() == listener.heard[0].tolist() == [3, 1]
    assert storage["x"].tolist() == [0, 11, 2, 10, 4]
    assert (writer._cursor, writer._write_count, len(storage)) == (0, 7, 5)
    writer.write_at(4, numbered(20, None))
    assert storage["x"].tolist() == [0, 11, 2, 10, 20]


# -- ``write_count`` counts rows, however they were written


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
