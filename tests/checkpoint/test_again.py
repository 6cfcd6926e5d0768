"""Repeated dumps: what has not changed is not written again, and what is there is always a full dump."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import CheckpointError, PackedStorage, ProportionalSampler, ReplayBuffer, UniformSampler
from rlbuf_td.checkpoint import files
from tests.catalogue import assert_same

ROWS = 4_000  # of 256 bytes: 1 MB


def make(scratch_dir=None, sampler="proportional", seed=0):
    return ReplayBuffer(
        storage=PackedStorage(ROWS, scratch_dir=scratch_dir),
        sampler=ProportionalSampler(ROWS) if sampler == "proportional" else UniformSampler(),
        batch_size=16,
        generator=torch.Generator().manual_seed(seed),
    )


def extend(rb, n, value):
    rb.extend(TensorDict({"x": torch.full((n, 32), float(value), dtype=torch.float64), "k": torch.rand(n)}, [n]))


def sizes(path: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_ino, file.stat().st_size) for file in path.glob("data/*.bin")}


def written(before, after):
    return sum(size for name, (number, size) in after.items() if before.get(name, (0, 0))[0] != number)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 1 << 14)


def test_only_what_has_changed_is_written(small_chunks, tmp_path):
    rb = make(sampler="uniform")
    extend(rb, ROWS, 0)
    rb.dumps(tmp_path)
    before = sizes(tmp_path)
    assert sum(size for _, size in before.values()) > ROWS * 256
    rb.dumps(tmp_path)
    after = sizes(tmp_path)
    assert written(before, after) == 0
    extend(rb, 100, 1)  # 26 kB: two or three chunks
    rb.dumps(tmp_path)
    assert 0 < written(after, sizes(tmp_path)) <= 3 * (1 << 14)
    assert len(sizes(tmp_path)) == len(after)
    rb.storage["x"][1234, 5] = 7.0  # a view: no writer knows of it
    rb.dumps(tmp_path)
    again = make(sampler="uniform")
    again.loads(tmp_path)
    assert again.storage["x"][1234, 5] == 7.0


def test_a_synced_dump_also_syncs_files_of_an_unsynced_one(small_chunks, tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    rb = make()
    extend(rb, ROWS, 0)
    rb.dumps(tmp_path, sync=False)
    assert synced == []
    files = {number for number, _ in sizes(tmp_path).values()}
    rb.dumps(tmp_path)
    kept = {number for number, _ in sizes(tmp_path).values()}
    assert files & kept  # some are taken over
    assert kept <= set(synced)
    synced.clear()
    rb.dumps(tmp_path)
    assert not files & set(synced)


def test_a_truncated_file_of_the_previous_dump_is_written_again(tmp_path):
    rb = make()
    extend(rb, ROWS, 3)
    rb.dumps(tmp_path)
    for file in (tmp_path / "data").glob("*.bin"):
        os.truncate(file, 5)
    rb.dumps(tmp_path)
    make().loads(tmp_path)


def test_a_dump_in_the_scratch_dir_survives_later_writes(tmp_path):
    rb = make(tmp_path)
    extend(rb, 3_000, 0)
    extend(rb, 1_500, 1)  # wraps
    rb.update_priority(torch.arange(ROWS), torch.rand(ROWS))
    rb.dumps(tmp_path)
    rows, state, count = rb.storage[:].clone(), rb._rng.get_state(), rb.write_count
    extend(rb, ROWS, 2)  # overwrites everything
    copy = make(seed=4)
    for each in (copy, rb):  # into another buffer, and over what the dump is of
        each.loads(tmp_path)
        assert_same(each.storage[:], rows)
        assert (each.write_count, torch.equal(each._rng.get_state(), state)) == (count, True)


def test_a_damaged_dump_leaves_the_rows_of_the_scratch_dir(tmp_path):
    rb = make(tmp_path)
    extend(rb, ROWS, 1)
    rb.dumps(tmp_path)
    file = max((tmp_path / "data").iterdir(), key=os.path.getsize)
    file.write_bytes(bytes(file.stat().st_size))
    before = (tmp_path / "rows.bin").read_bytes()
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged"):
        make(tmp_path).loads(tmp_path)
    assert (tmp_path / "rows.bin").read_bytes() == before
