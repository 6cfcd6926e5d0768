"""The ring: the indices of rows, who is told of them, and ``write_at``.

``tests/test_lockstep.py`` compares rows and counts after every write.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import Storage, TensorDictRoundRobinWriter

from rlbuf_td import PackedStorage, ReplayBuffer, RingWriter
from tests.catalogue import assert_same, copied


def ring(storage: Storage) -> RingWriter:
    writer = RingWriter()
    writer.register_storage(storage)
    return writer


def numbered(start: int, n: int | None, lanes: tuple[int, ...] = ()) -> TensorDict:
    """Return transitions that carry their place in the order of writing."""
    shape = (*(() if n is None else (n,)), *lanes)
    x = torch.arange(start, start + torch.Size(shape).numel()).view(shape)
    return TensorDict({"x": x, "next": {"y": x.float().unsqueeze(-1)}}, shape)


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def mark_update(self, index: Any) -> None:
        self.heard.append(index)


@pytest.mark.parametrize("lanes", [(), (3,), (3, 2)])
def test_indices_and_rows_are_those_of_torchrl_writers(lanes: tuple[int, ...]) -> None:
    cells, ndim = torch.Size(lanes).numel(), 1 + len(lanes)
    ours = PackedStorage(7 * cells, ndim=ndim)
    theirs = LazyTensorStorage(7 * cells, ndim=ndim)
    writer, their_writer = ring(ours), TensorDictRoundRobinWriter()
    their_writer.register_storage(theirs)
    listener = Listener()
    ours.attach(listener)
    for j, n in enumerate([2, None, 3, 1, None, 4, 7, None]):
        data = numbered(100 * j, n, lanes)
        how = "add" if n is None else "extend"
        index = getattr(writer, how)(data)
        expected = getattr(their_writer, how)(copied(data))
        assert type(index) is type(expected)
        assert_same(torch.as_tensor(index), torch.as_tensor(expected))
        assert_same(torch.as_tensor(listener.heard.pop()), torch.as_tensor(expected))
        assert writer._cursor == their_writer._cursor
        assert_same(ours.get(slice(None)), theirs.get(slice(None)).exclude("index"))
        assert (len(ours), ours.shape) == (len(theirs), theirs.shape)
        assert ours._is_full == theirs._is_full
    assert not listener.heard


@pytest.mark.parametrize("how", ["extend", "add", "write_at"])
def test_an_index_that_comes_with_the_data_is_dropped(how: str) -> None:
    storage = PackedStorage(6)
    writer = ring(storage)
    marked = numbered(0, 3).set("index", torch.tensor([7, 8, 9]))
    for _ in range(2):
        if how == "add":
            writer.add(marked[0])
        elif how == "extend" or not len(storage):
            writer.extend(marked)
        else:
            writer.write_at(torch.arange(3), marked)
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
    assert rb.writer is writer
    assert rb.extend(numbered(0, 1)).tolist() == [2]
    assert not len(other)


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
