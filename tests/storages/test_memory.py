"""Where rows live (RAM, shared memory, files), and that a buffer for which there is no
room is not begun."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import (
    MemoryWarning,
    PackedStorage,
    ProportionalSampler,
    RankSampler,
    ReplayBuffer,
    SchemaError,
)
from rlbuf_td.kernels.host_memory import take_pages
from rlbuf_td.storages import memory_budget as _room
from rlbuf_td.storages.memory import ROWS_FILE
from rlbuf_td.storages.memory_budget import Room
from rlbuf_td.storages.writes import Write
from tests.catalogue import SCHEMAS, assert_same, transitions
from tests.residency import resident_of

NESTED = SCHEMAS["nested"]
PLACES = ["RAM", "shared", "file"]


def stored(place: str, folder: Path, *, ndim: int = 1, steps: int = 3) -> Any:
    scratch_dir = folder / "rows" if place == "file" else None
    storage = PackedStorage(
        5 * ndim, ndim=ndim, shared=place == "shared", scratch_dir=scratch_dir
    )
    if steps:
        storage.set(range(steps), transitions(NESTED, steps, (2,) * (ndim - 1)))
    return storage


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_are_the_same_wherever_they_live(
    place: str, ndim: int, tmp_path: Path
) -> None:
    storage = stored(place, tmp_path, ndim=ndim)
    data = transitions(NESTED, 3, (2,) * (ndim - 1))
    assert_same(storage[:], data)
    assert_same(storage[torch.tensor([2, 0])], data[torch.tensor([2, 0])])
    assert (storage.shared_rows is not None) == (place == "shared")
    assert not storage[torch.tensor([0])]["first"].is_shared()
    assert {"RAM": "cpu", "shared": "shared memory", "file": "mapped file"}[
        place
    ] in repr(storage)


@pytest.mark.parametrize("auto", [True, False])
def test_rows_live_on_the_device_asked_for(device: torch.device, auto: bool) -> None:
    storage = PackedStorage(5, device="auto" if auto else device)
    storage.set(range(3), transitions(NESTED, 3, device=device))
    for place in (
        torch.device(storage.device),
        storage["first"].device,
        storage[[0]]["first"].device,
    ):
        assert place.type == device.type
    storage.set([3], transitions(NESTED, 1))
    assert_same(storage[3], transitions(NESTED, 1)[0])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_what_users_do_to_views_counts_as_an_edit(device: str) -> None:
    storage = PackedStorage(5, device=device)
    storage.set(range(3), transitions(NESTED, 3))
    views, before = storage[:], storage.revision
    storage.set([3], transitions(NESTED, 1))
    assert storage.revision == before + 1
    views["first"].fill_(1.0)
    assert storage.revision == before + 2


def test_the_file_holds_capacity_times_row_bytes_and_the_rows_themselves(
    tmp_path: Path,
) -> None:
    storage = stored("file", tmp_path)
    path = tmp_path / "rows" / ROWS_FILE
    assert path.stat().st_size == storage.nbytes == 5 * storage.row_bytes
    storage.set([4, 3], transitions(NESTED, 2, seed=3))
    on_disk = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(
        5, -1
    )
    assert torch.equal(on_disk, storage.rows.matrix.view(torch.uint8))


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    stored("file", tmp_path)
    path = tmp_path / "rows" / ROWS_FILE
    before = path.read_bytes()
    second, data = stored("file", tmp_path, steps=0), transitions(NESTED, 3)
    match = "not overwritten: choose another scratch_dir, or delete the file"
    for write in (
        lambda: second.set(range(3), data),
        lambda: second.advance(Write(data)),
    ):
        with pytest.raises(FileExistsError, match=match):
            write()
        assert not second.initialized
    assert path.read_bytes() == before


def test_a_first_write_that_is_refused_makes_no_file(tmp_path: Path) -> None:
    storage = stored("file", tmp_path, steps=0)
    data = transitions(NESTED, 3)
    for bad, cursor in (
        (data.clone().set("s", "text"), range(3)),
        (data, range(2)),
        (data, range(1, 4)),
    ):
        with pytest.raises((SchemaError, IndexError)):
            storage.set(cursor, bad)
        assert not (tmp_path / "rows").exists()
    storage.set(range(3), data)
    assert (tmp_path / "rows" / ROWS_FILE).exists()


def test_a_full_disk_is_an_error_at_the_first_write_and_leaves_no_file(
    tmp_path, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage = stored("file", tmp_path, steps=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            storage.set(range(3), transitions(NESTED, 3))
    assert not list((tmp_path / "rows").iterdir())
    assert not storage.initialized
    storage.set(range(3), transitions(NESTED, 3))
    assert_same(storage[:], transitions(NESTED, 3))


MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes pages ahead")
def test_pages_that_were_taken_are_resident():
    memory = torch.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=torch.uint8)
    assert resident_of(memory) == 0
    take_pages(memory[: 33 * MIB])
    taken = resident_of(memory)
    if taken == 0:
        pytest.skip("this system does not know MADV_POPULATE_WRITE")
    assert 33 * MIB <= taken <= 35 * MIB  # a huge page at the end may be whole
    assert not memory.any()


def test_memory_is_read_where_the_system_tells_it() -> None:
    room = _room.room_for(torch.device("cpu"))
    if sys.platform == "linux":
        assert 1 << 20 < (room.free or 0) <= (room.total or 0) < 1 << 50
    assert _room.room_for(torch.device("cpu"), Path("/")).free


def step(n: int = 2) -> TensorDict:
    pixels = torch.zeros(n, 3, 64, 64, dtype=torch.uint8)
    return TensorDict(
        {"pixels": pixels, "next": {"done": torch.zeros(n, 1, dtype=torch.bool)}}, [n]
    )


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _room, "room_for", lambda device, _=None: Room(device.type, 10 << 20, 20 << 20)
    )


@pytest.mark.usefixtures("crowded")
def test_a_buffer_that_will_not_fit_warns_once_with_numbers_and_remedy() -> None:
    rb = ReplayBuffer(storage=PackedStorage(1_000))
    words = r"1,000 rows of 12,\d+ bytes take 11.\d MiB, .* Take a smaller max_size, or scratch_dir=.*'pixels', 12,288"
    with pytest.warns(MemoryWarning, match=words) as caught:
        rb.extend(step())
    assert len(caught) == 1
    rb.extend(step(600))  # a warning would be an error
    rb.add(step()[0])
    assert len(rb) == 603


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        (
            {"max_size": 2_000},
            MemoryError,
            "2,000 rows of .* take 23.* in all.*scratch_dir",
        ),
        (
            {"max_size": 2_000, "shared": True},
            MemoryError,
            "2,000 rows of .* take 23.* in all.*scratch_dir",
        ),
        (
            {"max_size": 1_000, "scratch_dir": "rows"},
            OSError,
            "1,000 rows of .* another scratch_dir",
        ),
    ],
)
def test_rows_that_cannot_be_had_are_refused_and_nothing_is_written(
    settings, kind, words, tmp_path
):
    if "scratch_dir" in settings:
        settings = settings | {"scratch_dir": tmp_path / "rows"}
    storage = PackedStorage(**settings)
    with pytest.raises(kind, match=words):
        storage.set(range(2), step())
    assert (len(storage), storage.initialized, storage.layout) == (0, False, None)
    assert not list(tmp_path.iterdir())


def test_written_rows_that_do_not_fit_into_memory_twice_are_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rb, fewer = (ReplayBuffer(storage=PackedStorage(900)) for _ in range(2))
    rb.extend(step(900))
    fewer.extend(step(2))
    monkeypatch.setattr(
        _room, "room_for", lambda device, _=None: Room(device.type, 5 << 20, 10 << 20)
    )
    with pytest.raises(
        MemoryError,
        match=r"A copy of the written rows .* 10.\d MiB, .*Share the rows before",
    ):
        rb.share()
    assert rb.storage.shared_rows is None
    rb.extend(step(900))
    assert (fewer.share()[:] == step(2)).all()  # only written rows are copied


def test_small_shared_file_systems_limit_priorities_but_not_rows(monkeypatch):
    usage = type("", (), {"free": 1 << 20, "total": 1 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    rb = ReplayBuffer.from_schema(step()[0], 200, shared=True)  # 2.4 MiB
    rb.extend(step(200))
    prioritized = ReplayBuffer(
        storage=PackedStorage(100), sampler=ProportionalSampler(200_000)
    )
    prioritized.extend(step())
    words = r"Priorities and trajectories of a shared buffer take 1.9 MiB, .* 1.0 MiB of disk ./dev/shm. .*--shm-size"
    with pytest.raises(OSError, match=words):
        prioritized.share()
    assert prioritized.storage.shared_rows is None
    assert len(prioritized.sample(4)) == 4


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("sampler", [ProportionalSampler, RankSampler])
def test_priorities_that_cannot_be_had_are_refused(sampler: Any) -> None:
    with pytest.raises(
        MemoryError,
        match=r"Priorities of 4,000,000 rows take (37|7\d).* free .*max_capacity",
    ):
        sampler(4_000_000)
    assert sampler(100_000)._max_capacity == 100_000
