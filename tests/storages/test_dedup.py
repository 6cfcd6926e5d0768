"""Rows that share observations: what is shared, what it saves, and that they are the
rows of a plain storage."""

from __future__ import annotations

import errno
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlbuf_td import PackedStorage, ReplayBuffer, SchemaError, plan
from rlbuf_td.storages.rows.dedup import DedupRows
from tests.catalogue import assert_same

FRAMES = 3


class Lanes:
    """Environments whose observations follow each other, but for breaks that nothing
    announces.

    Values are of a small alphabet, so that what does not follow is sometimes the same
    all the same.
    """

    def __init__(self, lanes: int, seed: int, alphabet: int = 3) -> None:
        self.lanes, self.alphabet = lanes, alphabet
        self.generator = torch.Generator().manual_seed(seed)
        self.state = self._new()

    def _draw(self, *shape: int, high: int | None = None) -> torch.Tensor:
        return torch.randint(
            high or self.alphabet, (self.lanes, *shape), generator=self.generator
        )

    def _new(self) -> dict[Any, torch.Tensor]:
        frame = self._draw(2, 2).to(torch.uint8)
        stack = frame[:, None].expand(-1, FRAMES, -1, -1).clone()
        goal = self._draw(2).double()
        goal[goal == 0] = float("nan")  # the same bytes, though not equal
        position = self._draw(3).float()
        position[position == 1] = -0.0  # equal to 0.0, though other bytes
        return {
            "observation": position,
            ("agent", "goal"): goal,
            "clock": self._draw(high=999),
            "pixels": stack,
        }

    def step(self, broken: torch.Tensor | bool = False) -> TensorDict:
        """Return one time step, ``[lanes]``, after which the lanes of ``broken`` begin
        anew."""
        now, after = self.state, self._new()
        after["pixels"] = torch.cat([now["pixels"][:, 1:], after["pixels"][:, -1:]], 1)
        after["agent", "goal"] = now["agent", "goal"]
        where = torch.as_tensor(broken).expand(self.lanes)
        reset = self._new()
        self.state = {
            key: _where(where, reset[key], value) for key, value in after.items()
        }
        self.state["clock"] = self._draw(high=999)  # a key that does not repeat
        data = TensorDict({"action": self._draw(2, high=99).float()}, [self.lanes])
        for key, value in now.items():
            data.set(key, value)
        for key, value in after.items():
            data.set(("next", *([key] if isinstance(key, str) else key)), value)
        data["next", "done"] = where[:, None] & (self._draw(1, high=2) == 1)
        return data

    def steps(self, count: int, often: float) -> TensorDict:
        chance = torch.rand(count, self.lanes, generator=self.generator) < often
        return torch.stack([self.step(broken) for broken in chance]).contiguous()


def _where(mask: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.view(-1, *[1] * (left.ndim - 1)), left, right)


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


def test_a_stack_that_repeats_its_first_frame_stores_it_once() -> None:
    world = Lanes(1, 0, alphabet=200)
    storage = PackedStorage(60, share_next=True, frames={"pixels": FRAMES})
    storage.set(
        range(60),
        torch.cat([world.steps(19, 0.0), world.steps(1, 2.0), world.steps(40, 0.0)])[
            :, 0
        ],
    )
    assert live_entries(storage)[0] == 62


def test_rows_are_written_in_order_and_moved_within_the_storage() -> None:
    storage, data = PackedStorage(10, share_next=True), chain(10)
    data["action"] = torch.arange(10.0)
    # the last rows stay
    storage.set([step % 10 for step in range(20)], torch.cat([-data, data]))
    assert_same(storage[:], data)
    storage.set(range(9), storage[1:])  # a slice holds views of what rows do not share
    assert_same(storage[:], torch.cat([data[1:], data[9:]]))
    check_entries(storage)


@pytest.mark.parametrize("written", range(10, 30))
def test_a_load_into_shared_rows_keeps_old_and_new_observations_apart(
    written: int,
) -> None:
    def fresh(count: int) -> TensorDict:
        seen = torch.arange(8.0 * count).view(count, 2, 4)
        return TensorDict(
            {"observation": seen, "next": {"observation": -seen}}, [count, 2]
        )

    shared = PackedStorage(10, ndim=2, shared=True, share_next=["observation"])
    saved = PackedStorage(10, ndim=2, share_next=["observation"])
    for step in fresh(written):
        shared.set(shared.ring.cursor, step)
    saved.set(range(5), fresh(5) + 1_000)
    shared.load_state_dict(saved.state_dict())
    assert_same(shared[:], saved[:])
    check_entries(shared)


POOLED = partial(PackedStorage, share_next=True, frames={"pixels": FRAMES})
KINDS: dict[str, Any] = {
    "plain": PackedStorage,
    "once": partial(PackedStorage, share_next=True),
    "frames": partial(PackedStorage, frames={"pixels": FRAMES}),
    "both": POOLED,
}


def filled(
    make: Any, capacity: int = 40, steps: int = 100, ndim: int = 1, **kwargs: Any
) -> ReplayBuffer:
    lanes = 2 if ndim > 1 else 1
    rb = ReplayBuffer(
        storage=make(capacity * lanes, ndim=ndim), batch_size=16, **kwargs
    )
    world = Lanes(lanes, 0)
    while steps > 0:
        data = world.steps(min(7, steps), 0.2)
        rb.extend(data.transpose(0, 1).contiguous() if ndim > 1 else data[:, 0])
        steps -= 7
    return rb


@pytest.mark.parametrize(
    ("kind", "steps", "ndim"), [("once", 100, 1), ("frames", 100, 1), ("both", 20, 2)]
)
def test_a_dump_goes_to_rows_of_the_same_kind(
    kind, steps, ndim, tmp_path: Path
) -> None:
    original = filled(KINDS[kind], steps=steps, ndim=ndim)
    original.dumps(tmp_path)
    fresh = ReplayBuffer(
        storage=KINDS[kind](40 * (1 + (ndim > 1)), ndim=ndim), batch_size=16
    )
    used = filled(KINDS[kind], steps=33, ndim=ndim)
    for rb in (fresh, used):
        rb.loads(tmp_path)
        assert_same(rb[:], original[:])
        check_entries(rb.storage)
        for buffer in (original, rb):
            torch.manual_seed(3)
            buffer.extend(
                Lanes(2, 5).steps(9, 0.2)[:, 0]
                if ndim == 1
                else Lanes(2, 5).steps(9, 0.2).transpose(0, 1)
            )
        assert_same(rb[:], original[:])
        check_entries(rb.storage)
        original.loads(tmp_path)


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_state_whose_rows_name_entries_out_of_order_or_of_other_lanes_is_refused(
    ndim: int,
) -> None:
    state = filled(POOLED, steps=20, ndim=ndim).storage.state_dict()
    names = pooled(filled(POOLED, steps=20, ndim=ndim).storage).dedup.groups[0].names_at
    rows = state["rows"].view(torch.uint8)[..., names : names + 4]
    taken = rows.clone()
    rows[3:5] = taken[[4, 3]] if ndim == 1 else taken[3:5].flip(1)
    fresh = POOLED(40 * ndim, ndim=ndim)
    with pytest.raises(SchemaError, match="do not belong together"):
        fresh.load_state_dict(state)
    assert len(fresh) == 0


def test_the_plan_counts_what_is_shared() -> None:
    rb = filled(POOLED, capacity=4000, steps=4500)
    needed = plan(rb)
    assert {*needed.saved} == {
        "'observation'",
        "('agent', 'goal')",
        "'clock'",
        "'pixels'",
    }
    assert sum(needed.saved.values()) + needed.rows == pytest.approx(
        needed.capacity * needed.row_bytes, rel=0.01
    )
    assert "'pixels' shared" in str(needed)
    data = Lanes(1, 0).steps(1, 0.0)[0, 0]
    again = plan(data, 4000, share_next=True, frames={"pixels": FRAMES})
    assert (again.rows, again.saved) == (needed.rows, needed.saved)
    assert plan(data, 4000).saved == {}


def test_what_is_shared_is_shown() -> None:
    rb = filled(POOLED)
    assert "saved by deduplication" in repr(rb.storage)
    assert "'observation': float32 (3,) (deduplicated)" in repr(rb.storage)


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
