"""Rows that share observations: what is shared, what it saves, and that they are the
rows of a plain storage."""

from __future__ import annotations

import errno
import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ReplayBuffer, SchemaError, UniformSampler, plan
from rlbuf_td.storages.rows.dedup import DedupRows
from tests.catalogue import assert_same
from tests.model import World


def pooled(storage: PackedStorage) -> DedupRows:
    rows = storage.rows
    assert isinstance(rows, DedupRows)
    return rows


def check_entries(storage: PackedStorage) -> None:
    if isinstance(storage.rows, DedupRows):
        storage.rows.entries.check(storage.ring.serials)


def live_entries(storage: PackedStorage) -> list[int]:
    """Return the number of entries to which the rows of each group refer."""
    entries, written = pooled(storage).entries, len(storage)
    return [
        len(entries.names(g)[:written].unique()) for g in range(len(entries.groups))
    ]


def chain(count: int, width: int = 8, length: int | None = None) -> TensorDict:
    """Return rows whose observations follow each other, but for every ``length``-th."""
    seen = torch.rand(count + 1, width)
    following = seen[1:].clone()
    if length is not None:
        following[length - 1 :: length] = torch.rand(
            len(following[length - 1 :: length]), width
        )
    return TensorDict(
        {"observation": seen[:-1].clone(), "next": {"observation": following}}, [count]
    )


def test_rows_of_one_trajectory_take_one_observation_each() -> None:
    storage = PackedStorage(100, share_next=True)
    storage.set(range(100), chain(100))
    assert live_entries(storage) == [101]
    # lanes take 16 entries of this size at once
    assert storage.nbytes == 100 * 8 + 112 * 32
    assert storage.saved_bytes == {("observation",): 200 * 32 - 112 * 32 - 100 * 8}
    # the end of a trajectory costs one observation
    storage.set(range(100), chain(100, length=20))
    assert live_entries(storage) == [105]


def test_lanes_share_within_themselves() -> None:
    data = torch.stack([chain(50), chain(50)], 1)
    storage = PackedStorage(100, ndim=2, share_next=True)
    storage.set(range(50), data)
    assert live_entries(storage) == [102]
    flat = PackedStorage(100, share_next=True)
    # lanes reshaped together: no row follows the one before it
    flat.set(range(100), data.reshape(-1))
    assert live_entries(flat) == [200]
    assert_same(flat[:], data.reshape(-1))


def test_a_ring_holds_as_much_after_each_round() -> None:
    rb = ReplayBuffer(storage=PackedStorage(100, share_next=True))
    used = []
    for seed in range(12):
        torch.manual_seed(seed)
        rb.extend(chain(70, length=10))
        used.append(rb.storage.nbytes)
    assert live_entries(rb.storage)[0] <= 112
    assert max(used[3:]) <= 100 * 8 + 32 * 130  # free entries are used again


def test_flags_stay_in_the_rows() -> None:
    flags = {"done": torch.zeros(4, 16).bool(), "terminated": torch.zeros(4, 16).bool()}
    storage = PackedStorage(10, share_next=True)
    storage.set(
        range(4),
        TensorDict(
            {"x": torch.rand(4, 4), **flags, "next": {"x": torch.rand(4, 4), **flags}},
            [4],
        ),
    )
    assert set(storage.saved_bytes) == {("x",)}


@pytest.mark.parametrize("dim", [0, -1])
def test_a_row_of_a_stack_takes_one_frame(dim: int) -> None:
    frames = torch.randint(256, (54, 5, 5), dtype=torch.uint8)
    stacks = torch.stack([frames[j : j + 51] for j in range(4)], 1 if dim == 0 else -1)
    storage = PackedStorage(50, frames={"pixels": (4, dim)})
    data = TensorDict({"pixels": stacks[:50], "next": {"pixels": stacks[1:]}}, [50])
    storage.set(range(50), data)
    assert live_entries(storage) == [54]
    assert_same(storage[:], data)
    alone = PackedStorage(50, frames={"pixels": (4, dim)})
    alone.set(range(50), data.exclude(("next", "pixels")))
    assert live_entries(alone) == [53]


def stacked(first: int, count: int) -> TensorDict:
    """Return the steps of an episode, whose first frame stands for those before it."""
    frames = torch.arange(float(first - 2), first + count + 1).clamp(min=first)
    stacks = frames.unfold(0, 3, 1)
    return TensorDict({"pixels": stacks[:-1], "next": {"pixels": stacks[1:]}}, [count])


def test_a_stack_that_repeats_its_first_frame_stores_it_once() -> None:
    storage = PackedStorage(60, share_next=True, frames={"pixels": 3})
    storage.set(range(60), torch.cat([stacked(0, 20), stacked(100, 40)]))
    assert live_entries(storage) == [21 + 41]


def test_rows_are_written_in_order_and_moved_within_the_storage() -> None:
    storage, data = PackedStorage(10, share_next=True), chain(10)
    data["action"] = torch.arange(10.0)
    # the last rows stay
    storage.set([step % 10 for step in range(20)], torch.cat([-data, data]))
    assert_same(storage[:], data)
    storage.set(range(9), storage[1:])  # a slice holds views of what rows do not share
    assert_same(storage[:], torch.cat([data[1:], data[9:]]))
    check_entries(storage)


POOLED = partial(PackedStorage, share_next=True, frames={"frames": 3})


def filled(steps: int = 40, lanes: int = 1, fill: float = 2.5) -> ReplayBuffer:
    return World.of(UniformSampler(), steps, lanes, fill, storage=POOLED).rb


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_state_whose_rows_name_entries_out_of_order_or_of_other_lanes_is_refused(
    ndim: int,
) -> None:
    lanes = 2 * (ndim > 1)
    storage = filled(40, lanes, 0.5).storage
    state = storage.state_dict()
    names = pooled(storage).dedup.groups[0].names_at
    rows = state["rows"].view(torch.uint8)[..., names : names + 4]
    taken = rows.clone()
    rows[3:5] = taken[[4, 3]] if ndim == 1 else taken[3:5].flip(1)
    fresh = POOLED(40 * ndim, ndim=ndim)
    with pytest.raises(SchemaError, match="do not belong together"):
        fresh.load_state_dict(state)
    assert len(fresh) == 0


def test_the_plan_counts_what_is_shared() -> None:
    rb = filled(4000, 1, 1.1)
    needed = plan(rb)
    assert {*needed.saved} == {
        "'observation'",
        "'achieved_goal'",
        "'desired_goal'",
        "'frames'",
    }
    assert sum(needed.saved.values()) + needed.rows == pytest.approx(
        needed.capacity * needed.row_bytes, rel=0.01
    )
    assert "'frames' shared" in str(needed)
    data = rb[0]
    again = plan(data, 4000, share_next=True, frames={"frames": 3})
    assert (again.rows, again.saved) == (needed.rows, needed.saved)
    assert plan(data, 4000).saved == {}


def test_what_is_shared_is_shown() -> None:
    rb = filled()
    assert "saved by deduplication" in repr(rb.storage)
    assert "'observation': float32 (2,) (deduplicated)" in repr(rb.storage)


def test_a_file_takes_no_more_than_is_used(tmp_path: Path) -> None:
    storage = PackedStorage(20_000, scratch_dir=tmp_path / "once", share_next=True)
    plain = PackedStorage(20_000, scratch_dir=tmp_path / "plain")
    for one in (storage, plain):
        for start in range(0, 20_000, 1000):
            one.set(range(start, start + 1000), chain(1000, width=64))
    taken, whole = (
        os.stat(tmp_path / name / "rows.bin").st_blocks * 512
        for name in ("once", "plain")
    )
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


def test_a_full_disk_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_after(monkeypatch, 400_000)
    rb = ReplayBuffer(
        storage=PackedStorage(2000, scratch_dir=tmp_path, share_next=True)
    )
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
    check_entries(rb.storage)
    assert rb.write_count == plain.write_count


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")
def test_reading_and_checking_takes_no_disk_space() -> None:
    """On a full tmpfs, a read of space that was not reserved kills the process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rb = ReplayBuffer(
            storage=PackedStorage(20_000, scratch_dir=folder, share_next=True),
            batch_size=32,
        )
        rb.extend(chain(100, width=64))
        before = os.stat(f"{folder}/rows.bin").st_blocks
        rb.storage.check()
        rb.sample()
        rb[:]
        rb.chronological()
        rb.state_dict()
        rb.dumps(f"{folder}/dump")
        assert os.stat(f"{folder}/rows.bin").st_blocks == before
        rb.storage.close()


@pytest.mark.parametrize("width", [256, 64])  # one or two entries to a chunk
@pytest.mark.parametrize("steps", [3, 8])
def test_each_row_keeps_its_entries_where_chunks_are_small(steps, width):
    rb = ReplayBuffer(storage=PackedStorage(steps, share_next=True))
    for number in range(4 * steps):
        observation = torch.full((1, width), float(number))
        flag = torch.zeros(1, 1, dtype=torch.bool)
        after = {"observation": observation + 1, "done": flag, "terminated": flag}
        rb.extend(TensorDict({"observation": observation, "next": after}, [1]))
        rows = rb.chronological()
        kept = torch.arange(max(0, number + 1 - steps), number + 1).float()
        assert torch.equal(rows["observation"], kept[:, None].expand(-1, width))
        assert torch.equal(rows["next", "observation"], rows["observation"] + 1)
