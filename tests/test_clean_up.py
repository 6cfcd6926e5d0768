"""What is closed, replaced, refused or deleted lets go of the rows, and of nothing that
others use."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torchrl.data.replay_buffers import ReplayBuffer as TorchRLBuffer
from torchrl.data.replay_buffers import TensorDictReplayBuffer

from rlbuf_td import (
    MinibatchSampler,
    PackedStorage,
    ProportionalSampler,
    ReplayBuffer,
    ReservoirWriter,
    RingWriter,
    SchemaError,
    ShutDown,
)
from rlbuf_td.storages.memory import ROWS_FILE
from rlbuf_td.storages.torchrl_parts import generator_of
from tests.test_lockstep import forked

ROWS = 8


@tensorclass
class Row:
    x: torch.Tensor


def class_rows(count: int) -> Any:
    cls: Any = Row
    return cls(x=torch.arange(count), batch_size=[count])


SCHEMA = TensorDict({"x": torch.tensor(0)})


def rows(first: int, count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + count)}, [count])


@pytest.mark.parametrize(
    "cls",
    [TorchRLBuffer, TensorDictReplayBuffer, ReplayBuffer],
    ids=lambda cls: cls.__module__,
)
def test_a_buffer_that_is_closed_leaves_the_rows_to_others(cls: Any) -> None:
    storage = PackedStorage(ROWS)
    rb: Any = ReplayBuffer(storage=storage, sampler=ProportionalSampler(ROWS))
    other = cls(storage=storage, batch_size=2)
    rb.extend(rows(0, 4))
    state = rb.state_dict()
    rb.close()
    for call in (rb.empty, lambda: rb.load_state_dict(state)):
        with pytest.raises(ShutDown):
            call()
    assert len(other) == 4
    assert len(other.sample()) == 2


@pytest.mark.parametrize("call", ["empty", "load_state_dict", "loads"])
def test_a_buffer_that_is_shut_down_keeps_its_rows(call: str, tmp_path: Path) -> None:
    rb: Any = ReplayBuffer(storage=PackedStorage(ROWS))
    rb.extend(rows(0, 4))
    rb.dumps(tmp_path)
    calls: dict[str, Callable[[], object]] = {
        "empty": rb.empty,
        "load_state_dict": lambda: rb.load_state_dict(state),
        "loads": lambda: rb.loads(tmp_path),
    }
    state = rb.state_dict()
    rb.extend(rows(4, 2))
    rb.shutdown()
    with pytest.raises(ShutDown, match="no longer sampled, written or edited"):
        calls[call]()
    assert rb.chronological()["x"].tolist() == [*range(6)]


def test_a_buffer_with_another_storage_is_told_of_its_rows_alone() -> None:
    storage = PackedStorage(ROWS)
    rb: Any = ReplayBuffer(storage=storage, sampler=ProportionalSampler(ROWS))
    other: Any = ReplayBuffer(storage=storage)
    rb.extend(rows(0, 4))
    rb.set_storage(PackedStorage(ROWS))
    rb.extend(rows(0, 2))
    other.extend(rows(4, 4))
    other.empty()
    assert rb.sampler.priority(torch.arange(4)).tolist() == [1, 1, -1, -1]


def test_lanes_that_a_key_names_are_there_after_any_change() -> None:
    rb: Any = ReplayBuffer(storage=PackedStorage(ROWS, ndim=2, lanes=2), lane_key="env")
    for change in (
        lambda: rb.set_storage(PackedStorage(ROWS)),
        lambda: rb.set_writer(ReservoirWriter()),
    ):
        with pytest.raises(TypeError, match="lane_key= needs a"):
            change()
    rb.extend(rows(0, 3).set("env", torch.tensor([0, 1, 1])))
    assert len(rb) == 3


@pytest.mark.parametrize("sampler", [None, ProportionalSampler(ROWS, 0.6, 0.4)])
def test_a_buffer_that_is_refused_lets_go_of_its_folder(
    sampler: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"scratch_dir": tmp_path, "reopen": True}
    with pytest.raises((TypeError, ValueError)) as error:
        ReplayBuffer.from_schema(
            SCHEMA, ROWS, **options, sampler=sampler, no_such_option=1
        )
    rb = ReplayBuffer.from_schema(SCHEMA, ROWS, **options, sampler=sampler)
    assert error.tb is not None  # keeps the refused buffer alive
    rb.extend(rows(0, 2))


def test_a_sampler_that_is_refused_keeps_its_generator() -> None:
    rb: Any = ReplayBuffer(
        storage=PackedStorage(ROWS),
        batch_size=2,
        prefetch=2,
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(rows(0, 4))
    sampler = MinibatchSampler()
    with pytest.raises(ValueError, match="use prefetch=0"):
        rb.set_sampler(sampler)
    assert generator_of(sampler) is None
    assert generator_of(rb.sampler) is generator_of(rb)
    assert len(rb.sample()) == 2


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_file_is_cleaned_up_by_the_storage_that_made_it(
    is_closed: bool, tmp_path: Path
) -> None:
    rb: Any = ReplayBuffer(
        storage=PackedStorage(ROWS, scratch_dir=tmp_path, auto_cleanup=True)
    )
    rb.extend(rows(0, 2))
    if is_closed:
        rb.close()
        assert not tmp_path.exists()
    second: Any = ReplayBuffer(
        storage=PackedStorage(ROWS, scratch_dir=tmp_path, existsok=True)
    )
    second.extend(rows(0, 2))
    del rb
    gc.collect()
    assert (tmp_path / ROWS_FILE).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("call", ["empty", "load_state_dict"])
def test_batches_drawn_ahead_are_dropped_when_a_process_replaces_the_rows(
    call: str,
) -> None:
    rb: Any = ReplayBuffer(
        storage=PackedStorage(ROWS, shared=True),
        batch_size=2,
        prefetch=3,
        transform=lambda batch: batch,
    )
    rb.extend(rows(50, 2))
    state = rb.state_dict()
    rb.empty()
    rb.extend(rows(0, 5))
    rb.sample()

    def replace() -> None:
        rb.empty() if call == "empty" else rb.load_state_dict(state)
        rb.extend(rows(100, 2))

    assert forked(replace) == 0
    seen = {x for _ in range(20) for x in rb.sample()["x"].tolist()}
    assert seen == ({100, 101} if call == "empty" else {50, 51, 100, 101})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("is_reserved", [False, True])
def test_rows_have_one_class_in_all_processes(is_reserved: bool) -> None:
    first = rows(0, 2)
    if is_reserved:
        rb: Any = ReplayBuffer.from_schema(SCHEMA, ROWS, shared=True, batch_size=2)
        rb.extend(first)
        other = class_rows(2)
    else:
        rb = ReplayBuffer(storage=PackedStorage(ROWS, shared=True), batch_size=2)
        rb.extend(class_rows(2))
        other = first
    kind = type(rb.sample())
    alone: Any = ReplayBuffer(storage=PackedStorage(ROWS))
    alone.extend(other)

    def replace() -> None:
        rb.empty()
        with pytest.raises(SchemaError, match="of another class"):
            rb.load_state_dict(alone.state_dict())
        if is_reserved:
            with pytest.raises(SchemaError, match="are read as TensorDict"):
                rb.extend(other)
        rb.extend(first)  # TensorDicts fit all classes

    assert forked(replace) == 0
    assert type(rb.sample()) is kind


def test_a_buffer_that_is_deleted_is_not_kept_by_the_writes_of_others() -> None:
    storage = PackedStorage(ROWS)
    first: Any = ReplayBuffer(storage=storage)
    second: Any = ReplayBuffer(storage=storage, sampler=ProportionalSampler(ROWS))
    first.extend(rows(0, 2))
    priorities = weakref.ref(second.sampler.priorities)
    del second
    first.extend(rows(2, 2))
    gc.collect()
    assert priorities() is None
    assert len(first) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("call", ["close", "delete"])
def test_a_forked_process_leaves_the_file_of_its_parent(
    call: str, tmp_path: Path
) -> None:
    storage = PackedStorage(ROWS, scratch_dir=tmp_path, auto_cleanup=True)
    buffers: list[Any] = [ReplayBuffer(storage=storage)]
    del storage
    buffers[0].extend(rows(0, 2))

    def let_go() -> None:
        if call == "close":
            buffers[0].close()
        buffers.clear()
        gc.collect()

    assert forked(let_go) == 0
    assert (tmp_path / ROWS_FILE).exists()
    assert buffers[0].chronological()["x"].tolist() == [0, 1]


#: Options of a storage, by what a copy of its buffer must not use or change.
COPIED: dict[str, dict[str, Any]] = {
    "rows": {},
    "shared rows": {"shared": True},
    "a file": {"scratch_dir": True},
    "a file that is cleaned up": {"scratch_dir": True, "auto_cleanup": True},
    "a reopened file": {"scratch_dir": True, "reopen": True},
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "pickle": lambda rb: pickle.loads(pickle.dumps(rb)),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", COPIED)
def test_a_copy_is_a_buffer_of_its_own(kind: str, way: str, tmp_path: Path) -> None:
    options = dict(COPIED[kind])
    if "scratch_dir" in options:
        options["scratch_dir"] = tmp_path
    storage = PackedStorage(ROWS, **options)
    rb: Any = ReplayBuffer(storage=storage, sampler=ProportionalSampler(ROWS))
    rb.extend(rows(0, 4))
    other = COPIES[way](rb)
    if not storage.shared:
        other.set_sampler(ProportionalSampler(ROWS))
        other.set_writer(RingWriter())
    other.extend(rows(4, 2))
    other.update_priority(torch.arange(6), 9.0)
    assert other.chronological()["x"].tolist() == [*range(6)]
    if not storage.shared:
        other.set_storage(PackedStorage(ROWS)).close()
    other.close()
    assert rb.chronological()["x"].tolist() == [*range(4)]
    assert rb.sampler.priority(torch.arange(4)).tolist() == [1.0] * 4
    rb.extend(rows(4, 2))
    assert (tmp_path / ROWS_FILE).exists() == ("scratch_dir" in options)
