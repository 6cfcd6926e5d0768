"""Where rows live: RAM, shared memory, files; hints to the system; what other processes see."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from rlbuf_td import PackedStorage, ProportionalSampler, ReplayBuffer, SchemaError
from rlbuf_td.kernels.huge_pages import advise_huge_pages, take_pages
from rlbuf_td.storages.allocate import ROWS_FILE, allocate_bytes
from tests.catalogue import SCHEMAS, assert_same, copied, transitions
from tests.residency import resident_of
from tests.storages.test_sharing import elsewhere

NESTED = SCHEMAS["nested"]
PLACES = ["RAM", "shared", "file"]


def stored(place: str, folder: Path, *, ndim: int = 1, steps: int = 3) -> Any:
    scratch_dir = folder / "rows" if place == "file" else None
    storage = PackedStorage(5 * ndim, ndim=ndim, shared=place == "shared", scratch_dir=scratch_dir)
    if steps:
        storage.set(range(steps), transitions(NESTED, steps, (2,) * (ndim - 1)))
    return storage


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_are_the_same_wherever_they_live(place: str, ndim: int, tmp_path: Path) -> None:
    storage = stored(place, tmp_path, ndim=ndim)
    data = transitions(NESTED, 3, (2,) * (ndim - 1))
    assert_same(storage[:], data)
    assert_same(storage[torch.tensor([2, 0])], data[torch.tensor([2, 0])])
    assert (storage.shared_rows is not None) == (place == "shared")
    assert not storage[torch.tensor([0])]["first"].is_shared()
    assert {"RAM": "cpu", "shared": "shared memory", "file": "mapped file"}[place] in repr(storage)


@pytest.mark.parametrize("auto", [True, False])
def test_rows_live_on_the_device_asked_for(device: torch.device, auto: bool) -> None:
    storage = PackedStorage(5, device="auto" if auto else device)
    storage.set(range(3), transitions(NESTED, 3, device=device))
    for place in (torch.device(storage.device), storage["first"].device, storage[[0]]["first"].device):
        assert place.type == device.type
    storage.set([3], transitions(NESTED, 1))
    assert_same(storage[3], transitions(NESTED, 1)[0])


def test_the_file_holds_capacity_times_row_bytes_and_the_rows_themselves(tmp_path: Path) -> None:
    storage = stored("file", tmp_path)
    path = tmp_path / "rows" / ROWS_FILE
    assert path.stat().st_size == storage.nbytes == 5 * storage.row_bytes
    storage.set([4, 3], transitions(NESTED, 2, seed=3))
    on_disk = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(5, -1)
    assert torch.equal(on_disk, storage.rows.matrix.view(torch.uint8))


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    stored("file", tmp_path)
    path = tmp_path / "rows" / ROWS_FILE
    before = path.read_bytes()
    second, data = stored("file", tmp_path, steps=0), transitions(NESTED, 3)
    match = "not overwritten: choose another scratch_dir, or delete the file"
    for write in (lambda: second.set(range(3), data), lambda: second.write(0, data)):
        with pytest.raises(FileExistsError, match=match):
            write()
        assert not second.initialized
    assert path.read_bytes() == before


def test_a_first_write_that_is_refused_makes_no_file(tmp_path: Path) -> None:
    storage = stored("file", tmp_path, steps=0)
    data = transitions(NESTED, 3)
    for bad, cursor in ((data.clone().set("s", "text"), range(3)), (data, range(2)), (data, range(1, 4))):
        with pytest.raises((SchemaError, IndexError)):
            storage.set(cursor, bad)
        assert not (tmp_path / "rows").exists()
    storage.set(range(3), data)
    assert (tmp_path / "rows" / ROWS_FILE).exists()


def test_a_full_disk_is_an_error_at_the_first_write_and_leaves_no_file(tmp_path, monkeypatch):
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


def test_a_file_is_mapped_where_the_disk_cannot_reserve_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    memory = allocate_bytes(1000, torch.device("cpu"), scratch_dir=tmp_path)
    memory.fill_(3)
    assert (tmp_path / ROWS_FILE).read_bytes() == b"\3" * 1000


def _change(storage: PackedStorage, done: Any) -> None:
    storage.set([1], transitions(NESTED, 1, seed=7))
    storage.set([3], transitions(NESTED, 1, seed=8))
    done.put((len(storage), storage._last_cursor_index, float(storage[torch.tensor([0])]["first"].sum())))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file", *(pytest.param(place, marks=pytest.mark.slow) for place in PLACES[:2])])
def test_what_a_spawned_process_writes_is_seen_here(place: str, tmp_path: Path) -> None:
    storage = stored(place, tmp_path)
    before, revision = copied(storage[:]), storage._mutation_revision
    done = multiprocessing.get_context("spawn").SimpleQueue()
    elsewhere(_change, storage, done, method="spawn")
    assert done.get() == (4, 3, float(before["first"][0].sum()))
    assert (len(storage), storage._last_cursor_index, storage._mutation_revision) == (4, 3, revision + 2)
    changed = [transitions(NESTED, 1, seed=seed) for seed in (7, 8)]
    assert_same(storage[:], torch.cat([before[:1], changed[0], before[2:], changed[1]]))


def _extend(rb: ReplayBuffer, seen: Any) -> None:
    rb.extend(transitions(NESTED, 3, seed=7))
    seen.put(len(rb))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this process was forked")
def test_writes_of_a_forked_process_are_its_own_until_rows_are_shared(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for folder, is_shared in ((None, False), (None, True), (tmp_path / "a", True), (tmp_path / "b", False)):
        rb = ReplayBuffer(storage=PackedStorage(20, scratch_dir=folder), sampler=ProportionalSampler(20), batch_size=4)
        rb.extend(transitions(NESTED, 3))
        rb.extend(transitions(NESTED, 2))  # planned
        if is_shared:
            rb.share()
        seen = context.Queue()
        child = context.Process(target=_extend, args=(rb, seen))
        child.start()
        child.join(180)
        refused = folder is not None and not is_shared  # the file is the same, the counters are not
        assert (child.exitcode == 0) != refused
        if not refused:
            assert seen.get(timeout=180) == 8
        expected = 8 if is_shared else 5
        assert (len(rb), rb.write_count, rb.writer._cursor, rb.storage.clock.now) == (expected,) * 4
        assert rb.storage._last_cursor_index == expected - 1
        rb.sampler.beta = 0.7  # the child's numbers
        rb.sample()


MIB = 1 << 20


@pytest.mark.parametrize(("start", "end"), [(0, 40 * MIB), (5, 40 * MIB - 3), (3 * MIB + 1, 7 * MIB), (9, 9), (9, 60)])
def test_taking_pages_changes_no_byte(start, end):
    memory = torch.arange(40 * MIB // 8).view(torch.uint8)
    before = memory.clone()
    advise_huge_pages(memory)
    take_pages(memory[start:end])
    assert torch.equal(memory, before)


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
