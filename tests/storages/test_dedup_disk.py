"""Rows in a file, read ahead, and on a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import HindsightSampler, PackedStorage, ReplayBuffer, UniformSampler
from rlbuf_td.kernels.huge_pages import advise
from rlbuf_td.kernels.rows import cpu
from rlbuf_td.kernels.rows.read_ahead import IS_KNOWN
from rlbuf_td.storages.allocate import find_rows
from tests.catalogue import assert_same
from tests.kernels.invariants import check_pool
from tests.model import Model, World, reward_fn
from tests.residency import resident_of
from tests.storages.observations import FRAMES, Lanes
from tests.storages.test_dedup import chain, pooled

ONCE: dict[str, Any] = {"share_next": True}
HOW = {"plain": {}, "once": ONCE, "frames": ONCE | {"frames": {"pixels": FRAMES}}}


def drop_from_memory(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDWR)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_what_is_read_ahead_is_what_is_read(how, ndim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def is_absent(*arguments: int) -> bool:
        asked.append(arguments)
        return True

    monkeypatch.setattr(cpu, "is_absent", is_absent)
    plain, mapped = PackedStorage(400, ndim=ndim), PackedStorage(400, ndim=ndim, scratch_dir=tmp_path, **HOW[how])
    data = Lanes(2, 0).steps(200, 0.1) if ndim > 1 else Lanes(1, 0).steps(300, 0.1)[:, 0]
    for storage in (plain, mapped):
        storage.set(range(len(data)), data)
    live = len(data) * (2 if ndim > 1 else 1)
    for count in (2, 7, 300):
        flat = torch.randint(live, (count,))
        steps = torch.randint(-len(data), len(data), (count,))
        assert_same(plain.gather(flat), mapped.gather(flat))
        assert_same(plain.get(steps), mapped.get(steps))
        if ndim > 1:
            index = flat // 2, flat % 2
            assert_same(plain.get(index), mapped.get(index))
    assert asked
    with pytest.raises((IndexError, RuntimeError)):
        mapped.gather(torch.tensor([0, live]))
    with pytest.raises(IndexError):
        mapped.get(torch.tensor([0, len(data)]))


@pytest.mark.skipif(not IS_KNOWN, reason="the system does not tell what is in memory")
@pytest.mark.parametrize("how", HOW)
def test_rows_that_are_not_in_memory_are_asked_for(how, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 20_000
    storage = PackedStorage(rows, scratch_dir=tmp_path, **HOW[how])
    data = Lanes(1, 0).steps(100, 0.1)[:, 0]
    for start in range(0, rows, 100):
        storage.set(range(start, start + 100), data)
    expected = storage.gather(torch.arange(100))
    asked: list[Any] = []

    def noted(*arguments: int) -> None:
        asked.append(arguments)
        advise(*arguments)

    monkeypatch.setattr("rlbuf_td.kernels.rows.read_ahead.advise", noted)
    storage.gather(torch.arange(100))
    assert not asked
    del storage
    (tmp_path / "rows.bin").rename(tmp_path / "other.bin")
    other = PackedStorage(rows, scratch_dir=tmp_path, **HOW[how])
    other.set(range(100), data)
    (tmp_path / "other.bin").replace(tmp_path / "rows.bin")
    reopened = find_rows(other, other.all_rows().layout, other.all_rows().shape, other.dedup)
    drop_from_memory(tmp_path)
    if resident_of(reopened.matrix[:100]):
        pytest.skip("this file system keeps its files in memory")
    assert_same(reopened.at_cells(torch.arange(100)), expected)
    assert asked


def test_samplers_that_read_rows_themselves_ask_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("rlbuf_td.storages.rows.ask_for_rows", lambda rows, cells: asked.append(len(cells)))
    sampler = HindsightSampler(UniformSampler(), reward_fn)
    rb = ReplayBuffer(storage=PackedStorage(40, scratch_dir=tmp_path), sampler=sampler, batch_size=16)
    World(rb, Model(40)).extend(20)
    rb.sample()
    rb.sample()
    assert asked[-1] == 16


def test_a_file_takes_no_more_than_is_used(tmp_path: Path) -> None:
    storage = PackedStorage(20_000, scratch_dir=tmp_path / "once", share_next=True)
    plain = PackedStorage(20_000, scratch_dir=tmp_path / "plain")
    for one in (storage, plain):
        for start in range(0, 20_000, 1000):
            one.set(range(start, start + 1000), chain(1000, width=64))
    taken, whole = (os.stat(tmp_path / name / "rows.bin").st_blocks * 512 for name in ("once", "plain"))
    assert taken < 0.75 * whole


def full_after(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let the disk be full once so many bytes have been taken."""
    left, take = [nbytes], os.posix_fallocate

    def fallocate(descriptor: int, start: int, count: int) -> None:
        if count > left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= count
        take(descriptor, start, count)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_after(monkeypatch, 400_000)
    rb = ReplayBuffer(storage=PackedStorage(2000, scratch_dir=tmp_path, share_next=True))
    plain = ReplayBuffer(storage=PackedStorage(2000))
    error = None
    while error is None and len(plain) < 2000:
        data = chain(100, width=64)
        try:
            rb.extend(data)
        except OSError as failed:
            error = failed
        else:
            plain.extend(data)
    assert error is not None
    assert error.errno == errno.ENOSPC
    assert 0 < len(rb) < 2000
    assert_same(rb[:], plain[:])
    check_pool(pooled(rb.storage).table)
    assert rb.write_count == plain.write_count


def test_a_full_disk_is_an_error_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, other = PackedStorage(3000, scratch_dir=tmp_path, share_next=True), PackedStorage(3000, share_next=True)
    seen = torch.rand(3001, 8)
    data = TensorDict({"observation": seen[:-1], "next": {"observation": seen[1:]}}, [3000])
    storage.set(range(9), data[:9])
    other.set(range(3000), data)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="no space"):
            storage.load_state_dict(other.state_dict())
    assert_same(storage[:], data[:9])
    storage.load_state_dict(other.state_dict())
    assert_same(storage[:], data)
